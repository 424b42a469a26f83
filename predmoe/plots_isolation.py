"""Figures of isolation, seeds and sizes, from tables. The conventions are those of `plots`: every seed is an open point beside the mean, and
what differs by colour differs by marker or line too."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from .plots import COLORS, LINES, MARKERS, PREDICTORS, REFERENCE, SEED, _legend, _looks, _panels, _point, _styled, shares

STEM = dict(linewidth=1.6, solid_capstyle="butt")


@_styled
def six_arms(table: pd.DataFrame, published: Mapping[tuple[str, int], float]) -> Figure:
    """Columns arm, model, horizon, hit. One panel per horizon, one row per arm, coloured by the model that is read; `published`: (arm, horizon) ->
    the reference study's value."""
    names, horizons = list(dict.fromkeys(table.arm)), sorted(table.horizon.unique())
    models = table.assign(arm=table.model)
    looks = _looks(models)
    figure = Figure(figsize=(3.2 + 2.2 * len(horizons), 1.5 + 0.42 * len(names)))
    axes = figure.subplots(1, len(horizons), sharey=True, squeeze=False)[0]
    for ax, h in zip(axes, horizons):
        for y, name in enumerate(names):
            part = table[(table.arm == name) & (table.horizon == h)]
            _point(ax, y, part.hit, looks[part.model.iloc[0]], horizontal=True)
            if (name, h) in published:
                ax.plot(published[name, h], y - 0.3, **REFERENCE, zorder=5)
        ax.set(title=f"h = {h}", xlabel="hit@k (share of k)", yticks=range(len(names)), yticklabels=names)
        ax.margins(x=0.1)
        shares(ax, axis="x")
        ax.grid(axis="y", visible=False)
    axes[0].invert_yaxis()
    _legend(figure, models, [Line2D([], [], **REFERENCE, label="reference study")])
    return figure


@_styled
def pairs(table: pd.DataFrame) -> Figure:
    """Columns arm (baseline, joint), seed, horizon, hit. One panel per horizon: each seed's two models joined by a line, the means filled."""
    horizons, arms = sorted(table.horizon.unique()), list(dict.fromkeys(table.arm))
    figure, axes = _panels(len(horizons), height=3.4, width=2.4, sharey=True)
    looks = _looks(table)
    for ax, h in zip(axes, horizons):
        wide = table[table.horizon == h].pivot(index="seed", columns="arm", values="hit")[arms]
        for values in wide.to_numpy():
            ax.plot(range(len(arms)), values, color="#999999", linewidth=0.9, zorder=1)
        for x, arm in enumerate(arms):
            ax.plot(np.full(len(wide), x), wide[arm], linestyle="none", marker=looks[arm]["marker"], markersize=4, markerfacecolor="white",
                    markeredgecolor=looks[arm]["color"], markeredgewidth=0.8, zorder=3)  # fmt: skip
            ax.plot(x, wide[arm].mean(), marker=looks[arm]["marker"], color=looks[arm]["color"], markersize=7, zorder=4)
        ax.set(title=f"h = {h}", xticks=range(len(arms)), xticklabels=arms, xlim=(-0.4, len(arms) - 0.6))
        ax.grid(axis="x", visible=False)
    shares(*axes)
    axes[0].set_ylabel("hit@k (share of the true top-k)")
    _legend(figure, table, [Line2D([], [], color="#999999", linewidth=0.9, label="the same seed")])
    return figure


@_styled
def spreads(table: pd.DataFrame) -> Figure:
    """Columns arm, predictor, horizon, std, low, high, reference (hit@k; NaN where there is none). One panel per predictor."""
    predictors, horizons = list(dict.fromkeys(table.predictor)), sorted(table.horizon.unique())
    figure, axes = _panels(len(predictors), height=3.4, width=3.2, sharey=True)
    looks = _looks(table)
    offsets = dict(zip(looks, np.linspace(-0.25, 0.25, len(looks))))
    for ax, predictor in zip(axes, predictors):
        for row in table[table.predictor == predictor].itertuples():
            x, look = horizons.index(row.horizon) + offsets[row.arm], looks[row.arm]
            ax.plot([x, x], [100 * row.low, 100 * row.high], color=look["color"], **STEM)
            ax.plot(x, 100 * row.std, marker=look["marker"], color=look["color"], markersize=5.5, zorder=4)
            if np.isfinite(row.reference):
                ax.plot(x, 100 * row.reference, **REFERENCE, zorder=5)
        ax.set(title=PREDICTORS.get(predictor, predictor), xticks=range(len(horizons)), xticklabels=horizons, xlabel="horizon (layers)", yscale="log")
        ax.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}", minor_locator=NullLocator())
        ax.set_xlim(-0.6, len(horizons) - 0.4)
        ax.grid(axis="x", visible=False)
    axes[0].set_ylabel("standard deviation between\nseeds (points of hit@k)")
    _legend(figure, table, [Line2D([], [], **REFERENCE, label="reference study")] if table.reference.notna().any() else [], seeds=False)
    return figure


