import base64
import json
import re

import bs4
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from predmoe import paths, report, results

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
SVG = "<svg xmlns='http://www.w3.org/2000/svg'/>"
TEXT = r"""# Does it *work*?
The loss is $L = \lambda_{\text{pred}} L_h$ for $h < 4$, and in full

$$L = \frac{1}{|H|} \sum_{h \in H} L_h$$

\begin{align} a &= b \\ c &= d \end{align}
"""


def executed(house, name, *cells):
    """An executed notebook in the smoke profile, and its source."""
    house.notebook(name, "x = 1  # x")
    folder = house.outputs / "smoke" / name
    folder.mkdir(parents=True)
    nbformat.write(new_notebook(cells=list(cells)), folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


def page(house, name="index"):
    return bs4.BeautifulSoup((house.outputs / "smoke" / "html" / f"{name}.html").read_text(), "html.parser")


def code(source, *outputs):
    return new_code_cell(source, outputs=list(outputs), execution_count=1)


def display(**data):
    return new_output("display_data", {key.replace("_", "/"): value for key, value in data.items()})


def claim(name, verdict, notebook="02_horizons"):
    effect = {"name": name, "unit": "hit@k", "mean": 0.02, "ci95": [0.01, 0.03], "n": 3, "per_seed": [0.01, 0.02, 0.03]}
    return {"id": name, "statement": f"Claim {name}.", "headline": True, "reference": "+2.9 points", "measured": "+2.0 points [+1.0, +3.0]", "effect": effect,
            "effects": [effect], "n": 3, "verdict": verdict, "why": "its interval excludes zero", "notebook": notebook}  # fmt: skip


def told(folder, findings):
    """The results of 00_report: what it found, and its figure."""
    made = {"commit": "0" * 40, "dirty": False, "packages": {}, "hardware": {}, "started": "2026-01-01T00:00:00+00:00", "seconds": 1.0, "parameters": {}}
    figures = [{"name": "summary", "svg": "figures/summary.svg", "png": "figures/summary.png", "alt": "effect by horizon"}]
    whole = {"schema_version": results.SCHEMA_VERSION, "experiment": "00_report", "profile": "smoke", "provenance": made, "arms": [], "effects": [], "gates": [],
             "findings": findings, "figures": figures, "tables": []}  # fmt: skip
    (folder / "results.json").write_text(json.dumps(whole))


# --- a page ------------------------------------------------------------------------------------------------------------

def test_every_formula_of_the_notebooks_can_be_shown(capsys):
    """Else a reader finds TeX in its place, and the report's maker a complaint at its end."""
    shown = 0
    for source in sorted(paths.NOTEBOOKS.glob("*.ipynb")):
        text = "\n\n".join("".join(cell["source"]) for cell in json.loads(source.read_text())["cells"] if cell["cell_type"] == "markdown")
        for block, inline in re.findall(r"\$\$(.+?)\$\$|(?<!\$)\$([^$\n]+?)\$", text, flags=re.DOTALL):
            shown += 1
            assert 'class="tex"' not in report.mathml(block or inline, "block" if block else "inline"), f"{source.name}: {block or inline}"
    assert shown > 20 and not capsys.readouterr().err


def test_formulas_are_mathml(house):
    executed(house, "02_horizons", new_markdown_cell(TEXT))
    report.write("smoke")
    formulas = page(house, "02_horizons").main.find_all("math")
    assert [formula["display"] for formula in formulas] == ["inline", "inline", "block", "block"]
    assert formulas[0].find("mtext").text == "pred" and formulas[1].text == "h<4" and formulas[2].find("mfrac")
    assert len(formulas[3].find_all("mtr")) == 2
    assert "$" not in page(house, "02_horizons").main.text


def test_a_formula_that_is_not_understood_stays_tex_and_is_told(house, capsys):
    executed(house, "02_horizons", new_markdown_cell(r"Here $\foo{x} < 1$ and $\left( x$."))
    report.write("smoke")
    assert [tag.text for tag in page(house, "02_horizons").select("code.tex")] == [r"\foo{x} < 1", r"\left( x"]
    assert capsys.readouterr().err.count("a formula is shown as TeX") == 2


def test_a_page_asks_the_network_for_nothing(house):
    executed(
        house, "02_horizons", new_markdown_cell(TEXT),
        code("plot()", display(image_png=PNG, text_plain="figure"), display(**{"image_svg+xml": "<svg xmlns='http://www.w3.org/2000/svg'/>"})),
        code("table", new_output("execute_result", {"text/html": "<table><tr><td>1</td></tr></table>", "text/plain": "1"}, execution_count=1)),
        code("slider", display(**{"application_vnd.jupyter.widget-view+json": {"model_id": "1", "version_major": 2, "version_minor": 0}, "text_plain": "IntSlider"})),
        code("run", display(application_javascript="alert(1)", text_plain="script")),
    )  # fmt: skip
    report.write("smoke")
    for soup in (page(house), page(house, "02_horizons")):
        assert not soup.find_all(["script", "link", "iframe"])
        assert all(tag["src"].startswith("data:") for tag in soup.find_all(src=True))
        assert "url(" not in soup.style.text and "@import" not in soup.style.text
        policy = soup.find("meta", {"http-equiv": "Content-Security-Policy"})["content"]
        assert policy.startswith("default-src 'none'") and "http" not in policy
    shown = page(house, "02_horizons").main
    assert len(shown.find_all("img")) == 2 and shown.find("td").text == "1"
    assert "IntSlider" in shown.text and "alert" not in shown.text


def test_code_is_folded_away_and_output_is_not(house):
    executed(house, "02_horizons", code("secret = 42", new_output("stream", text="the answer\n")))
    report.write("smoke")
    (details,) = page(house, "02_horizons").main.find_all("details")
    assert (details.summary.text, details.pre.text.strip()) == ("Code", "secret = 42") and not details.has_attr("open")
    assert "the answer" in page(house, "02_horizons").main.text and "the answer" not in details.text


def test_contents_lead_to_every_heading_once(house):
    executed(house, "02_horizons", *map(new_markdown_cell, ["# A `title`", "## Layer 2", "## Layer", "## Layer", "### $h = 1$ & more", "#### too deep"]))
    report.write("smoke")
    soup = page(house, "02_horizons")
    links = soup.select("nav.contents a")
    assert [link.text for link in links] == ["A title", "Layer 2", "Layer", "Layer", "h=1 & more"]
    targets = [link["href"].removeprefix("#") for link in links]
    assert len(set(targets)) == 5 and all(len(soup.find_all(id=target)) == 1 for target in targets)
    assert soup.title.text == "A title · predmoe"


def test_a_picture_keeps_its_alternative_text_and_markdown_pictures_are_inline(house):
    output = display(image_png=PNG, text_plain="x")
    output.metadata["image/png"] = {"alt": "hit@k rises with lambda", "width": 400}
    path = executed(house, "02_horizons", code("plot()", output), new_markdown_cell("![by layer](figures/layers.png)"))
    (path.parent / "figures").mkdir()
    (path.parent / "figures" / "layers.png").write_bytes(base64.b64decode(PNG))
    report.write("smoke")
    first, second = page(house, "02_horizons").main.find_all("img")
    assert (first["alt"], first["width"], second["alt"]) == ("hit@k rises with lambda", "400", "by layer")
    assert second["src"] == f"data:image/png;base64,{PNG}"


# --- the index ---------------------------------------------------------------------------------------------------------

def test_the_index_has_each_claim_with_its_verdict_in_words(house):
    executed(house, "02_horizons")
    verdicts = ["replicated", "partly", "not replicated", "not tested"]
    claims = [claim(f"c{n}", verdict, "02_horizons" if n else "04_isolation") for n, verdict in enumerate(verdicts)]
    (house.outputs / "smoke" / "claims.json").write_text(json.dumps(claims))
    report.write("smoke")
    rows = page(house).select("table.claims tbody tr")
    assert [row.find(class_="badge").text.split(maxsplit=1)[1] for row in rows] == verdicts
    assert [row.find(class_="badge")["class"][1] for row in rows] == ["replicated", "partly", "not-replicated", "not-tested"]
    assert "+2.0 points [+1.0, +3.0]" in rows[0].text and "excludes zero" in rows[0].text
    assert "04_isolation (not run)" in rows[0].text and rows[1].a["href"] == "02_horizons.html"


def test_a_claim_of_several_parts_has_a_row_for_each_and_says_what_is_subtracted(house):
    executed(house, "03_dose")
    spec = next(spec for spec in results.claim_specs() if spec["id"] == "high-dose-cost")
    parts = [{key: value for key, value in claim(part["name"], "partly", "03_dose").items() if key in ("measured", "effects", "verdict", "why")} | {"name": part["name"]} for part in spec["parts"]]
    for part, of in zip(parts, spec["parts"]):
        part["effects"][0]["unit"] = of["unit"]
    (house.outputs / "smoke" / "claims.json").write_text(json.dumps([claim("high-dose-cost", "partly", "03_dose") | {"parts": parts}]))
    report.write("smoke")
    rows = page(house).select("table.claims tbody tr")
    assert [row.select("td")[1].text for row in rows] == ["Claim high-dose-cost.", "validation loss", "router entropy"]
    assert rows[0].select("td")[2].text.startswith("2 parts") and "input 1 minus baseline: validation loss, 3 seeds:" in rows[1].text and "+0.0200 nats [+0.0100, +0.0300]" in rows[1].text.replace("\u00a0", " ")
    assert "input 1 minus baseline, relative to baseline: router entropy" in rows[2].text and rows[0].a["href"] == "03_dose.html" and not rows[1].a


def test_what_has_not_run_or_failed_is_said(house):
    executed(house, "01_mechanism", new_markdown_cell("# First"))
    (house.outputs / "smoke" / "01_mechanism" / "executed.json").write_text('{"seconds": 12.3}')
    executed(house, "02_horizons")
    house.notebook("03_dose", "x = 1  # x")
    index = report.write("smoke", {"02_horizons": "cell [2] raised."})
    assert index == house.outputs / "smoke" / "html" / "index.html"
    rows = [[cell.text for cell in row.find_all("td")] for row in page(house).select("#experiments ~ div tbody tr")]
    assert rows == [["01_mechanism", "First", "executed in 12 s"],
                    ["02_horizons", "02_horizons", "failed: cell [2] raised. The page is that of an earlier execution."],
                    ["03_dose", "03_dose", "not run"]]  # fmt: skip
    assert "2 of 3 notebooks have run" in page(house).text
    assert "no claims.json yet" in page(house).select_one("[role=note]").text


def test_claims_of_another_schema_are_a_sentence_in_a_whole_report(house):
    executed(house, "02_horizons")
    old = claim("c", "replicated")
    del old["why"]
    (house.outputs / "smoke" / "claims.json").write_text(json.dumps([old]))
    report.write("smoke")
    assert "'why' is a required property" in page(house).select_one("[role=note]").text
    assert page(house).select("#experiments ~ div tbody tr")


def test_a_saved_figure_is_shown_as_its_svg(house):
    output = display(image_png=PNG, text_plain="x")
    output.metadata["image/png"] = {"alt": "hit@k by layer", "width": 400}
    path = executed(house, "02_horizons", code("plot()", output))
    (path.parent / "figures").mkdir()
    (path.parent / "figures" / "layers.svg").write_text(SVG)
    (path.parent / "results.json").write_text(json.dumps({"figures": [{"name": "layers", "alt": "hit@k by layer", "svg": "figures/layers.svg"}]}))
    report.write("smoke")
    (image,) = page(house, "02_horizons").main.find_all("img")
    assert image["src"].startswith("data:image/svg+xml") and (image["alt"], image["width"]) == ("hit@k by layer", "400")


@pytest.mark.parametrize("kind, damage", [("svg", SVG[:20]), ("svg", ""), ("svg", "<html/>"), ("png", base64.b64decode(PNG)[:40])])
def test_a_figure_that_is_cut_is_no_broken_picture(house, capsys, kind, damage):
    """Its other half takes its place: the PNG of a summary, and what the executed copy holds of a figure; without one a sentence does."""
    output = display(image_png=PNG)
    output.metadata["image/png"] = {"alt": "effect by horizon"}
    folder = executed(house, "00_report", code("plot()", output)).parent
    told(folder, [])
    (folder / "figures").mkdir()
    file = folder / "figures" / f"summary.{kind}"
    file.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    (house.outputs / "smoke" / "claims.json").write_text(json.dumps([claim("c", "replicated")]))
    report.write("smoke")
    assert not page(house).main.find("img") and page(house).select_one("[role=note]").text == "The summary figure of 00_report is missing or damaged: run the notebook again."
    assert f"summary.{kind} of 00_report is damaged and left out" in capsys.readouterr().err
    file.with_suffix(".png").write_bytes(base64.b64decode(PNG))
    report.write("smoke")
    for name in ("index", "00_report"):
        assert page(house, name).main.img["src"] == f"data:image/png;base64,{PNG}" and not page(house, name).select("[role=note]")


def test_an_executed_summary_without_its_results_says_so(house):
    executed(house, "00_report")
    (house.outputs / "smoke" / "claims.json").write_text(json.dumps([claim("c", "replicated")]))
    report.write("smoke")
    assert page(house).select_one("[role=note]").text.startswith("00_report has no results in profile smoke") and page(house).select("table.claims")


def test_one_damage_does_not_hide_another(house):
    folder = executed(house, "00_report").parent
    (folder / "results.json").write_text("{")
    executed(house, "02_horizons").write_text("")
    (house.outputs / "smoke" / "claims.json").write_text(json.dumps([claim("c", "replicated")]))
    report.write("smoke")
    said = page(house).select_one("[role=note]").text
    assert "Not everything ran: 02_horizons." in said and "Results.json of 00_report is damaged" in said


@pytest.mark.parametrize("file", ["results.json", "executed.json", "../claims.json", "figures/summary.svg", "00_report.ipynb"])
def test_a_folder_in_the_place_of_a_file_leaves_the_report_whole(house, file):
    folder = executed(house, "00_report", new_markdown_cell("# All of it")).parent
    told(folder, [])
    (folder / file).unlink(missing_ok=True)
    (folder / file).mkdir(parents=True)
    executed(house, "02_horizons", new_markdown_cell("# Two"))
    report.write("smoke")
    words = {"results.json": "Results.json of 00_report cannot be read (Is a directory)", "executed.json": "executed.json is damaged", "../claims.json": "Claims.json of smoke cannot be read",
             "figures/summary.svg": "summary figure of 00_report is missing or damaged", "00_report.ipynb": "failed: its executed copy is damaged"}  # fmt: skip
    assert words[file] in page(house).text and page(house, "02_horizons").h1.text.startswith("Two")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"figures": {"a": 1}}', '{"figures": [{"name": "x"}]}', '{"figures": [{"name": "x", "alt": ["y"], "svg": "z"}]}', '{"figures": [{"name": "x", "alt": "y", "svg": 3}]}', '{"seconds": NaN}'])
