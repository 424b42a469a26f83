"""Findings in words, computed from effects and results so that the wording follows the data, whichever way it falls.

An effect "raises" or "lowers" where its own 95% interval excludes zero; it is "established" where it also holds after Holm's correction over its
family (see `stats`); one seed has no interval, so that it only "moved" something, "untested".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from . import claims as deciding
from . import experiments, results, stats
from .plots import PREDICTORS

PLACEBO = "placebo"   # how the name begins of a variation whose loss weighs too little to do anything


def say(effect: Mapping, subject: str, quantity: str, unit: str) -> str:
    """One sentence with a verb that follows the data: raises or lowers where the interval excludes zero, else neither."""
    if effect["ci95"] is None:
        return f"{subject} moved {quantity} by {_moved(effect, unit)} in one seed, untested."
    return f"{subject} {_verb(effect)} {quantity}: {results.effect_text(effect, unit)}, {_seeds(effect)}."


def say_by_horizon(effects: Sequence[Mapping], subject: str, quantity: str) -> str:
    """One sentence over the horizons of one predictor, in points, horizons of the same verb together; with the levels where they are given
    (`experiments.with_levels`)."""
    if effects[0]["ci95"] is None:
        moved = ", ".join(f"{_moved(e, 'points')} at h = {e['horizon']}{_levels(e) and f' ({_levels(e)[:-2]})'}" for e in effects)
        return f"{subject} moved {quantity} by {moved}, in one seed, untested."
    by_verb: dict[str, list[Mapping]] = {}
    for effect in effects:
        by_verb.setdefault(_verb(effect), []).append(effect)
    parts = [
        f"{verb} {'it' if i else quantity} " + ", ".join(f"at h = {e['horizon']} ({_levels(e)}{results.effect_text(e, 'points')})" for e in group)
        for i, (verb, group) in enumerate(by_verb.items())
    ]
    shown = "; hit@k of the ordinary → of the joint model, and the difference" if "levels" in effects[0] else ""
    return f"{subject} {' and '.join(parts)} ({_seeds(effects[0])}{shown})."


def compare(effect: Mapping, reference: float) -> str:
    """Our effect beside the reference's, both in points: on which side, and how large in comparison."""
    ours, theirs = 100 * effect["mean"], 100 * reference
    side = "on the same side" if ours * theirs > 0 else "on the other side"
    inside = effect["ci95"] is not None and effect["ci95"][0] <= reference <= effect["ci95"][1]
    within = "; our interval contains its value" if inside else ""
    return f"{ours:+z.1f} points here, {theirs:+.1f} in the reference study ({side}, {abs(ours / theirs):.1f} times its size{within})"


def label(predictor: str) -> str:
    """A predictor's name at the start of a sentence."""
    name = PREDICTORS[predictor]
    return name[0].upper() + name[1:]


def corrected(effects: Sequence[Mapping]) -> str:
    """The Holm-corrected p values of a family in words."""
    if effects[0]["p_holm"] is None:
        return "With a single seed there is no test."
    return f"Corrected for {len(effects)} horizons (Holm), {_holm(effects)}."


def _holm(effects: Sequence[Mapping]) -> str:
    if effects[0]["p_holm"] is None:
        return "no test"
    values, at = " / ".join(_p(e["p_holm"]) for e in effects), " / ".join(str(e["horizon"]) for e in effects)
    return f"p = {values} at h = {at}"


def say_extremes(table: pd.DataFrame, by: str, arm: str) -> str:
    """Where an arm's gain is largest and smallest at the deepest horizon, over the values of column `by`, means over seeds."""
    deepest = table.horizon.max()
    means = table[(table.arm == arm) & (table.horizon == deepest)].groupby(by).gain.mean()
    high, low = means.idxmax(), means.idxmin()
    largest, smallest = (f"{by} {name} ({100 * means[name]:+.1f} points)" for name in (high, low))
    return f"At h = {deepest} the {arm} arm's gain is largest for {largest} and smallest for {smallest}."


