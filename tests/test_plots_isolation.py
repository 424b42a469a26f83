"""Figures of isolation, seeds and sizes hold what they promise: every seed, units on the axes, nothing cut off, small files."""

import functools

import numpy as np
import pytest
from fake_measurements import study
from fake_sizes import TABLE
from figures import cut_off

from predmoe import experiments, isolation, plots, plots_isolation, results, scaling, spread

ARMS = study(range(5), arms={"baseline": 0.0, "joint": 1.0})
RANKING = experiments.hits(ARMS).query("predictor == 'ranking'")
PAIRING = spread.pairing(ARMS, ["linear", "ranking"], [1, 2, 4])
FIGURES = {
    "six_arms": lambda: plots_isolation.six_arms(isolation.six_arms(ARMS), isolation.reference_levels()),
    "parts": lambda: plots.forest(experiments.forest_table(isolation.effects(ARMS, [1, 2, 4]), isolation.reference_contrasts())),
    "intervals": lambda: plots.forest(isolation.both_intervals(isolation.effects(ARMS, [4]), isolation.within_seeds(ARMS, [isolation.STRONGEST]))),
    "layer gains": lambda: plots.layers(isolation.layer_gains(ARMS), value="gain", label="difference in hit@k (points)", scale=100.0),
    "domains": lambda: plots.domains(isolation.domain_gains(ARMS)),
    "pairs": lambda: plots_isolation.pairs(RANKING),
    "spreads": lambda: plots_isolation.spreads(spread.spreads(ARMS, ["linear", "ranking"], [1, 2, 4]).query("predictor != 'val_loss'")),
    "power": lambda: plots_isolation.power(spread.power_curves(PAIRING, "ranking", [0.005, 0.01, 0.02], 10), wanted=0.8),
    "narrowing": lambda: plots_isolation.narrowing(spread.narrowing(ARMS, "ranking", [1, 2, 4])),
    "sizes": lambda: plots_isolation.sizes(scaling.same_experts(TABLE), scaling.reference_points("linear")),
    "experts": lambda: plots_isolation.experts(scaling.same_width(TABLE, ["8 experts"]), scaling.reference_points("ranking")),
}  # fmt: skip


@functools.cache
def drawn(name):
    return FIGURES[name]()


def open_points(ax, axis="y"):
    """The values of all open points with a thin edge: the seeds (the reference's edge is thicker)."""
    lines = [line for line in ax.lines if line.get_markerfacecolor() == "white" and line.get_markeredgewidth() == 0.8]
    return np.sort(np.concatenate([line.get_ydata() if axis == "y" else line.get_xdata() for line in lines]))


@pytest.mark.parametrize("name", FIGURES)
def test_axes_have_units_nothing_is_cut_off_and_files_are_small(name):
    figure = drawn(name)
    shown = " ".join(ax.get_xlabel() + ax.get_ylabel() for ax in figure.axes)
    assert any(unit in shown for unit in ("points", "share")), f"{name} shows no unit"
    assert cut_off(figure) == []
    svg, png = results._render(figure)
    assert len(png) < 120_000 and len(svg) < 250_000


def test_every_seed_of_every_arm_is_drawn_with_its_value():
    six = isolation.six_arms(ARMS)
    for ax, h in zip(drawn("six_arms").axes, (1, 2, 4)):
        assert open_points(ax, "x") == pytest.approx(np.sort(six[six.horizon == h].hit))
    for ax, h in zip(drawn("pairs").axes, (1, 2, 4)):
        assert open_points(ax) == pytest.approx(np.sort(RANKING[RANKING.horizon == h].hit))


def test_the_reference_stands_at_its_own_size_in_points():
    ax = drawn("sizes").axes[-1]   # h = 4
    marks = [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines if line.get_markeredgewidth() == plots.REFERENCE["markeredgewidth"]]
    assert np.array(sorted(marks)) == pytest.approx(np.array([(56.0, 6.2), (99.0, 6.4)]))
    part = scaling.same_experts(TABLE).query("horizon == 4")
    assert open_points(ax) == pytest.approx(np.sort(100 * part.gain))


def test_a_gain_is_drawn_in_points_with_its_zero():
    gains = isolation.layer_gains(ARMS)
    ax = drawn("layer gains").axes[-1]   # h = 4
    assert open_points(ax) == pytest.approx(np.sort(100 * gains[gains.horizon == 4].gain))
    assert any(list(line.get_ydata()) == [0, 0] for line in ax.lines)


def test_a_size_with_one_seed_draws_no_interval():
    def intervals(table):
        figure = plots_isolation.sizes(table, scaling.reference_points("ranking"))
        return sum(len(line.get_xdata()) == 2 and line.get_linewidth() == 1.6 for ax in figure.axes for line in ax.lines)

    part = scaling.same_experts(TABLE)
    assert intervals(part[part.arm == "large"]) == 0 and intervals(part) == 2 * 3


def test_power_is_one_line_per_effect_and_way():
    for ax in drawn("power").axes:
        assert sum(len(line.get_xdata()) == 9 for line in ax.lines) == 6


def test_the_references_number_of_experts_is_drawn_where_ours_has_it():
    def marks(table):
        axes = plots_isolation.experts(table, scaling.reference_points("ranking")).axes
        return [line.get_ydata()[0] for ax in axes for line in ax.lines if line.get_markeredgewidth() == plots.REFERENCE["markeredgewidth"]]

    table = scaling.same_width(TABLE, ["8 experts"])
    assert marks(table) == pytest.approx([2.9, 4.3, 5.2]) and marks(table[table.experts != 16]) == []
