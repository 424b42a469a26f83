"""The frontier of 15: what an arm costs in validation loss against what is known of its routing h layers ahead, and against its locality.

An early router's and a hash router's experts are known exactly as far ahead as they are chosen; beyond that, and for every other
model, known is what the strongest predictor fitted afterwards foretells. One arm dominates another where it is no worse on either
axis and better on one, by means over seeds. What the tables say is put in words here as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from . import experiments, results, stats

TRAINED, EARLY, HASH, CONTROL, BASE = "trained for predictability", "early router", "hash routing", "control", "baseline"
FAMILIES = (BASE, TRAINED, EARLY, HASH, CONTROL)
SIZE = "1/4"   # of a layer's experts: the cache at which locality is judged
LOCAL = {f"locality.lru.{SIZE}": f"LRU hit rate, {SIZE} of the experts", "locality.srp": "SRP (segments of 16)", "locality.sch": "SCH (twice a token's experts)"}


def family(row: Mapping) -> str:
    """What kind of arm a measurement is of, from its run's configuration."""
    model, objective = row["config"]["model"], row["config"]["objective"]
    if model["routing"] != "topk":
        return EARLY if model["routing"] == "early" else HASH
    return TRAINED if objective["lambda_pred"] else CONTROL if objective["lambda_sticky"] or objective["lambda_ent"] else BASE


def exact_ahead(row: Mapping) -> float:
    """How many layers ahead the routing is known by construction: early_by, every layer (infinity) for hash routing, else 0."""
    model = row["config"]["model"]
    return {"early": model["early_by"], "hash": float("inf"), "topk": 0}[model["routing"]]


def known_ahead(arms: Sequence[Mapping], predictor: str = experiments.PRIMARY) -> pd.DataFrame:
    """Columns arm, family, seed, horizon, known (share of the true top-k), exact (by construction), loss_change (fraction of the
    same seed's baseline)."""
    losses = results.values_by_seed(arms, "baseline", "val_loss")
    return pd.DataFrame([
        {"arm": row["arm"], "family": family(row), "seed": row["seed"], "horizon": int(h), "known": 1.0 if int(h) <= exact_ahead(row) else hit,
         "exact": int(h) <= exact_ahead(row), "loss_change": row["val_loss"] / losses[row["seed"]] - 1}
        for row in arms for h, hit in row["hit"][predictor].items()
    ])  # fmt: skip


def local(arms: Sequence[Mapping], measures: Mapping[str, str] = LOCAL) -> pd.DataFrame:
    """Columns arm, family, seed, measure, value, loss_change: how local an arm is in time, on each of `measures` (path -> words)."""
    losses = results.values_by_seed(arms, "baseline", "val_loss")
    rows = []
    for path, words in measures.items():
        for arm in dict.fromkeys(row["arm"] for row in arms):
            values = results.values_by_seed(arms, arm, path)
            rows += [{"arm": arm, "family": family(row), "seed": row["seed"], "measure": words, "value": values[row["seed"]],
                      "loss_change": row["val_loss"] / losses[row["seed"]] - 1} for row in arms if row["arm"] == arm]  # fmt: skip
    return pd.DataFrame(rows)


# --- dominance ---------------------------------------------------------------------------------------------------------

def means(table: pd.DataFrame, value: str) -> pd.DataFrame:
    """Means over seeds of `value` and loss_change by arm, with family and the number of seeds n, in the arms' order."""
    grouped = table.groupby(["arm", "family"], sort=False)
    return grouped.agg(**{value: (value, "mean"), "loss_change": ("loss_change", "mean"), "n": ("seed", "nunique")}).reset_index()


def dominates(a: Mapping, b: Mapping, value: str) -> bool:
    """Whether a is no worse than b in loss_change (lower) and `value` (higher), and better in one of them."""
    no_worse = a["loss_change"] <= b["loss_change"] and a[value] >= b[value]
    return bool(no_worse and (a["loss_change"] < b["loss_change"] or a[value] > b[value]))


