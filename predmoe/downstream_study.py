"""What 12_downstream makes of its measurements: which tasks can be run here, tables and paired effects, and what they say in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from . import downstream_tasks, experiments, results, runs, stats
from .config import ConfigError, DownstreamConfig, RunConfig
from .findings import _p

TITLES = {
    "hellaswag": "HellaSwag", "arc_easy": "ARC easy", "arc_challenge": "ARC challenge", "piqa": "PIQA", "openbookqa": "OpenBookQA",
    "lambada_openai": "LAMBADA", downstream_tasks.CLOZE: "held-out cloze (ours)",
}  # fmt: skip
GOLD = "gold answer's log-likelihood"
METRICS = {"gold": (GOLD, "nats"), "accuracy": ("accuracy", "share"), "accuracy_norm": ("normalised accuracy", "share")}   # name -> words, unit


# --- what can be run ---------------------------------------------------------------------------------------------------

def settle(wanted: DownstreamConfig, configs: Sequence[RunConfig], store: Path) -> DownstreamConfig:
    """`wanted` where the store holds it of every run, as a repository's clone does; else with those tasks alone whose items are here.

    Raises ConfigError where nothing is left to run, and, before models are trained for it, where a file of items that is needed is damaged.
    """
    held = lambda how: configs and all(runs.Run(Path(store) / run.hash, run).measurement(how) is not None for run in configs)  # noqa: E731
    if held(wanted):
        return wanted
    lacking = downstream_tasks.missing(wanted.tasks, hub=wanted.hub)
    if len(lacking) == len(wanted.tasks) and not wanted.cloze:
        raise ConfigError(f"no task can be run: {'; '.join(dict.fromkeys(lacking.values())) or 'none is named'}")
    settled = dataclasses.replace(wanted, tasks=tuple(task for task in wanted.tasks if task not in lacking))
    for task in settled.tasks if not (wanted.hub or held(settled)) else ():
        downstream_tasks.read(task)
    return settled


def not_run(wanted: DownstreamConfig, settled: DownstreamConfig) -> list[str]:
    """A sentence about what was asked for and is not run, with the reasons; nothing is put in its place."""
    left_out = [task for task in wanted.tasks if task not in settled.tasks]
    if not left_out:
        return []
    reasons = downstream_tasks.missing(left_out, hub=wanted.hub)
    by_reason: dict[str, list[str]] = {}
    for task in left_out:
        by_reason.setdefault(reasons.get(task, "its items came while this ran: run again"), []).append(TITLES[task])
    return [f"Not run: {', '.join(names)} ({reason})." for reason, names in by_reason.items()]


# --- checks --------------------------------------------------------------------------------------------------------------

def say_left_out(arms: Sequence[Mapping]) -> str:
    """Of which tasks items have an answer that the models' context cannot hold; these are left out for every model."""
    found = arms[0]["downstream"]["left_out"]
    told = [f"{count} of {TITLES[task]}" + ("" if task in tasks_of(arms) else ", which are all of it") for task, count in found.items() if count]
    return f"Left out, since an answer is longer than the models' context: {'; '.join(told)}." if told else "Every answer fits the models' context."


def tasks_of(arms: Sequence[Mapping]) -> list[str]:
    """The tasks that every model has numbers of."""
    return list(arms[0]["downstream"]["tasks"])


def same_items(arms: Sequence[Mapping]) -> bool:
    """Whether every model answered the same items."""
    return len({tuple((task, found["fingerprint"]) for task, found in row["downstream"]["tasks"].items()) for row in arms}) == 1


def checks_of(arms: Sequence[Mapping]) -> list[Mapping]:
    """What `measure_downstream.compare` says of the harness's transformers class, of every model and task."""
    return [found for row in arms for found in row["downstream"]["harness"].values()]


def equals_harness(arms: Sequence[Mapping]) -> bool:
    """Whether every log-likelihood that the harness's transformers class gave as well is ours, but for rounding and what rounding makes of a router's tie."""
    return all(found["apart"] == found["ties"] for found in checks_of(arms))


