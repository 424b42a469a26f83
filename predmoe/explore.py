"""The explorer's numbers: one choice of trace, machine and prefetch in, everything that is shown of it out, simulated then and there.

    view(held, Settings(...))   ->  a dictionary of plain numbers and words, which assets/explorer.js draws

`explorer_widget` puts sliders before it, `explorer_grid` tabulates it for pages without a kernel. Nothing here knows a browser.
"""
# N tokens, L MoE layers, E experts, K chosen, M guesses, C cells of the map

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace as changed
from functools import cached_property

import numpy as np

from .config import ConfigError
from .simulator import GUARDS, POLICIES, Cache, Compute, Disk, Outcome, Prefetch, SimulationError, SimulationWarning, replay
from .traces import ABSENT, DECODE, Prediction, Trace, TraceError

DEMAND, ROUTER, ORACLE = "demand", "next_router", "oracle"
NONE = "none"                          # the predictor of a trace that holds no guesses
ROWS = ("demand", "router", "predictor", "oracle")
RECALLS = PRECISIONS = (0.2, 0.4, 0.6, 0.8, 1.0)
SHOWN_PASSES = 3                       # of the timeline
MAP_ACCESSES = 6000                    # of experts, in the beginning of the trace that each cell of the map replays
MAP_DRAWS = 30_000_000                 # one for each token, layer and expert: what a map may take of a notebook's memory
UNITS = 2000                           # the timeline's resolution
KINDS = ("computation", "stall", "demand read", "prefetch read")
_KIND = np.array([0, 1, 0, 0, 2, 3])   # of outcome.KINDS: attention, stall, experts, head, demand read, prefetch read


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One position of all controls. `trace` and `arm` name what is replayed; the machine has one cache of `slots` experts for all layers,
    a disk of `gb_per_s` and `latency_ms`, and takes `layer_ms` for each layer whatever it computes. Prefetches ask `predictor` for the
    layer `horizon` ahead and take its best k + `budget` guesses. Raises ConfigError for a value of another type, SimulationError for one
    that no machine has.
    """

    trace: str
    arm: str
    predictor: str
    horizon: int = 1
    budget: int = 0
    slots: int = 32
    policy: str = "lru"
    gb_per_s: float = 5.0
    latency_ms: float = 0.1
    layer_ms: float = 4.0
    guard: str = "none"

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = {"str": str, "int": int, "float": (int, float)}[field.type]
            if isinstance(value, bool) or not isinstance(value, wanted) or (isinstance(value, float) and not math.isfinite(value)):
                raise ConfigError(f"{field.name}={value!r} is not {'text' if field.type == 'str' else 'a whole number' if field.type == 'int' else 'a number'}")
        self.machine(), self.prefetch(ORACLE)

    @classmethod
    def read(cls, values: Mapping) -> Settings:
        """From a browser's dictionary. Raises ConfigError for a name that is missing or unknown."""
        known = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) - known or {"trace", "arm", "predictor"} - set(values):
            raise ConfigError(f"the settings must be {', '.join(sorted(known))}")
        whole = {name: int(value) if isinstance(value, float) and value.is_integer() and name in ("horizon", "budget", "slots") else value for name, value in values.items()}
        return cls(**whole)

    def machine(self) -> tuple[Cache, Disk, Compute]:
        """What `simulator.replay` is given. A top-k set larger than the cache is streamed, so that every position of the slider has an answer."""
        return (Cache(slots=self.slots, policy=self.policy, streaming=True), Disk(latency_ms=self.latency_ms, gb_per_s=self.gb_per_s),
                Compute(attention_ms=0.0, expert_ms=0.0, shared_ms=self.layer_ms))  # fmt: skip

    def prefetch(self, source: str) -> Prefetch | None:
        """Of one row: nothing for demand; the oracle needs no guesses beyond the k that are right."""
        if source == DEMAND:
            return None
        return Prefetch(source=source, horizon=self.horizon, budget=0 if source == ORACLE else self.budget, guard=self.guard)


