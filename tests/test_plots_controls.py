"""Figures of 07, 09 and 15: nothing is cut off, every seed is drawn, and arms are told apart."""

import functools

import numpy as np
import pytest
from fake_locality import controls as controls_study, frontier as frontier_study
from fake_measurements import measurement
from figures import cut_off

from predmoe import controls, frontier, plots, plots_controls, results

ARMS, FRONTIER = controls_study(), frontier_study()
LADDER = [row for seed in (0, 1, 2) for row in (measurement("baseline", seed, gain=0.0), measurement("entropy 0.01", seed, gain=0.3), measurement("joint", seed))]
MANY = dict(gate=0.005, families=frontier.FAMILIES)

FIGURES = {
    "measures": lambda: plots_controls.measures(controls.locality_table(ARMS, controls.MEASURES), label="share (%)"),
    "sources": lambda: plots_controls.measures(controls.sources(ARMS), label="hit@k (%)", columns=3),
    "caches": lambda: plots_controls.caches(controls.cache_table(ARMS)),
    "ladder": lambda: plots_controls.ladder(controls.ladder_table(LADDER)),
    "cost": lambda: plots.forest(controls.effects_forest(controls.locality_effects(ARMS, "joint")), label="joint − baseline (points)"),
    "known": lambda: plots_controls.many_arms(frontier.known_ahead(FRONTIER), panel="horizon", value="known", label="known ahead (% of the true top-k)", title="h = {}", **MANY),
    "local": lambda: plots_controls.many_arms(frontier.local(FRONTIER), panel="measure", value="value", label="share (%)", **MANY),
}  # fmt: skip


@functools.cache
def drawn(name):
    return FIGURES[name]()


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_off_and_the_file_is_small(name):
    assert cut_off(drawn(name)) == []
    svg, png = results._render(drawn(name))
    assert len(png) < 150_000 and len(svg) < 400_000


@pytest.mark.parametrize("name", FIGURES)
def test_a_unit_is_shown(name):
    shown = " ".join(ax.get_xlabel() + ax.get_ylabel() for ax in drawn(name).axes if ax.get_visible())
    assert any(unit in shown for unit in ("%", "points", "share"))


@pytest.mark.parametrize("name, table, value", [("measures", lambda: controls.locality_table(ARMS, controls.MEASURES), "value"),
                                                ("known", lambda: frontier.known_ahead(FRONTIER), "known"), ("ladder", lambda: controls.ladder_table(LADDER), "hit")])  # fmt: skip
def test_every_seed_is_drawn_with_its_own_value(name, table, value):
    points = np.concatenate([np.atleast_1d(line.get_ydata()) for ax in drawn(name).axes for line in ax.lines if line.get_markerfacecolor() == "white"])
    assert sorted(points) == pytest.approx(sorted(100 * table()[value]))


def test_every_arm_of_a_frontier_has_its_number_and_name():
    figure = drawn("known")
    named = figure.get_supxlabel()
    arms = list(dict.fromkeys(row["arm"] for row in FRONTIER))
    assert all(f"{i} {arm}" in named for i, arm in enumerate(arms, start=1))
    for ax in figure.axes:
        assert {text.get_text() for text in ax.texts} == {str(i) for i in range(1, len(arms) + 1)}
