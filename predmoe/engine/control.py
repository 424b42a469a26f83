"""The simulator's cache and disk queue, driven by an engine: the same compiled bookkeeping decides who is hit, who leaves, what is read next.

What the simulator's clock did, threads do here: a lane is a thread that reads, and a read ends when it ends. The state is some thirty
arrays, which a compiled function would take apart at each call; instead they are laid out once as a table of addresses.

Not thread-safe: whoever calls holds the cache's lock.
"""
# N tokens, L layers, E experts, K chosen, S passes, H horizons, M guesses per (token, layer)

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numba import from_dtype, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from ..simulator import Cache, Ledger, Prefetch
from ..simulator import diskqueue as dq
from ..simulator import events
from ..simulator import residency as res
from ..simulator.config import GUARDS, POLICIES
from ..simulator.jit import compiled
from ..simulator.replay import ledger_of

_WIDTH = 5                       # entries of the table per field: an array's address and its shape, or a number
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
                           prefetch.expire if prefetch else True, prefetch.cancel if prefetch else False, False)  # fmt: skip
    p = dq.Settings(POLICIES.index(cache.policy), E, lanes, 0.0, np.ones(lanes + 1), True, np.ones(1), GUARDS.index(prefetch.guard if prefetch else "none"),
                    prefetch is None or bool(prefetch.promote), warmup, 0, 0)  # fmt: skip
    own = Own(np.zeros(E, np.int32), np.zeros(E, np.int32), np.full(L * E, -1, np.int64), np.zeros(L * E if belady else 1, np.int32), np.full(L * E, -1, np.int32),
              np.zeros(L * E, np.int32), np.array([NO_EVENT, 0]), np.zeros(6, np.int64))  # fmt: skip
    return State(r, dq.create(lanes, E, L, S, 0), routing, ahead, p, own)


def _example() -> State:
    """A state of the smallest size: its fields have the types that every state's have."""
    routing = events.Routing(np.zeros((1, 1, 1), np.int16), np.zeros(2, np.int64), np.zeros(1, np.int32), np.zeros(1, np.bool_), np.zeros(1, np.bool_),
                             np.zeros(1, np.int64), np.zeros(1, np.int32))  # fmt: skip
    return _create(Cache(slots=1), None, routing, 1, num_experts=1, expert_bytes=np.ones(1, np.int64), top_k=1, lanes=1, usage=np.zeros(1, np.int64), oracle=False, warmup=0)


def _reader(example: NamedTuple, first: int):
    """An intrinsic that makes the compiled twin of `example` from a table in which its fields begin at row `first`.

    An intrinsic, since a compiled function without Numba's runtime may not return an array.
    """
    kinds = {bool: types.boolean, int: types.int64, float: types.float64}
    fields = [types.Array(from_dtype(value.dtype), value.ndim, "C") if isinstance(value, np.ndarray) else kinds[type(value)] for value in example]
    whole = types.NamedTuple(fields, type(example))

    @intrinsic
    def read(typing, table):
        def generate(context, builder, signature, arguments):
            data = make_array(signature.args[0])(context, builder, arguments[0]).data
            entry = lambda row, column: builder.load(cgutils.gep_inbounds(builder, data, (first + row) * _WIDTH + column))  # noqa: E731
            values = []
            for row, kind in enumerate(fields):
                if isinstance(kind, types.Array):
                    array, pointer = make_array(kind)(context, builder), context.get_data_type(kind.dtype).as_pointer()
                    size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
                    shape = [entry(row, 1 + axis) for axis in range(kind.ndim)]
                    strides, step = [], context.get_constant(types.intp, size)
                    for length in reversed(shape):
                        strides.insert(0, step)
                        step = builder.mul(step, length)
                    populate_array(array, builder.inttoptr(entry(row, 0), pointer), shape, strides, context.get_constant(types.intp, size), None)
                    values.append(array._getvalue())
                elif kind is types.float64:
                    values.append(builder.bitcast(entry(row, 0), context.get_value_type(kind)))
                else:
                    values.append(context.cast(builder, entry(row, 0), types.int64, kind))
            return context.make_tuple(builder, signature.return_type, values)

        return whole(table), generate

    return read


_EXAMPLE = _example()
_FIRST = np.cumsum([0, *map(len, _EXAMPLE)]).tolist()
_residency, _queue, _routing, _guesses, _settings, _own = (_reader(part, first) for part, first in zip(_EXAMPLE, _FIRST))


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


