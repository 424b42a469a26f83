"""The disk queue, compiled: reads run on lanes and are never interrupted; demands wait before guesses.

A guess (a prefetch) is read into a buffer of its lane and takes its place in the cache when it has arrived. If by then
nobody outside the current set can be evicted for it, it is dropped and counts as wasted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import residency as res
from .jit import compiled

IDLE, GUESSED, DEMANDED, READING = range(4)   # Queue.state
ACTIVE, DEMAND_HEAD, DEMAND_TAIL, GUESS_HEAD, GUESS_TAIL, READS, AHEAD, AHEAD_BYTES, RECORDED, PASS = range(10)   # Queue.at
ISSUED, USEFUL, LATE, CANCELLED, HELD_BACK, DROPPED = range(6)   # Queue.ledger; `wasted` adds the cache's evictions
ATTENTION, STALL, EXPERTS, HEAD, DEMAND_READ, GUESS_READ = range(6)   # kinds of timeline rows
ACCESSES, RESIDENT, IN_FLIGHT, MISSES, PROMOTED, DEMAND_READS, DEMAND_BYTES, GUESS_READS, GUESS_BYTES = range(9)   # Queue.per_pass
GUARD_NONE, GUARD_IDLE, GUARD_WINDOW = range(3)


class Settings(NamedTuple):
    """What does not change during a replay."""

    policy: int
    num_experts: int
    lanes: int
    latency: float             # ms
    speed: np.ndarray          # float64 [lanes + 1]: bytes per ms of each read while d run
    weightless: bool           # bandwidth is infinite
    factors: np.ndarray        # float64: what noise does to the reads, in turn
    guard: int
    promote: bool              # a demand takes its queued guess out of the queue of guesses
    counted_from: int          # first pass after the warm-up
    record_from: int           # passes whose timeline is kept
    record_end: int
    issue: float               # ms of the processor for the reads that begin at a router


class Queue(NamedTuple):
    """State of the disk, changed in place."""

    key: np.ndarray            # int32 per lane
    latency: np.ndarray        # float64 per lane: ms left before the bytes
    left: np.ndarray           # float64 per lane: bytes left
    began: np.ndarray          # float64 per lane
    speculative: np.ndarray    # bool per lane
    state: np.ndarray          # uint8 per key
    demands: np.ndarray        # int32
    guesses: np.ndarray        # int32, -1 where one was taken out
    targets: np.ndarray        # int64 per guess: pass * L + layer it is meant for
    place: np.ndarray          # int32 per key: where it is in guesses
    at: np.ndarray             # int64, see above
    clock: np.ndarray          # float64 [1]: ms
    ledger: np.ndarray         # int64
    per_pass: np.ndarray       # int64 [S, 9]
    kind: np.ndarray           # uint8: timeline, as far as it has room
    span: np.ndarray           # float64 [., 2]
    what: np.ndarray           # int32 [., 2]: pass; key of a read, layer of a computation


def create(lanes: int, num_experts: int, num_layers: int, num_passes: int, timeline_rows: int) -> Queue:
    keys = num_experts * num_layers
    real = lambda n: np.zeros(n, np.float64)  # noqa: E731
    return Queue(np.zeros(lanes, np.int32), real(lanes), real(lanes), real(lanes), np.zeros(lanes, np.bool_), np.zeros(keys, np.uint8),
                 np.zeros(keys, np.int32), np.zeros(2 * keys + 16, np.int32), np.zeros(2 * keys + 16, np.int64), np.zeros(keys, np.int32), np.zeros(10, np.int64),
                 real(1), np.zeros(6, np.int64), np.zeros((num_passes, 9), np.int64), np.zeros(timeline_rows, np.uint8),
                 np.zeros((timeline_rows, 2), np.float64), np.zeros((timeline_rows, 2), np.int32))  # fmt: skip


@compiled
def record(q, p, kind, start, end, what):
    """One row of the timeline; rows beyond its room are only counted, so that the caller can make room and run again."""
    now = q.at[PASS]
    if p.record_from <= now < p.record_end and end > start:
        row = q.at[RECORDED]
        q.at[RECORDED] += 1
        if row < len(q.kind):
            q.kind[row] = kind
            q.span[row, 0], q.span[row, 1] = start, end
            q.what[row, 0], q.what[row, 1] = now, what


@compiled
def ahead(q, reads, size):
    """One prefetch of `size` bytes more (1) or less (-1) is queued or being read while nobody waits for it."""
    q.at[AHEAD] += reads
    q.at[AHEAD_BYTES] += reads * size


@compiled
def demand(q, p, key, size):
    """Queue a read that the router waits for; a queued guess for it moves over, or where nothing is promoted is waited for in its place."""
    guessed = q.state[key] == GUESSED
    q.state[key] = DEMANDED
    if guessed:
        ahead(q, -1, size)
        if not p.promote:
            return
        q.guesses[q.place[key]] = -1
    q.demands[q.at[DEMAND_TAIL]] = key
    q.at[DEMAND_TAIL] += 1


@compiled
def guess(q, r, p, key, target, allowed, window):
    """Queue a prefetch of `key`, unless it is resident, on its way, or the guard forbids it."""
    if res.resident(r, key) or q.state[key] != IDLE:
        return
    size = r.size[r.layer[key]]
    counted = q.at[PASS] >= p.counted_from
    if p.guard == GUARD_WINDOW:   # the processor waits for the demands before its window begins, so only prefetches fill it
        reads = q.at[AHEAD] + 1
        depth = min(reads, p.lanes)
        transfer = 0.0 if p.weightless else (q.at[AHEAD_BYTES] + size) / (p.speed[depth] * depth)
        allowed = p.latency * ((reads + p.lanes - 1) // p.lanes) + transfer <= window
    if not allowed:
        q.ledger[HELD_BACK] += counted
        return
    if q.at[GUESS_TAIL] == len(q.guesses):
        compact(q)
    row = q.at[GUESS_TAIL]
    q.guesses[row], q.targets[row], q.place[key] = key, target, row
    q.at[GUESS_TAIL] += 1
    ahead(q, 1, size)
    q.state[key] = GUESSED
    r.guess[key] = res.COUNTED if counted else 1
    q.ledger[ISSUED] += counted


@compiled
def compact(q):
    """Move the queued guesses to the front of their array. A key is queued at most once, so they always fit."""
    tail = 0
    for row in range(q.at[GUESS_HEAD], q.at[GUESS_TAIL]):
        key = q.guesses[row]
        if key >= 0:
            q.guesses[tail], q.targets[tail], q.place[key] = key, q.targets[row], tail
            tail += 1
    q.at[GUESS_HEAD], q.at[GUESS_TAIL] = 0, tail


@compiled
def cancel(q, r, row):
    """Take a guess out of the queue unread, unless the router waits for it there."""
    key = q.guesses[row]
    if q.state[key] == DEMANDED:
        return
    q.guesses[row] = -1
    q.state[key] = IDLE
    ahead(q, -1, r.size[r.layer[key]])
    q.ledger[CANCELLED] += r.guess[key] == res.COUNTED
    r.guess[key] = 0


@compiled
def resolve(q, r, key, outcome):
    """A guess turned out `outcome` (USEFUL or LATE), if there was one for `key`."""
    q.ledger[outcome] += r.guess[key] == res.COUNTED
    r.guess[key] = 0


@compiled
def start(q, r, p):
    """Begin reads while lanes are free."""
    while q.at[ACTIVE] < p.lanes:
        if q.at[DEMAND_HEAD] < q.at[DEMAND_TAIL]:
            key = q.demands[q.at[DEMAND_HEAD]]
            q.at[DEMAND_HEAD] += 1
            if q.at[DEMAND_HEAD] == q.at[DEMAND_TAIL]:
                q.at[DEMAND_HEAD] = q.at[DEMAND_TAIL] = 0
            speculative = False
        elif q.at[GUESS_HEAD] < q.at[GUESS_TAIL]:
            key = q.guesses[q.at[GUESS_HEAD]]
            q.at[GUESS_HEAD] += 1
            if key < 0:
                continue
            speculative = True
        else:
            q.at[GUESS_HEAD] = q.at[GUESS_TAIL] = 0
            return
        lane = q.at[ACTIVE]
        factor = p.factors[q.at[READS] % len(p.factors)] if len(p.factors) > 1 else 1.0
        q.at[READS] += 1
        q.at[ACTIVE] += 1
        q.key[lane] = key
        q.latency[lane] = p.latency * factor
        q.left[lane] = 0.0 if p.weightless else r.size[r.layer[key]] * factor
        q.began[lane] = q.clock[0]
        q.speculative[lane] = speculative
        q.state[key] = READING


@compiled
def step(q, p, until):
    """Move the clock to the next end of a read, or to `until` if that is earlier. Returns the lane that ended, or -1."""
    n = q.at[ACTIVE]
    if n == 0:
        if until < np.inf:
            q.clock[0] = until
        return -1
    speed = p.speed[n]
    first, least = 0, np.inf
    for lane in range(n):
        remaining = q.latency[lane] + q.left[lane] / speed
        if remaining < least:
            first, least = lane, remaining
    ended = q.clock[0] + least <= until
    passed = least if ended else until - q.clock[0]
    q.clock[0] = q.clock[0] + least if ended else until
    for lane in range(n):
        if passed <= q.latency[lane]:
            q.latency[lane] -= passed
        else:
            q.left[lane] = max(q.left[lane] - (passed - q.latency[lane]) * speed, 0.0)
            q.latency[lane] = 0.0
    return first if ended else -1


@compiled
def finish(q, r, p, lane, event, layer):
    """Take the ended read off its lane, give a guess its place in the cache, and begin the next read.

    Returns whether the router waits for it: every demand is awaited, and a guess that was asked for is none any more.
    """
    key = q.key[lane]
    own = r.layer[key]
    size = r.size[own]
    now = q.at[PASS]
    speculative = q.speculative[lane]
    record(q, p, GUESS_READ if speculative else DEMAND_READ, q.began[lane], q.clock[0], key)
    q.per_pass[now, GUESS_READS if speculative else DEMAND_READS] += 1
    q.per_pass[now, GUESS_BYTES if speculative else DEMAND_BYTES] += size
    q.at[ACTIVE] -= 1
    for i in range(lane, q.at[ACTIVE]):
        q.key[i], q.latency[i], q.left[i], q.began[i], q.speculative[i] = q.key[i + 1], q.latency[i + 1], q.left[i + 1], q.began[i + 1], q.speculative[i + 1]
    q.state[key] = IDLE
    awaited = r.guess[key] == 0
    if not awaited:
        ahead(q, -1, size)
        group = own if len(r.used) > 1 else 0
        head = len(r.layer) + group
        room = True
        while room and r.used[group] + r.cost[own] > r.capacity[group]:
            out = res.victim(r, p.policy, head, event, False, layer, now)
            room = out >= 0
            if room:
                res.evict(r, p.policy, out, group)
        if room:
            res.admit(r, key, head, group, own)
            r.uses[key] += 1   # or LFU would evict it before it can be used
        else:
            q.ledger[DROPPED] += r.guess[key] == res.COUNTED
            if r.guess[key] == res.COUNTED:
                r.tally[res.WASTED_BYTES] += size
            r.guess[key] = 0
    start(q, r, p)
    return awaited


@compiled
def run_to(q, r, p, until, event, layer):
    """Let the disk work up to the time `until`."""
    while True:
        lane = step(q, p, until)
        if lane < 0:
            return
        finish(q, r, p, lane, event, layer)