def say_documents(effects: Sequence[Mapping]) -> str:
    """How many of the within-seed intervals over documents exclude zero, and on which side."""
    up, down = sum(e["ci95"][0] > 0 for e in effects), sum(e["ci95"][1] < 0 for e in effects)
    return (
        f"Resampling the held-out documents within one seed, {up} of {len(effects)} intervals (seeds x horizons) lie above zero and {down} below: "
        "this is how far the result hangs on the text, not on the seed."
    )


def say_variations(effects: Sequence[Mapping], measured: Mapping[str, Sequence[Mapping]]) -> list[str]:
    """What joint training does under each variation and at what cost, one sentence each, then all of them at the deepest horizon in order.

    `measured`: the measurements by variation (`experiments.measure_groups`), which the gate is judged on.
    """
    by_name: dict[str, list[Mapping]] = {}
    for effect in effects:
        by_name.setdefault(effect["variation"], []).append(effect)
    gates = {name: next(gate for gate in experiments.gates(measured[name]) if gate["arm"] == "joint") for name in by_name}
    sentences = [f"{say_by_horizon(group, f'{name[0].upper()}{name[1:]}: joint training', 'hit@k')} It {gates[name]['sentence']}." for name, group in by_name.items()]
    sentences += say_placebo(effects)
    deepest = sorted((max(group, key=lambda e: e["horizon"])["mean"], name) for name, group in by_name.items())
    if len(deepest) > 1:
        sentences.append(f"So at h = {max(e['horizon'] for e in effects)} the gain goes from {100 * deepest[0][0]:+z.1f} points ({deepest[0][1]}) to {100 * deepest[-1][0]:+z.1f} ({deepest[-1][1]}).")
    return sentences


def say_placebo(effects: Sequence[Mapping]) -> list[str]:
    """Of the effects of variations: how many intervals of the placebo exclude zero, which can only be chance, among how many that were looked at.
    Nothing where there is no placebo, or no interval."""
    looked = [e for e in effects if e["ci95"]]
    mine = [e for e in looked if e["variation"].lower().startswith(PLACEBO)]
    if not mine:
        return []
    apart = [e for e in mine if e["ci95"][0] > 0 or e["ci95"][1] < 0]
    told = "none excludes zero"
    if apart:
        which, held = "; ".join(f"at h = {e['horizon']} {results.effect_text(e, 'points')}" for e in apart), sum(e["p_holm"] <= stats.SIGNIFICANCE for e in apart)
        told = f"{len(apart)} {'excludes' if len(apart) == 1 else 'exclude'} zero uncorrected ({which}), {held or 'none'} after Holm's correction"
    name = f"{mine[0]['variation'][0].upper()}{mine[0]['variation'][1:]}"
    return [f"{name}: its loss weighs nothing, so that whatever it moves is chance; of its {len(mine)} intervals {told}, and {len(looked)} intervals were looked at over all variations."]


def say_confirmed(effects: Sequence[Mapping], subject: str, quantity: str) -> str:
    """`say_by_horizon` for a confirmatory family: what holds after Holm's correction, and apart from it what does not."""
    if effects[0]["p_holm"] is None:
        return say_by_horizon(effects, subject, quantity)
    held = [e for e in effects if e["p_holm"] <= stats.SIGNIFICANCE]
    rest = [e for e in effects if e not in held]
    if not held or not rest:
        return say_by_horizon(effects, subject, quantity) + ("" if held else " None of it is established after Holm's correction.")
    told = ", ".join(f"at h = {e['horizon']} ({_levels(e)}{results.effect_text(e, 'points')}, p = {_p(e['p_holm'])})" for e in rest)
    return f"{say_by_horizon(held, subject, quantity)} Not established after Holm's correction: {told}."


