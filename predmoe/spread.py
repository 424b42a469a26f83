"""06_seeds: how far seeds differ, what pairing them buys, and how many of them an effect of a given size needs.

A quantity is hit@k of one predictor at one horizon, or the validation loss (named "val_loss", horizon 0). Standard deviations are over seeds
(n - 1 in the denominator) and, from a handful of seeds, themselves uncertain: each comes with its chi-square interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import scipy.stats
from scipy.special import ndtr

from . import experiments, results, stats
from .findings import _seeds
from .plots import PREDICTORS

DIFFERENCE = "joint - baseline"
LOSS = "val_loss"
POWER = 0.8   # the chance of finding an effect that is usually asked for


# --- statistics --------------------------------------------------------------------------------------------------------

def std_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Standard deviation of at least two values and its 95% interval, as if they were normal (chi-square)."""
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2 or not np.isfinite(x).all():
        raise ValueError(f"a standard deviation takes at least two finite values, not {x.tolist()}")
    std, free = float(x.std(ddof=1)), len(x) - 1
    low, high = (std * math.sqrt(free / scipy.stats.chi2.ppf(q, free)) for q in (0.975, 0.025))
    return std, low, high


def power(effect: float, std: float, n: int, *, groups: int = 1, level: float = stats.SIGNIFICANCE) -> float:
    """Chance that a two-sided t test finds a true mean difference `effect` (Cohen, Statistical Power Analysis, 1988), to five digits.

    groups=1: n paired differences of standard deviation `std`; groups=2: two independent groups of n values each, `std` that of a value.
    """
    if n < 2 or std <= 0:
        raise ValueError(f"power needs n >= 2 and a positive standard deviation, not n={n}, std={std}")
    free = groups * (n - 1)
    critical = scipy.stats.t.ppf(1 - level / 2, free)
    shift = abs(effect) / (std * math.sqrt(groups / n))
    # The noncentral t as a mean over the estimated standard deviation, at 4,000 quantiles of it: scipy's own is NaN here and there where power is near 1.
    limits = critical * np.sqrt(scipy.stats.chi2.ppf((np.arange(4000) + 0.5) / 4000, free) / free)
    return float((ndtr(shift - limits) + ndtr(-shift - limits)).mean())


def seeds_needed(effect: float, std: float, *, groups: int = 1, wanted: float = POWER, most: int = 1000) -> int | None:
    """The fewest seeds (per group) with which `power` reaches `wanted`, or None where `most` are not enough."""
    low, high = 1, most   # power grows with n: bisection, low is never enough
    if power(effect, std, most, groups=groups) < wanted:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(effect, std, middle, groups=groups) >= wanted else (middle, high)
    return high


# --- tables ------------------------------------------------------------------------------------------------------------

def _quantities(arms: Sequence[Mapping], predictors: Sequence[str], horizons: Sequence[int]):
    """(predictor, horizon, baseline by seed, joint by seed) for each quantity, the loss last."""
    paths = [(predictor, h, f"hit.{predictor}.{h}") for predictor in predictors for h in horizons] + [(LOSS, 0, LOSS)]
    for predictor, h, path in paths:
        base, joint = (results.values_by_seed(arms, arm, path) for arm in ("baseline", "joint"))
        yield predictor, h, base, {seed: joint[seed] for seed in base}


def spreads(arms: Sequence[Mapping], predictors: Sequence[str], horizons: Sequence[int]) -> pd.DataFrame:
    """Columns arm (baseline, joint, or their paired difference), predictor, horizon, n, std, low, high, reference (its std, NaN where it has none)."""
    known = {(row["arm"], row["predictor"], int(h)): row[h] for row in results.reference()["between_seed_std"] for h in row if h.isdigit()}
    rows = []
    for predictor, h, base, joint in _quantities(arms, predictors, horizons):
        difference = [joint[seed] - base[seed] for seed in base]
        for arm, values in (("baseline", list(base.values())), ("joint", list(joint.values())), (DIFFERENCE, difference)):
            std, low, high = std_interval(values)
            rows.append({"arm": arm, "predictor": predictor, "horizon": h, "n": len(values), "std": std, "low": low, "high": high,
                         "reference": known.get((arm, predictor, h), np.nan)})  # fmt: skip
    return pd.DataFrame(rows)


