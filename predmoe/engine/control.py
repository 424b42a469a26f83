"""The simulator's cache and disk queue, driven by an engine: the same compiled bookkeeping decides who is hit, who leaves, what is read next.

What the simulator's clock did, threads do here: a lane is a thread that reads, and a read ends when it ends. The state is some thirty
arrays, which a compiled function would take apart at each call; instead they are laid out once as a table of addresses.

Not thread-safe: whoever calls holds the cache's lock.
"""
# N tokens, L layers, E experts, K chosen, S passes, H horizons, M guesses per (token, layer)

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import boolean, int64, typeof

from ..simulator import Cache, Prefetch
from ..simulator import diskqueue as dq
from ..simulator import events
from ..simulator import residency as res
from ..simulator.config import GUARDS, POLICIES
from ..simulator.outcome import Ledger
from ..simulator.replay import ledger_of
from . import fused, kernelqueue
from .kernelqueue import CONTEXT, FREE, ODD, SPIN, UNPLACED, WAITED
from .table import TABLE, compiled, prepare, readers, step, table_of

EVENT, LAYER = range(2)          # now: the set in use
COUNT, WAITING, FREED, FIRST_LANE, OUTSIDE, AWAITED = range(6)   # out
NO_EVENT = np.iinfo(np.int64).min   # marks nobody


class Own(NamedTuple):
    """Arrays beside the simulator's."""

    members: np.ndarray     # int32 [E]: the keys of the current set
    candidates: np.ndarray  # int32 [E]
    seen: np.ndarray        # int64 per key
    cursor: np.ndarray      # int32, for Belady
    holder: np.ndarray      # int32 per key: the buffer that holds its weights, or -1
    freed: np.ndarray       # int32: buffers that became free in a call
    now: np.ndarray         # int64, see above
    out: np.ndarray         # int64, see above


class State(NamedTuple):
    """Everything that the compiled functions work on."""

    r: res.Residency
    q: dq.Queue
    routing: events.Routing
    guesses: events.Guesses
    p: dq.Settings
    own: Own
    io: kernelqueue.Io
    net: fused.Net


def _create(cache: Cache, prefetch: Prefetch | None, routing: events.Routing, guesses: int, *, num_experts: int, expert_bytes: np.ndarray, top_k: int, lanes: int,
            usage: np.ndarray, oracle: bool, warmup: int) -> State:  # fmt: skip
    E, L, S, N = num_experts, len(expert_bytes), len(routing.starts) - 1, routing.experts_NLK.shape[0]
    r = res.create(cache, E, expert_bytes, top_k, usage)
    belady = cache.policy == "belady"
    if belady:
        used = np.flatnonzero(routing.first[:-1] < routing.first[1:])
        r.next_use[used] = routing.when[routing.first[used]]
    horizons = np.array(prefetch.horizons if prefetch else (), np.int64)
    H = 0 if oracle else len(horizons)
    ahead = events.Guesses(horizons, oracle, np.full((H, N, L, guesses), -1, np.int16), np.zeros((H, N, L), np.int16), np.zeros((len(horizons), L)),
                           prefetch.expire if prefetch else True, prefetch.cancel if prefetch else False, oracle and prefetch.cross_token)  # fmt: skip
    p = dq.Settings(POLICIES.index(cache.policy), E, lanes, 0.0, np.ones(lanes + 1), True, np.ones(1), GUARDS.index(prefetch.guard if prefetch else "none"),
                    prefetch is None or bool(prefetch.promote), warmup, 0, 0, 0.0)  # fmt: skip
    own = Own(np.zeros(E, np.int32), np.zeros(E, np.int32), np.full(L * E, -1, np.int64), np.zeros(L * E if belady else 1, np.int32), np.full(L * E, -1, np.int32),
              np.zeros(L * E, np.int32), np.array([NO_EVENT, 0]), np.zeros(6, np.int64))  # fmt: skip
    return State(r, dq.create(lanes, E, L, S, 0), routing, ahead, p, own, kernelqueue.nothing(), fused.nothing())


