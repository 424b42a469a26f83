"""Figures of 07, 09 and 15: measures of locality by arm, caches by size, the entropy ladder, and frontiers of many arms.

As in `plots`: tables in, every seed an open point, the mean filled with its interval. A frontier of many arms tells families by marker
and colour and arms by a number, which the legend spells out.
"""

from __future__ import annotations

import textwrap

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .plots import COLORS, GATE, LINES, MARKERS, SEED, _cloud, _legend, _looks, _panels, _point, _styled, shares


@_styled
def measures(table: pd.DataFrame, *, label: str, columns: int = 4) -> Figure:
    """Columns measure, value (a share). One panel per measure, one position per arm, with its name."""
    names, arms, looks = list(dict.fromkeys(table.measure)), list(dict.fromkeys(table.arm)), _looks(table)
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(max(2.4 * min(columns, len(names)), 4.2) + 0.6, 3.0 * rows + 0.6))
    axes = figure.subplots(rows, min(columns, len(names)), squeeze=False)
    for ax, name in zip(axes.flat, names):
        part = table[table.measure == name]
        for i, arm in enumerate(arms):
            mine = part[part.arm == arm]
            if len(mine):
                _point(ax, i, 100 * mine.value, looks[arm])
        if "baseline" in arms:
            ax.axhline(100 * part[part.arm == "baseline"].value.mean(), color="#bbbbbb", linewidth=1, zorder=1)
        ax.set_title("\n".join(textwrap.wrap(name, 26)), fontsize=9)
        ax.set(xticks=range(len(arms)), xlim=(-0.6, len(arms) - 0.3))
        ax.set_xticklabels(arms, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
        ax.grid(axis="x", visible=False)
        shares(ax, whole=100.0)
    for ax in list(axes.flat)[len(names) :]:
        ax.set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel(label)
    _legend(figure, table, columns=4)
    return figure


@_styled
def caches(table: pd.DataFrame) -> Figure:
    """Columns policy, share, size (its words), hit_rate. One panel per policy: hit rate by the cache's share of a layer's experts."""
    policies, looks = list(dict.fromkeys(table.policy)), _looks(table)
    figure, axes = _panels(len(policies), height=3.3, width=3.6, sharey=True)
    for ax, policy in zip(axes, policies):
        for arm, look in looks.items():
            mine = table[(table.arm == arm) & (table.policy == policy)]
            at = sorted(mine["share"].unique())
            points = [_point(ax, share, 100 * mine[mine["share"] == share].hit_rate, look, small=True, log=True) for share in at]
            ax.plot(at, points, color=look["color"], linestyle=look["linestyle"], linewidth=1)
        ticks = table.drop_duplicates("share").sort_values("share")
        ax.set_xscale("log")
        ax.margins(x=0.12)
        ax.set(title={"lru": "LRU", "belady": "Belady (the optimum)"}.get(policy, policy), xlabel="cache (share of a layer's experts)", xticks=ticks["share"], xticklabels=ticks["size"])
        ax.minorticks_off()
    shares(*axes, whole=100.0)
    axes[0].set_ylabel("hit rate (%)")
    _legend(figure, table, columns=4)
    return figure


@_styled
def ladder(table: pd.DataFrame) -> Figure:
    """Columns horizon, entropy (share of the maximum), hit. One panel per horizon: the entropy ladder of each seed as a line through the
    baseline and the penalties, the joint model beside it."""
    horizons, looks = sorted(table.horizon.unique()), _looks(table)
    figure, axes = _panels(len(horizons), height=3.3, width=2.9, sharey=False)
    for ax, horizon in zip(axes, horizons):
        part = table[table.horizon == horizon]
        for _, line in part[part.arm != "joint"].groupby("seed"):
            ordered = line.sort_values("entropy")
            ax.plot(ordered.entropy, 100 * ordered.hit, color="#999999", linewidth=1, zorder=1)
        for arm, look in looks.items():
            mine = part[part.arm == arm]
            _cloud(ax, mine.entropy, 100 * mine.hit, look)
        ax.set(title=f"h = {horizon}", xlabel="router entropy\n(share of the maximum)")
        shares(ax, whole=100.0)
        shares(ax, axis="x")
    axes[0].set_ylabel("hit@k, ranking MLP (%)")
    _legend(figure, table, [Line2D([], [], color="#999999", linewidth=1, label="ladder of one seed")], columns=4)
    return figure


@_styled
def many_arms(table: pd.DataFrame, *, panel: str, value: str, label: str, gate: float, families: tuple[str, ...], title: str = "{}") -> Figure:
    """Columns family, loss_change (fraction), `value` (a share) and `panel`. One panel per value of `panel`, loss to the right.

    Families differ by colour and marker; each arm's mean carries its number, and the legend has the names.
    """
    panels, arms = list(dict.fromkeys(table[panel])), list(dict.fromkeys(table.arm))
    number = {arm: str(i) for i, arm in enumerate(arms, start=1)}
    held = [name for name in families if name in set(table.family)]
    looks = {name: {"color": COLORS[i % 6], "marker": MARKERS[i % 6], "linestyle": LINES[i % 6]} for i, name in enumerate(families)}
    figure, axes = _panels(len(panels), height=4.4, width=3.2, sharey=False)
    for ax, which in zip(axes, panels):
        for (arm, family), part in table[table[panel] == which].groupby(["arm", "family"], sort=False):
            _cloud(ax, 100 * part.loss_change, 100 * part[value], looks[family])
            ax.annotate(number[arm], (100 * part.loss_change.mean(), 100 * part[value].mean()), xytext=(4, 4), textcoords="offset points", fontsize=7.5, color=looks[family]["color"])
        ax.axvline(100 * gate, **GATE)
        ax.margins(0.12)
        shares(ax, whole=100.0)
        ax.set_title("\n".join(textwrap.wrap(title.format(which), 30)), fontsize=9.5)
        ax.set_xlabel("validation loss against\nthe baseline's (%)")
    axes[0].set_ylabel(label)
    handles = [Line2D([], [], **(looks[name] | {"linestyle": "none"}), label=name) for name in held]
    handles += [Line2D([], [], **GATE, label="quality gate"), Line2D([], [], **SEED, markeredgecolor="#555555", label="one seed")]
    figure.legend(handles=handles, loc="outside upper center", ncols=4 if len(panels) > 2 else 3)
    listed = [f"{number[arm]} {arm}" for arm in arms]
    width = max(1, int(len(panels) * 3.2 / 1.55))
    lines = [";  ".join(listed[i : i + width]) for i in range(0, len(listed), width)]
    figure.supxlabel("\n".join(lines), fontsize=8.5, color="#333333")
    return figure
