"""Sweeps and maps are tables of replays; words follow the tables."""

import numpy as np
import pandas as pd
import pytest

from predmoe import reference_table, results, sensitivity, traces
from predmoe.traces import ABSENT

BY_HORIZON = {"joint-ranking": {1: 0.93, 2: 0.9}}


def test_guesses_moved_to_another_horizon_are_the_same_guesses_of_the_same_layer():
    trace = traces.synthetic(tokens=5, layers=6, num_experts=16, top_k=2, predictors={"p": traces.Accuracy(recall={1: 0.8})})
    one = trace.prediction("p", 1)
    for moved in sensitivity.at_horizons(one, [1, 2, 4], 4):
        h = moved.horizon
        for layer in range(h, 6):
            assert np.array_equal(moved.experts_NLM[:, layer - h, :2], one.experts_NLM[:, layer - 1])
        assert (moved.experts_NLM[:, 6 - h :] == ABSENT).all() and (moved.experts_NLM[..., 2:] == ABSENT).all()
        traces.schema.check_prediction(moved, trace.meta, lambda n, l: f"{n}, {l}")


def test_the_boundary_is_where_the_gain_crosses_zero():
    frame = pd.DataFrame([
        {"guard": "none", "horizon": 1, "gb_per_s": 5.0, "recall": recall, "precision": precision, "gain": gain, "issued": 9}
        for recall, gains in {0.2: (-3, -1, 1), 0.5: (1, 2, 3), 0.8: (-3, -2, -1)}.items() for precision, gain in zip((0.2, 0.4, 0.6), gains)
    ])  # fmt: skip
    assert sensitivity.boundary(frame).precision.tolist() == pytest.approx([0.5, 0.0, np.inf])
    told = sensitivity.say_map(frame, "none")
    assert "harms in 5 of 9" in told and "every recall from 0.2 to 0.8 and every precision from 0.2 to 0.6, bad ones too" in told


def test_a_grid_gains_against_its_own_disk_and_cache():
    found = sensitivity.grid(BY_HORIZON, latencies=[0.1], bandwidths=[3.5, 12.0], slots=[26], horizons=[1, 2], budgets=[0, 2], guards=["none", "window"], tokens=6, warmup=3,
                             seed=0, progress=False)  # fmt: skip
    assert len(found) == 2 * (1 + 2 * 2 * 2) and (found[found.policy == "demand"].gain == 0).all()
    best = sensitivity.best_settings(found, "joint-ranking")
    assert len(best) == 2 and (best.gain >= best.worst_gain).all()
    assert "2 disks and caches" in sensitivity.say_best(best) and "of 8 settings" in sensitivity.say_worst(found, "joint-ranking")
    harmed = found.assign(gain=found.gain.where(found.guard != "window", -0.03))
    told = sensitivity.say_worst(harmed, "joint-ranking")
    assert "one good predictor" in told and told.endswith("in 8 of 8 settings with it, by up to -3.0%.")


def test_nothing_can_be_gained_where_no_guess_is_allowed_to_start():
    """At 2 GB/s a read takes longer than a layer: the guard holds everything back one layer ahead, not two."""
    found = sensitivity.gain_map(recalls=[0.9], precisions=[0.9], horizons=[1, 4], bandwidths=[2.0], guards=["window"], latency_ms=0.1, slots=26, tokens=6, warmup=3, seed=0,
                                 progress=False)  # fmt: skip
    by = found.set_index("horizon")
    assert by.gain[1] == by.issued[1] == 0 and by.gain[4] > 0


def test_what_is_read_longer_than_a_layer_does_not_fit():
    rows = sensitivity.advantage({s: {"baseline-linear": 0.7, "joint-linear": 0.9} for s in (0, 1)}, bandwidths=[3.5, 5.0], variants=["as published"], tokens=8, warmup=4, progress=False)
    assert rows.set_index("gb_per_s").fits.to_dict() == {3.5: False, 5.0: True}
    assert (rows[~rows.fits].gain == 0).all() and (rows[rows.fits].gain > 0).all()
    effects = sensitivity.advantage_effects(rows, results.OURS)
    assert "not tested" in sensitivity.say_verdicts(effects, "as published", {"fits": [0.029, 0.032], "beyond_gb_per_s": 3.5})
    three = [e | {"n": 3, "ci95": [0.01 + e["mean"], 0.02 + e["mean"]], "mean": 0.015 + e["mean"]} for e in effects]
    told = sensitivity.say_verdicts(three, "as published", {"fits": [0.00029, 0.00032], "beyond_gb_per_s": 3.5})
    assert told.startswith("With our accuracies, as published: ") and "more than twofold: 5 GB/s); at 3.5 GB/s" in told and "is there: 3.5 GB/s)" in told
    records = sensitivity.with_gains([{"arm": "joint-linear", "seed": 0}, {"arm": "oracle", "seed": 0}], rows, 3.5)
    assert records[0]["gain_over_baseline"]["beyond"] == 0 and "gain_over_baseline" not in records[1]


def test_the_first_token_of_a_prompt_reads_more_than_one_token():
    rows = sensitivity.waiting(BY_HORIZON, prompt=4, tokens=1, sequences=2, disk=reference_table.DISK, cache=reference_table.Cache(slots=26, scope="layer", streaming=True),
                               guard="window", seed=0)  # fmt: skip
    ttft = rows.set_index("arm").ttft_ms
    assert ttft["demand"] > 4000 and ttft["oracle"] <= ttft["joint-ranking"] <= ttft["demand"]
    assert "a prompt of 4 tokens" in sensitivity.say_prompt(rows, "joint-ranking")