def on_frontier(table: pd.DataFrame, value: str) -> pd.DataFrame:
    """`means` with a column frontier: no other arm dominates this one."""
    arms = means(table, value)
    rows = arms.to_dict("records")
    return arms.assign(frontier=[not any(dominates(other, row, value) for other in rows) for row in rows])


def against_early(known: pd.DataFrame) -> pd.DataFrame:
    """One row per horizon and early router that knows it exactly: its loss, the best trained arm at no greater loss (empty where there is
    none), what is known of that, `gap` (early - that one) and the winner of the pair.

    A router moved by fewer layers than the horizon is no answer to it, and stands on the frontier alone. `known` is 1 for each early router.
    winner: "early router" where it dominates every trained arm at that horizon, "training" where some trained arm dominates it, else
    "neither". n: the fewest seeds of the arms compared.
    """
    rows = []
    for horizon, part in known.groupby("horizon"):
        arms = means(part, "known")
        trained = arms[arms.family == TRAINED].to_dict("records")
        for early in arms[(arms.family == EARLY) & arms.arm.isin(part[part.exact].arm)].to_dict("records"):
            equal = [row for row in trained if row["loss_change"] <= early["loss_change"]]
            best = max(equal, key=lambda row: row["known"], default=None)
            if trained and all(dominates(early, row, "known") for row in trained):
                winner = EARLY
            else:
                winner = "training" if any(dominates(row, early, "known") for row in trained) else "neither"
            rows.append({
                "horizon": horizon, "early": early["arm"], "loss_change": early["loss_change"], "known": early["known"],
                "best trained at no greater loss": best["arm"] if best else "", "its known": best["known"] if best else np.nan,
                "gap": early["known"] - best["known"] if best else np.nan, "winner": winner, "n": min([early["n"], *(row["n"] for row in trained)]),
            })  # fmt: skip
    return pd.DataFrame(rows, columns=["horizon", "early", "loss_change", "known", "best trained at no greater loss", "its known", "gap", "winner", "n"])


def early_effects(arms: Sequence[Mapping], known: pd.DataFrame) -> list[dict]:
    """Each early router against each trained arm on their common seeds, paired: validation loss, relative to the trained arm's."""
    names = {name: list(dict.fromkeys(known[known.family == kind].arm)) for name, kind in (("early", EARLY), ("trained", TRAINED))}
    found = []
    for early in names["early"]:
        for trained in names["trained"]:
            mine, theirs = (results.values_by_seed(arms, arm, "val_loss") for arm in (early, trained))
            common = sorted(mine.keys() & theirs.keys())
            if common:
                effect = stats.paired({s: mine[s] for s in common}, {s: theirs[s] for s in common}, relative=True, name=f"{early} - {trained}, val_loss", unit="fraction")
                found.append(effect.as_dict() | {"treatment": early, "control": trained, "metric": "val_loss", "family": "exploratory"})
    return found


# --- own entry -----------------------------------------------------------------------------------------------------------

def both(arms: Sequence[Mapping], predictor: str = experiments.PRIMARY) -> pd.DataFrame:
    """One row per trained arm: mean gain in hit@k over horizons, gain in the LRU hit rate at SIZE, both in points against the same seeds'
    baseline, their sum (a share of a token's experts each), whether the gate is passed, and n, the seeds."""
    passes = {gate["arm"]: gate["passes"] for gate in experiments.gates(arms)}
    gain = experiments.tradeoff(arms, predictor).groupby("arm").gain.mean()
    rows = []
    for arm in dict.fromkeys(row["arm"] for row in arms if family(row) == TRAINED):
        (cached,) = experiments.scalar_effects(arms, arm, "baseline", {f"locality.lru.{SIZE}": "share"})
        rows.append({"arm": arm, "lookahead": 100 * gain[arm], "locality": 100 * cached["mean"], "sum": 100 * (gain[arm] + cached["mean"]),
                     "passes the gate": passes[arm], "n": cached["n"]})  # fmt: skip
    return pd.DataFrame(rows, columns=["arm", "lookahead", "locality", "sum", "passes the gate", "n"])