def _example() -> State:
    """A state of the smallest size: its fields have the types that every state's have."""
    routing = events.Routing(np.zeros((1, 1, 1), np.int16), np.zeros(2, np.int64), np.zeros(1, np.int32), np.zeros(1, np.bool_), np.zeros(1, np.bool_),
                             np.zeros(1, np.int64), np.zeros(1, np.int32))  # fmt: skip
    return _create(Cache(slots=1), None, routing, 1, num_experts=1, expert_bytes=np.ones(1, np.int64), top_k=1, lanes=1, usage=np.zeros(1, np.int64), oracle=False, warmup=0)


_EXAMPLE = _example()
_residency, _queue, routing_of, guesses_of, _settings, own_of, queue_of, net_of = readers(_EXAMPLE)
FINE, LOOK, LATE, SIGNAL = range(4)   # what `arrive` and `wait` return: nothing to do; a read to look at; no answer within the patience; a signal came


@compiled
def _collect(r, own):
    """Take the buffers of those that are no longer resident, but for members of the set in use, which are still to be computed with."""
    count = 0
    for key in range(len(own.holder)):
        if own.holder[key] >= 0 and r.after[key] < 0 and r.mark[key] != own.now[EVENT]:
            own.freed[count] = own.holder[key]
            own.holder[key] = -1
            count += 1
    own.out[FREED] = count


@step
def _settle(t):
    """Where reads go through the kernel's queue: buffers come back, and see `_line_up`."""
    io, own = queue_of(t), own_of(t)
    if io.at[CONTEXT]:
        for i in range(own.out[FREED]):
            give(io, own.freed[i])
    _line_up(t)


@step
def _line_up(t):
    """There, too: reads that have started wait to be handed over by `place`."""
    io, own, q = queue_of(t), own_of(t), _queue(t)
    if io.at[CONTEXT]:
        for lane in range(own.out[FIRST_LANE], q.at[dq.ACTIVE]):
            io.unplaced[io.at[UNPLACED]] = q.key[lane]
            io.at[UNPLACED] += 1


@compiled
def give(io, buffer):
    """A buffer is free."""
    io.free[io.at[FREE]] = buffer
    io.at[FREE] += 1


@step
def asked(t, s, layer):
    r, q, routing, own = _residency(t), _queue(t), routing_of(t), own_of(t)
    p = _settings(t)
    q.at[dq.PASS] = s
    event = np.int64(s) * routing.experts_NLK.shape[1] + layer
    own.now[EVENT], own.now[LAYER] = event, layer
    count, _ = res.gather(routing.experts_NLK, routing.starts[s], routing.starts[s + 1], layer, p.num_experts, r.mark, event, own.members)
    own.out[WAITING] = events.ask(q, r, p, routing, own.members, count, layer, s, event, own.cursor)
    own.out[COUNT] = count
    outside = 0
    for i in range(count):
        outside += r.after[own.members[i]] < 0
    own.out[OUTSIDE] = outside
    own.out[FIRST_LANE] = q.at[dq.ACTIVE]
    dq.start(q, r, p)
    _collect(r, own)
    _settle(t)


@step
def foretold(t, s, layer):
    r, q, routing, own = _residency(t), _queue(t), routing_of(t), own_of(t)
    p = _settings(t)
    events.foretell(q, r, p, routing, guesses_of(t), s, layer, own.seen, own.candidates)
    own.out[FIRST_LANE] = q.at[dq.ACTIVE]
    dq.start(q, r, p)
    _line_up(t)


@compiled
def _lane_of(q, key):
    for lane in range(q.at[dq.ACTIVE]):
        if q.key[lane] == key:
            return lane
    return -1


@step
def ended(t, key, buffer):
    r, q, own = _residency(t), _queue(t), own_of(t)
    own.out[FIRST_LANE] = q.at[dq.ACTIVE] - 1
    own.out[AWAITED] = dq.finish(q, r, _settings(t), _lane_of(q, key), own.now[EVENT], own.now[LAYER])
    own.holder[key] = buffer
    _collect(r, own)
    _settle(t)


