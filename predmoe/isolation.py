"""04_isolation: is predictability a property of the backbone, or of the heads that were trained with it?

A reading is a trained model and the predictor that reads it. Two readings that differ in one thing isolate that thing: the same fresh
predictor on two backbones isolates the backbone, two heads on the same backbone isolate their co-adaptation. All from the measurements
that every run has; nothing is trained here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from . import experiments, findings, results, stats
from .findings import _seeds
from .plots import PREDICTORS

Reading = tuple[str, str]   # the trained model's arm, the predictor

# The six arms of the study. An ordinary model has no head of its own; what it foretells untrained is the next layer's router applied early.
READINGS: dict[str, Reading] = {
    "baseline": ("baseline", "next_router"),
    "joint": ("joint", "cotrained"),
    "post-hoc linear on the frozen baseline": ("baseline", "linear"),
    "post-hoc ranking MLP on the frozen baseline": ("baseline", "ranking"),
    "post-hoc linear on the frozen joint model": ("joint", "linear"),
    "post-hoc ranking MLP on the frozen joint model": ("joint", "ranking"),
}
# What is set against what. The first is the sum of the second and the third, seed by seed.
WHOLE, BACKBONE, COADAPTATION, STRONGEST, MLP_BASELINE, MLP_JOINT = (
    "co-trained head against the baseline's linear", "backbone, under a fresh linear predictor", "co-adaptation, on the joint backbone",
    "backbone, under a fresh ranking MLP", "ranking MLP against linear, baseline", "ranking MLP against linear, joint",
)  # fmt: skip
CONTRASTS: dict[str, tuple[Reading, Reading]] = {
    WHOLE: (("joint", "cotrained"), ("baseline", "linear")),
    BACKBONE: (("joint", "linear"), ("baseline", "linear")),
    COADAPTATION: (("joint", "cotrained"), ("joint", "linear")),
    STRONGEST: (("joint", "ranking"), ("baseline", "ranking")),
    MLP_BASELINE: (("baseline", "ranking"), ("baseline", "linear")),
    MLP_JOINT: (("joint", "ranking"), ("joint", "linear")),
}
FRESH = ("linear", "ranking")


# --- tables ------------------------------------------------------------------------------------------------------------

def six_arms(arms: Iterable[Mapping]) -> pd.DataFrame:
    """Columns arm (one of READINGS), model, predictor, seed, horizon, hit, exact_set, margin."""
    found = experiments.hits(arms).rename(columns={"arm": "model"})
    parts = [found[(found.model == model) & (found.predictor == predictor)].assign(arm=name) for name, (model, predictor) in READINGS.items()]
    return pd.concat(parts, ignore_index=True)


def reference_levels() -> dict[tuple[str, int], float]:
    """(arm, horizon) -> hit@k in the reference study, for those of READINGS that it gives."""
    known = {(row["arm"], row["predictor"]): row for row in results.reference()["hit"]}
    return {(name, int(h)): known[reading][h] for name, reading in READINGS.items() if reading in known for h in known[reading] if h.isdigit()}


def reference_contrasts() -> dict[tuple[str, int], float]:
    """(contrast, horizon) -> the reference study's difference, from its levels."""
    known = {(row["arm"], row["predictor"]): row for row in results.reference()["hit"]}
    return {(name, int(h)): known[a][h] - known[b][h] for name, (a, b) in CONTRASTS.items() if a in known and b in known for h in known[a] if h.isdigit()}


def compared_table(found: Iterable[Mapping]) -> pd.DataFrame:
    """Effects beside the reference study's, for reading: difference, horizon, here and reference in points, and whether our interval contains its value."""
    known = reference_contrasts()
    return pd.DataFrame([
        {
            "difference": e["predictor"], "h": e["horizon"], "here": results.effect_text(e, "points"),
            "reference": f"{100 * known[e['predictor'], e['horizon']]:+z.1f} points",
            "interval contains it": "–" if e["ci95"] is None else "yes" if e["ci95"][0] <= known[e["predictor"], e["horizon"]] <= e["ci95"][1] else "no",
        }
        for e in found if (e["predictor"], e["horizon"]) in known
    ])  # fmt: skip


def layer_gains(arms: Sequence[Mapping]) -> pd.DataFrame:
    """Columns arm (which difference), seed, horizon, layer (predicted from, first = 1), gain: joint - baseline under each fresh predictor, and
    the co-trained head - the fresh linear one on the joint backbone."""
    return _breakdown(arms, experiments.per_layer)


