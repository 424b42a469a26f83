"""How fast the engine is, as ratios within one run: `python benchmarks/engine.py PART`. Models have random weights, since speed does not ask what they say.

    peers   decoding with every expert in memory against transformers' generate, and with a quarter of them against accelerate's disk offload and
            llama.cpp on a mapped file (where it is installed: see `predmoe.gguf_file`). With --memory-mb or --memory-factor only those with experts on
            disk, each under the same memory limit, page cache included
    bound   time per token over the larger of computing alone and bytes at the disk's best bandwidth: without prefetch, next layer's router, an oracle one
            layer ahead, and one that looks a whole token ahead and evicts by the future
    large   a model of OLMoE-1B-7B's shape (13.8 GB in bf16, written in a stream, removed at the end): peak memory, speed, bytes
    soak    many tokens with a cache of one top-k set: memory, ledger, threads
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
import zlib
from pathlib import Path

import numpy as np
import torch
from steps import arguments, markdown, write

from predmoe import config, engine_study, gguf_file, peers
from predmoe.checkpoint import entry_shapes, save_checkpoint
from predmoe.config import ModelConfig
from predmoe.engine import Engine, export, stored_model
from predmoe.engine.machine import measure_disk
from predmoe.model import MoEModel
from predmoe.process import peak_resident_bytes
from predmoe.simulator import Cache, Prefetch

SIZES = {
    "tiny": dict(vocab_size=256, hidden_size=32, num_layers=3, num_heads=2, expert_size=32, num_experts=8, top_k=2, context=64),
    "cpu": dict(vars(config.TIERS["cpu"].model)),
    "wide": dict(vars(config.TIERS["cpu"].model)) | {"hidden_size": 512, "expert_size": 512, "num_heads": 4},
    "b": dict(vars(config.TIERS["b"].model)),
    # 700 million parameters (1.4 GB in bf16, 95% of them experts): beside it the memory of Python and its libraries is small
    "gb": dict(vocab_size=8192, hidden_size=768, num_layers=12, num_heads=12, expert_size=768, num_experts=32, top_k=4, context=512),
}  # fmt: skip
OLMOE = dict(vocab_size=50304, hidden_size=2048, num_layers=16, num_heads=16, expert_size=1024, num_experts=64, top_k=8, context=4096, norm_topk_prob=False)


# No bound: below 1 where the disk was faster during the run than when it was measured.
AFTER = "time over bytes / the disk's best rate, which was measured after the run"


class RandomModel:
    """A source for `export` that makes each tensor when it is asked for: normal(0, 0.02) in bf16, norms at one."""

    def __init__(self, shape: ModelConfig):
        self.config = shape
        self._shapes = dict(entry_shapes(shape))

    def names(self):
        return self._shapes

    def get(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)


def made(shape: dict, folder: Path, dtype: str = "float32") -> tuple[Path, Path]:
    """(checkpoint, its export as `dtype`) of a model with random weights, which are rounded before, so that both hold the same."""
    model = stored_model(MoEModel(ModelConfig(**shape)).initialise(0), dtype)
    checkpoint = save_checkpoint(model, folder / "checkpoint")
    export(checkpoint, folder / "out", dtype=dtype)
    return checkpoint, folder / "out"


def prompts_of(shape: dict, count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, shape["vocab_size"], (count, tokens)).tolist()


def run_peers(options, folder: Path) -> tuple[dict, list[dict]]:
    """What is fair: every contender computes the same model, and with --dtype bf16 every one's experts take the same bytes on disk (with float32,
    llama.cpp's, always bf16, take half). Under a limit all have the same memory in all (`predmoe.peers` says how it is counted), so that what
    a contender's libraries take for themselves it lacks for experts; with a model of `--size gb` that is the smaller part. --memory-factor F
    sets the limit to F times what the engine with a quarter of the experts is charged for when memory is not scarce: its process, the dense part
    and the buffers; the page cache it hardly uses. With F = 1 a contender has what the engine needs and nothing more; a tenth more
    spares the kernel the search for the last page.
    """
    shape, share = SIZES[options.size], 0.25
    checkpoint, out = made(shape, folder, options.dtype)
    why, prompts = gguf_file.missing(), prompts_of(shape, options.prompts, 8)
    asked = dict(new_tokens=options.tokens, share=share, threads=options.threads)
    limit = options.memory_mb
    if options.memory_factor:
        charged = peers.charge_of("engine-disk", checkpoint, out, prompts, **asked)
        if charged is None:
            print("No memory control group can be had here, so no limit follows from --memory-factor; the contenders run without one.")
        limit = (charged or 0) * options.memory_factor
    kinds = [kind for kind in (peers.DISK if limit else peers.KINDS) if kind != peers.LLAMA or not why]
    print(f"llama.cpp is left out: {why}\n" if why else "", end="")
    table = peers.compare(kinds, checkpoint, out, prompts, **asked, rounds=options.rounds, memory_mb=limit)
    at = table.groupby("kind", sort=False)[[*peers.NUMBERS, "same_tokens"]].median()
    first = table.groupby("kind", sort=False)[["memory_mb", "limited", "ran"]].first()
    against = {"engine": ["transformers"], "engine-disk": ["offload", peers.LLAMA]}
    words = {"transformers": "transformers, generate, all in memory", "offload": "transformers, experts on disk (accelerate)", "engine": "engine, all experts in memory",
             "engine-disk": "engine, a quarter of them in memory", peers.LLAMA: "llama.cpp, bf16, mapped file"}  # fmt: skip
    shown = lambda value, form: "" if value != value else format(value, form)  # noqa: E731
    rows = []
    for kind, line in at.iterrows():
        memory_mb, limited, ran = first.loc[kind]
        ratios = [f"{line.tok_s / at.tok_s[other]:.2f}x {other}" for other in against.get(kind, []) if other in at.index and first.ran[other] and ran]
        title = f"decoding, {options.size}, {options.dtype}, {options.threads} thread(s)"
        rows.append({title: words[kind], "tok/s": shown(line.tok_s, ",.2f") if ran else "does not run",
                     "first token": shown(line.ttft_ms, ",.1f"), "peak MB": shown(line.peak_mb, ",.0f"), "charged MB": shown(line.charged_mb, ",.0f"),
                     "limit MB": "none" if not memory_mb else f"{memory_mb:,.0f}" if limited else f"{memory_mb:,.0f}, not in force",
                     "major faults": shown(line.major_faults, ",.0f"), "MB read per token": shown(line.read_mb / line.tokens, ",.2f"),
                     "same tokens": shown(line.same_tokens, ".0%"), "ratio": ", ".join(ratios)})  # fmt: skip
    print(*peers.say(table), "", sep="\n")
    return {"rounds": table.to_dict("records")}, rows


def run_bound(options, folder: Path) -> tuple[dict, list[dict]]:
    shape = SIZES[options.size]
    _, out = made(shape, folder)
    prompts, g = prompts_of(shape, options.prompts, 8), engine_study.Generation(new_tokens=options.tokens, horizon=1, budget=0, lanes=4)
    key, sources = ("random", 0), {"random": ["demand", "next_router", "oracle", "far_oracle"]}
    futures = {key: engine_study.record(out, prompts, g, sources=sources["random"], source_text="random prompts")}
    gauge = engine_study.Gauge(out, prompts_of(shape, options.prompts, 8, seed=1), g, sources=sources["random"], reads=options.reads // options.prompts)
    rows = engine_study.race({key: out}, futures, prompts, g, sources=sources, shares=[0.125, 0.25, 0.5], between=gauge.turn)
    machine = gauge.machine()
    found = engine_study.predicted(engine_study.cells(rows), futures, machine, g)
    rows = [{f"against the bound, {options.size}": f"{line.source}, {line.share:.1%} of the experts", "tok/s": f"{line.tok_s:,.1f}", "computing alone": f"{line.compute_ms:.2f} ms",
             "bound": f"{line.bound_ms:.2f} ms", "time over bound": f"{line.over_bound:.2f}", "simulated tok/s": f"{line.error_tok_s:+z.1%}"} for line in found.itertuples()]  # fmt: skip
    return {"cells": found.to_dict("records"), "disk": {"latency_ms": machine.disk.latency_ms, "gb_per_s": machine.disk.table}}, rows


def run_large(options, folder: Path) -> tuple[dict, list[dict]]:
    """The export runs in a process of its own, so that only the engine's memory counts here."""
    shape = OLMOE if options.size != "tiny" else SIZES["tiny"]
    subprocess.run([sys.executable, __file__, "write", str(folder / "out"), "--size", options.size], check=True)
    block = 3 * shape["hidden_size"] * shape["expert_size"] * 2
    slots = max(shape["top_k"], int(options.cache_mb * 1e6 // block) - 4)
    with Engine(folder / "out", cache=Cache(slots=slots), prefetch=Prefetch(source="next_router"), lanes=4) as engine:
        engine.generate(prompts_of(shape, 1, 8), max_new_tokens=options.tokens)
        engine.experts.quiet()
        summary = engine.summary()
        print(summary)
    _, curve = measure_disk(folder / "out", lanes=4, reads=min(options.reads, 100))
    decode_ms = 1000 / summary.tokens_per_s
    reading = summary.read_bytes / summary.tokens / curve.gb_per_s.max() / 1e6
    rows = [{"OLMoE-1B-7B's shape, random weights, bf16": f"{summary.tokens_per_s:.2f} tok/s", "read per token": f"{summary.read_bytes / summary.tokens / 1e9:.2f} GB",
             AFTER: f"{decode_ms / reading:.2f}", "hit rate": f"{summary.hit_rate:.1%}", "peak memory": f"{summary.peak_resident_bytes / 1e9:.2f} GB"}]  # fmt: skip
    return {"tok_s": summary.tokens_per_s, "read_bytes": summary.read_bytes, "peak": summary.peak_resident_bytes, "disk": curve.to_dict("records")}, rows


def run_soak(options, folder: Path) -> tuple[dict, list[dict]]:
    import psutil

    shape = SIZES["tiny"]
    _, out = made(shape, folder)
    new, memory = shape["context"] - 8, []
    with Engine(out, cache=Cache(slots=shape["top_k"]), prefetch=Prefetch(source="next_router", horizon=(1, 2)), lanes=4) as engine:
        while engine.clock.tokens < options.tokens * 100:
            engine.generate(prompts_of(shape, 4, 8), max_new_tokens=new)
            memory.append(psutil.Process().memory_info().rss)
        engine.experts.quiet()
        summary, leaked = engine.summary(), engine.experts.leaked()
    summary.ledger.check()
    left = sum(thread.name.startswith("reader") for thread in threading.enumerate())
    settled = memory[len(memory) // 10 :]
    rows = [{"soak": f"{summary.tokens:,} tokens", "memory": f"{max(settled) / settled[0] - 1:+z.2%} after the first tenth", "buffers lost": str(leaked), "threads left": str(left),
             "kernel's bytes over the summary's": f"{summary.kernel_bytes / summary.read_bytes:.4f}" if summary.kernel_bytes else "not counted"}]  # fmt: skip
    return {"memory": memory, "leaked": leaked, "threads": left, "peak": peak_resident_bytes()}, rows


PARTS = {"peers": run_peers, "bound": run_bound, "large": run_large, "soak": run_soak}


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("part", choices=(*PARTS, "write"))
    parser.add_argument("out", nargs="?", type=Path, help="of `write`, which `large` calls: the folder to write")
    parser.add_argument("--size", choices=SIZES, default="wide", help="the model's size; `large` has its own unless tiny")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a prompt; `soak` takes a hundred times as many")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reads", type=int, default=300, help="reads at each depth when the disk is measured")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bf16"), default="float32", help="of the experts in `peers`")
    parser.add_argument("--memory-mb", type=float, default=0.0, help="`peers`: memory limit of each contender with experts on disk, 10^6 bytes; 0 for none")
    parser.add_argument("--memory-factor", type=float, default=0.0, help="`peers`: the limit as a multiple of what the engine needs; 0 for none")
    parser.add_argument("--cache-mb", type=float, default=600.0, help="expert buffers of `large`")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where models are written: a real disk, not a file system in memory")
    options = parser.parse_args()
    if options.part == "write":
        export(RandomModel(ModelConfig(**(OLMOE if options.size != "tiny" else SIZES["tiny"]))), options.out, dtype="bf16", progress=lambda line: print(line, file=sys.stderr))
        return
    torch.set_num_threads(options.threads)
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=options.folder))
    try:
        value, rows = PARTS[options.part](options, folder)
    finally:
        shutil.rmtree(folder)
    table = markdown(rows)
    print(table)
    write(options.json, {"part": options.part, **value}, markdown=table)


if __name__ == "__main__":
    main()
