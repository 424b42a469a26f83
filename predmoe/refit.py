"""Does an effect hang on how the ranking MLP was fitted? The same MLP fitted by the other loss on the same models (`studies.second_fit`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from . import claims, experiments, results
from .findings import say_by_horizon

LOSSES = {   # PosthocConfig.ranking_loss in words
    "margin": "by the weakest true expert's margin over the strongest other (the reference study's loss)",
    "margin_all": "by a margin that every true expert and every other one must keep (`margin_all`)",
}
VARIATION = "MLP fitted by the other loss"


def effects(again: Sequence[Mapping], treatment: str, control: str) -> list[dict]:
    """treatment - control in hit@k of the MLPs of the second fit, Holm-corrected over the horizons, `variation` naming it."""
    found = experiments.hit_effects(again, treatment, control, predictors=["ranking"])
    return [e | {"variation": VARIATION, "name": f"{VARIATION}: {e['name']}"} for e in found]


def levels(arms: Sequence[Mapping], arm: str, predictor: str = "ranking") -> dict[int, float]:
    """horizon -> hit@k (share) of one arm, mean over its seeds. Raises ResultError where the arm is not there."""
    mine = [row["hit"][predictor] for row in arms if row["arm"] == arm]
    if not mine:
        raise results.ResultError(f"there is no arm {arm!r} among {', '.join(dict.fromkeys(row['arm'] for row in arms)) or 'no measurements'}")
    return {int(h): float(np.mean([row[h] for row in mine])) for h in mine[0]}


def say_levels(arms: Sequence[Mapping], again: Sequence[Mapping], arm: str) -> str:
    """What the MLP of either fit knows of one arm, beside the linear predictor, and at which horizons the second is the better or the worse of the two fits."""
    first, second, linear = levels(arms, arm), levels(again, arm), levels(arms, arm, "linear")
    told = " / ".join
    at = lambda chosen: f"at h = {' / '.join(map(str, chosen))}"  # noqa: E731
    sides = {"stronger": [h for h in first if second[h] > first[h]], "weaker": [h for h in first if second[h] < first[h]], "as strong as the first": [h for h in first if second[h] == first[h]]}
    order = ", ".join(f"{how} {'at every horizon' if len(hs) == len(first) else at(hs)}" for how, hs in sides.items() if hs)
    below = {name: [h for h in linear if values[h] < linear[h]] for name, values in (("first", first), ("second", second))}
    beaten = "".join(f"; the {name} is weaker than the linear predictor {at(hs)}" for name, hs in below.items() if hs)
    return (f"On the {arm} model the MLP fitted {LOSSES[loss_of(arms)]} has hit@k {told(f'{100 * v:.1f}' for v in first.values())}% {at(first)}; fitted {LOSSES[loss_of(again)]}, "
            f"{told(f'{100 * v:.1f}' for v in second.values())}%; a linear one {told(f'{100 * v:.1f}' for v in linear.values())}%. The second is {order}{beaten}.")  # fmt: skip


def loss_of(arms: Sequence[Mapping]) -> str:
    """Which loss the arms' ranking MLPs were fitted by, of all the same. Raises ResultError where they are not."""
    found = sorted({row["posthoc_config"].get("ranking_loss", claims.REFERENCE_LOSS) for row in arms})
    if len(found) != 1:
        raise results.ResultError(f"the ranking MLPs of these arms were fitted by {' and '.join(found) or 'no loss'}, not by one loss: they cannot be compared")
    return found[0]


def say_judge(loss: str) -> str:
    """By which loss the ranking MLP is fitted under which a notebook's arms are compared, that of `loss_of` or `claims.ranking_loss`."""
    return f"The ranking MLP is the one fitted {LOSSES[loss]}."


def say_effects(found: Sequence[Mapping], again: Sequence[Mapping], subject: str) -> str:
    """The effect under the MLPs of the second fit."""
    return say_by_horizon(found, f"Under the MLP fitted {LOSSES[loss_of(again)]}, {subject}", "hit@k")