def without_answers(arms: Sequence[Mapping]) -> list[dict]:
    """`arms` without the items, as results.json takes them: the run store keeps those."""
    return [row | {"downstream": {key: value for key, value in row["downstream"].items() if key != "answers"}} for row in arms]


# --- tables and effects -----------------------------------------------------------------------------------------------------

def scores(arms: Sequence[Mapping]) -> pd.DataFrame:
    """Columns arm, seed, task (its title), items, chance, and accuracy, accuracy_norm (none for an open answer) and gold, each with its
    standard error over the items; requests, and how many of them were cut."""
    columns = ["items", "chance", *(f"{name}{suffix}" for name in ("accuracy", "accuracy_norm", "gold") for suffix in ("", "_se")), "cut", "requests"]
    return pd.DataFrame([
        {"arm": row["arm"], "seed": row["seed"], "task": TITLES[task]} | {name: found.get(name, np.nan) for name in columns}
        for row in arms for task, found in row["downstream"]["tasks"].items()
    ])  # fmt: skip


def for_reading(table: pd.DataFrame) -> pd.DataFrame:
    """`scores` by task and arm, means over seeds, in percent and nats; a standard error is that of one model's items."""
    def words(part: pd.DataFrame, name: str, scale: float, digits: int) -> str:
        return "–" if part[name].isna().all() else f"{scale * part[name].mean():.{digits}f} ± {scale * part[f'{name}_se'].mean():.{digits}f}"

    return pd.DataFrame([
        {
            "task": task, "arm": arm, "seeds": len(part), "items": int(part["items"].iloc[0]), "chance (%)": f"{100 * part.chance.iloc[0]:.1f}",
            "accuracy (%)": words(part, "accuracy", 100, 1), "normalised (%)": words(part, "accuracy_norm", 100, 1), "gold answer (nats)": words(part, "gold", 1, 2),
            "cut short (%)": f"{100 * (part.cut / part.requests).mean():.1f}",
        }
        for (task, arm), part in table.groupby(["task", "arm"], sort=False)
    ])  # fmt: skip


def effects(arms: Sequence[Mapping], treatment: str = "joint", control: str = "baseline") -> list[dict]:
    """Paired effects over seeds of every task by metric, Holm-corrected over the tasks of a metric, with `task`, `measure` and `words`."""
    found = []
    for metric, (words, unit) in METRICS.items():
        paths = {f"downstream.tasks.{task}.{metric}": unit for task in tasks_of(arms) if metric in arms[0]["downstream"]["tasks"][task]}
        group = experiments.scalar_effects(arms, treatment, control, paths)
        adjusted = stats.holm([e["p"] for e in group]) if group and group[0]["p"] is not None else [None] * len(group)
        found += [
            effect | {"p_holm": p, "measure": metric, "task": path.split(".")[2], "words": f"{TITLES[path.split('.')[2]]}, {words}"}
            for effect, p, path in zip(group, adjusted, paths)
        ]  # fmt: skip
    return found


def forest(found: Sequence[Mapping], metrics: Sequence[str]) -> pd.DataFrame:
    """Effects of some metrics as `plots.forest` takes them, grouped by metric."""
    return pd.DataFrame([
        {"group": METRICS[e["measure"]][0], "name": TITLES[e["task"]], "arm": e["treatment"], "mean": e["mean"], "low": e["ci95"][0] if e["ci95"] else np.nan,
         "high": e["ci95"][1] if e["ci95"] else np.nan, "per_seed": e["per_seed"], "reference": np.nan}
        for e in found if e["measure"] in metrics
    ])  # fmt: skip


