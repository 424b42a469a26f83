"""The report's first lines: each question with a one-sentence answer and the numbers behind it, computed from claims.json and the results.

`answers` stands at the head of the report and in README; `details` are the sentences behind them, which the report alone shows.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from . import claims as deciding
from . import boundary, downstream_study, experiments, refit, results, stats
from .findings import PLACEBO, _holm, _moved, _seeds, _verb, compare, say, say_by_horizon, say_confirmed

FIRST = "02_horizons"   # the experiment that alone has the alternative objective and the placebo; the one with most seeds extends its comparison
TASKS = "12_downstream"
TUNED, PARTS = "10_olmoe_lora", "13_olmoe_dose"


def answers(claims: Sequence[Mapping], found: Mapping[str, Mapping], benchmark: Mapping | None = None) -> list[str]:
    """The report's first lines, from claims.json and the results by experiment: does it work, how much, what is it worth, at what cost, how sure, is
    there a better objective, can a trained model be made predictable, and what failed to replicate.

    They stand on the experiment that has the comparison with most seeds (`experiments.primary`); the alternative objective on 02_horizons, which alone has it.
    `benchmark`: `results.benchmark("distributed")`, which timed the prediction term.
    """
    name = experiments.primary(found)
    if name is None:
        return ["**Does it work?** Not known in this profile: no notebook that compares joint with ordinary training (02_horizons is the first) has been run."]
    by_id, arms = {claim["id"]: claim for claim in claims}, found[name]["arms"]
    effects = _primary_effects(arms)
    works = say_confirmed(experiments.with_levels(arms, effects), "With a ranking MLP, the reference study's strongest predictor fitted afterwards, on both models alike, joint training", "hit@k")
    gain = by_id["ranking-gain"]
    return [
        f"**Does it work?** {_whether(effects)} {works} The reference study's claim is {_replicated(gain['verdict'])}, as {_clause(deciding.reason(gain))}.",
        f"**How much, compared with the reference study?** {say_size(effects)}",
        f"**What is it worth?** {' '.join(say_worth(found))}",
        f"**At what cost?** {' '.join(say_cost(found[name], by_id['quality-cost'], benchmark, found.get(TASKS)))}",
        f"**How sure?** {' '.join(say_certainty(effects, name, found))}",
        f"**Is there a better objective?** {' '.join(say_better(found.get(FIRST)))}",
        f"**Can a low-rank fine-tune make a trained model predictable?** {' '.join(say_trained(found))}",
        f"**What failed to replicate?** {' '.join(say_failed(claims))}",
    ]


def details(claims: Sequence[Mapping], found: Mapping[str, Mapping]) -> list[str]:
    """What stands behind `answers` and is too long for them, a paragraph per question; empty where there is no answer."""
    name = experiments.primary(found)
    if name is None:
        return []
    effects, known = _primary_effects(found[name]["arms"]), _reference_gains()
    told = {
        "How much": [f"At h = {e['horizon']} {compare(e, known[e['horizon']])}." for e in effects if e["horizon"] in known],
        "What is it worth": say_machine(found),
        "Is there a better objective": say_candidates(found.get(FIRST)),
        "What failed to replicate": [f"“{claim['statement'].rstrip('.')}”, here: {claim['measured']}; in the reference study: {claim['reference']}."
                                     for claim in claims if claim["verdict"] == stats.NOT_REPLICATED],
    }  # fmt: skip
    return [f"**{head}**: {' '.join(said)}" for head, said in told.items() if any(said)]


# --- does it work, and how much --------------------------------------------------------------------------------------------

def _primary_effects(arms: Sequence[Mapping]) -> list[dict]:
    return experiments.hit_effects(arms, "joint", "baseline", predictors=[experiments.PRIMARY])


def _reference_gains() -> dict[int, float]:
    return {h: effect for (predictor, h), effect in experiments.reference_effects().items() if predictor == experiments.PRIMARY}


def _whether(effects: Sequence[Mapping]) -> str:
    """Yes, no, in part, or not shown: by what is established after Holm's correction."""
    if effects[0]["p_holm"] is None:
        return "Not known: one seed tests nothing."
    up, down = ([e for e in effects if e["p_holm"] <= stats.SIGNIFICANCE and (e["mean"] > 0) is side] for side in (True, False))
    if down:
        return f"No: a jointly trained model is harder to foretell at {_at(down)}{f', easier at {_at(up)}' if up else ''}."
    if not up:
        return f"Not shown: nothing is established at {_at(effects)}."
    rest = [e for e in effects if e not in up]
    return f"{'In part' if rest else 'Yes'}: a jointly trained model is easier to foretell at {_at(up)}{f'; at {_at(rest)} that is not established' if rest else ''}."


