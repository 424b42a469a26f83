"""Rebuild predmoe/assets/bpe8k.tiktoken bit for bit: python scripts/build_tokenizer.py [OUT]

A byte-level BPE with GPT-2's split pattern, trained on a fixed sample of the offline corpus: a quarter of the documents
of the pinned packages, and those modules of the standard library that no 3.11 release is expected to touch again, so
that the sample does not depend on the patch version of Python. It says so if the sample is not the one of the asset.
"""

from __future__ import annotations

import base64
import hashlib
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from predmoe.corpora import Offline, contents_key

ASSET = Path(__file__).parent.parent / "predmoe" / "assets" / "bpe8k.tiktoken"
SAMPLE = "76cf6fda1d5b37f5f512986107462dc78f5db8b99d4c5321ffe4a8d9422c9341"
RANKS = 8191  # <|endoftext|> is the last of the 8,192 entries

# Equal in 3.11.2 (Debian's, patched) and 3.11.7, and mostly deprecated or finished: no release has reason to touch them.
MODULES = """
_pydecimal.py pickletools.py optparse.py nntplib.py aifc.py cgi.py cgitb.py smtpd.py telnetlib.py asynchat.py asyncore.py
imp.py xdrlib.py pipes.py sunau.py sndhdr.py chunk.py mailcap.py imghdr.py fractions.py tokenize.py _strptime.py pprint.py
modulefinder.py heapq.py pstats.py cmd.py csv.py shlex.py string.py textwrap.py fnmatch.py copy.py bisect.py sched.py
_collections_abc.py numbers.py queue.py operator.py stat.py struct.py symtable.py weakref.py _weakrefset.py xmlrpc/client.py
xmlrpc/server.py multiprocessing/pool.py multiprocessing/queues.py multiprocessing/context.py
lib2to3/pytree.py lib2to3/refactor.py lib2to3/patcomp.py lib2to3/fixer_util.py lib2to3/pgen2/tokenize.py
lib2to3/pgen2/pgen.py distutils/dist.py distutils/ccompiler.py distutils/cmd.py distutils/core.py distutils/msvccompiler.py
distutils/fancy_getopt.py distutils/util.py json/decoder.py json/encoder.py json/__init__.py wsgiref/handlers.py
wsgiref/validate.py xml/dom/pulldom.py xml/sax/saxutils.py xml/sax/handler.py unittest/suite.py
unittest/result.py unittest/main.py concurrent/futures/_base.py
curses/textpad.py tomllib/_parser.py
""".split()


def sample() -> list:
    """The training documents, in the corpus's order."""

    def chosen(document) -> bool:
        if document.domain == "code":
            return document.name in MODULES
        return hashlib.sha256(f"{document.domain}\0{document.name}".encode()).digest()[0] % 4 == 0

    return [document for document in Offline().documents() if chosen(document)]


def train(texts: list[str]) -> Tokenizer:
    """GPT-2's pre-tokenisation, byte-level merges; the trainer breaks ties by pair, so threads do not matter."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=RANKS, initial_alphabet=alphabet, show_progress=False, special_tokens=[])
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def ranks(tokenizer: Tokenizer) -> list[bytes]:
    """The tokenizer's entries as bytes, by id: GPT-2 writes each byte as a printable character, which is undone here."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    assert [index for _, index in vocabulary] == list(range(RANKS))
    return [bytes(byte_of[character] for character in entry) for entry, _ in vocabulary]


def rank_file(entries: list[bytes]) -> bytes:
    """tiktoken's format: a line per entry, base64 of its bytes and its rank."""
    return b"".join(base64.b64encode(entry) + b" %d\n" % rank for rank, entry in enumerate(entries))


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ASSET
    documents = sample()
    key = contents_key(iter(documents))
    print(f"{len(documents)} documents, {sum(len(d.text.encode()) for d in documents) / 1e6:.1f} MB, sha256 {key}")
    if key != SAMPLE:
        print(f"this is not the sample of the committed file ({SAMPLE}): the result will differ", file=sys.stderr)
    out.write_bytes(rank_file(ranks(train([document.text for document in documents]))))
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
