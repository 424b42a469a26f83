"""How seeds differ: variances by hand, power against scipy and against simulation, and sentences that follow the table."""

import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from fake_measurements import study

from predmoe import spread


def two_arms(base, joint, losses=(5.0, 5.01, 5.02)):
    """One seed per value: hit@k of the ranking predictor at h = 4, and losses."""
    return [
        {"arm": arm, "seed": seed, "val_loss": losses[seed] + 0.001 * seed * (arm == "joint"), "hit": {"ranking": {"4": value}}}
        for arm, values in (("baseline", base), ("joint", joint)) for seed, value in enumerate(values)
    ]  # fmt: skip


def test_a_standard_deviation_and_its_interval_by_hand():
    # 1, 2, 3: std 1; chi-square with 2 degrees of freedom has quantiles 0.05064 and 7.3778
    assert spread.std_interval([1.0, 2.0, 3.0]) == pytest.approx((1.0, math.sqrt(2 / 7.3778), math.sqrt(2 / 0.05064)), rel=1e-3)


def test_the_interval_of_a_standard_deviation_covers_95_percent():
    rng = np.random.default_rng(0)
    covered = [low <= 2.0 <= high for _, low, high in (spread.std_interval(rng.normal(0, 2.0, 5)) for _ in range(4000))]
    assert abs(np.mean(covered) - 0.95) < 0.0125


@pytest.mark.parametrize("values", [[1.0], [1.0, math.nan]])
def test_too_little_for_a_standard_deviation_is_refused(values):
    with pytest.raises(ValueError, match="at least two finite"):
        spread.std_interval(values)


@pytest.mark.parametrize("groups, n, effect", [(1, 3, 1.0), (1, 10, 0.5), (2, 4, 1.5), (2, 30, 0.3), (1, 5, 0.0)])
def test_power_agrees_with_the_noncentral_t(groups, n, effect):
    free, shift = groups * (n - 1), effect / math.sqrt(groups / n)
    critical = scipy.stats.t.ppf(0.975, free)
    theirs = scipy.stats.nct.sf(critical, free, shift) + scipy.stats.nct.cdf(-critical, free, shift)
    assert spread.power(effect, 1.0, n, groups=groups) == pytest.approx(theirs, abs=1e-5)


def test_power_agrees_with_simulated_tests():
    rng = np.random.default_rng(1)
    x = rng.normal(0.9, 1.0, (20_000, 5))
    found = np.mean(scipy.stats.ttest_1samp(x, 0, axis=1).pvalue < 0.05)
    assert spread.power(0.9, 1.0, 5) == pytest.approx(found, abs=0.015)


def test_power_grows_with_seeds_to_one_and_is_always_a_number():
    found = [spread.power(0.02, 0.007, n) for n in range(2, 60)]
    assert np.all(np.diff(found) >= 0) and found[-1] == pytest.approx(1.0) and found[0] < 0.3


@pytest.mark.parametrize("groups", [1, 2])
def test_seeds_needed_are_the_fewest_that_reach_the_power(groups):
    n = spread.seeds_needed(0.01, 0.008, groups=groups)
    assert spread.power(0.01, 0.008, n, groups=groups) >= 0.8 > spread.power(0.01, 0.008, n - 1, groups=groups)
    assert spread.seeds_needed(0.0001, 0.01) is None and spread.seeds_needed(1.0, 0.01, groups=2) == 2


@pytest.mark.parametrize("n, std", [(1, 1.0), (3, 0.0)])
def test_power_of_nothing_is_refused(n, std):
    with pytest.raises(ValueError, match="n >= 2 and a positive"):
        spread.power(1.0, std, n)


def test_pairing_by_hand():
    """Base 0, 1, 2 and joint 0.5, 1.5, 2.6: variances 1 and 1.1033, differences 0.5, 0.5, 0.6 of variance 1/300."""
    row = spread.pairing(two_arms((0.0, 1.0, 2.0), (0.5, 1.5, 2.6)), ["ranking"], [4]).iloc[0]
    assert row.unpaired == pytest.approx(math.sqrt(1 + 1.10333), rel=1e-4) and row.paired == pytest.approx(math.sqrt(1 / 300), rel=1e-4)
    assert row.variance_left == pytest.approx(1 / 300 / 2.10333, rel=1e-4) and row.correlation > 0.99


