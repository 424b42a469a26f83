"""Cache, disk and prefetch, replayed on routing traces: exact counts without a clock, and an event replay with one."""

from .config import GUARDS, POLICIES, SCOPES, Cache, Compute, Disk, Prefetch, SimulationError, SimulationWarning, at_least
from .counting import Counts, count, count_keys, uses
from .fit import Fit, fit
from .outcome import Ledger, Outcome
from .replay import is_compiled, replay
from .sweep import sweep

__all__ = ["GUARDS", "POLICIES", "SCOPES", "Cache", "Compute", "Counts", "Disk", "Fit", "Ledger", "Outcome", "Prefetch", "SimulationError", "SimulationWarning",
           "at_least", "count", "count_keys", "fit", "is_compiled", "replay", "sweep", "uses"]  # fmt: skip
