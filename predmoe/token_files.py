"""Token files: a corpus encoded once, in a folder of the cache that is addressed by corpus and tokenizer.

    tokens.bin      the documents' tokens, one document after the other, each followed by end-of-text
    documents.npz   where each document begins, its domain, and the lot that orders the file and draws the split
    names.json      the documents' names
    meta.json       dtype, domains, the hash of the contents, and the sums of tokens.bin's blocks

The folder is a cache: what is damaged in it is noticed where it is opened, and encoded anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from predmoe.config import ConfigError, DataConfig
from predmoe.corpora import Corpus, Document, distinct
from predmoe.tokenizer import Tokenizer

# S tokens of the whole file, D documents

FORMAT = 1  # of the cache folder; a change makes old folders unknown
BLOCK = 1 << 20         # bytes that have a sum of their own
WHOLE = 256 << 20       # a file up to this size is hashed in full where it is opened (some tenths of a second), of a larger one SAMPLED blocks are summed
SAMPLED = 64


class Contents(NamedTuple):
    """What a folder of token files holds. tokens (S,) memory-mapped uint16 or uint32; offsets (D+1,) int64; domain (D,) int16, index into
    `domains`; lot (D,) uint64; `hash`: of all of it."""

    tokens: np.ndarray
    offsets: np.ndarray
    domain: np.ndarray
    lot: np.ndarray
    domains: list[str]
    hash: str


class Damaged(ValueError):
    """Token files that are not what was written; the message says what is wrong with them."""


def token_folder(source: Corpus, tokenizer: Tokenizer, cache: Path) -> Path:
    """Where the tokens of a corpus lie, by its key and the tokenizer's hash."""
    address = hashlib.sha256(f"{FORMAT} {source.key()} {tokenizer.hash}".encode()).hexdigest()[:16]
    return cache / "tokens" / f"{source.name}-{tokenizer.name}-{address}"


def contents(config: DataConfig, source: Corpus, tokenizer: Tokenizer, folder: Path) -> Contents:
    """What `folder` holds; encoded now where it is missing, and with a word on standard error where it is damaged. Raises ConfigError where it cannot be."""
    if folder.is_dir():
        try:
            return read(folder)
        except Damaged as why:
            print(f"the token files in {folder} are damaged ({why}): encoding {config.corpus} anew", file=sys.stderr, flush=True)
    _encode(config, source, tokenizer, folder)
    try:
        return read(folder)
    except Damaged as why:
        raise ConfigError(f"the token files in {folder} are damaged ({why}) though they were written just now; check the disk, or set PREDMOE_CACHE to another folder") from None


def read(folder: Path) -> Contents:
    """The token files in `folder`, checked. Raises Damaged where they are not those that were written.

    Up to WHOLE bytes all that was encoded is hashed; of a larger file the length is checked, and some blocks from begin to end.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text())
        with np.load(folder / "documents.npz") as table:   # its members have sums of their own
            offsets, domain, lot = table["offsets"], table["domain"], table["lot"]
        tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
        names = (folder / "names.json").read_bytes()
        found = Contents(tokens, offsets, domain, lot, meta["domains"], meta["hash"])
        written, sums, names_sum = int(offsets[-1]), meta.get("sums", []), meta.get("names", zlib.crc32(names))
    except PermissionError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, RecursionError, zipfile.BadZipFile) as error:
        raise Damaged((str(error).splitlines() or [type(error).__name__])[0][:200]) from None
    if len(tokens) != written:
        raise Damaged(f"tokens.bin has {len(tokens)} tokens instead of {written}")
    if zlib.crc32(names) != names_sum:
        raise Damaged("names.json is not what was written")
    if tokens.nbytes <= WHOLE:
        digest = _digest(found.domains, tokens.dtype, (offsets, domain, lot))
        digest.update(tokens)
        if digest.hexdigest() != found.hash:
            raise Damaged("their contents have another hash than when they were written")
        return found
    raw = tokens.view(np.uint8)
    for number in np.unique(np.linspace(0, len(sums) - 1, SAMPLED).astype(int)) if sums else ():   # folders of an earlier version have none
        if zlib.crc32(raw[number * BLOCK : (number + 1) * BLOCK]) != sums[number]:
            raise Damaged(f"block {number} of tokens.bin is not what was written")
    return found


def _digest(domains: list[str], dtype: np.dtype, columns) -> "hashlib._Hash":
    """The SHA-256 of what stands before the tokens in a folder's hash: domains, dtype and the table's columns."""
    digest = hashlib.sha256(json.dumps([domains, dtype.str]).encode())
    for column in columns:
        digest.update(column.astype(column.dtype.newbyteorder("<")).tobytes())
    return digest


def _encode(config: DataConfig, source: Corpus, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the token files into `folder`, which appears complete or not at all; damaged files there stay until then."""
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
    digest = _digest(kinds, dtype, table.values())
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
        meta = {"corpus": config.corpus, "tokenizer": config.tokenizer, "dtype": dtype.str, "domains": kinds, "hash": digest.hexdigest(),
                "names": zlib.crc32((temporary / "names.json").read_bytes()), "sums": _sums(temporary / "tokens.bin")}  # fmt: skip
        (temporary / "meta.json").write_text(json.dumps(meta) + "\n")
        temporary.chmod(0o755)  # mkdtemp's folders are private, a cache on a shared disk is not
        for path in (*temporary.iterdir(), temporary):   # on the disk before the name: a machine that goes down keeps both or neither
            _sync(path)
        if not sound(folder):
            with contextlib.suppress(FileNotFoundError):
                os.rename(folder, temporary.with_name(f"{temporary.name}-replaced"))
        os.rename(temporary, folder)
        _sync(folder.parent)
    except OSError as error:
        if not sound(folder):  # else another process was first, with the same contents
            raise ConfigError(f"cannot write token files under {folder.parent}: {error.strerror}; set PREDMOE_CACHE to another folder") from None
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(temporary.with_name(f"{temporary.name}-replaced"), ignore_errors=True)


def sound(folder: Path) -> bool:
    """Whether undamaged token files are there."""
    try:
        return folder.is_dir() and bool(read(folder))
    except Damaged:
        return False


def _sums(path: Path) -> list[int]:
    """The CRC-32 of each block of a file."""
    with open(path, "rb") as file:
        return [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK), b"")]


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