@pytest.mark.parametrize("file", ["results.json", "executed.json"])
def test_records_of_another_schema_leave_the_report_whole(house, file, content):
    path = executed(house, "00_report", new_markdown_cell("# All of it"))
    (path.parent / "figures").mkdir()
    (path.parent / "figures" / "summary.png").write_bytes(base64.b64decode(PNG))
    (path.parent / file).write_text(content)
    report.write("smoke")
    assert page(house).select_one("figure img")["alt"] and "executed" in page(house).select("#experiments ~ div tbody tr")[0].text


@pytest.mark.parametrize("content", ["", "{", "[]", '{"cells": 1, "nbformat": 4}', '{"cells": [], "nbformat": 5}', '{"cells": [], "nbformat": "4"}', "[" * 100_000])
def test_an_executed_copy_that_is_damaged_is_a_sentence_in_a_whole_report(house, content):
    executed(house, "01_mechanism", new_markdown_cell("# First"))
    executed(house, "02_horizons").write_text(content)
    report.write("smoke")
    rows = {row.td.text: row.find_all("td")[2].text for row in page(house).select("#experiments ~ div tbody tr")}
    assert rows == {"01_mechanism": "executed", "02_horizons": "failed: its executed copy is damaged: run it again."}
    assert not (house.outputs / "smoke" / "html" / "02_horizons.html").exists()