@pytest.mark.parametrize("joint, helps", [((0.5, 1.5, 2.6), "so it narrows the interval at h = 4 (above"), ((2.5, 1.5, 0.4), "so it narrows the interval at no horizon (above")])
def test_the_sentence_says_where_pairing_does_not_help(joint, helps):
    assert helps in spread.say_pairing(spread.pairing(two_arms((0.0, 1.0, 2.0), joint), ["ranking"], [4]), "ranking")


def test_the_variance_of_a_paired_difference_is_that_of_both_less_twice_what_they_share():
    table = spread.pairing(study(range(6)), ["linear", "ranking"], [1, 2, 4])
    spreads = spread.spreads(study(range(6)), ["linear", "ranking"], [1, 2, 4]).set_index(["arm", "predictor", "horizon"])["std"]
    for row in table.itertuples():
        a, b = (spreads[arm, row.predictor, row.horizon] for arm in ("joint", "baseline"))
        assert row.paired**2 == pytest.approx(a**2 + b**2 - 2 * row.correlation * a * b)
        assert row.paired == pytest.approx(spreads[spread.DIFFERENCE, row.predictor, row.horizon])


def test_spreads_have_the_references_beside_them():
    table = spread.spreads(study(range(3)), ["linear"], [1, 2, 4])
    assert table[(table.arm == "baseline") & (table.predictor == "linear")].reference.tolist() == [0.003, 0.002, 0.004]
    assert table[(table.arm == spread.DIFFERENCE) & (table.predictor == "val_loss")].reference.tolist() == [0.009]
    assert "reference 0.009" in spread.say_loss(table) and spread.say_spread(table, "linear").startswith("Standard deviations between 3 seeds")


def test_the_interval_narrows_with_seeds_and_ends_at_the_whole():
    arms = study(range(5))
    table = spread.narrowing(arms, "ranking", [4])
    assert table.n.tolist() == [2, 3, 4, 5] and [len(x) for x in table.per_seed] == [2, 3, 4, 5]
    assert table["mean"].iloc[-1] == pytest.approx(np.mean(table.per_seed.iloc[-1]))


@pytest.mark.parametrize("lows, words", [
    ((-1, 1, 1), "from 3 seeds on"), ((1, -1, 1), "from 4 seeds on"), ((1, 1, -1), "does not exclude zero with all of them"), ((1, 1, 1), "from 2 seeds on"),
])  # fmt: skip
def test_an_interval_that_excludes_zero_must_go_on_doing_so(lows, words):
    table = pd.DataFrame([{"n": n, "horizon": 4, "mean": 0.02, "low": 0.01 * low, "high": 0.05, "per_seed": [0.02]} for n, low in enumerate(lows, start=2)])
    assert words in spread.say_narrowing(table)
    assert "is 2.5 points with 2 seeds; it" in spread.say_narrowing(table[table.n == 2].assign(low=0.0))


def test_needs_count_more_seeds_for_smaller_effects_and_for_a_larger_spread():
    pairing = spread.pairing(study(range(4)), ["ranking"], [1, 2, 4])
    table = spread.needs(pairing, "ranking", [0.005, 0.02])
    for _, part in table.groupby("horizon"):
        small, large = part.itertuples()
        assert small.paired >= large.paired and large.paired_low <= large.paired <= large.paired_high
    assert len(spread.say_needs(table, 4)) == 2 and "0.5 points of hit@k at h = 4" in spread.say_needs(table, 4)[0]
    assert "more than 1,000" in spread.say_needs(table.assign(paired=np.nan), 4)[0]
    curves = spread.power_curves(pairing, "ranking", [0.01], 4)
    assert set(curves.n) == {2, 3, 4} and set(curves.arm) == {"paired", "unpaired"} and curves.power.between(0, 1).all()
