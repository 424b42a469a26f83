"""Sizes: gains and trends by hand, selections by width and experts, the reference's points, and sentences that follow the slope."""

import numpy as np
import pytest
from fake_measurements import study
from fake_sizes import MEASURED, TABLE, sized

from predmoe import config, experiments, results, scaling, studies


def test_gains_are_paired_within_a_size():
    effects = {(e["variation"], e["horizon"]): e for e in experiments.variation_effects(MEASURED)}
    means = TABLE.groupby(["arm", "horizon"]).gain.mean()
    assert all(means[key] == pytest.approx(effect["mean"]) for key, effect in effects.items()) and len(effects) == 15
    row = TABLE.iloc[0]
    assert row.of_the_rest == pytest.approx(row.gain / (1 - row.baseline)) and row.tokens_per_active == pytest.approx(1000 * 16 * 128 / 2_000_000)


def test_sizes_of_other_experts_stay_out_of_the_trend_and_of_other_widths_out_of_the_count():
    assert set(scaling.same_experts(TABLE).arm) == {"as it stands", "small", "large"}
    counted = scaling.same_width(TABLE, ["8 experts", "64 experts"])
    assert list(dict.fromkeys(counted.routing)) == ["8, top-2", "16, top-2", "64, top-8"] and set(counted.hidden_size) == {64}
    assert set(scaling.same_width(TABLE, []).arm) == {"as it stands"}


@pytest.mark.parametrize("slope, verb", [(0.01, "grows"), (-0.01, "shrinks"), (0.0, "does not measurably change")])
def test_the_trend_by_hand(slope, verb):
    part = scaling.same_experts(TABLE)
    noise = np.random.default_rng(0).normal(0, 0.001, len(part))
    part = part.assign(gain=0.02 + slope * np.log2(part.active / 1e6) + noise)
    found = scaling.trends(part, [4])
    x, y = np.log2(part[part.horizon == 4].active), part[part.horizon == 4].gain
    assert found[0]["mean"] == pytest.approx(np.polyfit(x, y, 1)[0]) and found[0]["n"] == 7
    assert found[0]["ci95"][0] < slope < found[0]["ci95"][1]
    assert f"the gain {verb}" in scaling.say_sizes(part, found)[1]


def test_the_trends_interval_covers_95_percent():
    part = scaling.same_experts(TABLE)
    part = part[part.horizon == 4]
    rng, covered = np.random.default_rng(1), 0
    for _ in range(1500):
        low, high = scaling.trends(part.assign(gain=0.01 * np.log2(part.active) + rng.normal(0, 0.01, len(part))), [4])[0]["ci95"]
        covered += low <= 0.01 <= high
    assert abs(covered / 1500 - 0.95) < 0.02


def test_a_single_size_has_no_trend():
    only = scaling.by_size(sized("as it stands", active=2_000_000), "ranking")
    assert scaling.trends(only, [1, 4]) == [] and "tell nothing of a trend" in scaling.say_sizes(only, [])[-1]


def test_single_seeds_are_called_exploratory():
    said = scaling.say_sizes(scaling.same_experts(TABLE), scaling.trends(scaling.same_experts(TABLE), [1, 2, 4]))
    assert "at 4.00M (a single seed, exploratory)" in said[0] and "at 2.00M (3 seeds)" in said[0] and "exploratory" in said[1]
    told = scaling.say_experts(scaling.same_width(TABLE, ["8 experts"]))
    assert "with 16, top-2, 3 seeds" in told and "exploratory" in told


def test_the_stronger_control_is_counted_by_horizon():
    arms = study(arms={"baseline": 0.0, "joint": 1.0})
    effects = experiments.hit_effects(arms, "joint", "baseline", predictors=["ranking", "linear"])
    by = {(e["predictor"], e["horizon"]): e["mean"] for e in effects}
    smaller = sum(by["ranking", h] < by["linear", h] for h in (1, 2, 4))
    assert f"smaller at {smaller} of 3 horizons" in scaling.say_control(effects)


