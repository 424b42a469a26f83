"""What 08_latency_sensitivity measures: where prefetching helps, does nothing, or harms, and what the best setting is for each disk.

All on the Colibri-like geometry, with synthetic routing (`traces.synthetic`, or the reference's recipe of `reference_table`).
"""
# N tokens, L layers, K chosen, M guesses

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from . import reference_table as table
from . import stats, traces
from .simulator import Cache, Compute, Disk, Prefetch, SimulationWarning, replay, sweep
from .traces import ABSENT, COLIBRI, Accuracy, Prediction, Trace

REUSE = 0.35   # the middle of what is published for GLM-5.2 (assets/field.json)
LAYER_MS = 4.0
COMPUTE = Compute(attention_ms=0.0, expert_ms=0.0, shared_ms=LAYER_MS)
HARMLESS = 0.005   # a gain within +-0.5% counts as none


@contextlib.contextmanager
def _nothing_issued_is_an_answer():
    """Where no read fits, a guard rightly issues nothing: the table's column `issued` says so, and no warning is needed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SimulationWarning)
        yield


def read_ms(latency_ms, gb_per_s, expert_bytes: int = COLIBRI["expert_bytes"]):
    """How long one expert's read takes on a free disk."""
    return latency_ms + expert_bytes / 1e6 / gb_per_s


# --- the reference's sensitivity claims -------------------------------------------------------------------------------------

def advantage(accuracies_of: Mapping[int, Mapping[str, float]], *, bandwidths: Sequence[float], variants: Sequence[str], predictors: Sequence[str] = ("linear",),
              tokens: int, warmup: int, progress: bool = True) -> pd.DataFrame:  # fmt: skip
    """The joint model's gain in tok/s over the baseline's on disks of several bandwidths: columns variant, predictor, seed, gb_per_s, read_ms, fits, gain, issued (the joint model's prefetches).

    `fits`: a read takes no longer than a layer, so that a prefetch can hide behind it.
    """
    rows = []
    for seed, accuracies in tqdm(accuracies_of.items(), unit="seed", disable=not progress):
        made: dict[tuple, Trace] = {}
        for name, predictor in itertools.product(variants, predictors):
            variant = dataclasses.replace(table.VARIANTS[name], ever_used=False)   # waste is not asked for here
            recipe = variant.recipe()
            key = tuple(recipe.values())
            if key not in made:
                made[key] = table.routing(tokens, accuracies, seed=seed, **recipe)
            trace = made[key]
            for gb_per_s in bandwidths:
                disk = dataclasses.replace(table.DISK, gb_per_s=gb_per_s)
                with _nothing_issued_is_an_answer():
                    base, joint = (table.measure(trace, f"{model}-{predictor}", variant, disk=disk, warmup=warmup) for model in ("baseline", "joint"))
                read = read_ms(disk.latency_ms, gb_per_s, table.REFERENCE["expert_bytes"])
                rows.append({"variant": name, "predictor": predictor, "seed": seed, "gb_per_s": gb_per_s, "read_ms": read, "fits": read <= LAYER_MS,
                             "gain": joint["tok_s"] / base["tok_s"] - 1, "issued": int(joint["issued"])})  # fmt: skip
    return pd.DataFrame(rows)


def advantage_effects(rows: pd.DataFrame, whose: str, predictor: str = "linear") -> list[dict]:
    """One effect per variant and disk, over seeds. `whose`: results.THEIRS or OURS, on whose hit@k the rows are simulated."""
    found = []
    for (variant, gb_per_s), part in rows[rows.predictor == predictor].groupby(["variant", "gb_per_s"], sort=False):
        effect = stats.over_seeds(dict(zip(part.seed, part.gain)), name=f"joint over baseline, {predictor}, {gb_per_s:g} GB/s, {variant}, {whose}", unit="share of tok/s")
        found.append(effect.as_dict() | {"variant": variant, "gb_per_s": gb_per_s, "fits": bool(part.fits.iloc[0]), "predictor": predictor, "accuracies": whose, "family": "exploratory"})
    return found


def say_verdicts(effects: Sequence[Mapping], variant: str, known: Mapping) -> str:
    """The reference's two sensitivity claims, each with its verdict, on one variant's effects."""
    found = {fits: [_effect(e) for e in effects if e["variant"] == variant and e["fits"] is fits] for fits in (True, False)}
    named = [e for e in effects if e["variant"] == variant and e["gb_per_s"] == known["beyond_gb_per_s"]]
    if not found[True] or not named:
        raise ValueError(f"the disks must include {known['beyond_gb_per_s']} GB/s and one on which a read fits into a layer")
    gains = [100 * e.mean for e in found[True]]
    first = stats.verdict(found[True], [float(np.mean(known["fits"]))] * len(found[True]))
    second = stats.verdict_absent([_effect(e) for e in named], HARMLESS)

    def why(reason: str) -> str:   # of the effects that a reason may name, the disks
        for e in effects:
            reason = reason.replace(e["name"], f"{e['gb_per_s']:g} GB/s")
        return reason

    return (f"With {named[0]['accuracies']}, {variant}: where a read fits into a layer the joint model gains {min(gains):+z.2f}% to {max(gains):+z.2f}% (published {100 * known['fits'][0]:+z.1f}% to "
            f"{100 * known['fits'][1]:+z.1f}%; {first.word}: {why(first.why)}); at {known['beyond_gb_per_s']} GB/s, where it does not, {100 * named[0]['mean']:+z.2f}% (published: none; "
            f"{second.word}: {why(second.why)}).")  # fmt: skip


