"""Replay without a clock: hits, misses and bytes of a cache policy on a trace.

Two replays are offered, because published numbers use both and they differ much. "atomic": all experts of one (pass,
layer) set are looked up before anything is evicted for it, and none of them can be evicted by it; that is what an engine
does. "sequential": the set is admitted access by access, as in a processor's cache.

In a pass of several tokens (prefill, or a batch) each distinct expert of a layer is one access, in the order of its last appearance.
"""
# N tokens, L layers, E experts, K chosen, S passes, A accesses

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..traces.schema import DECODE, PREFILL, Trace
from . import residency as res
from .config import POLICIES, Cache, SimulationError
from .jit import compiled

REPLAYS = ("atomic", "sequential")
ACCESSES, HITS, READ_BYTES = range(3)
MOST_WORDS = 1 << 30    # 4 GB of drawn numbers
PIECE = 1 << 22         # of them at a time


@dataclass(frozen=True, eq=False)
class Counts:
    """What a replay counted. `per_pass`: int64 [S, 3] of accesses, hits and bytes read."""

    per_pass: np.ndarray
    phase: np.ndarray
    evictions: int
    hit_NLK: np.ndarray | None = None   # bool, per access; only where asked for

    @property
    def accesses(self) -> int:
        return int(self.per_pass[:, ACCESSES].sum())

    @property
    def hits(self) -> int:
        return int(self.per_pass[:, HITS].sum())

    @property
    def misses(self) -> int:
        return self.accesses - self.hits

    @property
    def hit_rate(self) -> float:
        if not self.accesses:
            raise SimulationError("no expert is asked for, so there is no hit rate")
        return self.hits / self.accesses

    @property
    def read_bytes(self) -> int:
        return int(self.per_pass[:, READ_BYTES].sum())

    @property
    def decode(self) -> Counts:
        """The decode passes alone."""
        return self._of(DECODE)

    @property
    def prefill(self) -> Counts:
        """The prefill passes alone."""
        return self._of(PREFILL)

    def _of(self, phase: int) -> Counts:
        chosen = self.phase == phase
        if not chosen.any():
            raise SimulationError(f"the trace has no {('prefill', 'decode')[phase]} pass")
        return Counts(self.per_pass[chosen], self.phase[chosen], self.evictions)


def count(trace: Trace, cache: Cache, *, replay: str = "atomic", cold: str = "trace", usage: np.ndarray | None = None, flags: bool = False,
          rng: random.Random | None = None) -> Counts:  # fmt: skip
    """Hits, misses and bytes read of `cache` on `trace`.

    `cold`: "trace" empties the cache once, "sequence" also whenever new sequences begin. `usage`: uses per (layer, expert)
    [L, E] by which pinned and static experts are chosen, the trace's own by default. `flags` also returns each access's
    hit. `rng`: the generator of sampled evictions, left as far on as they have drawn, so that several replays can share one (default: a new
    one of `cache.seed`). Raises SimulationError for settings that cannot be replayed.
    """
    if replay not in REPLAYS:
        raise SimulationError(f"replay={replay!r} is unknown; choose atomic or sequential")
    if cache.sample and replay != "sequential":
        raise SimulationError("sample is modelled by the sequential replay only")
    E = trace.meta.num_experts
    own_usage = uses(trace)
    r = res.create(cache, E, np.asarray(trace.meta.expert_bytes, np.int64), trace.meta.top_k, own_usage if usage is None else checked_usage(usage, trace))
    first, when = occurrences(trace, own_usage) if cache.policy == "belady" else (np.zeros(1, np.int64), np.zeros(1, np.int32))
    per_pass = np.zeros((trace.num_passes, 3), np.int64)
    hit_NLK = np.zeros(trace.experts_NLK.shape if flags else (0, 0, 0), np.bool_)
    rng = rng or random.Random(cache.seed)
    before = rng.getstate()
    sample = min(cache.sample, len(own_usage))   # a larger one is all residents too, and draws as little
    words, scratch = _words(sample, len(own_usage), int(own_usage.sum()), rng), _scratch(cache, E, trace.num_layers)
    pool = 21 + (4 ** math.ceil(math.log(sample * 3, 4)) if sample > 5 else 0)
    _count(trace.experts_NLK, trace.starts, fresh_passes(trace, cold), E, POLICIES.index(cache.policy), r, replay == "atomic",
           first, when, sample, pool, words, per_pass, hit_NLK, scratch)  # fmt: skip
    rng.setstate(before)
    for _ in _drawn(int(scratch.draws[0]), rng):
        pass
    return Counts(per_pass, trace.phase, int(r.tally[res.EVICTIONS]), hit_NLK if flags else None)


