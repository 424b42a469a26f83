"""A token of one sequence, layer after layer, compiled: arithmetic, bookkeeping, and reads through the kernel's queue, without the interpreter between."""
# L layers, K chosen

from __future__ import annotations

import numpy as np
from numba import boolean, int64

from . import control as ctl
from . import fused, kernelqueue
from .control import FINE
from .fused import LEFT, NOW, PASS, ROW, STAGE
from .kernelqueue import HANDED
from .table import TABLE, step

ROUTER, READS, EXPERTS = range(3)   # Net.at[STAGE]: what comes next in the layer
NAN_ROUTER, NAN_GUESS, OTHER = range(10, 13)   # what `_token` returns beside control's codes; OTHER: not the experts of the trace that is known


@step
def _attended(t, layer, row, guessing):
    """Up to the choice of experts, and the guesses."""
    net, guesses = ctl.net_of(t), ctl.guesses_of(t)
    if fused.attended(net, layer):
        return NAN_ROUTER
    if guessing and fused.guessed(net, layer, guesses.experts_HNLM, guesses.limit_HNL, row):
        return NAN_GUESS
    return FINE


@step
def _chosen(t, layer, row, known):
    """Write the choice to the routing, or compare it with the one that is known."""
    net, held = ctl.net_of(t), ctl.routing_of(t).experts_NLK
    for k in range(held.shape[2]):
        if known and held[row, layer, k] != net.chosen[layer, k]:
            return OTHER
        held[row, layer, k] = net.chosen[layer, k]
    return FINE


@step
def _token(t, known, guessing, foretelling):
    """Go on with the token whose state is in net.at until it is through all layers (FINE), or something is for the caller to see to."""
    net, io, own = ctl.net_of(t), ctl.queue_of(t), ctl.own_of(t)
    at, L, K = net.at, net.gates.shape[0], net.gates.shape[1]
    s, row, E = at[PASS], at[ROW], len(net.taken)
    while at[NOW] < L:
        layer = at[NOW]
        if at[STAGE] == ROUTER:
            began = kernelqueue.now(io)
            code = _attended(t, layer, row, guessing)
            if code:
                return code
            net.times[layer, 0] += kernelqueue.now(io) - began
            at[STAGE] = READS
        if at[STAGE] == READS:
            code = ctl.arrive(t, 0, False)
            if code:
                return code
            began, handed = kernelqueue.now(io), io.seconds[HANDED]
            code = _chosen(t, layer, row, known)
            if code:
                return code
            ctl.asked(t, s, layer)
            if foretelling:
                ctl.foretold(t, s, layer)
            kernelqueue.place(io)
            net.times[layer, 0] += kernelqueue.now(io) - began - (io.seconds[HANDED] - handed)
            at[STAGE], at[LEFT] = EXPERTS, K
            for k in range(K):
                net.done[k] = 0
            if io.at[kernelqueue.ODD]:
                return ctl.LOOK
        while at[LEFT]:
            began, handed, computed = kernelqueue.now(io), io.seconds[HANDED], False
            for k in range(K):
                key = layer * E + np.int64(net.chosen[layer, k])
                if not net.done[k] and own.holder[key] >= 0:
                    fused.expert(net, layer, k, own.holder[key])
                    ctl.used(t, key)
                    net.done[k] = 1
                    at[LEFT] -= 1
                    computed = True
                    break
            net.times[layer, 1] += kernelqueue.now(io) - began - (io.seconds[HANDED] - handed)
            if at[LEFT]:
                code = ctl.arrive(t, 0, False) if computed else ctl.wait(t)
                if code:
                    return code
        began = kernelqueue.now(io)
        fused.mixed(net, layer)
        net.times[layer, 1] += kernelqueue.now(io) - began
        at[STAGE] = ROUTER
        at[NOW] += 1
    return FINE


@step
def _expert(t, layer, k, buffer):
    fused.expert(ctl.net_of(t), layer, k, buffer)


@step
def _mixed(t, layer):
    fused.mixed(ctl.net_of(t), layer)


@step
def _logits(t):
    fused.logits(ctl.net_of(t))


KERNELS = [
    (_attended, TABLE, int64, int64, boolean), (_chosen, TABLE, int64, int64, boolean), (_expert, TABLE, int64, int64, int64), (_mixed, TABLE, int64), (_logits, TABLE),
    (_token, TABLE, boolean, boolean, boolean),
]  # fmt: skip


def kernels_of(single: bool) -> list[tuple]:
    """What an engine has compiled before any clock runs, as `table.prepare` takes it. `single`: its single tokens take the compiled path."""
    return [*ctl.KERNELS, *(KERNELS if single else [])]


class Loop:
    """The compiled parts for one engine's state. `known`: the routing is that of a trace; `guessing`: guesses are computed here; `foretelling`: there are any."""

    def __init__(self, control: ctl.Control, *, known: bool, guessing: bool, foretelling: bool):
        self._control, self._how = control, (known, guessing, foretelling)
        self.net = control.net

    def begin(self, s: int, row: int, length: int) -> None:
        """A token begins: pass `s`, row `row` of the routing, after `length` tokens. `net.x` has its embedding."""
        at = self.net.at
        at[NOW], at[STAGE], at[PASS], at[ROW], at[fused.LENGTH] = 0, ROUTER, s, row, length

    def go_on(self) -> int:
        """See `_token`."""
        return _token(self._control.table, *self._how)

    def attended(self, layer: int, row: int) -> int:
        return _attended(self._control.table, layer, row, self._how[1])

    def chosen(self, layer: int, row: int) -> int:
        return _chosen(self._control.table, layer, row, self._how[0])

    def expert(self, layer: int, k: int, buffer: int) -> None:
        _expert(self._control.table, layer, k, buffer)

    def mixed(self, layer: int) -> None:
        _mixed(self._control.table, layer)

    def logits(self) -> np.ndarray:
        """float32 [V], a copy."""
        _logits(self._control.table)
        return self.net.logits.copy()
