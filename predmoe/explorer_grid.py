"""The explorer without a kernel: every position of a small grid simulated beforehand, packed, and read by the same JavaScript module.

    outputs/PROFILE/NOTEBOOK/explorer.json      written by `close`, which also shows the widget and a picture in the notebook;
                                                `report` puts it into the notebook's page

The file has the controls, where they stand first, and one deflated block of arrays. Rows (demand, router, predictor, oracle) are tabulated over
the controls that they depend on alone: without prefetch there is no horizon.
"""
# P positions of a row's controls, C columns of numbers

from __future__ import annotations

import base64
import itertools
import json
import os
import warnings
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from . import explore, plots_explorer, results
from .explore import DEMAND, ORACLE, ROUTER, Held, Settings
from .explorer_widget import MEASURED, Explorer, Sources, explorer
from .files import parse_json
from .simulator import Outcome, SimulationWarning

VERSION = 1
FILE = "explorer.json"
MIME = "application/vnd.predmoe.explorer+json"
COLUMNS = ("tok_s", "hit_rate", "stall_ms", "read_mb", "wasted_mb")
MACHINE = ("trace", "arm", "policy", "slots", "gb_per_s", "latency_ms", "layer_ms")
AXES = {"demand": MACHINE, "router": (*MACHINE, "horizon", "budget"), "predictor": (*MACHINE, "horizon", "budget", "predictor"), "oracle": (*MACHINE, "horizon")}
ORDER = ("trace", "arm", "predictor", "policy", "horizon", "budget", "slots", "gb_per_s", "latency_ms", "layer_ms")
CANNOT = -32768
GRID = {"policy": ("lru", "lfu"), "horizon": (1, 2, 4), "budget": (0, 2), "gb_per_s": (1.0, 2.0, 5.0, 12.0), "latency_ms": (0.1, 1.0), "layer_ms": (1.0, 4.0)}
COARSE = {"policy": ("lru",), "horizon": (1, 2), "budget": (0, 2), "gb_per_s": (2.0, 5.0, 12.0), "latency_ms": (0.1,), "layer_ms": (4.0,)}   # for large geometries
SHARES = (0.125, 0.25, 0.5)
LARGE = 2000   # experts in all layers


