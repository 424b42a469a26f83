"""From the paper's sources to its PDF: LaTeX, a look at its log, and the archive for arXiv."""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from .config import ConfigError
from .references import lint

PACKAGES = ("texlive-latex-recommended", "texlive-pictures", "texlive-fonts-recommended", "lmodern", "latexmk")   # Debian's names; lmodern has the typewriter type
COMMAND = ("latexmk", "-pdf", "-bibtex", "-halt-on-error", "-interaction=nonstopmode", "-file-line-error")
WIDEST = 5.0   # pt by which a line may stick out


def need_latex() -> None:
    """Raises ConfigError, naming Debian's packages, where LaTeX is not installed. Nothing is installed here."""
    missing = [name for name in ("latexmk", "pdflatex", "bibtex") if not shutil.which(name)]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not found: the paper needs LaTeX. On Debian or Ubuntu: apt-get install --no-install-recommends {' '.join(PACKAGES)}")


def compile(folder: Path) -> Path:
    """Run LaTeX on folder/main.tex and return main.pdf. Raises ConfigError where it stops or where `faults` finds something in its log."""
    need_latex()
    if wrong := lint((folder / "references.bib").read_text(), (folder / "main.tex").read_text()):
        raise ConfigError(f"references.bib: {'; '.join(wrong)}")
    done = subprocess.run([*COMMAND, "main.tex"], cwd=folder, capture_output=True, text=True, errors="replace")
    log = folder / "main.log"
    text = _unbroken(log.read_text(errors="replace") if log.exists() else done.stdout)
    if done.returncode:
        errors = re.findall(r"^(?:!|\S+\.tex:\d+:|Package \w+ Error:).*(?:\n.*)?", text, flags=re.MULTILINE)
        said = " ".join((errors or done.stdout.strip().splitlines()[-3:] or ["latexmk says nothing"])[0].split())
        raise ConfigError(f"LaTeX stopped: {said} (the whole of it is in {log})")
    if found := faults(text):
        raise ConfigError(f"the PDF is not clean: {'; '.join(found[:6])}{f' and {len(found) - 6} more' if len(found) > 6 else ''} (see {log})")
    return folder / "main.pdf"


def faults(log: str) -> list[str]:
    """What a reader would stumble over, from LaTeX's log: undefined references and citations, lines that stick out by more than WIDEST, lost glyphs."""
    joined = _unbroken(log)
    found = [f"undefined {kind.lower()} {name}" for kind, name in re.findall(r"(Reference|Citation) `([^']+)'.{0,40}? undefined", joined)]
    found += [f"no glyph {name}" for name in re.findall(r"Missing character: There is no (.+?)!", joined)]
    found += [f"a line sticks out by {width} pt {where}" for width, where in re.findall(r"Overfull \\hbox \(([\d.]+)pt too wide\) (.+)", joined) if float(width) > WIDEST]
    found += [f"label {name} is defined twice" for name in re.findall(r"Label `([^']+)' multiply defined", joined)]
    return list(dict.fromkeys(found))


def _unbroken(log: str) -> str:
    """A log without the breaks that TeX puts after every 79 characters."""
    return re.sub(r"(?<=[^\n]{79})\n", "", log)


def bundle(folder: Path, target: Path) -> Path:
    """Write the paper's sources as TARGET (`target_of`): main.tex, numbers.tex, references.bib, main.bbl and figures/. It is compiled in an empty folder
    first; the same sources give the same bytes. Raises ConfigError where that does not work."""
    members = [folder / name for name in ("main.tex", "numbers.tex", "references.bib", "main.bbl")]
    members += sorted((folder / "figures").glob("*.pdf"))
    for path in members:
        if not path.exists():
            raise ConfigError(f"{path.name} is missing in {folder}: build the paper first")
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for path in members:
            info = tarfile.TarInfo(str(path.relative_to(folder)))
            info.size, info.mode = path.stat().st_size, 0o644
            archive.addfile(info, io.BytesIO(path.read_bytes()))
    with tempfile.TemporaryDirectory() as empty:
        raw.seek(0)
        with tarfile.open(fileobj=raw) as archive:
            archive.extractall(empty, filter="data")
        compile(Path(empty))
    target_of(target).parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.write_bytes(gzip.compress(raw.getvalue(), mtime=0))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def target_of(target: Path) -> Path:
    """The archive's path as it is. Raises ConfigError where it is a folder or a file that is no gzip archive, which would be lost, or where it cannot be written."""
    if target.is_dir():
        raise ConfigError(f"--bundle {target} is a folder: name the archive to be written, such as {target / 'predmoe-arxiv.tar.gz'}")
    if target.exists() and target.read_bytes()[:2] not in (b"", b"\x1f\x8b"):
        raise ConfigError(f"--bundle {target} exists and is no gzip archive: it is left as it is; name another file, such as predmoe-arxiv.tar.gz")
    above = next(folder for folder in target.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ConfigError(f"--bundle {target}: {above} is {'not writable' if above.is_dir() else 'a file'}; name another folder")
    return target
