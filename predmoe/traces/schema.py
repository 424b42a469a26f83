"""The trace schema: which experts a model chose, what was predicted, and where it came from. One file, memory-mapped.

A trace is a list of forward passes over tokens. A pass is what an engine does at once: a whole prompt (prefill), or one
token of each running sequence (decode). All arrays are indexed by token, in the order of the passes; pass `s` holds the
tokens `starts[s]:starts[s + 1]`. Layers are the mixture-of-experts layers in order; `Meta.layers` has their indices in
the model, so that dense layers are accounted for.

The file is a safetensors file (any tool that reads those reads it) whose metadata has one JSON string under "predmoe_trace".
"""
# N tokens, L MoE layers, E experts, K chosen per token, S forward passes, M predicted experts per (token, layer)

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

VERSION = 1
PREFILL, DECODE = 0, 1
ABSENT = -1                  # a (token, layer) that the model did not route, or the end of a short list of predictions
UNIFORM_DISPERSION = 1.5     # below this, expert counts vary no more than if experts were drawn by lot
LARGEST = 1 << 45            # bytes of an expert: beyond any, and a whole trace's sum still fits in 64 bits
_KEY = "predmoe_trace"


class TraceError(ValueError):
    """A trace that cannot be used; the message names the row."""


class TraceWarning(UserWarning):
    """A trace that can be used but looks wrong."""


@dataclass(frozen=True, kw_only=True)
class Meta:
    """Where a trace comes from and the sizes that its arrays cannot tell.

    `expert_bytes`: bytes of one expert, per MoE layer. `on_policy`: True for the model's own output, False for
    teacher-forced text, None where the source does not say. `layers`: index in the model of each MoE layer;
    `model_layers` counts the dense ones too. `shared_experts` run for every token and are always resident.
    """

    model: str
    num_experts: int
    top_k: int
    layers: tuple[int, ...]
    expert_bytes: tuple[int, ...]
    source: str = ""
    domain: str = ""
    on_policy: bool | None = None
    model_layers: int = 0
    shared_experts: int = 0
    notes: str = ""

    def __post_init__(self):
        for name in ("layers", "expert_bytes"):
            object.__setattr__(self, name, tuple(int(value) for value in getattr(self, name)))
        for name in ("num_experts", "top_k", "model_layers", "shared_experts"):
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or value < 0:
                raise TraceError(f"{name}={value!r} must be a whole number of at least 0")
        for name in ("model", "source", "domain", "notes"):
            if not isinstance(getattr(self, name), str):
                raise TraceError(f"{name}={getattr(self, name)!r} must be text")
        if self.on_policy not in (True, False, None):
            raise TraceError(f"on_policy={self.on_policy!r} must be true, false or null")
        if not self.layers:
            raise TraceError("a trace needs at least one mixture-of-experts layer")
        if not self.model_layers:
            object.__setattr__(self, "model_layers", self.layers[-1] + 1)
        if any(b <= a for a, b in zip(self.layers, self.layers[1:])) or self.layers[0] < 0:
            raise TraceError(f"layers out of order: {list(self.layers)}; they must rise from 0")
        if self.layers[-1] >= self.model_layers:
            raise TraceError(f"layer {self.layers[-1]} does not exist in a model of {self.model_layers} layers")
        if not 1 <= self.top_k <= self.num_experts or self.num_experts > np.iinfo(np.int16).max:
            raise TraceError(f"top_k={self.top_k} of num_experts={self.num_experts} is impossible")
        if len(self.expert_bytes) != len(self.layers) or min(self.expert_bytes) < 1 or max(self.expert_bytes) > LARGEST:
            raise TraceError(f"expert_bytes must give one positive size for each of the {len(self.layers)} layers, none above {LARGEST} bytes")


