"""The tokenizer: a byte-level BPE, ours of 8,192 entries or GPT-2's."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import tiktoken

from predmoe.config import TOKENIZERS, ConfigError
from predmoe.paths import cache_folder

ENDOFTEXT = "<|endoftext|>"
GPT2_SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


@dataclass(frozen=True)
class Tokenizer:
    """A byte-level BPE; any text survives encode and decode. `hash` covers its split pattern and every rank."""

    name: str
    encoding: tiktoken.Encoding
    hash: str

    @property
    def vocab_size(self) -> int:
        return self.encoding.n_vocab

    @property
    def eot(self) -> int:
        return self.encoding.eot_token

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; "<|endoftext|>" written in the text is ordinary text."""
        return self.encoding.encode_ordinary(text)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return self.encoding.encode_ordinary_batch(texts, num_threads=min(os.cpu_count() or 1, 8))

    def decode(self, ids: Sequence[int]) -> str:
        return self.encoding.decode([int(i) for i in ids])


@functools.cache
def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer `name`: "bpe8k" (8,192 entries, shipped with the package) or "gpt2" (50,257, fetched by tiktoken).

    Raises ConfigError for an unknown name, and where GPT-2's files cannot be had.
    """
    if name == "bpe8k":
        # Not by tiktoken's own loader: it keeps a copy by path, and so would miss a change of the file.
        lines = (resources.files("predmoe") / "assets" / "bpe8k.tiktoken").read_bytes().split(b"\n")
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
        encoding = tiktoken.Encoding(name, pat_str=GPT2_SPLIT, mergeable_ranks=ranks, special_tokens={ENDOFTEXT: len(ranks)})
    elif name == "gpt2":
        try:
            encoding = carried_gpt2() or tiktoken.get_encoding("gpt2")
        except OSError as error:  # requests' errors are OSErrors
            raise ConfigError(
                f"tokenizer='gpt2': its files cannot be fetched ({type(error).__name__}); connect to the network once, point "
                "TIKTOKEN_CACHE_DIR at a filled cache, or use tokenizer='bpe8k'"
            ) from None
    else:
        raise ConfigError(f"tokenizer={name!r} is unknown; choose one of {', '.join(TOKENIZERS)}")
    digest = hashlib.sha256(encoding._pat_str.encode())
    for index in range(encoding.n_vocab):
        token = encoding.decode_single_token_bytes(index)
        digest.update(b"%d:%b" % (len(token), token))
    return Tokenizer(name, encoding, digest.hexdigest()[:16])


def carried_gpt2() -> tiktoken.Encoding | None:
    """GPT-2's encoding from gpt2.tiktoken in the cache folder, where `carry.unpack` left it: the same as tiktoken's, without a network."""
    source = cache_folder() / "gpt2.tiktoken"
    if not source.is_file():
        return None
    from tiktoken_ext.openai_public import r50k_pat_str

    try:
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in source.read_bytes().splitlines())}
    except ValueError:
        raise ConfigError(f"{source} is damaged: remove it, or unpack the token file again (python scripts/prepare_corpus.py unpack FILE)") from None
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={ENDOFTEXT: len(ranks)})
