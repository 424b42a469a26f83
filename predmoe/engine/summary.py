"""What an engine did: times as it went along, and one honest summary at the end."""
# L layers

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..process import kernel_bytes, peak_resident_bytes
from ..simulator import Compute, Ledger
from ..simulator import diskqueue as dq
from ..traces.schema import DECODE
from .cache import slots_of

if TYPE_CHECKING:
    from .decode import Engine


class Clock:
    """Times of the passes, and of their parts in single-token passes, without the time in which the disk was waited for."""

    def __init__(self, num_layers: int, stalled: float = 0.0):
        """`stalled`: seconds in which the disk had been waited for before."""
        self.attention, self.experts = np.zeros(num_layers), np.zeros(num_layers)   # seconds, single-token decode passes
        self.head, self.singles = 0.0, 0
        self.decode_ms: list[float] = []      # of each decode pass
        self.stall_ms: list[float] = []       # of each decode pass
        self.first_token_ms: list[float] = []
        self.tokens = self.decode_tokens = 0
        self._stalled_before = stalled

    def begin(self) -> None:
        self._begun = self._pass_began = time.perf_counter()
        self._fresh = True
        self._parts = None

    def start(self, layer: int = 0) -> None:
        """A layer begins; what comes before the first one counts as its own."""
        self._at = time.perf_counter() if layer else self._pass_began

    def routed(self, layer: int, stalled: float) -> None:
        now = time.perf_counter()
        self._attended, self._at, self._stalled = now - self._at, now, stalled

    def computed(self, layer: int, stalled: float, single: bool) -> None:
        now = time.perf_counter()
        if single:
            self.attention[layer] += self._attended
            self.experts[layer] += now - self._at - (stalled - self._stalled)
        self._at = now

    def opened(self) -> None:
        """All is ready for the layers of a single-token pass."""
        self._at = time.perf_counter()

    def layers(self, seconds_L2: np.ndarray) -> None:
        """All layers of a single-token pass are over: the parts' times, without the disk's."""
        self.attention += seconds_L2[:, 0]
        self.experts += seconds_L2[:, 1]
        self.attention[0] += self._at - self._pass_began
        self._at = time.perf_counter()

    def passed(self, phase: int, single: bool, stalled: float) -> None:
        """A pass is over but for the choice of its tokens."""
        if single:
            self.singles += 1
        self._head_from = self._at if single else None
        self._phase, self._waited = phase, stalled - self._stalled_before
        self._stalled_before = stalled

    def token(self, count: int) -> None:
        """The pass's tokens are chosen."""
        now = time.perf_counter()
        if self._head_from is not None:
            self.head += now - self._head_from
        if self._fresh:
            self.first_token_ms += [1000 * (now - self._begun)] * count
        if self._phase == DECODE:
            self.decode_ms.append(1000 * (now - self._pass_began))
            self.stall_ms.append(1000 * self._waited)
            self.decode_tokens += count
        self.tokens += count
        self._pass_began, self._fresh = now, False

    def compute(self, experts_per_set: int, extra_token: float = 0.0) -> Compute:
        """The measured times as the simulator takes them. Needs single-token passes."""
        if not self.singles:
            raise ValueError("no single-token pass has been timed")
        ms = 1000 / self.singles
        return Compute(attention_ms=tuple(self.attention * ms), expert_ms=tuple(self.experts * ms / experts_per_set), head_ms=self.head * ms, extra_token=extra_token, overlap=True)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Figures of everything since the engine was opened. Bytes are those of expert blocks that were read; `kernel_bytes` what the kernel
    counted for the process in the same time (None where it does not count)."""

    io_mode: str
    io_why: str
    reads_by: str                   # kernel queue, or threads and why
    tokens: int
    tokens_per_s: float | None      # of decode passes; None where there was none
    ttft_ms: float | None
    p50_ms: float | None
    p99_ms: float | None
    stall_ms_per_token: float | None
    read_bytes: int
    demand_bytes: int
    prefetch_bytes: int
    preloaded_bytes: int
    kernel_bytes: int | None
    retried: int
    accesses: int
    hits: int
    ledger: Ledger
    buffer_bytes: int
    buffer_experts: int             # cached experts that the buffers have room for, and reads at a time that they have room for beside them
    buffer_reads: int
    recorded: tuple[str, ...]       # predictors asked for the trace alone, at every token
    peak_resident_bytes: int

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.accesses if self.accesses else None

    def __str__(self) -> str:
        shown = lambda value, form: "none" if value is None else format(value, form)  # noqa: E731
        ledger = self.ledger
        lines = [
            ("I/O", f"{self.io_mode} ({self.io_why}), by {self.reads_by}" + (f"; {self.retried} reads tried again" if self.retried else "")),
            ("tokens", f"{self.tokens}, {shown(self.tokens_per_s, '.2f')} tok/s; first after {shown(self.ttft_ms, '.1f')} ms, "
                       f"then p50 {shown(self.p50_ms, '.2f')} ms, p99 {shown(self.p99_ms, '.2f')} ms"),
            ("read", f"{self.read_bytes:,} bytes (demand {self.demand_bytes:,}, prefetch {self.prefetch_bytes:,}, before the start {self.preloaded_bytes:,}); "
                     f"the kernel counted {shown(self.kernel_bytes, ',')}"),
            ("hit rate", f"{shown(self.hit_rate, '.4f')} of {self.accesses:,} accesses"),
            ("prefetches", f"{ledger.issued} issued = {ledger.useful} useful + {ledger.late} late + {ledger.wasted} wasted + {ledger.cancelled} cancelled "
                           f"+ {ledger.resident} resident + {ledger.in_flight} in flight"),
            ("memory", f"{self.buffer_bytes / 1e6:.1f} MB of expert buffers ({self.buffer_experts} cached experts, {self.buffer_reads} reads at a time); "
                       f"peak resident {self.peak_resident_bytes / 1e6:,.0f} MB"),
        ]  # fmt: skip
        if self.recorded:
            lines.append(("recorded", f"what {', '.join(self.recorded)} foretell at every token, which takes time: the speed is not that of generating alone"))
        return "\n".join(f"{name:10} {text}" for name, text in lines)


def summarise(engine: Engine) -> Summary:
    clock, counts = engine.clock, engine.experts.counts()
    ms = np.array(clock.decode_ms)
    demand, prefetch = int(counts[dq.DEMAND_BYTES]), int(counts[dq.GUESS_BYTES])
    preloaded = engine.experts.preloaded_bytes
    return Summary(
        io_mode=engine.file.mode, io_why=engine.file.why, reads_by=engine.experts.reads_by, tokens=clock.tokens, tokens_per_s=1000 * clock.decode_tokens / ms.sum() if len(ms) else None,
        ttft_ms=float(np.mean(clock.first_token_ms)) if clock.first_token_ms else None,
        p50_ms=float(np.percentile(ms, 50)) if len(ms) else None, p99_ms=float(np.percentile(ms, 99)) if len(ms) else None,
        stall_ms_per_token=sum(clock.stall_ms) / clock.decode_tokens if clock.decode_tokens else None,
        read_bytes=demand + prefetch + preloaded, demand_bytes=demand, prefetch_bytes=prefetch, preloaded_bytes=preloaded,
        kernel_bytes=kernel_bytes() - engine.kernel_bytes_before if kernel_bytes() is not None else None, retried=engine.file.retried,
        accesses=int(counts[dq.ACCESSES]), hits=int(counts[dq.RESIDENT]), ledger=engine.experts.ledger(), buffer_bytes=engine.experts.buffers.bytes,
        buffer_experts=slots_of(engine.cache_settings, engine.manifest), buffer_reads=engine.lanes, recorded=engine.recorded,
        peak_resident_bytes=peak_resident_bytes(),
    )  # fmt: skip
