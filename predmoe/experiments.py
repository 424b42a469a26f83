"""What the training notebooks share: arms (see `studies`) are measured through the run store, measurements become tidy tables, pairs of arms
become effects. What the effects say in words is in `findings`.

An arm is a name and the changes to the tier's objective that make it; `baseline` comes first.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from IPython.display import HTML

from . import claims as deciding
from . import config, results, stats
from .claim_words import table as claims_table   # noqa: F401  notebooks show claims by this name
from .plots import PREDICTORS

# Of a further measurement: left to the run store.
FURTHER_MADE_WITH = ("curves", "seconds", "provenance", "measured_by", "locality_config", "downstream_config", "data_hash")
PRIMARY = "ranking"   # the confirmatory comparison: joint against baseline under the reference study's strongest post-hoc predictor


# --- measuring ---------------------------------------------------------------------------------------------------------

def measure_arms(
    pairs: Sequence[tuple[str, config.RunConfig]], posthoc: config.PosthocConfig, *, profile: str, parallel: int,
    **further: config.LocalityConfig | config.DownstreamConfig,
) -> list[dict]:  # fmt: skip
    """One measurement per pair, with its arm's name; what the store lacks is trained and measured first.

    With `locality=` or `downstream=` each has that measurement under that name.
    """
    from . import runs   # not at the top: it loads torch, which the report, made of files alone, does not need

    measured = runs.get_or_measure([run for _, run in pairs], posthoc, profile=profile, parallel=parallel, **further)
    for (arm, run), measurement in zip(pairs, measured):
        missing = [h for h in run.predictor.horizons if str(h) not in measurement["hit"][PRIMARY]]
        if missing:
            raise results.ResultError(f"{arm}, seed {run.train.seed}: the stored measurement has no horizon {', '.join(map(str, missing))}")
    for kind in further:
        measured = [m | {kind: {key: value for key, value in m[kind].items() if key not in FURTHER_MADE_WITH}} for m in measured]
    return [{"arm": arm, **measurement} for (arm, _), measurement in zip(pairs, measured)]


def training_curves(pairs: Sequence[tuple[str, config.RunConfig]], *, profile: str) -> pd.DataFrame:
    """Columns arm, seed, step, term, nats: the weighted loss terms while training, from the run store."""
    from . import runs

    logs = [(arm, run.train.seed, runs.Run(runs.default_store(profile) / run.hash, run).metrics()) for arm, run in pairs]
    return pd.DataFrame([
        {"arm": arm, "seed": seed, "step": line["step"], "term": term, "nats": nats}
        for arm, seed, logged in logs for line in logged if "terms" in line for term, nats in line["terms"].items()
    ])  # fmt: skip


def primary(found: Mapping[str, Mapping]) -> str | None:
    """The experiment on which the comparison of joint with baseline stands, in the report's first lines, its figure, the claims and the paper (see
    `claims.deciding`); None: none of those that have it is among `found`, results by experiment."""
    (headline,) = (spec for spec in results.claim_specs() if spec["id"] == "ranking-gain")
    return deciding.deciding(headline["notebook"], found)


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


def per_domain(arms: Iterable[Mapping], predictor: str) -> pd.DataFrame:
    """Columns arm, seed, horizon, domain, hit: hit@k of each domain's held-out documents, weighted by tokens."""
    rows = []
    for row in arms:
        documents = row["documents"]
        frame = pd.DataFrame({"domain": documents["domain"], "tokens": documents["tokens"]})
        for h, values in documents["hit"][predictor].items():
            means = (frame.tokens * values).groupby(frame.domain).sum() / frame.tokens.groupby(frame.domain).sum()
            rows += [{"arm": row["arm"], "seed": row["seed"], "horizon": int(h), "domain": d, "hit": hit} for d, hit in means.items()]
    return pd.DataFrame(rows)


def gains(table: pd.DataFrame) -> pd.DataFrame:
    """`table` (of `per_domain` or `per_layer`) with a column gain in place of hit: the difference to the same seed's baseline.

    The baseline's own rows are left out.
    """
    keys = [name for name in table.columns if name not in ("arm", "hit")]
    base = table[table.arm == "baseline"][[*keys, "hit"]]
    joined = table[table.arm != "baseline"].merge(base, on=keys, suffixes=("", "_base"), validate="many_to_one")
    return joined.assign(gain=joined.hit - joined.hit_base).drop(columns=["hit", "hit_base"])


