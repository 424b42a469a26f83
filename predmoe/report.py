"""The HTML report: an index with claims, figure and experiments, and a page for each executed notebook.

One folder, outputs/PROFILE/html, which needs no network: figures are inline, formulas are MathML, and the pages forbid the browser to load
anything (Content-Security-Policy); the one script, on pages with an explorer, is our own, named there by its digest. Reads executed notebooks,
results.json, claims.json and explorer.json; computes nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree

import jinja2
import nbformat
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments.formatters import HtmlFormatter
from traitlets.config import Config

from . import claim_words, execute, explorer_grid, paths, results
from .files import parse_json

TEMPLATES = Path(__file__).parent / "templates"
ASSETS = Path(__file__).parent / "assets"
EXPLORE = "explore"   # the one notebook without a number
MARKS = {"replicated": "✓", "partly": "◐", "not replicated": "✗", "not tested": "–"}   # the verdict without colour
SHOWN = ["text/html", "image/svg+xml", "image/png", "image/jpeg", "text/markdown", "text/latex", "text/plain"]   # no scripts, no widgets


def write(profile: str, failures: Mapping[str, str] = {}) -> Path:
    """Write outputs/PROFILE/html from what the profile holds and return its index.html.

    failures: name -> sentence, the notebooks that failed just now. What has not run is shown as not run.
    """
    folder = paths.outputs(profile)
    executed = {path.stem: path for path in sorted(folder.glob("*/*.ipynb")) if path.stem == path.parent.name and re.match(rf"\d\d_|{EXPLORE}$", path.stem)}
    damaged = {name: sentence for name, path in executed.items() if (sentence := execute.damage(path))}
    executed = {name: path for name, path in executed.items() if name not in damaged}
    failures = {**damaged, **failures}
    for name, sentence in damaged.items():
        print(f"predmoe: {name}: {sentence}", file=sys.stderr)
    jinja = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined)
    shared = {"profile": profile, "style": _style()}

    new = folder / "html.new"   # whole or not at all: the old report stays until the new one is complete
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for name, path in executed.items():
        body, contents = notebook_html(path)
        title = contents[0][1] if contents else name
        extra = _explorer_parts() if PLACE in body else {"script": "", "policy": "", "more_style": ""}
        page = jinja.get_template("page.html").render(shared | extra, title=title, contents=contents, body=body)
        (new / f"{name}.html").write_text(page)
    plain = {"script": "", "policy": "", "more_style": ""}
    (new / "index.html").write_text(jinja.get_template("index.html").render(shared | plain, title="Report", **_index(profile, executed, failures)))
    shutil.rmtree(folder / "html", ignore_errors=True)
    new.rename(folder / "html")
    return folder / "html" / "index.html"


def _index(profile: str, executed: Mapping[str, Path], failures: Mapping[str, str]) -> dict:
    sources = [*paths.NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"), *paths.NOTEBOOKS.glob(f"{EXPLORE}.ipynb")]
    names = sorted({path.stem for path in sources} | executed.keys())
    experiments = [{"name": name, "title": _title(name, executed), "state": _state(name, executed, failures)} for name in names]
    claims, no_claims = _load(lambda: results.load_claims(profile), [])
    there = "00_report" in executed or (paths.outputs(profile) / "00_report" / "results.json").exists()
    told, no_results = _load(lambda: results.load(profile, "00_report"), {}) if there else ({}, "")
    figure, no_figure = _summary(profile, told)
    incomplete = f"Not everything ran: {', '.join(failures)}. What stands below is of the last complete report." if failures and claims else ""
    problem = " ".join(filter(None, (incomplete, no_claims, no_results, no_figure)))
    return {"claims": claim_words.rows(claims), "problem": problem, "answers": [_sentence(text) for text in told.get("findings", [])], "figure": figure,
            "study": results.reference(), "glossary": _sentence(results.glossary()),
            "experiments": experiments, "pages": set(executed), "ran": len(executed), "marks": MARKS,
            "tally": [(verdict, number) for verdict in MARKS if (number := sum(claim["verdict"] == verdict for claim in claims))], "explore": EXPLORE in executed}  # fmt: skip


def _load(load: Callable, otherwise):
    """What `load` gives and "", or `otherwise` and a sentence that says why it cannot be read."""
    try:
        return load(), ""
    except results.ResultError as error:
        return otherwise, f"{str(error)[0].upper()}{str(error)[1:]}."


def _sentence(markdown: str) -> str:
    """A finding of results.json, which has Markdown's emphasis, as HTML."""
    return MarkdownWithMath(renderer=_Renderer([], escape=True)).render(markdown)


