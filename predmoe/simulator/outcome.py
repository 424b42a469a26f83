"""What a replay gives: the ledger of its prefetches, and what a user of the engine would feel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..traces.schema import DECODE, PREFILL
from . import diskqueue as dq
from .config import SimulationError, at_least

if TYPE_CHECKING:
    import pandas as pd

KINDS = ("attention", "stall", "experts", "head", "demand read", "prefetch read")


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What became of the prefetches issued after the warm-up. Each has exactly one fate:

    useful     used while resident, having arrived before it was asked for
    late       asked for before it had arrived: its read, if it had started, shortened the wait
    wasted     evicted unused, or dropped on arrival because nothing could be evicted for it
    cancelled  taken out of the queue unread: expired, superseded, or the cache was emptied
    resident   in the cache at the end, not used yet
    in_flight  queued or being read at the end

    `held_back` were never issued: the guard forbade them. `wasted_bytes` belong to `wasted`.
    """

    issued: int
    useful: int
    late: int
    wasted: int
    cancelled: int
    resident: int
    in_flight: int
    held_back: int = 0
    wasted_bytes: int = 0

    def check(self) -> None:
        """Raise AssertionError unless the fates add up to what was issued."""
        fates = self.useful + self.late + self.wasted + self.cancelled + self.resident + self.in_flight
        if fates != self.issued:
            raise AssertionError(f"the ledger does not balance: {fates} fates of {self.issued} issued: {self}")

    @property
    def precision(self) -> float:
        """Share of the prefetches read or asked for that were wanted: (useful + late) / (useful + late + wasted)."""
        judged = self.useful + self.late + self.wasted
        if not judged:
            raise SimulationError("no prefetch has been judged yet, so there is no precision")
        return (self.useful + self.late) / judged