def by_horizon(table: pd.DataFrame, value: str) -> pd.DataFrame:
    """Mean over seeds of `value` for reading: a row per arm and predictor, a column per horizon."""
    named = table.dropna(subset=[value]).assign(predictor=table.predictor.map(PREDICTORS), horizon="h = " + table.horizon.astype(str))
    return named.pivot_table(index=["arm", "predictor"], columns="horizon", values=value, sort=False).reset_index().rename_axis(columns=None)


def tradeoff(arms: Sequence[Mapping], predictor: str) -> pd.DataFrame:
    """Columns arm, seed, horizon, loss_change (fraction), gain (hit@k), load (load entropy as a ratio), all against the same seed's baseline (itself included)."""
    bases = {row["seed"]: row for row in arms if row["arm"] == "baseline"}
    return pd.DataFrame([
        {"arm": row["arm"], "seed": row["seed"], "horizon": int(h), "loss_change": row["val_loss"] / bases[row["seed"]]["val_loss"] - 1,
         "gain": hit - bases[row["seed"]]["hit"][predictor][h], "load": row["load_entropy"] / bases[row["seed"]]["load_entropy"]}
        for row in arms for h, hit in row["hit"][predictor].items()
    ])  # fmt: skip


def doses(arms: Sequence[Mapping], predictor: str) -> pd.DataFrame:
    """`tradeoff` for arms named "GRADIENT LAMBDA": columns arm (the gradient), dose, seed, horizon, loss_change, gain, margin, entropy.

    gain and margin (over the token-id lookup) of hit@k, loss_change (fraction) and entropy (router entropy as a share of its
    maximum) are differences to the same seed's baseline.
    """
    bases, rows = {row["seed"]: row for row in arms if row["arm"] == "baseline"}, []
    for row in (row for row in arms if row["arm"] != "baseline"):
        gradient, dose = row["arm"].split()
        base = bases[row["seed"]]
        rows += [
            {
                "arm": gradient, "dose": float(dose), "seed": row["seed"], "horizon": int(h), "loss_change": row["val_loss"] / base["val_loss"] - 1,
                "gain": hit - base["hit"][predictor][h], "margin": row["margin_over_token_id"][predictor][h] - base["margin_over_token_id"][predictor][h],
                "entropy": row["router_entropy_fraction"] - base["router_entropy_fraction"],
            }
            for h, hit in row["hit"][predictor].items()
        ]  # fmt: skip
    return pd.DataFrame(rows)


def posthoc_curves(arms: Iterable[Mapping]) -> pd.DataFrame:
    """Columns arm, seed, predictor, step, lr, train_loss, dev_hit: how each post-hoc fit converged."""
    return pd.DataFrame([
        {"arm": row["arm"], "seed": row["seed"], "predictor": predictor} | point
        for row in arms for predictor, curve in row["curves"].items() for point in curve
    ])  # fmt: skip


def unconverged(arms: Iterable[Mapping]) -> list[str]:
    """The post-hoc fits that stopped at max_steps before they had converged, in words; empty is as it should be."""
    return [f"{row['arm']}, seed {row['seed']}, {name}" for row in arms for name, ok in row["converged"].items() if not ok]


# --- effects -----------------------------------------------------------------------------------------------------------

def hit_effects(
    arms: Sequence[Mapping], treatment: str, control: str, *, metric: str = "hit", predictors: Sequence[str],
    horizons: Sequence[int] | None = None, confirm: str | None = None,
) -> list[dict]:  # fmt: skip
    """Paired effects of `metric` for every predictor and horizon (all that were measured), with what identifies each.

    Holm's correction runs over the horizons of one predictor. `confirm` names the predictor whose effects are the
    confirmatory family; all others are exploratory.
    """
    horizons = horizons or [int(h) for h in next(row for row in arms if row["arm"] == treatment)["hit"][predictors[0]]]
    found = []
    for predictor in predictors:
        effects = [_paired(arms, treatment, control, f"{metric}.{predictor}.{h}", f"{predictor}, h={h}", "hit@k") for h in horizons]
        adjusted = stats.holm([e["p"] for e in effects]) if effects[0]["p"] is not None else [None] * len(effects)
        family = "confirmatory" if predictor == confirm else "exploratory"
        found += [
            effect | {"metric": metric, "predictor": predictor, "horizon": h, "p_holm": p, "family": family}
            for effect, h, p in zip(effects, horizons, adjusted)
        ]
    return found