def _effect(found: Mapping) -> stats.Effect:
    return stats.Effect(**{field.name: found[field.name] for field in dataclasses.fields(stats.Effect)})


def with_gains(records: Sequence[Mapping], rows: pd.DataFrame, beyond_gb_per_s: float) -> list[dict]:
    """Arm records with gain_over_baseline added to joint-linear's, per seed: "fits", the mean over the disks on which a read fits into a layer,
    and "beyond", that at `beyond_gb_per_s`. `rows`: `advantage` of one variant."""
    linear = rows[rows.predictor == "linear"]
    fits = linear[linear.fits].groupby("seed").gain.mean()
    beyond = linear[linear.gb_per_s == beyond_gb_per_s].groupby("seed").gain.mean()
    extra = lambda row: {"gain_over_baseline": {"fits": float(fits[row["seed"]]), "beyond": float(beyond[row["seed"]])}}  # noqa: E731
    return [{**row, **(extra(row) if row["arm"] == "joint-linear" else {})} for row in records]


# --- waiting: first token, median, tail ------------------------------------------------------------------------------------------

def waiting(accuracies: Mapping[str, Mapping[int, float]], *, prompt: int, tokens: int, sequences: int, disk: Disk, cache: Cache, guard: str, seed: int) -> pd.DataFrame:
    """Cold cache before every sequence: columns arm, seed, prompt, ttft_ms, p50_ms, p99_ms (of decode passes, the cold ones included)."""
    predictors = {name: Accuracy(recall={1: by_horizon[1]}) for name, by_horizon in accuracies.items()}
    trace = traces.synthetic(tokens=tokens, prompt=prompt, sequences=sequences, **COLIBRI, reuse=REUSE, predictors=predictors, seed=seed)
    rows = []
    for arm in ("demand", *predictors, "oracle"):
        ahead = None if arm == "demand" else Prefetch(source=arm, guard=guard)
        outcome = replay(trace, cache, disk, compute=COMPUTE, prefetch=ahead, cold="sequence")
        rows.append({"arm": arm, "seed": seed, "prompt": prompt, "ttft_ms": outcome.ttft_ms, "p50_ms": outcome.percentile_ms(50), "p99_ms": outcome.percentile_ms(99)})
    return pd.DataFrame(rows)


def say_prompt(rows: pd.DataFrame, arm: str) -> str:
    """What an arm and the oracle save of the time to first token, by length of the prompt."""
    mean = rows.groupby(["prompt", "arm"]).ttft_ms.mean()
    parts = [f"with {f'a prompt of {prompt} tokens' if prompt else 'no prompt'} {mean[prompt, 'demand']:.0f} ms, {arm} {mean[prompt, arm] / mean[prompt, 'demand'] - 1:+z.1%}, "
             f"oracle {mean[prompt, 'oracle'] / mean[prompt, 'demand'] - 1:+z.1%}" for prompt in dict.fromkeys(rows.prompt)]  # fmt: skip
    return f"From cold, the first token takes without prefetch and with it: {'; '.join(parts)}."


# --- latency x bandwidth x cache x horizon x over-fetch ---------------------------------------------------------------------------

def grid(accuracies: Mapping[str, Mapping[int, float]], *, latencies: Sequence[float], bandwidths: Sequence[float], slots: Sequence[int], horizons: Sequence[int],
         budgets: Sequence[int], guards: Sequence[str], tokens: int, warmup: int, seed: int, progress: bool = True) -> pd.DataFrame:  # fmt: skip
    """A sweep over all of it: one row per cell, with gain, the tok/s over that of demand alone on the same disk and cache, minus one.

    The cache is one LRU per layer; `slots` are per layer. The first row of each disk and cache is demand's own (gain 0).
    """
    predictors = {name: Accuracy(recall={h: by_horizon[h] for h in horizons}, spare=max(budgets)) for name, by_horizon in accuracies.items()}
    trace = traces.synthetic(tokens=tokens, **COLIBRI, reuse=REUSE, predictors=predictors, seed=seed)
    with _nothing_issued_is_an_answer():
        found = sweep(trace, policy=["demand", *predictors], latency_ms=latencies, gb_per_s=bandwidths, slots=slots, horizon=horizons, budget=budgets, guard=guards,
                      cache=Cache(slots=1, scope="layer"), compute=COMPUTE, warmup=warmup, progress=progress)  # fmt: skip
    disk = ["latency_ms", "gb_per_s", "slots"]
    base = found[found.policy == "demand"].set_index(disk).tok_s
    return found.assign(gain=found.tok_s.to_numpy() / base.loc[list(found[disk].itertuples(index=False, name=None))].to_numpy() - 1)


