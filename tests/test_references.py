"""The bibliography: sound by itself, that of the verified list, and written from it."""

import json

import pytest

from predmoe import paper, paths, references
from predmoe.config import ConfigError

MAIN = (paper.FOLDER / "main.tex").read_text()
BIBLIOGRAPHY = (paper.FOLDER / "references.bib").read_text()
RECORDS = paths.ROOT.parent / "shared" / "reference" / "references.json"


def test_the_bibliography_is_sound():
    assert references.lint(BIBLIOGRAPHY, MAIN) == []


@pytest.mark.skipif(not RECORDS.exists(), reason="the verified list of references (../shared/reference/references.json) is not part of a clean checkout")
def test_titles_ids_and_authors_are_those_of_the_verified_list():
    records = json.loads(RECORDS.read_text())
    assert references.lint(BIBLIOGRAPHY, MAIN, records) == []
    assert references.write(records, references.cited(MAIN)) == BIBLIOGRAPHY


RECORD = {"key": "doe2024routing", "title": "Routing & more", "authors": ["Ann Doe", "Bo Roe"], "year": "2024", "arxiv": "2401.01234", "venue": "", "verified": True}
ORIGIN = RECORD | {"key": references.ORIGIN, "title": "The study", "arxiv": "", "venue": "GitHub: a/b"}
CITING = rf"\citep{{doe2024routing}} \citet{{{references.ORIGIN}}}"


def test_what_is_written_from_records_passes_the_lint():
    assert references.lint(references.write([RECORD, ORIGIN], references.cited(CITING)), CITING, [RECORD, ORIGIN]) == []


@pytest.mark.parametrize("edit, text, said", [
    (lambda bib: bib + bib, CITING, "doe2024routing stands twice"), (lambda bib: bib, CITING + r"\cite{absent2020}", "absent2020 is cited and has no entry"),
    (lambda bib: bib, rf"\cite{{{references.ORIGIN}}}", "doe2024routing has an entry and is never cited"), (lambda bib: bib, r"\cite{doe2024routing}", "the origin of the method, is not cited"),
    (lambda bib: bib.replace("2401.01234", "24.1"), CITING, "24.1 is no arXiv id"), (lambda bib: bib.replace("  year = {2024},\n", "", 1), CITING, "doe2024routing has no year"),
    (lambda bib: bib.replace("  eprint = {2401.01234},\n", ""), CITING, "doe2024routing has neither an arXiv id nor a DOI"),
    (lambda bib: bib.replace("Routing", "Rooting"), CITING, "doe2024routing: the title is"), (lambda bib: bib.replace("Ann", "Anna"), CITING, "doe2024routing: the author is"),
])  # fmt: skip
def test_the_lint_finds(edit, text, said):
    bib = edit(references.write([RECORD, ORIGIN], references.cited(CITING)))
    assert any(said in wrong for wrong in references.lint(bib, text, [RECORD, ORIGIN]))


def test_a_record_that_is_not_verified_is_not_written():
    with pytest.raises(ConfigError, match="doe2024routing is cited, but its record is not verified"):
        references.write([RECORD | {"verified": False}, ORIGIN], ["doe2024routing"])
