"""Replay a trace on a machine: `replay(trace, Cache(...), Disk(...), compute=Compute(...), prefetch=Prefetch(...))`.

A function of its inputs: no clock, no files, no globals. Per layer of a pass: attention; the router asks for its set, and
guesses for later layers are queued behind it; the processor waits until the whole set is there; the experts are computed.
The disk works all the while. A read that has started ends before another takes its lane, so a wrong guess delays a demand.
"""

from __future__ import annotations

import math
import warnings

import numpy as np

from ..traces.schema import DECODE, Trace, TraceError
from . import counting, events, jit
from . import diskqueue as dq
from . import residency as res
from .config import GUARDS, ORACLE, POLICIES, Cache, Compute, Disk, Prefetch, SimulationError, SimulationWarning
from .outcome import Ledger, Outcome

LONGEST = 1e12          # ms, 30 years: a double still tells a tenth of a microsecond there
NOISE_DRAWS = 1 << 16   # after so many reads the noise repeats


def is_compiled() -> bool:
    """Whether a replay starts at once; otherwise the first one compiles for a while."""
    return jit.is_compiled(events.replay)


def replay(trace: Trace, cache: Cache, disk: Disk, *, compute: Compute = Compute(), prefetch: Prefetch | None = None, warmup: int = 0,
           cold: str = "trace", usage: np.ndarray | None = None, timeline: tuple[int, int] | None = None) -> Outcome:  # fmt: skip
    """Replay `trace` and measure everything after the first `warmup` passes, which fill the cache but enter no figure.

    `cold`: "trace" starts with an empty cache, "sequence" empties it again whenever new sequences begin. `usage`: uses
    per (layer, expert) by which pinned experts are chosen (default: the trace's own). `timeline`: passes (first, end)
    whose events are kept. Raises SimulationError for what cannot be simulated, TraceError for a predictor that the
    trace does not hold; warns (SimulationWarning) when prefetching was on and nothing was issued.
    """
    if cache.sample:
        raise SimulationError("sample is modelled by count(..., replay='sequential') only")
    if isinstance(warmup, bool) or not isinstance(warmup, (int, np.integer)) or not 0 <= warmup < trace.num_passes:
        raise SimulationError(f"warmup={warmup} must leave some of the trace's {trace.num_passes} passes")
    E, L = trace.meta.num_experts, trace.num_layers
    if cache.policy == "belady" or (usage is None and (cache.pinned or cache.policy == "static")):
        own_usage = counting.uses(trace)
    else:
        own_usage = np.zeros(L * E, np.int64)   # nobody asks
    first, when = counting.occurrences(trace, own_usage) if cache.policy == "belady" else (np.zeros(1, np.int64), np.zeros(1, np.int32))
    fresh = counting.fresh_passes(trace, cold)
    across = prefetch is not None and prefetch.cross_token
    follows, runs = continued(trace, across)
    routing = events.Routing(trace.experts_NLK, trace.starts, runs, fresh, follows, first, when)
    times = events.Times(compute.per_layer("attention_ms", L), compute.per_layer("expert_ms", L), compute.per_layer("shared_ms", L),
                         float(compute.head_ms), float(compute.extra_token), bool(compute.overlap), float(compute.fresh_ms))  # fmt: skip
    guesses = _guesses(trace, prefetch, times)
    record = (0, 0) if timeline is None else tuple(timeline)
    if len(record) != 2 or not all(isinstance(s, (int, np.integer)) for s in record) or not 0 <= record[0] <= record[1] <= trace.num_passes:
        raise SimulationError(f"timeline={record} must be passes (first, end) within 0..{trace.num_passes}")
    p = _settings(cache, disk, E, prefetch, warmup, record)
    room = (record[1] - record[0]) * (8 * L * trace.meta.top_k + 16)
    while True:
        r = res.create(cache, E, np.asarray(trace.meta.expert_bytes, np.int64), trace.meta.top_k,
                       own_usage if usage is None else counting.checked_usage(usage, trace))  # fmt: skip
        q = dq.create(disk.lanes, E, L, trace.num_passes, room)
        spans = np.zeros((trace.num_passes, 3))
        events.replay(routing, guesses, times, p, r, q, spans, np.empty(E, np.int32), np.empty(E, np.int32), np.full(L * E, -1, np.int64),
                      np.zeros(L * E if cache.policy == "belady" else 1, np.int32))  # fmt: skip
        if q.at[dq.RECORDED] <= room:
            break
        room = int(q.at[dq.RECORDED])
    if not spans[-1, 1] <= LONGEST:
        raise SimulationError(f"the replay takes longer than {LONGEST:g} ms, where times lose their digits: disk or processor is too slow")
    if not q.per_pass[warmup:, dq.ACCESSES].any():
        raise SimulationError(f"no expert is asked for after the warm-up of {warmup} passes, so there is nothing to measure")
    ledger = ledger_of(q, r)
    ledger.check()
    if prefetch is not None and not ledger.issued:
        why = f"; the guard {prefetch.guard!r} held back {ledger.held_back}" if ledger.held_back else ""
        warnings.warn(f"prefetch is on ({prefetch.source}) but nothing was issued{why}", SimulationWarning, stacklevel=2)
    kept = slice(warmup, None)
    rows = int(q.at[dq.RECORDED])
    return Outcome(start_S=spans[kept, 0], end_S=spans[kept, 1], stall_S=spans[kept, 2], counts=q.per_pass[kept], phase_S=trace.phase[kept],
                   tokens_S=np.diff(trace.starts)[kept], ledger=ledger, warmup=warmup, first_token_ms=_first_token(trace, spans, warmup),
                   rows=(q.kind[:rows], q.span[:rows], q.what[:rows]))  # fmt: skip


