"""What an experiment found, as files: results.json per experiment, claims.json per profile.

    outputs/PROFILE/NN_topic/results.json, *.csv, figures/*.svg and *.png      written by an Experiment
    outputs/PROFILE/claims.json                                                computed from all results.json of the profile

The report and the paper read only these. Both files are validated against the schemas in assets/ before they are written and after
they are read; what is missing or not a finite number is an error.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import jsonschema
import pandas as pd
import yaml
from matplotlib.figure import Figure
from PIL import Image

from . import claims, paths, plots, provenance
from .claims import ResultError, amount, effect_parts, effect_text, values_by_seed   # noqa: F401  what reads results reads them from here
from .files import parse_json

ASSETS = Path(__file__).parent / "assets"
SCHEMA_VERSION = 1
MADE_WITH = ("provenance", "measured_by", "posthoc_config", "seconds", "tokens_per_second")   # of an arm: kept under provenance
THEIRS, OURS = "the reference's accuracies", "our accuracies"   # `accuracies` of an effect that is simulated: on whose hit@k
ELSEWHERE = ("documents", "curves", "config", *MADE_WITH)   # of an arm: left to the run store and the CSV tables


# --- one experiment ----------------------------------------------------------------------------------------------------

def start(experiment: str, profile: str, parameters: Mapping) -> Experiment:
    """Begin an experiment: remembers provenance and time now, writes under outputs/PROFILE/EXPERIMENT/ as it goes."""
    return Experiment(experiment, profile, dict(parameters))


class Experiment:
    """The files of one experiment in one profile. Nothing counts until `finish` has written results.json."""

    def __init__(self, experiment: str, profile: str, parameters: dict):
        self.experiment, self.profile = experiment, profile
        self.folder = paths.outputs(profile) / experiment
        (self.folder / "figures").mkdir(parents=True, exist_ok=True)
        self._provenance = provenance.capture() | {"parameters": parameters}
        self._began = time.monotonic()
        self._figures: dict[str, dict] = {}
        self._tables: dict[str, dict] = {}
        self._findings: list[str] = []

    def save_table(self, name: str, table: pd.DataFrame) -> pd.DataFrame:
        """Write NAME.csv and give the table back, so that a cell can end with the call."""
        _write(self.folder / f"{name}.csv", table.to_csv(index=False).encode())
        self._tables[name] = {"name": name, "csv": f"{name}.csv"}
        return table

    def save_figure(self, name: str, figure: Figure, alt: str) -> Picture:
        """Write figures/NAME.svg and .png with their alternative text; the Picture given back shows itself in a notebook."""
        if not alt.strip():
            raise ResultError(f"figure {name} needs an alternative text: what does it show to somebody who cannot see it?")
        svg, png = _render(figure)
        _write(self.folder / "figures" / f"{name}.svg", svg)
        _write(self.folder / "figures" / f"{name}.png", png)
        self._figures[name] = {"name": name, "svg": f"figures/{name}.svg", "png": f"figures/{name}.png", "alt": alt}
        return Picture(png, alt, width=round(figure.get_figwidth() * 96))

    def found(self, *sentences: str) -> Sentences:
        """Record findings, sentences computed from the tables; what is given back shows them in a notebook."""
        self._findings += sentences
        return Sentences(sentences)

    def finish(self, arms: Iterable[Mapping], effects: Iterable[Mapping], *, gates: Iterable[Mapping] = ()) -> Path:
        """Write results.json atomically and return its path. Raises ResultError where the schema is not met.

        arms: one mapping per arm and seed (`experiments.measure_arms`); per-document and per-step data is left to the tables.
        """
        arms = list(arms)
        made = {"seconds": round(time.monotonic() - self._began, 1), "runs": _runs(arms)}
        result = {
            "schema_version": SCHEMA_VERSION, "experiment": self.experiment, "profile": self.profile,
            "provenance": self._provenance | made,
            "arms": [{key: value for key, value in arm.items() if key not in ELSEWHERE} for arm in arms],
            "effects": list(effects), "gates": list(gates), "findings": self._findings,
            "figures": list(self._figures.values()), "tables": list(self._tables.values()),
        }  # fmt: skip
        target = self.folder / "results.json"
        _write_json(target, result, "results")
        return target


def _runs(arms) -> dict:
    """Provenance of each trained model by hash: how and how fast it was made varies, what it measures does not."""
    return {arm["config_hash"]: {key: arm[key] for key in MADE_WITH if key in arm} for arm in arms if "config_hash" in arm}


class Picture:
    """A PNG that carries its alternative text into the notebook and from there into the HTML report."""

    def __init__(self, png: bytes, alt: str, width: int):
        self._png, self._alt, self._width = png, alt, width

    def _repr_mimebundle_(self, include=None, exclude=None):
        data = {"image/png": base64.b64encode(self._png).decode(), "text/plain": self._alt}
        return data, {"image/png": {"alt": self._alt, "width": self._width}}


class Sentences:
    """Sentences that a notebook shows as a quoted block; `Experiment.found` records them as well."""

    def __init__(self, sentences: Iterable[str]):
        self.sentences = list(sentences)

    def _repr_markdown_(self) -> str:
        return "\n".join(f"> {sentence}\n>" for sentence in self.sentences)

    def __repr__(self) -> str:
        return "\n".join(self.sentences)


def _render(figure: Figure) -> tuple[bytes, bytes]:
    """SVG and PNG at 1.75 times the screen's density; the PNG has a palette of 32 colours, a third of the size for line art: a notebook stays below 500 kB, and the HTML report shows the SVG."""
    with plots.style():
        svg, raw = io.BytesIO(), io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})   # no date: the same data gives the same file
        figure.savefig(raw, format="png", dpi=168, metadata={"Software": None})
    raw.seek(0)
    small = io.BytesIO()
    Image.open(raw).convert("RGB").quantize(32, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(small, format="PNG", optimize=True)
    return svg.getvalue(), small.getvalue()


# --- reading -----------------------------------------------------------------------------------------------------------

def load(profile: str, experiment: str) -> dict:
    """results.json of one experiment, validated. Raises ResultError where it is absent or does not meet the schema."""
    return _load(profile, experiment, paths.outputs(profile) / experiment / "results.json")


def borrow(profile: str, experiment: str) -> dict:
    """`load` of a profile that another one reads: from the repository where PREDMOE_OUTPUTS names a folder that lacks it, and that is printed."""
    path = paths.borrowed(profile, f"{experiment}/results.json")
    paths.say_borrowed(profile, f"results of {experiment}", path)
    return _load(profile, experiment, path)


def _load(profile: str, experiment: str, path: Path) -> dict:
    if not path.exists():
        paths.check_profile(profile)
        raise ResultError(f"{experiment} has no results in profile {profile}: run its notebook first (predmoe report --profile {profile} --only {experiment.split('_')[0]})")
    return _read_json(path, "results")


def load_all(profile: str) -> dict[str, dict]:
    """Every experiment of the profile that has results, by name."""
    found = sorted(paths.outputs(profile).glob("[0-9][0-9]_*/results.json"))
    return {path.parent.name: _read_json(path, "results") for path in found}


def load_table(profile: str, experiment: str, name: str) -> pd.DataFrame:
    """A table that an experiment wrote. Raises ResultError where it is absent or cannot be read."""
    path = paths.outputs(profile) / experiment / f"{name}.csv"
    try:
        return pd.read_csv(path)
    except (FileNotFoundError, pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"is damaged ({str(error).strip().splitlines()[0]})"
        raise ResultError(f"{name}.csv of {experiment} {why}: run the notebook again") from None


def load_claims(profile: str) -> list[dict]:
    path = paths.outputs(profile) / "claims.json"
    if not path.exists():
        paths.check_profile(profile)
        raise ResultError(f"profile {profile} has no claims.json yet: run 00_report, which writes it")
    return _read_json(path, "claims")


def reference() -> dict:
    """The reference study's numbers (assets/reference.json), with its name, author, url and what they were measured on."""
    return json.loads((ASSETS / "reference.json").read_text())


def benchmark(name: str, folder: Path | None = None) -> dict | None:
    """What benchmarks/NAME.py measured (outputs/benchmarks/NAME.json), with the table that it made of it as "markdown"; None where it was not run.
    Raises ResultError where the file is damaged."""
    path = (folder or paths.ROOT / "outputs" / "benchmarks") / f"{name}.json"
    if not path.exists():
        return None
    try:
        found = parse_json(path.read_text())
    except ValueError as error:   # JSON's and UTF-8's own errors are ValueErrors
        found = error
    if not isinstance(found, dict) or not isinstance(found.get("markdown"), str):
        raise ResultError(f"{path} is damaged: run benchmarks/{name}.py --json {path} again")
    return found


def title(notebook: str) -> str:
    """The heading of a notebook in notebooks/; its name where it has none."""
    cells = parse_json((paths.NOTEBOOKS / f"{notebook}.ipynb").read_text())["cells"]
    heading = re.search(r"^#\s+(.+)$", "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"), flags=re.MULTILINE)
    return heading[1].strip() if heading else notebook


def glossary() -> str:
    """The report's words, explained in a Markdown list (assets/glossary.md)."""
    return (ASSETS / "glossary.md").read_text()


def field() -> dict:
    """What others have published about an engine that reads experts from disk (assets/field.json), with its source."""
    return json.loads((ASSETS / "field.json").read_text())


@functools.cache
def claim_specs() -> list[dict]:
    """The claims of the reference study and how each is decided (assets/claims.yaml, which explains its fields)."""
    return yaml.safe_load((ASSETS / "claims.yaml").read_text())


# --- claims ------------------------------------------------------------------------------------------------------------

def update_claims(profile: str) -> list[dict]:
    """Decide every claim of assets/claims.yaml from the results present, write outputs/PROFILE/claims.json, return the list.

    A claim whose experiments have not run is "not tested"; so is one with fewer than three seeds, its effect shown.
    """
    found = load_all(profile)
    decided = [claims.evaluate(spec, found) for spec in claim_specs()]
    _write_json(paths.outputs(profile) / "claims.json", decided, "claims")
    return decided


# --- files -------------------------------------------------------------------------------------------------------------

def _schema(kind: str) -> dict:
    return json.loads((ASSETS / f"{kind}.schema.json").read_text())


def _validate(value, kind: str, where: str, remedy: str = "") -> None:
    problem = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(_schema(kind)).iter_errors(value))
    if problem:
        raise ResultError(f"{where}: {problem.json_path}: {problem.message[:300]}{remedy}")


