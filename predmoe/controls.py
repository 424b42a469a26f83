"""What 07_controls and 09_longer_training make of their measurements: locality beside lookahead, what is known when, and how much of a
gain is sharper routers. Tables and effects from measurements (`experiments.measure_arms`), and what they say in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from . import experiments, results, stats
from .plots import PREDICTORS

# What is local, higher is more so (switch rate: lower): dotted path of a measurement -> how it reads.
MEASURES = {"locality.reuse": "reuse", "locality.switch_rate": "switch rate", "locality.srp": "SRP", "locality.sch": "SCH"}
LATE, NEXT = "pre-attention, same layer", "next token, same layer"


# --- locality ----------------------------------------------------------------------------------------------------------

def cache_sizes(arms: Sequence[Mapping]) -> list[str]:
    """The cache sizes that were measured, as shares of a layer's experts in words, smallest first."""
    return sorted(arms[0]["locality"]["lru"], key=_fraction)


def cache_measures(arms: Sequence[Mapping]) -> dict[str, str]:
    """The paths of the hit rates by policy and cache size (a share of a layer's experts) -> how they read."""
    names = {"lru": "LRU", "belady": "Belady"}
    return {f"locality.{policy}.{size}": f"{names[policy]} at {size}" for policy in names for size in cache_sizes(arms)}


def locality_table(arms: Sequence[Mapping], measures: Mapping[str, str]) -> pd.DataFrame:
    """Columns arm, seed, measure (in words), value; `measures`: path -> words."""
    return pd.DataFrame([
        {"arm": arm, "seed": seed, "measure": words, "value": value}
        for arm in dict.fromkeys(row["arm"] for row in arms) for path, words in measures.items()
        for seed, value in results.values_by_seed(arms, arm, path).items()
    ])  # fmt: skip


def cache_table(arms: Sequence[Mapping]) -> pd.DataFrame:
    """Columns arm, seed, policy, size (words), share (a number), hit_rate: caches of one layer's experts each."""
    return pd.DataFrame([
        {"arm": row["arm"], "seed": row["seed"], "policy": policy, "size": size, "share": _fraction(size), "hit_rate": row["locality"][policy][size]}
        for row in arms for policy in ("lru", "belady") for size in cache_sizes(arms)
    ])  # fmt: skip


def above_belady(arms: Sequence[Mapping]) -> list[str]:
    """Where LRU hits more often than the optimum, which cannot be; empty as it should be."""
    return [f"{row['arm']}, seed {row['seed']}, {size}" for row in arms for size, rate in row["locality"]["lru"].items() if rate > row["locality"]["belady"][size] + 1e-12]


def locality_effects(arms: Sequence[Mapping], treatment: str, control: str = "baseline") -> list[dict]:
    """Paired effects of `treatment` on every measure of locality, Holm-corrected over the measures, with `words` for each."""
    measures = MEASURES | cache_measures(arms)
    effects = experiments.scalar_effects(arms, treatment, control, dict.fromkeys(measures, "share"))
    adjusted = stats.holm([e["p"] for e in effects]) if effects[0]["p"] is not None else [None] * len(effects)
    return [effect | {"p_holm": p, "words": measures[effect["metric"]]} for effect, p in zip(effects, adjusted)]


def effects_forest(effects: Iterable[Mapping]) -> pd.DataFrame:
    """Effects that carry `words` as `plots.forest` takes them, grouped by treatment."""
    return pd.DataFrame([
        {"group": e["treatment"], "name": e["words"], "arm": e["treatment"], "mean": e["mean"], "low": e["ci95"][0] if e["ci95"] else np.nan,
         "high": e["ci95"][1] if e["ci95"] else np.nan, "per_seed": e["per_seed"], "reference": np.nan}
        for e in effects
    ])  # fmt: skip


def _fraction(words: str) -> float:
    numerator, _, denominator = words.partition("/")
    return int(numerator) / int(denominator or 1)


# --- what is known when ------------------------------------------------------------------------------------------------