@dataclass(frozen=True)
class Prediction:
    """What one predictor said, one entry per (token, layer) at which it was asked.

    `experts_NLM` at [n, l] are guesses, best first, for layer l + horizon of the same token; where that is past the last
    layer, for layer l + horizon - L of the next token of the same sequence. ABSENT ends a shorter list. `scores_NLM` fall;
    they are float32, or float16 where a file must be small.
    """

    horizon: int
    experts_NLM: np.ndarray
    scores_NLM: np.ndarray


@dataclass(frozen=True, eq=False)
class Trace:
    """One trace; `validate` says what must hold, and loading or building one through this module has checked it."""

    meta: Meta
    experts_NLK: np.ndarray            # int16, best first; a row of ABSENT where the token was not routed at that layer
    starts: np.ndarray                 # int64, S + 1 offsets of the passes
    phase: np.ndarray                  # uint8, per pass: PREFILL or DECODE
    sequence: np.ndarray               # int32, per token
    weights_NLK: np.ndarray | None = None                     # float32 gate weights
    token_ids: np.ndarray | None = None                       # int32
    predictions: Mapping[tuple[str, int], Prediction] = field(default_factory=dict)   # (predictor, horizon)

    @property
    def num_tokens(self) -> int:
        return self.experts_NLK.shape[0]

    @property
    def num_layers(self) -> int:
        return self.experts_NLK.shape[1]

    @property
    def num_passes(self) -> int:
        return len(self.phase)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays().values())

    @property
    def predictors(self) -> dict[str, tuple[int, ...]]:
        """{predictor: its horizons}."""
        horizons: dict[str, list[int]] = {}
        for name, horizon in sorted(self.predictions):
            horizons.setdefault(name, []).append(horizon)
        return {name: tuple(values) for name, values in horizons.items()}

    def prediction(self, predictor: str, horizon: int) -> Prediction:
        """The predictions of `predictor` at `horizon`; TraceError where the trace does not hold them."""
        try:
            return self.predictions[predictor, horizon]
        except KeyError:
            held = "; ".join(f"{name} at horizons {', '.join(map(str, hs))}" for name, hs in self.predictors.items()) or "none"
            raise TraceError(f"the trace holds no predictor {predictor!r} at horizon {horizon}; it holds {held}") from None

    def passes(self, first: int, end: int) -> Trace:
        """Passes first..end-1 as a trace of their own, without copying."""
        if not 0 <= first < end <= self.num_passes:
            raise TraceError(f"passes {first}..{end} are not within the trace's {self.num_passes}")
        rows = slice(int(self.starts[first]), int(self.starts[end]))
        cut = lambda array: None if array is None else array[rows]  # noqa: E731
        predictions = {key: Prediction(p.horizon, p.experts_NLM[rows], p.scores_NLM[rows]) for key, p in self.predictions.items()}
        return Trace(self.meta, self.experts_NLK[rows], self.starts[first : end + 1] - self.starts[first], self.phase[first:end], self.sequence[rows],
                     cut(self.weights_NLK), cut(self.token_ids), predictions)  # fmt: skip

    def with_predictions(self, more: Mapping[tuple[str, int], Prediction]) -> Trace:
        """The same trace with predictions added (or replaced), checked."""
        trace = dataclasses.replace(self, predictions={**self.predictions, **more})
        trace.validate()
        return trace

    def validate(self, where: Callable[[int, int], str] | None = None) -> None:
        """Raise TraceError at the first fault, warn of what is only suspicious.

        `where(token, layer)` names a row in the words of the source (a reader gives its line numbers).
        """
        where = where or (lambda n, l: f"row {n * self.num_layers + l} (token {n}, layer {self.meta.layers[l]})")
        self._check_shapes()
        check_experts(self.experts_NLK, self.meta, where)
        if (self.experts_NLK == ABSENT).all():
            raise TraceError("the trace is empty: no token was routed at any layer")
        if self.weights_NLK is not None:
            _first(~np.isfinite(self.weights_NLK).all(-1), where, "a gate weight is not finite")
            _first((self.weights_NLK < 0).any(-1), where, "a gate weight is negative")
        for (name, horizon), prediction in self.predictions.items():
            if prediction.experts_NLM.shape[:2] != self.experts_NLK.shape[:2]:
                raise TraceError(f"{name} at horizon {horizon} has predictions of the shape {prediction.experts_NLM.shape} for {self.num_tokens} tokens and {self.num_layers} layers")
            check_prediction(prediction, self.meta, lambda n, l: f"{name} at horizon {horizon}, {where(n, l)}")  # noqa: B023
        if looks_uniform(self):
            warnings.warn("expert usage is uniform, as if experts were drawn by lot: was a non-contiguous top-k copied flat?", TraceWarning, stacklevel=3)

    def _check_shapes(self) -> None:
        N, L, K = self.experts_NLK.shape if self.experts_NLK.ndim == 3 else (-1, -1, -1)
        if N == 0:
            raise TraceError("the trace is empty: no token")
        if (L, K) != (len(self.meta.layers), self.meta.top_k):
            raise TraceError(f"experts have the shape {self.experts_NLK.shape}, not (tokens, {len(self.meta.layers)} layers, top-{self.meta.top_k})")
        S = self.phase.size
        if self.starts.ndim != 1 or self.phase.ndim != 1 or len(self.starts) != S + 1 or self.starts[0] != 0 or self.starts[-1] != N or (np.diff(self.starts) < 1).any():
            raise TraceError(f"starts must rise from 0 to the {N} tokens, one offset for each of the {S} passes and the end")
        if not np.isin(self.phase, (PREFILL, DECODE)).all():
            raise TraceError(f"pass {int(np.argmax(~np.isin(self.phase, (PREFILL, DECODE))))}: phase must be 0 (prefill) or 1 (decode)")
        for name, array in (("sequence", self.sequence), ("token_ids", self.token_ids)):
            if array is not None and array.shape != (N,):
                raise TraceError(f"{name} has {array.shape[0] if array.ndim else 0} entries for {N} tokens")
        if self.weights_NLK is not None and self.weights_NLK.shape != (N, L, K):
            raise TraceError(f"gate weights have the shape {self.weights_NLK.shape}, experts {(N, L, K)}")

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = dict(experts=self.experts_NLK, starts=self.starts, phase=self.phase, sequence=self.sequence)
        if self.weights_NLK is not None:
            arrays["weights"] = self.weights_NLK
        if self.token_ids is not None:
            arrays["token_ids"] = self.token_ids
        for (name, horizon), prediction in self.predictions.items():
            arrays[f"predicted/{name}/{horizon}/experts"] = prediction.experts_NLM
            arrays[f"predicted/{name}/{horizon}/scores"] = prediction.scores_NLM
        return arrays