def effect_table(found: Sequence[Mapping]) -> pd.DataFrame:
    """Effects for reading: points, or nats for the log-likelihood."""
    rows = []
    for e in found:
        unit = "nats" if METRICS[e["measure"]][1] == "nats" else "points"
        mean, interval = results.effect_parts(e, unit)
        rows.append({"task": TITLES[e["task"]], "measure": METRICS[e["measure"]][0], "unit": unit, f"{e['treatment']} − {e['control']}": mean,
                     "95% interval": interval or "none (single seed)", "per seed": ", ".join(results.amount(x, e, unit) for x in e["per_seed"]), "p (Holm)": e["p_holm"]})   # fmt: skip
    return pd.DataFrame(rows)


def within_seeds(arms: Sequence[Mapping], treatment: str = "joint", control: str = "baseline") -> pd.DataFrame:
    """McNemar's exact test per seed and task: the items that one arm alone answers rightly, and p, Holm-corrected over all rows.

    Raises ResultError where a seed has no pair. Within one pair of models: what it says holds for these two, not for another seed.
    """
    from .measure_downstream import unpack_bits

    by_seed = {row["seed"]: row for row in arms if row["arm"] == control}
    rows = []
    for row in (row for row in arms if row["arm"] == treatment):
        if row["seed"] not in by_seed:
            raise results.ResultError(f"seed {row['seed']} of {treatment} has no {control} to be paired with")
        for task, found in row["downstream"]["tasks"].items():
            mine, theirs = (unpack_bits(one["downstream"]["answers"][task]["accuracy"], found["items"]) for one in (row, by_seed[row["seed"]]))
            rows.append({"task": TITLES[task], "seed": row["seed"], "items": found["items"]} | stats.mcnemar(mine, theirs, treatment, control))
    table = pd.DataFrame(rows)
    table["p (Holm)"] = stats.holm(table.p.tolist()) if len(table) else []
    return table


# --- findings -------------------------------------------------------------------------------------------------------------------

def say_chance(table: pd.DataFrame, arm: str) -> str:
    """On which tasks a model answers more, or less, often rightly than by guessing, by two standard errors over its items, means over seeds."""
    sides: dict[str, list[str]] = {"is above chance on": [], "cannot be told from chance on": [], "is below chance on": []}
    for task, part in table[table.arm == arm].groupby("task", sort=False):
        rate, error, chance = part.accuracy.mean(), part.accuracy_se.mean(), part.chance.iloc[0]
        side = "is above chance on" if rate - 2 * error > chance else "is below chance on" if rate + 2 * error < chance else "cannot be told from chance on"
        sides[side].append(f"{task} ({100 * rate:.1f}%, chance {100 * chance:.1f}%)")
    parts = "; ".join(f"{side} {', '.join(tasks)}" for side, tasks in sides.items() if tasks)
    rest = ". Where it cannot be told from chance, its accuracy says nothing of what training costs" if sides["cannot be told from chance on"] else ""
    return f"By two standard errors of its items, the {arm} model {parts}{rest}."


def say_effects(found: Sequence[Mapping], metric: str) -> str:
    """Where training for predictability moves a metric, which way, and where not, over all seeds; a single seed has no test."""
    group = [e for e in found if e["measure"] == metric]
    words, unit = METRICS[metric]
    scale, unit = (1, "nats") if unit == "nats" else (100, "points")
    if not group:
        return f"No task has a {words}."
    told = lambda e: f"{TITLES[e['task']]} ({scale * e['mean']:+z.2f})"  # noqa: E731
    if group[0]["ci95"] is None:
        return f"Joint training moves the {words}, in {unit}: {', '.join(map(told, group))} (a single seed, exploratory)."
    sides: dict[str, list[str]] = {}
    for e in group:
        side = "raises" if e["ci95"][0] > 0 else "lowers" if e["ci95"][1] < 0 else "does not measurably change"
        sides.setdefault(side, []).append(told(e))
    held = sum(e["p_holm"] <= stats.SIGNIFICANCE for e in group)
    parts = " and ".join(f"{side} it on {', '.join(names)}" for side, names in sides.items())
    return (f"The {words} ({unit}, {group[0]['n']} seeds): joint training {parts}; corrected for {len(group)} tasks (Holm), {held} of them "
            f"{'is' if held == 1 else 'are'} established.")   # fmt: skip