class Held:
    """A trace with what the explorer derives from it once: the passes of its timeline and the beginning that the map replays."""

    def __init__(self, trace: Trace, about: str = ""):
        if not (trace.phase == DECODE).any():
            raise TraceError("the trace has no decode pass, so there are no tokens per second to show")
        self.trace, self.about = trace, about
        self._guesses: dict[int, list] = {}

    @cached_property
    def shown(self) -> tuple[int, int]:
        """The last few decode passes in a row, or one where layers are many."""
        decode = np.flatnonzero(self.trace.phase == DECODE)
        end = int(decode[-1]) + 1
        count = SHOWN_PASSES if self.trace.num_layers <= 24 else 1
        return max(end - count, end - _run_length(self.trace.phase == DECODE, end), 0), end

    @cached_property
    def beginning(self) -> Trace:
        """The first passes, up to MAP_ACCESSES accesses, with at least one decode pass; a prompt that would fill them alone is left out."""
        trace = self.trace
        tokens = MAP_ACCESSES / (trace.num_layers * trace.meta.top_k)
        first_decode = int(np.flatnonzero(trace.phase == DECODE)[0])
        first = first_decode if trace.starts[first_decode] > tokens else 0
        fits = int(np.searchsorted(trace.starts, trace.starts[first] + tokens, side="right")) - 1
        return trace.passes(first, min(max(fits, first_decode + 4), trace.num_passes))

    @property
    def without_prompt(self) -> bool:
        """Whether `beginning` leaves a prompt out."""
        return bool(self.trace.phase[0] != DECODE and self.beginning.phase[0] == DECODE)

    def guesses(self, horizon: int) -> list[tuple[float, float, int, Trace]]:
        """Of each cell of the map that can be: recall, precision, guesses per layer, and the beginning with such a predictor."""
        if horizon not in self._guesses:
            self._guesses[horizon] = [(r, p, *made) for r in RECALLS for p in PRECISIONS if (made := _predicted(self.beginning, horizon, r, p))]
        return self._guesses[horizon]


def _run_length(flags: np.ndarray, end: int) -> int:
    """How many flags in a row are set before `end`."""
    before = np.flatnonzero(~flags[:end])
    return end - (int(before[-1]) + 1 if len(before) else 0)


def _predicted(trace: Trace, horizon: int, recall: float, precision: float) -> tuple[int, Trace] | None:
    """`trace` with a predictor of this recall and precision, named "map", and the most guesses it makes; None where it would name more experts than there are.

    Each right expert is named with probability `recall`; beside them stand recall * K * (1 - precision) / precision wrong ones, rounded at random, drawn
    without replacement by how often the trace uses them. Right ones come first, as a predictor is surer of them.
    """
    N, L, K = trace.experts_NLK.shape
    E, wrong = trace.meta.num_experts, recall * K * (1 - precision) / precision
    M = K + math.ceil(wrong - 1e-9)
    if M > E or horizon >= L:
        return None
    rng = np.random.default_rng(0)
    at = np.maximum(trace.experts_NLK, 0).astype(np.int64)
    used_LE = np.stack([np.bincount(at[:, layer].ravel(), minlength=E) for layer in range(L)]) + 1.0
    luck_NLE = np.log(used_LE) + rng.gumbel(size=(N, L, E))
    right_NLK = (rng.random((N, L, K)) < recall) & (trace.experts_NLK != ABSENT)
    named = np.take_along_axis(luck_NLE, at, 2) + luck_NLE.max() - luck_NLE.min() + 1
    np.put_along_axis(luck_NLE, at, np.where(right_NLK, named, -np.inf), 2)
    asked = np.argsort(-luck_NLE, axis=2, kind="stable")[..., :M].astype(np.int16)
    number = right_NLK.sum(2, keepdims=True) + np.floor(wrong + rng.random((N, L, 1)))
    asked[np.arange(M) >= number] = ABSENT
    moved = np.full((N, L, M), ABSENT, np.int16)
    moved[:, : L - horizon] = asked[:, horizon:]
    return M, changed(trace, predictions={("map", horizon): Prediction(horizon, moved, np.zeros(moved.shape, np.float32))})


# --- what is shown ------------------------------------------------------------------------------------------------------------

def view(held: Held, settings: Settings) -> dict:
    """Everything that is shown at one position of the controls: `settings`, `about` (the trace), `rows` (demand, router, predictor, oracle),
    `timeline` (demand and predictor), `map`, and `problem`, a sentence where the machine cannot be simulated at all.

    A row has tok_s, hit_rate, stall_ms, read_mb and wasted_mb (per token), as `simulator.replay` gives them, or a `problem` in a sentence.
    """
    with warnings.catch_warnings(), ThreadPoolExecutor(4) as pool:
        warnings.simplefilter("ignore", SimulationWarning)   # a row says itself that nothing was issued
        sources = {"demand": DEMAND, "router": ROUTER, "predictor": settings.predictor, "oracle": ORACLE}
        done = {row: pool.submit(outcome_of, held, settings, source) for row, source in sources.items()}
        atlas = pool.submit(gain_map, held, settings)
        outcomes = {row: future.result() for row, future in done.items()}
        found = {"settings": {field.name: getattr(settings, field.name) for field in fields(settings)}, "about": held.about, "problem": None,
                 "rows": [{"row": row, "source": sources[row], **figures(outcomes[row])} for row in ROWS],
                 "timeline": [{"row": row, **timeline(outcomes[row], held)} for row in ("demand", "predictor") if isinstance(outcomes[row], Outcome)],
                 "map": atlas.result() | {"points": points(held.trace, settings)}}  # fmt: skip
    return found


