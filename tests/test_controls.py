"""07 and 09 from measurements: paired effects of locality, what is known when, and a gain split by hand into sharpness and structure."""

import numpy as np
import pytest
from fake_locality import BELADY, controls as study
from fake_measurements import measurement

from predmoe import controls, experiments, results

ARMS = study()


def ladder(seed, entropy, hit, arm):
    """A measurement with these numbers at every horizon."""
    row = measurement(arm, seed, gain=0.0) | {"router_entropy": entropy, "router_entropy_fraction": entropy / 3}
    row["hit"]["ranking"] = dict.fromkeys(("1", "2", "4"), hit)
    return row


# --- locality ---------------------------------------------------------------------------------------------------------------

def test_an_effect_on_locality_is_the_paired_difference_and_is_corrected_over_the_measures():
    effects = controls.locality_effects(ARMS, "sticky 1")
    reuse = next(e for e in effects if e["metric"] == "locality.reuse")
    by_hand = [row["locality"]["reuse"] - base["locality"]["reuse"] for row, base in zip(*([r for r in ARMS if r["arm"] == arm] for arm in ("sticky 1", "baseline")))]
    assert reuse["per_seed"] == pytest.approx(by_hand) and reuse["mean"] == pytest.approx(0.1, abs=0.01)
    assert len(effects) == 4 + 6 and all(e["p_holm"] >= e["p"] for e in effects)
    assert all(e["p_holm"] is None for e in controls.locality_effects(study((0,)), "sticky 1"))


def test_cache_sizes_go_by_size_and_no_cache_is_above_the_optimum():
    assert controls.cache_sizes(ARMS) == ["1/8", "1/4", "1/2"] and controls.above_belady(ARMS) == []
    table = controls.cache_table(ARMS)
    assert sorted(table["share"].unique()) == [0.125, 0.25, 0.5] and set(table.policy) == {"lru", "belady"}
    wrong = study((0,))
    wrong[1]["locality"]["lru"]["1/4"] += 2 * BELADY
    assert controls.above_belady(wrong) == ["joint, seed 0, 1/4"]


@pytest.mark.parametrize("arm, words", [("sticky 1", "sticky 1 is more local by"), ("joint", "joint is less local by")])
def test_the_sentence_on_locality_follows_the_data(arm, words):
    sentence = controls.say_locality(controls.locality_effects(ARMS, arm))
    assert words in sentence and "switch rate" in sentence.split("measurably")[0] and "3 seeds" in sentence
    assert "single seed, exploratory" in controls.say_locality(controls.locality_effects(study((0,)), arm))


def test_no_difference_is_called_one():
    rows = [row | {"locality": ARMS[0]["locality"] | {"reuse": 0.3 + 0.01 * (row["seed"] - 1) * (row["arm"] == "joint")}} for row in ARMS]
    assert "not measurably different by reuse" in controls.say_locality([e for e in controls.locality_effects(rows, "joint") if e["metric"] == "locality.reuse"])


def test_the_sweep_is_told_by_weight_on_goal_lookahead_and_loss():
    sentence = controls.say_sticky(ARMS, [0.3, 1.0])
    assert "at weight 0.3 reuse +" in sentence and "at weight 1 reuse +" in sentence and "h = 4 -" in sentence and "validation loss" in sentence


def test_sources_go_from_the_latest_to_the_earliest_and_carry_the_measured_values():
    table = controls.sources(ARMS)
    assert len(table.measure.unique()) == 6 and len(table) == 6 * len(ARMS)
    one = table[(table.arm == "joint") & (table.seed == 1)].set_index("measure").value
    row = next(row for row in ARMS if row["arm"] == "joint" and row["seed"] == 1)
    assert one["pre-attention, same layer: ranking MLP"] == row["locality"]["pre_attention"]["ranking"]
    assert one["1 layer ahead: its router"] == row["hit"]["next_router"]["1"] and one["next token, same layer: same experts"] == row["locality"]["reuse"]
    assert controls.say_sources(ARMS, "joint").count("%") == 6
    effects = {e["metric"]: e["mean"] for e in controls.source_effects(ARMS, "joint")}
    assert effects["locality.next_token.previous"] == pytest.approx(-0.03, abs=0.01)


def test_fits_that_stopped_are_named():
    assert controls.say_fits(ARMS) == f"All {2 * len(ARMS)} fits of same-layer predictors converged by the same rule."
    rows = study((0,))
    rows[0]["locality"]["converged"]["next_token"] = False
    assert "1 of 10 fits" in controls.say_fits(rows) and "baseline, seed 0, next_token" in controls.say_fits(rows)


