"""What a replay is made of: cache, disk, compute and prefetch. Frozen, and nonsense is refused in one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

POLICIES = ("lru", "fifo", "lfu", "lfru", "least-stale", "belady", "static")
SCOPES = ("global", "layer")
GUARDS = ("none", "idle", "window")
NONE, ORACLE = "none", "oracle"
MOST_LANES = 1 << 16    # as many as a disk's queue has at most
MOST_NOISE = 5.0        # beyond it a read takes weeks now and then, and sums lose their digits


class SimulationError(ValueError):
    """A replay that cannot be run as asked; the message says which setting, why, and what is possible."""


class SimulationWarning(UserWarning):
    """A replay that ran but probably not as meant."""


def at_least(name: str, value: float, least: float) -> None:
    if not (math.isfinite(_number(name, value)) and value >= least):
        raise SimulationError(f"{name}={value!r} must be a number of at least {least}")


def _number(name: str, value: float) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise SimulationError(f"{name}={value!r} must be a number")
    try:
        return float(value)
    except OverflowError:
        raise SimulationError(f"{name} must be a number below 1e308") from None


def _numbers(name: str, value) -> float | tuple[float, ...]:
    """A number, or a list of them as a tuple; text is neither."""
    if isinstance(value, Iterable) and not isinstance(value, str) and np.ndim(value):
        return tuple(_number(name, entry) for entry in value)
    return _number(name, value)


def _flag(name: str, value: bool) -> None:
    if not isinstance(value, (bool, np.bool_)):
        raise SimulationError(f"{name}={value!r} must be True or False")


def _whole(name: str, value: int, least: int, most: int = 1 << 62) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value <= most:
        limit = f" and at most {most}" if isinstance(value, (int, np.integer)) and value > most else ""
        raise SimulationError(f"{name}={value!r} must be a whole number of at least {least}{limit}")


def _choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise SimulationError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Which experts stay in memory. Exactly one of `slots` and `bytes` gives the capacity: of the whole cache where the
    scope is "global", of each layer's own cache where it is "layer". Bytes count each layer's own expert size.

    `policy`, the expert evicted first:
      lru          the one used longest ago
      fifo         the one that came in first
      lfu          the one used least since it came in; ties: used longest ago
      lfru         the one used least, counted over its evictions too; ties: used longest ago (Colibri, WASTE)
      least-stale  one whose layer has run in this pass without it; then one used in this pass; then one whose layer
                   is furthest ahead (our reading of Least-Stale, arXiv 2602.03921)
      belady       the one used again furthest in the future. For experts of one size no policy is better that starts with the same residents (none,
                   or the same `pinned`) and keeps what it has just read; a preloaded `static` does neither, and can be
      static       none: the most used experts are loaded before the start, all others are read each time

    `pinned`: this many of the most used experts (each layer's own in scope "layer") are loaded before the start and
    never leave; they take room from the capacity. "Most used" is counted in the trace itself unless a replay is given `usage`.
    `sample`: evict the worst of this many experts drawn at random (with `seed`) instead of the worst of all (0; so do as many as there are).
    `streaming`: allow a top-k set larger than the cache; what does not fit is read, used, and dropped.
    """

    slots: int | None = None
    bytes: int | None = None
    policy: str = "lru"
    scope: str = "global"
    pinned: int = 0
    sample: int = 0
    seed: int = 0
    streaming: bool = False

    def __post_init__(self):
        _choice("policy", self.policy, POLICIES)
        _choice("scope", self.scope, SCOPES)
        if (self.slots is None) == (self.bytes is None):
            raise SimulationError("give the cache either slots or bytes")
        for name in ("slots", "bytes"):
            value = getattr(self, name)
            if value is not None:
                if isinstance(value, (int, np.integer)) and value < 1:
                    raise SimulationError(f"{name}={value}: a cache needs at least one {name[:-1]}")
                _whole(name, value, 1)
        _whole("pinned", self.pinned, 0)
        _whole("sample", self.sample, 0)
        _flag("streaming", self.streaming)
        if self.sample and self.policy in ("lru", "fifo", "static"):
            raise SimulationError(f"sample={self.sample} has no meaning for {self.policy}, which needs no search")


