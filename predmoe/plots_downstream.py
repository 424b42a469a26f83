"""Figures of 12: what the models answer rightly, task by task, against the line of chance; and differences on a scale of each task's own.
As in `plots`: tables in, every seed an open point."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .plots import _effect, _effect_legend, _legend, _looks, _point, _styled, shares

CHANCE = dict(color="#B03A2E", linestyle=(0, (4, 2)), linewidth=1)
LEAST = 2.0   # points that a panel spans at least: of models that all answer nothing rightly its scale would mean nothing
ROOM = 0.08    # of the panel, below 0 where a model answers nothing rightly


@_styled
def levels(table: pd.DataFrame, *, columns: int = 4) -> Figure:
    """Columns task, items, accuracy, accuracy_norm (shares; NaN where there is none) and chance. One panel per task: both accuracies of every arm, and the line of chance;
    where no model answers anything rightly, that is written."""
    tasks, arms, looks = list(dict.fromkeys(table.task)), list(dict.fromkeys(table.arm)), _looks(table)
    across = min(columns, len(tasks))
    rows = -(-len(tasks) // across)
    figure = Figure(figsize=(max(2.2 * across, 4.2) + 0.6, 2.5 * rows + 0.7))
    axes = figure.subplots(rows, across, squeeze=False)
    for ax, task in zip(axes.flat, tasks):
        part = table[table.task == task]
        shown = [name for name in ("accuracy", "accuracy_norm") if not part[name].isna().all()]
        for x, name in enumerate(shown):
            for i, arm in enumerate(arms):
                mine = part[part.arm == arm]
                if len(mine):
                    _point(ax, x + (i - (len(arms) - 1) / 2) * 0.3, 100 * mine[name], looks[arm])
        ax.axhline(100 * part.chance.iloc[0], **CHANCE)
        ax.set_title(task, fontsize=9.5)
        ax.set(xticks=range(len(shown)), xticklabels=["plain", "normalised"][: len(shown)], xlim=(-0.6, len(shown) - 0.4))
        ax.margins(y=0.2)
        shares(ax, whole=100.0)
        low, high = ax.get_ylim()
        high = max(high, low + LEAST)
        ax.set_ylim(min(low, -ROOM * high) if part.accuracy.min() == 0 else low, high)   # a mark at 0 is seen whole, above the axis
        if not part[shown].to_numpy().any():
            ax.text(0.5, 0.55, f"none of {int(part['items'].iloc[0]):,} right,\nby any of {len(part)} models", transform=ax.transAxes, ha="center", fontsize=8.5)
    for ax in list(axes.flat)[len(tasks) :]:
        ax.set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel("right answers (%)")
    for ax in axes[-1]:
        ax.set_xlabel("accuracy")
    _legend(figure, table, [Line2D([], [], **CHANCE, label="chance")], columns=4)
    return figure


@_styled
def differences(effects: pd.DataFrame, *, label: str, columns: int = 4) -> Figure:
    """Columns name (a task), mean, low, high, per_seed and reference, as for `plots.forest`. One panel per task with a scale of its own: an interval that is narrow
    beside another task's is seen to exclude zero, or not to."""
    across = min(columns, len(effects))
    rows = -(-len(effects) // across)
    figure = Figure(figsize=(max(2.2 * across, 4.2) + 0.6, 1.15 * rows + 1.0))
    axes = figure.subplots(rows, across, squeeze=False)
    for ax, row in zip(axes.flat, effects.itertuples()):
        _effect(ax, 0.0, row, 1.0)
        ax.axvline(0, color="#555555", linewidth=1)
        ax.set(yticks=[], ylim=(0.6, -0.5))
        ax.set_title(row.name, fontsize=9.5)
        ax.margins(x=0.12)
        ax.locator_params(axis="x", nbins=5)
        ax.tick_params(axis="x", labelsize=8)
    for ax in list(axes.flat)[len(effects) :]:
        ax.set_visible(False)
    figure.supxlabel(label, fontsize=9.5)
    _effect_legend(figure, effects)
    return figure
