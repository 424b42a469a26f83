"""Numbers that can be checked by hand, agreement with scipy, and intervals that cover as often as they say."""

import math

import numpy as np
import pytest
import scipy.stats

from predmoe import stats


def effect(mean, half, n=3, p=None, name="e"):
    """An effect with a given mean and interval; its p value follows from them."""
    t = abs(mean) / half * scipy.stats.t.ppf(0.975, n - 1)
    p = 2 * scipy.stats.t.sf(t, n - 1) if p is None else p
    same = dict(per_seed=(mean,) * n, seeds=tuple(range(n)))
    return stats.Effect(name=name, unit="", mean=mean, ci95=(mean - half, mean + half), n=n, **same, p=p, method="t")


# --- paired effects -------------------------------------------------------------------------------------------------

def test_three_seeds_by_hand():
    # differences 1, 2, 3: mean 2, standard deviation 1, t(0.975, 2) = 4.3027, half-width 4.3027 / sqrt(3) = 2.4841
    e = stats.paired({0: 11.0, 1: 22.0, 2: 33.0}, {0: 10.0, 1: 20.0, 2: 30.0})
    assert e.mean == 2.0 and e.n == 3 and e.per_seed == (1.0, 2.0, 3.0) and e.seeds == (0, 1, 2)
    assert e.ci95 == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-4)


def test_relative_effect_by_hand():
    e = stats.paired({0: 1.1, 1: 2.4}, {0: 1.0, 1: 2.0}, relative=True)
    assert e.per_seed == pytest.approx((0.1, 0.2)) and e.mean == pytest.approx(0.15)


@pytest.mark.parametrize("n", [2, 3, 5, 20])
def test_agrees_with_scipy(n):
    rng = np.random.default_rng(n)
    a, b = rng.normal(0.3, 1, n), rng.normal(0, 1, n)
    e = stats.paired(dict(enumerate(a)), dict(enumerate(b)))
    theirs = scipy.stats.ttest_rel(a, b)
    interval = theirs.confidence_interval(0.95)
    assert e.p == pytest.approx(theirs.pvalue, rel=1e-9)
    assert e.ci95 == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_pairing_removes_what_both_share():
    rng = np.random.default_rng(0)
    seeds = rng.normal(0, 100, 5)
    a, b = seeds + 1 + rng.normal(0, 0.01, 5), seeds
    assert stats.paired(dict(enumerate(a)), dict(enumerate(b))).ci95[0] > 0.9


def test_one_seed_has_no_interval_and_says_so():
    e = stats.paired({7: 2.0}, {7: 1.5})
    assert e.mean == 0.5 and e.ci95 is None and e.p is None and e.note == "single seed, exploratory"


def test_equal_differences_give_an_interval_of_no_width():
    e = stats.paired({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.0})
    assert e.ci95 == (1.0, 1.0) and e.p == 0.0
    assert stats.paired({0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0}).p == 1.0


@pytest.mark.parametrize(
    "treatment, control, message",
    [({0: 1.0}, {1: 1.0}, "seeds"), ({}, {}, "no seed"), ({0: math.nan, 1: 1.0}, {0: 1.0, 1: 1.0}, "seed 0 is not finite")],
)
def test_bad_seeds_are_refused(treatment, control, message):
    with pytest.raises(ValueError, match=message):
        stats.paired(treatment, control, name="x")