def failed(settings: Mapping, problem: str) -> dict:
    """The view of what cannot be shown: a sentence in the place of the numbers."""
    return {"settings": dict(settings), "about": "", "problem": problem, "rows": [], "timeline": [], "map": None}


def outcome_of(held: Held, settings: Settings, source: str) -> Outcome | str:
    """The replay of one row, or why there is none."""
    if source == NONE:
        return "the trace holds no guesses of a predictor"
    if source == ROUTER and ROUTER not in held.trace.predictors:
        return "the trace holds no guesses of the next layer's router"
    if source != DEMAND and (past := _past_the_last(held, settings)):
        return past
    cache, disk, compute = settings.machine()
    try:
        return replay(held.trace, cache, disk, compute=compute, prefetch=settings.prefetch(source), timeline=held.shown)
    except (SimulationError, TraceError) as error:
        return str(error)


def figures(outcome: Outcome | str) -> dict:
    """The numbers of a row; `note` where a prefetch issued nothing."""
    if isinstance(outcome, str):
        return {"problem": outcome}
    n, ledger = outcome.tokens, outcome.ledger
    finite = math.isfinite(outcome.tokens_per_s)
    line = {"tok_s": outcome.tokens_per_s if finite else None, "hit_rate": outcome.hit_rate, "stall_ms": outcome.stall_ms / n, "read_mb": outcome.read_bytes / n / 1e6,
            "wasted_mb": ledger.wasted_bytes / n / 1e6}  # fmt: skip
    if not finite:
        line["note"] = "nothing takes any time, so the speed has no limit"
    elif ledger.held_back and not ledger.issued:
        line["note"] = "the guard held back every guess"
    return line


def timeline(outcome: Outcome, held: Held) -> dict:
    """Disk and processor in the passes shown: `ms`, their span, and rows of (index in KINDS, start, length) in units of ms / UNITS from the
    start of the first pass, in order of time; neighbours of one kind that touch are one where they are too short to be told apart. `ends`: of the passes."""
    kind, span, what = outcome.rows
    processor = kind < 4
    if not processor.any():   # nothing takes any time
        return {"ms": 0.0, "rows": [], "ends": []}
    origin, end = span[processor, 0].min(), span[processor, 1].max()
    total = max(end - origin, 1e-9)
    scaled = np.clip((span - origin) * (UNITS / total), 0, UNITS)
    rows: list[list[int]] = []
    last: dict[int, list[int]] = {}
    for k, start, stop in sorted(zip(_KIND[kind].tolist(), scaled[:, 0].round().astype(int).tolist(), scaled[:, 1].round().astype(int).tolist()), key=lambda row: row[1:]):
        if stop <= start:
            continue
        before = last.get(k)
        if before and start <= before[1] + before[2] and (k < 2 or stop - start < UNITS // 250):
            before[2] = max(before[2], stop - before[1])
            continue
        last[k] = [k, start, stop - start]
        rows.append(last[k])
    ends = [round((span[processor & (what[:, 0] == s), 1].max() - origin) * UNITS / total) for s in np.unique(what[processor, 0])]
    return {"ms": float(total), "rows": rows, "ends": [int(e) for e in ends]}


# --- the map -----------------------------------------------------------------------------------------------------------------------

def gain_map(held: Held, settings: Settings) -> dict:
    """tok/s over no prefetch, minus one, for predictors of every recall and precision on this machine, replayed on the beginning of this trace:
    `gain` by recall and precision, None where a predictor would have to name more experts than there are; `tokens` replayed; `prompt`, where it is left out."""
    cache, disk, compute = settings.machine()
    empty = {"recalls": RECALLS, "precisions": PRECISIONS, "tokens": held.beginning.num_tokens, "prompt": held.without_prompt, "gain": [[None] * len(PRECISIONS) for _ in RECALLS]}
    if held.beginning.num_tokens * held.trace.num_layers * held.trace.meta.num_experts > MAP_DRAWS:
        return empty | {"problem": f"no map: to draw predictors for {held.trace.meta.num_experts:,} experts in each of {held.trace.num_layers} layers takes too much memory here"}
    try:
        base = replay(held.beginning, cache, disk, compute=compute).tokens_per_s
        for recall, precision, guesses, trace in held.guesses(settings.horizon):
            ahead = Prefetch(source="map", horizon=settings.horizon, budget=guesses - held.trace.meta.top_k, guard=settings.guard)
            gain = replay(trace, cache, disk, compute=compute, prefetch=ahead).tokens_per_s / base - 1
            empty["gain"][RECALLS.index(recall)][PRECISIONS.index(precision)] = gain if math.isfinite(gain) else None
    except SimulationError as error:
        return empty | {"problem": str(error)}
    past = _past_the_last(held, settings)
    return empty | {"problem": past} if past else empty


def _past_the_last(held: Held, settings: Settings) -> str | None:
    """A sentence where no layer has another `horizon` layers after it."""
    layers = held.trace.num_layers
    if settings.horizon < layers:
        return None
    return f"a horizon of {settings.horizon} is beyond the last layer, so there is nothing to foretell ({'its one MoE layer is the last' if layers == 1 else f'of {layers} MoE layers, at most {layers - 1}'})"


def points(trace: Trace, settings: Settings) -> list[dict]:
    """Recall and precision of the predictor and of the next layer's router with these guesses, where the trace holds them."""
    found = []
    for row, source in (("router", ROUTER), ("predictor", settings.predictor)):
        if settings.horizon < trace.num_layers and (source, settings.horizon) in trace.predictions:
            guesses = trace.predictions[source, settings.horizon].experts_NLM[:, : -settings.horizon, : trace.meta.top_k + settings.budget]
            true = trace.experts_NLK[:, settings.horizon :]
            right = int(((guesses[..., :, None] == true[..., None, :]) & (true[..., None, :] != ABSENT)).sum())
            asked, wanted = int((guesses != ABSENT).sum()), int((true != ABSENT).sum())
            if asked and wanted:
                found.append({"row": row, "recall": right / wanted, "precision": right / asked})
    return found


# --- the controls --------------------------------------------------------------------------------------------------------------

BANDWIDTHS = (0.5, 1.0, 2.0, 3.5, 5.0, 7.0, 12.0, 25.0)
LATENCIES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
LAYERS_MS = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)