# --- longer, sharper ------------------------------------------------------------------------------------------------------------

def test_the_gain_is_split_as_by_hand():
    """Ladder: entropy 2.0 -> 0.80, 1.0 -> 0.90. Joint at entropy 1.5 and 0.93: sharpening gives 0.85, so 0.05 of 0.13 is sharpness."""
    arms = [row for seed in (0, 1, 2) for row in (
        ladder(seed, 2.0, 0.80, "baseline"), ladder(seed, 1.0, 0.90, "entropy 0.01"), ladder(seed, 1.5, 0.93 + 0.01 * seed, "joint"))]  # fmt: skip
    records = controls.sharpened(arms)
    assert [record["hit"]["ranking"]["4"] for record in records] == pytest.approx([0.85] * 3) and all(record["inside"] for record in records)
    parts = controls.sharpness_effects(arms)
    assert [(e["part"], e["horizon"]) for e in parts] == [(part, h) for part in ("sharpness", "structure") for h in (1, 2, 4)]
    assert [e["mean"] for e in parts] == pytest.approx([0.05] * 3 + [0.09] * 3) and parts[3]["per_seed"] == pytest.approx([0.08, 0.09, 0.10])
    sentences = controls.say_sharpness(arms, parts)
    assert "lies on the ladder on every seed" in sentences[0] and "64% of the gain (3 seeds)" in sentences[1]


@pytest.mark.parametrize("entropy, hit", [(2.5, 0.80), (0.2, 0.90)])
def test_beyond_the_ladder_the_nearest_rung_stands_and_it_is_said(entropy, hit):
    arms = [ladder(0, 2.0, 0.80, "baseline"), ladder(0, 1.0, 0.90, "entropy 0.01"), ladder(0, entropy, 0.95, "joint")]
    (record,) = controls.sharpened(arms)
    assert record["hit"]["ranking"]["1"] == hit and not record["inside"]
    sentences = controls.say_sharpness(arms, controls.sharpness_effects(arms))
    assert "On 1 of 1 seeds" in sentences[0] and "a single seed, exploratory" in sentences[1]


def test_seeds_without_a_ladder_are_left_out_and_none_at_all_is_an_error():
    arms = [ladder(seed, 2.0, 0.8, "baseline") for seed in (0, 1)] + [ladder(seed, 1.5, 0.9, "joint") for seed in (0, 1)]
    with pytest.raises(results.ResultError, match="no ladder to interpolate"):
        controls.sharpened(arms)
    assert [record["seed"] for record in controls.sharpened([*arms, ladder(1, 1.0, 0.9, "entropy 0.01")])] == [1]
    assert {e["n"] for e in controls.sharpness_effects([*arms, ladder(1, 1.0, 0.9, "entropy 0.01")])} == {1}


def test_growth_is_the_difference_of_the_gains_over_the_seeds_of_both_lengths():
    arms = [ladder(seed, 2.0, hit, arm) for seed in (0, 1, 2) for arm, hit in (("baseline", 0.80), ("joint", 0.85))]
    arms += [ladder(seed, 2.0, hit, arm) for seed in (0, 1) for arm, hit in (("baseline 4x", 0.82), ("joint 4x", 0.89 + 0.01 * seed))]
    grown = controls.growth(arms, 4)
    assert [e["per_seed"] for e in grown] == [pytest.approx([0.02, 0.03])] * 3 and grown[0]["n"] == 2
    lengths = controls.by_length(arms, 4)
    assert [e["n"] for e in lengths] == [3] * 3 + [2] * 3 and lengths[3]["mean"] == pytest.approx(0.075) and "4 times" in lengths[3]["variation"]
    assert experiments.forest_table(lengths).group.tolist() == ["as it stands"] * 3 + ["4 times the tokens"] * 3


def test_the_reference_stands_above_ours():
    table = controls.beside_reference(ARMS, "sticky")
    assert table.arm.tolist() == ["baseline", "sticky 0.3", "sticky 1", "sticky 3", "baseline", "sticky 0.3", "sticky 1"]
    assert table["h = 1"].iloc[0] == 0.822 and table["h = 4"].iloc[4] == pytest.approx(np.mean([r["hit"]["linear"]["4"] for r in ARMS if r["arm"] == "baseline"]))