def _at(effects: Sequence[Mapping]) -> str:
    """ "h = 1, 2 and 4" """
    return f"h = {_and([str(e['horizon']) for e in effects])}"


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _replicated(verdict: str) -> str:
    return {stats.PARTLY: "partly replicated"}.get(verdict, verdict)


def _clause(reason: str) -> str:
    """Of a verdict's reason that grants something and then limits it, the limit."""
    return reason.partition(", but ")[2] or reason


def say_size(effects: Sequence[Mapping]) -> str:
    """Our gain and the reference's in points, then ours as a multiple of it."""
    known = _reference_gains()
    common = [e for e in effects if e["horizon"] in known]
    if not common:
        return "No horizon in common."
    held = [e for e in common if e["p_holm"] is not None and e["p_holm"] <= stats.SIGNIFICANCE]   # a multiple of what is not established means nothing
    times = {e["horizon"]: e["mean"] / known[e["horizon"]] for e in held}
    other = [e for e in held if times[e["horizon"]] < 0]
    sides = f"; at {_at(other)} it lies on the other side" if other else ""
    spread = " to ".join(dict.fromkeys(f"{ratio:z.1f}" for ratio in (min(times.values()), max(times.values())))) if held else ""
    where = "" if len(held) == len(common) else f" at {_at(held)}, where it is established" if held else ""
    size = f"The gain is {spread} times that of the reference study{where}{sides}." if held else "No gain is established here that could be set against the reference study's."
    ours, theirs = (" / ".join(f"{100 * value:+z.1f}" for value in values) for values in ([e["mean"] for e in common], [known[e["horizon"]] for e in common]))
    inside = [e for e in common if e["ci95"] and e["ci95"][0] <= known[e["horizon"]] <= e["ci95"][1]]
    below = all(e["ci95"] and e["ci95"][1] < known[e["horizon"]] for e in common)
    holds = f"our interval contains its value at {_at(inside)}" if inside else "each of our intervals lies below its value" if below else "none of our intervals contains its value"
    return (f"In points of hit@k, {ours} here and {theirs} there at h = {' / '.join(str(e['horizon']) for e in common)}"
            f"{f'; {holds}' if common[0]['ci95'] else ''}. {size}")  # fmt: skip


# --- what is it worth ------------------------------------------------------------------------------------------------------

