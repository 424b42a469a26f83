"""Paired effects with intervals, the quality gate, and the rules by which a claim gets its verdict.

Seeds are the unit of replication: an effect is the mean over seeds of (treatment - control), both trained from the same
initialisation on the same data order, with Student's t interval. With three seeds that interval is wide (t = 4.30 at two
degrees of freedom, against 1.96), which is as it should be. Resampling held-out documents within one seed answers another question:
how far the result depends on which text was measured. Neither stands for the other, and both are reported.

Two words for two things, everywhere in the report. An interval *excludes zero* (an effect "raises" or "lowers"): the 95% interval of this effect alone,
uncorrected. An effect is *established*: its p value, corrected by Holm's rule over the family that it was tested in, is at most SIGNIFICANCE.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.stats

REPLICATED, PARTLY, NOT_REPLICATED, NOT_TESTED = "replicated", "partly", "not replicated", "not tested"
NOTHING_EXCLUDED = "no interval excludes zero"
EVERY_EXCLUDED = "every interval, uncorrected since the claim is on all of them at once, excludes zero"
NOTHING_ESTABLISHED = "nothing is established after Holm's correction"
SIGNIFICANCE = 0.05      # of every test: a p value, corrected by Holm's rule where there are several, at or below it *establishes* an effect
LEAST_SEEDS = 3          # below this a claim is "not tested": two seeds give a t interval of 9 standard deviations
OTHER_SIZE = "the size differs more than twofold"
MAGNITUDE_FACTOR = 2.0   # a mean within [1/2, 2] times the reference's has its size

# The quality gate, fixed before any run of the report.
MAX_LOSS_INCREASE = 0.005
MIN_LOAD_ENTROPY_RATIO = 0.95


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A mean over seeds (or over documents of one seed) with its 95% interval; `ci95` and `p` are None for one seed."""

    name: str
    unit: str
    mean: float
    ci95: tuple[float, float] | None
    n: int
    per_seed: tuple[float, ...]
    seeds: tuple[int, ...]
    p: float | None
    method: str
    note: str = ""

    def as_dict(self) -> dict:
        plain = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


def over_seeds(values: Mapping[int, float], *, name: str = "", unit: str = "") -> Effect:
    """Mean of `values` (seed -> value) with the t interval and the two-sided p value against zero.

    One seed gives no interval and the note "single seed, exploratory". Raises ValueError on no seed or a value that is not finite.
    """
    if not values:
        raise ValueError(f"{name or 'effect'}: no seed was measured")
    seeds = tuple(sorted(values))
    x = np.array([values[seed] for seed in seeds], dtype=np.float64)
    if not np.isfinite(x).all():
        bad = [seed for seed, value in zip(seeds, x) if not math.isfinite(value)]
        raise ValueError(f"{name or 'effect'}: the value of seed {', '.join(map(str, bad))} is not finite")
    shared = dict(name=name, unit=unit, mean=float(x.mean()), n=len(x), per_seed=tuple(x.tolist()), seeds=seeds)
    if len(x) == 1:
        return Effect(**shared, ci95=None, p=None, method="one value", note="single seed, exploratory")
    standard_error = float(x.std(ddof=1)) / math.sqrt(len(x))
    half = float(scipy.stats.t.ppf(0.975, len(x) - 1)) * standard_error
    if standard_error > 0:
        p = float(2 * scipy.stats.t.sf(abs(x.mean()) / standard_error, len(x) - 1))
    else:
        p = 1.0 if x.mean() == 0 else 0.0
    return Effect(**shared, ci95=(float(x.mean()) - half, float(x.mean()) + half), p=p, method="t interval over seeds")


def paired(
    treatment: Mapping[int, float], control: Mapping[int, float], *, relative: bool = False, name: str = "", unit: str = ""
) -> Effect:
    """Effect of treatment - control over the seeds, pair by pair; `relative` divides each difference by its control.

    Raises ValueError unless both have the same seeds: an unpaired seed would silently change the comparison.
    """
    if set(treatment) != set(control):
        seeds = f"treatment has seeds {sorted(treatment)}, control {sorted(control)}"
        raise ValueError(f"{name or 'effect'}: {seeds}; a paired effect needs the same")
    differences = {seed: (treatment[seed] - control[seed]) / (control[seed] if relative else 1.0) for seed in treatment}
    return over_seeds(differences, name=name, unit=unit)


