"""10_olmoe_lora and 13_olmoe_dose: can predictability be fitted to a model that is trained already, and how much of it must be trained for that?

A joint fine-tune is compared with a baseline fine-tune of the same seed: the same stock model, text, steps and trained weights, without the
prediction loss. What both share with the stock model is drift: a fine-tune alone changes routing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from . import experiments, results, stats
from .findings import _moved, _seeds

# What is trained, from the least to the most, and the prefix of its arms' names.
PARTS = {"LoRA": "", "last half of the blocks": "half ", "all weights": "full ", "pretraining": "pretraining "}
FRESH = {"ranking": "ranking MLP", "linear": "linear predictor"}   # the two that are fitted afterwards
DRIFT = {
    "kept": ("experts kept", "share of k"), "router": ("change of the routers", "relative"), "experts": ("change of the experts", "relative"),
    "attention": ("change of attention", "relative"), "router_entropy_fraction": ("router entropy", "share"), "load_entropy": ("load entropy", "share"),
    "val_loss": ("validation loss", "nats/token"),
}  # fmt: skip
OF_MAXIMUM = "% of its maximum"   # what a change of an entropy is in: a point is one of hit@k
DRIFT_OF = {"kept": "% of k", "router": "% of their norm", "experts": "% of their norm", "attention": "% of its norm"}   # of DRIFT what is a share, and of what


def margins() -> dict[str, float]:
    """predictor -> the gain in hit@k up to which nothing has been retrofitted, as the claim no-retrofit sets it (assets/claims.yaml)."""
    (claim,) = (spec for spec in results.claim_specs() if spec["id"] == "no-retrofit")
    return {part["measure"]["metric"].removeprefix("hit."): part["expected"] for part in claim["parts"]}


def parts_of(arms: Sequence[Mapping]) -> dict[str, str]:
    """Of PARTS, those that `arms` have a baseline of."""
    present = {row["arm"] for row in arms}
    return {part: prefix for part, prefix in PARTS.items() if f"{prefix}baseline" in present}


def named(arm: str) -> str:
    """An arm for reading: "joint 1 (all weights)"; with LoRA, which has no prefix, as it is."""
    part, prefix = next(((part, prefix) for part, prefix in PARTS.items() if prefix and arm.startswith(prefix)), ("", ""))
    return f"{arm.removeprefix(prefix)} ({part})" if prefix else arm


def reference_effects(arm: str) -> dict[tuple[str, int], float]:
    """(predictor, horizon) -> arm - baseline in the reference study's LoRA fine-tunes, where it gives both."""
    known = {(row["arm"], row["predictor"]): row for row in results.reference()["lora"]}
    return {(predictor, int(h)): row[h] - known["baseline", predictor][h] for (name, predictor), row in known.items()
            if name == arm and ("baseline", predictor) in known for h in row if h.isdigit()}  # fmt: skip


# --- tables ------------------------------------------------------------------------------------------------------------

def drifts(arms: Sequence[Mapping]) -> pd.DataFrame:
    """One row per fine-tune: arm, seed, how many parameters it trained, and the columns of DRIFT: experts kept and relative change of weights
    against the stock model's, and its entropies and loss minus the stock model's."""
    (stock,) = (row for row in arms if row["arm"] == "stock")
    return pd.DataFrame([
        {"arm": row["arm"], "seed": row["seed"], "trained": row["trained"]["parameters"], "of which experts": row["trained"]["experts"], "kept": row["drift"]["kept"]}
        | row["drift"]["weights"] | {name: row[name] - stock[name] for name in ("router_entropy_fraction", "load_entropy", "val_loss")}
        for row in arms if "drift" in row and row["arm"] != "stock"
    ])  # fmt: skip


def drifts_table(table: pd.DataFrame) -> pd.DataFrame:
    """`drifts` for reading: means over seeds, counts whole, shares in percent; what is a difference from the stock model carries a sign."""
    def cells(part: pd.DataFrame) -> dict[str, str]:
        counts = {words: f"{round(part[name].mean()):,}" for name, words in (("trained", "parameters trained"), ("of which experts", "of these in experts"))}
        shares = {f"{DRIFT[name][0]} ({of})": f"{100 * part[name].mean():.1f}" for name, of in DRIFT_OF.items()}
        moved = {f"change of {DRIFT[name][0]} ({unit})": f"{scale * part[name].mean():+z.{digits}f}" for name, unit, scale, digits in (
            ("router_entropy_fraction", OF_MAXIMUM, 100, 2), ("load_entropy", OF_MAXIMUM, 100, 2), ("val_loss", "nats/token", 1, 4))}  # fmt: skip
        return {"seeds": len(part)} | counts | shares | moved

    return pd.DataFrame([{"arm": named(arm)} | cells(part) for arm, part in table.groupby("arm", sort=False)])