def controls(held: Held, chosen: Mapping[str, tuple[str, ...]], more: Mapping[str, float] = {}) -> list[dict]:
    """What can be chosen for a trace: name, kind (menu or range) and values of each control. `chosen`: the values of trace and arm; `more`: a further
    position of a range, such as a disk that was measured.

    The horizon goes to the number of layers, one past the last that can be asked, so that one can see what is said there.
    """
    trace = held.trace
    keys, spare = trace.num_layers * trace.meta.num_experts, [p.experts_NLM.shape[2] for p in trace.predictions.values()]
    predictors = [name for name in trace.predictors if name != ROUTER] or list(trace.predictors) or [NONE]
    every = list(range(1, keys + 1)) if keys <= 512 else sorted({max(1, round(keys * share / 100)) for share in (0.01, 0.1, 0.5, *range(1, 101))})
    menus = {"trace": chosen["trace"], "arm": chosen["arm"], "predictor": predictors, "policy": POLICIES, "guard": [g for g in GUARDS if g != "idle"]}
    ranges = {"horizon": range(1, trace.num_layers + 1), "budget": range(max(min(spare, default=0) - trace.meta.top_k, 0) + 1), "slots": every,
              "gb_per_s": BANDWIDTHS, "latency_ms": LATENCIES, "layer_ms": LAYERS_MS}  # fmt: skip
    order = ("trace", "arm", "predictor", "policy", "guard", "horizon", "budget", "slots", "gb_per_s", "latency_ms", "layer_ms")
    for name, value in more.items():
        ranges[name] = sorted({*ranges[name], value} if name != "slots" or value <= keys else ranges[name])
    shown = [{"name": name, "kind": "menu" if name in menus else "range", "values": list((menus | ranges)[name])} for name in order]
    shown[order.index("slots")]["of"] = keys
    return shown


def nearest(settings: Mapping, shown: list[dict], before: list[dict] = []) -> dict:
    """Settings moved to what the controls offer: the same value where it is offered, else the nearest (a menu: the first). The cache keeps its share
    of all experts where the controls `before` were those of a model of another size."""
    sizes = [control["of"] for controls in (before, shown) for control in controls if control["name"] == "slots"]
    settings, at = dict(settings), {}
    if len(sizes) == 2 and sizes[0] != sizes[1]:
        settings["slots"] = settings["slots"] * sizes[1] / sizes[0]
    for control in shown:
        value, offered = settings.get(control["name"]), control["values"]
        number = isinstance(value, (int, float)) and control["kind"] == "range"
        at[control["name"]] = value if value in offered else min(offered, key=lambda v: abs(v - value)) if number else offered[0]
    return at