@dataclass(frozen=True, kw_only=True)
class Disk:
    """One queue before `lanes` reads at a time. A read that has started runs to its end.

    With d reads running, each moves at `gb_per_s`(d) / d; `gb_per_s` is one number or a table for depth 1, 2, ... whose
    last entry holds for greater depths. A read takes `latency_ms`, then its bytes. `noise`: standard deviation of the
    logarithm of a factor on each read's latency and size, drawn with `seed`. `issue_ms`: in which the processor, and not the disk, is busy handing over
    the reads that begin at a router, however many; it computes nothing meanwhile.
    """

    latency_ms: float = 0.1
    gb_per_s: float | tuple[float, ...] = 5.0
    lanes: int = 1
    noise: float = 0.0
    seed: int = 0
    issue_ms: float = 0.0

    def __post_init__(self):
        object.__setattr__(self, "gb_per_s", _numbers("gb_per_s", self.gb_per_s))
        _whole("seed", self.seed, 0)
        at_least("latency_ms", self.latency_ms, 0.0)
        _whole("lanes", self.lanes, 1, MOST_LANES)
        at_least("noise", self.noise, 0.0)
        at_least("issue_ms", self.issue_ms, 0.0)
        if self.noise > MOST_NOISE:
            raise SimulationError(f"noise={self.noise!r}: the logarithms of read times spread by at most {MOST_NOISE:g}")
        table = self.table
        if not table or any(not value > 0 for value in table):
            raise SimulationError(f"gb_per_s={self.gb_per_s!r} must be positive (math.inf for a disk that takes only its latency)")

    @property
    def table(self) -> tuple[float, ...]:
        return self.gb_per_s if isinstance(self.gb_per_s, tuple) else (self.gb_per_s,)

    @classmethod
    def fitted(cls, *, latency_ms: float, peak_gb_per_s: float, half_depth: float, lanes: int, **more) -> Disk:
        """A disk whose bandwidth saturates with depth: peak * d / (d + half_depth)."""
        _whole("lanes", lanes, 1, MOST_LANES)
        at_least("half_depth", half_depth, 0.0)
        _number("peak_gb_per_s", peak_gb_per_s)
        return cls(latency_ms=latency_ms, gb_per_s=tuple(peak_gb_per_s * d / (d + half_depth) for d in range(1, lanes + 1)), lanes=lanes, **more)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Times of the processor, in ms. Numbers, or one per MoE layer (a dense layer's time goes to the MoE layer after it).

    A layer takes `attention_ms` up to its router, then `shared_ms` (shared expert and all else) and `expert_ms` for each
    distinct expert, and `fresh_ms` more for one that has been read since it was computed last (its weights are in none of the processor's caches); a
    pass ends with `head_ms`. `extra_token`: what each further token of a pass costs, as a share of
    the first. `overlap`: experts are computed one by one as they arrive, not when the last has arrived.
    """

    attention_ms: float | tuple[float, ...] = 1.0
    expert_ms: float | tuple[float, ...] = 0.25
    shared_ms: float | tuple[float, ...] = 0.0
    head_ms: float = 0.0
    extra_token: float = 0.0
    overlap: bool = False
    fresh_ms: float = 0.0

    def __post_init__(self):
        for name in ("attention_ms", "expert_ms", "shared_ms"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
            for entry in np.atleast_1d(getattr(self, name)):
                at_least(name, float(entry), 0.0)
        at_least("head_ms", self.head_ms, 0.0)
        at_least("extra_token", self.extra_token, 0.0)
        at_least("fresh_ms", self.fresh_ms, 0.0)
        _flag("overlap", self.overlap)

    def per_layer(self, name: str, num_layers: int) -> np.ndarray:
        value = np.atleast_1d(np.asarray(getattr(self, name), dtype=np.float64))
        if len(value) not in (1, num_layers):
            raise SimulationError(f"{name} has {len(value)} entries for {num_layers} MoE layers")
        return np.ascontiguousarray(np.broadcast_to(value, num_layers))


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """Reads before the router asks. `source`: "oracle" (the future itself) or a predictor that the trace holds.

    At each router the top `k + budget` guesses for the layers `horizon` ahead are queued, nearest layer first, unless
    resident, on their way, or scored below `threshold`. `guard`: "none"; "idle" (only where nothing is read or queued);
    "window" (only while all prefetches outstanding are estimated to end before the layer's router; demands are waited for
    before that window begins, so they do not count). `expire`: queued guesses are dropped when their layer's router has
    spoken; `cancel`: also when a guess at a shorter horizon leaves them out. `promote`: a queued guess that is demanded is read with the
    demands, before all other guesses; otherwise the router waits until its turn among the guesses comes.
    `cross_token`: guess past the last layer, for the first layers of the next token.
    """

    source: str = ORACLE
    horizon: int | tuple[int, ...] = 1
    budget: int = 0
    threshold: float | None = None
    guard: str = "none"
    expire: bool = True
    cancel: bool = False
    promote: bool = True
    cross_token: bool = False

    def __post_init__(self):
        if not isinstance(self.horizon, int):
            object.__setattr__(self, "horizon", tuple(self.horizon) if isinstance(self.horizon, Iterable) and not isinstance(self.horizon, str) else (self.horizon,))
        for h in self.horizons:
            _whole("horizon", h, 1)
        if isinstance(self.horizon, tuple):
            object.__setattr__(self, "horizon", tuple(sorted(self.horizon)))
        for name in ("expire", "cancel", "promote", "cross_token"):
            _flag(name, getattr(self, name))
        if not self.horizons or min(self.horizons) < 1 or len(set(self.horizons)) != len(self.horizons):
            raise SimulationError(f"horizon={self.horizon} must be different layer counts of at least 1")
        if self.source == NONE:
            raise SimulationError("for no prefetch leave prefetch out (prefetch=None); in a sweep and on the command line its name is demand")
        _choice("guard", self.guard, GUARDS)
        _whole("budget", self.budget, 0)
        if self.threshold is not None and not math.isfinite(_number("threshold", self.threshold)):
            raise SimulationError(f"threshold={self.threshold!r} must be a number")
        if self.threshold is not None and self.source == ORACLE:
            raise SimulationError("the oracle has no scores, so threshold has no meaning")

    @property
    def horizons(self) -> tuple[int, ...]:
        return (self.horizon,) if isinstance(self.horizon, int) else self.horizon