@dataclass(frozen=True, eq=False, kw_only=True)
class Outcome:
    """The measured part of a replay: everything after `warmup` passes. Times in ms, one entry per measured pass.

    `counts` int64 [S, 9] has the columns of `diskqueue.ACCESSES` and following.
    """

    start_S: np.ndarray
    end_S: np.ndarray
    stall_S: np.ndarray
    counts: np.ndarray
    phase_S: np.ndarray
    tokens_S: np.ndarray
    ledger: Ledger
    warmup: int
    first_token_ms: np.ndarray         # per sequence that begins after the warm-up: from its first pass to its first token
    rows: tuple[np.ndarray, np.ndarray, np.ndarray]

    def _sum(self, column: int) -> int:
        return int(self.counts[:, column].sum())

    @property
    def total_ms(self) -> float:
        return float(self.end_S[-1] - self.start_S[0])

    @property
    def stall_ms(self) -> float:
        """Time in which the processor waited for the disk."""
        return float(self.stall_S.sum())

    @property
    def compute_ms(self) -> float:
        return self.total_ms - self.stall_ms

    @property
    def accesses(self) -> int:
        return self._sum(dq.ACCESSES)

    @property
    def hits(self) -> dict[str, int]:
        """Accesses by where the expert was: resident; in flight (a prefetch being read); missing (`promoted` of them were
        queued prefetches, which a demand found before their read had begun and took over; with `Prefetch.promote` off it waits for them in
        their place, and they are missing like the others, but read as prefetches)."""
        return {"resident": self._sum(dq.RESIDENT), "in_flight": self._sum(dq.IN_FLIGHT), "missing": self._sum(dq.MISSES)}

    @property
    def promoted(self) -> int:
        return self._sum(dq.PROMOTED)

    @property
    def hit_rate(self) -> float:
        return self._sum(dq.RESIDENT) / self.accesses

    @property
    def read_bytes(self) -> int:
        return self.demand_bytes + self.prefetch_bytes

    @property
    def demand_bytes(self) -> int:
        return self._sum(dq.DEMAND_BYTES)

    @property
    def prefetch_bytes(self) -> int:
        return self._sum(dq.GUESS_BYTES)

    @property
    def reads(self) -> int:
        return self._sum(dq.DEMAND_READS) + self._sum(dq.GUESS_READS)

    @property
    def tokens(self) -> int:
        return int(self.tokens_S.sum())

    def _decoded(self) -> np.ndarray:
        chosen = self.phase_S == DECODE
        if not chosen.any():
            raise SimulationError(f"no decode pass is left after the warm-up of {self.warmup}, so there is no rate per token")
        return chosen

    @property
    def token_ms(self) -> np.ndarray:
        """Duration of each decode pass."""
        chosen = self._decoded()
        return (self.end_S - self.start_S)[chosen]

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens, of all sequences of a batch, per second of decode passes; infinite where nothing takes any time."""
        passed = float(self.token_ms.sum())
        return 1000.0 * int(self.tokens_S[self._decoded()].sum()) / passed if passed else math.inf

    def percentile_ms(self, q: float) -> float:
        """The q-th percentile of the decode passes' durations, q of 0..100."""
        at_least("q", q, 0.0)
        if q > 100:
            raise SimulationError(f"q={q!r}: a percentile lies in 0..100")
        return float(np.percentile(self.token_ms, q))

    @property
    def ttft_ms(self) -> float:
        """Mean time to first token over the sequences that begin after the warm-up."""
        if not len(self.first_token_ms):
            raise SimulationError("no sequence begins after the warm-up, so there is no time to first token")
        return float(self.first_token_ms.mean())

    def energy_j(self, joules_per_byte: float) -> float:
        """Energy of the reads. Raises SimulationError for a negative or infinite price."""
        at_least("joules_per_byte", joules_per_byte, 0.0)
        return joules_per_byte * self.read_bytes

    def per_pass(self) -> pd.DataFrame:
        """One row per measured pass: times and where its experts were found."""
        import pandas as pd

        names = ("accesses", "resident", "in_flight", "missing", "promoted", "demand_reads", "demand_bytes", "prefetch_reads", "prefetch_bytes")
        frame = pd.DataFrame(self.counts, columns=names)
        head = dict(phase=np.where(self.phase_S == PREFILL, "prefill", "decode"), tokens=self.tokens_S, start_ms=self.start_S, ms=self.end_S - self.start_S,
                    stall_ms=self.stall_S)  # fmt: skip
        return pd.concat([pd.DataFrame(head), frame], axis=1)

    def timeline(self) -> pd.DataFrame:
        """What disk and processor did in the passes asked for: kind, start and end in ms, pass, and key (of a read) or layer."""
        import pandas as pd

        kind, span, what = self.rows
        frame = pd.DataFrame(dict(kind=np.array(KINDS)[kind], start_ms=span[:, 0], end_ms=span[:, 1], of_pass=what[:, 0], what=what[:, 1]))
        return frame.sort_values(["start_ms", "end_ms"], kind="stable", ignore_index=True)

    def prefetches_read(self) -> pd.DataFrame:
        """Columns of_pass and key of the prefetches read in the passes whose timeline was asked for, in the order in which they ended."""
        import pandas as pd

        kind, _, what = self.rows
        return pd.DataFrame(what[kind == dq.GUESS_READ], columns=["of_pass", "key"])

    def summary(self, *, joules_per_byte: float | None = None) -> dict[str, float]:
        """The figures of one line of a table. Without decode passes or new sequences the figures that need them are left out; with the price of a
        byte, `energy_j` is the energy of the reads per token, like the MB beside it."""
        n = self.tokens
        line = dict(tokens=n, stall_ms=self.stall_ms / n, hit_rate=self.hit_rate, in_flight_rate=self.hits["in_flight"] / self.accesses,
                    demand_mb=self.demand_bytes / n / 1e6, prefetch_mb=self.prefetch_bytes / n / 1e6, wasted_mb=self.ledger.wasted_bytes / n / 1e6,
                    issued=self.ledger.issued, useful=self.ledger.useful, late=self.ledger.late, wasted=self.ledger.wasted, cancelled=self.ledger.cancelled,
                    resident=self.ledger.resident, in_flight=self.ledger.in_flight, held_back=self.ledger.held_back)  # fmt: skip
        if (self.phase_S == DECODE).any():
            line |= dict(tok_s=self.tokens_per_s, p50_ms=self.percentile_ms(50), p99_ms=self.percentile_ms(99))
        if len(self.first_token_ms):
            line |= dict(ttft_ms=self.ttft_ms)
        if joules_per_byte is not None:
            line |= dict(energy_j=self.energy_j(joules_per_byte) / n)
        return line