def _title(name: str, executed: Mapping[str, Path]) -> str:
    source = executed.get(name, paths.NOTEBOOKS / f"{name}.ipynb")
    text = "\n".join(cell.source for cell in nbformat.read(source, as_version=4).cells if cell.cell_type == "markdown")
    heading = re.search(r"^#\s+(.+)$", text, flags=re.MULTILINE)
    return heading[1].strip() if heading else name


def _state(name: str, executed: Mapping[str, Path], failures: Mapping[str, str]) -> str:
    if name in failures:
        return f"failed: {failures[name]}" + (" The page is that of an earlier execution." if name in executed else "")
    if name not in executed:
        return "not run"
    record = executed[name].with_name("executed.json")
    try:
        return f"executed in {parse_json(record.read_text(), finite=True)['seconds']:.0f} s" if record.exists() else "executed"
    except (OSError, ValueError, LookupError, TypeError):
        return "executed (its executed.json is damaged: run it again)"


def _json(path: Path) -> dict:
    """The object in a file; an empty one where the file is absent, damaged or no object: what is asked of it is then left out of the page."""
    try:
        found = parse_json(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _alternatives(folder: Path) -> dict[str, dict]:
    """The figures of an experiment by name, as its results.json lists them; of another schema: none."""
    figures = _json(folder / "results.json").get("figures")
    listed = figures if isinstance(figures, list) else []
    return {figure["name"]: figure for figure in listed if isinstance(figure, dict) and all(isinstance(figure.get(key), str) for key in ("name", "alt", "svg"))}


def _summary(profile: str, told: Mapping) -> tuple[dict | None, str]:
    """The summary figure of 00_report, inline, with its alternative text in `told`, its results.json; None and a sentence where it should be there and is not."""
    folder = paths.outputs(profile) / "00_report" / "figures"
    described = {figure["name"]: figure["alt"] for figure in told.get("figures", [])}
    if source := _inline(folder / "summary.svg") or _inline(folder / "summary.png"):
        return {"source": source, "alt": described.get("summary", "Summary of all experiments; the table of claims below has the numbers.")}, ""
    lost = "summary" in described or any((folder / f"summary.{kind}").exists() for kind in ("svg", "png"))
    return None, "The summary figure of 00_report is missing or damaged: run the notebook again." if lost else ""


def _inline(figure: Path) -> str:
    """The data: address of an SVG or PNG; "" where there is none, or, with a line in the terminal, where it is no whole picture, which a browser would show as a broken one."""
    try:
        content = figure.read_bytes()
        if figure.suffix == ".svg":
            if not ElementTree.fromstring(content).tag.endswith("}svg"):
                raise ValueError("no SVG")
        elif not (content.startswith(b"\x89PNG\r\n\x1a\n") and content[-8:-4] == b"IEND"):
            raise ValueError("no whole PNG")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, ElementTree.ParseError):
        print(f"predmoe: {figure.name} of {figure.parents[1].name} is damaged and left out: run the notebook again", file=sys.stderr)
        return ""
    return f"data:image/{'svg+xml' if figure.suffix == '.svg' else 'png'};base64,{base64.b64encode(content).decode()}"


def _style() -> str:
    light, dark = (HtmlFormatter(style=style).get_style_defs(".highlight") for style in ("default", "github-dark"))
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{(TEMPLATES / 'style.css').read_text()}"


# --- a notebook --------------------------------------------------------------------------------------------------------

def notebook_html(path: Path) -> tuple[str, list[tuple[int, str, str]]]:
    """The cells of a notebook as HTML, and its headings down to the third level as (level, text, anchor)."""
    exporter = _Exporter()
    notebook = nbformat.read(path, as_version=4)
    _place_explorers(notebook, path.parent)
    _sharpen(notebook, path.parent)
    body, _ = exporter.from_notebook_node(notebook, {"metadata": {"path": str(path.parent)}})
    return body, [heading for heading in exporter.headings if heading[0] <= 3]


PLACE = '<div class="explorer-here">'