def bootstrap_documents(
    treatment: Sequence[float], control: Sequence[float], tokens: Sequence[int], *,
    resamples: int = 10_000, seed: int = 0, model_seed: int = 0, name: str = "", unit: str = "",
) -> Effect:  # fmt: skip
    """Effect within one trained pair: token-weighted mean difference over held-out documents, percentile bootstrap.

    treatment, control: per-document means; tokens: their weights. Documents are drawn whole, since tokens of one text are
    not independent. The interval says nothing about another seed. Deterministic for a given `seed`.
    """
    a, b, w = (np.asarray(v, dtype=np.float64) for v in (treatment, control, tokens))
    if not len(a) == len(b) == len(w) or len(a) < 2:
        lengths = f"{len(a)} treatment, {len(b)} control and {len(w)} token counts"
        raise ValueError(f"{name or 'bootstrap'}: {lengths}; needs the same documents, at least two")
    if not (np.isfinite(a - b).all() and (w > 0).all()):
        raise ValueError(f"{name or 'bootstrap'}: values must be finite and token counts positive")
    weighted = w * (a - b)
    counts = np.random.default_rng(seed).multinomial(len(w), np.full(len(w), 1 / len(w)), size=resamples)
    means = (counts @ weighted) / (counts @ w)
    low, high = (float(v) for v in np.quantile(means, (0.025, 0.975)))
    mean = float(weighted.sum() / w.sum())
    return Effect(
        name=name, unit=unit, mean=mean, ci95=(low, high), n=1, per_seed=(mean,), seeds=(model_seed,), p=None,
        method=f"bootstrap over {len(w)} held-out documents", note="single seed, exploratory",
    )  # fmt: skip