def pairing(arms: Sequence[Mapping], predictors: Sequence[str], horizons: Sequence[int]) -> pd.DataFrame:
    """Columns predictor, horizon, n, unpaired (std of the difference were the seeds not shared: the root of both variances' sum), paired (its std
    as it is), correlation (of the arms over seeds), variance_left (paired variance as a share of the unpaired)."""
    rows = []
    for predictor, h, base, joint in _quantities(arms, predictors, horizons):
        a, b = (np.array([side[seed] for seed in base]) for side in (joint, base))
        unpaired, paired = math.hypot(a.std(ddof=1), b.std(ddof=1)), (a - b).std(ddof=1)
        rows.append({"predictor": predictor, "horizon": h, "n": len(a), "unpaired": unpaired, "paired": paired,
                     "correlation": np.corrcoef(a, b)[0, 1], "variance_left": (paired / unpaired) ** 2})  # fmt: skip
    return pd.DataFrame(rows)


def needs(table: pd.DataFrame, predictor: str, effects: Sequence[float]) -> pd.DataFrame:
    """From `pairing`: columns horizon, effect (hit@k), paired, paired_low, paired_high (seeds needed at the std and at the ends of its interval;
    NaN: more than 1,000), unpaired (seeds of each arm were they not shared)."""
    rows = []
    for row in table[table.predictor == predictor].itertuples():
        free = row.n - 1
        low, high = (row.paired * math.sqrt(free / scipy.stats.chi2.ppf(q, free)) for q in (0.975, 0.025))
        for effect in effects:
            found = [seeds_needed(effect, std) for std in (row.paired, low, high)] + [seeds_needed(effect, row.unpaired / math.sqrt(2), groups=2)]
            rows.append({"horizon": row.horizon, "effect": effect} | dict(zip(("paired", "paired_low", "paired_high", "unpaired"), found)))
    return pd.DataFrame(rows).astype({name: float for name in ("paired", "paired_low", "paired_high", "unpaired")})


def power_curves(table: pd.DataFrame, predictor: str, effects: Sequence[float], most: int) -> pd.DataFrame:
    """From `pairing`: columns arm (paired or unpaired), effect, horizon, n, power, for 2 to `most` seeds."""
    return pd.DataFrame([
        {"arm": arm, "effect": effect, "horizon": row.horizon, "n": n, "power": power(effect, std, n, groups=groups)}
        for row in table[table.predictor == predictor].itertuples()
        for arm, std, groups in (("paired", row.paired, 1), ("unpaired", row.unpaired / math.sqrt(2), 2))
        for effect in effects for n in range(2, most + 1)
    ])  # fmt: skip


def narrowing(arms: Sequence[Mapping], predictor: str, horizons: Sequence[int]) -> pd.DataFrame:
    """Columns n, horizon, mean, low, high, per_seed: the paired effect and its interval with the first n seeds, from two on."""
    seeds = sorted({row["seed"] for row in arms})
    rows = []
    for n in range(2, len(seeds) + 1):
        first = [row for row in arms if row["seed"] in seeds[:n]]
        for effect in experiments.hit_effects(first, "joint", "baseline", predictors=[predictor], horizons=horizons):
            low, high = effect["ci95"]
            rows.append({"n": n, "horizon": effect["horizon"], "mean": effect["mean"], "low": low, "high": high, "per_seed": effect["per_seed"]})
    return pd.DataFrame(rows)


# --- in words ----------------------------------------------------------------------------------------------------------

