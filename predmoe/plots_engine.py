"""Figures of the engine, from the tables of `engine_study`. The conventions are those of `plots`: every prompt or cell is shown beside the mean."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from . import stats
from .plots import COLORS, MARKERS, SEED, _point, _styled
from .plots_simulator import ARMS


FAR, FAR_MARKER = "far_", "X"   # a far source has the colour of the near one and this marker


def _sources(table: pd.DataFrame) -> dict[str, dict]:
    """Colour and marker of each source."""
    names = [name for name in ARMS if name in set(table.source)]
    near = list(dict.fromkeys(name.removeprefix(FAR) for name in names))
    return {name: {"color": COLORS[i % len(COLORS)], "marker": FAR_MARKER if name.startswith(FAR) else MARKERS[i % len(MARKERS)]}
            for name in names for i in [near.index(name.removeprefix(FAR))]}  # fmt: skip


def _columns(handles: list) -> int:
    """Of a legend above a figure of two panels: two rows where one is too wide."""
    return len(handles) if len(handles) <= 5 else -(-len(handles) // 2)


@_styled
def race(rows: pd.DataFrame) -> Figure:
    """Columns arm, seed, source, share, prompt, tokens, ms. One panel per cache share, a row per source, in it a row per model: tok/s of every prompt as a small mark below the mean
    with its interval. Each panel has a scale of its own."""
    rows = rows.assign(tok_s=1000 * rows.tokens / rows.ms)
    arms, shares = list(dict.fromkeys(rows.arm)), sorted(rows.share.unique())
    sources = [name for name in ARMS if name in set(rows.source)]
    looks = {arm: dict(color=COLORS[i % len(COLORS)], marker=MARKERS[i % len(MARKERS)]) for i, arm in enumerate(arms)}
    figure = Figure(figsize=(1.6 + 2.0 * len(shares), 1.1 + 0.42 * len(sources)))
    axes = figure.subplots(1, len(shares), sharey=True, squeeze=False)[0]
    for ax, share in zip(axes, shares):
        for y, source in enumerate(sources):
            for arm, offset in zip(arms, np.linspace(-0.22, 0.22, len(arms)) if len(arms) > 1 else [0.0]):
                part = rows[(rows.arm == arm) & (rows.source == source) & (rows.share == share)]
                if len(part):
                    _speeds(ax, y + offset, part.tok_s, looks[arm])
        ax.set(title=f"{share:.0%} in the cache", xlabel="tok/s")
        ax.grid(axis="y", visible=False)
        for y in range(1, len(sources)):
            ax.axhline(y - 0.5, color="#dddddd", linewidth=0.6, zorder=0)
    axes[0].set(yticks=range(len(sources)), yticklabels=[ARMS[name] for name in sources], ylim=(len(sources) - 0.5, -0.5))
    handles = [Line2D([], [], **looks[arm], linewidth=1.6, label=f"{arm} model") for arm in arms] + [Line2D([], [], color="#555555", marker="|", linestyle="none", label="one prompt")]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def _speeds(ax, y: float, values: pd.Series, look: dict) -> None:
    """Every value a small mark, above them the mean with its interval."""
    effect = stats.over_seeds(dict(enumerate(values)))
    ax.plot(values, np.full(len(values), y + 0.1), linestyle="none", marker="|", markersize=3.5, color=look["color"], alpha=0.45, markeredgewidth=0.7, zorder=2)
    if effect.ci95:
        ax.plot(effect.ci95, [y - 0.03, y - 0.03], color=look["color"], linewidth=1.6, solid_capstyle="butt", zorder=3)
    ax.plot(effect.mean, y - 0.03, color=look["color"], marker=look["marker"], markersize=4, zorder=4)


@_styled
def prediction(table: pd.DataFrame) -> Figure:
    """Columns source, tok_s, sim_tok_s, hit_rate, read_bytes, sim_read_bytes. One point per cell: simulated against measured, and the error by source (dotted: 5%)."""
    looks = _sources(table)
    figure = Figure(figsize=(8.6, 3.6))
    left, right = figure.subplots(1, 2)
    for i, (source, look) in enumerate(looks.items()):
        part = table[table.source == source]
        left.plot(part.tok_s, part.sim_tok_s, linestyle="none", markerfacecolor="white", markersize=5, **look)
        right.plot(100 * part.error_tok_s, np.full(len(part), i), linestyle="none", markerfacecolor="white", markersize=5, **look)
    ends = [0.9 * min(table.tok_s.min(), table.sim_tok_s.min()), 1.1 * max(table.tok_s.max(), table.sim_tok_s.max())]
    left.plot(ends, ends, color="#555555", linewidth=1)
    left.set(xlabel="measured (tok/s)", ylabel="simulated (tok/s)", xlim=ends, ylim=ends)
    right.axvline(0, color="#555555", linewidth=1)
    for edge in (-5, 5):
        right.axvline(edge, color="#999999", linewidth=1, linestyle=":")
    right.set(xlabel="error of the simulated tok/s (%)", yticks=range(len(looks)), yticklabels=[ARMS[name] for name in looks])
    right.invert_yaxis()
    right.grid(axis="y", visible=False)
    handles = [Line2D([], [], linestyle="none", markerfacecolor="white", label=ARMS[name], **look) for name, look in looks.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=_columns(handles))
    return figure


@_styled
def roofline(table: pd.DataFrame) -> Figure:
    """Columns source, share, over_bound: time per token over its bound, one open point per model, the mean beside them."""
    looks, shares = _sources(table), sorted(table.share.unique())
    figure = Figure(figsize=(6.4, 3.4))
    ax = figure.subplots()
    offsets = np.linspace(-0.3, 0.3, len(looks)) if len(looks) > 1 else [0.0]
    for (source, look), x in zip(looks.items(), offsets):
        for i, share in enumerate(shares):
            part = table[(table.source == source) & (table.share == share)]
            if len(part):
                _point(ax, i + x, part.over_bound, look, interval=False, small=True)
    ax.axhline(1, color="#555555", linewidth=1)
    ax.set(xticks=range(len(shares)), xticklabels=[f"{share:.0%}" for share in shares], xlabel="experts that fit in the cache", ylabel="time per token over its bound",
           ylim=(0, None), xlim=(-0.5, len(shares) - 0.5))  # fmt: skip
    ax.grid(axis="x", visible=False)
    handles = [Line2D([], [], linestyle="none", label=ARMS[name], **look) for name, look in looks.items()]
    handles.append(Line2D([], [], **SEED, markeredgecolor="#555555", label="one model"))
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return figure
