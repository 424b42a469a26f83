"""Strict notebook execution: papermill, after the parameters have been checked against the notebook's parameters cell.

papermill itself runs a notebook with a misspelt parameter or with the text "3e-1" where a number belongs, and says little. Here both
stop the run before it starts. What runs is the interpreter that runs this, whichever kernels are registered on the machine.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import io
import json
import logging
import os
import re
import sys
import tempfile
import time
import tokenize
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import nbformat
import papermill
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError

from . import paths, progress
from .config import ConfigError
from .files import parse_json, parse_yaml
from .strict import number_hint

KERNEL = "python3"
KERNEL_SECONDS = 300   # to start within, on a machine that does other work as well
SECTIONS = ("model", "train", "data", "objective", "predictor", "posthoc")   # of a configuration: `config.tier` refuses what they have not


class NotebookFailed(RuntimeError):
    """A cell of a notebook raised; the message says which and where the partly executed copy lies."""


# --- parameters --------------------------------------------------------------------------------------------------------

def inspect(notebook: Path) -> dict:
    """The notebook's parameters and their defaults: name -> literal.

    Raises ConfigError unless exactly one cell is tagged `parameters` and it holds nothing but `name = literal` lines, each explained by
    a comment beside or above it.
    """
    notebook = Path(notebook)
    cells = [cell.source for cell in _read(notebook).cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        raise ConfigError(f"{notebook.name} has {len(cells)} cells tagged 'parameters'; it needs exactly one")
    (source,) = cells
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise ConfigError(f"{notebook.name}: the parameters cell is not Python: {error.msg} in line {error.lineno}") from None
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    commented = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    code = {line for statement in statements for line in range(statement.lineno, statement.end_lineno + 1)}
    defaults = {}
    for statement in statements:
        name, value = _literal(statement, notebook)
        own = set(range(statement.lineno, statement.end_lineno + 1)) | ({statement.lineno - 1} - code)
        if not own & commented:
            raise ConfigError(f"{notebook.name}: parameter {name} has no comment that says what it is")
        if name in defaults:
            raise ConfigError(f"{notebook.name}: parameter {name} is defined twice")
        defaults[name] = value
    return defaults


def _literal(statement: ast.stmt, notebook: Path) -> tuple[str, object]:
    """`name = literal` as (name, value)."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        with contextlib.suppress(ValueError):
            return statement.targets[0].id, ast.literal_eval(statement.value)
    raise ConfigError(
        f"{notebook.name}: line {statement.lineno} of the parameters cell, `{ast.unparse(statement)}`, is not a name and a literal value"
    )


def check(notebook: Path, params: Mapping) -> dict:
    """The notebook's defaults with `params` in their place, or a ConfigError for an unknown name or a value of another type.

    An int is taken for a float. What a default cannot tell (None, an empty list or dict) is not checked, and a warning says so, but for
    changes to a section of the configuration, which is strict itself as soon as the notebook begins.
    """
    notebook = Path(notebook)
    defaults = inspect(notebook)
    for name in params:
        if name not in defaults:
            near = difflib.get_close_matches(str(name), defaults, n=1)
            meant = f"; did you mean {near[0]}?" if near else ";"
            raise ConfigError(f"{notebook.name} has no parameter {name!r}{meant} its parameters cell has {', '.join(defaults)}")
    return defaults | {name: _as(f"{notebook.name}: {name}", value, defaults[name]) for name, value in params.items()}


