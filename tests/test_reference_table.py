"""The reference's routing has the properties that its published numbers speak of; its faults are variants of one machine."""

import numpy as np
import pytest

from predmoe import reference_table as rt
from predmoe import results

ACCURACIES = {"baseline-linear": 0.8, "joint-linear": 0.9}


@pytest.fixture(scope="module")
def traces():
    return {replacement: rt.routing(12, ACCURACIES, seed=0, replacement=replacement) for replacement in (True, False)}


@pytest.fixture(scope="module")
def rows():
    return rt.table({0: ACCURACIES, 1: ACCURACIES}, arms=("demand", *ACCURACIES, "oracle"), tokens=12, warmup=4, first_tokens=2, progress=False)


def test_experts_drawn_with_replacement_are_as_often_different_as_published(traces):
    assert rt.distinct(traces[True]) == pytest.approx(results.reference()["simulator"]["distinct"], abs=0.1)
    assert rt.distinct(traces[False]) == 8


@pytest.mark.parametrize("replacement, extra", [(False, 0.0), (True, 0.05)])
def test_a_predictor_names_each_true_expert_as_often_as_its_accuracy_says(traces, replacement, extra):
    """With replacement an expert that was drawn twice has two chances, so that a little more is found than the accuracy says."""
    trace = traces[replacement]
    for name, accuracy in ACCURACIES.items():
        guessed, true = trace.prediction(name, 1).experts_NLM[:, :-1], trace.experts_NLK[:, 1:]
        found = (true[..., :, None] == guessed[..., None, :]).any(-1).mean()
        assert accuracy - 0.02 <= found <= accuracy + extra + 0.02


def test_the_better_predictor_is_right_wherever_the_worse_one_is(traces):
    """Both see the same luck, so that arms are compared pair by pair."""
    trace = traces[False]
    true = trace.experts_NLK[:, 1:, :, None]
    right = {name: (true == trace.prediction(name, 1).experts_NLM[:, :-1, None, :]).any(-1) for name in ACCURACIES}
    assert (right["joint-linear"] | ~right["baseline-linear"]).all()


def test_near_misses_are_more_often_in_use_than_uniform_ones():
    def wrong_but_recent(near_misses):
        trace = rt.routing(12, {"p": 0.5}, seed=0, replacement=False, near_misses=near_misses)
        guessed, true, before = trace.prediction("p", 1).experts_NLM[1:, :-1], trace.experts_NLK[1:, 1:], trace.experts_NLK[:-1, 1:]
        wrong = ~(guessed[..., :, None] == true[..., None, :]).any(-1)
        return (guessed[..., :, None] == before[..., None, :]).any(-1)[wrong].mean()

    assert wrong_but_recent(True) > 2 * wrong_but_recent(False)


