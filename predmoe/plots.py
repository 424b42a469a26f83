"""Tables to figures. Nothing here reads a file or knows a run; every figure shows each seed as a small open point beside the
mean (filled) with its 95% interval, and arms differ by marker and line as well as by colour, so that grey prints read the same.

Tables are tidy, one row per seed: `arm` and `seed` always, then what the figure's docstring names. Arms keep the order in which
they first appear; "baseline" is always drawn in the same look.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from . import stats

COLORS = ("#333333", "#0072B2", "#D98200", "#8A4F9E", "#2E8B57", "#B03A2E")
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)))
REFERENCE = dict(marker="D", color="#B03A2E", markerfacecolor="white", markeredgewidth=1.3, markersize=6, linestyle="none")
GATE = dict(color="#B03A2E", linestyle=(0, (4, 2)), linewidth=1)
CROSSED = dict(marker="x", color="#111111", markersize=12, markeredgewidth=1.3, linestyle="none", zorder=5)
SEED = dict(marker="o", markersize=4, markerfacecolor="white", linestyle="none")
PREDICTORS = {
    "linear": "linear", "ranking": "ranking MLP", "cotrained": "co-trained head", "next_router": "next layer's router",
    "token_id": "token-id lookup", "static": "most popular experts",
}  # fmt: skip
TERMS = {"lm": "language model", "balance": "load balance", "pred": "prediction", "sticky": "sticky", "ent": "router entropy"}


def style():
    """The report's style as a context; `results.save_figure` draws under it as well."""
    return plt.style.context(Path(__file__).parent / "assets" / "predmoe.mplstyle")


def _styled(draw):
    @functools.wraps(draw)
    def drawn(*args, **kwargs) -> Figure:
        with style():
            return draw(*args, **kwargs)

    return drawn


# --- figures -----------------------------------------------------------------------------------------------------------

@_styled
def hit_by_horizon(table: pd.DataFrame, *, value: str = "hit", label: str = "hit@k (share of the true top-k)") -> Figure:
    """Columns predictor, horizon and `value`. One panel per predictor, arms side by side at each horizon."""
    predictors = list(dict.fromkeys(table.predictor))
    figure, axes = _panels(len(predictors), height=3.3, width=2.5, sharey=True)
    horizons = sorted(table.horizon.unique())
    for ax, predictor in zip(axes, predictors):
        part = table[table.predictor == predictor]
        for x, arm, look in _dodged(table):
            mine = part[part.arm == arm]   # empty where an arm has no such predictor: only trained heads are co-trained
            at = [i for i, horizon in enumerate(horizons) if horizon in set(mine.horizon)]
            means = [_point(ax, i + x, mine[mine.horizon == horizons[i]][value], look) for i in at]
            ax.plot(np.array(at) + x, means, color=look["color"], linestyle=look["linestyle"], linewidth=1, zorder=2)
        ax.set(title=PREDICTORS.get(predictor, predictor), xticks=range(len(horizons)), xticklabels=horizons, xlabel="horizon (layers)")
        ax.set_xlim(-0.6, len(horizons) - 0.4)
        ax.grid(axis="x", visible=False)
        if value != "hit":
            ax.axhline(0, color="#555555", linewidth=1)
    if value != "margin":
        shares(*axes)
    axes[0].set_ylabel(label)
    _legend(figure, table)
    return figure


@_styled
def forest(effects: pd.DataFrame, *, label: str = "effect on hit@k (points)", scale: float = 100.0) -> Figure:
    """Columns group, name, mean, low, high, per_seed (list), and reference (NaN where there is none). One row per effect.

    mean, low, high, per_seed and reference are multiplied by `scale`; low and high are NaN for a single seed.
    """
    groups = list(dict.fromkeys(effects.group))
    rows = len(effects) + 0.7 * (len(groups) - 1)
    figure = Figure(figsize=(6.8, 1.1 + 0.32 * rows))
    ax = figure.subplots()
    y, ticks, labels = 0.0, [], []
    for group in groups:
        for row in effects[effects.group == group].itertuples():
            _effect(ax, y, row, scale)
            ticks.append(y)
            labels.append(f"{group}, {row.name}")
            y += 1
        y += 0.7
    ax.axvline(0, color="#555555", linewidth=1)
    ax.set(yticks=ticks, yticklabels=labels, xlabel=label)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    _effect_legend(figure, effects)
    return figure