@pytest.mark.parametrize("n", [3, 5])
def test_the_t_interval_covers_95_percent(n):
    """4,000 simulated studies; the share that covers the truth has a standard error of 0.34%."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(4000):
        low, high = stats.over_seeds(dict(enumerate(rng.normal(0.7, 2.0, n)))).ci95
        covered += low <= 0.7 <= high
    assert abs(covered / 4000 - 0.95) < 0.0125


# --- bootstrap over documents ----------------------------------------------------------------------------------------

def test_the_bootstrap_mean_is_weighted_by_tokens():
    e = stats.bootstrap_documents([1.0, 0.0], [0.0, 0.0], [30, 10])
    assert e.mean == 0.75 and e.ci95 == (0.0, 1.0) and e.n == 1


def test_the_bootstrap_is_deterministic_and_near_the_normal_interval():
    rng = np.random.default_rng(3)
    a, b = rng.normal(1, 1, 400), np.zeros(400)
    first, again = (stats.bootstrap_documents(a, b, np.ones(400, int), seed=5) for _ in range(2))
    assert first == again
    half = 1.96 * a.std(ddof=1) / 20
    assert first.ci95 == pytest.approx((a.mean() - half, a.mean() + half), abs=0.01)


def test_the_bootstrap_covers_95_percent():
    """300 simulated corpora of 80 documents of unequal length; standard error of the share 1.3%."""
    rng = np.random.default_rng(4)
    covered = 0
    for i in range(300):
        tokens = rng.integers(10, 100, 80)
        low, high = stats.bootstrap_documents(rng.normal(0.2, 1, 80), np.zeros(80), tokens, resamples=1000, seed=i).ci95
        covered += low <= 0.2 <= high
    assert 0.905 < covered / 300 < 0.985


@pytest.mark.parametrize(
    "a, b, w",
    [([1.0], [1.0], [1]), ([1.0, 2.0], [1.0], [1, 1]), ([1.0, math.nan], [1.0, 1.0], [1, 1]), ([1.0, 2.0], [1.0, 1.0], [0, 1])],
)
def test_bad_documents_are_refused(a, b, w):
    with pytest.raises(ValueError):
        stats.bootstrap_documents(a, b, w)


# --- Holm ------------------------------------------------------------------------------------------------------------

def test_holm_by_hand():
    # sorted .01, .02, .03, .04 times 4, 3, 2, 1 = .04, .06, .06, .04 -> made monotone .04, .06, .06, .06
    assert stats.holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert stats.holm([0.9, 0.8]) == [1.0, 1.0] and stats.holm([]) == []


def test_holm_never_lowers_a_p_value_and_keeps_the_order():
    p = np.random.default_rng(0).uniform(size=20)
    adjusted = np.array(stats.holm(p))
    assert (adjusted >= p).all() and (np.diff(adjusted[np.argsort(p)]) >= 0).all()


# --- verdicts --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(
    "effects, expected, word",
    [
        ([effect(0.03, 0.01), effect(0.04, 0.01)], [0.03, 0.05], "replicated"),
        ([effect(-0.03, 0.01)], [-0.03], "replicated"),
        ([effect(-0.5, 0.1)], ["decrease"], "replicated"),
        ([effect(0.01, 0.005)], [0.03], "partly"),                                   # a third of the reference's size
        ([effect(0.09, 0.01)], [0.03], "partly"),                                    # three times its size
        ([effect(0.03, 0.01), effect(0.01, 0.02)], [0.03, 0.03], "partly"),          # one horizon of two, Holm p = 0.012
        ([effect(0.03, 0.029), effect(0.01, 0.02)], [0.03, 0.03], "not replicated"), # p = 0.047 does not survive Holm
        ([effect(0.03, 0.04)], [0.03], "not replicated"),
        ([effect(-0.03, 0.01)], [0.03], "not replicated"),
        ([effect(-0.03, 0.01)], ["increase"], "not replicated"),
        ([effect(0.03, 0.01, n=2)], [0.03], "not tested"),
        ([stats.paired({0: 1.0}, {0: 0.0})], [1.0], "not tested"),
        ([], [0.03], "not tested"),
    ],
)  # fmt: skip
def test_direction(effects, expected, word):
    assert stats.verdict(effects, expected).word == word


def test_the_reason_says_whether_intervals_are_corrected():
    """What stands uncorrected says so, but for a single effect, which needs no correction; what is corrected says "established"."""
    strong, weak, none = effect(0.03, 0.01), effect(0.03, 0.029), effect(0.01, 0.02)
    assert "uncorrected" in stats.verdict([strong, strong], [0.03, 0.03]).why and "uncorrected" not in stats.verdict([strong], [0.03]).why
    assert stats.verdict([strong, none], [0.03, 0.03]).why.startswith("established after Holm's correction only for")
    assert stats.verdict([weak, none], [0.03, 0.03]).why == "1 of 2 intervals exclude zero, uncorrected; nothing is established after Holm's correction"
    assert stats.verdict([none], [0.03]).why == stats.NOTHING_EXCLUDED


def test_the_reason_says_when_the_effect_goes_the_other_way():
    assert "other side" in stats.verdict([effect(-0.03, 0.01)], [0.03]).why
    assert "single seed" in stats.verdict([stats.paired({0: 1.0}, {0: 0.0})], [1.0]).why


@pytest.mark.parametrize(
    "mean, half, word", [(0.001, 0.005, "replicated"), (0.008, 0.001, "replicated"), (0.02, 0.005, "not replicated"), (0.005, 0.02, "partly")]
)
def test_absence(mean, half, word):
    assert stats.verdict_absent([effect(mean, half)], margin=0.01).word == word


@pytest.mark.parametrize("mean, half, word", [(0.003, 0.001, "replicated"), (0.003, 0.004, "partly"), (0.006, 0.004, "not replicated")])
def test_at_most(mean, half, word):
    assert stats.verdict_at_most([effect(mean, half)], limit=0.005).word == word


# --- the quality gate ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(
    "loss, load, passes, certain",
    [
        ([4.000, 4.004, 4.008], [0.90, 0.91, 0.90], True, True),      # +0.1%, 1.00: all of both intervals within
        ([4.000, 4.000, 4.045], [0.90, 0.90, 0.90], True, False),     # +0.375% on the mean, interval up to +2%
        ([4.080, 4.084, 4.080], [0.90, 0.90, 0.90], False, True),     # +2%
        ([4.000, 4.000, 4.000], [0.80, 0.80, 0.80], False, True),     # load entropy 0.889 of the baseline's
    ],
)  # fmt: skip
def test_gate(loss, load, passes, certain):
    def by_seed(values):
        return dict(enumerate(values))

    gate = stats.quality_gate(by_seed(loss), by_seed([4.0] * 3), by_seed(load), by_seed([0.9] * 3))
    assert (gate.passes, gate.certain) == (passes, certain)
    assert ("passes" in gate.sentence) == passes


def test_the_gate_is_closed_exactly_at_half_a_percent():
    def gate(loss):
        return stats.quality_gate({0: loss}, {0: 4.0}, {0: 0.9}, {0: 0.9})

    assert gate(4.0199).passes and not gate(4.0201).passes and not gate(4.0).certain
