"""What the simulator must be told about a machine, measured once: the disk through the engine's own reads, the processor with every expert in memory."""
# L layers, K chosen

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from ..simulator import Cache, Compute, Disk, Prefetch
from . import kernelqueue
from .decode import Engine
from .layout import EXPERTS, load_manifest
from .storage import DIRECT, BlockFile, Buffers
from .summary import Clock

if TYPE_CHECKING:
    import pandas as pd

PAUSE = 3e-4   # seconds: about what passes between two reads of a small model; a disk that has rested takes longer for the next one


class DiskGauge:
    """Measures the disk under an export as the engine reads it: through the kernel's queue, or where that cannot be had by threads.

    `turn` measures a little, so that it can take turns with what is to be foretold; `disk` and `table` have the means so far.
    """

    def __init__(self, folder: str | Path, *, lanes: int, seed: int = 0, direct: bool = True):
        manifest = load_manifest(folder)
        self._lanes, self._rng = lanes, np.random.default_rng(seed)
        self._file = BlockFile(Path(folder) / EXPERTS, direct=direct, announce=lambda line: None)
        self._offsets, self._size = np.array(manifest.offsets).reshape(-1), manifest.block.size
        self._buffers = Buffers(lanes, self._file.room(self._size, manifest.alignment), max(4096, self._file.alignment.memory))
        self._queued = self._file.mode == DIRECT and manifest.alignment % self._file.alignment.offset == 0
        cases = [(1, max(512, self._file.alignment.offset)), *((depth, self._size) for depth in range(1, lanes + 1))]
        self._sums = {case: np.zeros(4) for case in cases}   # seconds of batches, batches; seconds of reads one after another, reads
        self._handed = np.zeros(2)                           # seconds, batches

    def turn(self, reads: int) -> None:
        """`reads` random blocks in batches and as many one after another, at each number of reads under way."""
        for (depth, length), sums in self._sums.items():
            batches = max(1, reads // depth)
            keys = self._rng.integers(0, len(self._offsets), batches * depth)
            together, following = self._by_queue(keys, depth, length) if self._queued else (None, None)
            if together is None:
                following = together = _seconds_by_threads(self._file, self._buffers, self._offsets[keys].tolist(), depth, length)
            sums += together, batches, following, batches * depth

    def _by_queue(self, keys: np.ndarray, depth: int, length: int) -> tuple[float | None, float | None]:
        io = kernelqueue.create(depth, offsets=self._offsets, check=np.zeros(len(self._offsets), np.bool_), size=length,
                                addresses=kernelqueue.addresses_of(self._buffers.whole[:depth]), counted=np.zeros(2, np.int64))  # fmt: skip
        if kernelqueue.open_context(io, self._file.descriptor, 0.0):
            self._queued = False
            return None, None
        try:
            together = kernelqueue.timed(io, keys, depth, PAUSE)
            if length == self._size:
                self._handed += io.seconds[kernelqueue.HANDED], io.at[kernelqueue.BATCHES]
            return together, kernelqueue.timed(io, keys)
        finally:
            kernelqueue.close_context(io)

    def reset(self) -> None:
        """Forget what has been measured."""
        for sums in (*self._sums.values(), self._handed):
            sums[:] = 0.0

    def table(self) -> pd.DataFrame:
        """depth, bytes, ms (from handing so many reads over to a disk at rest until the last has come), gb_per_s (of all together, one following another)."""
        import pandas as pd   # here: a process that only generates has no use for its memory

        return pd.DataFrame([{"depth": depth, "bytes": length, "ms": 1000 * together / batches, "gb_per_s": reads * length / following / 1e9}
                             for (depth, length), (together, batches, following, reads) in self._sums.items()])  # fmt: skip

    def disk(self) -> Disk:
        """As the simulator has it: `depth` reads handed over to a disk at rest take what they took here. Latency is that of the least aligned read."""
        ms = [1000 * together / batches for together, batches, *_ in self._sums.values()]
        latency = min(ms[0], 0.9 * min(ms[1:]))   # of a disk whose small reads are as slow as whole blocks
        speeds = (depth * self._size / (taken - latency) / 1e6 for depth, taken in enumerate(ms[1:], 1))
        return Disk(latency_ms=float(latency), gb_per_s=tuple(map(float, speeds)), lanes=self._lanes, issue_ms=1000 * float(self._handed[0] / max(self._handed[1], 1)))

    def close(self) -> None:
        self._file.close()


def measure_disk(folder: str | Path, *, lanes: int, reads: int = 200, rounds: int = 3, seed: int = 0, direct: bool = True) -> tuple[Disk, pd.DataFrame]:
    """`DiskGauge` at once: the disk and the table, of `reads` blocks at each depth in each of `rounds`."""
    gauge = DiskGauge(folder, lanes=lanes, seed=seed, direct=direct)
    gauge.turn(1)   # compiles
    gauge.reset()
    for _ in range(rounds):
        gauge.turn(reads)
    gauge.close()
    return gauge.disk(), gauge.table()


def _seconds_by_threads(file: BlockFile, buffers: Buffers, offsets: list[int], depth: int, length: int) -> float:
    """To read all, each handed from thread to thread, with `depth` of them under way."""
    jobs, done = SimpleQueue(), SimpleQueue()

    def work() -> None:
        while (job := jobs.get()) is not None:
            file.read(job[0], length, buffers.array(job[1]))
            done.put(job[1])

    threads = [threading.Thread(target=work, daemon=True) for _ in range(depth)]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    for buffer in range(depth):
        jobs.put((offsets[buffer], buffer))
    for offset in offsets[depth:]:
        jobs.put((offset, done.get()))
    for _ in range(depth):
        done.get()
    elapsed = time.perf_counter() - began
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        thread.join()
    return elapsed


class ReadingGauge:
    """Measures what reads cost the processor in the engine itself, with a cache of one top-k set, where nearly every expert is read. `turn` goes on with one of
    `prompts`, so that it can take turns with what is to be foretold."""

    def __init__(self, folder: str | Path, prompts: Sequence[Sequence[int]], *, lanes: int, **how):
        self._prompts, self._how, model = prompts, how, load_manifest(folder).model
        self._turns, self._reads, self._handed = 0, 0, np.zeros(2)
        self._engine = Engine(folder, cache=Cache(slots=model.top_k), lanes=lanes, verify="never", announce=lambda line: None)
        self._clock = Clock(model.num_layers)

    def turn(self) -> None:
        engine, io, seen = self._engine, self._engine.experts.control.io, []
        engine.clock = self._clock
        handed = lambda: np.array([io.seconds[kernelqueue.HANDED], io.at[kernelqueue.BATCHES]])  # noqa: E731
        engine.generate([self._prompts[self._turns % len(self._prompts)]], on_tokens=lambda _: seen.append((engine.file.reads, handed())), **self._how)
        self._turns += 1
        self._reads += seen[-1][0] - seen[0][0]   # of decode passes
        self._handed += seen[-1][1] - seen[0][1]

    def costs(self, resident_ms: float) -> tuple[float, float]:
        """(issue_ms, fresh_ms): of handing over the reads that begin at a router; of computing for each expert that has been read, beyond the `resident_ms`
        that a token takes in a `ComputeGauge`."""
        clock, handed_ms = self._clock, 1000 * self._handed[0]
        longer = np.sum(clock.decode_ms) - np.sum(clock.stall_ms) - handed_ms - resident_ms * clock.decode_tokens
        return float(handed_ms / max(self._handed[1], 1)), max(float(longer) / max(self._reads, 1), 0.0)

    def close(self) -> None:
        self._engine.close()


class ComputeGauge:
    """Measures the processor with every expert in memory; with `prefetch` the cost of asking its predictor is in it. `turn` goes on with one of `prompts`,
    so that it can take turns with what is to be foretold; before, all are gone on with once, to bring the experts in. `how` goes to `Engine.generate`."""

    def __init__(self, folder: str | Path, prompts: Sequence[Sequence[int]], *, prefetch: Prefetch | None = None, lanes: int = 1, **how):
        self._prompts, self._how, model = prompts, how, load_manifest(folder).model
        self._top_k, self._turns = model.top_k, 0
        self._engine = Engine(folder, cache=Cache(slots=model.num_layers * model.num_experts), prefetch=prefetch, lanes=lanes, announce=lambda line: None)
        for prompt in prompts:
            self._engine.generate([prompt], **how)
        self._engine.experts.quiet()
        self._engine.clock = Clock(model.num_layers, self._engine.experts.stalled)

    def turn(self) -> None:
        self._engine.generate([self._prompts[self._turns % len(self._prompts)]], **self._how)
        self._turns += 1

    def compute(self) -> tuple[Compute, float]:
        """The processor's times, and ms per token in all. Each further token of a prefill pass costs what the prompts' passes say."""
        clock = self._engine.clock
        ms = float(np.sum(clock.decode_ms) - np.sum(clock.stall_ms)) / clock.decode_tokens
        prompt = float(np.mean([len(prompt) for prompt in self._prompts]))
        extra = max(0.0, (float(np.mean(clock.first_token_ms)) / ms - 1) / (prompt - 1)) if prompt > 1 else 0.0
        found = clock.compute(self._top_k, extra_token=extra)
        parts = float(np.sum(found.attention_ms) + self._top_k * np.sum(found.expert_ms))
        return dataclasses.replace(found, head_ms=max(ms - parts, 0.0)), ms   # what lies between the parts is in the head's time

    def close(self) -> None:
        self._engine.close()


def measure_compute(folder: str | Path, prompts: Sequence[Sequence[int]], **settings) -> tuple[Compute, float]:
    """`ComputeGauge` at once."""
    gauge = ComputeGauge(folder, prompts, **settings)
    for _ in prompts:
        gauge.turn()
    gauge.close()
    return gauge.compute()
