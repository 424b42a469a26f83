"""What the simulator must be told about a machine, measured once: the disk through the engine's own reads, the processor with every expert in memory."""
# L layers, K chosen

from __future__ import annotations

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

def measure_disk(folder: str | Path, *, lanes: int, reads: int = 200, rounds: int = 3, seed: int = 0, direct: bool = True) -> tuple[Disk, pd.DataFrame]:
    """The disk under an export as the simulator has it, and the measurements: depth, bytes, ms (of one read), gb_per_s (of all together), issue_ms
    (in which the processor hands one read over; it is part of ms).

    `reads` random blocks at each depth 1..lanes, read as the engine does: through the kernel's queue, or where that cannot be had handed from thread to
    thread, so that the hand-over counts as latency. Latency is the time of the least aligned read at depth 1; medians over `rounds`, the depths taking turns.
    """
    import pandas as pd   # here: a process that only generates has no use for its memory

    manifest = load_manifest(folder)
    file = BlockFile(Path(folder) / EXPERTS, direct=direct, announce=lambda line: None)
    offsets = np.array(manifest.offsets).reshape(-1)
    size, least = manifest.block.size, max(512, file.alignment.offset)
    buffers = Buffers(lanes, file.room(size, manifest.alignment), max(4096, file.alignment.memory))
    rng = np.random.default_rng(seed)
    plan = [(1, least), *((depth, size) for depth in range(1, lanes + 1))]
    ms: dict[tuple[int, int], list[float]] = {case: [] for case in plan}
    issue: dict[tuple[int, int], list[float]] = {case: [] for case in plan}
    for _ in range(rounds):
        for depth, length in plan:
            found = _by_queue(file, buffers, offsets, rng.integers(0, len(offsets), reads), depth, length) if manifest.alignment % file.alignment.offset == 0 else None
            found = found or (_ms_per_read(file, buffers, rng.choice(offsets, reads).tolist(), depth, length), 0.0)
            ms[depth, length].append(found[0])
            issue[depth, length].append(found[1])
    file.close()
    rows = [{"depth": depth, "bytes": length, "ms": float(np.median(times)), "gb_per_s": depth * length / np.median(times) / 1e6, "issue_ms": float(np.median(issue[depth, length]))}
            for (depth, length), times in ms.items()]  # fmt: skip
    table = pd.DataFrame(rows)
    latency = min(rows[0]["ms"], 0.9 * min(row["ms"] for row in rows[1:]))   # of a disk whose small reads are as slow as whole blocks
    speeds = tuple(row["depth"] * size / (row["ms"] - latency) / 1e6 for row in rows[1:])
    return Disk(latency_ms=latency, gb_per_s=speeds, lanes=lanes, issue_ms=rows[1]["issue_ms"]), table


def _by_queue(file: BlockFile, buffers: Buffers, offsets: np.ndarray, keys: np.ndarray, depth: int, length: int) -> tuple[float, float] | None:
    """ms of a read and of handing one over, through the kernel's queue; None where there is none."""
    if file.mode != DIRECT:
        return None
    io = kernelqueue.create(depth, offsets=offsets, check=np.zeros(len(offsets), np.bool_), size=length, addresses=kernelqueue.addresses_of(buffers.whole[:depth]), counted=np.zeros(2, np.int64))
    if kernelqueue.open_context(io, file.descriptor, 0.0):
        return None
    try:
        kernelqueue.timed(io, keys[:1])   # compiles
        io.seconds[:], io.at[kernelqueue.BATCHES] = 0.0, 0
        seconds = kernelqueue.timed(io, keys)
        return 1000 * seconds * depth / len(keys), 1000 * float(io.seconds[kernelqueue.HANDED]) / int(io.at[kernelqueue.BATCHES])
    finally:
        kernelqueue.close_context(io)


def _ms_per_read(file: BlockFile, buffers: Buffers, offsets: list[int], depth: int, length: int) -> float:
    """Time from handing a read over to hearing that it is done, with `depth` of them under way."""
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
    return 1000 * elapsed * depth / len(offsets)


def measure_compute(folder: str | Path, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, prefetch: Prefetch | None = None, lanes: int = 1, **how) -> tuple[Compute, float]:
    """The processor's times, and ms per token in all, with every expert in memory. With `prefetch` the cost of asking its predictor is in them.

    The prompts are gone on with twice, the first time to bring the experts in; `how` goes to `Engine.generate`. Each further token of a
    prefill pass costs what the prompts' passes say.
    """
    model = load_manifest(folder).model
    slots = model.num_layers * model.num_experts
    with Engine(folder, cache=Cache(slots=slots), prefetch=prefetch, lanes=lanes, announce=lambda line: None) as engine:
        for _ in range(2):
            engine.clock = Clock(model.num_layers)
            for prompt in prompts:
                engine.generate([prompt], max_new_tokens=max_new_tokens, **how)
        clock = engine.clock
    ms = float(np.sum(clock.decode_ms) - np.sum(clock.stall_ms)) / clock.decode_tokens
    prompt = float(np.mean([len(prompt) for prompt in prompts]))
    extra = max(0.0, (float(np.mean(clock.first_token_ms)) / ms - 1) / (prompt - 1)) if prompt > 1 else 0.0
    return clock.compute(model.top_k, extra_token=extra), ms