def say_spread(table: pd.DataFrame, predictor: str) -> str:
    """The standard deviations between seeds of one predictor, by horizon, of levels and of the paired difference."""
    part = table[table.predictor == predictor]
    told = "; ".join(f"{arm} {' / '.join(f'{100 * std:.2f}' for std in rows['std'])}" for arm, rows in part.groupby("arm", sort=False))
    at = " / ".join(map(str, sorted(part.horizon.unique())))
    return f"Standard deviations between {part.n.iloc[0]} seeds under the {PREDICTORS[predictor]}, in points of hit@k at h = {at}: {told}."


def say_loss(table: pd.DataFrame) -> str:
    """The same of the validation loss, beside the reference's."""
    part = table[table.predictor == LOSS]
    told = ", ".join(f"{row.arm} {row.std:.4f} (reference {row.reference:.3f})" for row in part.itertuples())
    return f"Validation loss differs between seeds by standard deviations, in nats, of {told}."


def say_pairing(table: pd.DataFrame, predictor: str) -> str:
    """What share of the variance pairing leaves, and at which horizons that is less than all of it."""
    part = table[table.predictor == predictor]
    told = ", ".join(f"{100 * row.variance_left:.0f}% at h = {row.horizon}" for row in part.itertuples())
    narrower = [str(row.horizon) for row in part.itertuples() if row.variance_left < 1]
    where = f"narrows the interval at h = {', '.join(narrower)}" + ("" if len(narrower) == len(part) else " and not elsewhere") if narrower else "narrows the interval at no horizon"
    loss = table[table.predictor == LOSS].iloc[0]
    return (f"Comparing models of the same seed, instead of two independent sets of seeds, leaves {told} of the variance of the difference in hit@k under the {PREDICTORS[predictor]}, "
            f"so it {where} (above 100% it would widen it); of the difference in validation loss it leaves {100 * loss.variance_left:.0f}%.")  # fmt: skip


def say_needs(table: pd.DataFrame, horizon: int) -> list[str]:
    """How many seeds each effect takes at one horizon, one sentence per effect."""
    number = lambda n: "more than 1,000" if np.isnan(n) else f"{n:.0f}"  # noqa: E731
    return [
        f"To find an effect of {100 * row.effect:g} point{'' if row.effect == 0.01 else 's'} of hit@k at h = {horizon} with a chance of {100 * POWER:.0f}% takes "
        f"{number(row.paired)} paired seeds ({number(row.paired_low)} to {number(row.paired_high)} at the ends of the standard deviation's interval), "
        f"{number(row.unpaired)} of each arm if they are not paired."
        for row in table[table.horizon == horizon].itertuples()
    ]  # fmt: skip


def say_narrowing(table: pd.DataFrame) -> str:
    """From which number of seeds on the interval excludes zero, at the deepest horizon."""
    part = table[table.horizon == table.horizon.max()]
    clear = [row.n for row in part.itertuples() if row.low > 0 or row.high < 0]
    unclear = [row.n for row in part.itertuples() if row.n not in clear]
    lasting = [n for n in clear if n > max(unclear, default=0)]
    halves = [100 * (row.high - row.low) / 2 for row in part.itertuples()]
    when = f"excludes zero from {lasting[0]} seeds on" if lasting else "does not exclude zero with all of them"
    way = f"is {halves[0]:.1f} points with {part.n.iloc[0]} seeds"
    if len(part) > 1:
        way = f"goes from {halves[0]:.1f} points with {part.n.iloc[0]} seeds to {halves[-1]:.1f} with {part.n.iloc[-1]}"
    return f"At h = {part.horizon.iloc[0]} the interval's half-width {way}; it {when}."


def say_effects(effects: Sequence[Mapping], arms: Sequence[Mapping]) -> str:
    """How large the effect is in standard deviations between baselines of different seeds, at each horizon."""
    parts = []
    for effect in effects:
        std, _, _ = std_interval(list(results.values_by_seed(arms, "baseline", f"hit.{effect['predictor']}.{effect['horizon']}").values()))
        parts.append(f"{effect['mean'] / std:+z.1f} at h = {effect['horizon']}")
    return f"The effect, in standard deviations of the baseline between seeds: {', '.join(parts)} ({_seeds(effects[0])})."