def _settings(cache: Cache, disk: Disk, E: int, prefetch: Prefetch | None, warmup: int, record: tuple[int, int]) -> dq.Settings:
    table = disk.table
    weightless = math.isinf(table[0])
    if any(math.isinf(value) != weightless for value in table):
        raise SimulationError("gb_per_s must be infinite at every queue depth or at none")
    depths = np.arange(1, disk.lanes + 1)
    total = np.array([1.0 if weightless else table[min(d, len(table)) - 1] * 1e6 for d in depths])   # GB/s = 1e6 bytes per ms
    if disk.noise:
        factors = np.exp(disk.noise * np.random.default_rng(disk.seed).standard_normal(NOISE_DRAWS))
    else:
        factors = np.ones(1)
    guard = GUARDS.index(prefetch.guard if prefetch else "none")
    return dq.Settings(POLICIES.index(cache.policy), E, disk.lanes, float(disk.latency_ms), np.concatenate([[1.0], total / depths]), weightless,
                         factors, guard, prefetch is None or bool(prefetch.promote), warmup, record[0], record[1], float(disk.issue_ms))  # fmt: skip


def _guesses(trace: Trace, prefetch: Prefetch | None, times: events.Times) -> events.Guesses:
    L, K = trace.num_layers, trace.meta.top_k
    nothing = np.zeros((0, 0, 0, 0), np.int16), np.zeros((0, 0, 0), np.int16)
    if prefetch is None:
        return events.Guesses(np.zeros(0, np.int64), False, *nothing, np.zeros((0, 0)), True, False, False)
    furthest = L if prefetch.cross_token else L - 1
    if prefetch.horizons[-1] > furthest:
        raise SimulationError(f"horizon {prefetch.horizons[-1]} is beyond the last layer: the trace has {L} MoE layers, so at most {furthest}"
                              + ("" if prefetch.cross_token else " (or cross_token=True)"))  # fmt: skip
    horizons = np.array(prefetch.horizons, np.int64)
    after_router = times.expert * K + times.shared
    attention = np.tile(times.attention, 2)
    window = np.zeros((len(horizons), L))
    for i, h in enumerate(prefetch.horizons):
        for layer in range(L):
            between = np.arange(layer, layer + h)
            crossed = times.head if layer + h >= L else 0.0
            window[i, layer] = after_router[between % L].sum() + attention[between + 1].sum() + crossed
    if prefetch.source == ORACLE:
        return events.Guesses(horizons, True, *nothing, window, prefetch.expire, prefetch.cancel, prefetch.cross_token)
    held = [trace.prediction(prefetch.source, h) for h in prefetch.horizons]
    experts = np.stack([p.experts_NLM for p in held]) if len(held) > 1 else held[0].experts_NLM[None]
    wanted = K + prefetch.budget
    if experts.shape[3] < wanted:
        raise TraceError(f"{prefetch.source} has {experts.shape[3]} guesses per layer; top-{K} and a budget of {prefetch.budget} need {wanted}")
    limit = np.full(experts.shape[:3], wanted, np.int16)
    if prefetch.threshold is not None:
        for i, p in enumerate(held):
            scores = p.scores_NLM[..., :wanted]
            range_ = np.finfo(scores.dtype)
            limit[i] = (scores >= min(max(prefetch.threshold, float(range_.min)), float(range_.max))).sum(-1)
    return events.Guesses(horizons, False, experts, limit, window, prefetch.expire, prefetch.cancel, prefetch.cross_token)


