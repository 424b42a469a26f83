"""How fast the simulator is, as ratios within one run: `python benchmarks/simulator.py`. Times are processor time;
the sweep has the wall's too. Nothing is asserted.

    lru      one long key sequence, against libcachesim replaying the same sequence from a file in memory
    replay   disk, prefetch and ledger on the Colibri-like geometry, against the plain-Python event loop of the tests
    sweep    a grid on a small geometry, on all cores
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from reference_simulator import Reference  # noqa: E402
from steps import arguments, markdown, write  # noqa: E402

from predmoe import traces  # noqa: E402
from predmoe.simulator import Cache, Compute, Disk, Prefetch, count_keys, replay, sweep  # noqa: E402

MACHINE = dict(disk=Disk(latency_ms=0.1, gb_per_s=5.0), compute=Compute(attention_ms=2.0, expert_ms=0.25))


def best(repeats, function, *arguments, **options):
    """(fewest seconds of processor time, result): on a shared machine the clock on the wall measures the others."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        result = function(*arguments, **options)
        times.append(time.process_time() - began)
    return min(times), result


def row(what: str, ours: float, **more) -> dict:
    """One measurement: seconds of ours, and what it is compared with."""
    return {"what": what, "seconds": ours} | more


def lru(accesses: int, keys: int = 19_200, slots: int = 2_000) -> dict:
    rng = np.random.default_rng(0)
    sequence = ((rng.zipf(1.2, accesses) - 1) % keys).astype(np.int32)
    count_keys(sequence[:10], 2)
    ours, misses = best(3, count_keys, sequence, slots)
    print(f"lru      {accesses:,} accesses, {keys:,} keys, {slots:,} slots: {ours:.3f} s, {accesses / ours / 1e6:.0f} M/s, {misses:,} misses")
    try:
        import libcachesim
    except ImportError:
        print("         libcachesim is not installed: no comparison")
        return row(f"LRU, {accesses:,} accesses over {keys:,} keys", ours, misses=misses, text="libcachesim is not installed")
    record = np.zeros(accesses, [("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
    record["id"], record["size"], record["next"] = sequence + 1, 1, -2
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.NamedTemporaryFile(suffix=".oracleGeneral.bin", dir=folder) as file:
        record.tofile(file)
        file.flush()

        def theirs():
            reader = libcachesim.TraceReader(file.name, libcachesim.TraceType.ORACLE_GENERAL_TRACE)
            return libcachesim.LRU(slots, hashpower=16).process_trace(reader)[0]

        seconds, ratio = best(3, theirs)
    theirs_misses = round(ratio * accesses)
    print(f"         libcachesim: {seconds:.3f} s, {theirs_misses:,} misses; ours is {seconds / ours:.1f} times as fast")
    same = "the same misses" if theirs_misses == misses else f"{theirs_misses - misses:+,} misses"
    return row(f"LRU, {accesses:,} accesses over {keys:,} keys", ours, misses=misses, their_seconds=seconds, their_misses=theirs_misses,
               text=f"{seconds / ours:.1f}x as fast as libcachesim, {same}")  # fmt: skip


def timed_replay(tokens: int, reference_tokens: int) -> dict:
    predictors = dict(linear=traces.Accuracy(recall={1: 0.8}))
    trace = traces.synthetic(tokens=tokens, **traces.COLIBRI, reuse=0.35, predictors=predictors)
    settings = dict(cache=Cache(slots=2_000), prefetch=Prefetch(source="linear"), **MACHINE)
    began = time.perf_counter()
    replay(trace.passes(0, 2), **settings)
    compiling = time.perf_counter() - began
    ours, outcome = best(3, replay, trace, **settings)
    tracemalloc.start()
    replay(trace, **settings)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"replay   {tokens:,} tokens, {outcome.accesses:,} accesses: {ours:.3f} s ({compiling:.1f} s to compile or load); "
          f"memory beside the trace: {peak / trace.nbytes:.3f} x its size")  # fmt: skip
    short = trace.passes(0, reference_tokens)
    seconds, _ = best(1, lambda: Reference(short, settings["cache"], settings["disk"], settings["compute"], settings["prefetch"]).run())
    ratio = (seconds / reference_tokens) / (ours / tokens)
    print(f"         plain Python: {seconds:.2f} s for {reference_tokens} tokens; ours is {ratio:.0f} times as fast per token")
    return row(f"disk, prefetch and ledger, {tokens:,} tokens of 75 x 256 experts ({outcome.accesses:,} accesses)", ours, compiling=compiling,
               memory_of_trace=peak / trace.nbytes, python_seconds_per_token=seconds / reference_tokens,
               text=f"{ratio:.0f}x as fast as plain Python; memory beside the trace {peak / trace.nbytes:.2f}x its size")  # fmt: skip


def grid(tokens: int) -> dict:
    predictors = dict(linear=traces.Accuracy(recall={1: 0.85, 2: 0.8, 4: 0.7}))
    trace = traces.synthetic(tokens=tokens, layers=8, num_experts=16, top_k=2, reuse=0.3, predictors=predictors)
    axes = dict(slots=[16, 24, 32, 48, 64], gb_per_s=[0.5, 1.0, 2.0, 4.0, 8.0], latency_ms=[0.05, 0.1, 0.2, 0.4],
                policy=["linear", "oracle"], horizon=[1, 2, 4], progress=False)  # fmt: skip
    sweep(trace.passes(0, 4), slots=[16], policy=["demand", "linear"], progress=False)
    began = time.perf_counter()
    busy, table = best(1, sweep, trace, **axes)
    seconds = time.perf_counter() - began
    per_grid = 500 / len(table)
    print(f"sweep    {len(table)} cells of {tokens:,} tokens, 8 layers of 16 experts: {seconds:.1f} s; "
          f"for 500 cells {seconds * per_grid:.1f} s on the wall, {busy * per_grid:.1f} s of processor time")  # fmt: skip
    return row(f"sweep of 500 cells, {tokens:,} tokens of 8 x 16 experts", seconds * per_grid, cells=len(table), busy=busy, text=f"on {os.cpu_count()} cores")


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="a fraction of the full sizes, for a quick look")
    options = parser.parse_args()
    scale = options.scale
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    rows = [lru(int(10_000_000 * scale)), timed_replay(max(int(2_000 * scale), 20), max(int(40 * scale), 4)), grid(max(int(4_000 * scale), 40))]
    table = markdown([{"simulator": found["what"], "time": f"{found['seconds']:.2f} s", "compared": found["text"]} for found in rows])
    write(options.json, {"rows": rows, "scale": scale}, markdown=table)


if __name__ == "__main__":
    main()