def scalar_effects(arms: Sequence[Mapping], treatment: str, control: str, metrics: Mapping[str, str]) -> list[dict]:
    """Paired effects of single numbers; `metrics`: dotted path -> unit."""
    return [_paired(arms, treatment, control, path, path, unit) | {"metric": path, "family": "exploratory"} for path, unit in metrics.items()]


def relative_effect(arms: Sequence[Mapping], treatment: str, control: str, metric: str) -> dict:
    """`treatment` against `control` as a share of it, paired by seed: of the arms of a simulation, say."""
    values = [results.values_by_seed(arms, arm, metric) for arm in (treatment, control)]
    return stats.paired(*values, relative=True, name=f"{treatment} - {control}", unit="percent").as_dict()


def with_levels(arms: Sequence[Mapping], effects: Sequence[Mapping]) -> list[dict]:
    """Effects of `hit_effects` with `levels`: the means of control and treatment over the seeds of the effect."""
    found = []
    for e in effects:
        values = [results.values_by_seed(arms, e[side], f"{e['metric']}.{e['predictor']}.{e['horizon']}") for side in ("control", "treatment")]
        found.append(dict(e) | {"levels": tuple(float(np.mean([side[seed] for seed in e["seeds"]])) for side in values)})
    return found


def document_effects(arms: Sequence[Mapping], treatment: str, control: str, *, predictor: str) -> list[dict]:
    """One bootstrap over held-out documents per seed and horizon: how far the effect hangs on which text was measured."""
    found, controls = [], {row["seed"]: row for row in arms if row["arm"] == control}
    for row in (row for row in arms if row["arm"] == treatment):
        mine, theirs = row["documents"], controls[row["seed"]]["documents"]
        for h in mine["hit"][predictor]:
            name = f"{treatment} - {control}, {predictor}, h={h}, seed {row['seed']}"
            effect = stats.bootstrap_documents(
                mine["hit"][predictor][h], theirs["hit"][predictor][h], mine["tokens"], model_seed=row["seed"], name=name, unit="hit@k"
            )
            keys = {"treatment": treatment, "control": control, "metric": "hit", "predictor": predictor, "horizon": int(h)}
            found.append(effect.as_dict() | keys | {"family": "within one seed"})
    return found


def _paired(arms, treatment, control, path, what, unit) -> dict:
    effect = stats.paired(*_pair(arms, treatment, control, path), name=f"{treatment} - {control}, {what}", unit=unit)
    return effect.as_dict() | {"treatment": treatment, "control": control}


def _pair(arms, treatment, control, path) -> tuple[dict[int, float], dict[int, float]]:
    """Both sides by seed. The control may have more seeds, for arms that were run on all of them; a treatment's seed without a
    control is left for `stats.paired` to refuse."""
    mine, theirs = (results.values_by_seed(arms, arm, path) for arm in (treatment, control))
    return mine, {seed: value for seed, value in theirs.items() if seed in mine}


def gates(arms: Sequence[Mapping]) -> list[dict]:
    """The quality gate of every arm against the baseline, as results.json holds it."""
    found = []
    for arm in dict.fromkeys(row["arm"] for row in arms if row["arm"] != "baseline"):
        values = [values for metric in ("val_loss", "load_entropy") for values in _pair(arms, arm, "baseline", metric)]
        found.append({"arm": arm} | stats.quality_gate(*values).as_dict())
    return found