@_styled
def frontier(table: pd.DataFrame, *, gate: float) -> Figure:
    """Columns horizon, loss_change (fraction of the paired baseline's), gain (hit@k above the paired baseline's), load (load entropy over the paired baseline's).

    One panel per horizon: what an arm costs against what it brings, the baseline at the origin; `gate`: the largest
    loss change allowed, as a fraction. An arm that fails the gate by its mean load entropy is crossed out.
    """
    horizons = sorted(table.horizon.unique())
    figure, axes = _panels(len(horizons), height=3.3, width=2.9, sharey=True)
    looks = _looks(table)
    for ax, horizon in zip(axes, horizons):
        _baseline_and_gate(ax, gate)
        for arm in list(looks)[1:]:
            part = table[(table.arm == arm) & (table.horizon == horizon)]
            _cloud(ax, 100 * part.loss_change, 100 * part.gain, looks[arm])
            if part.load.mean() < stats.MIN_LOAD_ENTROPY_RATIO:
                ax.plot(100 * part.loss_change.mean(), 100 * part.gain.mean(), **CROSSED)
        ax.set(title=f"h = {horizon}", xlabel="validation loss against\nthe baseline's (%)")
    axes[0].set_ylabel("gain in hit@k (points)")
    uneven = table.groupby("arm").load.mean().min() < stats.MIN_LOAD_ENTROPY_RATIO
    _legend(figure, table, [Line2D([], [], **GATE, label="quality gate"), *([Line2D([], [], **CROSSED, label="fails it by load")] if uneven else [])])
    return figure


@_styled
def dose(table: pd.DataFrame, *, gate: float) -> Figure:
    """Columns dose, horizon, gain (hit@k above the paired baseline's), loss_change (fraction); an arm is a gradient mode.

    One panel per horizon for the gain, and one for the loss with the quality gate, all over the dose on a log axis.
    """
    horizons, looks = sorted(table.horizon.unique()), _looks(table)
    figure, axes = _panels(len(horizons) + 1, height=3.3, width=2.4, sharey=False)
    for ax in axes[1:-1]:
        ax.sharey(axes[0])
    panels = [(ax, table[table.horizon == h], "gain", f"h = {h}") for ax, h in zip(axes, horizons)]
    panels.append((axes[-1], table[table.horizon == horizons[0]], "loss_change", "quality"))
    for ax, part, value, title in panels:
        ax.axhline(0, color="#bbbbbb", linewidth=1)
        for arm, look in looks.items():
            mine = part[part.arm == arm]
            doses = sorted(mine.dose.unique())
            means = [_point(ax, d, 100 * mine[mine.dose == d][value], look, log=True) for d in doses]
            ax.plot(doses, means, color=look["color"], linestyle=look["linestyle"], linewidth=1)
        ax.set_xscale("log")
        ax.margins(x=0.12)
        ax.set(title=title, xlabel="weight lambda", xticks=sorted(table.dose.unique()), xticklabels=[f"{d:g}" for d in sorted(table.dose.unique())])
        ax.minorticks_off()
    axes[0].set_ylabel("gain in hit@k (points)")
    axes[-1].set_ylabel("validation loss against\nthe baseline's (%)")
    axes[-1].axhline(100 * gate, **GATE)
    _legend(figure, table, [Line2D([], [], **GATE, label="quality gate")])
    return figure


@_styled
def convergence(curves: pd.DataFrame) -> Figure:
    """Columns predictor, step, dev_hit: each post-hoc fit's held-out curve to its end (a marker), one line per arm and seed."""
    predictors = list(dict.fromkeys(curves.predictor))
    figure, axes = _panels(len(predictors), height=3.2, width=3.6, sharey=False)
    looks = _looks(curves)
    for ax, predictor in zip(axes, predictors):
        part = curves[curves.predictor == predictor]
        for (arm, _), line in part.groupby(["arm", "seed"], sort=False):
            ax.plot(line.step, line.dev_hit, color=looks[arm]["color"], linestyle=looks[arm]["linestyle"], linewidth=1)
            ax.plot(line.step.iloc[-1], line.dev_hit.iloc[-1], color=looks[arm]["color"], marker=looks[arm]["marker"], markersize=5)
        ax.set(title=PREDICTORS.get(predictor, predictor), xlabel="steps of the post-hoc fit")
        shares(ax)
    axes[0].set_ylabel("hit@k on the dev set,\nmean over horizons")
    _legend(figure, curves, seeds=False)
    return figure


