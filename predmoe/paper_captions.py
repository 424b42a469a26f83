"""The sentence with which a figure's caption begins: what it shows, computed from the tables that are drawn, so that it follows the data.

Levels and differences are of means over seeds; where intervals are counted, they are those of the figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from . import cache_study, controls, experiments, scaling, stats
from .plots_simulator import ARMS
from .reference_table import DEMAND as NO_PREFETCH
from .tex import listed

Table = Callable[[str], pd.DataFrame]   # reads a table of the experiment by its name


def _sides(effects: Sequence[Mapping]) -> str:
    """On which side of zero intervals lie: "the interval lies above zero at 3 of 3"; of single seeds there are none."""
    held = [e["ci95"] for e in effects if e["ci95"] is not None]
    if not held:
        return "a single seed, without an interval"
    sides = (("above", sum(low > 0 for low, _ in held)), ("below", sum(high < 0 for _, high in held)))
    return "the interval lies " + " and ".join(f"{side} zero at {n} of {len(held)}" for side, n in sides if n or side == "above")


def _range(values: Sequence[float], unit: str) -> str:
    ends = [f"{100 * value:+z.1f}" for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends)) + unit


def summary(result: Mapping, table: Table) -> str:
    found = experiments.hit_effects(result["arms"], "joint", "baseline", predictors=[experiments.PRIMARY])
    return f"Joint minus baseline is {_range([e['mean'] for e in found], ' points')} over {len(found)} horizons; {_sides(found)}."


def dose(result: Mapping, table: Table) -> str:
    doses = table("doses")
    deepest, parts = doses.horizon.max(), []
    for gradient, part in doses[doses.horizon == deepest].groupby("arm", sort=False):
        means = part.groupby("dose").gain.mean().sort_index()
        parts.append(f"from {100 * means.iloc[0]:+z.1f} to {100 * means.iloc[-1]:+z.1f} points (gradient {gradient})")
    return f"From the least to the largest weight the gain at h = {deepest} goes {' and '.join(parts)}."


def six(result: Mapping, table: Table) -> str:
    means = table("six_arms").groupby(["horizon", "arm"]).hit.mean()
    first: dict[str, list[str]] = {}
    for h in sorted(means.index.get_level_values(0).unique()):
        first.setdefault(means[h].idxmax(), []).append(f"h = {h}")
    return "The highest reading is " + "; ".join(f"{name} at {listed(at)}" for name, at in first.items()) + "."


def power(result: Mapping, table: Table) -> str:
    known, seeds = table("power"), len({row["seed"] for row in result["arms"]})
    seeds = min(seeds, known.n.max())   # the curves may end before
    part = known[(known.arm == "paired") & (known.n == seeds)]
    effect = min(part.effect.unique(), key=lambda value: abs(value - 0.01))
    chances = part[part.effect == effect].set_index("horizon").power.sort_index()
    return (f"With {seeds} paired seeds an effect of {100 * effect:g} point{'' if effect == 0.01 else 's'} is found with a chance of {' / '.join(f'{p:.0%}' for p in chances)} "
            f"at h = {' / '.join(map(str, chances.index))}.")  # fmt: skip


def locality(result: Mapping, table: Table) -> str:
    own = [row for row in result["arms"] if not row["arm"].endswith("(order)")]
    found = controls.locality_effects(own, "joint")
    return f"Of {len(found)} measures of locality, joint minus baseline: {_sides(found)}."


def ladder(result: Mapping, table: Table) -> str:
    found = controls.sharpness_effects([row for row in result["arms"] if row["arm"] != "sharpened"])   # which it makes itself
    above = [e for e in found if e["part"] == "structure"]
    return f"The joint model minus its own ladder at equal entropy is {_range([e['mean'] for e in above], ' points')} over {len(above)} horizons; {_sides(above)}."


def sizes(result: Mapping, table: Table) -> str:
    means = scaling.same_experts(table("sizes")).groupby(["active", "horizon"]).gain.mean()
    return f"Here the gain is {_range(means, ' points')} over {means.index.get_level_values(0).nunique()} sizes and {means.index.get_level_values(1).nunique()} horizons."


def known(result: Mapping, table: Table) -> str:
    rows = table("known")
    deepest = rows[rows.horizon == rows.horizon.max()]
    means = deepest.groupby(["arm", "family"], sort=False)[["known", "loss_change"]].mean().reset_index()
    kept = means[means.loss_change <= stats.MAX_LOSS_INCREASE]
    best = kept.loc[kept.known.idxmax()]
    return f"Within the gate, {best.arm} ({best.family}) knows most at h = {deepest.horizon.iloc[0]}: {best.known:.1%}, at {100 * best.loss_change:+z.1f}% in loss."


def curves(result: Mapping, table: Table) -> str:
    best = cache_study.best_policy(table("hit_curves"))
    gaps = best.assign(gap=best.belady_hit - best.best_hit).groupby("model", sort=False).gap.mean()
    return f"The best policy that does not know the future stays {100 * gaps.min():.0f} to {100 * gaps.max():.0f} points below the optimum, on average over cache sizes."


def fit(result: Mapping, table: Table) -> str:
    tokens = table("engine_fit")
    part = tokens[tokens.half == "predicted"]
    off = (part.predicted_ms / part.measured_ms - 1).abs().median()
    return f"On {len(part)} tokens that the fit has not seen, the median error is {off:.1%}."


def bandwidth(result: Mapping, table: Table) -> str:
    rows = table("bandwidth")
    means = rows[(rows.accuracies == "ours") & (rows.variant == "all mended")].groupby(["fits", "gb_per_s"]).gain.mean()
    told = [f"{_range(means[flag], '%')} where {words}" for flag, words in ((True, "a read fits behind a layer"), (False, "none does")) if flag in means.index.get_level_values(0)]
    return f"With our accuracies the gain is {' and '.join(told)}."


def harm(result: Mapping, table: Table) -> str:
    cells = table("map")
    cells = cells[cells.guard == "none"]
    return f"Prefetching harms in {(cells.gain < 0).sum()} of {len(cells)} cells; the best gains {cells.gain.max():.0%}."


def race(result: Mapping, table: Table) -> str:
    rows = table("race")
    means = rows.assign(tok_s=1000 * rows.tokens / rows.ms).groupby(["share", "source"]).tok_s.mean()
    smallest, told = means[rows["share"].min()], f"With {rows['share'].min():.0%} of the experts in the cache"
    if smallest.idxmax() == NO_PREFETCH:
        return f"{told} nothing is faster than no prefetch."
    return f"{told} the fastest is {ARMS[smallest.idxmax()]}, at {smallest.max() / smallest[NO_PREFETCH]:.2f} times the speed without prefetch."


def prediction(result: Mapping, table: Table) -> str:
    rows = table("prediction")
    return f"The simulated speed is off by {rows.error_tok_s.abs().median():.1%} in the median cell and by {rows.error_tok_s.abs().max():.1%} in the worst of {len(rows)}."
