"""Backbone and head told apart: the parts add up, halves and domains by hand, both error bars, and sentences that follow the data."""

import copy

import numpy as np
import pandas as pd
import pytest
from fake_measurements import study

from predmoe import experiments, isolation, results

ARMS = study(arms={"baseline": 0.0, "joint": 1.0})
EFFECTS = isolation.effects(ARMS, [1, 2, 4])


def of(name, found=EFFECTS):
    return [e for e in found if e["predictor"] == name]


def test_six_arms_are_the_six_readings_with_every_seed_and_horizon():
    table = isolation.six_arms(ARMS)
    assert list(dict.fromkeys(table.arm)) == list(isolation.READINGS) and len(table) == 6 * 3 * 3
    joint = next(row for row in ARMS if row["arm"] == "joint" and row["seed"] == 1)
    value = table[(table.arm == "joint") & (table.seed == 1) & (table.horizon == 4)].hit.item()
    assert value == joint["hit"]["cotrained"]["4"]


def test_backbone_and_coadaptation_add_up_to_the_whole_in_every_seed():
    for whole, backbone, heads in zip(of(isolation.WHOLE), of(isolation.BACKBONE), of(isolation.COADAPTATION)):
        assert np.add(backbone["per_seed"], heads["per_seed"]) == pytest.approx(whole["per_seed"])


def test_each_part_follows_its_own_reading():
    """A co-trained head 3 points better than the fresh one is co-adaptation; the backbone's part does not move."""
    arms = copy.deepcopy(ARMS)
    for row in arms:
        if row["arm"] == "joint":
            row["hit"]["cotrained"] = {h: value + 0.03 for h, value in row["hit"]["linear"].items()}
    found = isolation.effects(arms, [1, 2, 4])
    assert [e["mean"] for e in of(isolation.COADAPTATION, found)] == pytest.approx([0.03] * 3)
    assert [e["mean"] for e in of(isolation.BACKBONE, found)] == [e["mean"] for e in of(isolation.BACKBONE)]
    said = isolation.say_parts(found)
    assert len(said) == 3 and all("+3.0 points [+3.0, +3.0] co-adaptation (3 seeds)" in sentence for sentence in said)


def test_contrasts_of_the_reference_are_differences_of_its_levels():
    known = isolation.reference_contrasts()
    assert known[isolation.COADAPTATION, 1] == pytest.approx(0.888 - 0.890) and known[isolation.STRONGEST, 4] == pytest.approx(0.847 - 0.795)
    assert known[isolation.WHOLE, 2] == pytest.approx(known[isolation.BACKBONE, 2] + known[isolation.COADAPTATION, 2])
    assert isolation.reference_levels()["post-hoc ranking MLP on the frozen joint model", 2] == 0.907
    assert not any(name == "baseline" for name, _ in isolation.reference_levels())   # it does not give the router's floor


def test_ours_stand_beside_the_references():
    table = isolation.compared_table(EFFECTS).set_index(["difference", "h"])
    assert len(table) == len(EFFECTS) and table.reference[isolation.STRONGEST, 4] == "+5.2 points" and table.reference[isolation.COADAPTATION, 4] == "+0.0 points"
    for e in of(isolation.STRONGEST):
        inside = e["ci95"][0] <= isolation.reference_contrasts()[isolation.STRONGEST, e["horizon"]] <= e["ci95"][1]
        assert table["interval contains it"][isolation.STRONGEST, e["horizon"]] == ("yes" if inside else "no")


def test_gains_by_layer_and_domain_average_to_the_gain():
    layers = isolation.layer_gains(ARMS)
    means = layers[layers.arm == "ranking MLP"].groupby(["seed", "horizon"]).gain.mean()
    for effect in of(isolation.STRONGEST):
        assert [means[seed, effect["horizon"]] for seed in effect["seeds"]] == pytest.approx(effect["per_seed"], abs=1e-9)
    assert set(layers.arm) == {"linear", "ranking MLP", "co-adaptation"} and set(isolation.domain_gains(ARMS).arm) == set(layers.arm)


def test_halves_by_hand():
    """Five source layers, gains 1, 2, 9, 4, 5 points: later 4.5, earlier 1.5, the middle one left out."""
    rows = [{"arm": "linear", "seed": seed, "horizon": 1, "layer": layer, "gain": 0.01 * gain} for seed in range(3) for layer, gain in enumerate((1, 2, 9, 4, 5), start=1)]
    (effect,) = isolation.halves(pd.DataFrame(rows))
    assert effect["mean"] == pytest.approx(0.03) and effect["n"] == 3
    assert isolation.halves(pd.DataFrame([row for row in rows if row["layer"] == 1])) == []


def test_domains_are_compared_seed_by_seed_and_an_unknown_one_is_named():
    gains = isolation.domain_gains(ARMS)
    found = isolation.domain_contrast(gains, ["code", "speeches"])
    part = gains[(gains.arm == "linear") & (gains.horizon == 2) & (gains.seed == 1)].set_index("domain").gain
    effect = next(e for e in found if e["predictor"] == "linear" and e["horizon"] == 2)
    assert effect["per_seed"][1] == pytest.approx(part["code"] - part["speeches"])
    with pytest.raises(results.ResultError, match="'poems' is not in the held-out text; it has code, encyclopaedia"):
        isolation.domain_contrast(gains, ["code", "poems"])


def test_both_error_bars_stand_under_one_another():
    within = isolation.within_seeds(ARMS, [isolation.STRONGEST, isolation.COADAPTATION])
    assert len(within) == 2 * 3 * 3 and all(e["method"] == "bootstrap over 60 held-out documents" for e in within)
    same = experiments.document_effects(ARMS, "joint", "baseline", predictor="ranking")
    assert [e["ci95"] for e in of(isolation.STRONGEST, within)] == [e["ci95"] for e in same]
    table = isolation.both_intervals(EFFECTS, within)
    group = table[table.group == f"{isolation.STRONGEST}, h = 4"]
    assert group.name.tolist() == ["over 3 seeds", "seed 0, over documents", "seed 1, over documents", "seed 2, over documents"]
    assert set(table.group) == {f"{name}, h = {h}" for name in (isolation.STRONGEST, isolation.COADAPTATION) for h in (1, 2, 4)}
    assert "over 3 seeds and, within one seed, over documents" in isolation.say_widths(EFFECTS, within)


def test_one_seed_has_no_interval_over_seeds_and_says_so():
    arms = study(seeds=(0,), arms={"baseline": 0.0, "joint": 1.0})
    found, within = isolation.effects(arms, [1, 4]), isolation.within_seeds(arms, [isolation.STRONGEST])
    assert "exploratory" in isolation.say_parts(found)[0] and "exploratory" in isolation.say_where(isolation.halves(isolation.layer_gains(arms)), "later - earlier")[0]
    assert isolation.say_widths(found, within).startswith("One seed gives no interval over seeds")
    table = isolation.both_intervals(found, within)
    assert table[table.name.str.contains("exploratory")].low.isna().all()


@pytest.mark.parametrize("means, words", [((0.02, 0.0), "excludes zero at h = 1"), ((0.0, 0.0), "excludes zero at no horizon"), ((-0.02, 0.02), "excludes zero at h = 1, 4")])
def test_where_the_interval_excludes_zero_is_said(means, words):
    found = [{"predictor": "linear", "horizon": h, "mean": m, "ci95": [m - 0.01, m + 0.01], "n": 3} for h, m in zip((1, 4), means)]
    assert words in isolation.say_where(found, "late - early")[0]