def sources(arms: Sequence[Mapping]) -> pd.DataFrame:
    """Columns arm, seed, measure, value: hit@k of what can foretell a layer's experts, from latest to earliest, trained and free.

    One attention ahead (before the layer's attention), one layer ahead, and one whole token ahead; each with the fitted ranking MLP and
    with what costs nothing: a router applied early, and the experts of the token before.
    """
    near = min(arms[0]["hit"][experiments.PRIMARY], key=int)
    rows = []
    for row in arms:
        here = row["locality"]
        found = {
            f"{LATE}: ranking MLP": here["pre_attention"]["ranking"], f"{LATE}: its router": here["pre_attention"]["router"],
            f"{near} layer ahead: ranking MLP": row["hit"]["ranking"][near], f"{near} layer ahead: its router": row["hit"]["next_router"][near],
            f"{NEXT}: ranking MLP": here["next_token"]["ranking"], f"{NEXT}: same experts": here["next_token"]["previous"],
        }  # fmt: skip
        rows += [{"arm": row["arm"], "seed": row["seed"], "measure": name, "value": value} for name, value in found.items()]
    return pd.DataFrame(rows)


def source_effects(arms: Sequence[Mapping], treatment: str, control: str = "baseline") -> list[dict]:
    """Paired effects on the hit@k of the sources that only the second measurement has, with `words` for each."""
    paths = {
        "locality.pre_attention.ranking": f"{LATE}: ranking MLP", "locality.pre_attention.router": f"{LATE}: its router",
        "locality.next_token.ranking": f"{NEXT}: ranking MLP", "locality.next_token.previous": f"{NEXT}: same experts",
    }  # fmt: skip
    return [effect | {"words": paths[effect["metric"]]} for effect in experiments.scalar_effects(arms, treatment, control, dict.fromkeys(paths, "hit@k"))]


# --- findings of 07 ----------------------------------------------------------------------------------------------------

def say_locality(effects: Sequence[Mapping]) -> str:
    """On which measures an arm is more local than the baseline, on which less, on which neither; a single seed has no test."""
    treatment, n = effects[0]["treatment"], effects[0]["n"]
    if effects[0]["ci95"] is None:
        moved = ", ".join(f"{e['words']} {100 * e['mean']:+z.1f}" for e in effects)
        return f"Against the baseline, {treatment} moves, in points: {moved} (a single seed, exploratory)."
    sides = {"more local": [], "less local": [], "not measurably different": []}
    for e in effects:
        up = -1 if e["metric"].endswith("switch_rate") else 1
        side = "more local" if up * e["ci95"][0 if up > 0 else 1] > 0 else "less local" if up * e["ci95"][1 if up > 0 else 0] < 0 else "not measurably different"
        sides[side].append(f"{e['words']} ({100 * e['mean']:+z.1f})")
    parts = [f"{side} by {', '.join(names)}" for side, names in sides.items() if names]
    return f"Against the baseline, {treatment} is {'; '.join(parts)} (points, {n} seeds)."


def say_sticky(arms: Sequence[Mapping], weights: Sequence[float]) -> str:
    """What the sweep does to its own goal, to lookahead and to quality, by means over the seeds of each arm."""
    far = max(arms[0]["hit"]["ranking"], key=int)
    parts = []
    for name in (f"sticky {weight:g}" for weight in weights):
        change = lambda path: experiments.scalar_effects(arms, name, "baseline", {path: "share"})[0]["mean"]  # noqa: B023, E731
        relative = np.mean([row["val_loss"] / base["val_loss"] - 1 for row in arms if row["arm"] == name for base in arms if base["arm"] == "baseline" and base["seed"] == row["seed"]])
        parts.append(f"at weight {name.split()[1]} reuse {100 * change('locality.reuse'):+z.1f} points, hit@k at h = {far} {100 * change(f'hit.ranking.{far}'):+z.1f}, "
                     f"validation loss {100 * relative:+z.2f}%")  # fmt: skip
    return f"The sticky loss, against the baseline: {'; '.join(parts)}."