@step
def _failed(t, key):
    """The read of `key` brought nothing: as if it had never been asked for, but that the set which needs it cannot be computed."""
    r, q, own, p = _residency(t), _queue(t), own_of(t), _settings(t)
    lane = _lane_of(q, key)
    own.out[FIRST_LANE] = q.at[dq.ACTIVE] - 1
    q.at[dq.ACTIVE] -= 1
    for i in range(lane, q.at[dq.ACTIVE]):
        q.key[i], q.latency[i], q.left[i], q.began[i], q.speculative[i] = q.key[i + 1], q.latency[i + 1], q.left[i + 1], q.began[i + 1], q.speculative[i + 1]
    q.state[key] = dq.IDLE
    own.out[AWAITED] = r.guess[key] == 0
    layer = r.layer[key]
    if r.guess[key]:
        dq.ahead(q, -1, r.size[layer])
        q.ledger[dq.ISSUED] -= r.guess[key] == res.COUNTED
        r.guess[key] = 0
    elif r.after[key] >= 0:
        res.evict(r, p.policy, key, layer if len(r.used) > 1 else 0)
        r.tally[res.EVICTIONS] -= 1
    dq.start(q, r, p)
    _collect(r, own)
    _settle(t)


@step
def _emptied(t):
    r, q, own = _residency(t), _queue(t), own_of(t)
    own.now[EVENT] = NO_EVENT
    events.empty(q, r, _settings(t))
    own.out[FIRST_LANE] = q.at[dq.ACTIVE]
    _collect(r, own)
    _settle(t)


@step
def _abandoned(t):
    own = own_of(t)
    own.now[EVENT] = NO_EVENT
    own.out[FIRST_LANE] = _queue(t).at[dq.ACTIVE]
    _collect(_residency(t), own)
    _settle(t)


@step
def used(t, key):
    """A member has been computed: where it has no place in the cache, its buffer is free."""
    io, own = queue_of(t), own_of(t)
    if own.out[OUTSIDE] and _residency(t).after[key] < 0:
        give(io, own.holder[key])
        own.holder[key] = -1
        kernelqueue.place(io)


@step
def arrive(t, least, patient):
    """Take note of the reads that the kernel's queue has ended, and hand over those that follow them. LOOK where one was not simply whole, SIGNAL, or FINE;
    LATE where `patient` and none ended."""
    io = queue_of(t)
    got = kernelqueue.ended(io, least, patient)
    for i in range(got):
        lane = kernelqueue.whole(io, i)
        if lane >= 0:
            ended(t, np.int64(io.key[lane]), np.int64(io.buffer[lane]))
    kernelqueue.place(io)
    if io.at[ODD]:
        return LOOK
    return SIGNAL if got < 0 else LATE if got == 0 and patient else FINE


@step
def wait(t):
    """Until a read has ended. Asks again and again for a while, then sleeps."""
    io = queue_of(t)
    before = io.counted[kernelqueue.READS]
    began = kernelqueue.now(io)
    code, at = FINE, began
    while code == FINE and io.counted[kernelqueue.READS] == before and at - began < SPIN:
        code = arrive(t, 0, False)
        at = kernelqueue.now(io)
    if code == FINE and io.counted[kernelqueue.READS] == before:
        code = arrive(t, 1, True)
        at = kernelqueue.now(io)
    io.seconds[WAITED] += at - began
    return code


@step
def _placed(t):
    kernelqueue.place(queue_of(t))


KERNELS = [
    *((function, TABLE) for function in (_emptied, _abandoned, wait, _placed)),
    *((function, TABLE, int64) for function in (_failed, used)),
    *((function, TABLE, int64, int64) for function in (asked, foretold, ended)),
    (arrive, TABLE, int64, boolean), (give, typeof(_EXAMPLE.io), int64),
]  # fmt: skip


