"""What the training notebooks share: arms are measured through the run store, measurements become tidy tables, pairs of arms
become effects, and effects become sentences whose wording follows the sign.

An arm is a name and the changes to the tier's objective that make it; `baseline` comes first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from . import config, results, runs, stats
from .plots import PREDICTORS

PRIMARY = "ranking"   # the confirmatory comparison: joint against baseline under the strongest post-hoc predictor
BASELINE = {"lambda_pred": 0.0}


# --- measuring ---------------------------------------------------------------------------------------------------------

def run_configs(
    arms: Mapping[str, Mapping], seeds: Sequence[int], *, tier: str, horizons: Sequence[int], changes: Mapping[str, Mapping]
) -> list[tuple[str, config.RunConfig]]:
    """(arm, run) pairs, seed by seed so that whole pairs are finished first; `changes`: section -> changed fields of the tier."""
    return [
        (arm, config.tier(tier, seed=seed, objective=dict(changes.get("objective", {})) | dict(objective),
                          predictor={"horizons": list(horizons)}, **{k: dict(v) for k, v in changes.items() if k != "objective"}))
        for seed in seeds for arm, objective in arms.items()
    ]  # fmt: skip


def posthoc_config(tier: str, changes: Mapping) -> config.PosthocConfig:
    """The tier's predictor fit with some fields changed; unknown fields and wrong types are refused."""
    return config.build(config.PosthocConfig, dataclasses.asdict(config.TIERS[tier].posthoc) | dict(changes))


def measure_arms(
    pairs: Sequence[tuple[str, config.RunConfig]], posthoc: config.PosthocConfig, *, profile: str, parallel: int
) -> list[dict]:
    """One measurement per pair, with its arm's name; what the store lacks is trained and measured first."""
    measured = runs.get_or_measure([run for _, run in pairs], posthoc, profile=profile, parallel=parallel)
    for (arm, run), measurement in zip(pairs, measured):
        missing = [h for h in run.predictor.horizons if str(h) not in measurement["hit"][PRIMARY]]
        if missing:
            raise results.ResultError(f"{arm}, seed {run.train.seed}: the stored measurement has no horizon {', '.join(map(str, missing))}")
    return [{"arm": arm, **measurement} for (arm, _), measurement in zip(pairs, measured)]


def training_curves(pairs: Sequence[tuple[str, config.RunConfig]], *, profile: str) -> pd.DataFrame:
    """Columns arm, seed, step, term, nats: the weighted loss terms while training, from the run store."""
    rows = []
    for arm, run in pairs:
        logged = runs.Run(runs.default_store(profile) / run.hash, run).metrics()
        rows += [
            {"arm": arm, "seed": run.train.seed, "step": line["step"], "term": term, "nats": nats}
            for line in logged if "terms" in line for term, nats in line["terms"].items()
        ]  # fmt: skip
    return pd.DataFrame(rows)


# --- tables ------------------------------------------------------------------------------------------------------------

def hits(arms: Iterable[Mapping]) -> pd.DataFrame:
    """Columns arm, seed, predictor, horizon, hit, exact_set, margin (over the token-id lookup; missing for the lookups)."""
    return pd.DataFrame([
        {
            "arm": row["arm"], "seed": row["seed"], "predictor": predictor, "horizon": int(h), "hit": hit,
            "exact_set": row["exact_set"][predictor][h], "margin": row["margin_over_token_id"].get(predictor, {}).get(h, np.nan),
        }
        for row in arms for predictor, by_horizon in row["hit"].items() for h, hit in by_horizon.items()
    ])  # fmt: skip


def diagnostics(arms: Iterable[Mapping]) -> pd.DataFrame:
    """Columns arm, seed and the quality and routing diagnostics, one row per trained model."""
    columns = ["val_loss", "router_entropy", "router_entropy_fraction", "top_k_mass", "load_entropy", "largest_load", "dead_experts",
               "reuse", "hidden_cosine"]  # fmt: skip
    return pd.DataFrame([{"arm": row["arm"], "seed": row["seed"]} | {name: row[name] for name in columns} for row in arms])