def count_keys(keys: np.ndarray, slots: int, policy: str = "lru") -> int:
    """Misses of a cache of `slots` equal slots on a sequence of keys >= 0, replayed one by one."""
    keys = np.asarray(keys)
    if keys.ndim != 1 or not len(keys) or keys.dtype.kind not in "iu" or keys.min() < 0 or keys.max() >= res.NEVER:   # before the cast, which would wrap
        raise SimulationError(f"keys must be a sequence of at least one whole number of 0..{res.NEVER - 1}")
    keys = np.ascontiguousarray(keys, np.int32)
    cache = Cache(slots=slots, policy=policy)
    E = int(keys.max()) + 1
    if policy == "lru":
        return int(_lru_misses(keys, E, slots, np.full(E + 1, -1, np.int32), np.full(E + 1, -1, np.int32)))
    experts = keys.reshape(-1, 1, 1).astype(np.int16 if E <= np.iinfo(np.int16).max else np.int32)
    starts = np.arange(len(keys) + 1)
    usage = np.bincount(keys, minlength=E).astype(np.int64)
    r = res.create(cache, E, np.ones(1, np.int64), 1, usage)
    first, when = _occurrences_of(experts, starts, E, usage)
    per_pass = np.zeros((len(keys), 3), np.int64)
    _count(experts, starts, np.zeros(len(keys), np.bool_), E, POLICIES.index(policy), r, False, first, when, 0, 21, _words(0, E, 0, random.Random()),
           per_pass, np.zeros((0, 0, 0), np.bool_), _scratch(cache, E, 1))  # fmt: skip
    return len(keys) - int(per_pass[:, HITS].sum())


def uses(trace: Trace) -> np.ndarray:
    """How often each key (layer * E + expert) is accessed: int64 [L * E]."""
    usage = np.zeros(trace.num_layers * trace.meta.num_experts, np.int64)
    _uses(trace.experts_NLK, trace.starts, trace.meta.num_experts, usage, *_set_of(trace.meta.num_experts, trace.num_layers))
    return usage


