"""A claim of the reference study, decided from the arms of results.json: what is measured, by which rule, with which verdict.

A claim (assets/claims.yaml, where its fields are explained) has one measure, or several parts with a measure and a rule each; its verdict is
then that of all parts together (`stats.verdict_all`), and every part keeps its own. Nothing here reads or writes a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from . import stats
from .config import ConfigError

UNITS = {"points": (100, 1, " points"), "percent": (100, 2, "%"), "nats": (1, 4, " nats")}   # factor, fewest decimals, name
FINER = 2    # decimals that a narrow interval may have beyond its unit's own
STEPS = 10   # of its last decimal that an interval is wide at least, where FINER allows: two digits of its width
REFERENCE_LOSS = "margin"   # of PosthocConfig.ranking_loss, the reference study's
RULES = {"direction": stats.verdict, "absent": stats.verdict_absent, "at_most": stats.verdict_at_most}


class ResultError(ConfigError):
    """A result that is missing, incomplete or of another schema; the message says where."""


def evaluate(spec: Mapping, results: Mapping[str, Mapping]) -> dict:
    """One entry of claims.json from one of claims.yaml and the results by experiment; which of its notebooks decides says `deciding`."""
    ran = deciding(spec["notebook"], results)
    notebook = ran or spec["notebook"][-1]
    arms, loss = (results[ran]["arms"], ranking_loss(results[ran])) if ran else (None, REFERENCE_LOSS)
    parts = [_part(part, arms, notebook, loss) for part in spec.get("parts", [spec])]
    effects = [effect for part in parts for effect in part["effects"]]
    decided, measured = stats.Verdict(parts[0]["verdict"], parts[0]["why"]), parts[0]["measured"]
    if "parts" in spec:
        decided = stats.verdict_all({part["name"]: stats.Verdict(part["verdict"], part["why"]) for part in parts})
        measured = "; ".join(f"{part['name']}: {part['measured']}" for part in parts) if effects else measured
    fit = {"fit": parts[0]["fit"]} if "fit" in parts[0] else {}
    return {
        "id": spec["id"], "statement": spec["statement"], "headline": spec["headline"], "reference": spec["reference"],
        "measured": measured, "effect": effects[0] if effects else None, "effects": effects,
        "n": min((effect["n"] for effect in effects), default=0), "verdict": decided.word, "why": decided.why, "notebook": notebook,
    } | ({"parts": parts} if "parts" in spec else fit)  # fmt: skip


def deciding(notebooks: Sequence[str], results: Mapping[str, Mapping]) -> str | None:
    """Of the experiments that could decide a comparison, the best first, the one that does: the first of those that have the most seeds of the
    ordinary model among those that have been run; None where none has.

    Every claim, the report's first lines, its figure and the paper ask here, so that they stand on the same models. Seeds are those of the arm "baseline" (of all arms
    where there is none), so that models of other sizes, which a notebook names otherwise, do not count.
    """
    def seeds(name: str) -> int:
        rows = results[name]["arms"]
        return len({row["seed"] for row in [row for row in rows if row["arm"] == "baseline"] or rows})

    return max((name for name in notebooks if name in results), key=seeds, default=None)   # of equals, max gives the first


def not_run(notebook: str) -> str:
    """Why a claim has no verdict whose experiment has not been executed."""
    return f"{notebook} has not been run in this profile"


NAMES = r"(?P<joint>: | only for )(?P<names>[^()]*?(?: - |, h=|\.|_)[^()]*)$"   # the internal names of effects at the end of a verdict's reason


def reason(claim: Mapping) -> str:
    """Why a claim has its verdict, for reading: of the names of effects that may end a reason only the horizons; of several parts, each part's reason."""
    if not (parts := claim.get("parts")) or not claim["effects"]:
        return plain_reason(claim["why"])
    return f"{stats.count_parts([part['verdict'] for part in parts])}. " + "; ".join(f"{part_name(part)}: {part['verdict']} ({plain_reason(part['why'])})" for part in parts)


def part_name(part: Mapping) -> str:
    """A part of a claim for reading; where the ranking MLP is fitted otherwise than in the reference study, by which loss."""
    return part["name"] + (f" (fitted by {part['fit']})" if "fit" in part else "")


def plain_reason(why: str) -> str:
    """A verdict's reason with, of the names of effects that may end it, only the horizons."""
    if not (match := re.search(NAMES, why)):
        return why
    at = ", ".join(dict.fromkeys(f"h = {h}" for h in re.findall(r"h=(\d+)", match["names"])))
    return why[: match.start()] + (match["joint"] + at if at else "" if match["joint"] == ": " else " in part")


