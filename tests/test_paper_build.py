"""The paper's PDF and archive: what they need, that they follow the results, and what a log is read for."""

import gzip
import io
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from paper_copy import change

from predmoe import cli, paper, paper_build, paper_text, paths, results
from predmoe.config import ConfigError

MAIN = (paper.FOLDER / "main.tex").read_text()
needs_latex = pytest.mark.skipif(not shutil.which("latexmk") or not shutil.which("pdftotext"), reason="LaTeX (latexmk) or pdftotext is not installed: .ci/run installs both")


def test_without_latex_the_packages_are_named_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paper, "FOLDER", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["paper"]) == 2 and "apt-get install --no-install-recommends texlive" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_an_archive_takes_no_other_files_place(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paper_build, "need_latex", lambda: None)
    monkeypatch.setattr(paper, "write", lambda *_, **__: pytest.fail("nothing is made before the archive's place is looked at"))
    notes = tmp_path / "notes.tex"
    notes.write_text("mine")
    for place, said in ((notes, "is no gzip archive: it is left as it is"), (tmp_path, "is a folder: name the archive"), (notes / "a.tar.gz", "notes.tex is a file; name another folder")):
        assert cli.main(["paper", "--bundle", str(place)]) == 2 and said in capsys.readouterr().err
    assert notes.read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == ["notes.tex"]
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(b""))
    for place in (tmp_path / "a.tar.gz", tmp_path / "new" / "folder" / "a.tar.gz"):
        assert paper_build.target_of(place) == place


def test_make_and_ci_name_the_same_packages_and_make_fails_without_them(tmp_path):
    for name in ("Makefile", ".ci/run"):
        assert " ".join(paper_build.PACKAGES) in (paths.ROOT / name).read_text()
    for name in ("make", "sh"):
        (tmp_path / name).symlink_to(shutil.which(name))
    done = subprocess.run(["make", "paper"], cwd=paths.ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode and " ".join(paper_build.PACKAGES) in done.stdout


@pytest.mark.parametrize("line, said", [
    ("LaTeX Warning: Reference `fig:none' on page 3 undefined on input line 5.", "undefined reference fig:none"),
    ("Package natbib Warning: Citation `none2020' on page 1 undefined on input line 9.", "undefined citation none2020"),
    ("Missing character: There is no � in font ec-lmr10!", "no glyph"), ("Overfull \\hbox (5.3pt too wide) in paragraph at lines 3--9", "a line sticks out by 5.3 pt"),
])  # fmt: skip
def test_the_log_is_read_for_what_a_reader_would_stumble_over(line, said):
    assert said in paper_build.faults(line)[0]
    assert paper_build.faults("Overfull \\hbox (4.9pt too wide) in paragraph at lines 3--9") == []


def text_of(pdf):
    return " ".join(subprocess.run(["pdftotext", "-layout", pdf, "-"], capture_output=True, text=True, check=True).stdout.split())


@needs_latex
@pytest.mark.slow
def test_the_archive_compiles_in_an_empty_folder_and_a_changed_result_changes_the_pdf(copied, tmp_path):
    """The whole way: numbers, figures, PDF without a fault, archive; then another value in results.json, and another text."""
    folder, target = copied
    paper.write("cpu", target, any_commit=True)
    before = text_of(paper_build.compile(target))
    archive = paper_build.bundle(target, tmp_path / "sources.tar.gz")
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(archive.read_bytes()))) as held:
        names = held.getnames()
    assert {"main.tex", "main.bbl", "numbers.tex", "references.bib", "figures/summary.pdf"} <= set(names) and not [name for name in names if Path(name).is_absolute()]

    decided = next(e for e in paper_text.decide(paper.load("cpu"), results.claim_specs()) if e["id"] == "quality-cost")
    cost = decided["measured"]
    change(folder, decided["notebook"], lambda r: [row.update(val_loss=row["val_loss"] * 1.1) for row in r["arms"] if row["arm"] == "joint"])
    notes = paper.write("cpu", target, any_commit=True, figures=False)
    after = text_of(paper_build.compile(target))
    assert any("claims.json" in note for note in notes)
    shown = re.search(r"\+?-?[\d.]+%", cost)[0].replace("-", "−")
    assert shown in before and before != after and "+10." in after

    (target / "main.tex").write_text(MAIN.replace("% --- results begin ---", r"\claim{no-such-claim}{verdict}"))
    with pytest.raises(ConfigError, match="LaTeX stopped: .*no value is named claim.no-such-claim.verdict"):
        paper_build.compile(target)


@needs_latex
@pytest.mark.slow
def test_the_pdf_has_metadata_bookmarks_and_alternative_texts(copied):
    _, target = copied
    notes = paper.write("cpu", target, any_commit=True)
    assert all("commit" in note for note in notes if "claims.json" not in note)
    pdf = paper_build.compile(target)
    about = subprocess.run(["pdfinfo", pdf], capture_output=True, text=True, check=True, env=os.environ | {"LC_ALL": "C.UTF-8"}).stdout
    assert re.search(r"Title: +Can a mixture of experts", about) and re.search(r"Keywords: +mixture of experts", about) and re.search(r"Author: +\S", about)
    plain = MAIN.replace(r"\usepackage{bookmark}", r"\usepackage{bookmark}\pdfcompresslevel=0 \pdfobjcompresslevel=0")
    (target / "main.tex").write_text(plain)
    raw = paper_build.compile(target).read_bytes()
    drawn = len(list((target / "figures").glob("*.pdf")))
    assert raw.count(b"/Span <</Alt (") == drawn + 1 == raw.count(b"\nEMC\n") and b"/Outlines" in raw   # and the drawing of the data path