def domain_gains(arms: Sequence[Mapping]) -> pd.DataFrame:
    """As `layer_gains` with a column domain in place of layer, weighted by tokens."""
    return _breakdown(arms, experiments.per_domain)


def _breakdown(arms, measured) -> pd.DataFrame:
    parts = [experiments.gains(measured(arms, predictor)).query("arm == 'joint'").assign(arm=PREDICTORS[predictor]) for predictor in FRESH]
    heads = [measured([row for row in arms if row["arm"] == "joint"], predictor) for predictor in ("cotrained", "linear")]
    keys = [name for name in heads[0].columns if name != "hit"]
    both = heads[0].merge(heads[1], on=keys, suffixes=("", "_fresh"), validate="one_to_one")
    parts.append(both.assign(arm="co-adaptation", gain=both.hit - both.hit_fresh).drop(columns=["hit", "hit_fresh"]))
    return pd.concat(parts, ignore_index=True)


# --- effects -----------------------------------------------------------------------------------------------------------

def effects(arms: Sequence[Mapping], horizons: Sequence[int]) -> list[dict]:
    """Paired effects of all CONTRASTS by horizon, Holm-corrected over the horizons of one; `predictor` and `variation` name the contrast."""
    found = []
    for name, (left, right) in CONTRASTS.items():
        mine = [
            stats.paired(*(results.values_by_seed(arms, model, f"hit.{predictor}.{h}") for model, predictor in (left, right)),
                         name=f"{name}, h={h}", unit="hit@k").as_dict()
            for h in horizons
        ]  # fmt: skip
        found += _corrected(mine, [{"treatment": left[0], "control": right[0], "predictor": name, "variation": name, "horizon": h} for h in horizons])
    return found


def halves(gains: pd.DataFrame) -> list[dict]:
    """Of `layer_gains`: the mean gain of the later half of the source layers minus that of the earlier half (a middle one left out), over seeds."""
    found = []
    for difference, part in gains.groupby("arm", sort=False):
        mine, keys = [], []
        for h, rows in part.groupby("horizon"):
            middle = (1 + rows.layer.max()) / 2
            if rows.layer.max() < 2:
                continue   # a single source layer has no halves
            sides = [side.groupby("seed").gain.mean().to_dict() for side in (rows[rows.layer > middle], rows[rows.layer < middle])]
            mine.append(stats.paired(*sides, name=f"{difference}, later - earlier layers, h={h}", unit="hit@k").as_dict())
            keys.append({"treatment": "later layers", "control": "earlier layers", "predictor": difference, "variation": difference, "horizon": int(h)})
        found += _corrected(mine, keys)
    return found


def domain_contrast(gains: pd.DataFrame, pair: Sequence[str]) -> list[dict]:
    """Of `domain_gains`: the gain in the first of two domains minus that in the second, over seeds. Raises ResultError for an unknown domain."""
    first, second = pair
    if unknown := sorted({first, second} - set(gains.domain)):
        raise results.ResultError(f"domain {', '.join(map(repr, unknown))} is not in the held-out text; it has {', '.join(sorted(set(gains.domain)))}")
    found = []
    for difference, part in gains.groupby("arm", sort=False):
        horizons = sorted(part.horizon.unique())
        sides = {h: [part[(part.domain == d) & (part.horizon == h)].set_index("seed").gain.to_dict() for d in (first, second)] for h in horizons}
        mine = [stats.paired(*sides[h], name=f"{difference}, {first} - {second}, h={h}", unit="hit@k").as_dict() for h in horizons]
        found += _corrected(mine, [{"treatment": first, "control": second, "predictor": difference, "variation": difference, "horizon": int(h)} for h in horizons])
    return found


def _corrected(effects: list[dict], keys: list[dict]) -> list[dict]:
    """Effects of one family with Holm's correction over them, all exploratory."""
    tested = bool(effects) and effects[0]["p"] is not None
    adjusted = stats.holm([e["p"] for e in effects]) if tested else [None] * len(effects)
    return [effect | key | {"metric": "hit", "p_holm": p, "family": "exploratory"} for effect, key, p in zip(effects, keys, adjusted)]