class Control:
    """The state of one engine's cache and queue. `r`, `q` and `routing` are the simulator's own; `own` is what an engine adds.

    After `asked`, `foretold`, `ended` and `failed`, `started()` has the keys whose reads are to begin, in order, and `freed()` the buffers
    that became free.
    """

    def __init__(self, cache: Cache, prefetch: Prefetch | None, routing: events.Routing, guesses: int, **more):
        prepare(KERNELS)   # else the first read would be waited for while its thread compiles
        self._set(_create(cache, prefetch, routing, guesses, **more))

    def _set(self, state: State) -> None:
        self._state = state
        self.r, self.q, self.routing, self.guesses, self.p, self.own, self.io, self.net = state
        self.table = table_of(state)

    def take(self, **parts) -> None:
        """Other parts of the state in place of those that it has: `io`, `net`."""
        self._set(self._state._replace(**parts))

    def asked(self, s: int, layer: int) -> None:
        """The router of `layer` has chosen in pass `s`, as routing has it: look up, demand, evict."""
        asked(self.table, s, layer)

    def foretold(self, s: int, layer: int) -> None:
        """Queue the guesses for the layers ahead: of the trace where the oracle is asked, else those in `guesses`."""
        foretold(self.table, s, layer)

    def ended(self, key: int, buffer: int) -> bool:
        """The read of `key` into `buffer` is over; returns whether its set waits for it."""
        ended(self.table, key, buffer)
        return bool(self.own.out[AWAITED])

    def failed(self, key: int) -> bool:
        """The read of `key` brought nothing; returns whether its set waits for it."""
        _failed(self.table, key)
        return bool(self.own.out[AWAITED])

    def emptied(self) -> None:
        """Forget everything but the pinned experts and the reads that have started."""
        _emptied(self.table)

    def abandoned(self) -> None:
        """The current set will not be computed."""
        _abandoned(self.table)

    def used(self, key: int) -> None:
        """A member has been computed (reads through the kernel's queue)."""
        used(self.table, key)

    def give(self, buffer: int) -> None:
        """A buffer is free (the same)."""
        give(self.io, buffer)

    def placed(self) -> None:
        """Hand over the reads that have started (the same)."""
        _placed(self.table)

    def arrived(self, least: int = 0) -> int:
        """Take note of ended reads without waiting (the same)."""
        return arrive(self.table, least, False)

    def waited(self) -> int:
        """Take note of ended reads, at least one if the disk answers (the same)."""
        return wait(self.table)

    def started(self) -> list[int]:
        return self.q.key[self.own.out[FIRST_LANE] : self.q.at[dq.ACTIVE]].tolist()

    def freed(self) -> list[int]:
        return self.own.freed[: self.own.out[FREED]].tolist()

    def rebase(self, passes: int, tokens: int) -> None:
        """Pass `passes` becomes pass 0, which may have `tokens` tokens: event numbers move with it, so that a run of any length fits in fixed arrays."""
        moved = passes * self.routing.experts_NLK.shape[1]
        for numbers in (self.q.targets, self.r.mark):
            numbers -= moved
        self.own.seen[:] = -1
        self.r.last_pass[:] = np.maximum(self.r.last_pass - passes, -1)
        if self.own.now[EVENT] != NO_EVENT:
            self.own.now[EVENT] -= moved
        self.q.per_pass[:] = 0
        routing, guesses = self.routing, self.guesses
        if tokens > routing.experts_NLK.shape[0]:
            longer = lambda array, axis: np.zeros((*array.shape[:axis], tokens, *array.shape[axis + 1 :]), array.dtype)  # noqa: E731
            routing = routing._replace(experts_NLK=longer(routing.experts_NLK, 0), sequence=longer(routing.sequence, 0))
            guesses = guesses._replace(experts_HNLM=longer(guesses.experts_HNLM, 1), limit_HNL=longer(guesses.limit_HNL, 1))
        settings = self.p._replace(counted_from=max(self.p.counted_from - passes, 0))
        self._set(self._state._replace(routing=routing, guesses=guesses, p=settings))

    def ledger(self) -> Ledger:
        """What became of the prefetches so far. Checked."""
        ledger = ledger_of(self.q, self.r)
        ledger.check()
        return ledger