@compiled
def _asked(t, s, layer):
    r, q, routing, own = _residency(t), _queue(t), _routing(t), _own(t)
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


@compiled
def _foretold(t, s, layer):
    r, q, routing, own = _residency(t), _queue(t), _routing(t), _own(t)
    p = _settings(t)
    events.foretell(q, r, p, routing, _guesses(t), s, layer, own.seen, own.candidates)
    own.out[FIRST_LANE] = q.at[dq.ACTIVE]
    dq.start(q, r, p)


@compiled
def _lane_of(q, key):
    for lane in range(q.at[dq.ACTIVE]):
        if q.key[lane] == key:
            return lane
    return -1


@compiled
def _ended(t, key, buffer):
    r, q, own = _residency(t), _queue(t), _own(t)
    own.out[FIRST_LANE] = q.at[dq.ACTIVE] - 1
    own.out[AWAITED] = dq.finish(q, r, _settings(t), _lane_of(q, key), own.now[EVENT], own.now[LAYER])
    own.holder[key] = buffer
    _collect(r, own)


@compiled
def _failed(t, key):
    """The read of `key` brought nothing: as if it had never been asked for, but that the set which needs it cannot be computed."""
    r, q, own, p = _residency(t), _queue(t), _own(t), _settings(t)
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


@compiled
def _emptied(t):
    r, q, own = _residency(t), _queue(t), _own(t)
    own.now[EVENT] = NO_EVENT
    events.empty(q, r, _settings(t))
    _collect(r, own)


@compiled
def _abandoned(t):
    own = _own(t)
    own.now[EVENT] = NO_EVENT
    _collect(_residency(t), own)


@functools.cache
def _compile() -> None:
    """Run every compiled function once on the smallest state. Else the first read would be waited for while its thread compiles."""
    control = Control.__new__(Control)
    control._set(_EXAMPLE)
    control.routing.starts[1] = 1
    control.asked(0, 0)
    control.foretold(0, 0)
    control.failed(0)
    control.asked(0, 0)
    control.ended(0, 0)
    control.emptied()
    control.abandoned()


class Control:
    """The state of one engine's cache and queue. `r`, `q` and `routing` are the simulator's own; `own` is what an engine adds.

    After `asked`, `foretold`, `ended` and `failed`, `started()` has the keys whose reads are to begin, in order, and `freed()` the buffers
    that became free.
    """

    def __init__(self, cache: Cache, prefetch: Prefetch | None, routing: events.Routing, guesses: int, **more):
        _compile()
        self._set(_create(cache, prefetch, routing, guesses, **more))

    def _set(self, state: State) -> None:
        self._state = state
        self.r, self.q, self.routing, self.guesses, self.p, self.own = state
        table = np.zeros((_FIRST[-1], _WIDTH), np.int64)
        for row, value in zip(table, (value for part in state for value in part)):
            if isinstance(value, np.ndarray):
                assert value.flags.c_contiguous and value.ndim < _WIDTH
                row[0], row[1 : 1 + value.ndim] = value.ctypes.data, value.shape
            elif isinstance(value, float):
                row[:1].view(np.float64)[0] = value
            else:
                row[0] = value
        self._table = table.reshape(-1)

    def asked(self, s: int, layer: int) -> None:
        """The router of `layer` has chosen in pass `s`, as routing has it: look up, demand, evict."""
        _asked(self._table, s, layer)

    def foretold(self, s: int, layer: int) -> None:
        """Queue the guesses for the layers ahead: of the trace where the oracle is asked, else those in `guesses`."""
        _foretold(self._table, s, layer)

    def ended(self, key: int, buffer: int) -> bool:
        """The read of `key` into `buffer` is over; returns whether its set waits for it."""
        _ended(self._table, key, buffer)
        return bool(self.own.out[AWAITED])

    def failed(self, key: int) -> bool:
        """The read of `key` brought nothing; returns whether its set waits for it."""
        _failed(self._table, key)
        return bool(self.own.out[AWAITED])

    def emptied(self) -> None:
        """Forget everything but the pinned experts and the reads that have started."""
        _emptied(self._table)
        self.own.out[FIRST_LANE] = self.q.at[dq.ACTIVE]

    def abandoned(self) -> None:
        """The current set will not be computed."""
        _abandoned(self._table)
        self.own.out[FIRST_LANE] = self.q.at[dq.ACTIVE]

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
