"""The simulator's figures hold what they promise: units on the axes, marks that differ without colour, nothing cut off, small files."""

import functools
import itertools

import numpy as np
import pandas as pd
import pytest
from figures import cut_off

from predmoe import plots_simulator as plots
from predmoe import results, traces
from predmoe.simulator import Cache, Compute, Disk, Prefetch, replay


def arms():
    return pd.DataFrame([{"set": name, "arm": arm, "seed": seed, "tok_s": 1 + 0.1 * i + 0.01 * seed, "wasted_mb": 9.0 - i} for name in ("published", "ours")
                         for i, arm in enumerate(("demand", "joint-linear", "oracle")) for seed in range(3)])  # fmt: skip


def curves():
    return pd.DataFrame([{"model": model, "policy": policy, "share": share, "hit_rate": min(1.0, share + 0.05 * i)} for model in "abc"
                         for i, policy in enumerate(plots.POLICY_LOOKS) for share in (0.1, 0.5, 0.9)])  # fmt: skip


def models():
    return pd.DataFrame([{"model": model, "source": source, "share": share, "tok_s": 1 + i + share, "wasted_mb": i} for model in ("baseline", "joint")
                         for i, source in enumerate(("demand", "linear", "ranking", "next_router", "oracle")) for share in (0.25, 0.5)])  # fmt: skip


def engine():
    tokens = np.arange(1, 41)
    return pd.DataFrame({"token": tokens, "half": np.where(tokens <= 20, "fitted", "predicted"), "measured_ms": 200 + 30 * np.sin(tokens), "predicted_ms": 190 + 25 * np.sin(tokens),
                         "slow": tokens % 13 == 0})  # fmt: skip


def lanes():
    trace = traces.synthetic(tokens=6, layers=4, num_experts=16, top_k=2)
    settings = dict(cache=Cache(slots=8), disk=Disk(gb_per_s=0.5), compute=Compute(attention_ms=1.0), timeline=(3, 5))
    return {"no prefetch": replay(trace, **settings).timeline(), "oracle": replay(trace, **settings, prefetch=Prefetch()).timeline()}


def machines():
    return pd.DataFrame([{"machine": f"{16 * i} GB", "hit_published": 0.1 * i, "hit_low": 0.08 * i, "hit_high": 0.15 * i, "tok_s_published": 0.1 * i, "tok_s_low": 0.2, "tok_s_high": 0.4}
                         for i in range(1, 6)])  # fmt: skip


def atlas():
    return pd.DataFrame([{"horizon": h, "gb_per_s": disk, "recall": r, "precision": p, "gain": 0.4 * p * r - 0.1 * h / disk} for h, disk, r, p in
                         itertools.product((1, 2, 4), (2.0, 5.0, 12.0), (0.2, 0.5, 0.9), (0.1, 0.4, 0.7, 1.0))])  # fmt: skip


def bandwidth():
    return pd.DataFrame([{"variant": name, "seed": seed, "gb_per_s": disk, "read_ms": 19 / disk, "gain": 0.03 * (disk > 4) + 0.001 * seed} for name in ("as published", "all mended")
                         for seed in range(3) for disk in (2.0, 3.5, 5.0, 12.0)])  # fmt: skip


def best():
    return pd.DataFrame([{"latency_ms": latency, "gb_per_s": disk, "slots": slots, "guard": "window", "horizon": 2, "budget": 4, "gain": 0.01 * disk - 0.02, "worst_gain": -0.2}
                         for latency, disk, slots in itertools.product((0.1, 0.5), (2.0, 3.5, 5.0, 12.0, 25.0), (13, 26))])  # fmt: skip


def overfetch():
    return pd.DataFrame([{"gb_per_s": disk, "horizon": h, "budget": m, "guard": guard, "gain": 0.1 * h - 0.01 * m} for disk, h, m, guard in
                         itertools.product((2.0, 12.0), (1, 2, 4), (0, 4, 8), ("none", "window"))])  # fmt: skip


SENSITIVITY = {"fits": [0.029, 0.032], "beyond": 0.0, "beyond_gb_per_s": 3.5}
FIGURES = {
    "arms": lambda: plots.arms(arms(), {"tok_s": {"oracle": 1.2}}, {"tok_s": "tok/s", "wasted_mb": "wasted (MB/token)"}),
    "hit_curves": lambda: plots.hit_curves(curves()), "model_curves": lambda: plots.model_curves(models()), "engine_fit": lambda: plots.engine_fit(engine()),
    "timeline": lambda: plots.timeline(lanes()), "published_points": lambda: plots.published_points(machines()), "gain_map": lambda: plots.gain_map(atlas()),
    "bandwidth_gain": lambda: plots.bandwidth_gain(bandwidth(), SENSITIVITY, 4.0), "best_settings": lambda: plots.best_settings(best()),
    "overfetch": lambda: plots.overfetch(overfetch(), {"none": "no guard", "window": "guarded"}),
}  # fmt: skip


@functools.cache
def drawn(name):
    return FIGURES[name]()


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_labelled_and_nothing_is_cut_off(name):
    figure = drawn(name)
    seen = [ax for ax in figure.axes if ax.get_visible()]
    assert any(ax.get_xlabel() for ax in seen) and any(ax.get_ylabel() or ax.get_yticklabels() for ax in seen)
    assert cut_off(figure) == []


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_small_enough_for_a_notebook_of_many(name):
    svg, png = results._render(drawn(name))
    assert len(png) < 120_000 and len(svg) < 400_000


def test_the_boundary_is_drawn_where_gains_change_their_sign():
    figure = plots.gain_map(atlas())
    drawn = [any(type(c).__name__ == "QuadContourSet" for c in ax.collections) for ax in figure.axes[:9]]
    signs = [part.gain.min() < 0 < part.gain.max() for _, part in atlas().groupby(["horizon", "gb_per_s"])]
    assert drawn == signs and any(drawn)


def test_policies_differ_without_colour():
    looks = [(look["linestyle"], look["marker"]) for look in plots.POLICY_LOOKS.values()]
    assert len(set(looks)) == len(looks)