def say_verdict(found: Sequence[Mapping]) -> str:
    """Whether joint training changes zero-shot quality: what is established after Holm's correction over the tasks of each measure, which way, on which task and how large; then
    what changes the intervals of all others exclude. `found`: of `effects`. More is better in every measure."""
    if found[0]["ci95"] is None:
        return "Whether joint training changes zero-shot quality is not known: a single seed tests nothing."
    held = established(found)
    rest, seeds = [e for e in found if e not in held], f"{found[0]['n']} seeds"
    if not held:
        return f"In zero-shot tasks no change by joint training is established ({len(found)} comparisons, {seeds}). {_excluded(rest)}"
    told = "; ".join(f"{say_side(e)} ({results.effect_text(e, _unit(e))}, p = {_p(e['p_holm'])})" for e in held)
    others = f" Of the other {len(rest)} comparisons none is. {_excluded(rest)}" if rest else ""
    return f"In zero-shot tasks joint training {told}, which {'is' if len(held) == 1 else 'are'} established after Holm's correction over the tasks of each measure ({seeds}).{others}"


def established(found: Sequence[Mapping]) -> list[Mapping]:
    """Of `effects` those that hold after Holm's correction over the tasks of their measure; none of a single seed."""
    return [e for e in found if e["p_holm"] is not None and e["p_holm"] <= stats.SIGNIFICANCE]


def say_side(effect: Mapping) -> str:
    """ "lowers the gold answer's log-likelihood on LAMBADA" """
    return f"{'raises' if effect['mean'] > 0 else 'lowers'} the {METRICS[effect['measure']][0]} on {TITLES[effect['task']]}"


def _unit(effect: Mapping) -> str:
    """The unit in which an effect is written (`claims.UNITS`)."""
    return "nats" if METRICS[effect["measure"]][1] == "nats" else "points"


def _excluded(rest: Sequence[Mapping]) -> str:
    """By measure, the largest fall and rise that any interval leaves room for, rounded outwards so that what lies beyond is excluded as written."""
    told = []
    for metric, (words, _) in METRICS.items():
        if ends := [e["ci95"] for e in rest if e["measure"] == metric]:
            unit = _unit({"measure": metric})
            scale, steps, digits = (1, 100, 2) if unit == "nats" else (100, 10, 1)
            low = math.floor(round(scale * steps * min(low for low, _ in ends), 6)) / steps
            high = math.ceil(round(scale * steps * max(high for _, high in ends), 6)) / steps
            told.append(f"{low:+z.{digits}f} to {high:+z.{digits}f} {unit} of {'the ' if metric == 'gold' else ''}{words}")
    return f"Their intervals exclude what lies beyond {', '.join(told)}." if told else ""


def say_within(table: pd.DataFrame) -> str:
    """How many pairs of models differ by McNemar's test."""
    held = int((table["p (Holm)"] <= stats.SIGNIFICANCE).sum())
    return f"Item by item within a seed (McNemar's exact test), {held} of {len(table)} pairs of models differ after Holm's correction over all {len(table)}."


def say_harness(arms: Sequence[Mapping]) -> str:
    """What the harness's own transformers class made of the same items."""
    checks = checks_of(arms)
    if not checks:
        return "The harness's own transformers class was not asked (peer_items: 0)."
    total = {name: sum(found[name] for found in checks) for name in ("items", "judged_otherwise", "apart")}
    ties = f" In {total['apart']} of them a router's choice is a tie but for rounding, which each breaks its own way." if total["apart"] else ""
    but = f", but for {otherwise}" if (otherwise := total["judged_otherwise"]) else ""
    return (f"The harness's own transformers class, asked as well, judges all of {total['items']:,} items as our adaptor does{but}; "
            f"the largest difference of a log-likelihood is {max(found['largest_difference'] for found in checks):.1e} nats{', those with a tie apart' if ties else ''}.{ties}")   # fmt: skip