def say_sources(arms: Sequence[Mapping], arm: str) -> str:
    """How much of an arm's routing each source knows, means over seeds, from the latest to the earliest."""
    table = sources([row for row in arms if row["arm"] == arm]).groupby("measure", sort=False).value.mean()
    return f"Of the {arm} model's experts are known: " + "; ".join(f"{100 * value:.1f}% by {name}" for name, value in table.items()) + "."


def say_fits(arms: Sequence[Mapping]) -> str:
    """Whether the fits of the second measurement converged by the rule; those that did not are named."""
    fits = [(f"{row['arm']}, seed {row['seed']}, {name}", ok) for row in arms for name, ok in row["locality"]["converged"].items()]
    stopped = [name for name, ok in fits if not ok]
    if not stopped:
        return f"All {len(fits)} fits of same-layer predictors converged by the same rule."
    named = "; ".join(stopped[:4]) + (f" and {len(stopped) - 4} more" if len(stopped) > 4 else "")
    return f"{len(stopped)} of {len(fits)} fits of same-layer predictors reached the step limit before they converged, so their hit@k is a lower bound: {named}."


# --- longer training, and sharper routers -------------------------------------------------------------------------------

def by_length(arms: Sequence[Mapping], times: float, predictor: str = experiments.PRIMARY) -> list[dict]:
    """joint - baseline by horizon as trained elsewhere and at `times` the tokens, with `variation` naming the length."""
    names = {"as it stands": ("joint", "baseline"), f"{times:g} times the tokens": (f"joint {times:g}x", f"baseline {times:g}x")}
    return [
        effect | {"variation": name, "name": f"{effect['name']}, {name}"}
        for name, pair in names.items() for effect in experiments.hit_effects(arms, *pair, predictors=[predictor])
    ]  # fmt: skip


def growth(arms: Sequence[Mapping], times: float, predictor: str = experiments.PRIMARY) -> list[dict]:
    """By horizon, how much larger joint - baseline is at `times` the tokens, over the seeds that have both lengths."""
    found = []
    for h in (int(h) for h in arms[0]["hit"][predictor]):
        value = lambda arm: results.values_by_seed(arms, arm, f"hit.{predictor}.{h}")  # noqa: B023, E731
        long, short = ({seed: treated - value(control)[seed] for seed, treated in value(arm).items()} for arm, control in
                       ((f"joint {times:g}x", f"baseline {times:g}x"), ("joint", "baseline")))  # fmt: skip
        effect = stats.paired(long, {seed: short[seed] for seed in long}, name=f"gain at {times:g} times the tokens - gain, {predictor}, h={h}", unit="hit@k")
        found.append(effect.as_dict() | {"predictor": predictor, "horizon": h, "metric": "gain", "treatment": f"joint {times:g}x", "control": "joint", "family": "exploratory"})
    return found


def sharpened(arms: Sequence[Mapping], predictor: str = experiments.PRIMARY, joint: str = "joint") -> list[dict]:
    """What sharpening alone would give at the joint model's own router entropy: an arm record per seed that has a ladder.

    The ladder of a seed is its baseline and its entropy penalties; hit@k between its rungs is linear in router entropy. Beyond
    its ends the nearest rung stands, and `inside` is False. Columns of a record: hit and router_entropy of results.json.
    """
    rungs: dict[int, list[Mapping]] = {}
    for row in arms:
        if row["arm"] == "baseline" or row["arm"].startswith("entropy "):
            rungs.setdefault(row["seed"], []).append(row)
    found = []
    for row in (row for row in arms if row["arm"] == joint):
        ladder = sorted(rungs.get(row["seed"], []), key=lambda rung: rung["router_entropy"])
        if len(ladder) < 2:
            continue
        entropies, at = [rung["router_entropy"] for rung in ladder], row["router_entropy"]
        hit = {h: float(np.interp(at, entropies, [rung["hit"][predictor][h] for rung in ladder])) for h in row["hit"][predictor]}
        found.append({"arm": "sharpened", "seed": row["seed"], "router_entropy": at, "inside": entropies[0] <= at <= entropies[-1], "hit": {predictor: hit}})
    if not found:
        raise results.ResultError(f"no seed of {joint} has a baseline and an entropy penalty beside it, so there is no ladder to interpolate")
    return found