def _place_explorers(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Each explorer as its static twin: a place, the picture for viewers without scripts, and the table of positions. Where the table cannot be read
    the page says so and keeps the picture."""
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        if explorer_grid.MIME not in output.get("data", {}):
            continue
        told = output["metadata"].get("image/png", {})
        picture = f'<img src="data:image/png;base64,{output["data"].get("image/png", "")}" alt="{html.escape(told.get("alt", ""))}" width="{told.get("width", 800)}">'
        try:
            table = explorer_grid.load(folder / explorer_grid.FILE)
        except results.ResultError as error:
            placed = f'<p class="problem" role="note">{html.escape(str(error))}</p>{picture}'
        else:
            data = json.dumps(table, separators=(",", ":")).replace("<", "\\u003c")
            placed = f'{PLACE}<noscript>{picture}</noscript></div><script type="application/json">{data}</script>'
        output["data"] = {"text/html": placed}


def _sharpen(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Each saved figure as the SVG that lies beside its PNG, sharp on any screen and in print; found by the alternative text that both carry."""
    known = {figure["alt"]: folder / figure["svg"] for figure in _alternatives(folder).values()}
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        told = output.get("metadata", {}).get("image/png", {})
        vector = known.get(told.get("alt"))
        if "image/png" in output.get("data", {}) and vector and (source := _inline(vector)):
            output["data"] = {"text/html": f'<img class="figure" src="{source}" alt="{html.escape(told["alt"])}" width="{told.get("width", 800)}">'}


def _explorer_parts() -> dict[str, str]:
    """The explorer's script, its digest for the page's policy, and its style."""
    source, exported = (ASSETS / "explorer.js").read_text(), "export default { render };"
    if exported not in source:
        raise ValueError(f"explorer.js must end with {exported!r}: a page has no module to import it from")
    script = source.replace(exported, "host(document);")
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    return {"script": script, "policy": f"; script-src 'sha256-{digest}'", "more_style": (ASSETS / "explorer.css").read_text()}


class _Exporter(HTMLExporter):
    """nbconvert with the cell template of templates/cells, formulas as MathML, and no script of any kind."""

    def __init__(self):
        self.headings: list[tuple[int, str, str]] = []
        config = Config({"NbConvertBase": {"display_data_priority": SHOWN}, "HTMLExporter": {"embed_images": True}})
        super().__init__(config=config, template_name="cells", extra_template_basedirs=[str(TEMPLATES)])
        self.register_filter("latex2html", _outer_math)

    @jinja2.pass_context
    def markdown2html(self, context, source):
        cell, folder = context.get("cell", {}), context["resources"]["metadata"]["path"]
        renderer = _Renderer(self.headings, escape=False, embed_images=True, path=folder, attachments=cell.get("attachments", {}))
        return MarkdownWithMath(renderer=renderer).render(source)


class _Renderer(IPythonRenderer):
    """Markdown with formulas as MathML; headings are noted in `headings` and get anchors that are unique in the page."""

    def __init__(self, headings: list, **options):
        super().__init__(**options)
        self.headings = headings

    def heading(self, text, level, **attributes):
        plain = html.unescape(re.sub(r"<[^>]+>", "", text)).strip()
        anchor = re.sub(r"\W+", "-", plain.lower()).strip("-") or "section"
        taken = {known for _, _, known in self.headings}
        numbered = (f"{anchor}-{n}" for n in itertools.count(2))
        anchor = next(name for name in itertools.chain([anchor], numbered) if name not in taken)
        self.headings.append((level, plain, anchor))
        return f'<h{level} id="{anchor}">{text}<a class="anchor-link" href="#{anchor}" aria-label="Link to this section">¶</a></h{level}>\n'

    def inline_math(self, body):
        return mathml(body, "inline")

    def block_math(self, body):
        return mathml(body, "block")

    def latex_environment(self, name, body):
        return mathml(rf"\begin{{{name}}}{body}\end{{{name}}}", "block")


def mathml(tex: str, display: str) -> str:
    """A formula as MathML. One that the converter does not understand stays TeX, and the terminal says so."""
    numberless = re.sub(r"\{(align|aligned|equation|gather)\}", lambda m: "{%s*}" % m[1].removesuffix("ed"), tex)
    try:
        result = convert(numberless.strip(), display=display)
    except Exception as error:   # the converter has a dozen unrelated exceptions, and raises IndexError and others besides
        result, reason = None, type(error).__name__
    else:
        unknown = re.search(r">(\\[A-Za-z]+|&)<", result)
        reason = unknown and unknown[1]
    if reason:
        print(f"predmoe: a formula is shown as TeX ({reason}): {tex.strip()}", file=sys.stderr)
        return f'<code class="tex">{html.escape(tex)}</code>'
    return result


def _outer_math(text: str) -> str:
    """A text/latex output: one formula within dollars."""
    stripped = text.strip()
    return mathml(stripped.strip("$").removeprefix(r"\displaystyle"), "block" if stripped.startswith("$$") or r"\displaystyle" in stripped else "inline")
