"""What 00_report shows of all experiments together: the tables behind its figure, and what their results were made with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from . import experiments

def provenance_table(found: Mapping[str, Mapping]) -> pd.DataFrame:
    """What each experiment's results were made with: commit, whether the code had changes, seeds, start."""
    return pd.DataFrame([
        {
            "notebook": name, "commit": result["provenance"]["commit"][:10], "uncommitted changes": result["provenance"]["dirty"],
            "arms": len({row["arm"] for row in result["arms"]}), "seeds": len({row["seed"] for row in result["arms"]}),
            "started": result["provenance"]["started"],
        }
        for name, result in found.items()
    ])  # fmt: skip


def summary_tables(found: Mapping[str, Mapping]) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """The three tables of `plots.summary`: hit@k levels, paired effects, costs. `found`: results by experiment; one of `experiments.primary`'s has to be there.

    Joint and baseline are those of `experiments.primary`. The alternative objective, which 02_horizons alone has, keeps that experiment's seeds and is
    paired with its baselines.
    """
    main = experiments.primary(found)
    groups = [[row for row in found[main]["arms"] if row["arm"] in ("baseline", "joint")]]
    if "02_horizons" in found:
        groups.append([row for row in found["02_horizons"]["arms"] if row["arm"] in ("baseline", "alternative")])
    levels, effects, costs = [], [], []
    for arms in groups:
        for arm in dict.fromkeys(row["arm"] for row in arms if row["arm"] != "baseline"):
            table = experiments.forest_table(experiments.hit_effects(arms, arm, "baseline", predictors=[experiments.PRIMARY]), experiments.reference_effects())
            effects.append(table if arm == "joint" else table.assign(reference=np.nan))   # the reference has no other arm
            cost = experiments.tradeoff(arms, experiments.PRIMARY)
            costs.append(cost[(cost.horizon == cost.horizon.min()) & (cost.arm == arm)])   # the loss is the same at every horizon
            read = experiments.hits(arms)
            shown = read[read.predictor == experiments.PRIMARY]
            levels.append(shown[shown.arm.isin([arm, "baseline"])] if not levels else shown[shown.arm == arm])
    return tuple(pd.concat(tables, ignore_index=True) for tables in (levels, effects, costs))