def say_doses(table: pd.DataFrame, limit: float = stats.MAX_LOSS_INCREASE) -> list[str]:
    """Of `experiments.doses`: how the gain at the deepest horizon goes with the weight, and from which weight on the loss is above the
    gate's limit, by means over seeds, one sentence per gradient mode."""
    deepest, sentences = table.horizon.max(), []
    for gradient, part in table[table.horizon == deepest].groupby("arm", sort=False):
        means = part.groupby("dose")[["gain", "loss_change"]].mean()
        steps = means.gain.diff().dropna()
        path = ", ".join(f"{100 * gain:+z.1f} at {dose:g}" for dose, gain in means.gain.items())
        costly = [f"{dose:g} ({100 * change:+z.1f}%)" for dose, change in means.loss_change.items() if change > limit]
        rises = f"; it rises in {(steps > 0).sum()} of {len(steps)} steps of the weight" if len(steps) else ""
        pays = f"validation loss is above the gate's +{100 * limit:g}% at {', '.join(costly)}" if costly else f"validation loss stays within the gate's +{100 * limit:g}% at every weight"
        seeds = part.seed.nunique()
        sentences.append(f"Gradient {gradient}: the gain in hit@k at h = {deepest} is {path} points{rises}; {pays} "
                         f"({'a single seed, exploratory' if seeds == 1 else f'means of {seeds} seeds'}).")  # fmt: skip
    return sentences


def say_convergence(arms: Sequence[Mapping]) -> str:
    """Whether every post-hoc fit converged by its rule; those that did not are named."""
    fits, stopped = sum(len(row["converged"]) for row in arms), experiments.unconverged(arms)
    if not stopped:
        return f"All {fits} post-hoc fits converged by the same rule."
    named = "; ".join(stopped[:4]) + (f" and {len(stopped) - 4} more" if len(stopped) > 4 else "")
    return f"{len(stopped)} of {fits} post-hoc fits reached the step limit before they converged, so their hit@k is a lower bound: {named}."


def say_choice(arms: Sequence[Mapping], chosen: str | None, seeds: Sequence[int]) -> str:
    """What the rule chose among the candidates, on which seeds."""
    if not arms:
        return "No candidates are given in this profile, so there is no evidence here for the choice of the alternative."
    names = [arm for arm in dict.fromkeys(row["arm"] for row in arms) if arm != "baseline"]
    where = f"on seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    if chosen is None:
        return f"None of the {len(names)} candidates passes the quality gate {where}, so it chooses none; the alternative below was named by hand."
    return f"Of {len(names)} candidate{'s' if len(names) > 1 else ''} {where} the rule chooses: {chosen}."


def _verb(effect: Mapping) -> str:
    low, high = effect["ci95"]
    return "raises" if low > 0 else "lowers" if high < 0 else "does not measurably change"


def _moved(effect: Mapping, unit: str) -> str:
    """The size of an effect that has no interval."""
    return results.effect_text(effect, unit).removesuffix(" (single seed)")


def _levels(effect: Mapping) -> str:
    """The levels of control and treatment in percent where the effect carries them."""
    return "{:.1%} → {:.1%}, ".format(*effect["levels"]) if "levels" in effect else ""


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.0005 else "below 0.001"


def _seeds(effect: Mapping) -> str:
    return "a single seed, exploratory" if effect["n"] == 1 else f"{effect['n']} seeds"


# --- the report's first lines --------------------------------------------------------------------------------------------