@_styled
def training(curves: pd.DataFrame, *, value: str = "nats", label: str = "training loss (nats/token)") -> Figure:
    """Columns step and `value`: one thin line per seed, the mean thick; the right panel shows the difference to the same
    seed's baseline (running mean over a tenth of training), in which an effect is seen long before the curves part."""
    figure, axes = _panels(2, height=3.2, width=3.9, sharey=False)
    wide = curves.pivot_table(index="step", columns=["arm", "seed"], values=value)
    window = max(1, len(wide) // 10)
    for arm, look in _looks(curves).items():
        _lines(axes[0], wide[arm], look)
        if arm != "baseline":
            _lines(axes[1], (wide[arm] - wide["baseline"]).rolling(window).mean(), look)
    axes[1].axhline(0, color=COLORS[0], linewidth=1)
    axes[0].set(xlabel="training step", ylabel=label, title="level")
    axes[1].set(xlabel="training step", ylabel="difference (nats/token),\nrunning mean", title="against the same seed's baseline")
    _legend(figure, curves, points=False)
    return figure


@_styled
def layers(table: pd.DataFrame, *, value: str = "hit", label: str = "hit@k (share of the true top-k)", scale: float = 1.0) -> Figure:
    """Columns horizon, layer (the one predicted from, first = 1) and `value`, drawn times `scale`. One panel per horizon."""
    horizons = sorted(table.horizon.unique())
    figure, axes = _panels(len(horizons), height=3.2, width=2.9, sharey=True)
    for ax, horizon in zip(axes, horizons):
        part = table[table.horizon == horizon]
        for x, arm, look in _dodged(table, spread=0.4):
            mine = part[part.arm == arm]
            at = np.array(sorted(mine.layer.unique()))
            means = [_point(ax, layer + x, scale * mine[mine.layer == layer][value], look, small=True) for layer in at]
            ax.plot(at + x, means, color=look["color"], linestyle=look["linestyle"], linewidth=1, zorder=2)
        ax.set(title=f"h = {horizon}", xlabel="predicted from layer", xticks=sorted(part.layer.unique()))
        ax.grid(axis="x", visible=False)
        if value != "hit":
            ax.axhline(0, color="#555555", linewidth=1)
    if value == "hit":
        shares(*axes)
    axes[0].set_ylabel(label)
    _legend(figure, table)
    return figure


@_styled
def domains(table: pd.DataFrame) -> Figure:
    """Columns horizon, domain, gain (hit@k above the paired baseline's). One panel per horizon, one row per domain."""
    horizons, names = sorted(table.horizon.unique()), sorted(table.domain.unique())
    figure, axes = _panels(len(horizons), height=1.4 + 0.4 * len(names), width=2.9, sharey=True, sharex=True)
    looks = _looks(table)
    for ax, horizon in zip(axes, horizons):
        for x, arm, look in _dodged(table, looks=looks):
            for i, name in enumerate(names):
                part = table[(table.arm == arm) & (table.horizon == horizon) & (table.domain == name)]
                _point(ax, i + x, 100 * part.gain, look, horizontal=True)
        ax.axvline(0, color="#555555", linewidth=1)
        ax.set(title=f"h = {horizon}", xlabel="gain in hit@k (points)", yticks=range(len(names)), yticklabels=names)
        ax.grid(axis="y", visible=False)
    axes[0].invert_yaxis()
    _legend(figure, table)
    return figure


@_styled
def terms(table: pd.DataFrame) -> Figure:
    """Columns term, step, nats (weighted as in the loss): how large each part is while training, mean over seeds, log axis."""
    names, arms = list(dict.fromkeys(table.term)), list(dict.fromkeys(table.arm))
    figure, axes = _panels(len(arms), height=3.2, width=3.6, sharey=True)
    for ax, arm in zip(axes, arms):
        for i, name in enumerate(names):
            mean = table[(table.arm == arm) & (table.term == name) & (table.nats > 0)].groupby("step").nats.mean()
            ax.plot(mean.index, mean, color=COLORS[i], linestyle=LINES[i])
        ax.set(title=arm, xlabel="training step", yscale="log")
    axes[0].set_ylabel("weighted size (nats/token)")
    handles = [Line2D([], [], color=COLORS[i], linestyle=LINES[i], label=TERMS.get(name, name)) for i, name in enumerate(names)]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


@_styled
def summary(hits: pd.DataFrame, effects: pd.DataFrame, costs: pd.DataFrame, *, gate: float) -> Figure:
    """The report's figure. hits: horizon, hit; effects: as for `forest` plus arm and horizon; costs: loss_change per seed. The legend says how many seeds an arm has."""
    figure = Figure(figsize=(9.6, 3.5))
    left, middle, right = figure.subplots(1, 3, gridspec_kw={"width_ratios": [1, 1, 0.8]})
    figure.get_layout_engine().set(wspace=0.06)
    looks, horizons = _looks(hits), sorted(hits.horizon.unique())
    for x, arm, look in _dodged(hits, spread=0.36):
        means = [_point(left, i + x, hits[(hits.arm == arm) & (hits.horizon == h)].hit, look) for i, h in enumerate(horizons)]
        left.plot(np.arange(len(horizons)) + x, means, color=look["color"], linestyle=look["linestyle"], linewidth=1, zorder=2)
    for x, arm, look in _dodged(effects, spread=0.36, looks=looks):
        for row in effects[effects.arm == arm].itertuples():
            at = horizons.index(row.horizon) + x
            _point(middle, at, 100 * np.array(row.per_seed), look)
            if np.isfinite(row.reference):
                middle.plot(at - 0.12, 100 * row.reference, **REFERENCE)
    middle.axhline(0, color="#555555", linewidth=1)
    arms = list(dict.fromkeys(costs.arm))
    for i, arm in enumerate(arms):
        _point(right, i, 100 * costs[costs.arm == arm].loss_change, looks[arm])
    right.axhline(0, color="#555555", linewidth=1)
    right.axhline(100 * gate, **GATE)
    right.annotate("quality gate", (1, 100 * gate), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8.5, color="#B03A2E")
    for ax in (left, middle):
        ax.set(xticks=range(len(horizons)), xticklabels=horizons, xlabel="horizon (layers ahead)")
        ax.margins(x=0.14)
    left.set(title="How predictable?", ylabel="hit@k, ranking MLP")
    middle.set(title="Gain over the baseline", ylabel="points of hit@k, paired by seed")
    right.set(title="Cost", ylabel="change in validation loss (%)", xticks=range(len(arms)), xticklabels=arms, xlim=(-0.7, len(arms) - 0.3))
    for ax in (left, middle, right):
        ax.grid(axis="x", visible=False)
    shares(left)
    extra = [Line2D([], [], **REFERENCE, label="reference study, 341M")] if np.isfinite(effects.reference).any() else []
    seeds = hits.groupby("arm").seed.nunique()
    _legend(figure, hits, extra, names={arm: f"{arm}, {n} seed{'s' if n > 1 else ''}" for arm, n in seeds.items()})
    return figure


# --- parts -------------------------------------------------------------------------------------------------------------

def _panels(count: int, *, height: float, width: float, sharey: bool, sharex: bool = False):
    figure = Figure(figsize=(max(width * count, 4.2) + 0.6, height))
    return figure, figure.subplots(1, count, sharex=sharex, sharey=sharey, squeeze=False)[0]


def shares(*axes, axis: str = "y", whole: float = 1.0) -> None:
    """Keep an axis of shares within 0 and `whole`, plus room for half a marker: the interval of a few seeds may reach where no share can be."""
    for ax in axes:
        low, high = getattr(ax, f"get_{axis}lim")()
        room = 0.02 * (min(high, whole) - max(low, 0.0))
        getattr(ax, f"set_{axis}lim")(max(low, -room), min(high, whole + room))


def _looks(table: pd.DataFrame) -> dict[str, dict]:
    """Colour, marker and line of each arm; the first look is the baseline's and stays free where it is not in the table.

    Beyond six arms colours come again with the next marker and line, so that no two look alike.
    """
    arms = list(dict.fromkeys(table.arm))
    place = {arm: i for i, arm in enumerate((arm for arm in arms if arm != "baseline"), start=1)} | {"baseline": 0}
    turn = lambda looks, i: looks[(i + i // len(COLORS)) % len(looks)]  # noqa: E731
    return {arm: {"color": COLORS[i % len(COLORS)], "marker": turn(MARKERS, i), "linestyle": turn(LINES, i)} for arm in arms for i in [place[arm]]}


def _dodged(table, spread: float = 0.5, looks=None):
    """(offset, arm, look) so that arms stand side by side around a position, `spread` wide in all."""
    arms = list(dict.fromkeys(table.arm))
    looks = looks or _looks(table)
    offsets = np.linspace(-spread / 2, spread / 2, len(arms)) if len(arms) > 1 else [0.0]
    return [(float(x), arm, looks[arm]) for x, arm in zip(offsets, arms)]


def _point(ax, at, values, look, *, small=False, horizontal=False, interval=True, log=False) -> float:
    """Every seed open beside the position (on a log axis, by a factor), the mean filled with its interval on it; returns the mean."""
    effect = stats.over_seeds(dict(enumerate(values)))
    size, step = (3.5, 0.06) if small else (5.5, 0.1)

    def xy(position, value):
        return (value, position) if horizontal else (position, value)

    seeds = np.asarray(values, dtype=float)
    beside = at * (1 + step) if log else at + step
    ax.plot(*xy(np.full(len(seeds), beside), seeds), linestyle="none", marker=look["marker"], markersize=size - 1.5,
            markerfacecolor="white", markeredgecolor=look["color"], markeredgewidth=0.8, zorder=3)  # fmt: skip
    if effect.ci95 and interval:
        ax.plot(*xy([at, at], list(effect.ci95)), color=look["color"], linewidth=1.6, solid_capstyle="butt", zorder=3)
    ax.plot(*xy(at, effect.mean), marker=look["marker"], color=look["color"], markersize=size, zorder=4)
    return effect.mean


def _effect(ax, y, row, scale) -> None:
    ax.plot(scale * np.array(row.per_seed), np.full(len(row.per_seed), y + 0.22), linestyle="none", marker="o", markersize=3.8,
            markerfacecolor="white", markeredgecolor=COLORS[1], markeredgewidth=0.8, zorder=3)  # fmt: skip
    if np.isfinite(row.low):
        ax.plot([scale * row.low, scale * row.high], [y, y], color=COLORS[1], linewidth=1.8, solid_capstyle="butt", zorder=3)
    ax.plot(scale * row.mean, y, marker="s", color=COLORS[1], markersize=6, zorder=4)
    if np.isfinite(row.reference):
        ax.plot(scale * row.reference, y - 0.24, **REFERENCE, zorder=5)


def _effect_legend(figure, effects) -> None:
    mean = Line2D([], [], color=COLORS[1], marker="s", linewidth=1.8, label="mean, 95% interval")
    seed = Line2D([], [], **SEED, markeredgecolor=COLORS[1], label="one seed")
    handles = [mean, seed]
    if np.isfinite(effects.reference).any():
        handles.append(Line2D([], [], **REFERENCE, label="reference study"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))


def _baseline_and_gate(ax, gate) -> None:
    ax.axhline(0, color="#bbbbbb", linewidth=1)
    ax.plot(0, 0, marker=MARKERS[0], color=COLORS[0], markersize=6, zorder=4)
    ax.axvline(100 * gate, **GATE)


def _cloud(ax, x, y, look) -> None:
    ax.plot(x, y, linestyle="none", marker=look["marker"], markersize=4, markerfacecolor="white", markeredgecolor=look["color"], markeredgewidth=0.8)
    ex, ey = stats.over_seeds(dict(enumerate(x))), stats.over_seeds(dict(enumerate(y)))
    if ex.ci95:
        ax.plot(ex.ci95, [ey.mean] * 2, color=look["color"], linewidth=1.2)
        ax.plot([ex.mean] * 2, ey.ci95, color=look["color"], linewidth=1.2)
    ax.plot(ex.mean, ey.mean, marker=look["marker"], color=look["color"], markersize=7, zorder=4)


def _lines(ax, wide, look) -> None:
    ax.plot(wide.index, wide, color=look["color"], linestyle=look["linestyle"], linewidth=0.7, alpha=0.6)
    ax.plot(wide.index, wide.mean(axis=1), color=look["color"], linestyle=look["linestyle"], linewidth=2)


def _legend(figure, table, extra=(), *, seeds=True, points=True, columns=None, names={}) -> None:
    """Arms, by other `names` where these are given, then `extra`, then what a seed looks like: an open point, or (points=False) a thin line; in `columns`,
    else in as few rows as the figure is wide enough for."""
    looks = {arm: look if points else look | {"marker": ""} for arm, look in _looks(table).items()}
    handles = [*(Line2D([], [], **look, label=names.get(arm, arm)) for arm, look in looks.items()), *extra]
    if seeds and points:
        handles.append(Line2D([], [], **SEED, markeredgecolor="#555555", label="one seed"))
    elif seeds:
        handles.append(Line2D([], [], color="#555555", linewidth=0.7, label="one seed"))
    if columns is None:
        size = plt.rcParams["legend.fontsize"] / 72   # inches; a letter is about half as wide as it is high
        widths = [(plt.rcParams["legend.handlelength"] + plt.rcParams["legend.columnspacing"] + 0.6 * len(handle.get_label())) * size for handle in handles]
        rows = math.ceil(sum(widths) / figure.get_figwidth())
        columns = math.ceil(len(handles) / rows)
    figure.legend(handles=handles, loc="outside upper center", ncols=columns)