def forest_table(effects: Iterable[Mapping], reference: Mapping[tuple[str, int], float] | None = None) -> pd.DataFrame:
    """Effects as `plots.forest` takes them, grouped by variation where they have one, else by predictor; `reference`: (predictor, horizon) -> the reference study's effect."""
    return pd.DataFrame([
        {
            "group": e.get("variation") or PREDICTORS[e["predictor"]], "name": f"h = {e['horizon']}", "arm": e["treatment"], "horizon": e["horizon"], "mean": e["mean"],
            "low": e["ci95"][0] if e["ci95"] else np.nan, "high": e["ci95"][1] if e["ci95"] else np.nan, "per_seed": e["per_seed"],
            "reference": (reference or {}).get((e["predictor"], e["horizon"]), np.nan),
        }
        for e in effects
    ])  # fmt: skip


def reference_effects() -> dict[tuple[str, int], float]:
    """(predictor, horizon) -> joint - baseline in the reference study (assets/reference.json)."""
    return {(row["predictor"], int(h)): row[h] for row in results.reference()["effect"] for h in row if h != "predictor"}


def reference_doses(arms: Sequence[Mapping]) -> pd.DataFrame:
    """The reference study's levels by dose beside ours (linear predictor, the reference's gradient mode, means over seeds)."""
    rows = [{"study": f"reference, tier {row['tier']}", "lambda": row["lambda"]} | {f"h = {h}": row[h] for h in ("1", "2", "4")} |
            {"loss, nats above the baseline's": row.get("loss_nats", np.nan)} for row in results.reference()["dose"]]  # fmt: skip
    loss = {row["seed"]: row["val_loss"] for row in arms if row["arm"] == "baseline"}
    for arm in dict.fromkeys(row["arm"] for row in arms if row["arm"].startswith("input ")):
        mine = [row for row in arms if row["arm"] == arm]
        levels = {f"h = {h}": float(np.mean([row["hit"]["linear"][h] for row in mine])) for h in mine[0]["hit"]["linear"]}
        cost = float(np.mean([row["val_loss"] - loss[row["seed"]] for row in mine]))
        rows.append({"study": "here", "lambda": float(arm.split()[1])} | levels | {"loss, nats above the baseline's": cost})
    return pd.DataFrame(rows)


COLUMNS = {   # of tables whose CSV has the names of results.json
    "val_loss": "validation loss (nats/token)", "router_entropy": "router entropy (nats)", "router_entropy_fraction": "router entropy (share of the largest)", "top_k_mass": "top-k mass",
    "load_entropy": "load entropy (share of the largest)", "largest_load": "largest load (share)", "dead_experts": "dead experts", "hidden_cosine": "hidden-state cosine",
    "exact_set": "exact set", "loss_change": "change in validation loss",
}  # fmt: skip


def show(table: pd.DataFrame, digits: int = 3) -> HTML:
    """A table for reading in a notebook: no index, no cut text, numbers to `digits` places, the lines of a cell one below another, columns and predictors by their names in words.
    Its attribute "class" is the HTML's."""
    named = table.assign(predictor=table.predictor.replace(PREDICTORS)) if "predictor" in table else table
    safe = named.rename(columns=COLUMNS).map(lambda cell: html.escape(cell, quote=False).replace("\n", "<br>") if isinstance(cell, str) else cell).rename(columns=lambda name: html.escape(str(name), quote=False))
    with pd.option_context("display.max_colwidth", None):
        return HTML(safe.to_html(index=False, border=0, escape=False, classes=table.attrs.get("class"), float_format=f"{{:.{digits}f}}".format, na_rep="–"))


def effect_table(effects: Iterable[Mapping]) -> pd.DataFrame:
    """Effects for reading, in points: one row each, with the interval, every seed, the corrected p value and the family."""
    rows = []
    for e in effects:
        mean, interval = results.effect_parts(e, "points")
        rows.append({"effect": _worded(e), "mean (points)": mean, "95% interval": interval or "none (single seed)", "per seed": ", ".join(results.amount(x, e, "points") for x in e["per_seed"]),
                     "n": e["n"], "p (Holm)": e.get("p_holm"), "family": e["family"]})  # fmt: skip
    return pd.DataFrame(rows)