def best_on_both(table: pd.DataFrame) -> pd.Series | None:
    """The arm that the rule picks of `both`: among those that pass the gate, the largest sum; None where none passes."""
    passing = table[table["passes the gate"].astype(bool)]
    return None if passing.empty else passing.loc[passing["sum"].idxmax()]


# --- in words --------------------------------------------------------------------------------------------------------------

def say_verdict(compared: pd.DataFrame) -> list[str]:
    """Is training for predictability better than moving the router earlier? One sentence a horizon and early router, and the sum of it."""
    if compared.empty:
        return ["No early router that knows a horizon exactly is among the arms, so training for predictability is compared with none."]
    sentences = []
    for row in compared.to_dict("records"):
        head = f"At h = {row['horizon']}, {row['early']} is known exactly at {row['loss_change']:+z.2%} validation loss"
        best = row["best trained at no greater loss"]
        middle = f"; of the trained arms that cost no more, {best} is known best, to {row['its known']:.1%}" if best else "; no trained arm costs as little"
        end = {EARLY: "it dominates every trained arm", "training": "a trained arm dominates it", "neither": "neither dominates the other"}[row["winner"]]
        sentences.append(f"{head}{middle}: {end}.")
    counts = compared.winner.value_counts()
    won = {name: int(counts.get(name, 0)) for name in (EARLY, "training", "neither")}
    total, sure = len(compared), "" if compared.n.min() >= stats.LEAST_SEEDS else f" Some arms have fewer than {stats.LEAST_SEEDS} seeds, so this is exploratory."
    if won["training"] == total:
        verdict = "Yes: at every horizon, every early router is dominated by an arm that was trained for predictability."
    elif won[EARLY] == total:
        verdict = "No: at every horizon, every early router dominates all arms that were trained for predictability."
    else:
        verdict = (f"It depends on what is to be bought: of {total} pairs of horizon and early router, the early router dominates in {won[EARLY]}, training in "
                   f"{won['training']}, and in {won['neither']} neither does, since one is cheaper in loss and the other better known.")  # fmt: skip
    return [*sentences, f"**Is training for predictability better than moving the router earlier?** {verdict}{sure}"]


def say_frontier(table: pd.DataFrame, value: str, what: str) -> str:
    """The arms that no other dominates, cheapest first, in one sentence; `what` names the second axis."""
    arms = on_frontier(table, value)
    best = arms[arms.frontier].sort_values("loss_change")
    listed = ", ".join(f"{row.arm} ({getattr(row, value):.1%} at {row.loss_change:+z.2%})" for row in best.itertuples())
    return f"On {what} against validation loss the frontier is {listed}; {len(arms) - len(best)} of {len(arms)} arms are dominated."


def say_own(table: pd.DataFrame) -> str:
    """Which trained arm does best on lookahead and locality together, and whether it gains on each."""
    best = best_on_both(table)
    if best is None:
        return f"None of the {len(table)} arms trained for predictability passes the quality gate, so none is put forward."
    sides = [name for name in ("lookahead", "locality") if best[name] > 0]
    gains = {2: "gains on both", 1: f"gains on {sides[0]} alone" if sides else "", 0: "gains on neither"}[len(sides)]
    rest = "a single seed, exploratory" if best["n"] == 1 else f"{best['n']} seeds"
    return (f"Of {len(table)} arms trained for predictability, {int(table['passes the gate'].sum())} within the quality gate, {best['arm']} does best on lookahead and locality together and "
            f"{gains}: hit@k {best['lookahead']:+z.1f} points over the horizons, LRU hit rate at {SIZE} of the experts {best['locality']:+z.1f} ({rest}).")  # fmt: skip
