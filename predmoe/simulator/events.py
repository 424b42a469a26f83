"""The event loop: passes and layers in order, the processor on one side, the disk queue on the other. Compiled."""
# N tokens, L layers, E experts, K chosen, S passes, H horizons, M guesses per (token, layer)

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import diskqueue as dq
from . import residency as res
from .counting import flush, foresee
from .jit import compiled


class Routing(NamedTuple):
    """The trace as the loop reads it."""

    experts_NLK: np.ndarray
    starts: np.ndarray
    sequence: np.ndarray
    fresh: np.ndarray          # bool per pass: the cache is emptied before it
    follows: np.ndarray        # bool per pass: the next token of the sequences in the pass before it
    first: np.ndarray          # Belady: offsets into `when` per key
    when: np.ndarray


class Guesses(NamedTuple):
    """Where prefetches come from."""

    horizons: np.ndarray       # int64 [H], rising; empty for no prefetch
    oracle: bool
    experts_HNLM: np.ndarray   # int16, empty for the oracle
    limit_HNL: np.ndarray      # int16: how many of the M are used
    window_HL: np.ndarray      # float64: ms from this layer's router to that of the layer guessed
    expire: bool
    cancel: bool
    cross_token: bool


class Times(NamedTuple):
    """Compute times in ms, float64."""

    attention: np.ndarray      # [L]
    expert: np.ndarray         # [L]
    shared: np.ndarray         # [L]
    head: float
    extra_token: float
    overlap: bool
    fresh: float


@compiled
def replay(routing, guesses, times, p, r, q, spans, members, candidates, seen, cursor):
    """Fill `spans` [S, 3] with start, end and stall of each pass, and q.per_pass, q.ledger and the timeline."""
    L = routing.experts_NLK.shape[1]
    E = p.num_experts
    if p.policy == res.BELADY:
        for key in range(L * E):
            if routing.first[key] < routing.first[key + 1]:
                r.next_use[key] = routing.when[routing.first[key]]
    event = np.int64(-1)
    for s in range(len(routing.starts) - 1):
        q.at[dq.PASS] = s
        if routing.fresh[s]:
            empty(q, r, p)
        begin, end = routing.starts[s], routing.starts[s + 1]
        extra = 1.0 + times.extra_token * (end - begin - 1)
        spans[s, 0] = q.clock[0]
        for layer in range(L):
            _compute(q, r, p, dq.ATTENTION, times.attention[layer] * extra, event, layer - 1 if layer else L - 1, layer)
            event = np.int64(s) * L + layer
            count, pairs = res.gather(routing.experts_NLK, begin, end, layer, E, r.mark, event, members)
            begun = q.at[dq.READS]
            guessed = _guessed(r, members, count)
            waiting = ask(q, r, p, routing, members, count, layer, s, event, cursor)
            if len(guesses.horizons):
                foretell(q, r, p, routing, guesses, s, layer, seen, candidates)
            dq.start(q, r, p)
            issue = p.issue if q.at[dq.READS] > begun else 0.0
            work = times.expert[layer] * (count + times.extra_token * (pairs - count))
            late, early = times.fresh * waiting, times.fresh * guessed
            shared = times.shared[layer] * extra
            if times.overlap and count:
                spans[s, 2] += _overlapped(q, r, p, waiting, count, work / count, issue + early, shared, event, layer, times.fresh)
            else:
                asked = q.clock[0]
                while waiting:
                    waiting -= dq.finish(q, r, p, dq.step(q, p, np.inf), event, layer)
                busy = max(asked + issue - q.clock[0], 0.0)
                spans[s, 2] += max(q.clock[0] - asked - issue, 0.0)
                dq.record(q, p, dq.STALL, asked + issue, q.clock[0], layer)
                _compute(q, r, p, dq.EXPERTS, busy + work + shared + late + early, event, layer, layer)
        _compute(q, r, p, dq.HEAD, times.head * extra, event, L - 1, L - 1)
        spans[s, 1] = q.clock[0]


@compiled
def _compute(q, r, p, kind, duration, event, current, layer):
    """The processor works for `duration`; the disk goes on. `current` is the layer whose set is in use."""
    began = q.clock[0]
    dq.run_to(q, r, p, began + duration, event, current)
    dq.record(q, p, kind, began, q.clock[0], layer)


@compiled
def ask(q, r, p, routing, members, count, layer, s, event, cursor):
    """The router has spoken: what is resident is used, the rest is demanded, and room is made. Returns how many are awaited."""
    group = layer if len(r.used) > 1 else 0
    head = len(r.layer) + group
    stats = q.per_pass[s]
    waiting = 0
    for i in range(count):
        key = members[i]
        if p.policy == res.BELADY:
            foresee(r, key, routing.first, routing.when, cursor)
        stats[dq.ACCESSES] += 1
        if res.resident(r, key):
            stats[dq.RESIDENT] += 1
            dq.resolve(q, r, key, dq.USEFUL)
        else:
            waiting += 1
            if q.state[key] == dq.READING:
                stats[dq.IN_FLIGHT] += 1
                dq.ahead(q, -1, r.size[layer])
                dq.resolve(q, r, key, dq.LATE)
            else:
                stats[dq.MISSES] += 1
                if q.state[key] == dq.GUESSED:
                    stats[dq.PROMOTED] += p.promote
                    dq.resolve(q, r, key, dq.LATE)
                dq.demand(q, p, key, r.size[layer])
            res.admit(r, key, head, group, layer)
        res.use(r, p.policy, key, head, s)
    res.trim(r, p.policy, group, head, event, layer, s)
    return waiting