@pytest.mark.parametrize("text", ["[{", "", '{"claims": []}'])
def test_claims_that_cannot_be_read_are_a_sentence_too(house, text):
    executed(house, "02_horizons")
    (house.outputs / "smoke" / "claims.json").write_text(text)
    report.write("smoke")
    assert "laims.json" in page(house).select_one("[role=note]").text


def test_the_summary_figure_is_inline_with_its_alternative_text(house):
    folder = executed(house, "00_report").parent
    (folder / "figures").mkdir()
    (folder / "figures" / "summary.svg").write_text(SVG)
    told(folder, [])
    report.write("smoke")
    picture = page(house).find("img")
    assert picture["alt"] == "effect by horizon" and base64.b64decode(picture["src"].split(",")[1]).startswith(b"<svg")


def test_the_answer_and_its_figure_stand_before_the_claims(house):
    folder = executed(house, "00_report").parent
    (folder / "figures").mkdir()
    (folder / "figures" / "summary.svg").write_text(SVG)
    told(folder, ["**Does it work?** At h = 4 <yes>.", "**How sure?** p = 0.01."])
    (house.outputs / "smoke" / "claims.json").write_text(json.dumps([claim("c", "replicated")]))
    report.write("smoke")
    main = page(house).main
    assert [item.text.strip() for item in main.select("ul.answers li")] == ["Does it work? At h = 4 <yes>.", "How sure? p = 0.01."]
    assert [bold.text for bold in main.select("ul.answers strong")] == ["Does it work?", "How sure?"]
    order = [tag for tag in main.select("ul.answers, img, table")]
    assert [tag.name for tag in order] == ["ul", "img", "table", "table"]