def _as(name: str, value, default):
    """`value` where it has the type of `default`, items and keys included."""
    if isinstance(default, dict) and isinstance(value, dict) and re.search(r"(\w+)\W*$", name)[1] in SECTIONS:
        return value
    if default is None or (default in ([], (), {}) and isinstance(value, type(default))):
        warnings.warn(f"{name}={value!r} is not checked, since its default {default!r} does not tell a type", stacklevel=3)
        return value
    if isinstance(default, dict) and isinstance(value, dict):
        if unknown := sorted(map(str, value.keys() - default.keys())):
            raise ConfigError(f"{name} has no entry {', '.join(unknown)}; it has {', '.join(map(str, default))}")
        return {key: _as(f"{name}[{key!r}]", item, default[key]) for key, item in value.items()}
    if isinstance(default, (list, tuple)) and isinstance(value, (list, tuple)):
        return [_as_one_of(f"{name}[{index}]", item, default) for index, item in enumerate(value)]
    if type(default) is float and type(value) is int:
        return float(value)
    if type(value) is type(default):
        return value
    hint = number_hint(value, type(default)) if type(default) in (int, float) and isinstance(value, str) else ""
    raise ConfigError(f"{name}={value!r} is {type(value).__name__}, not {type(default).__name__} like its default {default!r}{hint}")


def _as_one_of(name: str, value, defaults: list | tuple):
    """`value` where it has the type of one of `defaults`; the error is that of the last."""
    for default in defaults[:-1]:
        with contextlib.suppress(ConfigError):
            return _as(name, value, default)
    return _as(name, value, defaults[-1])


# --- execution ---------------------------------------------------------------------------------------------------------

def execute(notebook: Path, out: Path, params: Mapping | None = None, *, stdout: TextIO | None = None) -> Path:
    """Run `notebook` with checked `params`, write the executed copy to `out` once all of it has run, and return `out`.

    `stdout` receives what the cells print, as they print it.

    Raises ConfigError before anything runs (see `check`), NotebookFailed where a cell raises: `out` is then as it was, and the partly
    executed copy lies beside it as NAME.failed.ipynb.
    """
    notebook, out, params = Path(notebook), Path(out), dict(params or {})
    values = check(notebook, params)
    running, failed = (out.with_name(f"{out.stem}.{state}.ipynb") for state in ("running", "failed"))
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with own_kernel(), _without_hints():
            papermill.execute_notebook(
                str(notebook), str(running), {name: values[name] for name in params},
                kernel_name=KERNEL, language="python", progress_bar=False, stdout_file=stdout,
                start_timeout=KERNEL_SECONDS,
            )  # fmt: skip
    except PapermillExecutionError as error:
        os.replace(running, failed)
        last = error.evalue.strip().splitlines()[0] if error.evalue.strip() else ""
        raise NotebookFailed(f"{notebook.name}: cell [{error.exec_count}] raised {error.ename}: {last} (the whole story: {failed})") from None
    except (DeadKernelError, CellTimeoutError) as error:
        os.replace(running, failed)
        raise NotebookFailed(f"{notebook.name}: {str(error).strip()} (out of memory? the cells that ran: {failed})") from None
    executed = _read(running)
    _without_widgets(executed)
    executed.metadata.papermill |= {"input_path": notebook.name, "output_path": out.name}   # the same on every machine
    nbformat.write(executed, running)
    os.replace(running, out)
    failed.unlink(missing_ok=True)
    return out


def _without_widgets(executed: nbformat.NotebookNode) -> None:
    """Leave out what only the kernel that is gone could bring to life, so that the picture beside it is shown."""
    executed.metadata.pop("widgets", None)
    for output in (output for cell in executed.cells for output in cell.get("outputs", [])):
        if "image/png" in output.get("data", {}):
            output.data.pop("application/vnd.jupyter.widget-view+json", None)


@contextlib.contextmanager
def _without_hints() -> Iterator[None]:
    """Within, papermill keeps to itself which parameter lines its own, weaker inspection cannot read: `inspect` has read them."""
    logger = logging.getLogger("papermill.translators")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def own_kernel() -> Iterator[None]:
    """Within, the kernel `python3` is this very interpreter: a kernelspec of our own goes before all that are registered.

    The kernel keeps its own log to itself: it would tell of every interrupt, and of the client that went away with it, as errors of its own. What a
    cell raises, and a kernel's death, come by other ways.
    """
    spec = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=CRITICAL"], "display_name": "Python 3", "language": "python"}
    before = os.environ.get("JUPYTER_PATH")
    with tempfile.TemporaryDirectory() as folder:
        kernel = Path(folder) / "kernels" / KERNEL
        kernel.mkdir(parents=True)
        (kernel / "kernel.json").write_text(json.dumps(spec))
        os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, (folder, before)))
        try:
            yield
        finally:
            os.environ.pop("JUPYTER_PATH") if before is None else os.environ.update(JUPYTER_PATH=before)


UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, nbformat.ValidationError)   # nbformat's, of a file that is no notebook: JSON of another shape raises almost anything


def damage(notebook: Path) -> str | None:
    """What is wrong with an executed copy, in a sentence."""
    try:
        nbformat.validate(nbformat.read(notebook, as_version=4))
    except UNREADABLE:
        return "its executed copy is damaged: run it again."
    return None


def _read(notebook: Path) -> nbformat.NotebookNode:
    try:
        return nbformat.read(notebook, as_version=4)
    except FileNotFoundError:
        raise ConfigError(f"there is no notebook {notebook}") from None
    except UNREADABLE as error:
        raise ConfigError(f"{notebook} is not a notebook: {str(error).splitlines()[0][:120]}") from None


# --- a whole profile ---------------------------------------------------------------------------------------------------

UPPER = (   # above the notebooks: a change there changes no result
    "__main__.py", "arguments.py", "cli.py", "lab.py", "plan.py", "progress.py", "report.py", "paper.py", "paper_build.py", "paper_captions.py",
    "paper_figures.py", "paper_studies.py", "paper_tables.py", "paper_text.py", "references.py", "tex.py",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One notebook in one profile: its parameters (None: it has none for this profile) and where its executed copy goes."""

    notebook: Path
    params: dict | None
    out: Path

    @property
    def name(self) -> str:
        return self.notebook.stem

    @property
    def record(self) -> Path:
        return self.out.with_name("executed.json")

    def written(self) -> str | None:
        """Digest of the results.json that its folder holds, whoever wrote it; None without one."""
        results = self.out.with_name("results.json")
        return _digest(results) if results.exists() else None

    def inputs(self) -> dict[str, str]:
        """Digests of everything that the executed copy depends on; 00_* also on the results of all the others."""
        found = {"notebook": _digest(self.notebook), "parameters": hashlib.sha256(json.dumps(self.params, sort_keys=True).encode()).hexdigest()[:16]}
        package = Path(__file__).parent
        sources = [path for pattern in ("**/*.py", "assets/**/*") for path in package.glob(pattern) if path.is_file() and path.name not in UPPER]
        found["package"] = _digest(*sources)
        if self.name.startswith("00_"):
            found["results"] = _digest(*(path for path in self.out.parents[1].glob("*/results.json") if path.parent != self.out.parent))
        return found


def plan(profile: str, only: Sequence[str] = ()) -> list[Job]:
    """The notebooks of a profile in order, explore and 00_report last, every parameter checked before anything runs.

    `only` keeps those whose name or number ("03" or "3") is given. Parameters come from params/NN_topic/PROFILE.yaml; without that file the smoke
    profile takes the notebook's defaults, and so does a notebook whose one parameter is `profile`; otherwise it is left out.
    """
    found = [*paths.NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"), *paths.NOTEBOOKS.glob("explore.ipynb")]
    notebooks = sorted(found, key=lambda path: (path.name.startswith("00_"), path.name))
    if not notebooks:
        raise ConfigError(f"there are no notebooks in {paths.NOTEBOOKS}: run predmoe from a clone of the repository")
    paths.check_profile(profile)
    for wanted in only:
        if not any(_is(path, wanted) for path in notebooks):
            raise ConfigError(f"unknown notebook {wanted!r}; there are {', '.join(path.stem for path in notebooks)}")
    chosen = [path for path in notebooks if not only or any(_is(path, wanted) for wanted in only)]
    return [Job(path, _parameters(path, profile), paths.outputs(profile) / path.stem / path.name) for path in chosen]


def _is(notebook: Path, wanted: str) -> bool:
    """Whether a notebook is meant by its name or its number, with or without the zero before it."""
    number = notebook.stem[:2]
    return wanted == notebook.stem or (number.isdecimal() and wanted in (number, number.removeprefix("0")))


def _parameters(notebook: Path, profile: str) -> dict | None:
    source, defaults = paths.PARAMS / notebook.stem / f"{profile}.yaml", inspect(notebook)
    given = {"profile": profile} if "profile" in defaults else {}
    if not source.exists():
        return given if profile == "smoke" or defaults.keys() <= {"profile"} else None
    try:
        params = parse_yaml(source.read_text())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except ValueError as error:
        raise ConfigError(f"{source} is not YAML: {error}") from None
    params = {} if params is None else params   # an empty file
    if not isinstance(params, dict):
        raise ConfigError(f"{source} holds a {type(params).__name__}; it needs `name: value` lines")
    if given and params.get("profile", profile) != profile:   # papermill would follow the line, and write another profile's results
        raise ConfigError(f"{source} says `profile: {params['profile']}`, and its name says {profile}: results go to outputs/{profile}, so change that line or rename the file")
    try:
        check(notebook, params | given)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return params | given


def run(jobs: Sequence[Job], *, force: bool = False, verbose: bool = False, say: Callable[[str], None] = partial(print, flush=True)) -> dict[str, str]:
    """Execute what is not up to date, a line of progress each and one now and then while it runs, and return name -> what went wrong.

    An executed copy is up to date while everything that it depends on is as it was. A notebook that fails does not stop the others,
    only 00_report, which sums them all up. Interrupted, the next call goes on where this one stopped.
    """
    failures: dict[str, str] = {}
    for number, job in enumerate(jobs, start=1):
        head = f"[{number}/{len(jobs)}] {job.name}"
        inputs = job.inputs()
        stale = ", ".join(_changed(job, inputs))
        if job.params is None:
            say(f"{head}: skipped, there is no params/{job.name}/{job.out.parents[1].name}.yaml")
        elif job.name.startswith("00_") and failures:
            waits = ", ".join(failures)
            failures[job.name] = f"{job.name} sums up all notebooks and waits for {waits}"
            say(f"{head}: not run, it waits for {waits}")
        elif not stale and not force:
            say(f"{head}: up to date ({json.loads(job.record.read_text())['seconds']:.0f} s when it ran)")
        else:
            say(f"{head}: running ({stale or 'forced'})")
            began = time.monotonic()
            job.record.unlink(missing_ok=True)
            heard = progress.Heard(sys.stdout if verbose else None)
            try:
                with progress.told(head, heard, say):
                    execute(job.notebook, job.out, job.params, stdout=heard)
            except NotebookFailed as error:
                failures[job.name] = str(error)
                say(f"{head}: FAILED after {time.monotonic() - began:.0f} s: {error}")
            else:
                seconds = time.monotonic() - began
                record = {"seconds": round(seconds, 1), "parameters": job.params, "inputs": inputs, "results": job.written()}
                job.record.write_text(json.dumps(record, indent=1) + "\n")
                say(f"{head}: executed in {seconds:.0f} s")
    return failures


def _changed(job: Job, inputs: Mapping[str, str]) -> list[str]:
    """Why a job has to run: what changed since its executed copy was made."""
    if not job.out.exists() or not job.record.exists():
        return ["not run yet"]
    try:
        record = parse_json(job.record.read_text())
        before = record["inputs"] | {} if record["seconds"] >= 0 else {}
    except (ValueError, LookupError, TypeError):
        return ["executed.json is damaged"]
    if damage(job.out):
        return ["its executed copy is damaged"]
    stale = [f"{name} changed" for name, digest in inputs.items() if before.get(name) != digest]
    # The same notebook run by papermill with other parameters writes the same folder.
    return stale + (["results.json is of another execution"] if record.get("results") != job.written() else [])


def _digest(*files: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.parent.name}/{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]