@compiled
def foretell(q, r, p, routing, guesses, s, layer, seen, candidates):
    """Queue the guesses of every horizon, nearest first; drop queued ones that have expired or been superseded."""
    L = routing.experts_NLK.shape[1]
    E = p.num_experts
    now = np.int64(s) * L + layer
    if guesses.expire:
        for row in range(q.at[dq.GUESS_HEAD], q.at[dq.GUESS_TAIL]):
            if q.guesses[row] >= 0 and q.targets[row] <= now:
                dq.cancel(q, r, row)
    idle = q.at[dq.ACTIVE] == 0 and q.at[dq.DEMAND_HEAD] == q.at[dq.DEMAND_TAIL] and q.at[dq.GUESS_HEAD] == q.at[dq.GUESS_TAIL]
    allowed = idle or p.guard != dq.GUARD_IDLE
    for i in range(len(guesses.horizons)):
        target_pass, target_layer = s, layer + guesses.horizons[i]
        if target_layer >= L:
            target_pass, target_layer = s + 1, target_layer - L
            if not guesses.cross_token or target_pass == len(routing.fresh) or not routing.follows[target_pass]:
                continue
        stamp = now * len(guesses.horizons) + i
        if guesses.oracle:
            begin, end = routing.starts[target_pass], routing.starts[target_pass + 1]
            count, _ = res.gather(routing.experts_NLK, begin, end, target_layer, E, seen, stamp, candidates)
        else:
            count = _predicted(routing, guesses, i, s, layer, target_layer, target_pass > s, E, seen, stamp, candidates)
        target = np.int64(target_pass) * L + target_layer
        if guesses.cancel:
            for row in range(q.at[dq.GUESS_HEAD], q.at[dq.GUESS_TAIL]):
                key = q.guesses[row]
                if key >= 0 and q.targets[row] == target and seen[key] != stamp:
                    dq.cancel(q, r, row)
        for j in range(count):
            dq.guess(q, r, p, candidates[j], target, allowed, guesses.window_HL[i, layer])


@compiled
def _predicted(routing, guesses, i, s, layer, target_layer, across, E, seen, stamp, candidates):
    """Distinct predicted keys of a pass: every token's best guess, then every token's second, and so on."""
    begin, end = routing.starts[s], routing.starts[s + 1]
    count = 0
    for j in range(guesses.experts_HNLM.shape[3]):
        for n in range(begin, end):
            if across and n + 1 < end and routing.sequence[n + 1] == routing.sequence[n]:
                continue   # the next token of this one is in the same pass
            if j < guesses.limit_HNL[i, n, layer]:
                expert = guesses.experts_HNLM[i, n, layer, j]
                if expert >= 0:
                    key = target_layer * E + expert
                    if seen[key] != stamp:
                        seen[key] = stamp
                        candidates[count] = key
                        count += 1
    return count


@compiled
def _guessed(r, members, count):
    """How many members are resident by a prefetch and have not been used since."""
    found = 0
    for i in range(count):
        found += res.resident(r, members[i]) and r.guess[members[i]] != 0
    return found


@compiled
def _overlapped(q, r, p, waiting, count, each, before, shared, event, layer, fresh):
    """After `before`, experts are computed one by one as they arrive, then the shared work. Returns the stall."""
    began = q.clock[0] + before
    free = began + each * (count - waiting)
    dq.record(q, p, dq.EXPERTS, began - before, free, layer)
    stall = 0.0
    while waiting:
        if dq.finish(q, r, p, dq.step(q, p, np.inf), event, layer):
            waiting -= 1
            arrived = q.clock[0]
            if arrived > free:
                dq.record(q, p, dq.STALL, free, arrived, layer)
                stall += arrived - free
                free = arrived
            dq.record(q, p, dq.EXPERTS, free, free + each + fresh, layer)
            free += each + fresh
    dq.record(q, p, dq.EXPERTS, free, free + shared, layer)
    dq.run_to(q, r, p, free + shared, event, layer)
    return stall


@compiled
def empty(q, r, p):
    """Forget everything but the pinned experts and the reads that have started."""
    for group in range(len(r.used)):
        flush(r, p.policy, len(r.layer) + group, group)
    for row in range(q.at[dq.GUESS_HEAD], q.at[dq.GUESS_TAIL]):
        if q.guesses[row] >= 0:
            dq.cancel(q, r, row)
    q.at[dq.GUESS_HEAD] = q.at[dq.GUESS_TAIL] = 0