def say_worth(found: Mapping[str, Mapping]) -> list[str]:
    """What the predictors' hit@k is worth in simulated tokens per second (05_cache_simulation), and on a disk whose reads outlast a layer (08_latency_sensitivity)."""
    if "05_cache_simulation" not in found:
        return ["Not simulated in this profile: 05_cache_simulation has not been run."]
    result = found["05_cache_simulation"]
    arms, models = result["arms"], result["provenance"]["parameters"]["models"]
    speed = {arm: float(np.mean(list(results.values_by_seed(arms, arm, "tok_s").values()))) for arm in ("demand", "baseline-ranking", "joint-ranking", "oracle")}
    joint, plain = (experiments.relative_effect(arms, *pair, "tok_s") for pair in (("joint-ranking", "baseline-ranking"), ("baseline-ranking", "demand")))
    room = speed["oracle"] - speed["baseline-ranking"]
    left = f", and an oracle would add {room / speed['baseline-ranking']:.1%} to that" if room > 0 else ""
    said = [
        f"{_worth(joint)}, with ranking predictors: from {speed['baseline-ranking']:.3f} to {speed['joint-ranking']:.3f} tok/s.",
        f"Prefetching itself is worth {100 * plain['mean']:+z.1f}% on the ordinary model ({speed['demand']:.3f} tok/s without){left}.",
        f"What is replayed is synthetic routing on the reference study's large machine, drawn so that its predictors reach the hit@k of our small {models} models.",
    ]
    by_kind = _by_version(result)
    others = [e for variant, e in by_kind["ranking"].items() if variant != "all mended"]
    if others:
        said.append(_others(others))
    if linear := by_kind["linear"].get("all mended"):
        said.append(f"With linear predictors, by which the claims are judged, it is worth {results.effect_text(linear, 'percent')}.")
    if disks := _by_disk(found):
        beyond, known = disks[1], results.reference()["simulator"]
        slow = "nothing" if not round(100 * beyond["mean"], 2) else f"{100 * beyond['mean']:+z.2f}%"
        said.append(f"On a disk whose reads outlast a layer ({known['sensitivity']['beyond_gb_per_s']:g} GB/s) it is worth {slow}.")
    return said


def _others(effects: Sequence[Mapping]) -> str:
    """What other versions of the simulator give, and how many of their intervals exclude zero."""
    n = len(effects)
    means = " to ".join(dict.fromkeys(f"{100 * e['mean']:+z.2f}%" for e in sorted(effects, key=lambda e: e["mean"])[:: max(n - 1, 1)]))
    given = f"Another version of the simulator gives {means}" if n == 1 else f"{n} other versions of the simulator give {means}"
    if any(e["ci95"] is None for e in effects):
        return f"{given}, in one seed, untested."
    clear = sum(e["ci95"][0] > 0 or e["ci95"][1] < 0 for e in effects)
    if n == 1:
        return f"{given}, by an interval that {'excludes' if clear else 'contains'} zero."
    whose = f"{clear} of {n} intervals exclude{'s' if clear == 1 else ''} zero" if 0 < clear < n else f"{'both' if n == 2 else 'all'} intervals {'exclude' if clear else 'contain'} zero"
    return f"{given}; {whose}."


def say_machine(found: Mapping[str, Mapping]) -> list[str]:
    """The machine that is simulated, and what other versions of the simulator and other disks give, each with its interval."""
    if "05_cache_simulation" not in found:
        return []
    geometry = results.reference()["simulator"]["geometry"]
    said = [f"The machine is the reference study's ({geometry}), its simulator's faults mended, which also makes its one cache one for each layer."]
    told = [f"{variant} {results.effect_text(e, 'percent')}" for variant, e in _by_version(found["05_cache_simulation"])["ranking"].items() if variant != "all mended"]
    said += [f"By other versions of the simulator, with ranking predictors: {'; '.join(told)}."] if told else []
    if disks := _by_disk(found):
        said.append(f"With linear predictors it is worth {results.effect_text(disks[0], 'percent')} on average over the disks that read an expert within a layer's time.")
    return said


def _by_version(result: Mapping) -> dict[str, dict[str, Mapping]]:
    """kind of predictor -> version of the simulator -> what joint training is worth in tok/s on our accuracies."""
    ours = {row["seed"] for row in result["arms"] if row["arm"] == "joint-ranking"}
    by_kind: dict[str, dict[str, Mapping]] = {"linear": {}, "ranking": {}}
    for e in result["effects"]:
        # Results from before effects said whose accuracies they are on: of the same seeds, those on the reference's come before ours and are overwritten.
        mine = e["accuracies"] == results.OURS if "accuracies" in e else set(e["seeds"]) == ours
        for kind, known in by_kind.items():
            if mine and (e.get("metric"), e.get("treatment"), e.get("control")) == ("tok_s", f"joint-{kind}", f"baseline-{kind}"):
                known[e["variant"]] = e
    return by_kind