def build(meta: Meta, experts_NLK, *, starts=None, phase=None, sequence=None, weights_NLK=None, token_ids=None,
          predictions: Iterable[tuple[str, Prediction]] = (), where: Callable[[int, int], str] | None = None) -> Trace:  # fmt: skip
    """A checked Trace from array-likes, in the schema's types. By default every token is a decode pass of one sequence."""
    experts = np.asarray(experts_NLK)
    if experts.ndim == 3:   # before the cast, so that an id of 70000 is not wrapped into range
        check_experts(experts, meta, where or (lambda n, l: f"row {n * experts.shape[1] + l} (token {n}, layer {l})"))
    N = len(experts)
    starts = np.arange(N + 1) if starts is None else starts
    typed = lambda array, dtype: None if array is None else np.ascontiguousarray(array, dtype)  # noqa: E731
    score = lambda array: typed(array, np.float16 if getattr(array, "dtype", None) == np.float16 else np.float32)  # noqa: E731
    trace = Trace(
        meta,
        typed(experts, np.int16),
        typed(starts, np.int64),
        typed(np.full(len(starts) - 1, DECODE) if phase is None else phase, np.uint8),
        typed(np.zeros(N) if sequence is None else sequence, np.int32),
        typed(weights_NLK, np.float32),
        typed(token_ids, np.int32),
        {(name, p.horizon): Prediction(p.horizon, typed(p.experts_NLM, np.int16), score(p.scores_NLM)) for name, p in predictions},
    )
    trace.validate(where)
    return trace