def mcnemar(treatment: Sequence[bool], control: Sequence[bool], treated: str = "treatment", untreated: str = "control") -> dict:
    """McNemar's exact test of two models on the same items: how many each alone answers rightly, and the two-sided p value.

    Of the items that they answer differently half are expected on each side (McNemar 1947; exact by the binomial distribution). Raises
    ValueError where the items are not as many on both sides.
    """
    if len(treatment) != len(control):
        raise ValueError(f"{len(treatment)} answers of {treated} and {len(control)} of {untreated}: a paired test needs the same items")
    mine, theirs = (int(np.sum(np.asarray(a, bool) & ~np.asarray(b, bool))) for a, b in ((treatment, control), (control, treatment)))
    p = float(scipy.stats.binomtest(mine, mine + theirs).pvalue) if mine + theirs else 1.0
    return {f"only {treated}": mine, f"only {untreated}": theirs, "p": p}


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p values, in the order given: the chance of any false positive among them stays below each."""
    order = np.argsort(p_values, kind="stable")
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


@dataclass(frozen=True)
class Verdict:
    word: str
    why: str


def verdict(effects: Sequence[Effect], expected: Sequence[float | str]) -> Verdict:
    """Does the reference's effect appear? `expected`: its signed size for each effect, or "increase" / "decrease".

    - replicated: the 95% interval of every effect excludes zero on the reference's side (uncorrected: the claim is that all of them are there, and
      to find all by chance is no likelier than to find one), and none is less than half or more than twice the reference's;
    - partly: every interval does, but a size is outside that range; or some do, and at least one of these is established after
      Holm's correction over the effects;
    - not replicated: anything else, also when the interval is merely too wide: what was not shown was not replicated;
    - not tested: no effect, or fewer than three seeds.
    """
    early = _untested(effects)
    if early:
        return early
    if len(effects) != len(expected):
        raise ValueError(f"{len(effects)} effects need as many expected values, not {len(expected)}")
    signs = [{"increase": 1, "decrease": -1}.get(e) if isinstance(e, str) else math.copysign(1, e) for e in expected]
    excluded = [_excludes_zero(effect, sign) for effect, sign in zip(effects, signs)]
    every = ("the 95% interval excludes zero" if len(effects) == 1 else EVERY_EXCLUDED) + " on the reference's side"
    if all(excluded):
        off = [effect.name for effect, size in zip(effects, expected) if not isinstance(size, str) and not _same_size(effect.mean, size)]
        if not off:
            return Verdict(REPLICATED, every + _and_size(expected))
        return Verdict(PARTLY, f"{every}, but {OTHER_SIZE}: " + "; ".join(off))
    corrected = [ok and p <= SIGNIFICANCE for ok, p in zip(excluded, holm([effect.p for effect in effects]))]
    if any(corrected):
        held = [effect.name for effect, ok in zip(effects, corrected) if ok]
        return Verdict(PARTLY, "established after Holm's correction only for " + "; ".join(held))
    against = [effect.name for effect, sign in zip(effects, signs) if _excludes_zero(effect, -sign)]
    if against:
        return Verdict(NOT_REPLICATED, "the interval excludes zero on the other side: " + "; ".join(against))
    return Verdict(NOT_REPLICATED, f"{sum(excluded)} of {len(excluded)} intervals exclude zero, uncorrected; {NOTHING_ESTABLISHED}" if any(excluded) else NOTHING_EXCLUDED)


def verdict_absent(effects: Sequence[Effect], margin: float) -> Verdict:
    """For a claim that there is *no* effect: `margin` is the largest size that would not matter, in the effect's unit.

    replicated: every 95% interval lies within +-margin; not replicated: an interval excludes zero and reaches past the margin;
    partly: neither (the data are compatible with no effect, and with one that matters); not tested: as for `verdict`.
    """
    early = _untested(effects)
    if early:
        return early
    inside = [max(abs(end) for end in effect.ci95) <= margin for effect in effects]
    if all(inside):
        return Verdict(REPLICATED, f"every interval lies within {_amount(margin, effects)} of zero")
    present = [e for e, ok in zip(effects, inside) if not ok and (_excludes_zero(e, 1) or _excludes_zero(e, -1))]
    if present:
        sides = {"an increase" if e.mean > 0 else "a decrease" for e in present}
        way = sides.pop() if len(sides) == 1 else "an increase and a decrease"
        return Verdict(NOT_REPLICATED, f"{way} that may exceed {_amount(margin, effects)} is there: " + "; ".join(e.name for e in present))
    return Verdict(PARTLY, f"an interval reaches beyond {_amount(margin, effects)}, but none that does excludes zero")


def verdict_at_most(effects: Sequence[Effect], limit: float) -> Verdict:
    """For a claim that something stays below `limit`: replicated where every interval does, partly where every mean does,
    otherwise not replicated; not tested as for `verdict`."""
    early = _untested(effects)
    if early:
        return early
    if all(effect.ci95[1] <= limit for effect in effects):
        return Verdict(REPLICATED, f"the whole interval is at most {_amount(limit, effects)}")
    if all(effect.mean <= limit for effect in effects):
        return Verdict(PARTLY, f"the mean is at most {_amount(limit, effects)}, its interval is not")
    return Verdict(NOT_REPLICATED, f"the mean is above {_amount(limit, effects)}")


def verdict_all(parts: Mapping[str, Verdict]) -> Verdict:
    """One verdict for a claim of several parts, name -> the part's own: it claims them all.

    replicated: every part is; not replicated: none is, and none partly; not tested: a part is not, for what has not been tested whole
    cannot stand or fall whole; partly: anything else. Which parts of a "partly" hold is exploratory: nothing is corrected over parts.
    """
    if not parts:
        raise ValueError("a claim has at least one part")
    words = [part.word for part in parts.values()]
    told = "; ".join(f"{name}: {part.word} ({part.why})" for name, part in parts.items())
    why = f"{count_parts(words)}. {told}"
    if set(words) == {NOT_TESTED} and len({part.why for part in parts.values()}) == 1:
        why = next(iter(parts.values())).why   # nothing has run: said once
    for word in (REPLICATED, NOT_REPLICATED):
        if set(words) == {word}:
            return Verdict(word, why)
    return Verdict(NOT_TESTED if NOT_TESTED in words else PARTLY, why)


def count_parts(words: Sequence[str]) -> str:
    """How many parts of a claim have which verdict, "1 of 3 parts replicated, 1 partly, 1 not replicated", with the rule where the claim is partly replicated and no part is whole."""
    others = [f"{words.count(word)} {word}" for word in (PARTLY, NOT_REPLICATED, NOT_TESTED) if word in words]
    rule = " (it counts as not replicated only where no part is even partly)" if PARTLY in words and not {REPLICATED, NOT_TESTED} & set(words) else ""
    return ", ".join([f"{words.count(REPLICATED)} of {len(words)} parts replicated", *others]) + rule


def _untested(effects) -> Verdict | None:
    if not effects:
        return Verdict(NOT_TESTED, "no result")
    fewest = min(effect.n for effect in effects)
    if fewest >= LEAST_SEEDS:
        return None
    exploratory = "single seed, exploratory" if fewest == 1 else f"{fewest} seeds, exploratory"
    return Verdict(NOT_TESTED, f"{exploratory}: a verdict takes at least {LEAST_SEEDS} seeds")


def _amount(value: float, effects: Sequence[Effect]) -> str:
    """A limit in the unit in which the effects are written (`claims.UNITS`)."""
    return {"points": f"{100 * value:g} point{'' if value == 0.01 else 's'}", "percent": f"{100 * value:g}%", "nats": f"{value:g} nats"}.get(effects[0].unit, f"{value:g}")


def _excludes_zero(effect: Effect, sign: float) -> bool:
    low, high = effect.ci95
    return low > 0 if sign > 0 else high < 0


def _same_size(mean: float, reference: float) -> bool:
    return 1 / MAGNITUDE_FACTOR <= mean / reference <= MAGNITUDE_FACTOR


def _and_size(expected) -> str:
    return "" if all(isinstance(e, str) for e in expected) else ", with its size within a factor of two"


@dataclass(frozen=True)
class Gate:
    """The quality gate of one arm. `val_loss` and `load_entropy` are relative changes against the baseline (0.005 = +0.5%)."""

    val_loss: Effect
    load_entropy: Effect
    passes: bool
    certain: bool

    @property
    def sentence(self) -> str:
        loss, load = self.val_loss, self.load_entropy
        sure = "" if loss.ci95 is None else ("; its interval lies on the same side" if self.certain else "; its interval crosses the limit")
        return (
            f"{'passes' if self.passes else 'FAILS'} the quality gate: validation loss {loss.mean:+z.2%} against the baseline's "
            f"(limit {MAX_LOSS_INCREASE:+z.1%}{sure}), load entropy {1 + load.mean:.3f} times the baseline's (at least {MIN_LOAD_ENTROPY_RATIO})"
        )

    def as_dict(self) -> dict:
        return {
            "passes": self.passes, "certain": self.certain, "sentence": self.sentence,
            "val_loss": self.val_loss.as_dict(), "load_entropy": self.load_entropy.as_dict(),
        }  # fmt: skip


def quality_gate(
    val_loss: Mapping[int, float], base_val_loss: Mapping[int, float],
    load_entropy: Mapping[int, float], base_load_entropy: Mapping[int, float],
) -> Gate:  # fmt: skip
    """Gate of an arm against the baseline, all four seed -> value: mean validation loss at most +0.5%, mean load entropy at
    least 0.95 of the baseline's.

    The means decide, since with three seeds an interval would turn away arms that cost nothing; the interval is reported, and
    `certain` says whether all of it, for both quantities, lies on the side of the decision.
    """
    loss = paired(val_loss, base_val_loss, relative=True, name="validation loss, relative", unit="fraction of the baseline's")
    load = paired(load_entropy, base_load_entropy, relative=True, name="load entropy, relative", unit="fraction of the baseline's")
    good = (loss.mean <= MAX_LOSS_INCREASE, 1 + load.mean >= MIN_LOAD_ENTROPY_RATIO)
    if loss.ci95 is None:
        return Gate(loss, load, all(good), False)
    surely_good = (loss.ci95[1] <= MAX_LOSS_INCREASE, 1 + load.ci95[0] >= MIN_LOAD_ENTROPY_RATIO)
    surely_bad = (loss.ci95[0] > MAX_LOSS_INCREASE, 1 + load.ci95[1] < MIN_LOAD_ENTROPY_RATIO)
    return Gate(loss, load, all(good), all(surely_good) if all(good) else any(surely_bad))
