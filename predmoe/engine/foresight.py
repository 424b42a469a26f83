"""Routing as the simulator's event loop reads it: a window that the decoder fills, or a whole trace that an oracle knows."""

from __future__ import annotations

import numpy as np

from ..config import ModelConfig
from ..simulator import counting, events
from ..simulator.replay import continued
from ..traces.schema import Trace

WINDOW = 1024   # passes before the numbering begins again


def live_routing(config: ModelConfig) -> events.Routing:
    """Empty arrays for WINDOW passes, filled as the model chooses."""
    tokens = max(WINDOW, config.context)
    no = np.zeros(WINDOW, np.bool_)
    return events.Routing(np.full((tokens, config.num_layers, config.top_k), -1, np.int16), np.zeros(WINDOW + 1, np.int64), np.zeros(tokens, np.int32), no, no.copy(),
                          np.zeros(1, np.int64), np.zeros(1, np.int32))  # fmt: skip


def routing_of(trace: Trace, across: bool) -> events.Routing:
    """The trace's own arrays, with each key's uses for Belady; `across`: the oracle looks past the token."""
    first, when = counting.occurrences(trace, counting.uses(trace))
    no = np.zeros(trace.num_passes, np.bool_)
    whole = lambda array: np.ascontiguousarray(array)  # noqa: E731
    follows, runs = continued(trace, across)
    return events.Routing(whole(trace.experts_NLK), whole(trace.starts), whole(runs), no, follows, first, when)
