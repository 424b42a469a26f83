"""A third measurement beside a fake measurement (`fake_measurements`). The answers are drawn, not found."""

import numpy as np
from fake_measurements import measurement

from predmoe.config import EVAL_TASKS
from predmoe.downstream_tasks import CLOZE
from predmoe.measure_downstream import OPEN, summary

CHOICES = {"piqa": 2, OPEN: 0}


def downstream(arm: str, seed: int, *, items: int = 200, better: float = 0.0, nats: float = 0.0, tasks=EVAL_TASKS) -> dict:
    """Answers around chance (the cloze: 60%), `better` and `nats` above the baseline's; the same items are hard for all models of a seed."""
    found = {"tasks": {}, "answers": {}, "harness": {}, "left_out": {}}
    for i, task in enumerate([*tasks, CLOZE]):
        hard, own = np.random.default_rng([seed, i]), np.random.default_rng([seed, i, len(arm)])
        chance = 0.0 if task == OPEN else 1 / CHOICES.get(task, 4)
        rate = (0.6 if task == CLOZE else chance) + better
        right = hard.random(items) * 0.9 + own.random(items) * 0.1 < rate
        gold = -30 + hard.normal(0, 5, items) + own.normal(0, 0.1, items) + nats
        samples = [{"acc": float(r), "filtered_resps": [(g, False)], "target": 0} | ({} if task == OPEN else {"acc_norm": float(r)}) for r, g in zip(right, gold)]
        found["tasks"][task], found["answers"][task] = summary(samples, chance, task)
        found["tasks"][task] |= {"fingerprint": f"{i:012x}", "requests": 4 * items, "cut": items // 10, "seconds": 1.0}
        found["harness"][task] = {"items": 50, "largest_difference": 2e-5, "judged_otherwise": 0, "apart": 0, "ties": 0}
        found["left_out"][task] = 1 if task == "piqa" else 0
    return found


def row(arm: str, seed: int, **more) -> dict:
    """A baseline or a joint model with all three measurements' numbers."""
    return measurement(arm, seed, gain=0.0 if arm == "baseline" else 1.0) | {"downstream": downstream(arm, seed, **more)}


def drawn(pairs, **more) -> list[dict]:
    """A row for each (arm, run) of the study; the joint model is less likely to say the gold answer by 0.5 nats."""
    return [row(arm, run.train.seed, nats=-0.5 * (arm == "joint"), **more) for arm, run in pairs]