def sharpness_effects(arms: Sequence[Mapping], predictor: str = experiments.PRIMARY) -> list[dict]:
    """The joint model's gain by horizon in two parts: sharpness (the ladder at its entropy - baseline), structure (the rest)."""
    everything, seeds = [*arms, *(records := sharpened(arms, predictor))], {record["seed"] for record in records}
    mine = [row for row in everything if row["seed"] in seeds]
    parts = {"sharpness": ("sharpened", "baseline"), "structure": ("joint", "sharpened")}
    return [
        effect | {"variation": part, "part": part, "name": f"{part} of the gain, {predictor}, h={effect['horizon']}"}
        for part, pair in parts.items() for effect in experiments.hit_effects(mine, *pair, predictors=[predictor])
    ]  # fmt: skip


def ladder_table(arms: Sequence[Mapping], predictor: str = experiments.PRIMARY) -> pd.DataFrame:
    """Columns arm, seed, horizon, entropy (share of the maximum), hit, loss_change (fraction of the same seed's baseline): baseline, joint and every penalty."""
    losses = results.values_by_seed(arms, "baseline", "val_loss")
    return pd.DataFrame([
        {"arm": row["arm"], "seed": row["seed"], "horizon": int(h), "entropy": row["router_entropy_fraction"], "hit": hit, "loss_change": row["val_loss"] / losses[row["seed"]] - 1}
        for row in arms if row["arm"] in ("baseline", "joint") or row["arm"].startswith("entropy ") for h, hit in row["hit"][predictor].items()
    ])  # fmt: skip


def say_sharpness(arms: Sequence[Mapping], effects: Sequence[Mapping]) -> list[str]:
    """The two parts by horizon, and whether the joint model's entropy lies on the ladder at all."""
    records = sharpened(arms)
    outside = sum(not record["inside"] for record in records)
    where = "The joint model's router entropy lies on the ladder on every seed" if not outside else (
        f"On {outside} of {len(records)} seeds the joint model's router entropy lies beyond the ladder's ends, where the nearest rung stands for it")  # fmt: skip
    sentences = [f"{where}."]
    for h in dict.fromkeys(e["horizon"] for e in effects):
        sharp, structure = (next(e for e in effects if e["horizon"] == h and e["part"] == part) for part in ("sharpness", "structure"))
        total = sharp["mean"] + structure["mean"]
        share = f", {structure['mean'] / total:.0%} of the gain" if total > 0 else ""
        sentences.append(f"At h = {h} sharper routers explain {results.effect_text(sharp, 'points')} and structure {results.effect_text(structure, 'points')}{share} "
                         f"({'a single seed' if sharp['n'] == 1 else str(sharp['n']) + ' seeds'}{', exploratory' if sharp['n'] < stats.LEAST_SEEDS else ''}).")  # fmt: skip
    return sentences


# --- beside the reference ------------------------------------------------------------------------------------------------

def beside_reference(arms: Sequence[Mapping], *tables: str, predictor: str = "linear") -> pd.DataFrame:
    """Tables of the reference study's levels (keys of assets/reference.json) with ours of the same arms below, means over seeds."""
    known, ours = results.reference(), {row["arm"] for row in arms}
    rows = [{"study": "reference", "arm": row["arm"]} | {f"h = {h}": row.get(h, np.nan) for h in ("1", "2", "4")} for table in tables for row in known[table]]
    for arm in [row["arm"] for row in rows if row["arm"] in ours]:
        mine = [row["hit"][predictor] for row in arms if row["arm"] == arm]
        rows.append({"study": f"here, {PREDICTORS[predictor]}", "arm": arm} | {f"h = {h}": float(np.mean([hit[h] for hit in mine])) for h in mine[0]})
    return pd.DataFrame(rows)