def test_a_routing_is_its_seed():
    a, b, c = (rt.routing(3, ACCURACIES, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(a.experts_NLK, b.experts_NLK) and not np.array_equal(a.experts_NLK, c.experts_NLK)


def test_the_published_speeds_come_out_of_a_short_run():
    """Two numbers were fitted; the speeds with prefetch, and the joint model's gain, were not."""
    found = rt.table({0: rt.published_accuracies()}, variants=["as published"], tokens=60, warmup=30, first_tokens=4, progress=False)
    beside = rt.beside_published(found).set_index(["quantity", "arm"]).ratio
    assert beside["tok_s"].to_numpy() == pytest.approx(np.ones(4), abs=0.03)
    assert beside["ttft_ms"].to_numpy() == pytest.approx(np.ones(4), abs=0.03)
    (gain,) = rt.effects(found, "joint-linear", "baseline-linear")
    assert gain["mean"] == pytest.approx(0.032, abs=0.01)


def test_an_oracle_waits_no_longer_than_demand_in_any_variant(rows):
    stall = rows.set_index(["variant", "seed", "arm"]).stall_ms.unstack()
    assert (stall["oracle"] <= stall["demand"] + 1e-9).all() and set(rows.variant) == set(rt.VARIANTS)


def test_the_engines_queue_keeps_and_promotes_what_the_variant_says(rows):
    """Unchecked, a queue that keeps stale guesses cancels none; one that drops them reads less. Promotion shortens the wait behind stale guesses; where
    they are dropped all that is still queued one layer ahead was demanded or has gone, so that it moves reads to the demands and no time."""
    mine = rows[rows.arm == "baseline-linear"]
    by = mine.assign(read_mb=mine.demand_mb + mine.prefetch_mb).groupby("variant")[["cancelled", "demand_mb", "read_mb", "stall_ms"]].mean()
    engine, promoting, expiring, both = (by.loc[f"4 engine's queue, {name}"] for name in ("unchecked", "promoting", "expiring", "both"))
    assert engine.cancelled == promoting.cancelled == 0 < min(expiring.cancelled, both.cancelled)
    assert max(expiring.read_mb, both.read_mb) < min(engine.read_mb, promoting.read_mb)
    assert promoting.stall_ms < engine.stall_ms and both.stall_ms == pytest.approx(expiring.stall_ms, rel=1e-12)
    assert both.demand_mb > expiring.demand_mb and both.read_mb == pytest.approx(expiring.read_mb, rel=1e-12)


def test_counting_waste_per_residence_changes_waste_alone(rows):
    by = rows[rows.arm == "baseline-linear"].set_index(["variant", "seed"])
    published, mended = by.loc["as published"], by.loc["2 waste per residence"]
    assert (published.tok_s == mended.tok_s).all() and not (published.wasted_mb == mended.wasted_mb).any()


def test_waste_by_an_ever_used_set_falls_with_the_run_and_per_residence_does_not():
    found = rt.waste_by_length({0: ACCURACIES}, [20, 60], arms=["baseline-linear"], progress=False).set_index("tokens")
    assert found.ever_mb[60] < found.ever_mb[20] and found.residence_mb[60] > found.residence_mb[20]
    means = found.reset_index().groupby(["arm", "tokens"])[["ever_mb", "residence_mb"]].mean().reset_index()
    assert "beyond the longest run of 60" in rt.say_waste(means, {"baseline-linear": 1.0})


def test_effects_are_paired_by_seed(rows):
    effect = rt.effects(rows, "joint-linear", "baseline-linear")[0]
    part = rows[rows.variant == effect["variant"]].pivot_table(index="seed", columns="arm", values="tok_s")
    assert effect["per_seed"] == pytest.approx((part["joint-linear"] / part["baseline-linear"] - 1).tolist())


def test_an_effect_says_on_whose_accuracies_it_is_simulated(rows):
    plain, ours = rt.effects(rows, "joint-linear", "baseline-linear")[0], rt.effects(rows, "joint-linear", "baseline-linear", whose=results.OURS)[0]
    assert "accuracies" not in plain and ours["accuracies"] == results.OURS and ours["name"] == f"{plain['name']}, our accuracies" and ours["mean"] == plain["mean"]


def test_a_fault_is_called_one_in_a_sentence():
    told = rt.say_mended([{"variant": name, "mean": 0.01} for name in ("as published", "6 one LRU per layer")], "It is")
    assert told.endswith(": as published +1.0%; fault 6 changed (one LRU per layer) +1.0%.")


def test_a_share_of_nothing_is_an_error_that_says_what_to_do(rows):
    nothing = rows.assign(wasted_mb=0.0)
    with pytest.raises(results.ResultError, match="baseline-linear has a wasted_mb of 0 .* replay more tokens than 8"):
        rt.effects(nothing, "joint-linear", "baseline-linear", "wasted_mb")


def test_our_accuracies_are_those_of_one_model_seed():
    found = results.load("cpu", "02_horizons")
    mine = rt.our_accuracies(found, 1)
    (row,) = (row for row in found["arms"] if row["arm"] == "joint" and row["seed"] == 1)
    assert mine["joint-ranking"] == row["hit"]["ranking"]["1"] and set(mine) == set(rt.ARMS) - {"demand", "oracle"}
    with pytest.raises(results.ResultError, match="has no seed 99 .* --profile .* --only 02"):
        rt.our_accuracies(found, 99)


def test_records_hold_what_claims_ask_for(rows):
    records = rt.arm_records(rows[rows.variant == "all mended"])
    assert results.values_by_seed(records, "joint-linear", "tok_s").keys() == {0, 1}


def test_effects_of_several_metrics_stand_side_by_side(rows):
    found = {metric: rt.effects(rows, "joint-linear", "baseline-linear", metric) for metric in ("tok_s", "wasted_mb")}
    side = rt.by_variant(found, {"joint-linear": "linear"})
    assert len(side) == 2 * len(rt.VARIANTS) and side.tok_s[0] == pytest.approx(100 * found["tok_s"][0]["per_seed"][0])


def test_every_access_is_resident_in_flight_or_missing(rows):
    shown = rt.levels(rows, "all mended, unchecked").set_index("arm")
    assert (shown[["resident", "in_flight", "missing"]].sum(axis=1) == 1).all() and (shown.loc["demand", ["in_flight", "late", "prefetch_mb"]] == 0).all()


def test_ranked_guesses_put_the_right_ones_first():
    trace = rt.routing(6, ACCURACIES, seed=0, replacement=False, ranked=True)
    right = (trace.prediction("joint-linear", 1).experts_NLM[:, :-1, :, None] == trace.experts_NLK[:, 1:, None, :]).any(-1)
    assert (right[..., 1:] <= right[..., :-1]).all()


@pytest.mark.slow
def test_calibration_finds_skew_and_reuse_again():
    skew, reuse = rt.calibrate()
    assert skew == pytest.approx(rt.SKEW, abs=0.02) and reuse == pytest.approx(rt.REUSE, abs=0.02)