def drift_panels(table: pd.DataFrame) -> pd.DataFrame:
    """`drifts` as `plots_controls.measures` takes it: one row per fine-tune and measure of DRIFT_OF, named with what it is a share of."""
    wide = table.melt(id_vars=["arm", "seed"], value_vars=list(DRIFT_OF), var_name="measure")
    return wide.assign(measure=wide.measure.map({name: f"{DRIFT[name][0]} ({of})" for name, of in DRIFT_OF.items()}))


def by_part(arms: Sequence[Mapping], predictor: str) -> pd.DataFrame:
    """One row per part that is trained, weight, seed and horizon: arm and routing (the part), dose, seed, horizon, gain in hit@k over the part's own
    baseline, loss_change (fraction), margin (gain in it)."""
    rows = []
    for part, prefix in parts_of(arms).items():
        base = {row["seed"]: row for row in arms if row["arm"] == f"{prefix}baseline"}
        for row in (row for row in arms if row["arm"].startswith(f"{prefix}joint ") and row["seed"] in base):
            control = base[row["seed"]]
            rows += [
                {
                    "arm": part, "routing": part, "dose": row["lambda_pred"], "seed": row["seed"], "horizon": int(h), "gain": hit - control["hit"][predictor][h],
                    "margin": row["margin_over_token_id"][predictor][h] - control["margin_over_token_id"][predictor][h],
                    "loss_change": row["val_loss"] / control["val_loss"] - 1,
                }
                for h, hit in row["hit"][predictor].items()
            ]  # fmt: skip
    return pd.DataFrame(rows)


# --- effects -----------------------------------------------------------------------------------------------------------

def coadaptation(arms: Sequence[Mapping], names: Sequence[str], horizons: Sequence[int]) -> list[dict]:
    """By arm and horizon: the head that was trained along minus a fresh linear one on the same model, Holm-corrected over an arm's horizons."""
    found = []
    for arm in names:
        sides = {h: [results.values_by_seed(arms, arm, f"hit.{predictor}.{h}") for predictor in ("cotrained", "linear")] for h in horizons}
        effects = [stats.paired(*sides[h], name=f"{arm}, head trained along - fresh linear, h={h}", unit="hit@k").as_dict() for h in horizons]
        adjusted = stats.holm([e["p"] for e in effects]) if effects[0]["p"] is not None else [None] * len(effects)
        found += [e | {"treatment": arm, "control": arm, "predictor": "cotrained", "variation": f"head trained along, {arm}", "horizon": h, "metric": "hit", "p_holm": p,
                       "family": "exploratory"} for e, h, p in zip(effects, horizons, adjusted)]  # fmt: skip
    return found


def for_its_head(gaps: Sequence[Mapping], joint: str, isolated: str) -> list[dict]:
    """By horizon: the effects of `coadaptation` in the arm `joint` minus those in `isolated`, over the seeds that both have; empty where they have none in common."""
    sides = [{e["horizon"]: dict(zip(e["seeds"], e["per_seed"])) for e in gaps if e["treatment"] == arm} for arm in (joint, isolated)]
    found = []
    for h in (h for h in sides[0] if h in sides[1]):
        pairs = {seed: value - sides[1][h][seed] for seed, value in sides[0][h].items() if seed in sides[1][h]}
        effects = [stats.over_seeds(pairs, name=f"{joint} - {isolated}, what the head trained along has over a fresh one, h={h}", unit="hit@k").as_dict()] if pairs else []
        found += [e | {"treatment": joint, "control": isolated, "horizon": h, "family": "exploratory"} for e in effects]
    return found


def drift_effects(arms: Sequence[Mapping]) -> list[dict]:
    """Of every fine-tuned arm: entropies and loss minus those of the one stock model, and experts kept minus all of them, over seeds."""
    table, found = drifts(arms), []
    for arm, part in table.groupby("arm", sort=False):
        for name in ("kept", "router_entropy_fraction", "load_entropy", "val_loss"):
            values = dict(zip(part.seed, part[name] - (1 if name == "kept" else 0)))
            words, unit = DRIFT[name]
            effect = stats.over_seeds(values, name=f"{arm} - stock model, {words}", unit=unit).as_dict()
            found.append(effect | {"treatment": arm, "control": "stock", "metric": name, "family": "exploratory"})
    return found