def answers(claims: Sequence[Mapping], found: Mapping[str, Mapping]) -> list[str]:
    """The report's first lines, from claims.json and the results by experiment: does it work, how much, what is it worth, at what cost, how sure, is
    there a better objective, and what failed to replicate.

    They stand on the experiment that has the comparison with most seeds (`experiments.primary`); the alternative objective on 02_horizons, which alone has it.
    """
    name = experiments.primary(found)
    if name is None:
        return ["**Does it work?** Not known in this profile: no notebook that compares joint with ordinary training (02_horizons is the first) has been run."]
    by_id, arms = {claim["id"]: claim for claim in claims}, found[name]["arms"]
    gain, cost = by_id["ranking-gain"], by_id["quality-cost"]
    effects = experiments.with_levels(arms, experiments.hit_effects(arms, "joint", "baseline", predictors=[experiments.PRIMARY]))
    works = say_confirmed(effects, "With a ranking MLP, the strongest predictor that is fitted afterwards, on both models alike, joint training", "hit@k")
    known = {h: effect for (predictor, h), effect in experiments.reference_effects().items() if predictor == experiments.PRIMARY}
    compared = "; ".join(f"at h = {e['horizon']} {compare(e, known[e['horizon']])}" for e in effects if e["horizon"] in known)
    gate = next(gate for gate in found[name]["gates"] if gate["arm"] == "joint")
    (reuse,) = experiments.scalar_effects(arms, "joint", "baseline", {"reuse": "share of k"})
    kept = say(reuse, "Joint training", "the reuse of experts from token to token", "points")
    paired = f"Paired t intervals over {effects[0]['n']} seeds ({name})." if effects[0]["ci95"] else f"One seed ({name})."
    extended, first = [], found.get("02_horizons") if name != "02_horizons" else None
    if first:
        smaller = experiments.hit_effects(first["arms"], "joint", "baseline", predictors=[experiments.PRIMARY])
        extended.append(f"02_horizons, the smaller comparison that these seeds extend, has {_holm(smaller)} over its {_seeds(smaller[0])}: where the two differ, what is established hangs on the further seeds.")
    placebo = say_placebo([e for e in found.get("02_horizons", {}).get("effects", []) if e.get("variation")])
    return [
        f"**Does it work?** {works} Verdict on the reference study's claim: {gain['verdict']} ({deciding.reason(gain)}).",
        f"**How much, compared with the reference study?** {compared[:1].upper() + compared[1:] or 'No horizon in common'}.",
        f"**What is it worth?** {' '.join(say_worth(found))}",
        f"**At what cost?** The joint arm {gate['sentence']}. The reference study's claim of a small cost: {cost['verdict']}. {kept}",
        f"**How sure?** {' '.join([paired, corrected(effects), *extended, *placebo])}",
        f"**Is there a better objective?** {_better(found.get('02_horizons'))}",
        f"**What failed to replicate?** {_failed(claims)}",
    ]


def say_worth(found: Mapping[str, Mapping]) -> list[str]:
    """What the predictors' hit@k is worth in simulated tokens per second (05_cache_simulation), on which machine, and what on a disk whose reads outlast
    a layer (08_latency_sensitivity)."""
    if "05_cache_simulation" not in found:
        return ["Not simulated in this profile: 05_cache_simulation has not been run."]
    arms, known = found["05_cache_simulation"]["arms"], results.reference()["simulator"]
    models = found["05_cache_simulation"]["provenance"]["parameters"]["models"]
    speed = {arm: float(np.mean(list(results.values_by_seed(arms, arm, "tok_s").values()))) for arm in ("demand", "baseline-ranking", "joint-ranking", "oracle")}
    joint, plain = (experiments.relative_effect(arms, *pair, "tok_s") for pair in (("joint-ranking", "baseline-ranking"), ("baseline-ranking", "demand")))
    room = speed["oracle"] - speed["baseline-ranking"]
    left = f"; an oracle would add {room / speed['baseline-ranking']:.1%} to the ordinary model's" if room > 0 else ""
    said = [
        f"{_worth(joint)}: {speed['baseline-ranking']:.3f} → {speed['joint-ranking']:.3f} tok/s with the ranking predictor of the ordinary → of the joint model, {speed['demand']:.3f} without prefetch and "
        f"{speed['oracle']:.3f} with an oracle. Prefetching itself is worth {100 * plain['mean']:+.1f}%{left}.",
        f"The accuracies are those of our {models} models, the machine is the reference study's ({known['geometry']}), its simulator's faults mended, which also makes its one cache one for each layer.",
    ]  # fmt: skip
    said += _other_versions(found["05_cache_simulation"])
    rows = [row for row in found.get("08_latency_sensitivity", {}).get("arms", []) if "gain_over_baseline" in row]
    if rows:
        fits, beyond = (stats.over_seeds({row["seed"]: row["gain_over_baseline"][key] for row in rows}).as_dict() for key in ("fits", "beyond"))
        slow = "nothing" if not round(100 * beyond["mean"], 2) else f"{100 * beyond['mean']:+.2f}%"
        said.append(f"By disk, with linear predictors: {slow} at {known['sensitivity']['beyond_gb_per_s']:g} GB/s, where a read outlasts a layer, and {results.effect_text(fits, 'percent')} on average over faster ones.")
    return said