def _by_disk(found: Mapping[str, Mapping]) -> list[dict]:
    """What joint training is worth where a read fits into a layer, and where it outlasts one; empty where that was not simulated."""
    rows = [row for row in found.get("08_latency_sensitivity", {}).get("arms", []) if "gain_over_baseline" in row]
    return [stats.over_seeds({row["seed"]: row["gain_over_baseline"][key] for row in rows}).as_dict() for key in ("fits", "beyond")] if rows else []


def _worth(joint: Mapping) -> str:
    """What joint training is worth in simulated speed, in plain words whichever way it falls."""
    if joint["ci95"] is None:
        return f"Simulated, joint training moved tokens per second by {_moved(joint, 'percent')} in one seed, untested"
    low, high = joint["ci95"]
    size = f"{results.effect_text(joint, 'percent')} ({_seeds(joint)})"
    if low <= 0 <= high:
        return f"Simulated, joint training is worth nothing that can be told from zero, {size} in tokens per second"
    return f"Simulated, joint training {'is worth' if low > 0 else 'COSTS speed,'} {size} in tokens per second"


# --- at what cost, and how sure --------------------------------------------------------------------------------------------

def say_cost(result: Mapping, claim: Mapping, benchmark: Mapping | None, tasks: Mapping | None = None) -> list[str]:
    """The quality gate with the losses of both arms, evenness of load, time and operations of a training step, the claim's verdict, reuse, and what is established of zero-shot
    tasks (`tasks`: results.json of 12_downstream), which the first sentence names too: that the gate is passed is not all of the cost."""
    arms = result["arms"]
    gate = next(gate for gate in result["gates"] if gate["arm"] == "joint")
    loss, load = gate["val_loss"], gate["load_entropy"]
    plain, joint = (float(np.mean(list(results.values_by_seed(arms, arm, "val_loss").values()))) for arm in ("baseline", "joint"))
    sure = "" if loss["ci95"] is None else " (so does every value of its interval)" if gate["certain"] else " by its mean, but not every value of its interval does"
    (reuse,) = experiments.scalar_effects(arms, "joint", "baseline", {"reuse": "share of k"})
    zero_shot = [e for e in tasks["effects"] if "measure" in e] if tasks else []
    moved = "; ".join(downstream_study.say_side(e) for e in downstream_study.established(zero_shot))
    return [
        f"The joint arm {'passes' if gate['passes'] else 'FAILS'} the quality gate{sure}: validation loss goes from {plain:.3f} to {joint:.3f} nats per token, {results.effect_text(loss, 'percent')}, "
        f"where at most {stats.MAX_LOSS_INCREASE:+z.1%} is allowed{moved and f'; of zero-shot tasks, joint training {moved}'}.",
        f"Load entropy is {1 + load['mean']:.3f} times the baseline's (at least {stats.MIN_LOAD_ENTROPY_RATIO} is asked).",
        *say_step(benchmark), f"The reference study's claim of a small cost is {_replicated(claim['verdict'])}.",
        say(reuse, "Joint training", "the reuse of experts from token to token", "points"),
        *([downstream_study.say_verdict(zero_shot)] if zero_shot else []),
    ]  # fmt: skip


def say_step(benchmark: Mapping | None) -> list[str]:
    """What the prediction term adds to a training step, as benchmarks/distributed.py measured it in turns; nothing where it was not measured."""
    if benchmark is None:
        return []
    try:
        rounds = [b["wall"] / a["wall"] - 1 for a, b in zip(benchmark["alone"], benchmark["joint"], strict=True)]
        share = benchmark["operations"]["term"] / benchmark["operations"]["model"]
    except (KeyError, TypeError, ValueError):
        raise results.ResultError("outputs/benchmarks/distributed.json has no step with the prediction term: run benchmarks/distributed.py --json on it again") from None
    return [f"The prediction term adds {share:.1%} to the operations of a training step of our cpu models, and {statistics.median(rounds):+z.1%} to its time "
            f"(one thread, median of {len(rounds)} rounds in turns with the ordinary step, single ones {min(rounds):+z.1%} to {max(rounds):+z.1%})."]  # fmt: skip