def best_settings(found: pd.DataFrame, policy: str) -> pd.DataFrame:
    """Per disk and cache: the guard, horizon and budget with the highest tok/s of one predictor, its gain, and the lowest gain of all settings."""
    mine = found[found.policy == policy]
    groups = mine.groupby(["latency_ms", "gb_per_s", "slots"])
    best = mine.loc[groups.gain.idxmax(), ["latency_ms", "gb_per_s", "slots", "guard", "horizon", "budget", "tok_s", "gain"]]
    worst = groups.gain.min().rename("worst_gain").reset_index()
    return best.astype({"horizon": int, "budget": int}).merge(worst, on=["latency_ms", "gb_per_s", "slots"])


def say_best(best: pd.DataFrame) -> str:
    """The range of the best gains, and which horizons and guards they use."""
    gains = best[best.gain > 0]
    if not len(gains):
        return "No setting gains on any of these disks."
    low, high = gains.loc[gains.gain.idxmin()], gains.loc[gains.gain.idxmax()]
    where = lambda row: f"{row.gb_per_s:g} GB/s, {row.latency_ms:g} ms, {row.slots} slots per layer"  # noqa: E731
    horizons = ", ".join(f"h = {h} on {int((gains.horizon == h).sum())}" for h in sorted(gains.horizon.unique()))
    return (f"With the best setting for each of {len(best)} disks and caches the gain lies between {low.gain:+z.1%} ({where(low)}) and {high.gain:+z.1%} ({where(high)}); best are {horizons}; "
            f"the guard on {int((gains.guard == 'window').sum())}; over-fetching on {int((gains.budget > 0).sum())}.")  # fmt: skip


def say_worst(found: pd.DataFrame, policy: str) -> str:
    """How often a prefetch by one predictor, `policy`, harms in the sweep, without guard and with it, and the worst case."""
    mine = found[found.policy == policy]
    parts = []
    for guard, part in mine.groupby("guard", sort=False):
        harmed = f", by up to {part.gain.min():.1%}" if part.gain.min() < 0 else ""
        parts.append(f"in {int((part.gain < 0).sum())} of {len(part)} settings {'without the guard' if guard == 'none' else 'with it'}{harmed}")
    return f"In the sweep, which has one good predictor (the reference study's hit@k of {policy}) on every disk and cache, prefetching harms {' and '.join(parts)}."


def explorable(accuracies: Mapping[str, Mapping[int, float]], *, horizons: Sequence[int], tokens: int, seed: int) -> dict[str, Trace]:
    """The sweep's routing for the explorer, by model: one trace each, with the model's linear and ranking predictors at the horizons and the next layer's
    router (Colibri's recall) one layer ahead. `accuracies`: "MODEL-PREDICTOR" -> horizon -> hit@k."""
    made = {}
    for model in dict.fromkeys(name.split("-")[0] for name in accuracies):
        predictors = {name.removeprefix(f"{model}-"): Accuracy(recall={h: known[h] for h in horizons if h in known}, spare=4)
                      for name, known in accuracies.items() if name.startswith(f"{model}-")}  # fmt: skip
        predictors["next_router"] = Accuracy(recall={1: table.published_accuracies()["next-router"]}, spare=4)
        made[model] = traces.synthetic(tokens=tokens, **COLIBRI, reuse=REUSE, predictors=predictors, seed=seed)
    return made


# --- the map: precision x recall x horizon x bandwidth ------------------------------------------------------------------------------

def at_horizons(prediction: Prediction, horizons: Iterable[int], width: int) -> list[Prediction]:
    """Guesses of horizon 1 as if they had been made `h` layers ahead, for every h, with `width` columns (the rest ABSENT).

    What is guessed stays the same, only when changes, so that recall and precision are the same at every horizon. Guesses that
    would have had to be made before the first layer are dropped.
    """
    N, L, M = prediction.experts_NLM.shape
    moved = []
    for h in horizons:
        experts, scores = np.full((N, L, width), ABSENT, np.int16), np.zeros((N, L, width), np.float32)
        experts[:, : L - h, :M] = prediction.experts_NLM[:, h - 1 : L - 1]
        scores[:, : L - h, :M] = prediction.scores_NLM[:, h - 1 : L - 1]
        moved.append(Prediction(h, experts, scores))
    return moved