def other_size(claim: Mapping) -> str | None:
    """Of a claim that holds in direction and is partly replicated because of its size alone: the horizons at which the size differs, "h = 1, h = 2" ("" where it
    has none); None of any other claim, and of one with several parts."""
    if claim["verdict"] != stats.PARTLY or claim.get("parts") or stats.OTHER_SIZE not in claim["why"]:
        return None
    return ", ".join(re.findall(r"h = \d+", plain_reason(claim["why"]).partition(stats.OTHER_SIZE)[2]))


def _part(spec: Mapping, arms: list[Mapping] | None, notebook: str, loss: str) -> dict:
    """A part, or a claim that is its own only part, as claims.json holds it."""
    effects, missing = [], not_run(notebook)
    if "measure" not in spec:
        missing = "no experiment measures this yet"
    elif arms is not None:
        try:
            effects = _effects(spec["measure"], arms, spec["unit"])
        except ResultError as error:
            missing = f"{notebook}: {error}"
    decided = RULES[spec["rule"]](effects, spec["expected"]) if effects else stats.Verdict(stats.NOT_TESTED, missing)
    plain = [effect.as_dict() for effect in effects]
    measured = _measured(plain, spec) if plain else "not measured"
    fit = {"fit": loss} if plain and loss != REFERENCE_LOSS and "ranking" in spec["measure"]["metric"].split(".") else {}
    return {"name": spec.get("name", ""), "measured": measured, "effects": plain, "verdict": decided.word, "why": decided.why} | fit


def ranking_loss(result: Mapping) -> str:
    """By which loss the ranking MLPs of an experiment's arms are fitted, of its parameters (`studies.first_fit`)."""
    asked = result.get("provenance", {}).get("parameters", {})
    return asked.get("posthoc", {}).get("ranking_loss", asked.get("ranking_loss", REFERENCE_LOSS))


def _effects(measure: Mapping, arms: list[Mapping], unit: str) -> list[stats.Effect]:
    arm, metric = measure.get("arm"), measure["metric"]
    minus, minus_metric = measure.get("minus", arm), measure.get("minus_metric", metric)
    subtract = "minus" in measure or "minus_metric" in measure
    shared = dict(relative=measure.get("relative", False), unit=unit)

    def one(suffix: str, values) -> stats.Effect:
        left, right = f"{arm} {metric}", f"{minus} {minus_metric}"
        if subtract:
            return stats.paired(*_pair(values(arm, metric), values(minus, minus_metric), minus), **shared, name=f"{left} - {right}{suffix}")
        return stats.over_seeds(values(arm, metric), name=left + suffix, unit=unit)

    if "pairs" in measure:
        return [stats.paired(*_pair(values_by_seed(arms, a, metric), values_by_seed(arms, b, metric), b), **shared, name=f"{a} - {b}, {metric}")
                for a, b in measure["pairs"]]  # fmt: skip
    if "minus_at" in measure:
        return [_at_equal(measure, arms, path, f", h={h}", **shared) for h in measure["horizons"] for path in [f"{metric}.{h}"]]
    if "contrast" in measure:
        far, near = measure["contrast"]

        def contrast(arm, metric):
            high, low = values_by_seed(arms, arm, f"{metric}.{far}"), values_by_seed(arms, arm, f"{metric}.{near}")
            return {seed: high[seed] - low[seed] for seed in high}

        label = "h=" if isinstance(far, int) else ""
        return [one(f", {label}{far} minus {label}{near}", contrast)]
    if "horizons" in measure:
        return [one(f", h={h}", lambda arm, metric, h=h: values_by_seed(arms, arm, f"{metric}.{h}")) for h in measure["horizons"]]
    return [one("", lambda arm, metric: values_by_seed(arms, arm, metric))]


def _pair(mine: dict[int, float], theirs: dict[int, float], control: str) -> tuple[dict[int, float], dict[int, float]]:
    """Both sides of a difference over the treatment's seeds: the control may have more, never fewer."""
    if alone := sorted(set(mine) - set(theirs)):
        raise ResultError(f"arm {control!r} lacks seed {', '.join(map(str, alone))}, which it is compared on")
    return mine, {seed: theirs[seed] for seed in mine}