def _worded(effect: Mapping) -> str:
    """An effect's name with its predictor's in words."""
    name, predictor = effect["name"], effect.get("predictor")
    return re.sub(r"h=(\d)", r"h = \1", name.replace(f", {predictor},", f", {PREDICTORS[predictor]},") if predictor in PREDICTORS else name)


# --- choosing an objective ---------------------------------------------------------------------------------------------

def selection_table(arms: Sequence[Mapping], predictor: str = PRIMARY) -> pd.DataFrame:
    """What `choose` goes by, per candidate: mean gain in hit@k and in the margin over the lookup (points), loss change, the gate."""
    if not arms:
        return pd.DataFrame(columns=["candidate", "gain (points)", "gain in margin (points)", "validation loss (%)", "passes the gate"])
    gain, passing = tradeoff(arms, predictor).groupby("arm"), {gate["arm"]: gate["passes"] for gate in gates(arms)}
    margin = hits(arms).query("predictor == @predictor").groupby("arm").margin.mean()
    return pd.DataFrame([
        {
            "candidate": arm, "gain (points)": 100 * gain.gain.mean()[arm], "gain in margin (points)": 100 * (margin[arm] - margin["baseline"]),
            "validation loss (%)": 100 * gain.loss_change.mean()[arm], "passes the gate": passing[arm],
        }
        for arm in passing
    ])  # fmt: skip


def choose(arms: Sequence[Mapping], predictor: str = PRIMARY) -> str | None:
    """The candidate that the rule picks, or None where none passes the quality gate.

    The rule, fixed beforehand: among the candidates that pass the gate on the selection seeds, the largest mean gain in hit@k
    under `predictor`, over horizons and seeds.
    """
    passing = [gate["arm"] for gate in gates(arms) if gate["passes"]]
    gain = tradeoff(arms, predictor).groupby("arm").gain.mean()
    return max(passing, key=lambda arm: gain[arm]) if passing else None


# --- why an effect is as large as it is --------------------------------------------------------------------------------

def measure_groups(
    groups: Mapping[str, Sequence[tuple[str, config.RunConfig]]], posthoc: config.PosthocConfig, *, profile: str, parallel: int
) -> dict[str, list[dict]]:  # fmt: skip
    """The measurements of each group of (arm, run) pairs, as `measure_arms` gives them; what is missing is trained side by side."""
    measured = iter(measure_arms([pair for pairs in groups.values() for pair in pairs], posthoc, profile=profile, parallel=parallel))
    return {name: [next(measured) for _ in pairs] for name, pairs in groups.items()}


def variation_effects(measured: Mapping[str, Sequence[Mapping]], predictor: str = PRIMARY) -> list[dict]:
    """joint - baseline by horizon under each variation, with `variation` naming it."""
    return [
        effect | {"variation": name, "name": f"{effect['name']}, {name}"}
        for name, arms in measured.items() for effect in hit_effects(arms, "joint", "baseline", predictors=[predictor])
    ]  # fmt: skip


def variation_table(measured: Mapping[str, Sequence[Mapping]], predictor: str = PRIMARY) -> pd.DataFrame:
    """One row per variation, seed and horizon: the levels, and joint - baseline in points and percent of the loss."""
    rows = []
    for name, arms in measured.items():
        bases = {row["seed"]: row for row in arms if row["arm"] == "baseline"}
        for joint in (row for row in arms if row["arm"] == "joint"):
            base = bases[joint["seed"]]
            change = lambda metric, which, h: 100 * (joint[metric][which][h] - base[metric][which][h])  # noqa: B023, E731
            rows += [
                {
                    "variation": name, "seed": joint["seed"], "horizon": int(h), "baseline loss": base["val_loss"], "baseline hit@k": base["hit"][predictor][h],
                    "gain (points)": change("hit", predictor, h), "of the token-id lookup": change("hit", "token_id", h),
                    "of the margin": change("margin_over_token_id", predictor, h), "loss (%)": 100 * (joint["val_loss"] / base["val_loss"] - 1),
                    "router entropy, baseline": base["router_entropy_fraction"], "joint": joint["router_entropy_fraction"],
                }
                for h in joint["hit"][predictor]
            ]  # fmt: skip
    return pd.DataFrame(rows)