def per_layer(arms: Iterable[Mapping], predictor: str) -> pd.DataFrame:
    """Columns arm, seed, horizon, layer (predicted from; the first is 1), hit."""
    return pd.DataFrame([
        {"arm": row["arm"], "seed": row["seed"], "horizon": int(h), "layer": layer, "hit": hit}
        for row in arms for h, values in row["hit_per_layer"][predictor].items() for layer, hit in enumerate(values, start=1)
    ])  # fmt: skip


def domain_gains(arms: Sequence[Mapping], predictor: str) -> pd.DataFrame:
    """Columns arm, seed, horizon, domain, gain: token-weighted hit@k of each domain, less the same seed's baseline."""
    rows = []
    for row, base in _with_baseline(arms):
        documents, theirs = row["documents"], base["documents"]
        frame = pd.DataFrame({"domain": documents["domain"], "tokens": documents["tokens"]})
        for h in documents["hit"][predictor]:
            difference = np.subtract(documents["hit"][predictor][h], theirs["hit"][predictor][h])
            weighted = (frame.tokens * difference).groupby(frame.domain).sum() / frame.tokens.groupby(frame.domain).sum()
            rows += [{"arm": row["arm"], "seed": row["seed"], "horizon": int(h), "domain": d, "gain": g} for d, g in weighted.items()]
    return pd.DataFrame(rows)


def tradeoff(arms: Sequence[Mapping], predictor: str) -> pd.DataFrame:
    """Columns arm, seed, horizon, loss_change (fraction), gain (hit@k), both against the same seed's baseline (itself included)."""
    pairs = [(row, base) for row, base in _with_baseline(arms, itself=True)]
    return pd.DataFrame([
        {"arm": row["arm"], "seed": row["seed"], "horizon": int(h), "loss_change": row["val_loss"] / base["val_loss"] - 1,
         "gain": hit - base["hit"][predictor][h]}
        for row, base in pairs for h, hit in row["hit"][predictor].items()
    ])  # fmt: skip


def posthoc_curves(arms: Iterable[Mapping]) -> pd.DataFrame:
    """Columns arm, seed, predictor, step, lr, train_loss, dev_hit: how each post-hoc fit converged."""
    return pd.DataFrame([
        {"arm": row["arm"], "seed": row["seed"], "predictor": predictor} | point
        for row in arms for predictor, curve in row["curves"].items() for point in curve
    ])  # fmt: skip


def unconverged(arms: Iterable[Mapping]) -> list[str]:
    """The post-hoc fits that stopped at max_steps before they had converged, in words; empty is as it should be."""
    return [f"{row['arm']}, seed {row['seed']}, {name}" for row in arms for name, ok in row["converged"].items() if not ok]


def _with_baseline(arms, itself=False):
    bases = {row["seed"]: row for row in arms if row["arm"] == "baseline"}
    return [(row, bases[row["seed"]]) for row in arms if itself or row["arm"] != "baseline"]


# --- effects -----------------------------------------------------------------------------------------------------------

def hit_effects(arms: Sequence[Mapping], treatment: str, control: str, *, metric: str = "hit", predictors: Sequence[str]) -> list[dict]:
    """Paired effects of `metric` for every predictor and horizon that both arms have, with what identifies each.

    Holm's correction runs over the horizons of one predictor; `family` is "primary" for hit@k under the ranking MLP,
    joint against baseline, and "exploratory" for everything else.
    """
    horizons = next(row for row in arms if row["arm"] == treatment)["hit"][predictors[0]]
    found = []
    for predictor in predictors:
        effects = [_paired(arms, treatment, control, f"{metric}.{predictor}.{h}", f"{predictor}, h={h}", "hit@k") for h in horizons]
        adjusted = stats.holm([e["p"] for e in effects]) if effects[0]["p"] is not None else [None] * len(effects)
        confirmatory = (metric, predictor, treatment, control) == ("hit", PRIMARY, "joint", "baseline")
        family = "primary" if confirmatory else "exploratory"
        found += [
            effect | {"metric": metric, "predictor": predictor, "horizon": int(h), "p_holm": p, "family": family}
            for effect, h, p in zip(effects, horizons, adjusted)
        ]
    return found