@_styled
def power(table: pd.DataFrame, *, wanted: float) -> Figure:
    """Columns arm (paired, unpaired), effect (hit@k), horizon, n, power. One panel per horizon; colour and marker are the effect, a broken line unpaired."""
    horizons, effects = sorted(table.horizon.unique()), sorted(table.effect.unique())
    figure, axes = _panels(len(horizons), height=3.4, width=2.8, sharey=True)
    for ax, h in zip(axes, horizons):
        for i, effect in enumerate(effects, start=1):
            for arm, line in (("paired", "-"), ("unpaired", "--")):
                part = table[(table.horizon == h) & (table.effect == effect) & (table.arm == arm)]
                ax.plot(part.n, part.power, color=COLORS[i], marker=MARKERS[i] if arm == "paired" else "", markersize=3.5, linestyle=line, linewidth=1.2)
        ax.axhline(wanted, color="#777777", linewidth=0.8, linestyle=LINES[2])
        ax.set(title=f"h = {h}", xlabel="seeds (of each arm)", ylim=(0, 1.03))
    axes[0].set_ylabel("chance of finding the effect (share)")
    handles = [Line2D([], [], color=COLORS[i], marker=MARKERS[i], markersize=3.5, label=f"{100 * effect:g} points") for i, effect in enumerate(effects, start=1)]
    handles += [Line2D([], [], color="#555555", linestyle=line, label=name) for name, line in (("paired", "-"), ("unpaired", "--"))]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


@_styled
def narrowing(table: pd.DataFrame) -> Figure:
    """Columns n, horizon, mean, low, high, per_seed: the effect with the first n seeds. One panel per horizon."""
    horizons = sorted(table.horizon.unique())
    figure, axes = _panels(len(horizons), height=3.2, width=2.6, sharey=True)
    for ax, h in zip(axes, horizons):
        for row in table[table.horizon == h].itertuples():
            ax.plot([row.n, row.n], [100 * row.low, 100 * row.high], color=COLORS[1], **STEM)
            ax.plot(np.full(len(row.per_seed), row.n + 0.15), 100 * np.array(row.per_seed), **SEED | {"marker": "s"}, markeredgecolor=COLORS[1], markeredgewidth=0.8)
            ax.plot(row.n, 100 * row.mean, marker="s", color=COLORS[1], markersize=6, zorder=4)
        ax.axhline(0, color="#555555", linewidth=1)
        ax.set(title=f"h = {h}", xlabel="first n seeds", xticks=sorted(table.n.unique()), xlim=(table.n.min() - 0.5, table.n.max() + 0.5))
        ax.grid(axis="x", visible=False)
    axes[0].set_ylabel("joint - baseline\n(points of hit@k)")
    _effect_legend(figure, {"color": COLORS[1], "marker": "s"}, {})
    return figure


@_styled
def sizes(table: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Columns active, seed, horizon, gain; `published`: arm, active, horizon, gain of the reference study. One panel per horizon, size on a log axis."""
    horizons = sorted(table.horizon.unique())
    figure, axes = _panels(len(horizons), height=3.4, width=2.8, sharey=True)
    look = {"color": COLORS[1], "marker": "s", "linestyle": "--"}
    marks = {name: REFERENCE | {"marker": marker} for name, marker in zip(dict.fromkeys(published.arm), ("D", "^"))}
    for ax, h in zip(axes, horizons):
        part = table[table.horizon == h]
        at = sorted(part.active.unique())
        means = [_point(ax, active / 1e6, 100 * part[part.active == active].gain, look, log=True) for active in at]
        ax.plot(np.array(at) / 1e6, means, color=look["color"], linestyle=look["linestyle"], linewidth=1, zorder=2)
        for row in published[published.horizon == h].itertuples():
            ax.plot(row.active / 1e6, 100 * row.gain, **marks[row.arm], zorder=5)
        ax.axhline(0, color="#555555", linewidth=1)
        ax.set_xscale("log")
        ax.xaxis.set(major_formatter="{x:g}", minor_formatter=NullFormatter())
        ax.margins(x=0.12)
        ax.set(title=f"h = {h}", xlabel="active parameters (millions)")
    axes[0].set_ylabel("joint - baseline\n(points of hit@k)")
    _effect_legend(figure, look, marks)
    return figure


@_styled
def experts(table: pd.DataFrame, published: pd.DataFrame, *, label: str = "experts", width: float = 2.6) -> Figure:
    """Columns routing ("16, top-2", or whatever `label` names), seed, horizon, gain; `published`: arm, routing, horizon, gain, drawn where `table`
    has its routing. One panel per horizon, `width` inches wide."""
    horizons, routings = sorted(table.horizon.unique()), list(dict.fromkeys(table.routing))
    published = published[published.routing.isin(routings)]
    figure, axes = _panels(len(horizons), height=3.4, width=width, sharey=True)
    look = {"color": COLORS[1], "marker": "s", "linestyle": "none"}
    marks = {name: REFERENCE | {"marker": marker} for name, marker in zip(dict.fromkeys(published.arm), ("D", "^"))}
    for ax, h in zip(axes, horizons):
        for x, routing in enumerate(routings):
            _point(ax, x, 100 * table[(table.horizon == h) & (table.routing == routing)].gain, look)
        for row in published[published.horizon == h].itertuples():
            ax.plot(routings.index(row.routing) - 0.15, 100 * row.gain, **marks[row.arm], zorder=5)
        ax.axhline(0, color="#555555", linewidth=1)
        ax.set(title=f"h = {h}", xticks=range(len(routings)), xticklabels=["\n".join(textwrap.wrap(routing, 12)) for routing in routings],
               xlim=(-0.5, len(routings) - 0.5), xlabel=label)
        ax.grid(axis="x", visible=False)
    axes[0].set_ylabel("joint - baseline\n(points of hit@k)")
    _effect_legend(figure, look, marks)
    return figure


def _effect_legend(figure, look, marks) -> None:
    handles = [Line2D([], [], color=look["color"], marker=look["marker"], linewidth=1.6, label="mean, 95% interval")]
    handles.append(Line2D([], [], **SEED | {"marker": look["marker"]}, markeredgecolor=look["color"], label="one seed"))
    handles += [Line2D([], [], **mark, label=name) for name, mark in marks.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 3))
