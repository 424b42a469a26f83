"""Figures hold what they promise: every seed, units on the axes, marks that differ without colour, nothing cut off."""

import functools

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from fake_measurements import study
from figures import cut_off

from predmoe import experiments, plots, results

ARMS = study()
DOSES = study(arms={"baseline": 0.0, "input 0.03": 0.2, "input 0.3": 1.0, "input 1": 1.5}) + study(seeds=(0,), arms={"both 0.3": 1.2, "both 1": 1.6})
MANY = study(arms={"baseline": 0.0} | {f"{gradient} {dose}": 5 * dose for gradient in ("input", "both") for dose in (0.03, 0.1, 0.3, 1)})
for row in MANY:
    row["load_entropy"] *= 0.8 if row["arm"].startswith("both") else 1


def curves():
    rng = np.random.default_rng(0)
    return pd.DataFrame([
        {"arm": row["arm"], "seed": row["seed"], "step": step, "term": term, "nats": size * (1 + rng.uniform(0, 0.1))}
        for row in ARMS for step in range(25, 501, 25) for term, size in row["terms_nats"].items()
    ])  # fmt: skip


def summary(arms=ARMS):
    hits, tradeoff = experiments.hits(arms), experiments.tradeoff(arms, "ranking")
    effects = [e for arm in ("joint", "alternative") for e in experiments.hit_effects(arms, arm, "baseline", predictors=["ranking"])]
    costs = tradeoff[(tradeoff.horizon == 4) & (tradeoff.arm != "baseline")]
    table = experiments.forest_table(effects, experiments.reference_effects())
    return plots.summary(hits[hits.predictor == "ranking"], table, costs, gate=0.005)


FIGURES = {
    "hits": lambda arms=ARMS: plots.hit_by_horizon(experiments.hits(arms)),
    "margin": lambda arms=ARMS: plots.hit_by_horizon(experiments.hits(arms).dropna(), value="margin", label="hit@k above the lookup's"),
    "forest": lambda arms=ARMS: plots.forest(experiments.forest_table(
        experiments.hit_effects(arms, "joint", "baseline", predictors=["linear", "ranking"]), experiments.reference_effects())),
    "frontier": lambda arms=ARMS: plots.frontier(experiments.tradeoff(arms, "ranking"), gate=0.005),
    "frontier of many": lambda arms=None: plots.frontier(experiments.tradeoff(MANY, "ranking"), gate=0.005),
    "dose": lambda arms=None: plots.dose(experiments.doses(DOSES, "ranking"), gate=0.005),
    "convergence": lambda arms=ARMS: plots.convergence(experiments.posthoc_curves(arms)),
    "layers": lambda arms=ARMS: plots.layers(experiments.per_layer(arms, "ranking")),
    "domains": lambda arms=ARMS: plots.domains(experiments.gains(experiments.per_domain(arms, "ranking"))),
    "training": lambda arms=ARMS: plots.training(curves().query("term == 'lm'")),
    "terms": lambda arms=ARMS: plots.terms(curves()),
    "summary": lambda arms=ARMS: summary(arms),
}  # fmt: skip


@functools.cache
def drawn(name):
    return FIGURES[name]()


@pytest.mark.parametrize("name", FIGURES)
def test_every_axis_is_labelled_and_units_are_given(name):
    for ax in drawn(name).axes:
        assert ax.get_xlabel() or ax.get_xticklabels(), name
        labels = ax.get_xlabel() + ax.get_ylabel()
        assert labels, f"an axis of {name} has no label"
    shown = " ".join(ax.get_xlabel() + ax.get_ylabel() for ax in drawn(name).axes)
    assert any(unit in shown for unit in ("points", "share", "nats", "%", "hit@k")), f"{name} shows no unit"


def test_of_many_arms_no_two_look_alike():
    looks = [(look["color"], look["marker"]) for look in plots._looks(pd.DataFrame(MANY)).values()]
    assert len(set(looks)) == len(looks) == 9


def test_an_arm_that_fails_the_gate_by_its_load_is_crossed_out():
    """On every panel, and in no figure whose arms all pass."""

    def crosses(name):
        return sorted(round(float(line.get_xdata()[0]), 6) for ax in drawn(name).axes for line in ax.lines if line.get_marker() == "x")

    table = experiments.tradeoff(MANY, "ranking")
    uneven = table[table.arm.str.startswith("both")].groupby(["horizon", "arm"]).loss_change.mean()
    assert crosses("frontier of many") == sorted(round(100 * value, 6) for value in uneven)
    assert crosses("frontier") == []


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_is_cut_off(name):
    assert cut_off(drawn(name)) == []