def scalar_effects(arms: Sequence[Mapping], treatment: str, control: str, metrics: Mapping[str, str]) -> list[dict]:
    """Paired effects of single numbers; `metrics`: dotted path -> unit."""
    return [_paired(arms, treatment, control, path, path, unit) | {"metric": path, "family": "exploratory"} for path, unit in metrics.items()]


def document_effects(arms: Sequence[Mapping], treatment: str, control: str, *, predictor: str) -> list[dict]:
    """One bootstrap over held-out documents per seed and horizon: how far the effect hangs on which text was measured."""
    found = []
    for row, base in _with_baseline([row for row in arms if row["arm"] in (treatment, control)]):
        mine, theirs = row["documents"], base["documents"]
        for h in mine["hit"][predictor]:
            name = f"{treatment} - {control}, {predictor}, h={h}, seed {row['seed']}"
            effect = stats.bootstrap_documents(
                mine["hit"][predictor][h], theirs["hit"][predictor][h], mine["tokens"], model_seed=row["seed"], name=name, unit="hit@k"
            )
            keys = {"treatment": treatment, "control": control, "metric": "hit", "predictor": predictor, "horizon": int(h)}
            found.append(effect.as_dict() | keys | {"family": "within one seed"})
    return found


def _paired(arms, treatment, control, path, what, unit) -> dict:
    values = (results.values_by_seed(arms, arm, path) for arm in (treatment, control))
    effect = stats.paired(*values, name=f"{treatment} - {control}, {what}", unit=unit)
    return effect.as_dict() | {"treatment": treatment, "control": control}


def gates(arms: Sequence[Mapping]) -> list[dict]:
    """The quality gate of every arm against the baseline, as results.json holds it."""
    found = []
    for arm in dict.fromkeys(row["arm"] for row in arms if row["arm"] != "baseline"):
        values = [results.values_by_seed(arms, name, metric) for metric in ("val_loss", "load_entropy") for name in (arm, "baseline")]
        found.append({"arm": arm} | stats.quality_gate(*values).as_dict())
    return found


def forest_table(effects: Iterable[Mapping], reference: Mapping[tuple[str, int], float] | None = None) -> pd.DataFrame:
    """Effects as `plots.forest` takes them, grouped by predictor; `reference`: (predictor, horizon) -> the reference study's effect."""
    return pd.DataFrame([
        {
            "group": PREDICTORS[e["predictor"]], "name": f"h = {e['horizon']}", "arm": e["treatment"], "horizon": e["horizon"], "mean": e["mean"],
            "low": e["ci95"][0] if e["ci95"] else np.nan, "high": e["ci95"][1] if e["ci95"] else np.nan, "per_seed": e["per_seed"],
            "reference": (reference or {}).get((e["predictor"], e["horizon"]), np.nan),
        }
        for e in effects
    ])  # fmt: skip


def reference_effects() -> dict[tuple[str, int], float]:
    """(predictor, horizon) -> joint - baseline in the reference study (assets/reference.json)."""
    return {(row["predictor"], int(h)): row[h] for row in results.reference()["effect"] for h in row if h != "predictor"}


def effect_table(effects: Iterable[Mapping]) -> pd.DataFrame:
    """Effects for reading, in points: one row each, with the interval, every seed, the corrected p value and the family."""
    return pd.DataFrame([
        {
            "effect": e["name"], "mean (points)": 100 * e["mean"],
            "95% interval": "none (single seed)" if e["ci95"] is None else f"[{100 * e['ci95'][0]:+.1f}, {100 * e['ci95'][1]:+.1f}]",
            "per seed": ", ".join(f"{100 * x:+.1f}" for x in e["per_seed"]), "n": e["n"], "p (Holm)": e.get("p_holm"), "family": e["family"],
        }
        for e in effects
    ])  # fmt: skip


# --- choosing an objective ---------------------------------------------------------------------------------------------

