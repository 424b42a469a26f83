"""The second measurement and a run's configuration beside a fake measurement (`fake_measurements`). The numbers are drawn, not found."""

import numpy as np
from fake_measurements import measurement

BELADY = 0.08   # above LRU


def local(row: dict, *, reuse: float = 0.33, routing: str = "topk", early_by: int = 0, sticky: float = 0.0, entropy: float = 0.0) -> dict:
    """`row` with a second measurement around `reuse` and the parts of a configuration that families of arms are told by."""
    own = np.random.default_rng([row["seed"], round(1000 * reuse), early_by])
    at = reuse + own.normal(0, 0.003)
    lru = {size: at + more for size, more in (("1/8", 0.0), ("1/4", 0.2), ("1/2", 0.4))}
    locality = {
        "tokens": 8192, "reuse": at, "switch_rate": 1 - 0.9 * at, "srp": 0.3 + at, "srp_size": 1.4, "sch": lru["1/4"] + 0.03, "sch_global": lru["1/4"] + 0.04,
        "slots": {"1/8": 2, "1/4": 4, "1/2": 8}, "lru": lru, "belady": {size: rate + BELADY for size, rate in lru.items()},
        "next_token": {"ranking": at + 0.1, "previous": at}, "pre_attention": {"ranking": 0.9 + own.normal(0, 0.003), "router": 0.85},
        "converged": {"next_token": True, "pre_attention": True}, "curves": {}, "seconds": {"locality": 60.0},
    }  # fmt: skip
    settings = {"model": {"routing": routing, "early_by": early_by}, "objective": {"lambda_pred": row["lambda_pred"], "lambda_sticky": sticky, "lambda_ent": entropy}}
    return row | {"locality": locality, "config": settings}


def controls(seeds=(0, 1, 2)) -> list[dict]:
    """Baseline, joint, two sticky arms and one under the joint loss; the sticky ones are more local."""
    rows = []
    for seed in seeds:
        rows.append(local(measurement("baseline", seed, gain=0.0)))
        rows.append(local(measurement("joint", seed), reuse=0.30))
        rows += [local(measurement(f"sticky {weight:g}", seed, gain=-0.5 * weight, lambda_pred=0.0), reuse=0.33 + 0.1 * weight, sticky=weight) for weight in (0.3, 1.0)]
        rows.append(local(measurement("sticky 1 + joint", seed, gain=0.6), reuse=0.40, sticky=1.0))
    return rows


def frontier(seeds=(0, 1, 2)) -> list[dict]:
    """Baseline, two doses, an early router, hash routing and a sticky control."""
    rows = []
    for seed in seeds:
        rows.append(local(measurement("baseline", seed, gain=0.0)))
        rows.append(local(measurement("joint 0.3", seed), reuse=0.30))
        rows.append(local(measurement("joint 1", seed, gain=1.6, loss=4.6), reuse=0.28))
        rows.append(local(measurement("early 1", seed, gain=0.0, loss=4.57) | {"arm": "early 1"}, reuse=0.35, routing="early", early_by=1))
        rows.append(local(measurement("hash", seed, gain=0.0, loss=4.8), reuse=0.2, routing="hash"))
        rows.append(local(measurement("sticky 1", seed, gain=0.0, loss=4.56), reuse=0.45, sticky=1.0))
    return rows


def drawn(pairs) -> list[dict]:
    """A measurement for each (arm, run) of a study: more predictable with lambda_pred, sharper with lambda_ent, more local with lambda_sticky."""
    rows = []
    for arm, run in pairs:
        o, m = run.objective, run.model
        row = measurement(arm, run.train.seed, gain=min(2.0, 3 * o.lambda_pred) + 10 * o.lambda_ent, loss=4.55 + 0.02 * m.early_by + 0.2 * (m.routing == "hash"), lambda_pred=o.lambda_pred)
        entropy = 2.48 - 20 * o.lambda_ent - 0.1 * o.lambda_pred
        row |= {"config_hash": run.hash, "lambda_pred": o.lambda_pred, "router_entropy": entropy, "router_entropy_fraction": entropy / np.log(16)}
        rows.append(local(row, reuse=0.33 + 0.05 * o.lambda_sticky - 0.03 * o.lambda_pred, routing=m.routing, early_by=m.early_by, sticky=o.lambda_sticky, entropy=o.lambda_ent))
    return rows
