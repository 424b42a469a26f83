"""What a profile still has to train: the runs that its notebooks need, what is done, what is missing, and how long that takes.

`predmoe plan --profile cpu` prints it; `--train` works it off in order, so that a long study can be done in several sittings.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import config, downstream_study, execute, runs, studies
from .files import read_json
from .finished import TIMING
from .measured import read_measurement
from .model import count_parameters


# How far a run is.
DONE, TRAINED, AGAIN, BEGUN, MISSING = "done", "trained", "again", "begun", "missing"
STATES = {   # of those that are not done, in the plan's words
    TRAINED: "trained, and to be measured (trained)",
    AGAIN: "trained and to be measured, but without their weights here, so they are trained again first (again)",
    BEGUN: "begun (begun)",
    MISSING: "not begun (missing)",
}

ALL = "all, each run once"   # the last line of the plan's table


@dataclass(frozen=True)
class Item:
    """One run of a profile: the notebooks that need it, its fit of predictors, how far it is and what is left, in seconds."""

    run: config.RunConfig
    posthoc: config.PosthocConfig
    further: tuple[runs.Measurement, ...]   # measurements besides, where a notebook needs them: other kinds, or another fit
    notebooks: tuple[str, ...]
    arm: str
    lacking: tuple[str, ...]   # the notebooks that cannot run without what is missing
    state: str              # DONE or one of STATES
    seconds: float | None   # estimated for what is left; None where nothing like it has been timed here


def plan(profile: str, only: Sequence[str] = (), *, store: Path | None = None) -> list[Item]:
    """Every run of a profile once, in the order of the notebooks and of their studies.

    The estimate takes the median time per step of finished runs of the same model on this store, else scales that of the
    others by parameters that are active per token. Raises ConfigError as `execute.plan`.
    """
    store = Path(store) if store else runs.default_store(profile)
    needed: dict[str, dict] = {}
    for job in execute.plan(profile, only):
        if job.name not in studies.STUDIES or job.params is None:
            continue
        parameters = execute.check(job.notebook, job.params)
        posthoc, pairs = studies.first_fit(parameters), studies.pairs_of(job.name, parameters)
        further = [studies.FURTHER[job.name](parameters)] if job.name in studies.FURTHER else []
        further += [studies.second_fit(parameters)] if job.name in studies.REFITTED else []
        # What is on the hub is not asked for here: a plan needs no network.
        further = [downstream_study.settle(how, [run for _, run in pairs], store) if isinstance(how, config.DownstreamConfig) and not how.hub else how for how in further]
        for arm, run in pairs:
            entry = needed.setdefault(run.hash, {"run": run, "posthoc": posthoc, "arm": arm, "notebooks": {}})
            entry["notebooks"][job.name] = [posthoc, *further]
    timings = _timings(store)
    return [_item(entry, store, timings) for entry in needed.values()]


def train(items: Sequence[Item], profile: str, *, parallel: int, store: Path | None = None, report: Callable[[str], None] = print) -> None:
    """Train and measure what is not done, in the order of the plan. Raises runs.RunFailed as `runs.get_or_measure`."""
    left = wanted(items)
    runs.measure_missing(left, store=Path(store) if store else runs.default_store(profile), parallel=parallel, report=report)


def wanted(items: Sequence[Item]) -> list[tuple[config.RunConfig, list]]:
    """What is not done, as `runs.measure_missing` and `fleet.work` take it: runs, each with its measurements."""
    return [(item.run, [item.posthoc, *item.further]) for item in items if item.state != DONE]


def tell(items: Sequence[Item], parallel: int, command: str = "") -> str:
    """The plan for reading: a line per notebook, which counts all runs that it needs, and one for all of them, which counts each once; the runs that are left, in
    order, the time that they take, and the `command` that makes them."""
    lines = [f"{'notebook':<22} {'runs':>5} {'done':>5} {'to measure':>11} {'missing':>8} {'hours left':>11}"]
    counted = set()
    for name in dict.fromkeys(name for item in items for name in item.notebooks):
        mine = [item for item in items if name in item.notebooks]
        lacking = [item for item in mine if name in item.lacking]
        new = [item for item in lacking if id(item) not in counted]
        counted.update(map(id, new))
        lines.append(_line(name, mine, lacking, _hours(new, parallel)))
    left = [item for item in items if item.state != DONE]
    if len(lines) > 2:   # with several notebooks, which may share runs
        lines.append(_line(ALL, items, left, _hours(left, parallel)))
        lines.append("A notebook's line counts all runs that it needs, and the hours of those that no line above has; the last line counts each run once.")
    if not left:
        return "\n".join([*lines, f"\nAll {len(items)} runs are done."])
    count = {state: sum(item.state == state for item in items) for state in (DONE, *STATES)}
    told = [f"{count[DONE]} of {len(items)} runs are done", *(f"{count[state]} {words}" for state, words in STATES.items() if count[state])]
    hours = _hours(left, parallel)
    time = "How many hours are left is unknown" if hours == "unknown" else f"About {hours} hours are left"
    lines.append(f"\n{'; '.join(told)}. {time} with {parallel} side by side.")
    label = runs.labels([item.run for item in items], besides=["steps"])
    lines += [
        f"  {item.run.hash}  {item.state:<8} {label[item.run.hash]}, {item.run.train.steps} steps"
        f"{'' if item.seconds is None else f', {item.seconds / 60:.0f} min'}  ({', '.join(item.lacking)})" for item in left
    ]  # fmt: skip
    lines += [f"To train and measure what is left (it can be interrupted and goes on): {command}"] if command else []
    return "\n".join(lines)


def _line(name: str, needed: Sequence[Item], lacking: Sequence[Item], hours: str) -> str:
    """A line of the table: of the runs `needed`, those that are done and those that are not (`lacking`), trained or not."""
    measure = sum(item.state in (TRAINED, AGAIN) for item in lacking)
    return f"{name:<22} {len(needed):>5} {len(needed) - len(lacking):>5} {measure:>11} {len(lacking) - measure:>8} {hours:>11}"


def _hours(items: Sequence[Item], parallel: int) -> str:
    left = [item for item in items if item.state != DONE]
    if not left:
        return "0.0"
    if any(item.seconds is None for item in left):
        return "unknown"
    return f"{sum(item.seconds for item in left) / parallel / 3600:.1f}" if left else "0.0"


def _item(entry: dict, store: Path, timings: dict) -> Item:
    run, posthoc = entry["run"], entry["posthoc"]
    found = runs.Run(store / run.hash, run)
    found.check()
    wanted = list(dict.fromkeys(how for needs in entry["notebooks"].values() for how in needs))
    missing = [how for how in wanted if found.measurement(how) is None]
    lacking = tuple(name for name, needs in entry["notebooks"].items() if set(needs) & set(missing))
    if not missing:
        state, left = DONE, 0.0
    else:
        begun = BEGUN if (found.path / "timing.json").exists() else MISSING
        state = (TRAINED if found.has_checkpoint else AGAIN) if found.finished else begun
        left = _estimate(run, found, timings, len(missing))
    further = tuple(how for how in wanted if how != posthoc)
    return Item(run, posthoc, further, tuple(entry["notebooks"]), entry["arm"], lacking, state, left)


Kind = tuple[config.ModelConfig, str]   # a shape, and how it is trained: "" from nothing, else what of a stock model is


def _kind(run: config.RunConfig) -> Kind:
    return run.model, run.finetune.trained if run.finetune else ""


def _timings(store: Path) -> dict[Kind, tuple[float, float]]:
    """kind of run -> (median seconds per training step of `batch` tokens, median seconds of measuring), from the finished runs of a store."""
    found: dict[Kind, list[tuple[float, float]]] = {}
    for source in sorted(store.glob("*/posthoc-*.json")):
        if source.name.endswith(".config.json"):
            continue
        measured = read_measurement(source, config.PosthocConfig)
        run, seconds = _configuration(source, measured["config"]), measured["seconds"]
        if not all(isinstance(seconds.get(part), (int, float)) for part in ("train", "posthoc")):
            raise config.ConfigError(f"{source} is damaged (it does not say how long training and measuring took); restore it from a copy, or remove it to measure the run again")
        tokens = run.train.steps * run.train.batch_size * run.model.context
        found.setdefault(_kind(run), []).append((seconds["train"] / tokens, seconds["posthoc"]))
    return {kind: tuple(map(statistics.median, zip(*values))) for kind, values in found.items()}


def _configuration(source: Path, described) -> config.RunConfig:
    try:
        return config.build(config.RunConfig, described)
    except config.ConfigError as error:
        raise config.ConfigError(f"{source} is damaged ({error}); restore it from a copy, or remove it to measure the run again") from None


def _estimate(run: config.RunConfig, found: runs.Run, timings: dict, measurements: int = 1) -> float | None:
    """Seconds of one process for what is left of a run and its measurements; each further one is taken to last as long as the post-hoc one.

    A finished run whose checkpoint is not here is trained again to be measured.
    """
    if not timings:
        return None
    active = lambda model: count_parameters(model)["active"]  # noqa: E731
    model, trained = kind = _kind(run)
    like = kind if kind in timings else min(timings, key=lambda other: (abs(active(other[0]) - active(model)), other[1] != trained, not other[1]))
    per_token, measuring = timings[like]
    scale = active(run.model) / active(like[0])
    again = found.finished and not found.has_checkpoint
    done = read_json(found.path / "timing.json", TIMING)["steps"] if (found.path / "timing.json").exists() and not again else 0
    tokens = (run.train.steps - done) * run.train.batch_size * run.model.context
    return scale * (per_token * tokens + measurements * measuring)