def _other_versions(result: Mapping) -> list[str]:
    """What joint training is worth, on our accuracies, with the linear predictor, which the claims take, and by the simulator's other versions."""
    arms = result["arms"]
    ours = {row["seed"] for row in arms if row["arm"] == "joint-ranking"}
    by_kind: dict[str, dict[str, Mapping]] = {"linear": {}, "ranking": {}}   # those on the reference's accuracies come before ours
    for e in result["effects"]:
        for kind, known in by_kind.items():
            if (e.get("metric"), e.get("treatment"), e.get("control")) == ("tok_s", f"joint-{kind}", f"baseline-{kind}") and set(e["seeds"]) == ours:
                known[e["variant"]] = e
    told = [f"{variant} {results.effect_text(e, 'percent')}" for variant, e in by_kind["ranking"].items() if variant != "all mended"]
    linear = by_kind["linear"].get("all mended")
    said = [f"With linear predictors, by which the claims are judged, it is worth {results.effect_text(linear, 'percent')}."] if linear else []
    return said + ([f"By other versions of the simulator, with ranking predictors: {'; '.join(told)}."] if told else [])


def _worth(joint: Mapping) -> str:
    """What joint training is worth in simulated speed, in plain words whichever way it falls."""
    if joint["ci95"] is None:
        return f"Simulated, joint training moved tokens per second by {_moved(joint, 'percent')} in one seed, untested"
    low, high = joint["ci95"]
    size = f"{results.effect_text(joint, 'percent')} ({_seeds(joint)})"
    if low <= 0 <= high:
        return f"Simulated, joint training is worth nothing that can be told from zero, {size} in tokens per second"
    return f"Simulated, joint training {'is worth' if low > 0 else 'COSTS speed,'} {size} in tokens per second"


def _better(horizons: Mapping | None) -> str:
    """The best alternative objective against the reference's, on the seeds of 02_horizons."""
    if horizons is None or not any(row["arm"] == "alternative" for row in horizons["arms"]):
        return "This profile does not report one yet."
    against = experiments.hit_effects(horizons["arms"], "alternative", "joint", predictors=[experiments.PRIMARY])
    gate = next(gate for gate in horizons["gates"] if gate["arm"] == "alternative")
    told = say_by_horizon(against, "Against the reference study's objective, the best alternative, chosen on other seeds,", "hit@k")
    return f"{told} It {gate['sentence']}."


def _failed(claims: Sequence[Mapping]) -> str:
    """The claims that were not replicated, with what was measured instead, and how many verdicts there are of each kind."""
    failed = [claim for claim in claims if claim["verdict"] == stats.NOT_REPLICATED]
    listed = "; ".join(f"“{claim['statement'].rstrip('.')}”, here: {claim['measured']}" for claim in failed) or "Nothing that was tested"
    unclear = (stats.NOTHING_EXCLUDED, stats.NOTHING_ESTABLISHED)
    open_ones = sum(all(any(words in part["why"] for words in unclear) for part in claim.get("parts", [claim])) for claim in failed)
    shown = f" For {open_ones} of these {len(failed)} no effect on either side is established: not refuted, but not shown." if open_ones else ""
    partly = [claim for claim in claims if claim["verdict"] == stats.PARTLY]
    sizes = sum(stats.OTHER_SIZE in claim["why"] for claim in partly)
    shown += f" Of the {len(partly)} that are replicated in part, {sizes} hold in direction and differ more than twofold in size." if sizes else ""
    words = (stats.REPLICATED, stats.PARTLY, stats.NOT_REPLICATED, stats.NOT_TESTED)
    counts = ", ".join(f"{sum(claim['verdict'] == word for claim in claims)} {word}" for word in words)
    return f"{listed}.{shown} Of {len(claims)} claims: {counts}."
