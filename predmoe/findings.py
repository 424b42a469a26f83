"""Findings in words, computed from effects and results so that the wording follows the data, whichever way it falls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pandas as pd

from . import experiments, results, stats
from .plots import PREDICTORS


def say(effect: Mapping, subject: str, quantity: str, unit: str) -> str:
    """One sentence with a verb that follows the data: raises or lowers where the interval excludes zero, else neither."""
    return f"{subject} {_verb(effect)} {quantity}: {results.effect_text(effect, unit)}, {_seeds(effect)}."


def say_by_horizon(effects: Sequence[Mapping], subject: str, quantity: str) -> str:
    """One sentence over the horizons of one predictor, in points, horizons of the same verb together."""
    by_verb: dict[str, list[Mapping]] = {}
    for effect in effects:
        by_verb.setdefault(_verb(effect), []).append(effect)
    parts = [
        f"{verb} {quantity} " + ", ".join(f"at h = {e['horizon']} ({results.effect_text(e, 'points')})" for e in group)
        for verb, group in by_verb.items()
    ]
    return f"{subject} {' and '.join(parts)} ({_seeds(effects[0])})."


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
    values = ", ".join(f"{e['p_holm']:.3f} at h = {e['horizon']}" for e in effects)
    return f"Corrected for {len(effects)} horizons (Holm), p = {values}."


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
    deepest = sorted((max(group, key=lambda e: e["horizon"])["mean"], name) for name, group in by_name.items())
    if len(deepest) > 1:
        sentences.append(f"So at h = {max(e['horizon'] for e in effects)} the gain goes from {100 * deepest[0][0]:+z.1f} points ({deepest[0][1]}) to {100 * deepest[-1][0]:+z.1f} ({deepest[-1][1]}).")
    return sentences


def say_confirmed(effects: Sequence[Mapping], subject: str, quantity: str) -> str:
    """`say_by_horizon` for a confirmatory family: what holds after Holm's correction, and apart from it what does not."""
    if effects[0]["p_holm"] is None:
        return say_by_horizon(effects, subject, quantity)
    held = [e for e in effects if e["p_holm"] <= stats.SIGNIFICANCE]
    rest = [e for e in effects if e not in held]
    if not held or not rest:
        return say_by_horizon(effects, subject, quantity) + ("" if held else " None of it is established after Holm's correction.")
    told = ", ".join(f"at h = {e['horizon']} ({results.effect_text(e, 'points')}, p = {e['p_holm']:.3f})" for e in rest)
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
    if effect["ci95"] is None:
        return "changes"
    low, high = effect["ci95"]
    return "raises" if low > 0 else "lowers" if high < 0 else "does not measurably change"


def _seeds(effect: Mapping) -> str:
    return "a single seed, exploratory" if effect["n"] == 1 else f"{effect['n']} seeds"


def answers(claims: Sequence[Mapping], horizons: Mapping | None) -> list[str]:
    """The report's first lines, from claims.json and the results of 02_horizons (None: not run): does it work, how much, at
    what cost, how sure, and what failed to replicate."""
    if horizons is None:
        return ["**Does it work?** Not known in this profile: 02_horizons has not been run."]
    by_id, arms = {claim["id"]: claim for claim in claims}, horizons["arms"]
    gain, cost = by_id["ranking-gain"], by_id["quality-cost"]
    effects = experiments.hit_effects(arms, "joint", "baseline", predictors=[experiments.PRIMARY])
    works = say_confirmed(effects, "Under the ranking MLP, the strongest post-hoc predictor, on both sides, joint training", "hit@k")
    known = {h: effect for (predictor, h), effect in experiments.reference_effects().items() if predictor == experiments.PRIMARY}
    compared = [f"at h = {e['horizon']} {compare(e, known[e['horizon']])}" for e in effects if e["horizon"] in known]
    gate = next(gate for gate in horizons["gates"] if gate["arm"] == "joint")
    (reuse,) = experiments.scalar_effects(arms, "joint", "baseline", {"reuse": "share of k"})
    kept = say(reuse, "Joint training", "the reuse of experts from token to token", "points")
    other = "This profile does not report one yet."
    if any(row["arm"] == "alternative" for row in arms):
        against = experiments.hit_effects(arms, "alternative", "joint", predictors=[experiments.PRIMARY])
        other = say_by_horizon(against, "Against the reference's objective, the best alternative, chosen on other seeds,", "hit@k")
        other += f" It {next(gate for gate in horizons['gates'] if gate['arm'] == 'alternative')['sentence']}."
    failed = [claim for claim in claims if claim["verdict"] == stats.NOT_REPLICATED]
    open_ones = sum(all(part["why"].startswith(stats.NOTHING_EXCLUDED) for part in claim.get("parts", [claim])) for claim in failed)
    listed = "; ".join(claim["statement"].rstrip(".") for claim in failed) or "Nothing that was tested"
    unclear = f" For {open_ones} of these {len(failed)} no effect on either side is established after Holm's correction: not refuted, but not shown." if open_ones else ""
    why = re.sub(r"joint [\w.]+ - baseline [\w.]+, ", "", gain["why"])   # of the effects' names only the horizon
    words = (stats.REPLICATED, stats.PARTLY, stats.NOT_REPLICATED, stats.NOT_TESTED)
    counts = ", ".join(f"{sum(claim['verdict'] == word for claim in claims)} {word}" for word in words)
    return [
        f"**Does it work?** {works} Verdict on the reference's claim: {gain['verdict']} ({why}).",
        f"**How much, compared with the reference study?** {'; '.join(compared) or 'No horizon in common'}.",
        f"**At what cost?** The joint arm {gate['sentence']}. The reference's claim of a small cost: {cost['verdict']}. {kept}",
        f"**How sure?** Paired t intervals over {_seeds(effects[0])}. {corrected(effects)}",
        f"**Is there a better objective?** {other}",
        f"**What failed to replicate?** {listed}.{unclear} Of {len(claims)} claims: {counts}.",
    ]