def tabulate(widget: Explorer, *, grid: Mapping[str, Sequence] | None = None, chosen: Sequence[str] | None = None) -> dict:
    """The table of a widget's traces (`chosen` of them, default: the first): what explorer.json holds. `grid`: the positions of each control."""
    names = list(chosen or [next(iter(widget.sources))])
    arms = list(widget.sources[names[0]])
    held = {(name, arm): widget.held(name, arm) for name in names for arm in arms}
    trace = held[names[0], arms[0]].trace
    keys = trace.num_layers * trace.meta.num_experts
    values = dict(grid or (GRID if keys <= LARGE else COARSE))
    values |= {"trace": names, "arm": arms, "slots": sorted({max(1, round(share * keys)) for share in SHARES})}
    offered = {control["name"]: control for control in explore.controls(held[names[0], arms[0]], {"trace": tuple(names), "arm": tuple(arms)})}
    values |= {name: sorted({*values[name], widget.settings[name]}) for name in MEASURED}   # where the widget stands is in the table
    values["predictor"] = offered["predictor"]["values"][:3]
    for name in ("horizon", "budget"):
        values[name] = [value for value in values[name] if value in offered[name]["values"]] or offered[name]["values"][:1]
    controls = [{"name": name, "kind": offered[name]["kind"], "values": list(values[name])} | ({"of": keys} if name == "slots" else {}) for name in ORDER]
    fixed = {"guard": widget.settings["guard"]}
    first = explore.nearest(widget.settings, controls)

    pack = _Pack()
    settings = {row: [Settings(**first | fixed | dict(zip(axes, position))) for position in itertools.product(*(values[name] for name in axes))] for row, axes in AXES.items()}
    with warnings.catch_warnings(), ThreadPoolExecutor() as pool:
        warnings.simplefilter("ignore", SimulationWarning)   # of a thousand positions some issue nothing: their rows say so
        rows = {row: pack.add(row, list(pool.map(lambda s, row=row: _position(held[s.trace, s.arm], s, row), settings[row]))) for row in AXES}
        axes = (*MACHINE, "horizon")
        maps = list(pool.map(lambda s: explore.gain_map(held[s.trace, s.arm], s)["gain"], settings["oracle"]))
    gains = np.array([[CANNOT if v is None else np.clip(round(1000 * v), -32000, 32000) for line in gain for v in line] for gain in maps], np.int16)
    pack.arrays["gains"] = gains.ravel()
    at = {f"{s.trace}|{s.arm}|{s.predictor}|{s.horizon}|{s.budget}": s for s in settings["predictor"]}
    points = {key: [{**p, "recall": round(p["recall"], 4), "precision": round(p["precision"], 4)} for p in explore.points(held[s.trace, s.arm].trace, s)] for key, s in at.items()}
    label = lambda key: "|".join(key)  # noqa: E731
    return {"version": VERSION, "controls": controls, "settings": first, "fixed": fixed, "columns": COLUMNS, "words": pack.words,
            "rows": {row: {"axes": AXES[row], "source": {"router": ROUTER}.get(row, row), **where} for row, where in rows.items()},
            "map": {"axes": axes, "recalls": explore.RECALLS, "precisions": explore.PRECISIONS, "tokens": {label(key): h.beginning.num_tokens for key, h in held.items()},
                    "prompts": [label(key) for key, h in held.items() if h.without_prompt]},
            "points": points, "about": {label(key): h.about for key, h in held.items()}, **pack.packed()}  # fmt: skip


def _position(held: Held, settings: Settings, row: str) -> tuple[dict, dict | None]:
    """Figures of a row at one position, and its timeline where it is shown."""
    source = {"demand": DEMAND, "router": ROUTER, "oracle": ORACLE}.get(row, settings.predictor)
    outcome = explore.outcome_of(held, settings, source)
    drawn = row in ("demand", "predictor") and isinstance(outcome, Outcome)
    return explore.figures(outcome), explore.timeline(outcome, held) if drawn else None


class _Pack:
    """Arrays of all rows one behind the other: floats [P, C], words [P], timelines as kind (4: a token is done), step from the start before, length."""

    def __init__(self):
        self.words: list[dict | None] = [None]
        self.parts: dict[str, list] = {name: [] for name in ("floats", "words", "spans", "offsets", "kinds", "starts", "lengths")}
        self.arrays: dict[str, np.ndarray] = {}

    def add(self, row: str, found: list[tuple[dict, dict | None]]) -> dict[str, int]:
        parts = self.parts
        where = {"from": len(parts["floats"]), "words": len(parts["words"]), "lines": len(parts["offsets"])}
        for line, _ in found:
            parts["floats"] += [np.nan if line.get(name) is None else line[name] for name in COLUMNS]
            said = {key: line[key] for key in ("problem", "note") if key in line} or None
            if said not in self.words:
                self.words.append(said)
            parts["words"].append(self.words.index(said))
        if row in ("demand", "predictor"):
            for _, drawn in found:
                parts["offsets"].append(len(parts["kinds"]))
                parts["spans"].append(drawn["ms"] if drawn else 0.0)
                marks = sorted([*drawn["rows"], *([4, end, 0] for end in drawn["ends"])], key=lambda mark: mark[1]) if drawn else []
                parts["kinds"] += [mark[0] for mark in marks]
                parts["starts"] += np.diff([0, *(mark[1] for mark in marks)]).tolist() if marks else []
                parts["lengths"] += [mark[2] for mark in marks]
            parts["offsets"].append(len(parts["kinds"]))
            parts["spans"].append(0.0)   # spans and offsets go side by side
        return where

    def packed(self) -> dict:
        types = {"floats": "f4", "words": "u2", "spans": "f4", "offsets": "u4", "kinds": "u1", "starts": "u2", "lengths": "u2"}
        held = {name: np.asarray(values, f"<{types[name]}") for name, values in self.parts.items()} | {name: a.astype("<i2") for name, a in self.arrays.items()}
        block, index = b"", []
        for name, array in held.items():
            block += b"\0" * (-len(block) % 4)   # a typed array begins at a multiple of its size
            index.append([name, array.dtype.str[1:], len(block), len(array)])
            block += array.tobytes()
        return {"arrays": index, "packed": base64.b64encode(zlib.compress(block, 9)).decode()}