def check_experts(experts_NLK: np.ndarray, meta: Meta, where: Callable[[int, int], str]) -> None:
    """Every row is absent, or holds top_k different ids of 0..num_experts-1."""
    absent = experts_NLK == ABSENT
    _first(absent.any(-1) & ~absent.all(-1), where, f"fewer than the top-{meta.top_k} experts")
    _first((experts_NLK < ABSENT).any(-1), where, "a negative expert id")
    _first((experts_NLK >= meta.num_experts).any(-1), where, f"an expert id is not below num_experts={meta.num_experts}")
    ordered = np.sort(experts_NLK, axis=-1)
    _first(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != ABSENT)).any(-1), where, "an expert appears twice")


def check_prediction(prediction: Prediction, meta: Meta, where: Callable[[int, int], str]) -> None:
    """Guesses are different ids in range, best first, with finite scores that fall."""
    experts, scores = prediction.experts_NLM, prediction.scores_NLM
    if prediction.horizon < 1 or experts.ndim != 3 or experts.shape != scores.shape:
        raise TraceError(f"{where(0, 0)}: horizon {prediction.horizon} must be at least 1, and experts {experts.shape} as many as scores {scores.shape}")
    held = experts != ABSENT
    _first((experts < ABSENT).any(-1) | (experts >= meta.num_experts).any(-1), where, f"a predicted id is outside 0..{meta.num_experts - 1}")
    _first((held[..., 1:] & ~held[..., :-1]).any(-1), where, "a prediction follows an absent one")
    ordered = np.sort(experts, axis=-1)
    _first(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != ABSENT)).any(-1), where, "an expert is predicted twice")
    _first((held & ~np.isfinite(scores)).any(-1), where, "a score is not finite")
    _first((held[..., 1:] & (scores[..., 1:] > scores[..., :-1])).any(-1), where, "scores must fall from the best guess on")


def looks_uniform(trace: Trace, least: int = 5) -> bool:
    """True where expert counts vary no more than by lot: dispersion (chi-square per degree of freedom, corrected for
    drawing without replacement) below UNIFORM_DISPERSION on the mean over layers. Needs `least` expected uses per expert."""
    E, K = trace.meta.num_experts, trace.meta.top_k
    if K == E:
        return False
    ratios = []
    for l in range(trace.num_layers):
        ids = trace.experts_NLK[:, l]
        counts = np.bincount(ids[ids != ABSENT].ravel().astype(np.int64), minlength=E)
        mean = counts.mean()
        if mean >= least:
            ratios.append(((counts - mean) ** 2).sum() / mean / (1 - K / E) / (E - 1))
    return bool(ratios) and float(np.mean(ratios)) < UNIFORM_DISPERSION


def _first(bad_NL: np.ndarray, where: Callable[[int, int], str], what: str) -> None:
    if bad_NL.any():
        n, l = np.unravel_index(int(np.argmax(bad_NL)), bad_NL.shape)
        raise TraceError(f"{where(int(n), int(l))}: {what}")


def save(trace: Trace, path: str | os.PathLike) -> None:
    """Write `trace` to `path`, whole or not at all. Raises TraceError where it cannot be written."""
    path = Path(path)
    if not path.parent.is_dir():
        raise TraceError(f"{path.parent}: no such folder to write {path.name} in")
    if path.exists() and not path.is_file():
        raise TraceError(f"{path} is no regular file, and a trace replaces what it is written over; name another file")
    header = {"version": VERSION, "meta": dataclasses.asdict(trace.meta)}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file({name: np.ascontiguousarray(array) for name, array in trace._arrays().items()}, partial, {_KEY: json.dumps(header)})
        partial.chmod(0o644)   # the library leaves it to its owner alone
        os.replace(partial, path)
    except SafetensorError as error:   # the library's word for a system error
        raise TraceError(f"{path} cannot be written: {error}") from None
    finally:
        partial.unlink(missing_ok=True)