def part_effects(arms: Sequence[Mapping], dose: str, predictors: Sequence[str]) -> list[dict]:
    """joint - baseline at weight `dose` for every part that is trained, `variation` naming it."""
    return [
        effect | {"variation": part, "name": f"{part}: {effect['name']}"}
        for part, prefix in parts_of(arms).items()
        for effect in experiments.hit_effects(arms, f"{prefix}joint {dose}", f"{prefix}baseline", predictors=predictors)
    ]  # fmt: skip


def part_gates(arms: Sequence[Mapping]) -> list[dict]:
    """The quality gate of every joint arm against the baseline of the same part."""
    found = []
    for prefix in parts_of(arms).values():
        mine = [row for row in arms if row["arm"].startswith((f"{prefix}joint ", f"{prefix}baseline"))]
        found += experiments.gates([row | {"arm": "baseline"} if row["arm"] == f"{prefix}baseline" else row for row in mine])
    return found


# --- in words ----------------------------------------------------------------------------------------------------------

def retrofit_effects(result: Mapping) -> list[dict]:
    """joint - baseline of results.json of 10_olmoe_lora, under the predictors that are fitted afterwards."""
    return experiments.hit_effects(result["arms"], f"joint {result['provenance']['parameters']['lambda_pred']:g}", "baseline", predictors=list(FRESH))


def ladder_effects(result: Mapping) -> list[dict]:
    """`part_effects` of results.json of 13_olmoe_dose at its last weight, under the predictors that are fitted afterwards."""
    return part_effects(result["arms"], f"{result['provenance']['parameters']['lambdas'][-1]:g}", list(FRESH))


def judge(effects: Sequence[Mapping]) -> str:
    """Of effects on hit@k with `predictor`, beside the margin of each: "untested" (single seeds), "shown" (an interval lies above its margin), "excluded" (every interval
    ends at or below its own), else "open"."""
    margin = margins()
    if any(e["ci95"] is None for e in effects):
        return "untested"
    if any(e["ci95"][0] > margin[e["predictor"]] for e in effects):
        return "shown"
    return "excluded" if all(e["ci95"][1] <= margin[e["predictor"]] for e in effects) else "open"


def say_retrofit(effects: Sequence[Mapping]) -> str:
    """Whether a fine-tune makes a trained model predictable: yes where an interval lies above the claim's margin, no where every interval excludes more than it, else
    undecided (`judge`); then at which horizons, or what gain is excluded, and which gains of any size are established. `effects`: of `experiments.hit_effects`."""
    effects = [e for e in effects if e["predictor"] in FRESH]
    found, weight = judge(effects), effects[0]["treatment"].removeprefix("joint ")
    subject = f"a LoRA fine-tune with the prediction loss (weight {weight})"
    first = {
        "shown": f"Yes: {subject} raises a trained model's hit@k by more than {_limit()}", "excluded": f"No: {subject} raises a trained model's hit@k by no more than {_limit()}",
        "open": f"Undecided: {subject} is not shown to raise a trained model's hit@k by more than {_limit()}, but that is not excluded either",
        "untested": "Not known: one seed tests nothing",
    }[found]  # fmt: skip
    said = [f"{first} ({_seeds(effects[0])})."]
    if found == "untested":
        return " ".join(said)
    if found == "shown":
        said.append(f"That is so {_listed([e for e in effects if e['ci95'][0] > margins()[e['predictor']]])}.")
    else:
        said.append(f"The intervals over h = {', '.join(str(h) for h in dict.fromkeys(e['horizon'] for e in effects))} exclude {_excluded(effects)}.")
    margin, held = margins(), [e for e in effects if e["p_holm"] <= stats.SIGNIFICANCE]
    if small := [e for e in held if e["mean"] > 0 and e["ci95"][0] <= margin[e["predictor"]]]:
        said.append(f"A gain that is not shown to exceed {_limit()} is established after Holm's correction {_listed(small)}.")
    if lost := [e for e in held if e["mean"] < 0]:
        said.append(f"A loss is established after Holm's correction {_listed(lost)}.")
    return " ".join(said)


