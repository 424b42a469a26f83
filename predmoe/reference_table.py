"""The reference study's simulator table, reproduced, and mended one fault at a time (its faults are numbered as in the study's review).

How skewed and how persistent the study's synthetic routing is, is not known here. Both are found (`calibrate`) from the two published
numbers that speak of routing alone: the distinct experts per token and layer, and the speed without prefetch. All other
numbers of the table are then predictions of the reproduction, not fits.
"""
# N tokens, L layers, E experts, K chosen per token

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from . import results, stats
from .simulator import Cache, Compute, Disk, Prefetch, replay
from .traces import ABSENT, REFERENCE, Meta, Prediction, Trace, build

L, E, K, SLOTS = REFERENCE["layers"], REFERENCE["num_experts"], REFERENCE["top_k"], 2000
DISK = Disk(latency_ms=0.1, gb_per_s=5.0)
COMPUTE = Compute(attention_ms=0.0, expert_ms=0.0, shared_ms=4.0)   # 4 ms per layer, whatever it computes
SKEW, REUSE = 1.0, 0.3   # `calibrate` gives 1.001 and 0.305: the study will have used the round numbers
DEMAND, ORACLE = "demand", "oracle"
ARMS = (DEMAND, "next-router", "baseline-linear", "baseline-ranking", "joint-linear", "joint-ranking", ORACLE)
SECOND = 1   # the seed's second number for traces of first tokens, so that they share nothing with the long trace


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How the table is made. The defaults are the reference's choices."""

    replacement: bool = True       # fault 1: experts of a token drawn with replacement
    ever_used: bool = True         # fault 2: a prefetch is wasted only if its expert is never used in the whole run
    guard: str = "window"          # the simulator prefetches only what fits before the next router; its engine (fault 4) does not check
    expire: bool = True            # the engine (fault 4) keeps stale guesses in its queue
    promote: bool = True           # and leaves a queued guess that is demanded in its place there
    near_misses: bool = False      # fault 5: wrong guesses are uniform
    per_layer: bool = False        # fault 6: one LRU for all layers
    ranked: bool = False           # the order of guesses says nothing; True: right ones come first, the best that scores can do

    def recipe(self) -> dict[str, bool]:
        """What concerns the trace."""
        return dict(replacement=self.replacement, near_misses=self.near_misses, ranked=self.ranked)

    def prefetch(self, arm: str, **more) -> Prefetch | None:
        """How an arm prefetches; None for demand."""
        return None if arm == DEMAND else Prefetch(source=arm, guard=self.guard, expire=self.expire, promote=self.promote, **more)

    def cache(self) -> Cache:
        return Cache(slots=SLOTS // L, scope="layer") if self.per_layer else Cache(slots=SLOTS)


MENDED = dict(replacement=False, ever_used=False, near_misses=True, per_layer=True)
VARIANTS: dict[str, Variant] = {
    "as published": Variant(),
    "1 experts without replacement": Variant(replacement=False),
    "2 waste per residence": Variant(ever_used=False),
    "4 engine's queue, unchecked": Variant(guard="none", expire=False, promote=False),
    "4 engine's queue, promoting": Variant(guard="none", expire=False),
    "4 engine's queue, expiring": Variant(guard="none", promote=False),
    "4 engine's queue, both": Variant(guard="none"),
    "5 wrong guesses are near misses": Variant(near_misses=True),
    "6 one LRU per layer": Variant(per_layer=True),
    "all mended": Variant(**MENDED),
    "all mended, unchecked": Variant(**MENDED, guard="none"),
    "all mended, right guesses first": Variant(**MENDED, ranked=True),
}


def published_accuracies(horizon: int = 1) -> dict[str, float]:
    """hit@k of the reference's predictors; the next-layer router's is Colibri's (middle of its published range), as the reference has none."""
    known = {f"{row['arm']}-{row['predictor']}": row[str(horizon)] for row in results.reference()["hit"] if row["predictor"] != "cotrained"}
    if horizon == 1:
        known["next-router"] = float(np.mean(results.field()["recall"]["next-router"]))
    return known


def our_accuracies(found: Mapping, seed: int, horizon: int = 1) -> dict[str, float]:
    """hit@k of our predictors of one model seed, from the results of 02_horizons. The next-layer router is the baseline's."""
    at = lambda arm, predictor: results.values_by_seed(found["arms"], arm, f"hit.{predictor}.{horizon}")  # noqa: E731
    held = {f"{arm}-{predictor}": at(arm, predictor) for arm in ("baseline", "joint") for predictor in ("linear", "ranking")}
    held["next-router"] = at("baseline", "next_router")
    missing = [name for name, values in held.items() if seed not in values]
    if missing:
        raise results.ResultError(f"02_horizons of profile {found['profile']} has no seed {seed} for {', '.join(missing)}: "
                                  f"was it executed with other seeds? `predmoe report --profile {found['profile']} --only 02` executes it with its own parameters, `git checkout` brings committed results back")
    return {name: values[seed] for name, values in held.items()}


# --- routing ----------------------------------------------------------------------------------------------------------

def routing(tokens: int, accuracies: Mapping[str, float], *, seed, replacement: bool = True, near_misses: bool = False, ranked: bool = False,
            sequences: int = 1, skew: float | None = None, reuse: float | None = None) -> Trace:  # fmt: skip
    """A trace by the reference's recipe: each of a token's K slots keeps the slot's expert of the token before with probability `reuse`,
    and is otherwise drawn from a Zipf law (exponent `skew`, its own order in each layer).

    A predictor of accuracy a names each true expert with probability a and another one otherwise: any (uniform), or with
    `near_misses` one that was likely. All predictors see the same luck, so that arms are compared pair by pair.
    The order of a predictor's guesses says nothing, unless `ranked`: then its right ones come first. With replacement a row may hold an expert twice, which
    the trace schema forbids and the replay takes for one: such a trace is not validated and cannot be saved.
    """
    rng = np.random.default_rng(seed)
    skew, reuse = SKEW if skew is None else skew, REUSE if reuse is None else reuse
    zipf = (1.0 / np.arange(1, E + 1)) ** skew
    popularity_LE = np.stack([rng.permutation(zipf / zipf.sum()) for _ in range(L)])
    cumulative_LE = np.cumsum(popularity_LE, axis=1)
    N, layers = tokens * sequences, np.arange(L)[:, None]
    experts_NLK, wrong_NLK = np.empty((N, L, K), np.int16), np.empty((N, L, K), np.int16)
    for n in range(N):
        likely_LE = popularity_LE
        kept_LK = rng.random((L, K)) < (reuse if n % tokens else 0.0)
        if n % tokens:
            likely_LE = popularity_LE * (1 - reuse)
            np.add.at(likely_LE, (layers, experts_NLK[n - 1]), reuse / K)
        if replacement:
            drawn_LK = (cumulative_LE[:, None, :-1] < rng.random((L, K, 1))).sum(-1)
            experts_NLK[n] = np.where(kept_LK, experts_NLK[n - 1], drawn_LK)
        else:
            luck_LE = np.log(popularity_LE) + rng.gumbel(size=(L, E))
            rows, slots = np.nonzero(kept_LK)
            luck_LE[rows, experts_NLK[n - 1, rows, slots]] = np.inf
            experts_NLK[n] = _best(luck_LE)
        if accuracies:
            luck_LE = (np.log(likely_LE) if near_misses else 0.0) + rng.gumbel(size=(L, E))
            luck_LE[layers, experts_NLK[n]] = -np.inf
            wrong_NLK[n] = _best(luck_LE)
    luck_NLK, order = rng.random((N, L, K)), np.argsort(rng.random((N, L, K)), axis=2)
    scores = np.broadcast_to(np.arange(K, 0, -1, dtype=np.float32), (N, L, K))
    predictions = {}
    for name, accuracy in accuracies.items():
        right_NLK = luck_NLK < accuracy
        guesses = np.take_along_axis(np.where(right_NLK, experts_NLK, wrong_NLK), np.argsort(~right_NLK, axis=2, kind="stable") if ranked else order, 2)
        asked = np.full((N, L, K), ABSENT, np.int16)
        asked[:, :-1] = guesses[:, 1:]   # asked one layer before
        predictions[name, 1] = Prediction(1, asked, scores)
    meta = Meta(model="synthetic", num_experts=E, top_k=K, layers=range(L), expert_bytes=[REFERENCE["expert_bytes"]] * L, source="the reference's recipe")
    rows = dict(starts=np.arange(N + 1), phase=np.ones(N, np.uint8), sequence=(np.arange(N) // tokens).astype(np.int32))
    if not replacement:
        return build(meta, experts_NLK, **rows, predictions=[(name, p) for (name, _), p in predictions.items()])
    return Trace(meta, experts_NLK, rows["starts"], rows["phase"], rows["sequence"], predictions=predictions)


def _best(luck_LE: np.ndarray) -> np.ndarray:
    """The K luckiest per layer: of log probability plus Gumbel noise these are draws without replacement."""
    return np.argpartition(-luck_LE, K, axis=1)[:, :K]


def distinct(trace: Trace) -> float:
    """Mean number of different experts per token and layer."""
    ordered = np.sort(trace.experts_NLK, axis=2)
    return float(1 + (ordered[..., 1:] != ordered[..., :-1]).sum(2).mean())


def calibrate(tokens: int = 100, warmup: int = 30, seed: int = 0, steps: int = 10) -> tuple[float, float]:
    """The (skew, reuse) at which a routing with replacement has the published number of distinct experts and speed without prefetch."""
    known = results.reference()["simulator"]

    def bisect(measure, wanted, low, high):   # measure falls
        for _ in range(steps):
            middle = (low + high) / 2
            low, high = (middle, high) if measure(middle) > wanted else (low, middle)
        return (low + high) / 2

    def ms_per_token(reuse):
        trace = routing(tokens, {}, seed=seed, skew=skew, reuse=reuse)
        return 1000 / replay(trace, Cache(slots=SLOTS), DISK, compute=COMPUTE, warmup=warmup).tokens_per_s

    skew = bisect(lambda skew: distinct(routing(tokens, {}, seed=seed, skew=skew, reuse=0.0)), known["distinct"], 0.0, 2.0)
    return skew, bisect(ms_per_token, 1000 / known["tok_s"][DEMAND], 0.0, 0.9)


# --- the table --------------------------------------------------------------------------------------------------------

def measure(trace: Trace, arm: str, variant: Variant, *, disk: Disk = DISK, warmup: int = 0, horizon: int = 1, budget: int = 0) -> dict[str, float]:
    """One arm on one trace: `Outcome.summary`, with `wasted_mb` as the variant counts: per residence, or of the prefetched experts that no
    token of the whole run uses."""
    ahead = variant.prefetch(arm, horizon=horizon, budget=0 if arm == ORACLE else budget)
    window = (warmup, trace.num_passes) if ahead and variant.ever_used else None
    outcome = replay(trace, variant.cache(), disk, compute=COMPUTE, prefetch=ahead, warmup=warmup, timeline=window)
    line = outcome.summary()
    if window:
        line["wasted_mb"] = _never_used_mb(outcome.prefetches_read().key, trace, outcome.tokens)
    return line


def _never_used_mb(read: pd.Series, trace: Trace, tokens: int) -> float:
    """MB per token of those of the keys `read` that no token of the trace uses."""
    used = np.zeros(L * E, np.bool_)
    used[np.arange(L)[:, None] * E + trace.experts_NLK] = True
    return float((~used[read]).sum() * REFERENCE["expert_bytes"] / 1e6 / tokens)


def table(accuracies_of: Mapping[int, Mapping[str, float]], *, variants: Iterable[str] = VARIANTS, arms: Sequence[str] = ARMS, tokens: int, warmup: int,
          first_tokens: int = 10, disk: Disk = DISK, progress: bool = True) -> pd.DataFrame:  # fmt: skip
    """The table for each seed, variant and arm: a row each of `measure`'s figures, and ttft_ms, the mean of `first_tokens` cold first tokens.

    `accuracies_of`: seed -> predictor -> hit@k. The seed is that of the routing (and of the model where the accuracies are a model's).
    """
    chosen = {name: VARIANTS[name] for name in variants}
    rows = []
    for seed, accuracies in tqdm(accuracies_of.items(), unit="seed", disable=not progress):
        made: dict[tuple, tuple[Trace, Trace]] = {}
        for name, variant in chosen.items():
            recipe = variant.recipe()
            key = tuple(recipe.values())
            if key not in made:
                made[key] = routing(tokens, accuracies, seed=seed, **recipe), routing(1, accuracies, seed=[seed, SECOND], sequences=first_tokens, **recipe)
            long, first = made[key]
            for arm in arms:
                line = measure(long, arm, variant, disk=disk, warmup=warmup)
                line["ttft_ms"] = replay(first, variant.cache(), disk, compute=COMPUTE, prefetch=variant.prefetch(arm), cold="sequence").ttft_ms
                rows.append({"variant": name, "arm": arm, "seed": seed, "distinct": distinct(long)} | line)
    return pd.DataFrame(rows)


def waste_by_length(accuracies_of: Mapping[int, Mapping[str, float]], lengths: Sequence[int], *, arms: Sequence[str], progress: bool = True) -> pd.DataFrame:
    """What counting by an ever-used set makes of a run's length: columns arm, seed, tokens, ever_mb (as the reference counts) and
    residence_mb (evicted unused), both per token, with a cold start and no warm-up."""
    rows = []
    for seed, accuracies in tqdm(accuracies_of.items(), unit="seed", disable=not progress):
        longest = routing(max(lengths), {arm: accuracies[arm] for arm in arms}, seed=seed)
        for arm in arms:
            settings = dict(cache=Cache(slots=SLOTS), disk=DISK, compute=COMPUTE, prefetch=Prefetch(source=arm, guard="window"))
            read = replay(longest, **settings, timeline=(0, longest.num_passes)).prefetches_read()
            for tokens in lengths:
                trace = longest.passes(0, tokens)
                rows.append({"arm": arm, "seed": seed, "tokens": tokens, "ever_mb": _never_used_mb(read.key[read.of_pass < tokens], trace, tokens),
                             "residence_mb": replay(trace, **settings).ledger.wasted_bytes / tokens / 1e6})  # fmt: skip
    return pd.DataFrame(rows)


def levels(rows: pd.DataFrame, variant: str) -> pd.DataFrame:
    """Means over seeds of one variant, a row per arm: speed, where experts were found (shares of the accesses), stall, MB and late prefetches per token, waits."""
    mine = rows[rows.variant == variant]
    shown = mine.assign(resident=mine.hit_rate, in_flight=mine.in_flight_rate, missing=1 - mine.hit_rate - mine.in_flight_rate, late=mine.late / mine.tokens)
    columns = ["tok_s", "resident", "in_flight", "missing", "stall_ms", "demand_mb", "prefetch_mb", "wasted_mb", "late", "ttft_ms", "p50_ms", "p99_ms"]
    return shown.groupby("arm", sort=False)[columns].mean().reset_index()


def effects(rows: pd.DataFrame, arm: str, minus: str, metric: str = "tok_s", *, relative: bool = True, whose: str = "") -> list[dict]:
    """`arm` against `minus` in every variant, paired by seed, as a share of `minus` (or in the metric's unit). `whose`: results.THEIRS or OURS, on whose hit@k the rows
    are simulated: given, it is the effect's `accuracies` and ends its name, so that effects of both in one results.json can be told apart.

    Raises ResultError where a share of zero is asked for, as of the waste of a run too short to waste anything.
    """
    found = []
    for name in dict.fromkeys(rows.variant):
        part = rows[rows.variant == name]
        values = {which: dict(zip(part.seed[part.arm == which], part.loc[part.arm == which, metric])) for which in (arm, minus)}
        if relative and not all(values[minus].values()):
            raise results.ResultError(f"{minus} has a {metric} of 0 in the variant {name!r}, so there is no relative change: replay more tokens than {int(part.tokens.iloc[0])}")
        effect = stats.paired(values[arm], values[minus], relative=relative, name=f"{arm} - {minus}, {metric}, {name}{whose and f', {whose}'}", unit="share" if relative else metric)
        found.append(effect.as_dict() | {"variant": name, "treatment": arm, "control": minus, "metric": metric, "family": "exploratory"} | ({"accuracies": whose} if whose else {}))
    return found


def by_variant(found: Mapping[str, Iterable[Mapping]], sets: Mapping[str, str]) -> pd.DataFrame:
    """Effects of `effects`, metric -> effects, as `plots_simulator.arms` takes them: a row per variant and seed, effects in percent.

    `sets`: treatment -> its name in the legend.
    """
    parts = [pd.DataFrame([{"set": sets[e["treatment"]], "arm": e["variant"], "seed": seed, metric: 100 * value} for e in listed for seed, value in zip(e["seeds"], e["per_seed"])])
             for metric, listed in found.items()]  # fmt: skip
    joined = parts[0]
    for part in parts[1:]:
        joined = joined.merge(part, on=["set", "arm", "seed"], validate="one_to_one")
    return joined


def arm_records(rows: pd.DataFrame, prefix: str = "") -> list[dict]:
    """Rows of one variant as results.json holds arms: arm, seed and the figures that a claim may ask for."""
    columns = ["tok_s", "hit_rate", "in_flight_rate", "stall_ms", "demand_mb", "prefetch_mb", "wasted_mb", "late", "p50_ms", "p99_ms", "ttft_ms"]
    return [{"arm": prefix + row["arm"], "seed": int(row["seed"])} | {name: float(row[name]) for name in columns} for row in rows.to_dict("records")]


def say_reproduction(beside: pd.DataFrame) -> str:
    """How far the reproduction is off, for what was fitted and for what was predicted."""
    fitted = (beside.quantity == "distinct") | ((beside.quantity == "tok_s") & (beside.arm == DEMAND))
    worst = {name: float((beside[(beside.quantity == name) & ~fitted].ratio - 1).abs().max()) for name in ("tok_s", "ttft_ms")}
    return (f"With a Zipf exponent of {SKEW:g} and {REUSE:.0%} of a token's slots kept from the token before, which two published numbers give, the published speeds "
            f"of baseline, joint and oracle are reproduced within {worst['tok_s']:.1%} and the times to first token within {worst['ttft_ms']:.1%}.")  # fmt: skip


def say_waste(means: pd.DataFrame, known: Mapping[str, float]) -> str:
    """Both counts at the shortest and the longest run, and between which lengths the published count lies."""
    parts = []
    for arm, published in known.items():
        line = means[means.arm == arm].sort_values("tokens")
        short, long = line.iloc[0], line.iloc[-1]
        near = [f"between runs of {a.tokens} and {b.tokens} tokens" for a, b in zip(line.itertuples(), line[1:].itertuples()) if b.ever_mb <= published < a.ever_mb]
        place = near[0] if near else f"beyond the longest run of {long.tokens} tokens" if published < long.ever_mb else "below the shortest run"
        parts.append(f"{arm}: {short.ever_mb:.0f} MB/token in {short.tokens} tokens, {long.ever_mb:.0f} in {long.tokens} (the published {published:g} lies {place}), "
                     f"but {short.residence_mb:.0f} and {long.residence_mb:.0f} per residence")  # fmt: skip
    return "Waste by an ever-used set depends on the run's length. " + "; ".join(parts) + "."


def say_compared(mine: Mapping, found: Sequence[Mapping], known: Mapping) -> str:
    """The published gain beside the reproduction, the mended one, and that of our accuracies."""
    linear = {e["variant"]: e for e in found if e["treatment"] == "joint-linear"}
    reproduced, mended = (f"{100 * linear[name]['mean']:+z.1f}%" for name in ("as published", "all mended"))
    return (f"The study's joint model decodes {100 * known['joint_over_baseline']['linear tok_s']:+z.1f}% faster than its baseline with linear predictors. Its accuracies give "
            f"{reproduced} in its simulator as reproduced here and {mended} once all faults are mended; ours give {results.effect_text(mine, 'percent')}.")  # fmt: skip


def say_mended(found: Sequence[Mapping], what: str) -> str:
    """The effect as published and with each fault mended, in one sentence."""
    parts = [f"{_named(e['variant'])} {100 * e['mean']:+z.1f}%" for e in found]
    return f"{what} (faults are numbered as in 05_cache_simulation): {'; '.join(parts)}."


def _named(variant: str) -> str:
    """A variant in a sentence: "1 experts without replacement" is the simulator with fault 1 alone changed."""
    number, _, rest = variant.partition(" ")
    return f"fault {number} changed ({rest})" if number.isdigit() else variant


def say_ranked(found: Sequence[Mapping]) -> str:
    """What ranking by scores does to the mended gain where only a read or two fit between routers."""
    linear = {e["variant"]: e["mean"] for e in found if e["treatment"] == "joint-linear"}
    return (f"The study's guesses come in any order. If a predictor's right guesses come first, which is the most that scores can do, the mended gain of {linear['all mended']:+z.1%} "
            f"becomes {linear['all mended, right guesses first']:+z.1%}: where few reads fit, its first guess counts more than its hit@k.")  # fmt: skip


def beside_published(rows: pd.DataFrame, variant: str = "as published") -> pd.DataFrame:
    """The published table beside the mean over seeds of one variant: quantity, arm, published, here, here over published."""
    known = results.reference()["simulator"]
    means = rows[rows.variant == variant].groupby("arm").mean(numeric_only=True)
    lines = [{"quantity": metric, "arm": arm, "published": value, "here": means.loc[arm, metric]}
             for metric in ("tok_s", "wasted_mb", "ttft_ms") for arm, value in known[metric].items()]  # fmt: skip
    lines.insert(0, {"quantity": "distinct", "arm": "all", "published": known["distinct"], "here": means.distinct.mean()})
    frame = pd.DataFrame(lines)
    return frame.assign(ratio=frame.here / frame.published)
