"""From text to tokens: the tokenizer, memory-mapped token files, the shuffled stream and the sets never trained on.

A corpus is encoded once into a cache folder ($PREDMOE_CACHE, else ~/.cache/predmoe), addressed by corpus and tokenizer.
Documents lie there in a fixed pseudo-random order, each followed by end-of-text. The split is a function of that file
and of the sizes asked for: whole documents, stratified by domain, chosen by a hash of their names and by no run's seed.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import tiktoken

from predmoe.config import ConfigError, DataConfig
from predmoe.corpora import Corpus, Document, corpus, distinct

# B batch, T time, W windows of an evaluation set, S tokens of the whole file, D documents

FORMAT = 1  # of the cache folder; a change makes old folders unknown
ENDOFTEXT = "<|endoftext|>"
GPT2_SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


# -------------------------------------------------------------------------------------------------------- tokenizer


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
        raise ConfigError(f"tokenizer={name!r} is unknown; choose one of bpe8k, gpt2")
    digest = hashlib.sha256(encoding._pat_str.encode())
    for index in range(encoding.n_vocab):
        token = encoding.decode_single_token_bytes(index)
        digest.update(b"%d:%b" % (len(token), token))
    return Tokenizer(name, encoding, digest.hexdigest()[:16])


def cache_folder() -> Path:
    """$PREDMOE_CACHE, else ~/.cache/predmoe."""
    return Path(os.environ.get("PREDMOE_CACHE") or "~/.cache/predmoe").expanduser()


def carried_gpt2() -> tiktoken.Encoding | None:
    """GPT-2's encoding from gpt2.tiktoken in the cache folder, where `carry.unpack` left it: the same as tiktoken's, without a network."""
    source = cache_folder() / "gpt2.tiktoken"
    if not source.is_file():
        return None
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in source.read_bytes().splitlines())}
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={ENDOFTEXT: len(ranks)})


# ------------------------------------------------------------------------------------------------------- token files


@dataclass(frozen=True, eq=False)
class EvalSet:
    """Windows of whole held-out documents; `document` and `domain` belong to each input token.

    tokens (W, T+1) int64: inputs are [:, :-1], targets [:, 1:]. document (W, T) int32: index into the token file.
    domain (W, T) int16: index into `Tokens.domains`.
    """

    tokens: np.ndarray
    document: np.ndarray
    domain: np.ndarray


@dataclass(frozen=True, eq=False)
class Split:
    """Document indices, disjoint: `heldout` and `dev` in reading order, `train` in file order."""

    heldout: np.ndarray
    dev: np.ndarray
    train: np.ndarray


@dataclass(frozen=True, eq=False)
class Tokens:
    """An encoded corpus and its split. Document d is tokens[offsets[d] : offsets[d + 1]], its last token end-of-text.

    tokens (S,) memory-mapped uint16 or uint32; offsets (D+1,) int64; domain (D,) int16, index into `domains`;
    `hash`: of the contents and the split, for a run's provenance.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    domain: np.ndarray
    domains: tuple[str, ...]
    split: Split
    config: DataConfig
    tokenizer: Tokenizer
    folder: Path
    hash: str

    @property
    def lengths(self) -> np.ndarray:
        """(D,) int64: tokens of each document, end-of-text included."""
        return np.diff(self.offsets)

    @functools.cached_property
    def names(self) -> list[str]:
        """The documents' names, by index."""
        return json.loads((self.folder / "names.json").read_text())

    def document(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def heldout(self, context: int) -> EvalSet:
        """The held-out set in config.heldout_tokens // context windows: reported numbers come from here."""
        return self._windows("heldout_tokens", self.config.heldout_tokens, self.split.heldout, context)

    def dev(self, context: int) -> EvalSet:
        """The development set in config.dev_tokens // context windows: decisions are taken here."""
        return self._windows("dev_tokens", self.config.dev_tokens, self.split.dev, context)

    def stream(self, order_seed: int | None = None, shuffle_buffer: int | None = None) -> Stream:
        """The training documents in the order of a seed; what is None is taken from the configuration."""
        return Stream(
            self,
            self.config.order_seed if order_seed is None else order_seed,
            self.config.shuffle_buffer if shuffle_buffer is None else shuffle_buffer,
        )

    def _windows(self, name: str, wanted: int, documents: np.ndarray, context: int) -> EvalSet:
        count = wanted // context
        if not count:
            raise ConfigError(f"{name}={wanted} must be at least one context of {context} tokens")
        span = count * context
        flat = np.concatenate([self.document(d) for d in documents])[: span + 1].astype(np.int64)
        owner = np.repeat(documents, self.lengths[documents])[:span].astype(np.int32).reshape(count, context)
        return EvalSet(_overlapping(flat, context), owner, self.domain[owner])


def prepare(config: DataConfig, *, cache: Path | None = None, tokenizer: Tokenizer | None = None) -> Tokens:
    """The tokens of config.corpus under config.tokenizer, encoded now if no earlier run has, and split. `tokenizer`: the one that
    config.tokenizer names, where it is none of ours (`hf_models.HubTokenizer`).

    `cache`: folder of token files, by default $PREDMOE_CACHE or ~/.cache/predmoe. Raises ConfigError for a corpus that
    cannot be read, is empty, or is too small for the held-out and development sets.
    """
    source, tokenizer = corpus(config.corpus), tokenizer or load_tokenizer(config.tokenizer)
    folder = token_folder(source, tokenizer, cache or cache_folder())
    if not folder.is_dir():
        _encode(config, source, tokenizer, folder)
    meta = json.loads((folder / "meta.json").read_text())
    with np.load(folder / "documents.npz") as table:
        offsets, domain, lot = table["offsets"], table["domain"], table["lot"]
    tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
    if len(tokens) != offsets[-1]:  # a machine that went down may have kept the name but not the bytes
        raise ConfigError(f"token file {folder / 'tokens.bin'} has {len(tokens)} tokens instead of {offsets[-1]}; delete its folder and run again")
    split = _split(config, np.diff(offsets), domain, lot, meta["domains"])
    digest = hashlib.sha256(meta["hash"].encode())
    for part in (split.heldout, split.dev):
        digest.update(part.astype("<i8").tobytes())
    return Tokens(
        tokens=tokens, offsets=offsets, domain=domain, domains=tuple(meta["domains"]), split=split, config=config,
        tokenizer=tokenizer, folder=folder, hash=digest.hexdigest()[:16],
    )


def token_folder(source: Corpus, tokenizer: Tokenizer, cache: Path) -> Path:
    """Where the tokens of a corpus lie, by its key and the tokenizer's hash."""
    address = hashlib.sha256(f"{FORMAT} {source.key()} {tokenizer.hash}".encode()).hexdigest()[:16]
    return cache / "tokens" / f"{source.name}-{tokenizer.name}-{address}"


def _encode(config: DataConfig, source: Corpus, tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokens.bin, documents.npz, names.json and meta.json into `folder`, which appears complete or not at all."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    progress = _Progress(f"encoding {config.corpus} with {config.tokenizer}")
    names, domains, lots, encoded = [], [], [], []
    for batch in _batches(distinct(source.documents())):
        for document, ids in zip(batch, tokenizer.encode_batch([document.text for document in batch])):
            names.append(document.name)
            domains.append(document.domain)
            lots.append(hashlib.sha256(f"{document.domain}\0{document.name}".encode()).digest()[:16])
            encoded.append(np.array([*ids, tokenizer.eot], dtype=dtype))
        progress.add(len(batch), sum(len(ids) for ids in encoded[-len(batch) :]))
    progress.close()
    if not encoded:
        raise ConfigError(f"corpus={config.corpus!r} has no text: every document is empty, or there is none")
    # One half of the lot orders the file, the other draws the split, so that the two are independent.
    order = sorted(range(len(lots)), key=lots.__getitem__)
    kinds = sorted(set(domains))
    table = {
        "offsets": np.cumsum([0, *(len(encoded[i]) for i in order)]),
        "domain": np.array([kinds.index(domains[i]) for i in order], dtype=np.int16),
        "lot": np.array([int.from_bytes(lots[i][8:]) for i in order], dtype=np.uint64),
    }
    digest = hashlib.sha256(json.dumps([kinds, dtype.str]).encode())
    for column in table.values():
        digest.update(column.astype(column.dtype.newbyteorder("<")).tobytes())
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
        with open(temporary / "tokens.bin", "wb") as file:
            for i in order:
                raw = encoded[i].tobytes()
                digest.update(raw)
                file.write(raw)
        np.savez(temporary / "documents.npz", **table)
        (temporary / "names.json").write_text(json.dumps([names[i] for i in order]))
        meta = {"corpus": config.corpus, "tokenizer": config.tokenizer, "dtype": dtype.str, "domains": kinds, "hash": digest.hexdigest()}
        (temporary / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        temporary.chmod(0o755)  # mkdtemp's folders are private, a cache on a shared disk is not
        os.rename(temporary, folder)
    except OSError as error:
        if not folder.is_dir():  # else another process was first, with the same contents
            raise ConfigError(f"cannot write token files under {folder.parent}: {error.strerror}; set PREDMOE_CACHE to another folder") from None
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)


def _batches(documents: Iterator[Document], characters: int = 1 << 22) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Progress:
    """A line on stderr, at most one a second and none for work of a second."""

    def __init__(self, what: str):
        self.what, self.documents, self.tokens = what, 0, 0
        self.start = self.shown = time.monotonic()

    def add(self, documents: int, tokens: int) -> None:
        self.documents += documents
        self.tokens += tokens
        now = time.monotonic()
        if now - self.shown >= 1:
            self.shown = now
            line = f"{self.what}: {self.documents:,} documents, {self.tokens:,} tokens, {now - self.start:.0f} s"
            print(f"\r{line}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.shown > self.start:
            print(file=sys.stderr)


# ------------------------------------------------------------------------------------------------------------- split


def _split(config: DataConfig, lengths: np.ndarray, domain: np.ndarray, lot: np.ndarray, domains: list[str]) -> Split:
    """Held-out, dev and training documents: per domain a share of each set in proportion to its tokens.

    Documents are drawn in the order of their lots. One longer than a quarter of its domain's share is passed over,
    unless it is among the shortest tenth of the domain, so that no document dominates a set.
    """
    total, wanted = int(lengths.sum()), config.heldout_tokens + config.dev_tokens
    advice = "use a larger corpus, or lower heldout_tokens and dev_tokens"
    if 2 * wanted > total:
        raise ConfigError(
            f"corpus={config.corpus!r} has {total} tokens, but heldout_tokens + dev_tokens = {wanted} is more than half of them; {advice}"
        )
    chosen: dict[str, list[np.ndarray]] = {"heldout": [], "dev": []}
    for index, name in enumerate(domains):
        members = np.flatnonzero(domain == index)
        share = lengths[members].sum() / total
        free = members[np.argsort(lot[members], kind="stable")]
        if len(free) < 3:
            raise ConfigError(
                f"domain {name!r} of corpus={config.corpus!r} has {len(free)} documents, but held-out, dev and training sets need "
                "one each; split its text into more documents, or leave the domain out"
            )
        for part, size in (("heldout", config.heldout_tokens), ("dev", config.dev_tokens)):
            quota = int(np.ceil((size + 1) * share))  # one more: the last window's last target
            bound = max(quota / 4, np.quantile(lengths[members], 0.1))
            long = lengths[free] > bound
            queue = np.concatenate([free[~long], free[long][np.argsort(lengths[free[long]], kind="stable")]])
            count = int(np.searchsorted(np.cumsum(lengths[queue]), quota)) + 1
            taken = queue[:count]
            free = free[~np.isin(free, taken)]
            if count > len(queue) or not len(free):
                raise ConfigError(
                    f"domain {name!r} of corpus={config.corpus!r} has too few documents to take {quota} tokens for "
                    f"{part}_tokens={size} and keep one to train on; {advice}"
                )
            chosen[part].append(taken)
    heldout, dev = (_interleave(chosen[part], lengths) for part in ("heldout", "dev"))
    train = np.setdiff1d(np.arange(len(lengths)), np.concatenate([heldout, dev]))
    return Split(heldout, dev, train)


def _interleave(groups: list[np.ndarray], lengths: np.ndarray) -> np.ndarray:
    """The documents of all groups, each group spread evenly: every prefix has about the proportions of the whole."""
    begins = [(np.cumsum(lengths[group]) - lengths[group]) / lengths[group].sum() for group in groups]
    return np.concatenate(groups)[np.argsort(np.concatenate(begins), kind="stable")]


# ------------------------------------------------------------------------------------------------------------ stream


def buffer_shuffle(count: int, buffer: int, rng: np.random.Generator) -> np.ndarray:
    """(count,) int64: the order in which a shuffle buffer lets 0..count-1 go.

    The buffer holds the first `buffer` items; a random one leaves and the next item takes its place, until no item is
    left to come; the rest leaves in random order. So item i leaves at place i - buffer + 1 or later.
    """
    buffer = min(buffer, count)
    held = list(range(buffer))
    order = np.empty(count, dtype=np.int64)
    for place, slot in enumerate(rng.integers(0, buffer, size=count - buffer).tolist()):
        order[place] = held[slot]
        held[slot] = place + buffer
    order[count - buffer :] = rng.permutation(np.array(held, dtype=np.int64))
    return order


class Stream:
    """Training batches as a pure function of the step: a resumed run sees what an uninterrupted one would have seen.

    The stream is endless: training documents through the shuffle buffer, each with its end-of-text, one epoch after the
    other, each epoch in an order of its own drawn from (order_seed, epoch).
    """

    def __init__(self, tokens: Tokens, order_seed: int, shuffle_buffer: int):
        if order_seed < 0:
            raise ConfigError(f"order_seed={order_seed} must be at least 0")
        self.source, self.order_seed, self.shuffle_buffer = tokens, order_seed, shuffle_buffer
        self.epoch_tokens = int(tokens.lengths[tokens.split.train].sum())
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def epoch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(documents in order (D,), the stream position within the epoch at which each ends (D,))."""
        if number not in self._epochs:
            train = self.source.split.train
            rng = np.random.default_rng([self.order_seed, number])
            documents = train[buffer_shuffle(len(train), self.shuffle_buffer, rng)]
            if len(self._epochs) > 1:
                self._epochs.clear()
            self._epochs[number] = documents, np.cumsum(self.source.lengths[documents])
        return self._epochs[number]

    def read(self, start: int, count: int) -> np.ndarray:
        """(count,) int64: stream tokens start .. start+count-1."""
        out, filled = np.empty(count, dtype=np.int64), 0
        while filled < count:
            number, position = divmod(start + filled, self.epoch_tokens)
            documents, ends = self.epoch(number)
            index = int(np.searchsorted(ends, position, side="right"))
            while filled < count and index < len(documents):
                document = self.source.document(documents[index])
                piece = document[len(document) - (ends[index] - position) :][: count - filled]
                out[filled : filled + len(piece)] = piece
                filled, position, index = filled + len(piece), position + len(piece), index + 1
        return out

    def batch(self, step: int, batch_size: int, context: int, rows: slice = slice(None)) -> np.ndarray:
        """(B, T+1) int64: T inputs and, one further, T targets of each row. `rows`: which of them, for a process that computes a part.

        Row b reads on from step to step in a lane of its own, which begins at b/B of the epoch, so that a batch holds B places
        of the corpus. Rows that follow one another in the stream come from a few long documents of one or two domains, and
        the gradients of such batches made training chaotic.
        """
        starts = np.arange(batch_size)[rows] * self.epoch_tokens // batch_size + step * context
        return np.stack([self.read(int(start), context + 1) for start in starts])


def _overlapping(flat: np.ndarray, context: int) -> np.ndarray:
    """(n*T + 1,) -> (n, T+1): row i begins at i*T, so that its last token is the first of the next row."""
    return np.lib.stride_tricks.sliding_window_view(flat, context + 1)[::context].copy()