def gain_map(*, recalls: Sequence[float], precisions: Sequence[float], horizons: Sequence[int], bandwidths: Sequence[float], guards: Sequence[str], latency_ms: float,
             slots: int, tokens: int, warmup: int, seed: int, progress: bool = True) -> pd.DataFrame:  # fmt: skip
    """The gain in tok/s over demand alone for predictors of every recall and precision: columns guard, recall, precision, horizon, gb_per_s, gain,
    wasted_mb, issued. A predictor of recall r and precision p makes r * K / p guesses; its errors are near misses."""
    K, cache = COLIBRI["top_k"], Cache(slots=slots, scope="layer")
    rows, pairs = [], list(itertools.product(recalls, precisions))
    base: dict[float, float] = {}
    for recall, precision in tqdm(pairs, unit="predictor", disable=not progress):
        accuracy = Accuracy(recall={1: recall}, precision=precision)
        trace = traces.synthetic(tokens=tokens, **COLIBRI, reuse=REUSE, predictors={"map": accuracy}, seed=seed)
        width = max(K, trace.prediction("map", 1).experts_NLM.shape[2])
        moved = {("map", p.horizon): p for p in at_horizons(trace.prediction("map", 1), horizons, width)}
        asked: Trace = dataclasses.replace(trace, predictions=moved)
        for gb_per_s in bandwidths:
            disk = Disk(latency_ms=latency_ms, gb_per_s=gb_per_s)
            if gb_per_s not in base:
                base[gb_per_s] = replay(trace, cache, disk, compute=COMPUTE, warmup=warmup).tokens_per_s
            for horizon, guard in itertools.product(horizons, guards):
                ahead = Prefetch(source="map", horizon=horizon, budget=width - K, guard=guard)
                with _nothing_issued_is_an_answer():
                    outcome = replay(asked, cache, disk, compute=COMPUTE, prefetch=ahead, warmup=warmup)
                rows.append({"guard": guard, "recall": recall, "precision": precision, "horizon": horizon, "gb_per_s": gb_per_s,
                             "gain": outcome.tokens_per_s / base[gb_per_s] - 1, "wasted_mb": outcome.ledger.wasted_bytes / outcome.tokens / 1e6,
                             "issued": outcome.ledger.issued})  # fmt: skip
    return pd.DataFrame(rows)


def boundary(found: pd.DataFrame) -> pd.DataFrame:
    """Columns guard, horizon, gb_per_s, recall, precision: where the gain crosses zero along precision (linear between the simulated values).

    precision is 0 where even the least precise predictor gains, and infinite where even the most precise one loses.
    """
    rows = []
    for keys, part in found.groupby(["guard", "horizon", "gb_per_s", "recall"], sort=False):
        part = part.sort_values("precision")
        gain, precision = part.gain.to_numpy(), part.precision.to_numpy()
        losing = np.flatnonzero(gain < 0)
        if not len(losing):
            at = 0.0
        elif losing[-1] == len(gain) - 1:
            at = np.inf
        else:
            i = losing[-1]
            at = precision[i] + (precision[i + 1] - precision[i]) * gain[i] / (gain[i] - gain[i + 1])
        rows.append(dict(zip(["guard", "horizon", "gb_per_s", "recall"], keys)) | {"precision": float(at)})
    return pd.DataFrame(rows)


def say_map(found: pd.DataFrame, guard: str) -> str:
    """In how many cells prefetching harms, and how precise it must be on the slowest and the fastest disk."""
    mine = found[found.guard == guard]
    near = mine[mine.horizon == mine.horizon.min()]
    edges = boundary(near)

    def at(disk: float) -> str:
        if not near[near.gb_per_s == disk].issued.any():
            return "nothing fits and nothing is issued"
        values = edges[edges.gb_per_s == disk].precision
        if not values.max():
            return "it harms at no precision simulated"
        return f"it stops harming at a precision of {values.min():.2f} to {values.max():.2f}, by recall" if np.isfinite(values).all() else "at some recall it harms at every precision"

    slow, fast = near.gb_per_s.min(), near.gb_per_s.max()
    words = {"none": "Without the guard", "window": "With the guard"}[guard]
    told = f"of every recall from {mine.recall.min():g} to {mine.recall.max():g} and every precision from {mine.precision.min():g} to {mine.precision.max():g}, bad ones too"
    return (f"{words} prefetching harms in {int((mine.gain < 0).sum())} of {len(mine)} cells of the map, which has predictors {told} "
            f"(gains from {mine.gain.min():+z.0%} to {mine.gain.max():+z.0%}); at h = {near.horizon.iloc[0]}, "
            f"on the {slow:g} GB/s disk {at(slow)}; on the {fast:g} GB/s disk {at(fast)}.")  # fmt: skip