def test_the_index_explains_its_words_and_names_the_study_it_tests(house):
    executed(house, "00_report")
    report.write("smoke")
    words = page(house).select_one("details.words")
    assert not words.has_attr("open") and {"hit@k", "Established", "Quality gate"} <= {bold.text for bold in words.select("li strong")}
    link = page(house).select_one("main.index cite").parent
    assert link["href"] == results.reference()["url"] and link.text == results.reference()["name"]


@pytest.mark.parametrize("text", ["{}", "[]", "{"])
def test_a_damaged_file_of_a_notebook_is_said_in_a_whole_report(house, text):
    folder = executed(house, "00_report").parent
    for name in ("results.json", "executed.json"):
        (folder / name).write_text(text)
    (house.outputs / "smoke" / "claims.json").write_text(json.dumps([claim("c", "replicated")]))
    report.write("smoke")
    assert page(house).select_one("[role=note]").text.startswith("Results.json of 00_report") and page(house).select("table.claims tbody tr")
    assert "executed.json is damaged: run it again" in page(house).text


def test_an_empty_profile_gives_a_whole_report(house):
    report.write("smoke")
    assert "0 of 0 notebooks have run" in page(house).text


def test_the_old_report_stays_until_the_new_one_is_complete(house, monkeypatch):
    executed(house, "02_horizons")
    report.write("smoke")
    before = page(house, "02_horizons")
    monkeypatch.setattr(report, "_index", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        report.write("smoke")
    assert page(house, "02_horizons") == before


def test_every_verdict_has_a_mark_and_a_colour():
    verdicts = json.loads((results.ASSETS / "claims.schema.json").read_text())["items"]["properties"]["verdict"]["enum"]
    style = (report.TEMPLATES / "style.css").read_text()
    assert set(verdicts) == set(report.MARKS)
    assert all(f".badge.{verdict.replace(' ', '-')}" in style for verdict in verdicts if verdict != "not tested")