def within_seeds(arms: Sequence[Mapping], names: Iterable[str]) -> list[dict]:
    """The contrasts `names` within each seed, by resampling its held-out documents: how far a difference hangs on which text was measured."""
    by_reading = {(row["arm"], row["seed"]): row["documents"] for row in arms}
    found = []
    for name in names:
        (left, one), (right, other) = CONTRASTS[name]
        for seed in sorted(seed for arm, seed in by_reading if arm == left):
            mine, theirs = by_reading[left, seed], by_reading[right, seed]
            for h in mine["hit"][one]:
                effect = stats.bootstrap_documents(mine["hit"][one][h], theirs["hit"][other][h], mine["tokens"], model_seed=seed,
                                                   name=f"{name}, h={h}, seed {seed}", unit="hit@k")  # fmt: skip
                keys = {"treatment": left, "control": right, "metric": "hit", "predictor": name, "variation": name, "horizon": int(h)}
                found.append(effect.as_dict() | keys | {"family": "within one seed"})
    return found


def both_intervals(over_seeds: Iterable[Mapping], within: Iterable[Mapping]) -> pd.DataFrame:
    """The two error bars of the same contrasts, one under the other, as `plots.forest` takes them, grouped by contrast and horizon."""
    within, rows = list(within), []
    for effect in over_seeds:
        own = [e for e in within if (e["predictor"], e["horizon"]) == (effect["predictor"], effect["horizon"])]
        if not own:
            continue
        named = [(f"over {_seeds(effect)}", effect)]
        named += [(f"seed {e['seeds'][0]}, over documents", e) for e in own]
        rows += [
            {"group": f"{effect['predictor']}, h = {effect['horizon']}", "name": name, "mean": e["mean"], "per_seed": e["per_seed"], "reference": np.nan,
             "low": e["ci95"][0] if e["ci95"] else np.nan, "high": e["ci95"][1] if e["ci95"] else np.nan}
            for name, e in named
        ]  # fmt: skip
    return pd.DataFrame(rows)


# --- in words ----------------------------------------------------------------------------------------------------------

def _of(found: Iterable[Mapping], name: str) -> list[Mapping]:
    return [e for e in found if e["predictor"] == name]


def say_parts(found: Sequence[Mapping]) -> list[str]:
    """How what the co-trained head foretells beyond the baseline's linear predictor splits into backbone and co-adaptation, by horizon."""
    sentences = []
    for whole, backbone, heads in zip(*(_of(found, name) for name in (WHOLE, BACKBONE, COADAPTATION))):
        sentences.append(
            f"At h = {whole['horizon']} the joint model's own head stands {100 * whole['mean']:+z.1f} points from a linear predictor on the baseline: "
            f"{results.effect_text(backbone, 'points')} are the backbone's, {results.effect_text(heads, 'points')} co-adaptation "
            f"({_seeds(whole)})."
        )
    return sentences


def say_contrast(found: Sequence[Mapping], name: str, subject: str) -> str:
    """One sentence over the horizons of a contrast."""
    return findings.say_by_horizon(_of(found, name), subject, "hit@k")


def say_where(found: Sequence[Mapping], what: str) -> list[str]:
    """One sentence per difference: at which horizons its gain is larger on the first side of `what` (such as "in later than in earlier layers")."""
    sentences = []
    for name in dict.fromkeys(e["predictor"] for e in found):
        mine = _of(found, name)
        told = ", ".join(f"{results.effect_text(e, 'points')} at h = {e['horizon']}" for e in mine)
        if mine[0]["ci95"] is None:
            sure = _seeds(mine[0])
        else:
            held = [str(e["horizon"]) for e in mine if e["ci95"][0] > 0 or e["ci95"][1] < 0]
            sure = f"{_seeds(mine[0])}; the interval excludes zero at {'h = ' + ', '.join(held) if held else 'no horizon'}"
        sentences.append(f"{name[0].upper()}{name[1:]}, {what}: {told} ({sure}).")
    return sentences


def say_widths(over_seeds: Iterable[Mapping], within: Iterable[Mapping]) -> str:
    """How wide the two kinds of interval are, means over contrasts and horizons."""
    half = lambda found: 100 * float(np.mean([(e["ci95"][1] - e["ci95"][0]) / 2 for e in found]))  # noqa: E731
    within = list(within)
    over = [e for e in over_seeds if e["ci95"] is not None and e["predictor"] in {w["predictor"] for w in within}]
    documents = f"within one seed, over documents, by {half(within):.1f}"
    if not over:
        return f"One seed gives no interval over seeds; the effect is uncertain {documents} points."
    return (f"On average an effect is uncertain by {half(over):.1f} points (half an interval) over {over[0]['n']} seeds and, {documents}: "
            "the first says how far it hangs on the initialisation, the second on the text, and neither stands for the other.")  # fmt: skip