def test_the_references_points():
    ranking, linear = scaling.reference_points("ranking"), scaling.reference_points("linear")
    assert set(ranking.arm) == {"reference, tier A"} and ranking.gain.tolist() == [0.029, 0.043, 0.052] and set(ranking.active) == {99e6}
    lower = linear[linear.arm != "reference, tier A"]
    assert set(lower.arm) == {"reference, tier B, 0.3 against 0.03"} and lower.gain.tolist() == pytest.approx([0.044, 0.055, 0.062])
    assert scaling.reference_points("next_router").empty


def test_the_table_for_reading_has_a_row_per_size_and_horizon():
    table = scaling.sizes_table(TABLE)
    assert len(table) == 15 and table["seeds"].tolist().count(1) == 3
    assert table["gain (points)"].iloc[0] == pytest.approx(100 * TABLE[(TABLE.arm == "as it stands") & (TABLE.horizon == 1)].gain.mean())


# --- equal tokens --------------------------------------------------------------------------------------------------------

def tokens_per_active(run):
    from predmoe.model import count_parameters

    return run.train.steps * run.train.batch_size * run.model.context / count_parameters(run.model)["active"]


PARAMETERS = {
    "tier": "cpu", "seeds": [0, 1], "horizons": [1, 2, 4], "lambda_pred": 0.3, "train": {"threads": 2}, "data": {},
    "sizes": [{"name": "narrow", "seeds": 1, "model": {"hidden_size": 48, "expert_size": 48}}],
    "experts": [{"name": "many", "seeds": 2, "model": {"num_experts": 64, "top_k": 8, "expert_size": 24}, "train": {"batch_size": 8, "lr": 2e-3}}],
}  # fmt: skip


def test_every_size_has_as_many_tokens_per_active_parameter_and_the_same_share_of_warm_up():
    groups = studies.ranking_seeds(PARAMETERS)
    assert list(groups) == [studies.AS_IT_STANDS, "narrow", "many"] and [len(pairs) for pairs in groups.values()] == [4, 2, 4]
    runs = [run for pairs in groups.values() for _, run in pairs]
    spans = [tokens_per_active(run) for run in runs]
    assert spans == pytest.approx([spans[0]] * len(spans), rel=2e-3)
    assert all(run.train.warmup_steps / run.train.steps == pytest.approx(0.1, rel=0.02) and run.train.threads == 2 for run in runs)
    many = groups["many"][0][1]
    assert (many.train.batch_size, many.train.lr, many.model.num_experts) == (8, 2e-3, 64)
    assert len({run.hash for run in runs}) == len(runs)


def test_a_size_with_no_seeds_is_left_out():
    many = PARAMETERS["experts"][0] | {"seeds": 0}
    assert list(studies.ranking_seeds(PARAMETERS | {"experts": [many]})) == [studies.AS_IT_STANDS, "narrow"]


def test_the_main_size_is_the_tier_itself_and_shared_with_the_other_notebooks():
    mine = {run.hash for _, run in studies.ranking_seeds(PARAMETERS)[studies.AS_IT_STANDS]}
    assert mine == {run.hash for _, run in studies.pair(PARAMETERS)["models"]}


@pytest.mark.parametrize("size, words", [
    ({"name": "x", "model": {"hidden": 48}}, "unknown parameter hidden"), ({"model": {"hidden_size": 48}}, "name=None"),
    ({"name": "x", "model": {"hidden_size": 47}}, "hidden_size=47"), ({"name": "x", "modl": {}}, "unknown section 'modl'"),
])  # fmt: skip
def test_a_size_is_checked(size, words):
    with pytest.raises(config.ConfigError, match=words):
        studies.ranking_seeds(PARAMETERS | {"sizes": [size]})


def test_measurements_of_a_size_meet_the_schema_under_their_own_names(tmp_path, monkeypatch):
    monkeypatch.setenv("PREDMOE_OUTPUTS", str(tmp_path))
    rows = [row | {"arm": f"{row['arm']}, {name}"} for name, arms in MEASURED.items() for row in arms]
    found = scaling.trends(scaling.same_experts(TABLE), [1, 2, 4])
    results.start("14_ranking_seeds", "smoke", {}).finish(rows, found)
    loaded = results.load("smoke", "14_ranking_seeds")
    assert loaded["arms"][0]["parameters"]["active"] == 2_000_000 and len(loaded["effects"]) == 3