def _at_equal(measure: Mapping, arms: list[Mapping], path: str, suffix: str, **shared) -> stats.Effect:
    along, match = measure["minus_at"]["arms"], measure["minus_at"]["match"]
    control = matched(arms, measure["arm"], path, along=along, match=match)
    mine = values_by_seed(arms, measure["arm"], path)
    name = f"{measure['arm']} {measure['metric']} - the same at equal {match} along {', '.join(along)}{suffix}"
    return stats.paired({seed: mine[seed] for seed in control}, control, **shared, name=name)


def matched(arms: Iterable[Mapping], treatment: str, metric: str, *, along: Iterable[str], match: str) -> dict[int, float]:
    """seed -> `metric` that the arms `along` have where their `match` equals the treatment's, on straight lines between them.

    For the seeds that the treatment and all of `along` have. Outside the range of `along` the nearest arm's value is taken: a treatment
    whose routers are no sharper than the baseline's is compared with the baseline itself. Raises ResultError where no seed is common.
    """
    arms = list(arms)
    own = values_by_seed(arms, treatment, match)
    ladder = [(values_by_seed(arms, arm, match), values_by_seed(arms, arm, metric)) for arm in along]
    seeds = sorted(set(own).intersection(*(at for at, _ in ladder)))
    if not seeds:
        raise ResultError(f"no seed has all of {treatment}, {', '.join(along)}")
    found = {}
    for seed in seeds:
        points = sorted((at[seed], value[seed]) for at, value in ladder)
        found[seed] = float(np.interp(own[seed], *zip(*points)))
    return found


def values_by_seed(arms: Iterable[Mapping], arm: str, metric: str) -> dict[int, float]:
    """seed -> value of a dotted path such as "hit.ranking.4". Raises ResultError where the arm or the metric is missing."""
    rows = [row for row in arms if row["arm"] == arm]
    if not rows:
        raise ResultError(f"there is no arm {arm!r}")
    values = {row["seed"]: _look_up(row, metric) for row in rows}
    if len(values) != len(rows):
        raise ResultError(f"arm {arm!r} has a seed twice")
    return values


def _look_up(row: Mapping, metric: str) -> float:
    value = row
    for key in metric.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ResultError(f"arm {row['arm']!r}, seed {row['seed']} has no {metric}")
        value = value[key]
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ResultError(f"arm {row['arm']!r}, seed {row['seed']}: {metric} is {value!r}, not a finite number")
    return value


def effect_text(effect: Mapping, unit: str) -> str:
    """An effect with its interval in words, e.g. "+2.4 points [+1.0, +3.8]"; one seed says that it has no interval."""
    mean, interval = effect_parts(effect, unit)
    return f"{mean}{UNITS[unit][2]} {interval or '(single seed)'}"


def effect_parts(effect: Mapping, unit: str) -> tuple[str, str]:
    """Mean and interval without the unit's name, with the same decimals (`decimals`): ("+2.4", "[+1.0, +3.8]"); the interval is empty where there is none."""
    mean, *ends = (amount(value, effect, unit) for value in (effect["mean"], *(effect["ci95"] or ())))
    return mean, f"[{', '.join(ends)}]" if ends else ""


def amount(value: float, effect: Mapping, unit: str) -> str:
    """A value of an effect (its mean, an end, a seed's own) in `unit`, with the decimals of the effect and never as -0.0."""
    return f"{UNITS[unit][0] * value:+z.{decimals(effect['ci95'], unit)}f}"


def decimals(ci95: Sequence[float] | None, unit: str) -> int:
    """Decimals of an effect and its interval: those of the unit, and up to FINER more until the interval is STEPS of its last decimal wide and no end but an exact
    zero is written as zero. Rounding keeps order, so that with one number of decimals for all three a mean never stands outside its interval."""
    scale, fewest, _ = UNITS[unit]
    if ci95 is None or ci95[1] - ci95[0] <= 1e-9 * max(map(abs, ci95)):   # no interval, or none but for rounding: the same in every seed
        return fewest
    low, high = (scale * end for end in ci95)
    fine = (d for d in range(fewest, fewest + FINER) if round((high - low) * 10**d, 6) >= STEPS and all(not end or round(end, d) for end in (low, high)))
    return next(fine, fewest + FINER)


def _measured(effects: list[Mapping], spec: Mapping) -> str:
    horizons = spec["measure"].get("horizons")
    text = " / ".join(effect_text(effect, spec["unit"]) for effect in effects)
    n = effects[0]["n"]
    return text + (f" at h = {' / '.join(map(str, horizons))}" if horizons else "") + f" ({n} seed{'s' if n > 1 else ''})"