def say_transfer(effects: Sequence[Mapping]) -> str:
    """Where between the least that is trained and the most transfer begins: with the first part that raises hit@k by more than the claim's margin (`judge`, under the predictors
    that are fitted afterwards, at all horizons); then what is known of the other parts. `effects`: of `part_effects`."""
    by_part = {part: [e for e in effects if e["variation"] == part and e["predictor"] in FRESH] for part in dict.fromkeys(e["variation"] for e in effects)}
    found = {part: judge(group) for part, group in by_part.items()}
    names, weight = list(found), next(iter(by_part.values()))[0]["treatment"].split()[-1]
    begun, margin = next((part for part in names if found[part] == "shown"), None), margins()
    order = ", ".join(_the([part]) for part in names)
    if begun:
        sure = all(found[part] == "excluded" for part in names[: names.index(begun)])
        said = [f"At weight {weight} transfer begins with {_the([begun])}{'' if sure else ', at the latest'}: of what is trained, from the least to the most ({order}), "
                f"the first to raise hit@k by more than {_limit()}.",
                f"That is so {_listed([e for e in by_part[begun] if e['ci95'][0] > margin[e['predictor']]])}."]  # fmt: skip
    elif set(found.values()) == {"untested"}:
        said = [f"Where transfer begins at weight {weight} is not known: single seeds test nothing."]
    else:
        said = [f"Transfer is not shown to begin at weight {weight}: nothing that is trained ({order}) raises hit@k by more than {_limit()} by an interval."]
    rest = {state: [part for part in names if found[part] == state and part != begun] for state in ("shown", "excluded", "open", "untested")}
    words = {"shown": "So does training", "excluded": "That much is excluded with", "open": "That much is neither shown nor excluded with"}
    said += [f"{told} {_the(rest[state])}." for state, told in words.items() if rest[state]]
    for part in rest["untested"]:
        last = max(by_part[part], key=lambda e: (e["predictor"] == "ranking", e["horizon"]))
        said.append(f"Of {_the([part])} there is a single seed and so no interval: {_moved(last, 'points')} under the {FRESH[last['predictor']]} at h = {last['horizon']}.")
    return " ".join(said)


def _the(parts: Sequence[str]) -> str:
    """Parts of the model within a sentence."""
    return " and ".join(f"the {part}" if part.startswith("last") else part for part in parts)


def _limit() -> str:
    """The margins in words, "1 point"; by predictor where they differ."""
    words = {name: f"{100 * value:g} point{'' if value == 0.01 else 's'}" for name, value in margins().items()}
    return next(iter(words.values())) if len(set(words.values())) == 1 else " or ".join(f"{text} ({FRESH[name]})" for name, text in words.items())


def _listed(effects: Sequence[Mapping]) -> str:
    """ "under the ranking MLP at h = 2 (+1.0 points [+0.5, +1.5]), at h = 4 (...); under the linear predictor at h = 4 (...)" """
    by_name = {name: [f"at h = {e['horizon']} ({_moved(e, 'points')})" for e in effects if e["predictor"] == name] for name in FRESH}
    return "; ".join(f"under the {FRESH[name]} {', '.join(told)}" for name, told in by_name.items() if told)


def _excluded(effects: Sequence[Mapping]) -> str:
    """What gain the intervals leave no room for, by predictor, rounded up to a tenth of a point so that it is excluded as written."""
    told = []
    for name in FRESH:
        if mine := [e["ci95"][1] for e in effects if e["predictor"] == name]:
            most = math.ceil(round(1000 * max(mine), 6)) / 10
            told.append(f"{f'a gain of more than {most:.1f} points' if most > 0 else 'any gain'} under the {FRESH[name]}")
    return " and ".join(told)


def say_coadaptation(effects: Sequence[Mapping]) -> list[str]:
    """What the head that was trained along has over a fresh one on the same model, a sentence for each arm: more or less where the interval excludes zero."""
    by_arm: dict[str, list[Mapping]] = {}
    for effect in effects:
        by_arm.setdefault(effect["treatment"], []).append(effect)
    return [f"In the arm {arm}, the hit@k of the head that was trained along, minus that of a fresh linear one on the same model, is {_by_side(group)}." for arm, group in by_arm.items()]


def say_for_its_head(effects: Sequence[Mapping]) -> list[str]:
    """What the model did for its head alone: a sentence on the effects of `for_its_head`, none where there are none."""
    return [f"In the arm {e['treatment']}, what the model did for its head alone, this difference minus that in the arm {e['control']} of the same seed, is {_by_side(effects)}."
            for e in effects[:1]]  # fmt: skip