def say_certainty(effects: Sequence[Mapping], name: str, found: Mapping[str, Mapping]) -> list[str]:
    """On how many seeds the answer stands, its corrected p values, what fewer seeds establish, and what a placebo moves."""
    if effects[0]["p_holm"] is None:
        return [f"One seed ({name}), so there is no test."]
    held = [e for e in effects if e["p_holm"] <= stats.SIGNIFICANCE]
    where = _at(held) if held else "no horizon"
    said = [f"Over {effects[0]['n']} seeds the effect is established at {where}: {_holm(effects)}, paired t tests, Holm-corrected for {len(effects)} horizons ({name})."]
    if name != FIRST and FIRST in found:
        smaller = _primary_effects(found[FIRST]["arms"])
        tested = smaller[0]["p_holm"] is not None
        fewer = [e["horizon"] for e in smaller if tested and e["p_holm"] <= stats.SIGNIFICANCE]
        rest = [e for e in held if e["horizon"] not in fewer]
        hangs = f": at {_at(rest)} what is established hangs on the further seeds" if rest else ""
        said.append(f"{FIRST}, the smaller comparison that these seeds extend, has {_holm(smaller)} over its {_seeds(smaller[0])}{hangs}.")
    if second := [e for e in found[name]["effects"] if e.get("variation") == refit.VARIATION]:
        said.append(say_by_horizon(second, "With the same MLP fitted by another loss joint training", "hit@k"))
    placebo = [e for e in found.get(FIRST, {}).get("effects", []) if e.get("variation", "").lower().startswith(PLACEBO) and e["ci95"]]
    if placebo:
        low, high = min(e["mean"] for e in placebo), max(e["mean"] for e in placebo)
        there = [e for e in placebo if e["p_holm"] <= stats.SIGNIFICANCE]
        apart = [e for e in placebo if e["ci95"][0] > 0 or e["ci95"][1] < 0]
        alone = f"its interval excludes zero at {_at(apart)}" if apart else "no interval excludes zero"
        held_up = f"it is established at {_at(there)}" if there else "nothing is established"
        said.append(f"A {placebo[0]['variation']}, whose loss weighs nothing, moves hit@k by {100 * low:+z.1f} to {100 * high:+z.1f} points, which can only be chance: {alone}, {held_up}.")
    return said


# --- is there a better objective, and what failed --------------------------------------------------------------------------

def say_better(horizons: Mapping | None) -> list[str]:
    """The best alternative objective against the reference's, on the seeds of 02_horizons."""
    if horizons is None or not any(row["arm"] == "alternative" for row in horizons["arms"]):
        return ["This profile does not report one yet."]
    against = experiments.hit_effects(horizons["arms"], "alternative", "joint", predictors=[experiments.PRIMARY])
    first = "Not known: one seed tests nothing."
    if against[0]["ci95"]:
        better, worse = ([e for e in against if _verb(e) == verb] for verb in ("raises", "lowers"))
        lower = f", worse at {_at(worse)}" if worse else ""
        first = f"The one tried is better at {_at(better)}{lower}, by intervals that are not corrected." if better else f"None is shown{lower and f'; the one tried is {lower[2:]}'}."
    gate = next(gate for gate in horizons["gates"] if gate["arm"] == "alternative")
    return [first, say_by_horizon(against, "Against the reference study's objective the alternative", "hit@k"),
            f"It {'passes' if gate['passes'] else 'FAILS'} the quality gate.", *_chosen(horizons)]  # fmt: skip


def _chosen(horizons: Mapping) -> list[str]:
    """Among how many candidates, on how many other seeds the alternative was chosen, as the finding of 02_horizons says it."""
    return [sentence for sentence in horizons["findings"] if "the rule chooses" in sentence][:1]


def say_candidates(horizons: Mapping | None) -> list[str]:
    """The quality gate of the alternative in full."""
    gate = next((gate for gate in (horizons or {}).get("gates", []) if gate["arm"] == "alternative"), None)
    return [f"The alternative {gate['sentence']}."] if gate else []