def load(path: str | os.PathLike, *, check: bool = True) -> Trace:
    """Map the trace at `path` into memory (nothing is read before it is used, unless `check` validates it all).

    Raises TraceError for a file that is no trace, is cut short, has another version, or (with `check`) a faulty row.
    """
    arrays, metadata = _map(Path(path))
    try:
        header = json.loads(metadata[_KEY])
        version = header["version"]
    except (KeyError, TypeError, ValueError, RecursionError):
        raise TraceError(f"{path}: a safetensors file, but no trace; `predmoe trace import` makes traces from other formats") from None
    if version != VERSION:
        raise TraceError(f"{path}: trace version {version!r}, this program reads version {VERSION}")
    try:
        predictions = {}
        for name in arrays:
            if name.startswith("predicted/") and name.endswith("/experts"):
                _, predictor, horizon, _ = name.split("/")
                predictions[predictor, int(horizon)] = Prediction(int(horizon), arrays[name], arrays[name.removesuffix("experts") + "scores"])
        trace = Trace(Meta(**header["meta"]), arrays["experts"], arrays["starts"], arrays["phase"], arrays["sequence"],
                      arrays.get("weights"), arrays.get("token_ids"), predictions)  # fmt: skip
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"{path}: the trace is incomplete, {error} is missing or unknown") from None
    for name, array in arrays.items():
        if array.dtype not in _TYPES.get(name.split("/")[-1], ()):
            raise TraceError(f"{path}: {name} is {array.dtype}, which it never is in a trace")
    if check:
        try:
            trace.validate()
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from None
    return trace


_DTYPES = {"I16": np.int16, "I32": np.int32, "I64": np.int64, "U8": np.uint8, "F16": np.float16, "F32": np.float32}
_TYPES = dict(experts=(np.int16,), starts=(np.int64,), phase=(np.uint8,), sequence=(np.int32,), weights=(np.float32,), token_ids=(np.int32,),
              scores=(np.float16, np.float32))  # fmt: skip


def _map(path: Path) -> tuple[dict[str, np.ndarray], Mapping[str, str]]:
    """The arrays of a safetensors file as views of a memory map (the library's own reader copies)."""
    size = path.stat().st_size
    if not size:
        raise TraceError(f"{path}: the file is empty")
    with open(path, "rb") as file:
        # copy on write: the file never changes, and compiled code need not be compiled again for read-only arrays
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    length = int.from_bytes(view[:8], "little")
    if 8 + length > size:
        raise TraceError(f"{path}: not a trace, or cut short: its header has {length} bytes, the file {size}")
    try:
        entries = json.loads(bytes(view[8 : 8 + length]))
    except (ValueError, RecursionError):
        raise TraceError(f"{path}: not a trace file (its header is not JSON)") from None
    try:
        metadata = entries.pop("__metadata__", {})
        places = {name: (str(entry["dtype"]), tuple(entry["shape"]), *entry["data_offsets"]) for name, entry in entries.items()}
        end = 8 + length + max((last for _, _, _, last in places.values()), default=0)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise TraceError(f"{path}: not a trace file (its header is not that of a safetensors file)") from None
    if end > size:
        raise TraceError(f"{path}: cut short, {size} bytes of {end}")
    arrays = {}
    for name, (dtype, shape, first, last) in places.items():
        if dtype not in _DTYPES:
            raise TraceError(f"{path}: {name} has the type {dtype}, which no trace uses")
        if not all(type(n) is int and n >= 0 for n in (*shape, first, last)):   # true is no length
            raise TraceError(f"{path}: {name} has the shape {shape} at {first}..{last}, which are not whole numbers")
        if last - first != math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize:
            raise TraceError(f"{path}: {name} has {last - first} bytes, which is not the shape {shape} of {dtype}")
        arrays[name] = np.frombuffer(view[8 + length + first : 8 + length + last], _DTYPES[dtype]).reshape(shape)
    return arrays, metadata
