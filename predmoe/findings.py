"""Findings in words, computed from effects and results so that the wording follows the data, whichever way it falls.

An effect "raises" or "lowers" where its own 95% interval excludes zero; it is "established" where it also holds after Holm's correction over its
family (see `stats`); one seed has no interval, so that it only "moved" something, "untested".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

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
    """Our effect beside the reference's, both in points: on which side, and, where our interval excludes zero, how large in comparison."""
    ours, theirs, ci95 = 100 * effect["mean"], 100 * reference, effect["ci95"]
    side = "on the same side" if ours * theirs > 0 else "on the other side" if ours * theirs < 0 else "on neither side"
    size = ", a single seed" if ci95 is None else ", our interval contains zero" if ci95[0] <= 0 <= ci95[1] else f", {abs(ours / theirs):.1f} times its size" if theirs else ""
    within = "; our interval contains its value" if ci95 is not None and ci95[0] <= reference <= ci95[1] else ""
    return f"{results.amount(effect['mean'], effect, 'points')} points here, {theirs:+z.1f} in the reference study ({side}{size}{within})"


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
    largest, smallest = (f"{by} {name} ({100 * means[name]:+z.1f} points)" for name in (high, low))
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


def say_doses(table: pd.DataFrame, gates: Sequence[Mapping]) -> list[str]:
    """Of `experiments.doses`: how the gain at the deepest horizon goes with the weight, and at which weights the arm fails the quality gate (`experiments.gates`) and
    by what, one sentence per gradient mode, means over seeds."""
    deepest, sentences, judged = table.horizon.max(), [], {gate["arm"]: gate for gate in gates}
    for gradient, part in table[table.horizon == deepest].groupby("arm", sort=False):
        means = part.groupby("dose").gain.mean()
        steps = means.diff().dropna()
        path = ", ".join(f"{100 * gain:+z.1f}{'' if i else ' points'} at {'' if i else 'lambda '}{dose:g}" for i, (dose, gain) in enumerate(means.items()))
        failing = [f"{dose:g} ({_faults(gate)})" for dose in means.index if not (gate := judged[f"{gradient} {dose:g}"])["passes"]]
        rises = f"; it rises in {(steps > 0).sum()} of {len(steps)} steps of the weight" if len(steps) else ""
        pays = f"FAILS the quality gate at lambda {', '.join(failing)}" if failing else "passes the quality gate at every weight"
        seeds = part.seed.nunique()
        sentences.append(f"Gradient {gradient}: the gain in hit@k at h = {deepest} is {path}{rises}; the arm {pays} "
                         f"({'a single seed, exploratory' if seeds == 1 else f'means of {seeds} seeds'}).")  # fmt: skip
    return sentences


def _faults(gate: Mapping) -> str:
    """By what an arm fails the quality gate."""
    loss, load = gate["val_loss"]["mean"], 1 + gate["load_entropy"]["mean"]
    costly, uneven = loss > stats.MAX_LOSS_INCREASE, load < stats.MIN_LOAD_ENTROPY_RATIO
    return ", ".join([f"validation loss {loss:+z.1%}"] * costly + [f"load entropy {load:.2f} times the baseline's"] * uneven)


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
