"""Who is in the cache and who leaves next: the compiled part that all replays share.

Residents of a group (the whole cache, or one layer's) form a doubly linked list, the next to leave first. LRU and FIFO
take its head; the other policies search it, so that an eviction costs them one step per resident. Pinned experts are outside the lists.
"""
# A key is layer * E + expert; a group's list hangs on the node num_keys + group.

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .config import POLICIES, Cache, SimulationError
from .jit import compiled

LRU, FIFO, LFU, LFRU, LEAST_STALE, BELADY, STATIC = range(len(POLICIES))
EVICTIONS, WASTED, WASTED_BYTES = range(3)   # entries of Residency.tally
NEVER = np.iinfo(np.int32).max
COUNTED = 2                                  # Residency.guess of a guess issued after the warm-up; 1 during it; 0 is none


class Residency(NamedTuple):
    """State of a cache, changed in place."""

    after: np.ndarray      # int32 per node: the next in its list, itself where pinned, -1 where not resident
    before: np.ndarray     # int32 per node
    used: np.ndarray       # int64 per group, in slots or bytes
    capacity: np.ndarray   # int64 per group
    cost: np.ndarray       # int64 per layer: 1, or the bytes of an expert
    size: np.ndarray       # int64 per layer: the bytes of an expert
    layer: np.ndarray      # int16 per key: key // E without the division
    uses: np.ndarray       # int32 per key
    last_pass: np.ndarray  # int32 per key: pass of the last use
    next_use: np.ndarray   # int32 per key: event of the next use; only for Belady
    mark: np.ndarray       # int64 per key: the event whose set it was in last
    guess: np.ndarray      # uint8 per key: an unresolved prefetch
    tally: np.ndarray      # int64, see above


def create(cache: Cache, num_experts: int, expert_bytes: np.ndarray, top_k: int, usage: np.ndarray) -> Residency:
    """An empty cache, but for its pinned experts: the most used ones by `usage` (per key), ties to the lower key."""
    L, E = len(expert_bytes), num_experts
    groups = L if cache.scope == "layer" else 1
    cost = np.ones(L, np.int64) if cache.slots is not None else expert_bytes
    capacity = cache.slots if cache.slots is not None else cache.bytes
    unit = "slots" if cache.slots is not None else "bytes"
    nodes = L * E + groups
    after = np.full(nodes, -1, np.int32)
    before = np.full(nodes, -1, np.int32)
    after[L * E :] = before[L * E :] = np.arange(L * E, nodes)
    used = np.zeros(groups, np.int64)
    limits = np.full(groups, capacity, np.int64)
    for g in range(groups):
        keys = np.arange(g * E, (g + 1) * E) if groups > 1 else np.arange(L * E)
        wanted = len(keys) if cache.policy == "static" else cache.pinned
        for key in keys[np.argsort(-usage[keys], kind="stable")][:wanted]:
            price = int(cost[key // E])
            if used[g] + price > capacity:
                if cache.policy == "static":
                    break
                raise SimulationError(f"pinned={cache.pinned} experts do not fit in {capacity} {unit}")
            after[key] = key
            used[g] += price
        if cache.policy == "static":
            limits[g] = used[g]   # no room is left in which others could stay
        largest = int(cost.max() if groups == 1 else cost[g])
        if cache.policy != "static" and not cache.streaming and capacity - used[g] < top_k * largest:
            left = f"{capacity} {unit}" if not used[g] else f"{capacity} {unit}, {used[g]} of them pinned,"
            raise SimulationError(f"{left} cannot hold one top-{top_k} set ({top_k * largest} {unit}); enlarge the cache, or set streaming=True")
    return Residency(after, before, used, limits, cost, np.ascontiguousarray(expert_bytes), np.repeat(np.arange(L, dtype=np.int16), E), np.zeros(L * E, np.int32),
                     np.full(L * E, -1, np.int32), np.full(L * E, NEVER, np.int32), np.full(L * E, -1, np.int64), np.zeros(L * E, np.uint8), np.zeros(3, np.int64))  # fmt: skip


@compiled
def resident(r, key):
    return r.after[key] >= 0


@compiled
def _unlink(r, key):
    a, b = r.after[key], r.before[key]
    r.after[b] = a
    r.before[a] = b


@compiled
def _append(r, key, head):
    last = r.before[head]
    r.after[last] = key
    r.before[key] = last
    r.after[key] = head
    r.before[head] = key


@compiled
def use(r, policy, key, head, now):
    """Count a use in pass `now` of a key that may be resident, and move it in the list where the policy looks at recency."""
    if policy >= LFU:   # recency and arrival are in the order of the list
        r.uses[key] += 1
        r.last_pass[key] = now
    if policy != FIFO and r.after[key] >= 0 and r.after[key] != key:
        _unlink(r, key)
        _append(r, key, head)


@compiled
def admit(r, key, head, group, layer):
    _append(r, key, head)
    r.used[group] += r.cost[layer]


@compiled
def evict(r, policy, key, group):
    _unlink(r, key)
    r.after[key] = -1
    layer = r.layer[key]
    r.used[group] -= r.cost[layer]
    if policy == LFU:
        r.uses[key] = 0
    r.tally[EVICTIONS] += 1
    if r.guess[key]:
        if r.guess[key] == COUNTED:
            r.tally[WASTED] += 1
            r.tally[WASTED_BYTES] += r.size[layer]
        r.guess[key] = 0


@compiled
def badness(r, policy, key, layer, now):
    """The smallest leaves first; ties go to the earlier in the list."""
    if policy == BELADY:
        return -np.int64(r.next_use[key])
    if policy != LEAST_STALE:
        return np.int64(r.uses[key])
    own = r.layer[key]
    if own > layer:                            # its layer is still to run in this pass: keep it, the nearest longest
        return np.int64(2 + len(r.cost) - own)
    return np.int64(1 if r.last_pass[key] == now else 0)


@compiled
def victim(r, policy, head, event, members, layer, now):
    """The resident that leaves next, or -1: outside the set of `event`, or with `members` within it."""
    best, least = -1, np.int64(0)
    key = r.after[head]
    while key != head:
        if (r.mark[key] == event) == members:
            if policy <= FIFO:
                return key
            bad = badness(r, policy, key, layer, now)
            if best < 0 or bad < least:
                best, least = key, bad
        key = r.after[key]
    return best


@compiled
def trim(r, policy, group, head, event, layer, now):
    """Evict until the group fits: experts outside the current set first; members only where the set alone is too large."""
    while r.used[group] > r.capacity[group]:
        key = victim(r, policy, head, event, False, layer, now)
        if key < 0:
            key = victim(r, policy, head, event, True, layer, now)
        if key < 0:
            return
        evict(r, policy, key, group)


@compiled
def gather(experts_NLK, first, last, layer, E, mark, event, members):
    """Write the distinct keys that tokens first..last-1 chose at `layer` to `members`, in the order of their last
    appearance, and mark them with `event`. Returns (how many, how many (token, expert) pairs)."""
    K = experts_NLK.shape[2]
    count = 0
    pairs = 0
    for n in range(last - 1, first - 1, -1):
        for j in range(K - 1, -1, -1):
            expert = experts_NLK[n, layer, j]
            if expert >= 0:
                pairs += 1
                key = layer * E + expert
                if mark[key] != event:
                    mark[key] = event
                    members[count] = key
                    count += 1
    for i in range(count // 2):
        members[i], members[count - 1 - i] = members[count - 1 - i], members[i]
    return count, pairs