def continued(trace: Trace, across: bool) -> tuple[np.ndarray, np.ndarray]:
    """What guesses across tokens need to know, bool [S] and int32 [N]: the passes that go on with those before them, and who is whose neighbour."""
    return (_following(trace), _runs(trace)) if across else (np.zeros(trace.num_passes, np.bool_), trace.sequence)


def _following(trace: Trace) -> np.ndarray:
    """bool [S]: decode passes all of whose sequences had a token in the pass before."""
    follows = np.zeros(trace.num_passes, np.bool_)
    parts = np.split(trace.sequence, trace.starts[1:-1])
    for s in range(1, trace.num_passes):
        if trace.phase[s] == DECODE:
            before, now = parts[s - 1], parts[s]
            follows[s] = now[0] == before[0] if len(now) == len(before) == 1 else np.isin(now, before).all()
    return follows


def _runs(trace: Trace) -> np.ndarray:
    """int32 [N] for the event loop, in which a token has its neighbour's number unless its pass has no later token of its sequence, so
    that sequences may be interleaved in a pass."""
    of_pass = np.repeat(np.arange(trace.num_passes), np.diff(trace.starts))
    order = np.lexsort((trace.sequence, of_pass))   # stable: the tokens of a sequence keep their order
    sequence, of_pass = trace.sequence[order], of_pass[order]
    last = np.ones(trace.num_tokens, np.bool_)
    last[order[:-1]] = (sequence[1:] != sequence[:-1]) | (of_pass[1:] != of_pass[:-1])
    return np.concatenate([[0], np.cumsum(last[:-1])]).astype(np.int32)


def _first_token(trace: Trace, spans: np.ndarray, warmup: int) -> np.ndarray:
    """Per sequence that begins after the warm-up: ms from the start of its first pass to its first token, which its last
    prefill pass gives, or without prefill its first pass."""
    of_pass = np.repeat(np.arange(trace.num_passes), np.diff(trace.starts))
    _, first_token, inverse = np.unique(trace.sequence, return_index=True, return_inverse=True)
    first = of_pass[first_token]
    last = first.copy()
    prefill = trace.phase[of_pass] != DECODE
    np.maximum.at(last, inverse[prefill], of_pass[prefill])
    fresh = first >= warmup
    return spans[last[fresh], 1] - spans[first[fresh], 0]


def ledger_of(q: dq.Queue, r: res.Residency) -> Ledger:
    left = np.flatnonzero(r.guess == res.COUNTED)
    cached = r.after[left] >= 0
    done = q.ledger
    return Ledger(issued=int(done[dq.ISSUED]), useful=int(done[dq.USEFUL]), late=int(done[dq.LATE]),
                  wasted=int(done[dq.DROPPED] + r.tally[res.WASTED]), cancelled=int(done[dq.CANCELLED]), resident=int(cached.sum()),
                  in_flight=int((~cached).sum()), held_back=int(done[dq.HELD_BACK]), wasted_bytes=int(r.tally[res.WASTED_BYTES]))  # fmt: skip