def choose(arms: Sequence[Mapping], predictor: str = PRIMARY) -> str | None:
    """The candidate that the rule picks, or None where none passes the quality gate.

    The rule, fixed beforehand: among the candidates that pass the gate on the selection seeds, the largest mean gain in hit@k
    under `predictor`, over horizons and seeds.
    """
    passing = [gate["arm"] for gate in gates(arms) if gate["passes"]]
    gain = tradeoff(arms, predictor).groupby("arm").gain.mean()
    return max(passing, key=lambda arm: gain[arm]) if passing else None


# --- sentences ---------------------------------------------------------------------------------------------------------

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
    return f"{ours:+.1f} points here, {theirs:+.1f} in the reference study ({side}, {abs(ours / theirs):.1f} times its size{within})"


def corrected(effects: Sequence[Mapping]) -> str:
    """The Holm-corrected p values of a family in words."""
    if effects[0]["p_holm"] is None:
        return "With a single seed there is no test."
    values = ", ".join(f"{e['p_holm']:.3f} at h = {e['horizon']}" for e in effects)
    return f"Corrected for {len(effects)} horizons (Holm), p = {values}."


def _verb(effect: Mapping) -> str:
    if effect["ci95"] is None:
        return "changes"
    low, high = effect["ci95"]
    return "raises" if low > 0 else "lowers" if high < 0 else "does not measurably change"


def _seeds(effect: Mapping) -> str:
    return "a single seed, exploratory" if effect["n"] == 1 else f"{effect['n']} seeds"


# --- the summary -------------------------------------------------------------------------------------------------------

def answers(claims: Sequence[Mapping], horizons: Mapping | None) -> list[str]:
    """The report's first lines, from claims.json and the results of 02_horizons (None: not run): does it work, how much, at
    what cost, how sure, and what failed to replicate."""
    if horizons is None:
        return ["**Does it work?** Not known in this profile: 02_horizons has not been run."]
    by_id, arms = {claim["id"]: claim for claim in claims}, horizons["arms"]
    gain, cost = by_id["ranking-gain"], by_id["quality-cost"]
    effects = hit_effects(arms, "joint", "baseline", predictors=[PRIMARY])
    works = say_by_horizon(effects, "Under the ranking MLP, the strongest post-hoc predictor, on both sides, joint training", "hit@k")
    known = reference_effects()
    compared = [f"at h = {e['horizon']} {compare(e, known[PRIMARY, e['horizon']])}" for e in effects if (PRIMARY, e["horizon"]) in known]
    gate = next(gate for gate in horizons["gates"] if gate["arm"] == "joint")
    reuse = say(scalar_effects(arms, "joint", "baseline", {"reuse": "share of k"})[0], "Joint training", "reuse from token to token", "points")
    failed = "; ".join(claim["statement"].rstrip(".") for claim in claims if claim["verdict"] == stats.NOT_REPLICATED)
    words = (stats.REPLICATED, stats.PARTLY, stats.NOT_REPLICATED, stats.NOT_TESTED)
    counts = ", ".join(f"{sum(claim['verdict'] == word for claim in claims)} {word}" for word in words)
    return [
        f"**Does it work?** {works} Verdict: {gain['verdict']} ({gain['why']}).",
        f"**How much, compared with the reference study?** {'; '.join(compared) or 'No horizon in common'}.",
        f"**At what cost?** The joint arm {gate['sentence']}. The reference's claim of a small cost: {cost['verdict']}. {reuse}",
        f"**How sure?** Paired t intervals over {_seeds(effects[0])}. {corrected(effects)}",
        f"**What failed to replicate?** {failed or 'Nothing that was tested'}. Of {len(claims)} claims: {counts}.",
    ]


def claims_table(claims: Iterable[Mapping]) -> pd.DataFrame:
    """Claims for reading, headline ones first."""
    ordered = sorted(claims, key=lambda claim: not claim["headline"])
    columns = ["verdict", "statement", "measured", "reference", "notebook"]
    return pd.DataFrame(ordered)[columns].rename(columns={"statement": "claim of the reference study", "measured": "measured here"})