def occurrences(trace: Trace, usage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When each key is accessed, for Belady: (offsets per key, access numbers), from `uses(trace)`."""
    return _occurrences_of(trace.experts_NLK, trace.starts, trace.meta.num_experts, usage)


def fresh_passes(trace: Trace, cold: str) -> np.ndarray:
    """bool [S]: passes before which the cache is emptied, all of whose tokens begin a sequence."""
    if cold not in ("trace", "sequence"):
        raise SimulationError(f"cold={cold!r} is unknown; choose trace or sequence")
    if cold == "trace":
        return np.zeros(trace.num_passes, np.bool_)
    of_pass = np.repeat(np.arange(trace.num_passes), np.diff(trace.starts))
    _, first_token, inverse = np.unique(trace.sequence, return_index=True, return_inverse=True)
    fresh = np.logical_and.reduceat(of_pass[first_token][inverse] == of_pass, trace.starts[:-1])
    fresh[0] = False   # empty anyway
    return fresh


def checked_usage(usage: np.ndarray, trace: Trace) -> np.ndarray:
    """`usage` as one number per key; shares of all uses are as good as counts."""
    shape = (trace.num_layers, trace.meta.num_experts)
    usage = np.asarray(usage)
    if usage.shape not in (shape, (shape[0] * shape[1],)):
        raise SimulationError(f"usage has the shape {usage.shape}, the trace needs one count for each of {shape[0]} layers x {shape[1]} experts")
    if usage.dtype.kind not in "biuf" or not (usage >= 0).all():
        raise SimulationError("usage must be numbers of at least 0")
    return usage.reshape(-1).astype(np.float64)


def _words(sample: int, keys: int, accesses: int, rng: random.Random) -> np.ndarray:
    """32-bit outputs of Python's own generator, so that a sampled eviction draws what rng.sample draws. A sample of all keys draws nothing."""
    n = 3 * sample * accesses + 1
    if not 0 < sample < keys:
        return np.zeros(1, np.uint32)
    if n > MOST_WORDS:
        raise SimulationError(f"sample={sample} on {accesses} accesses needs {n / 2**28:.0f} GB of random numbers; take a smaller sample, at most {MOST_WORDS // (3 * accesses)} here, or a shorter trace")
    return np.frombuffer(b"".join(_drawn(n, rng)), np.uint32)


def _drawn(n: int, rng: random.Random) -> Iterator[bytes]:
    """The generator's next n outputs, as little-endian bytes: in pieces, since it counts the bits of one call in an int of C."""
    for first in range(0, n, PIECE):
        size = min(PIECE, n - first)
        yield rng.getrandbits(32 * size).to_bytes(4 * size, "little")


def _occurrences_of(experts, starts, E, usage):
    first = np.concatenate([[0], np.cumsum(usage)]).astype(np.int64)
    when = np.empty(int(first[-1]), np.int32)
    _when(experts, starts, E, first[:-1].copy(), when, *_set_of(E, experts.shape[1]))
    return first, when


def _set_of(E: int, L: int) -> tuple[np.ndarray, np.ndarray]:
    """Marks per key and room for the members of one set: what `residency.gather` writes to."""
    return np.full(L * E, -1, np.int64), np.empty(E, np.int32)


class Scratch(NamedTuple):
    """Working memory of `_count`: compiled code allocates nothing."""

    members: np.ndarray   # int32 [E]
    hit: np.ndarray       # bool per key
    cursor: np.ndarray    # int32 per key, only for Belady
    draws: np.ndarray     # int64 [1]
    keys: np.ndarray      # int32 per key, only where evictions are sampled
    picked: np.ndarray    # the same


def _scratch(cache: Cache, E: int, L: int) -> Scratch:
    sampled = L * E if cache.sample else 1
    return Scratch(np.empty(E, np.int32), np.zeros(L * E, np.bool_), np.zeros(L * E if cache.policy == "belady" else 1, np.int32), np.zeros(1, np.int64),
                   np.empty(sampled, np.int32), np.empty(sampled, np.int32))  # fmt: skip


@compiled
def _uses(experts_NLK, starts, E, usage, mark, members):
    L = experts_NLK.shape[1]
    for s in range(len(starts) - 1):
        for layer in range(L):
            count, _ = res.gather(experts_NLK, starts[s], starts[s + 1], layer, E, mark, s * L + layer, members)
            for i in range(count):
                usage[members[i]] += 1


@compiled
def _when(experts_NLK, starts, E, cursor, when, mark, members):
    L = experts_NLK.shape[1]
    now = 0
    for s in range(len(starts) - 1):
        for layer in range(L):
            count, _ = res.gather(experts_NLK, starts[s], starts[s + 1], layer, E, mark, s * L + layer, members)
            for i in range(count):
                when[cursor[members[i]]] = now
                cursor[members[i]] += 1
                now += 1


@compiled
def foresee(r, key, first, when, cursor):
    """Set the next use of a key that is being used now (Belady)."""
    cursor[key] += 1
    at = first[key] + cursor[key]
    r.next_use[key] = when[at] if at < first[key + 1] else res.NEVER


@compiled
def flush(r, policy, head, group):
    while r.after[head] != head:
        res.evict(r, policy, r.after[head], group)


@compiled
def _below(n, words, cursor):
    """random.Random._randbelow: reject draws of as many bits as n has."""
    bits = 0
    while n >> bits:
        bits += 1
    while True:
        draw = words[cursor[0] % len(words)] >> np.uint32(32 - bits)
        cursor[0] += 1
        if draw < n:
            return np.int64(draw)


@compiled
def _sampled_victim(r, policy, head, sample, pool_size, words, cursor, keys, picked):
    """The worst of `sample` residents drawn as random.sample draws them from the list, least recent first."""
    n = 0
    key = r.after[head]
    while key != head:
        keys[n] = key
        picked[n] = n
        n += 1
        key = r.after[key]
    k = min(sample, n)
    best, least, place = -1, np.int64(0), 0
    for i in range(k):
        if n <= sample:
            j = i
        elif n <= pool_size:
            draw = _below(n - i, words, cursor)
            j = picked[draw]
            picked[draw] = picked[n - i - 1]
        else:
            j = _below(n, words, cursor)
            while picked[j] < 0:
                j = _below(n, words, cursor)
            picked[j] = -1
        bad = res.badness(r, policy, keys[j], 0, 0)
        if best < 0 or bad < least or (bad == least and j < place):
            best, least, place = keys[j], bad, j
    return best


@compiled
def _count(experts_NLK, starts, fresh, E, policy, r, atomic, first, when, sample, pool_size, words, per_pass, hit_NLK, scratch):
    L = experts_NLK.shape[1]
    num_keys = L * E
    groups = len(r.used)
    members, hit = scratch.members, scratch.hit
    for s in range(len(starts) - 1):
        if fresh[s]:
            for g in range(groups):
                flush(r, policy, num_keys + g, g)
        for layer in range(L):
            event = s * L + layer
            group = layer if groups > 1 else 0
            head = num_keys + group
            count, _ = res.gather(experts_NLK, starts[s], starts[s + 1], layer, E, r.mark, event, members)
            for i in range(count):
                key = members[i]
                hit[key] = res.resident(r, key)
                if policy == res.BELADY:
                    foresee(r, key, first, when, scratch.cursor)
                if hit[key]:
                    per_pass[s, HITS] += 1
                else:
                    per_pass[s, READ_BYTES] += r.size[layer]
                    while not atomic and r.used[group] + r.cost[layer] > r.capacity[group]:
                        if sample:
                            out = _sampled_victim(r, policy, head, sample, pool_size, words, scratch.draws, scratch.keys, scratch.picked)
                        else:
                            out = res.victim(r, policy, head, -2, False, layer, s)   # -2 marks none: nobody is protected
                        if out < 0:
                            break
                        res.evict(r, policy, out, group)
                    if atomic or r.used[group] + r.cost[layer] <= r.capacity[group]:
                        res.admit(r, key, head, group, layer)
                res.use(r, policy, key, head, s)
            per_pass[s, ACCESSES] += count
            if atomic:
                res.trim(r, policy, group, head, event, layer, s)
            if hit_NLK.shape[0]:
                for n in range(starts[s], starts[s + 1]):
                    for j in range(experts_NLK.shape[2]):
                        expert = experts_NLK[n, layer, j]
                        hit_NLK[n, layer, j] = expert >= 0 and hit[layer * E + expert]


@compiled
def _lru_misses(keys, num_keys, slots, after, before):
    """Plain LRU on a list threaded through two arrays; node num_keys is the list's end."""
    end = np.int32(num_keys)
    after[end] = before[end] = end
    newest = end
    free = slots
    misses = 0
    for i in range(len(keys)):
        key = keys[i]
        a = after[key]
        if a < 0:
            misses += 1
            if free:
                free -= 1
            else:
                oldest = after[end]
                nxt = after[oldest]
                after[end] = nxt
                before[nxt] = end
                after[oldest] = -1
                newest = before[end]
        elif key == newest:
            continue
        else:
            b = before[key]
            after[b] = a
            before[a] = b
        after[newest] = key
        before[key] = newest
        after[key] = end
        before[end] = key
        newest = key
    return misses
