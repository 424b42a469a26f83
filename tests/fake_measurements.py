"""Well-formed measurements without a model, for tests of what comes after measuring. The numbers are drawn, not found."""

import numpy as np

from predmoe import experiments, results

HORIZONS = ("1", "2", "4")
DOMAINS = ("code", "encyclopaedia", "plays", "scripture", "speeches")
BASE = {
    "linear": (0.82, 0.78, 0.70), "ranking": (0.864, 0.815, 0.732), "next_router": (0.745, 0.661, 0.529),
    "token_id": (0.755, 0.73, 0.682), "static": (0.17, 0.17, 0.17),
}  # fmt: skip
GAIN = {
    "linear": (0.04, 0.05, 0.065), "ranking": (0.027, 0.037, 0.05), "next_router": (0.05, 0.05, 0.05),
    "token_id": (0.002, 0.002, 0.006), "static": (0, 0, 0),
}  # fmt: skip


def measurement(arm: str, seed: int, *, gain: float = 1.0, loss: float = 4.55, layers: int = 8, lambda_pred: float = 0.3) -> dict:
    """One measurement; `gain` multiplies the drawn effect of the arm, 0 gives a baseline."""
    shared, own = np.random.default_rng(seed), np.random.default_rng([seed, abs(round(1000 * gain))])
    shift = shared.normal(0, 0.008)
    predictors = list(BASE) + (["cotrained"] if gain else [])
    per_layer, hit, exact = {}, {}, {}
    for name in predictors:
        base, plus = BASE.get(name, BASE["linear"]), GAIN.get(name, GAIN["linear"])
        per_layer[name], hit[name], exact[name] = {}, {}, {}
        for i, h in enumerate(HORIZONS):
            slope = 0.01 * (np.arange(layers - int(h)) - (layers - int(h) - 1) / 2)
            values = (base[i] + shift + gain * plus[i] + own.normal(0, 0.004) + slope).clip(0, 1)
            per_layer[name][h], hit[name][h] = values.tolist(), float(values.mean())
            exact[name][h] = hit[name][h] ** 2
    tokens = np.random.default_rng(0).integers(100, 900, 60)   # one held-out set for all
    domain = [DOMAINS[i % len(DOMAINS)] for i in range(60)]
    documents = {
        "domain": domain, "tokens": tokens.tolist(), "loss": (loss + shared.normal(0, 0.3, 60)).tolist(),
        "hit": {n: {h: (hit[n][h] + own.normal(0, 0.02, 60)).clip(0, 1).tolist() for h in HORIZONS} for n in predictors},
    }  # fmt: skip

    def curve(end):
        steps = range(100, 1500, 100)
        return [{"step": s, "lr": 3e-3, "train_loss": 1.0, "dev_hit": float(end - 0.1 * np.exp(-s / 250) + own.normal(0, 5e-4))} for s in steps]

    curves = {kind: curve(hit[kind]["2"]) for kind in ("linear", "ranking")}
    return {
        "arm": arm, "seed": seed, "config_hash": f"{1000 * seed + round(100 * gain):012x}", "lambda_pred": lambda_pred if gain else 0.0,
        "config": {}, "posthoc_config": {"ranking_loss": "margin"}, "val_loss": loss * (1 + 0.001 * gain) + 4 * shift, "router_entropy": 2.48, "router_entropy_fraction": 0.895, "top_k_mass": 0.31,
        "load_entropy": 0.975 + own.normal(0, 0.003), "largest_load": 0.11, "dead_experts": 0, "reuse": 0.33 - 0.01 * gain, "hidden_cosine": 0.93,
        "hit": hit, "exact_set": exact,
        "margin_over_token_id": {n: {h: hit[n][h] - hit["token_id"][h] for h in HORIZONS} for n in predictors if n not in ("token_id", "static")},
        "hit_per_layer": per_layer, "static_hit": hit["static"], "token_id_hit": hit["token_id"], "curves": curves,
        "converged": {"linear": True, "ranking": True}, "documents": documents,
        "terms_nats": {"lm": loss, "balance": 0.01} | ({"pred": 0.2} if gain else {}), "seconds": {"train": 800.0, "posthoc": 90.0},
        "tokens_per_second": 3600.0, "parameters": {"total": 5_300_000, "active": 1_600_000}, "provenance": {"commit": "0" * 40, "dirty": False},
    }  # fmt: skip


def study(seeds=(0, 1, 2), arms=None) -> list[dict]:
    """baseline, joint and an alternative for every seed."""
    arms = arms or {"baseline": 0.0, "joint": 1.0, "alternative": 1.3}
    return [measurement(arm, seed, gain=gain) for seed in seeds for arm, gain in arms.items()]


def finished(experiment="02_horizons", arms=None, profile="smoke"):
    """The results of an experiment as its notebook leaves them in the profile's outputs."""
    arms = arms or study()
    run = results.start(experiment, profile, {"seeds": [0, 1, 2]})
    effects = experiments.hit_effects(arms, "joint", "baseline", predictors=["linear", "ranking"])
    run.finish(arms, effects, gates=experiments.gates(arms))
    return run