def _write_json(path: Path, value, kind: str) -> None:
    try:
        text = json.dumps(value, indent=1, allow_nan=False)
    except ValueError:
        raise ResultError(f"{path.name} of {path.parent.name}: a value is not a finite number") from None
    _validate(json.loads(text), kind, f"{path.name} of {path.parent.name}")
    _write(path, (text + "\n").encode())


def _read_json(path: Path, kind: str):
    again = "run 00_report again" if kind == "claims" else "run the notebook again"
    try:
        value = parse_json(path.read_text(), finite=True)
    except ValueError as error:   # JSON's and UTF-8's own errors are ValueErrors
        raise ResultError(f"{path.name} of {path.parent.name} is damaged ({error}): {again}") from None
    except OSError as error:   # a folder of that name, or one that may not be read
        raise ResultError(f"{path.name} of {path.parent.name} cannot be read ({error.strerror}): remove it and {again}") from None
    if not isinstance(value, list if kind == "claims" else dict):
        raise ResultError(f"{path.name} of {path.parent.name} is damaged (it holds a {type(value).__name__}): {again}")
    if kind == "results" and value.get("schema_version") != SCHEMA_VERSION:
        found = value.get("schema_version", "none")
        raise ResultError(f"{path.name} of {path.parent.name} has schema version {found}, this code reads {SCHEMA_VERSION}: run the notebook again")
    _validate(value, kind, f"{path.name} of {path.parent.name}", f"; {again}")
    return value


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: a reader never sees half a file, and a full disk leaves the old one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