def _by_side(group: Sequence[Mapping]) -> str:
    """ "+4.0 points [+3.0, +5.0] at h = 1, ... (3 seeds): more at h = 1", more or less where the interval excludes zero."""
    sides: dict[str, list[str]] = {}
    for e in group:
        low, high = e["ci95"] or (0.0, 0.0)
        sides.setdefault("more" if low > 0 else "less" if high < 0 else "neither measurably more nor less", []).append(str(e["horizon"]))
    verdict = "untested" if group[0]["ci95"] is None else "; ".join(f"{way} at h = {', '.join(at)}" for way, at in sides.items())
    sizes = ", ".join(f"{_moved(e, 'points')} at h = {e['horizon']}" for e in group)
    return f"{sizes} ({_seeds(group[0])}): {verdict}"


def say_drift(effects: Sequence[Mapping]) -> list[str]:
    """How far each arm's routing has moved from the stock model's, and what became of its entropies and loss."""
    found = []
    for arm in dict.fromkeys(e["treatment"] for e in effects):
        mine = {e["metric"]: e for e in effects if e["treatment"] == arm}
        changes = ", ".join(f"{DRIFT[name][0]} {text}" for name, text in (
            *((name, _moved(mine[name], "points").replace(" points", OF_MAXIMUM)) for name in ("router_entropy_fraction", "load_entropy")), ("val_loss", _moved(mine["val_loss"], "nats"))))
        found.append(f"Against the stock model the arm {named(arm)} keeps {100 * (1 + mine['kept']['mean']):.1f}% of a token's experts; {changes} ({_seeds(mine['kept'])}).")
    return found


def say_price(effects: Sequence[Mapping], stock_loss: float) -> str:
    """How far each joint arm's validation loss lies from the stock model's own, which the quality gate does not ask. `effects`: of `drift_effects`."""
    told = []
    for e in effects:
        if e["metric"] == "val_loss" and "joint" in e["treatment"]:
            share = e | {"mean": e["mean"] / stock_loss, "ci95": e["ci95"] and [end / stock_loss for end in e["ci95"]]}
            told.append(f"{named(e['treatment'])} {results.effect_text(share, 'percent')}")
    return f"The validation loss, against the stock model's own: {'; '.join(told)}. The gate (at most {100 * stats.MAX_LOSS_INCREASE:+g}%) compares each with its own baseline, which drifts as well."


def say_boundary(effects: Sequence[Mapping], predictor: str) -> str:
    """From which part on, from the least that is trained to the most, the interval of the gain at the deepest horizon lies above zero; which lie below it, and which parts have none."""
    deepest = max(e["horizon"] for e in effects)
    mine = [e for e in effects if e["predictor"] == predictor and e["horizon"] == deepest]
    told = "; ".join(f"{e['variation']} {_moved(e, 'points')}, {_seeds(e)}" for e in mine)
    begun = next((e["variation"] for e in mine if e["ci95"] is not None and e["ci95"][0] > 0), None)
    if all(e["ci95"] is None for e in mine):
        verdict = "a single seed of each has no interval to tell where it begins"
    else:
        verdict = f"the first of these with an interval above zero, by however little, is: {begun}" if begun else "no interval of these lies above zero"
        lower = [e["variation"] for e in mine if e["ci95"] is not None and e["ci95"][1] < 0]
        alone = [e["variation"] for e in mine if e["ci95"] is None]
        verdict += (f"; below zero lies that of {', '.join(lower)}" if lower else "") + (f"; of one seed, and so without an interval, is {', '.join(alone)}" if alone else "")
    return f"Joint against baseline under the {FRESH[predictor]} at h = {deepest}, by what is trained: {told}. From the least to the most, {verdict}."


def say_against(effects: Sequence[Mapping], least: str, most: str) -> str:
    """What joint training does to one part beside another, by the horizons that both have, of one predictor's `part_effects`."""
    sides = [{e["horizon"]: e["mean"] for e in effects if e["variation"] == part} for part in (least, most)]
    told = ", ".join(f"{100 * sides[0][h]:+z.1f} against {100 * sides[1][h]:+z.1f} points at h = {h}" for h in sides[0] if h in sides[1])
    return f"Joint against baseline with {least} trained, beside the same with {most}: {told or 'no horizon in common'} (means over the seeds of each)."
