"""Fit a machine to an engine's own timings, and say how well it predicts timings it has not seen."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from ..traces.schema import DECODE, Trace
from .config import Cache, Compute, Disk, SimulationError
from .replay import replay


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A machine fitted on the first `fitted_on` decode passes. Errors, relative, on the passes after them: `median_error` of
    a pass's time (absolute), `total_error` of their sum (signed: positive is too slow)."""

    disk: Disk
    compute: Compute
    fitted_on: int
    measured_ms: np.ndarray
    predicted_ms: np.ndarray

    @property
    def median_error(self) -> float:
        measured, predicted = self.measured_ms[self.fitted_on :], self.predicted_ms[self.fitted_on :]
        return float(np.median(np.abs(predicted - measured) / measured))

    @property
    def total_error(self) -> float:
        return float(self.predicted_ms[self.fitted_on :].sum() / self.measured_ms[self.fitted_on :].sum() - 1)


def fit(trace: Trace, measured_ms: np.ndarray, cache: Cache, *, disk: Disk = Disk(), compute: Compute = Compute(), share: float = 0.5) -> Fit:
    """Latency, bandwidth and attention time per layer with which a replay without prefetch comes closest to `measured_ms`,
    the duration of each decode pass, on the first `share` of them (least squares of the logarithms, from `disk` and
    `compute` on, whose other settings are kept: lanes, expert_ms, overlap). The replay starts cold at the trace's beginning.
    """
    from scipy.optimize import least_squares   # here: who only replays has no use for its memory

    decode = trace.phase == DECODE
    measured_ms = np.atleast_1d(np.asarray(measured_ms, np.float64))
    if len(measured_ms) != decode.sum() or not (np.isfinite(measured_ms) & (measured_ms > 0)).all():
        raise SimulationError(f"measured_ms must give a positive time for each of the {int(decode.sum())} decode passes, not {len(measured_ms)}")
    if not 0 < share < 1:
        raise SimulationError(f"share={share} must lie between 0 and 1: a fit is judged on the passes that it has not seen")
    if math.isinf(disk.table[0]):
        raise SimulationError("a fit starts from a finite bandwidth")
    if len(disk.table) > 1 or not np.isscalar(compute.attention_ms):
        raise SimulationError("a fit starts from one bandwidth and one attention time, not from tables")
    fitted_on = int(len(measured_ms) * share)
    if fitted_on < 3:
        raise SimulationError(f"share={share} leaves {fitted_on} decode passes for three unknowns")

    def machine(logs: np.ndarray) -> tuple[Disk, Compute]:
        latency, bandwidth, attention = np.exp(logs).tolist()
        return dataclasses.replace(disk, latency_ms=latency, gb_per_s=bandwidth), dataclasses.replace(compute, attention_ms=attention)

    def predicted(logs: np.ndarray) -> np.ndarray:
        there, here = machine(logs)
        return replay(trace, cache, there, compute=here).token_ms

    def error(logs: np.ndarray) -> np.ndarray:
        return np.log(predicted(logs)[:fitted_on] / measured_ms[:fitted_on])

    begin = np.log([max(disk.latency_ms, 1e-3), disk.table[0], max(compute.attention_ms, 1e-3)])
    found = least_squares(error, begin, bounds=(begin - 10, begin + 10), diff_step=1e-2, loss="soft_l1", f_scale=0.1)
    there, here = machine(found.x)
    return Fit(disk=there, compute=here, fitted_on=fitted_on, measured_ms=measured_ms, predicted_ms=predicted(found.x))
