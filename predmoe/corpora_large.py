"""The largest corpus that needs no hub: the offline corpus's packages and dictionaries and manuals of Debian 12, about 32M tokens.

Its key is the list of its sources, not their contents: a token file that was made elsewhere and carried here is known without
the text. `scripts/prepare_corpus.py` fetches the packages, makes the token file and packs it.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import io
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from predmoe import paths
from predmoe.config import ConfigError

VERSION = 1   # of what is made of the packages; a change makes token files of before unknown
PIECE = 8_000   # characters after which a dictionary's document ends at the next entry


@dataclass(frozen=True, kw_only=True)
class Debian:
    """A Debian 12 package, the files in it that hold the text, and how they are read."""

    domain: str
    package: str
    version: str
    sha256: str
    pattern: str
    read: str   # pages (HTML), manuals (man pages), entries (a dictionary in one file) or glosses (WordNet)
    licence: str
    origin: str

    @property
    def requirement(self) -> str:
        return f"{self.package}={self.version}"


DEBIAN = (
    Debian(domain="dictionary", package="dict-gcide", version="0.48.5+nmu2", read="entries", pattern="*/gcide.dict.dz", licence="GPL-2+",
           sha256="7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f", origin="the Collaborative International Dictionary of English"),
    Debian(domain="lexicon", package="wordnet-base", version="1:3.0-37", read="glosses", pattern="*/wordnet/data.*", licence="WordNet 3.0",
           sha256="61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752", origin="WordNet's words and glosses"),
    Debian(domain="computing", package="dict-foldoc", version="20230119-1", read="entries", pattern="*/foldoc.dict.dz", licence="GFDL-1.1+",
           sha256="745cbedb55c2da609cc88ee0284e9d11a67a11ae3709daf7bad0e895ac3294c3", origin="the Free On-Line Dictionary of Computing"),
    Debian(domain="computing", package="jargon-text", version="4.4.7-4.1", read="entries", pattern="*/jargon.txt.gz", licence="public domain",
           sha256="17d05997e30eb3d5d6713929b8e2f81b63a5f50073858ad2a06701c71f54dcdb", origin="the Jargon File"),
    Debian(domain="mathematics", package="gap-doc", version="4.12.1-2", read="pages", pattern="*/chap*[0-9].html", licence="GPL-2+",
           sha256="ceaaee8ae7870d71353d7846ac39575a9a32f87b36928b8037139a54938bd7ab", origin="the manuals of GAP"),
    Debian(domain="mathematics", package="octave-doc", version="7.3.0-2", read="pages", pattern="*/octave.html/*.html", licence="GPL-3+",
           sha256="b27897cc7e3d688daa5cb8f8d1ea47077f3fbd205ce32e22522200ff0c1eadd5", origin="the manual of GNU Octave"),
    Debian(domain="mathematics", package="maxima-doc", version="5.46.0-11", read="pages", pattern="*/html/maxima_[0-9]*.html", licence="GPL-2+",
           sha256="01a726b693a7e465a62040ac5ade4762194d7553524231d77cd1fcd4a69a75b9", origin="the manual of Maxima"),
    Debian(domain="system", package="manpages", version="6.03-2", read="manuals", pattern="*/man/man*/*.gz", licence="GPL-2+, BSD, MIT and others, named in each page",
           sha256="efa1ba4cd19ad7baeae959c9209a7eb74be2ebb858bcabb412597bfc9f588c91", origin="Linux manual pages"),
    Debian(domain="system", package="manpages-dev", version="6.03-2", read="manuals", pattern="*/man/man*/*.gz", licence="GPL-2+, BSD, MIT and others, named in each page",
           sha256="96f55cb5e26231d5567c89b692bced63825a14a2d5bd18fdf16ea2ed44eb9838", origin="Linux manual pages on system calls and libraries"),
)  # fmt: skip


class OfflineLarge:
    """Four domains of the offline corpus (its code is the running Python's own, which is not pinned) and those of DEBIAN."""

    name = "offline-large"

    def __init__(self, folder: Path | None = None):
        self.folder = folder or packages_folder()

    @property
    def sources(self):
        from predmoe.corpora import Offline, Source

        return tuple(s for s in Offline.sources if s.requirement) + tuple(
            Source(domain=s.domain, origin=s.origin, licence=s.licence, requirement=f"{s.requirement} (Debian 12)") for s in DEBIAN)

    def key(self) -> str:
        from predmoe.corpora import Offline

        pinned = [s.requirement for s in Offline.sources if s.requirement] + [f"{s.requirement} {s.sha256} {s.pattern}" for s in DEBIAN]
        return hashlib.sha256("\n".join([f"offline-large {VERSION}", *pinned]).encode()).hexdigest()

    def documents(self) -> Iterator:
        from predmoe.corpora import Document, Offline

        for document in Offline().documents():
            if document.domain != "code":
                yield document
        for source in DEBIAN:
            for name, text in READ[source.read](package_files(source, self.folder)):
                yield Document(source.domain, f"{source.package}/{name}", text)


def packages_folder() -> Path:
    """Where the Debian packages lie: $PREDMOE_CACHE/packages, else ~/.cache/predmoe/packages."""
    return paths.cache_folder() / "packages"


def package_files(source: Debian, folder: Path) -> Iterator[tuple[str, bytes]]:
    """(path, bytes) of the package's files that match, unpacked, by path. Raises ConfigError where it is missing or another one."""
    advice = "run python scripts/prepare_corpus.py on a machine that reaches Debian's packages, and carry the token file it packs"
    found = sorted(folder.glob(f"{source.package}_*.deb")) if folder.is_dir() else []
    if not found:
        raise ConfigError(f"corpus='offline-large' needs {source.requirement} of Debian 12 in {folder}, or a token file that was made of it; {advice}")
    raw = found[-1].read_bytes()
    if (digest := hashlib.sha256(raw).hexdigest()) != source.sha256:
        raise ConfigError(f"{found[-1]} is not {source.requirement}: its SHA-256 begins with {digest[:12]}, not {source.sha256[:12]}; fetch that version")
    with tarfile.open(fileobj=io.BytesIO(_member(raw, "data.tar")), mode="r:*") as archive:
        members = sorted((m for m in archive if m.isfile() and fnmatchcase(m.name, source.pattern)), key=lambda m: m.name)
        for member in members:
            content = archive.extractfile(member).read()
            yield member.name, gzip.decompress(content) if member.name.endswith((".gz", ".dz")) else content


def _member(raw: bytes, prefix: str) -> bytes:
    """The member of an ar archive, which a .deb is, whose name begins with `prefix`."""
    at = 8
    while at + 60 <= len(raw):
        name, size = raw[at : at + 16].decode().strip(), int(raw[at + 48 : at + 58])
        if name.startswith(prefix):
            return raw[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise ConfigError(f"a Debian package without {prefix}: the file is damaged")


def _entries(files: Iterator[tuple[str, bytes]]) -> Iterator[tuple[str, str]]:
    """A dictionary in pieces of some pages, each beginning with an entry, which is a line without indentation."""
    for path, raw in files:
        piece, size, number = [], 0, 0
        for line in raw.decode("utf-8", errors="replace").splitlines():
            if size > PIECE and line[:1].strip():
                yield f"{Path(path).stem}/{number:05d}", "\n".join(piece).strip()
                piece, size, number = [], 0, number + 1
            piece.append(line)
            size += len(line) + 1
        yield f"{Path(path).stem}/{number:05d}", "\n".join(piece).strip()


def _glosses(files: Iterator[tuple[str, bytes]]) -> Iterator[tuple[str, str]]:
    """WordNet's synsets as "words: gloss", a hundred to a document."""
    for path, raw in files:
        lines = [_synset(line) for line in raw.decode().splitlines() if line[:1].isdigit()]
        for start in range(0, len(lines), 100):
            yield f"{Path(path).name}/{start:06d}", "\n".join(lines[start : start + 100])


def _synset(line: str) -> str:
    data, _, gloss = line.partition(" | ")
    fields = data.split()
    words = [re.sub(r"\(\w+\)$", "", fields[4 + 2 * i]).replace("_", " ") for i in range(int(fields[3], 16))]
    return f"{', '.join(words)}: {gloss.strip()}"


def _pages(files: Iterator[tuple[str, bytes]]) -> Iterator[tuple[str, str]]:
    """The text of HTML pages, without scripts, styles and markup."""
    for path, raw in files:
        text = raw.decode("utf-8", errors="replace")
        text = re.sub(r"(?is)<(script|style|head)\b.*?</\1>|<!--.*?-->", " ", text)
        text = re.sub(r"(?i)<(br|/p|/h\d|/li|/tr|/div|/dt|/dd|/pre)\b[^>]*>", "\n", text)
        text = html.unescape(re.sub(r"<[^>]+>", "", text)).replace("\u00a0", " ")
        yield "/".join(Path(path).parts[-2:]), re.sub(r"\n\s*\n\s*", "\n\n", re.sub(r"[ \t]+", " ", text)).strip()


def _manuals(files: Iterator[tuple[str, bytes]]) -> Iterator[tuple[str, str]]:
    """Manual pages without comments, requests and font changes."""
    for path, raw in files:
        lines = []
        for line in raw.decode("utf-8", errors="replace").splitlines():
            if line.startswith(("'\\\"", ".\\\"", ".so")):
                continue
            if line.startswith((".", "'")):   # a macro: what it prints are its arguments
                line = line.partition(" ")[2].replace('"', "")
            lines.append(re.sub(r"\\(f[BIPR]|f\(..|[&c|^])", "", line).replace("\\-", "-").replace("\\(aq", "'").replace("\\e", "\\"))
        yield "/".join(Path(path).parts[-2:]).removesuffix(".gz"), re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


READ = {"entries": _entries, "glosses": _glosses, "pages": _pages, "manuals": _manuals}
