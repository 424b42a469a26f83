"""14_ranking_seeds: does the effect grow or shrink with the size of the model, and with its number of experts?

Sizes are trained for the same number of tokens per active parameter (`studies.at_equal_tokens`). A size is a group of (baseline, joint)
measurements, as `experiments.measure_groups` gives them, named; the first group is the recipe as it stands. Sizes are exploratory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
import scipy.stats

from . import results, stats
from .findings import _seeds


# --- tables ------------------------------------------------------------------------------------------------------------

def by_size(measured: Mapping[str, Sequence[Mapping]], predictor: str) -> pd.DataFrame:
    """One row per size, seed and horizon: arm (the size's name), seed, horizon, total and active (parameters), hidden_size, experts, top_k,
    tokens_per_active, baseline (its hit@k), gain, of_the_rest (gain as a share of 1 - baseline), margin (its gain), loss_change (fraction)."""
    rows = []
    for name, arms in measured.items():
        bases = {row["seed"]: row for row in arms if row["arm"] == "baseline"}
        for joint in (row for row in arms if row["arm"] == "joint"):
            base, model, train = bases[joint["seed"]], joint["config"]["model"], joint["config"]["train"]
            tokens, size = train["steps"] * train["batch_size"] * model["context"], joint["parameters"]
            for h, hit in joint["hit"][predictor].items():
                gain, level = hit - base["hit"][predictor][h], base["hit"][predictor][h]
                rows.append({
                    "arm": name, "seed": joint["seed"], "horizon": int(h), "total": size["total"], "active": size["active"], "hidden_size": model["hidden_size"],
                    "experts": model["num_experts"], "top_k": model["top_k"], "tokens_per_active": tokens / size["active"], "baseline": level, "gain": gain,
                    "of_the_rest": gain / (1 - level), "margin": joint["margin_over_token_id"][predictor][h] - base["margin_over_token_id"][predictor][h],
                    "loss_change": joint["val_loss"] / base["val_loss"] - 1,
                })  # fmt: skip
    return pd.DataFrame(rows)


def same_experts(table: pd.DataFrame) -> pd.DataFrame:
    """Of `by_size`: the sizes that have as many experts, and choose as many, as the first; by size."""
    first = table.iloc[0]
    return table[(table.experts == first.experts) & (table.top_k == first.top_k)].sort_values(["active", "seed"], kind="stable")


def same_width(table: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """Of `by_size`: the sizes as wide as the first of `names` (none: as the first size), by number of experts, with a column routing such as
    "16, top-2"."""
    chosen = next(iter(names), table.iloc[0].arm)
    width = table[table.arm == chosen].hidden_size.iloc[0]
    part = table[table.hidden_size == width].sort_values(["experts", "top_k", "seed"], kind="stable")
    return part.assign(routing=part.experts.astype(str) + ", top-" + part.top_k.astype(str))


def sizes_table(table: pd.DataFrame) -> pd.DataFrame:
    """For reading: a row per size and horizon, means over its seeds."""
    keys = ["arm", "hidden_size", "experts", "top_k", "total", "active", "horizon"]
    grouped = table.groupby(keys, sort=False).agg(
        seeds=("seed", "nunique"), tokens_per_active=("tokens_per_active", "mean"), baseline=("baseline", "mean"), gain=("gain", "mean"),
        of_the_rest=("of_the_rest", "mean"), margin=("margin", "mean"), loss_change=("loss_change", "mean"),
    ).reset_index()  # fmt: skip
    for name in ("gain", "margin", "of_the_rest", "loss_change"):
        grouped[name] *= 100
    names = {"arm": "size", "hidden_size": "width", "tokens_per_active": "tokens per active parameter", "baseline": "baseline hit@k", "gain": "gain (points)",
             "of_the_rest": "gain (% of what the baseline misses)", "margin": "gain in margin (points)", "loss_change": "loss (%)"}  # fmt: skip
    return grouped.rename(columns=names)


def reference_points(predictor: str) -> pd.DataFrame:
    """Columns arm, active, routing, horizon, gain: the reference study's effect at its tiers, for one predictor.

    Tier A has joint 0.3 - baseline. Tier B's baseline is not given, so that its dose table tells only what 0.3 brings over the smallest dose
    (linear predictor): less than what it brings over none, if more weight brings more.
    """
    reference, rows = results.reference(), []

    def add(name, tier, values):
        shape = reference["tiers"][tier]
        routing = f"{shape['experts']}, top-{shape['top_k']}"
        rows.extend({"arm": name, "active": shape["active"], "routing": routing, "horizon": int(h), "gain": gain} for h, gain in values.items())

    for row in reference["effect"]:
        if row["predictor"] == predictor:
            add("reference, tier A", "A", {h: row[h] for h in row if h.isdigit()})
    if predictor == "linear":
        doses = {row["lambda"]: row for row in reference["dose"] if row["tier"] == "B"}
        least = min(doses)
        add(f"reference, tier B, 0.3 against {least:g}", "B", {h: doses[0.3][h] - doses[least][h] for h in doses[least] if h.isdigit()})
    return pd.DataFrame(rows, columns=["arm", "active", "routing", "horizon", "gain"])


# --- effects -----------------------------------------------------------------------------------------------------------

def trends(table: pd.DataFrame, horizons: Sequence[int], value: str = "gain") -> list[dict]:
    """How `value` changes with each doubling of the active parameters: least squares over all (size, seed) pairs of `by_size`, by horizon.

    The interval is Student's with as many degrees of freedom as pairs less two; it supposes a straight line over the logarithm and the same
    spread at every size. None of it where there are fewer than three pairs or a single size.
    """
    found = []
    for h in horizons:
        part = table[table.horizon == h]
        x, y = np.log2(part.active.to_numpy(dtype=float)), part[value].to_numpy(dtype=float)
        if len(x) < 3 or len(set(x)) < 2:
            continue
        fit = scipy.stats.linregress(x, y)
        half = float(scipy.stats.t.ppf(0.975, len(x) - 2)) * float(fit.stderr)
        slope = float(fit.slope)
        found.append({
            "name": f"{value} per doubling of the active parameters, h={h}", "unit": "hit@k per doubling", "mean": slope, "ci95": [slope - half, slope + half],
            "n": len(x), "per_seed": [slope], "p": float(fit.pvalue), "method": f"least squares over {len(x)} pairs of runs", "horizon": h, "metric": value,
            "family": "exploratory",
        })  # fmt: skip
    return found


# --- in words ----------------------------------------------------------------------------------------------------------

def say_control(effects: Sequence[Mapping]) -> str:
    """The effect under the weaker and under the stronger post-hoc predictor on both sides, by horizon."""
    linear, ranking = ({e["horizon"]: e for e in effects if e["predictor"] == name} for name in ("linear", "ranking"))
    told = "; ".join(f"{100 * linear[h]['mean']:+z.1f} and {100 * ranking[h]['mean']:+z.1f} points at h = {h}" for h in ranking)
    smaller = sum(ranking[h]["mean"] < linear[h]["mean"] for h in ranking)
    return (f"Under the linear and under the ranking predictor, the same on both sides, the effect is {told}: the stronger control makes it smaller "
            f"at {smaller} of {len(ranking)} horizons.")  # fmt: skip


def say_sizes(table: pd.DataFrame, found: Sequence[Mapping]) -> list[str]:
    """The gain at the deepest horizon by size, and whether it grows or shrinks with size at each horizon."""
    deepest = table[table.horizon == table.horizon.max()]
    told = ", ".join(f"{100 * part.gain.mean():+z.1f} at {active / 1e6:.2f}M ({_seeds({'n': len(part)})})" for active, part in deepest.groupby("active"))
    sentences = [f"By active parameters, the gain in hit@k at h = {deepest.horizon.iloc[0]} is, in points: {told}."]
    if not found:
        return [*sentences, "Fewer than three pairs of runs, or a single size, tell nothing of a trend."]
    way = lambda e: "grows" if e["ci95"][0] > 0 else "shrinks" if e["ci95"][1] < 0 else "does not measurably change"  # noqa: E731
    by_way: dict[str, list[str]] = {}
    for e in found:
        by_way.setdefault(way(e), []).append(f"at h = {e['horizon']} ({results.effect_text(e, 'points')})")
    parts = " and ".join(f"{verb} {', '.join(at)}" for verb, at in by_way.items())
    return [*sentences, f"With each doubling of the active parameters the gain {parts}; {found[0]['n']} pairs of runs, exploratory."]


def say_experts(table: pd.DataFrame) -> str:
    """The gain at the deepest horizon by number of experts, of the sizes of one width."""
    deepest = table[table.horizon == table.horizon.max()]
    told = []
    for routing, part in deepest.groupby("routing", sort=False):
        effect = stats.over_seeds(dict(zip(part.seed, part.gain))).as_dict()
        told.append(f"{results.effect_text(effect, 'points')} with {routing}" + (f", {effect['n']} seeds" if effect["n"] > 1 else ""))
    return f"By number of experts, at width {deepest.hidden_size.iloc[0]}, the gain in hit@k at h = {deepest.horizon.iloc[0]} is {'; '.join(told)} (exploratory)."