def say_trained(found: Mapping[str, Mapping]) -> list[str]:
    """Whether predictability can be fitted to a trained model by LoRA (10_olmoe_lora), and with which part of the model transfer begins (13_olmoe_dose), where they have been run."""
    said = []
    if TUNED in found:
        tuned = found[TUNED]
        said += [boundary.say_retrofit(boundary.retrofit_effects(tuned)), f"The trained model is {tuned['provenance']['parameters'].get('checkpoint') or 'a small one of our own'}.", refit.say_judge(deciding.ranking_loss(tuned))]
        if second := [e for e in tuned["effects"] if e.get("variation") == refit.VARIATION]:
            said.append(say_by_horizon(second, "Under the ranking MLP of the other loss the fine-tune", "hit@k"))
    if PARTS in found:
        parts = found[PARTS]
        said += [judge for judge in [refit.say_judge(deciding.ranking_loss(parts))] if judge not in said]   # else said above
        said.append(boundary.say_transfer(boundary.ladder_effects(parts)))
        if any(row["arm"].startswith(boundary.PARTS["last half of the blocks"]) for row in parts["arms"]):
            said.append("(Heads of a horizon of half the layers or more read the frozen half where the last half is trained: there a gain is excluded by construction.)")
        drifts = [e for e in parts["effects"] if e.get("control") == "stock"]
        said += [boundary.say_price(drifts, row["val_loss"]) for row in parts["arms"] if row["arm"] == "stock" and drifts]
    return said or [f"Not known in this profile: {TUNED} has not been run."]


def say_failed(claims: Sequence[Mapping]) -> list[str]:
    """How many verdicts there are of each kind, the claims that were not replicated with the reason, and what those in part have."""
    words = (stats.REPLICATED, stats.PARTLY, stats.NOT_REPLICATED, stats.NOT_TESTED)
    by_word = {word: [claim for claim in claims if claim["verdict"] == word] for word in words}
    failed, tested = by_word[stats.NOT_REPLICATED], len(claims) - len(by_word[stats.NOT_TESTED])
    counts = ", ".join(f"{len(by_word[word])} {word}" for word in words[:3])   # which add up to those that were tested
    left = f"; {len(claims) - tested} more {'is' if len(claims) - tested == 1 else 'are'} not tested" if tested < len(claims) else ""
    said = [f"{len(failed) or 'None'} of the {tested} claims that were tested ({counts}){left}." if tested else f"Not known: none of the {len(claims)} claims has been tested."]
    said += [f"“{claim['statement'].rstrip('.')}”: {deciding.reason(claim)}." for claim in failed]
    unclear = (stats.NOTHING_EXCLUDED, stats.NOTHING_ESTABLISHED)
    open_ones = sum(all(any(words in part["why"] for words in unclear) for part in claim.get("parts", [claim])) for claim in failed)
    said += [f"For {open_ones} of these {len(failed)} no effect on either side is established: not refuted, but not shown."] if open_ones else []
    return said + say_partly(by_word[stats.PARTLY])


def say_partly(partly: Sequence[Mapping]) -> list[str]:
    """Why claims are replicated in part only, every one of them accounted for: another size, several parts, or else the claim with its reason."""
    if not partly:
        return []
    sizes = [claim for claim in partly if deciding.other_size(claim) is not None]
    several = [claim for claim in partly if claim.get("parts")]
    told = [f"{len(sizes)} hold in direction and differ more than twofold in size"] if sizes else []
    broken = sum(all(part["verdict"] != stats.REPLICATED for part in claim["parts"]) for claim in several)
    none = f" (of {broken} none is, but one at least is partly)" if broken else ""
    told += [f"{len(several)} {'consists' if len(several) == 1 else 'consist'} of several parts, not all of which are replicated{none}"] if several else []
    told += [f"“{claim['statement'].rstrip('.')}”: {deciding.reason(claim)}" for claim in partly if claim not in sizes and claim not in several]
    return [f"Of the {len(partly)} that are replicated in part, {'; '.join(told)}."]