@pytest.mark.parametrize("name", ["hits", "margin", "forest", "frontier", "layers", "domains", "summary"])
def test_one_seed_draws_no_interval(name):
    """A figure of one seed has no line that could be read as an interval, and one of three has."""

    def intervals(figure):
        return sum(line.get_linewidth() in (1.2, 1.6, 1.8) for line in figure.findobj(mpl.lines.Line2D) if len(line.get_xdata()) == 2)

    assert intervals(FIGURES[name](study((0,)))) == 0 and intervals(drawn(name)) > 0


def test_every_seed_is_drawn_with_its_own_value():
    hits = experiments.hits(ARMS)
    ranking = hits[hits.predictor == "ranking"]
    (ax,) = plots.hit_by_horizon(ranking).axes
    drawn = np.concatenate([line.get_ydata() for line in ax.lines if line.get_markerfacecolor() == "white"])
    assert sorted(drawn) == pytest.approx(sorted(ranking.hit))


def test_arms_differ_by_marker_line_and_lightness():
    looks = plots._looks(pd.DataFrame({"arm": list("abcdef")}).replace("a", "baseline"))
    for key in ("marker", "linestyle"):
        assert len({str(look[key]) for look in looks.values()}) == 6
    grey = sorted(np.dot(mpl.colors.to_rgb(look["color"]), (0.299, 0.587, 0.114)) for look in list(looks.values())[:3])
    assert min(np.diff(grey)) > 0.1


def test_an_arm_looks_the_same_with_and_without_the_baseline():
    both = plots._looks(pd.DataFrame({"arm": ["baseline", "joint"]}))
    assert plots._looks(pd.DataFrame({"arm": ["joint"]}))["joint"] == both["joint"]
    behind = plots._looks(pd.DataFrame({"arm": ["stock", "baseline", "joint"]}))   # as in 10, where the model that all start from comes first
    assert behind["baseline"] == both["baseline"] and list(behind) == ["stock", "baseline", "joint"] and len({look["color"] for look in behind.values()}) == 3


def test_forest_shows_means_intervals_and_reference_in_points():
    row = {"group": "ranking MLP", "name": "h = 1", "mean": 0.02, "low": 0.01, "high": 0.03, "per_seed": [0.015, 0.025], "reference": 0.029}
    effects = pd.DataFrame([row])
    (ax,) = plots.forest(effects).axes
    drawn_at = [np.round(line.get_xdata(), 9).tolist() for line in ax.lines]
    assert all(xs in drawn_at for xs in ([1.5, 2.5], [1.0, 3.0], [2.0], [2.9]))


@pytest.mark.parametrize("name", ["hits", "layers", "summary"])
def test_an_axis_of_shares_ends_where_shares_do(name):
    """Two seeds have intervals many times as wide as what they bracket."""
    arms = study((0, 1))
    for row in arms:
        for by_horizon in (*row["hit"].values(), *row["hit_per_layer"].values()):
            for h in by_horizon:
                by_horizon[h] = 0.97 + 0.02 * row["seed"] if isinstance(by_horizon[h], float) else [0.97 + 0.02 * row["seed"]] * len(by_horizon[h])
    for ax in FIGURES[name](arms).axes[: 1 if name == "summary" else None]:
        low, high = ax.get_ylim()
        assert -0.03 <= low < 0.97 and 0.99 < high < 1.03, name


@pytest.mark.parametrize("axis, whole, limits, kept", [("y", 1.0, (-4.0, 7.0), (-0.02, 1.02)), ("x", 100.0, (20.0, 130.0), (20.0, 101.6)), ("y", 1.0, (0.4, 0.9), (0.4, 0.9))])
def test_shares_keep_an_axis_where_shares_are(axis, whole, limits, kept):
    ax = mpl.figure.Figure().subplots()
    getattr(ax, f"set_{axis}lim")(*limits)
    plots.shares(ax, axis=axis, whole=whole)
    assert getattr(ax, f"get_{axis}lim")() == pytest.approx(kept)


def test_the_summary_says_how_many_seeds_each_arm_has_in_the_arms_own_look():
    arms = [row for row in study(range(5)) if row["arm"] != "alternative" or row["seed"] < 3]
    figure = summary(arms)
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels[:3] == ["baseline, 5 seeds", "joint, 5 seeds", "alternative, 3 seeds"]
    looks = plots._looks(experiments.hits(arms))
    assert [handle.get_color() for handle in legend.legend_handles[:3]] == [looks[arm]["color"] for arm in ("baseline", "joint", "alternative")]


def test_a_figure_leaves_the_global_style_alone():
    mpl.get_backend()   # chosen at the first look
    before = mpl.rcParams.copy()
    FIGURES["forest"]()
    assert mpl.rcParams == before


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_small_enough_for_a_notebook_of_many(name):
    svg, png = results._render(drawn(name))
    assert len(png) < 120_000 and len(svg) < 250_000
