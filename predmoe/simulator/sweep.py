"""Grids of replays, in parallel over cores: one table with a row per cell."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

from ..traces.schema import Trace
from .config import Cache, Compute, Disk, Prefetch, SimulationError, at_least
from .replay import replay

if TYPE_CHECKING:
    import pandas as pd

DEMAND = "demand"
_CACHE = {"slots": "slots", "bytes": "bytes", "scope": "scope", "cache_policy": "policy", "pinned": "pinned"}
_DISK = {name: name for name in ("latency_ms", "gb_per_s", "lanes", "noise")}
_COMPUTE = {name: name for name in ("attention_ms", "expert_ms", "shared_ms", "head_ms", "overlap")}
_PREFETCH = {name: name for name in ("horizon", "budget", "threshold", "guard", "expire", "cancel", "promote", "cross_token")}
AXES = ("policy", *_CACHE, *_DISK, *_COMPUTE, *_PREFETCH)


def sweep(trace: Trace, *, cache: Cache = Cache(slots=64), disk: Disk = Disk(), compute: Compute = Compute(), prefetch: Prefetch = Prefetch(),
          warmup: int = 0, cold: str = "trace", joules_per_byte: float | None = None, workers: int | None = None, progress: bool = True, **axes: Iterable) -> pd.DataFrame:  # fmt: skip
    """Replay `trace` for every combination of the values on `axes` (names in AXES), starting from the given settings.

    `policy` is where prefetches come from: "demand" for none, "oracle", or a predictor of the trace; by default "demand"
    and `prefetch.source`. Settings of the prefetch do not multiply the demand rows. Returns one row per cell, in the order of
    the axes: the axes' values and `Outcome.summary`, with energy where `joules_per_byte` is given. Replays run in threads (the compiled loop holds no lock), as many as there are cores.
    """
    import pandas as pd   # here: who only replays, or generates, has no use for their memory
    from tqdm.auto import tqdm

    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise SimulationError(f"workers={workers!r}: a sweep needs at least one")
    if joules_per_byte is not None:
        at_least("joules_per_byte", joules_per_byte, 0.0)
    unknown = sorted(set(axes) - set(AXES))
    if unknown:
        raise SimulationError(f"unknown axes {', '.join(unknown)}; a sweep has {', '.join(AXES)}")
    values = {"policy": (DEMAND, prefetch.source), **{name: _listed(name, value) for name, value in axes.items()}}
    cells = list(dict.fromkeys(_cell(values, choice) for choice in itertools.product(*values.values())))
    jobs = [_settings(dict(cell), cache, disk, compute, prefetch) for cell in cells]   # every cell is checked before the first is run
    outcomes: list[dict | None] = [None] * len(jobs)
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        running = {pool.submit(_summary, trace, job, warmup, cold, joules_per_byte): i for i, job in enumerate(jobs)}
        try:
            with tqdm(total=len(jobs), desc="compiling, if for the first time", unit="replay", disable=not progress) as bar:
                for done, future in enumerate(as_completed(running)):
                    outcomes[running[future]] = future.result()
                    if not done:   # the bar's clock starts when everything is compiled: it foretells replays
                        bar.set_description_str("", refresh=False)
                        bar.reset(total=len(jobs))
                    bar.update()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return pd.DataFrame([{**dict(cell), **line} for cell, line in zip(cells, outcomes)])


def _listed(name: str, value) -> Sequence:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SimulationError(f"{name}={value!r} must be a list of values to try")
    listed = list(value)
    if not listed:
        raise SimulationError(f"{name} has no value to try")
    return listed


def _cell(values: dict[str, Sequence], choice: tuple) -> tuple:
    """One combination as hashable pairs; what concerns a prefetch is None in a demand cell."""
    picked = dict(zip(values, choice))
    if picked["policy"] == DEMAND:
        picked |= {name: None for name in picked if name in _PREFETCH}
    return tuple((name, tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else value) for name, value in picked.items())


def _settings(cell: dict, cache: Cache, disk: Disk, compute: Compute, prefetch: Prefetch) -> tuple:
    part = lambda names: {field: cell[name] for name, field in names.items() if name in cell}  # noqa: E731
    capacity = part(_CACHE)
    if "slots" in capacity:
        capacity.setdefault("bytes", None)
    elif "bytes" in capacity:
        capacity["slots"] = None
    if cell["policy"] == DEMAND:
        ahead = None
    else:
        ahead = dataclasses.replace(prefetch, source=cell["policy"], **part(_PREFETCH))
    return (dataclasses.replace(cache, **capacity), dataclasses.replace(disk, **part(_DISK)), dataclasses.replace(compute, **part(_COMPUTE)), ahead)


def _summary(trace: Trace, job: tuple, warmup: int, cold: str, joules_per_byte: float | None) -> dict:
    cache, disk, compute, ahead = job
    return replay(trace, cache, disk, compute=compute, prefetch=ahead, warmup=warmup, cold=cold).summary(joules_per_byte=joules_per_byte)
