"""Figures of cache, disk and prefetch, from tables. The conventions are those of `plots`: every seed is an open point beside the mean,
and what differs by colour differs by marker, line or hatching too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from .plots import COLORS, LINES, MARKERS, REFERENCE, SEED, _point, _styled

ARMS = {
    "demand": "no prefetch", "next-router": "next layer's router", "next_router": "next layer's router", "baseline-linear": "baseline, linear",
    "baseline-ranking": "baseline, ranking MLP", "joint-linear": "joint, linear", "joint-ranking": "joint, ranking MLP", "linear": "linear",
    "ranking": "ranking MLP", "far_ranking": "ranking MLP, far", "oracle": "oracle", "far_oracle": "oracle, far",
}  # fmt: skip
POLICY_LOOKS = {
    "Belady": dict(color="#333333", linestyle="-", linewidth=2.2, marker=""),
    "LRU": dict(color=COLORS[1], linestyle="-", marker="s"), "LRU per layer": dict(color=COLORS[1], linestyle=":", marker="s"),
    "half pinned, LRU": dict(color=COLORS[3], linestyle="--", marker="D"), "FIFO": dict(color="#888888", linestyle="-.", marker="v"),
    "LFU": dict(color=COLORS[2], linestyle="--", marker="^"), "LFRU": dict(color=COLORS[2], linestyle="-", marker="P"),
    "Least-Stale": dict(color=COLORS[4], linestyle="-", marker="o"),
}  # fmt: skip
TIMELINE = {   # kind of a timeline row: lane, colour, hatching, what the legend says
    "demand read": ("disk", COLORS[5], "", "demand read"), "prefetch read": ("disk", COLORS[1], "///", "prefetch read"),
    "attention": ("processor", "#9a9a9a", "", "attention, head"), "head": ("processor", "#9a9a9a", "", "attention, head"),
    "experts": ("processor", COLORS[4], "", "computation"), "stall": ("processor", "white", "....", "stall"),
}  # fmt: skip


@_styled
def arms(table: pd.DataFrame, published: Mapping[str, Mapping[str, float]], metrics: Mapping[str, str], *, signed: bool = False) -> Figure:
    """Columns set (whose accuracies, or another condition), arm, seed and the `metrics` (column -> axis label with unit). One panel per metric, one
    row per arm; `published`: metric -> arm -> the reference study's value, drawn where there is one;
    `signed`: zero is marked."""
    names, sets = list(dict.fromkeys(table.arm)), list(dict.fromkeys(table.set))
    figure = Figure(figsize=(3.4 + 2.6 * len(metrics), 1.3 + 0.42 * len(names)))
    axes = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    offsets = np.linspace(-0.2, 0.2, len(sets)) if len(sets) > 1 else [0.0]
    looks = {name: dict(color=COLORS[1 + i], marker=MARKERS[1 + i], linestyle="none") for i, name in enumerate(sets)}
    for ax, (metric, label) in zip(axes, metrics.items()):
        for offset, name in zip(offsets, sets):
            for y, arm in enumerate(names):
                values = table[(table.set == name) & (table.arm == arm)][metric].dropna()
                if len(values):
                    _point(ax, y + offset, values, looks[name], horizontal=True)
        for arm, value in published.get(metric, {}).items():
            if arm in names:
                ax.plot(value, names.index(arm) - 0.36, **REFERENCE, zorder=5)
        ax.set(xlabel=label, yticks=range(len(names)), yticklabels=[ARMS.get(name, name) for name in names])
        ax.margins(x=0.08)
        if signed:
            ax.axvline(0, color="#555555", linewidth=1)
        ax.grid(axis="y", visible=False)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    handles = [Line2D([], [], **looks[name], label=name) for name in sets] + [Line2D([], [], **SEED, markeredgecolor="#555555", label="one seed")]
    if any(published.get(metric) for metric in metrics):
        handles.append(Line2D([], [], **REFERENCE, label="reference study"))
    figure.legend(handles=handles, loc="outside upper center", ncols=min(3, len(handles)))
    return figure


@_styled
def hit_curves(curves: pd.DataFrame) -> Figure:
    """Columns model, policy, share (of all experts that fit in the cache), hit_rate. One panel per model."""
    models = list(dict.fromkeys(curves.model))
    figure = Figure(figsize=(8.4, 2.35 * ((len(models) + 1) // 2) + 0.7))
    axes = figure.subplots((len(models) + 1) // 2, 2, sharex=True, sharey=True, squeeze=False).ravel()
    policies = [name for name in POLICY_LOOKS if name in set(curves.policy)]
    for ax, model in zip(axes, models):
        for policy in policies:
            line = curves[(curves.model == model) & (curves.policy == policy)].sort_values("share")
            ax.plot(100 * line.share, 100 * line.hit_rate, **{"markersize": 4, "markerfacecolor": "white", "linewidth": 1.3, **POLICY_LOOKS[policy]})
        ax.set(title=model, ylim=(-3, 103))
    for ax in axes[len(models) :]:
        ax.set_visible(False)
    for ax in axes[max(0, len(models) - 2) :]:
        ax.set_xlabel("cache size (% of all experts)")
        ax.tick_params(labelbottom=True)
    for ax in axes[::2]:
        ax.set_ylabel("hit rate in decode (%)")
    handles = [Line2D([], [], **{"markersize": 4, "markerfacecolor": "white", **POLICY_LOOKS[policy]}, label=policy) for policy in policies]
    figure.legend(handles=handles, loc="outside upper center", ncols=4)
    return figure


@_styled
def model_curves(table: pd.DataFrame) -> Figure:
    """Columns model, source, share, tok_s, wasted_mb. Left: tok/s against that of demand with the same cache; right: wasted bytes."""
    figure = Figure(figsize=(8.6, 3.3))
    left, right = figure.subplots(1, 2)
    models, sources = list(dict.fromkeys(table.model)), [name for name in dict.fromkeys(table.source) if name != "demand"]
    for i, model in enumerate(models):
        base = table[(table.model == model) & (table.source == "demand")].set_index("share").tok_s
        for j, source in enumerate(sources):
            line = table[(table.model == model) & (table.source == source)].sort_values("share")
            look = dict(color=COLORS[(j + 1) % len(COLORS)], marker=MARKERS[j + 1], linestyle=("--", "-")[i % 2], markersize=4.5, markerfacecolor=("white", None)[i % 2])
            left.plot(100 * line.share, 100 * (line.tok_s.to_numpy() / base.loc[line.share].to_numpy() - 1), **look)
            right.plot(100 * line.share, line.wasted_mb, **look)
    left.axhline(0, color="#555555", linewidth=1)
    left.set(xlabel="cache size (% of all experts)", ylabel="tok/s against no prefetch (%)", title="Gain")
    right.set(xlabel="cache size (% of all experts)", ylabel="wasted (MB/token)", title="Waste")
    handles = [Line2D([], [], color=COLORS[(j + 1) % len(COLORS)], marker=MARKERS[j + 1], linestyle="none", label=ARMS.get(name, name)) for j, name in enumerate(sources)]
    handles += [Line2D([], [], color="#555555", linestyle=("--", "-")[i % 2], marker="o", markersize=4.5, markerfacecolor=("white", None)[i % 2],
                       label=f"{model} model") for i, model in enumerate(models)]  # fmt: skip
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return figure


@_styled
def engine_fit(tokens: pd.DataFrame) -> Figure:
    """Columns token, half (fitted or predicted), measured_ms, predicted_ms, slow. Left: token by token; right: one against the other."""
    figure = Figure(figsize=(8.6, 2.9))
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.75, 1]})
    left.plot(tokens.token, tokens.measured_ms, color=COLORS[0], linewidth=1.2)
    left.plot(tokens.token, tokens.predicted_ms, color=COLORS[1], linestyle="--", linewidth=1.6)
    slow = tokens[tokens.slow]
    left.plot(slow.token, slow.measured_ms, linestyle="none", marker="x", color=COLORS[5], markersize=6)
    split = tokens.token[tokens.half == "fitted"].max() + 0.5
    left.axvline(split, color="#777777", linewidth=1, linestyle=":")
    top = 1.04 * tokens.measured_ms.max()
    left.set(xlabel="decode token", ylabel="time per token (ms)", ylim=(0, 1.12 * top))
    for x, side, text in ((split - 1, "right", "fitted"), (split + 1, "left", "predicted")):
        left.annotate(text, (x, 1.1 * top), ha=side, va="top", fontsize=9)
    for half, marker, color in (("fitted", "o", "#888888"), ("predicted", "s", COLORS[1])):
        part = tokens[(tokens.half == half) & ~tokens.slow]
        right.plot(part.measured_ms, part.predicted_ms, linestyle="none", marker=marker, markersize=4, markerfacecolor="white", color=color, label=half)
    right.plot(slow.measured_ms, slow.predicted_ms, linestyle="none", marker="x", color=COLORS[5], markersize=6)
    right.plot([0, top], [0, top], color="#555555", linewidth=1)
    right.set(xlabel="measured (ms)", ylabel="simulated (ms)", xlim=(0, top), ylim=(0, top))
    handles = [Line2D([], [], color=COLORS[0], label="measured by the engine"), Line2D([], [], color=COLORS[1], linestyle="--", label="simulated"),
               Line2D([], [], color=COLORS[5], marker="x", linestyle="none", label="processor slow"),
               Line2D([], [], color="#888888", marker="o", markerfacecolor="white", linestyle="none", label="fitted half"),
               Line2D([], [], color=COLORS[1], marker="s", markerfacecolor="white", linestyle="none", label="predicted half")]  # fmt: skip
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


@_styled
def timeline(parts: Mapping[str, pd.DataFrame]) -> Figure:
    """What disk and processor do, one panel per entry (title -> `Outcome.timeline()` of the same passes), on one time axis from the first pass's start."""
    figure = Figure(figsize=(9.0, 1.3 * len(parts) + 0.9))
    axes = figure.subplots(len(parts), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (title, rows) in zip(axes, parts.items()):
        processor = rows[~rows.kind.str.endswith("read")]
        origin = processor.start_ms.min()
        for row in rows.itertuples():
            lane, color, hatch, _ = TIMELINE[row.kind]
            ax.broken_barh([(row.start_ms - origin, row.end_ms - row.start_ms)], (0.55 if lane == "disk" else -0.45, 0.9), facecolor=color, hatch=hatch,
                           edgecolor="white" if hatch == "///" else "#555555", linewidth=0.3)  # fmt: skip
        for end in processor.groupby("of_pass").end_ms.max():
            ax.axvline(end - origin, color="#222222", linewidth=1.2)
        ax.set(title=title, yticks=[0, 1], yticklabels=["processor", "disk"], ylim=(-0.6, 1.6))
        ax.grid(visible=False)
    axes[-1].set_xlabel("time (ms); black lines: a token is done")
    seen = {kind for rows in parts.values() for kind in rows.kind}
    known = {text: (color, hatch) for kind, (_, color, hatch, text) in TIMELINE.items() if kind in seen}
    handles = [Patch(facecolor=color, hatch=hatch, edgecolor="white" if hatch == "///" else "#555555", linewidth=0.3, label=text) for text, (color, hatch) in known.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


@_styled
def published_points(machines: pd.DataFrame) -> Figure:
    """Columns machine, hit_published, hit_low, hit_high, tok_s_published, tok_s_low, tok_s_high. Bars: the simulated range over what is not published."""
    figure = Figure(figsize=(9.4, 1.2 + 0.42 * len(machines)))
    left, right = figure.subplots(1, 2, sharey=True)
    for ax, name, scale, label in ((left, "hit", 100, "hit rate (%)"), (right, "tok_s", 1, "tok/s (logarithmic)")):
        low, high = scale * machines[f"{name}_low"], scale * machines[f"{name}_high"]
        ax.barh(range(len(machines)), high - low, left=low, height=0.42, color=COLORS[1], alpha=0.55)
        ax.plot(scale * machines[f"{name}_published"], range(len(machines)), **REFERENCE, zorder=5)
        ax.set(xlabel=label, yticks=range(len(machines)), yticklabels=machines.machine)
        ax.grid(axis="y", visible=False)
    right.set_xscale("log")
    _plain_ticks(right.xaxis, [0.05, 0.1, 0.2, 0.5, 1, 2, 5])
    left.set_xlim(left=0)
    left.invert_yaxis()
    handles = [Patch(facecolor=COLORS[1], alpha=0.55, label="simulated, range over what is not published"), Line2D([], [], **REFERENCE, label="published")]
    figure.legend(handles=handles, loc="outside upper center", ncols=2)
    return figure


# --- sensitivity -------------------------------------------------------------------------------------------------------------

@_styled
def gain_map(found: pd.DataFrame) -> Figure:
    """Columns recall, precision, horizon, gb_per_s, gain (over no prefetch). Rows of panels: horizon; columns: bandwidth. The black line is the
    boundary at which prefetching neither helps nor harms; every cell carries its gain in percent."""
    horizons, disks = sorted(found.horizon.unique()), sorted(found.gb_per_s.unique())
    recalls, precisions = sorted(found.recall.unique()), sorted(found.precision.unique())
    figure = Figure(figsize=(1.2 + 2.35 * len(disks), 1.1 + 1.75 * len(horizons)))
    axes = figure.subplots(len(horizons), len(disks), sharex=True, sharey=True, squeeze=False)
    limit = max(100 * found.gain.max(), 1.0), min(100 * found.gain.min(), -1.0)
    norm = TwoSlopeNorm(0, vmin=limit[1], vmax=limit[0])
    for i, horizon in enumerate(horizons):
        for j, disk in enumerate(disks):
            ax, part = axes[i, j], found[(found.horizon == horizon) & (found.gb_per_s == disk)]
            z = 100 * part.pivot_table(index="recall", columns="precision", values="gain").to_numpy()
            mesh = ax.imshow(z, origin="lower", aspect="auto", cmap=mpl.colormaps["PuOr"].resampled(17), norm=norm)
            if z.min() < 0 < z.max():
                ax.contour(z, levels=[0], colors="black", linewidths=1.8)
            for y, x in np.ndindex(z.shape):
                dark = abs(norm(z[y, x]) - 0.5) > 0.27
                ax.text(x, y, f"{z[y, x]:+z.0f}", ha="center", va="center", fontsize=6.5, color="white" if dark else "#222222")
            ax.set(xticks=range(len(precisions)), yticks=range(len(recalls)), xticklabels=[f"{v:g}" for v in precisions], yticklabels=[f"{v:g}" for v in recalls])
            ax.tick_params(labelsize=7.5)
            ax.grid(visible=False)
            if not i:
                ax.set_title(f"{disk:g} GB/s")
            if not j:
                ax.set_ylabel(f"h = {horizon}\nrecall")
    for ax in axes[-1]:
        ax.set_xlabel("precision")
    figure.colorbar(mesh, ax=axes, label="tok/s against no prefetch (%)", shrink=0.8)
    return figure


@_styled
def bandwidth_gain(rows: pd.DataFrame, published: Mapping, layer_ms: float) -> Figure:
    """Columns variant, seed, gb_per_s, read_ms, gain: the joint model over the baseline by disk; grey: a read takes longer than a layer."""
    figure = Figure(figsize=(7.6, 3.9))
    ax = figure.subplots()
    disks = sorted(rows.gb_per_s.unique())
    variants = list(dict.fromkeys(rows.variant))
    slow = [i for i, disk in enumerate(disks) if rows.loc[rows.gb_per_s == disk, "read_ms"].iloc[0] > layer_ms]
    if slow:
        ax.axvspan(-0.5, max(slow) + 0.5, color="#ececec", zorder=0)
    for k, (variant, offset) in enumerate(zip(variants, np.linspace(-0.18, 0.14, len(variants)) if len(variants) > 1 else [0.0])):
        look = dict(color=COLORS[k % 6], marker=MARKERS[k % 6], linestyle=LINES[k % 6])
        means = [_point(ax, i + offset, 100 * rows[(rows.variant == variant) & (rows.gb_per_s == disk)].gain, look) for i, disk in enumerate(disks)]
        ax.plot(np.arange(len(disks)) + offset, means, color=look["color"], linestyle=look["linestyle"], linewidth=1)
    first = max(slow) + 1 if slow else 0
    ax.fill_between([first - 0.5, len(disks) - 0.5], *(100 * v for v in published["fits"]), color=REFERENCE["color"], alpha=0.25, linewidth=0)
    if published["beyond_gb_per_s"] in disks:
        ax.plot(disks.index(published["beyond_gb_per_s"]) - 0.36, 100 * published["beyond"], **REFERENCE, zorder=5)
    ax.axhline(0, color="#555555", linewidth=1)
    ax.set(xticks=range(len(disks)), xticklabels=[f"{disk:g}" for disk in disks], xlabel="disk bandwidth (GB/s)", ylabel="tok/s, joint against baseline (%)",
           xlim=(-0.5, len(disks) - 0.5))  # fmt: skip
    ax.grid(axis="x", visible=False)
    handles = [Line2D([], [], color=COLORS[k % 6], marker=MARKERS[k % 6], linestyle=LINES[k % 6], label=name) for k, name in enumerate(variants)]
    handles += [Patch(facecolor="#ececec", label=f"a read takes longer than a layer ({layer_ms:g} ms)"), Patch(facecolor=REFERENCE["color"], alpha=0.25, label="reference study"),
                Line2D([], [], **SEED, markeredgecolor="#555555", label="one seed")]  # fmt: skip
    figure.legend(handles=handles, loc="outside upper center", ncols=2)
    return figure


@_styled
def best_settings(best: pd.DataFrame) -> Figure:
    """Columns latency_ms, gb_per_s, slots, guard, horizon, budget, gain: one panel per cache, one cell per disk, with its best setting."""
    caches = sorted(best.slots.unique())
    latencies, disks = sorted(best.latency_ms.unique()), sorted(best.gb_per_s.unique())
    figure = Figure(figsize=(9.6, 0.9 + (0.75 + 0.42 * len(latencies)) * len(caches)))
    axes = figure.subplots(len(caches), 1, sharex=True, squeeze=False)[:, 0]
    top = max(100 * best.gain.max(), 1.0)
    for ax, cache in zip(axes, caches):
        cells = best[best.slots == cache].set_index(["latency_ms", "gb_per_s"])
        z = np.array([[100 * cells.gain[latency, disk] for disk in disks] for latency in latencies])
        mesh = ax.imshow(z, cmap=mpl.colormaps["Blues"].resampled(12), vmin=0, vmax=top, aspect="auto", origin="lower")
        for y, latency in enumerate(latencies):
            for x, disk in enumerate(disks):
                row = cells.loc[(latency, disk)]
                guarded = "guarded" if row.guard == "window" else "no guard"
                text = f"{100 * row.gain:+z.1f}%\nh={row.horizon}, +{row.budget}, {guarded}" if row.gain > 0 else "no prefetch"
                ax.text(x, y, text, ha="center", va="center", fontsize=7.5, color="white" if z[y, x] > 0.6 * top else "#222222")
        ax.set(title=f"{cache} slots per layer", yticks=range(len(latencies)), yticklabels=[f"{v:g}" for v in latencies], ylabel="latency (ms)")
        ax.grid(visible=False)
    axes[-1].set(xticks=range(len(disks)), xticklabels=[f"{v:g}" for v in disks], xlabel="disk bandwidth (GB/s); in a cell: gain, horizon, over-fetch budget, guard")
    figure.colorbar(mesh, ax=axes, label="best tok/s against\nno prefetch (%)", shrink=0.8)
    return figure


@_styled
def overfetch(found: pd.DataFrame, labels: Mapping[str, str]) -> Figure:
    """Columns gb_per_s, horizon, budget, guard, gain of one predictor, latency and cache. One panel per disk; line: horizon; dashes: the guard on."""
    disks, horizons, guards = sorted(found.gb_per_s.unique()), sorted(found.horizon.unique()), list(dict.fromkeys(found.guard))
    figure = Figure(figsize=(1.6 + 2.0 * len(disks), 3.5))
    axes = figure.subplots(1, len(disks), sharey=True, squeeze=False)[0]
    for ax, disk in zip(axes, disks):
        for i, horizon in enumerate(horizons):
            for j, guard in enumerate(guards):
                line = found[(found.gb_per_s == disk) & (found.horizon == horizon) & (found.guard == guard)].sort_values("budget")
                ax.plot(line.budget, 100 * line.gain, color=COLORS[i + 1], marker=MARKERS[i + 1], linestyle=("-", "--")[j], markerfacecolor=(COLORS[i + 1], "white")[j],
                        markersize=4.5)  # fmt: skip
        ax.axhline(0, color="#555555", linewidth=1)
        ax.set(title=f"{disk:g} GB/s", xlabel="experts beyond k", xticks=sorted(found.budget.unique()))
    axes[0].set_ylabel("tok/s against\nno prefetch (%)")
    handles = [Line2D([], [], color=COLORS[i + 1], marker=MARKERS[i + 1], label=f"h = {int(horizon)}") for i, horizon in enumerate(horizons)]
    handles += [Line2D([], [], color="#555555", linestyle=("-", "--")[j], label=labels[guard]) for j, guard in enumerate(guards)]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles) if len(disks) > 3 else 3)
    return figure


def _plain_ticks(axis, values: Sequence[float]) -> None:
    """Ticks of a logarithmic axis as plain numbers."""
    axis.set_major_locator(mpl.ticker.FixedLocator(values))
    axis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(mpl.ticker.NullLocator())


def contour_between(ax, z: np.ndarray) -> None:
    """Black edges between neighbouring cells of an image of which one is below zero and the other is not; nan is neither."""
    for y, x in np.ndindex(z.shape):
        if x + 1 < z.shape[1] and np.isfinite(z[y, x : x + 2]).all() and (z[y, x] < 0) != (z[y, x + 1] < 0):
            ax.plot([x + 0.5] * 2, [y - 0.5, y + 0.5], color="black", linewidth=2)
        if y + 1 < z.shape[0] and np.isfinite(z[y : y + 2, x]).all() and (z[y, x] < 0) != (z[y + 1, x] < 0):
            ax.plot([x - 0.5, x + 0.5], [y + 0.5] * 2, color="black", linewidth=2)