# --- in a notebook ---------------------------------------------------------------------------------------------------------------------

class Closing:
    """What a notebook shows: the widget where a kernel runs, a picture elsewhere, and for the report the name of the table's file."""

    def __init__(self, widget: Explorer, picture: results.Picture, file: str):
        self.widget, self._picture, self._file = widget, picture, file

    def _repr_mimebundle_(self, include=None, exclude=None):
        data, metadata = self._picture._repr_mimebundle_()
        shown = self.widget._repr_mimebundle_() or {}
        live = shown[0] if isinstance(shown, tuple) else shown
        return {**live, **data, MIME: {"file": self._file}}, metadata


def close(run: results.Experiment, sources: Sources, *, grid: Mapping[str, Sequence] | None = None, chosen: Sequence[str] | None = None, **settings) -> Closing:
    """The explorer over `sources` at the end of an experiment: the widget, its static twin in the experiment's folder, a picture of where it stands first.

    `chosen` and `grid` as in `tabulate`; the smoke profile's grid is coarse.
    """
    widget = explorer(sources, **settings)
    table = tabulate(widget, grid=grid or (COARSE if run.profile == "smoke" else None), chosen=chosen)
    view = explore.view(widget.held(widget.settings["trace"], widget.settings["arm"]), Settings.read(widget.settings))
    save(table, run.folder / FILE)
    picture = run.save_figure("explorer", plots_explorer.picture(view), alt=plots_explorer.say(view))
    return Closing(widget, picture, FILE)


def save(table: Mapping, path: Path) -> None:
    """Write a table, whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(table, separators=(",", ":"), allow_nan=False))
    os.replace(partial, path)


def load(path: Path) -> dict:
    """A table that `save` wrote. Raises ResultError, a sentence, where it is absent, damaged or of another version."""
    try:
        table = parse_json(path.read_text())
    except FileNotFoundError:
        raise results.ResultError(f"{path.name} of {path.parent.name} is not there: run the notebook again") from None
    except ValueError:
        raise results.ResultError(f"{path.name} of {path.parent.name} is damaged: run the notebook again") from None
    except OSError as error:   # a folder of that name, or one that may not be read
        raise results.ResultError(f"{path.name} of {path.parent.name} cannot be read ({error.strerror}): remove it and run the notebook again") from None
    version = table.get("version") if isinstance(table, dict) else None
    if version != VERSION:
        raise results.ResultError(f"{path.name} of {path.parent.name} has version {version}, this code reads {VERSION}: run the notebook again")
    if not _whole(table):
        raise results.ResultError(f"{path.name} of {path.parent.name} is damaged (a part is missing or cut): run the notebook again")
    return table


def _whole(table: Mapping) -> bool:
    """Whether a table has all its parts, and the bytes that its arrays say."""
    parts = {"controls": list, "settings": dict, "fixed": dict, "columns": list, "words": list, "rows": dict, "map": dict, "points": dict, "about": dict}
    try:
        size = len(zlib.decompress(base64.b64decode(table["packed"], validate=True)))
        held = max(start + count * np.dtype(kind).itemsize for _, kind, start, count in table["arrays"])
    except (KeyError, TypeError, ValueError, zlib.error):
        return False
    return held == size and all(isinstance(table.get(name), kind) for name, kind in parts.items())
