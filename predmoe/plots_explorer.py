"""The explorer's view as a picture, for viewers without scripts, and in a sentence, for readers who cannot see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .explore import KINDS, UNITS
from .plots import COLORS, MARKERS, PREDICTORS, _styled
from .plots_simulator import TIMELINE, contour_between

NAMES = {"demand": "no prefetch", "router": "next layer's router", "oracle": "oracle"}


def name(row: Mapping) -> str:
    """What a row of a view is called."""
    return PREDICTORS.get(row["source"], row["source"]) if row["row"] == "predictor" else NAMES[row["row"]]


def say(view: Mapping) -> str:
    """The settings and the speed of each row, in words."""
    s = view["settings"]
    speeds = ", ".join(f"{name(row)} {row['tok_s']:.4g} tok/s" for row in view["rows"] if row.get("tok_s") is not None)
    return (f"The explorer at its first position ({s['trace']}, {s['arm']}, {s['slots']} experts in memory, {s['gb_per_s']:g} GB/s, {s['latency_ms']:g} ms latency, {s['layer_ms']:g} ms per layer, "
            f"h = {s['horizon']}, {'no guard' if s['guard'] == 'none' else 'with the guard'}): speeds, the harm map with the predictor's place on it, and the timeline of the last tokens. {speeds}.")  # fmt: skip


@_styled
def picture(view: Mapping) -> Figure:
    """Speeds, the map with the predictor's place, and the timeline of a view (`explore.view`)."""
    figure = Figure(figsize=(8.2, 4.6))
    grid = figure.add_gridspec(2, 2, height_ratios=[1.25, 1])
    _speeds(figure.add_subplot(grid[0, 0]), view)
    _map(figure.add_subplot(grid[0, 1]), view)
    _timeline(figure, figure.add_subplot(grid[1, :]), view)
    return figure


def _speeds(ax, view: Mapping) -> None:
    rows = [row for row in view["rows"] if row.get("tok_s") is not None]
    for y, row in enumerate(rows):
        ax.barh(y, row["tok_s"], color=COLORS[(0, 1, 2, 4)[y % 4]], alpha=0.85, height=0.6)
        gain = "" if row["row"] == "demand" else f" ({100 * (row['tok_s'] / rows[0]['tok_s'] - 1):+z.1f}%)"
        ax.text(row["tok_s"], y, f" {row['tok_s']:.4g}{gain}", va="center", fontsize=9)
    ax.set(yticks=range(len(rows)), yticklabels=[name(row) for row in rows], xlabel="tok/s", title="Speed")
    ax.set_xlim(0, 1.45 * max((row["tok_s"] for row in rows), default=1.0))
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)


def _map(ax, view: Mapping) -> None:
    m = view["map"]
    z = 100 * np.array([[np.nan if v is None else v for v in line] for line in m["gain"]], float)
    if m.get("problem") or np.isnan(z).all():
        ax.text(0.5, 0.5, "no map at this horizon", ha="center", transform=ax.transAxes)
        return
    most = max(1.0, np.nanmax(np.abs(z)))
    ax.imshow(z, origin="lower", aspect="auto", cmap=mpl.colormaps["PuOr"].resampled(17), norm=TwoSlopeNorm(0, vmin=-most, vmax=most), alpha=0.75)
    contour_between(ax, z)
    places = lambda values, v: float(np.interp(v, values, range(len(values))))  # noqa: E731
    at = [(places(m["precisions"], p["precision"]), places(m["recalls"], p["recall"])) for p in m["points"]]
    for (y, x), v in np.ndenumerate(z):
        if np.isfinite(v):
            dx, dy = _clear(x, y, at)
            ax.text(x + dx, y + dy, f"{v:+z.0f}", ha="center", va="center", fontsize=8, color="white" if abs(v) > 0.7 * most else "#222222")
    for p, (px, py) in zip(m["points"], at):
        ax.plot(px, py, marker=MARKERS[0 if p["row"] == "predictor" else 2], markersize=9,
                color="black", markerfacecolor="black" if p["row"] == "predictor" else "white", markeredgecolor="white" if p["row"] == "predictor" else "black")  # fmt: skip
    ax.set(xticks=range(len(m["precisions"])), xticklabels=[f"{v:g}" for v in m["precisions"]], yticks=range(len(m["recalls"])), yticklabels=[f"{v:g}" for v in m["recalls"]],
           xlabel="precision of the guesses", ylabel="recall", title="Gain (%); ● predictor, △ router")  # fmt: skip
    ax.grid(visible=False)


def _clear(x: float, y: float, marks: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """How far a cell's number moves from the middle of its cell (of size 1) so that no marker covers it, or as little as can be."""
    room = lambda by: min((max(abs(px - x - by[0]) - 0.4, abs(py - y - by[1]) - 0.38) for px, py in marks), default=1.0)  # noqa: E731
    spots = [(0.0, 0.0), (0.0, -0.33), (0.0, 0.33), (0.3, -0.33), (-0.3, -0.33), (0.3, 0.33), (-0.3, 0.33)]
    return next((by for by in spots if room(by) >= 0), max(spots, key=room))


def _timeline(figure, ax, view: Mapping) -> None:
    looks = {"computation": "experts"}
    for i, part in enumerate(view["timeline"]):
        scale = part["ms"] / UNITS
        for kind, start, length in part["rows"]:
            lane, color, hatch, _ = TIMELINE[looks.get(KINDS[kind], KINDS[kind])]
            y = -2.4 * i + (0.05 if lane == "disk" else -0.9)
            ax.broken_barh([(start * scale, length * scale)], (y, 0.8), facecolor=color, hatch=hatch, edgecolor="white" if hatch == "///" else "#555555", linewidth=0.2)
        for end in part["ends"]:
            ax.plot([end * scale] * 2, [-2.4 * i - 0.95, -2.4 * i + 0.9], color="#222222", linewidth=1.2)
    predictor = next(row for row in view["rows"] if row["row"] == "predictor")
    who = {"demand": "no prefetch", "predictor": name(predictor)}
    ticks = [(-2.4 * i + dy, f"{who[part['row']]}: disk" if dy > 0 else "processor") for i, part in enumerate(view["timeline"]) for dy in (0.45, -0.5)]
    ax.set(yticks=[t for t, _ in ticks], yticklabels=[label for _, label in ticks], xlabel="time (ms); black lines: a token is done")
    ax.grid(visible=False)
    kinds = sorted({row[0] for part in view["timeline"] for row in part["rows"]})
    handles = []
    for kind in kinds:
        _, color, hatch, _ = TIMELINE[looks.get(KINDS[kind], KINDS[kind])]
        handles.append(Patch(facecolor=color, hatch=hatch, edgecolor="white" if hatch == "///" else "#555555", linewidth=0.3, label=KINDS[kind]))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
