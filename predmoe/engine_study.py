"""What 11_engine measures: trained models exported and run under several caches and prefetches, prompt by prompt in turns, and what the simulator
says of the same cells. Tables are tidy, one row per cell and prompt."""
# K chosen experts

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from . import paths, results, runs, stats
from .config import PosthocConfig, RunConfig
from .data import prepare
from .engine import Engine, export, stored_model
from .engine.layout import load_manifest
from .engine.machine import ComputeGauge, DiskGauge, ReadingGauge
from .evaluation import evaluate
from .checkpoint import load_checkpoint
from .model import MoEModel
from .recording import choose_windows
from .simulator import Cache, Compute, Disk, Prefetch, replay
from .simulator import diskqueue as dq
from .traces.schema import Trace

DEMAND, ORACLE = "demand", "oracle"
FAR = "far_"   # before a source: see Generation
QUIET = dict(announce=lambda line: None)   # the mode in force is in the results


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What every cell does: `new_tokens` after each prompt, drawn at `temperature` with `seed`; prefetch settings; `lanes` reads at a time.

    A source guesses `horizon` layers ahead. A far one guesses at every horizon of `far`; the far oracle for every layer up to one token ahead, and
    what its cache evicts is chosen by the future as well (Belady): it shows what no predictor can exceed.
    """

    new_tokens: int
    horizon: int
    far: tuple[int, ...] = ()
    budget: int
    lanes: int
    temperature: float = 1.0
    seed: int = 0

    @property
    def how(self) -> dict:
        return {"max_new_tokens": self.new_tokens, "temperature": self.temperature, "seed": self.seed}

    def prefetch(self, source: str, layers: int) -> Prefetch | None:
        """Of a model with so many layers."""
        name, far = source.removeprefix(FAR), source.startswith(FAR)
        if name == ORACLE:
            return Prefetch(source=ORACLE, horizon=tuple(range(1, layers + 1)) if far else self.horizon, cross_token=far)
        return None if name == DEMAND else Prefetch(source=name, horizon=self.far if far else self.horizon, budget=self.budget)

    def cache(self, source: str, slots: int) -> Cache:
        return Cache(slots=slots, policy="belady" if source == FAR + ORACLE else "lru")

    def recorded(self, sources: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Predictor -> the horizons that a trace needs of it, so that these sources can be simulated."""
        found: dict[str, set[int]] = {}
        for source in sources:
            name = source.removeprefix(FAR)
            if name not in (DEMAND, ORACLE):
                found.setdefault(name, set()).update(self.far if source.startswith(FAR) else (self.horizon,))
        return {name: tuple(sorted(horizons)) for name, horizons in found.items()}


# --- models and prompts -------------------------------------------------------------------------------------------------------

def workplace(profile: str) -> tempfile.TemporaryDirectory:
    """A folder for exports beside the profile's outputs (a real disk, where /tmp may be memory), removed at the end."""
    place = paths.outputs(profile)
    place.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix=".exports-", dir=place)


def exported(pairs: Sequence[tuple[str, RunConfig]], fit: PosthocConfig, *, profile: str, dtype: str, folder: Path) -> dict[tuple[str, int], Path]:
    """(arm, seed) -> its export, with both predictors; a model that the store lacks is trained, its predictors are fitted."""
    found = {}
    for arm, config in pairs:
        run = runs.get_or_fit(config, fit, store=runs.default_store(profile))
        name = f"{arm}-{config.train.seed}"
        heads = {kind: run.path / "checkpoint" / f"{runs.posthoc_name(fit)}_{kind}.safetensors" for kind in ("linear", "ranking")}
        export(run.path / "checkpoint", folder / name, dtype=dtype, name=name, heads=heads)
        found[arm, config.train.seed] = folder / name
    return found


def model_of(config: RunConfig, profile: str) -> MoEModel:
    """The resident model of a finished run."""
    return load_checkpoint(runs.default_store(profile) / config.hash / "checkpoint", config.model).requires_grad_(False)


def held_out_prompts(config: RunConfig, *, per_domain: int, tokens: int) -> tuple[list[list[int]], str]:
    """The first `tokens` tokens of held-out windows of every domain, and which are which in words."""
    text = prepare(config.data)
    windows, domains = choose_windows(text.heldout(config.model.context), text.domains, per_domain, tokens)
    return windows.tolist(), domains


def calibration_prompts(config: RunConfig, *, count: int, tokens: int) -> list[list[int]]:
    """Tokens that are no prompt of the race: the beginnings of windows spread over the dev set."""
    windows = prepare(config.data).dev(config.model.context).tokens
    return windows[np.linspace(0, len(windows) - 1, min(count, len(windows))).astype(int), :tokens].tolist()


def rounding(config: RunConfig, profile: str, dtypes: Sequence[str]) -> pd.DataFrame:
    """Held-out loss of a finished run's model as it was trained and as each dtype stores it: dtype, val_loss, change (share of the first)."""
    text = prepare(config.data)
    rows = []
    for dtype in ("as trained", *dtypes):
        model = model_of(config, profile) if dtype == "as trained" else stored_model(model_of(config, profile), dtype)
        rows.append({"dtype": dtype, "val_loss": evaluate(model, text.heldout(config.model.context), text.domains, (), {})["val_loss"]})
    frame = pd.DataFrame(rows)
    return frame.assign(change=frame.val_loss / frame.val_loss[0] - 1)


# --- exactness ----------------------------------------------------------------------------------------------------------------

@torch.no_grad()
def resident_greedy(model: MoEModel, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy tokens and each step's logits (B, V) of the whole model, from a full forward pass for each token; prompts of one length."""
    tokens, logits = torch.tensor(prompts), []
    for _ in range(new_tokens):
        logits.append(model(tokens).logits_BTV[:, -1])
        tokens = torch.cat([tokens, logits[-1].argmax(1, keepdim=True)], dim=1)
    return tokens[:, len(prompts[0]) :].tolist(), logits


def exactness(model: MoEModel, folder: Path, prompts: Sequence[Sequence[int]], g: Generation, *, policies: Sequence[str], shares: Sequence[float],
              sources: Sequence[str], horizons: Sequence[int]) -> pd.DataFrame:  # fmt: skip
    """One row per cache and prefetch: tokens compared with the resident model's greedy ones, how many are equal, largest difference of a logit.

    Every policy without prefetch at every share and at one top-k set; every source and horizon under LRU at one top-k set and the first share, and the
    far ones as they are.
    """
    expected, logits = resident_greedy(model, prompts, g.new_tokens)
    config = model.config
    keys, K = config.num_layers * config.num_experts, config.top_k
    sizes = [K, *(max(K, round(share * keys)) for share in shares)]
    with Engine(folder, cache=Cache(slots=keys), record={}, **QUIET) as engine:
        engine.generate(prompts, max_new_tokens=g.new_tokens)
        future = engine.trace()
    cells = [(policy, slots, DEMAND, 0) for policy in policies for slots in sizes]
    cells += [("lru", slots, source, h) for source in sources if not source.startswith(FAR) for h in horizons for slots in sizes[:2]]
    cells += [(g.cache(source, slots).policy, slots, source, g.horizon) for source in sources if source.startswith(FAR) for slots in sizes[:2]]
    rows = []
    for policy, slots, source, h in cells:
        ahead = dataclasses.replace(g, horizon=h).prefetch(source, config.num_layers)
        seen: list[torch.Tensor] = []
        with Engine(folder, cache=Cache(slots=slots, policy=policy), prefetch=ahead, lanes=g.lanes, future=future, **QUIET) as engine:
            got = engine.generate(prompts, max_new_tokens=g.new_tokens, on_logits=seen.append)
        equal = sum(a == b for ours, theirs in zip(got, expected) for a, b in zip(ours, theirs))
        rows.append({"policy": policy, "slots": slots, "source": source, "horizon": h, "tokens": len(prompts) * g.new_tokens, "equal": equal,
                     "logit_difference": max(float((a - b).abs().max()) for a, b in zip(seen, logits))})  # fmt: skip
    return pd.DataFrame(rows)


# --- the race -----------------------------------------------------------------------------------------------------------------

def record(folder: Path, prompts: Sequence[Sequence[int]], g: Generation, *, sources: Sequence[str], source_text: str) -> Trace:
    """The trace of what every cell of a model will do, with the predictions of `sources`."""
    with Engine(folder, cache=Cache(slots=10**9), record=g.recorded(sources), **QUIET) as engine:
        for prompt in prompts:
            engine.generate([prompt], **g.how)
        return engine.trace(source=source_text, notes=f"temperature {g.temperature:g}, seed {g.seed}")


def race(folders: Mapping[tuple[str, int], Path], futures: Mapping[tuple[str, int], Trace], prompts: Sequence[Sequence[int]], g: Generation, *,
         sources: Mapping[str, Sequence[str]], shares: Sequence[float], between: Callable[[], None] = lambda: None) -> pd.DataFrame:  # fmt: skip
    """Every cell goes on with every prompt; the cells take turns prompt by prompt, each time in another order, so that a disk's drift falls on all.

    A cell is a model, a source (`sources`: arm -> its sources) and a share of the experts that fit in the cache; it keeps its cache from prompt to
    prompt; `between` follows each cell's turn. Columns: arm, seed, source, share, slots, prompt, mode (of the reads), tokens (decoded), ms (of them), ttft_ms, p50_ms, p99_ms, stall_ms, accesses, hits,
    read_bytes (of all passes), decode_bytes, and the ledger's figures at the end of the prompt.
    """
    rows = []
    with ExitStack() as stack:
        cells = {}
        for (arm, seed), folder in folders.items():
            future = futures[arm, seed]
            keys, K = future.num_layers * future.meta.num_experts, future.meta.top_k
            for source in sources[arm]:
                for share in shares:
                    slots = max(K, round(share * keys))
                    engine = Engine(folder, cache=g.cache(source, slots), prefetch=g.prefetch(source, future.num_layers), lanes=g.lanes, future=future if source.endswith(ORACLE) else None, **QUIET)
                    cells[arm, seed, source, share, slots] = stack.enter_context(engine)
        for number, prompt in enumerate(prompts):
            order = np.random.default_rng(number).permutation(len(cells))
            for index in order:
                cell, engine = list(cells.items())[index]
                rows.append(dict(zip(("arm", "seed", "source", "share", "slots"), cell)) | {"prompt": number} | _one(engine, prompt, g))
                between()
    return pd.DataFrame(rows).sort_values(["arm", "seed", "share", "source", "prompt"], ignore_index=True)


def _one(engine: Engine, prompt: Sequence[int], g: Generation) -> dict:
    """Generate and say what changed."""
    before, done = engine.experts.counts(), len(engine.clock.decode_ms)
    prefilled: list[np.ndarray] = []
    engine.generate([prompt], **g.how, on_tokens=lambda new: prefilled.append(engine.experts.counts()) if not prefilled else None)
    engine.experts.quiet()
    read = lambda counts: int(counts[dq.DEMAND_BYTES] + counts[dq.GUESS_BYTES])  # noqa: E731
    counts, ms = engine.experts.counts() - before, np.array(engine.clock.decode_ms[done:])
    ledger = engine.experts.ledger()
    ledger.check()
    return {
        "mode": f"{engine.file.mode}, by {engine.experts.reads_by}", "tokens": len(ms), "ms": float(ms.sum()), "ttft_ms": engine.clock.first_token_ms[-1], "p50_ms": float(np.percentile(ms, 50)),
        "p99_ms": float(np.percentile(ms, 99)), "stall_ms": float(np.sum(engine.clock.stall_ms[done:])), "accesses": int(counts[dq.ACCESSES]),
        "hits": int(counts[dq.RESIDENT]), "read_bytes": read(counts), "decode_bytes": read(counts) - read(prefilled[0] - before),
        **{name: getattr(ledger, name) for name in ("issued", "useful", "late", "wasted", "cancelled")},
    }  # fmt: skip


def cells(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per cell over its prompts: tok_s, ms_per_token, stall_ms, hit_rate, hits, bytes, ttft_ms, p99_ms, ledger."""
    keys = ["arm", "seed", "source", "share", "slots"]
    found = []
    for cell, part in rows.groupby(keys, sort=False):
        last = part.loc[part.prompt.idxmax()]
        tokens, ms = part.tokens.sum(), part.ms.sum()
        found.append(dict(zip(keys, cell)) | {
            "tok_s": 1000 * tokens / ms, "ms_per_token": ms / tokens, "stall_ms": part.stall_ms.sum() / tokens, "hit_rate": part.hits.sum() / part.accesses.sum(),
            "hits": int(part.hits.sum()), "read_bytes": int(part.read_bytes.sum()),
            "decode_bytes": int(part.decode_bytes.sum()), "tokens": int(tokens), "ttft_ms": part.ttft_ms.mean(), "p99_ms": part.p99_ms.mean(),
            **{name: int(last[name]) for name in ("issued", "useful", "late", "wasted", "cancelled")}})  # fmt: skip
    return pd.DataFrame(found)


# --- the simulator beside it ---------------------------------------------------------------------------------------------------

class Gauge:
    """The machine, measured in turns with the race: the disk, the processor with each of `sources`, and what reads cost it, with a cache of one top-k set.

    All on one export, since models of one shape take the same time. `prompts`: others than those whose times are to be foretold. `reads`: of the disk in a
    turn, at each number of reads under way.
    """

    def __init__(self, folder: Path, prompts: Sequence[Sequence[int]], g: Generation, *, sources: Iterable[str], reads: int):
        self._disk, self._reading = DiskGauge(folder, lanes=g.lanes), ReadingGauge(folder, prompts, lanes=g.lanes, **g.how)
        layers = load_manifest(folder).model.num_layers
        asked = {source: None if source.endswith(ORACLE) else g.prefetch(source, layers) for source in (DEMAND, *sources)}   # the oracle's predictor costs nothing
        self._computes = {ahead: ComputeGauge(folder, prompts, prefetch=ahead, **g.how) for ahead in dict.fromkeys(asked.values())}
        self._asked = asked
        self._disk.turn(1)   # compiles
        self._disk.reset()
        self._parts = itertools.cycle([lambda: self._disk.turn(reads), self._reading.turn, *(gauge.turn for gauge in self._computes.values())])
        for _ in range(2 + len(self._computes)):   # each at least once
            self.turn()

    def turn(self) -> None:
        """One of the measurements, each time the next."""
        next(self._parts)()

    def machine(self) -> Machine:
        """What has been measured. Ends the gauge."""
        for gauge in (self._disk, self._reading, *self._computes.values()):
            gauge.close()
        found = {source: self._computes[ahead].compute() for source, ahead in self._asked.items()}
        issue, fresh = self._reading.costs(found[DEMAND][1])
        times = {source: (dataclasses.replace(compute, fresh_ms=fresh), ms) for source, (compute, ms) in found.items()}
        table = self._disk.table()
        return Machine(disk=dataclasses.replace(self._disk.disk(), issue_ms=issue), times=times, table=table, gb_per_s=float(table.gb_per_s.max()))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the simulator is told. `times`: source -> the processor's times and ms per token with every expert in memory; `table`: the disk's
    measurements; `gb_per_s`: the best rate at which it gives whole experts."""

    disk: Disk
    times: dict[str, tuple[Compute, float]]
    table: pd.DataFrame
    gb_per_s: float


def predicted(table: pd.DataFrame, futures: Mapping[tuple[str, int], Trace], machine: Machine, g: Generation) -> pd.DataFrame:
    """`cells` with the simulator's figure for each cell beside the measured one (`sim_`), relative errors (`error_`), and the bound.

    bound_ms: the larger of computing alone and the bytes that decoding read at the best rate at which the disk gives whole experts; over_bound: measured time over it.
    """
    rows = []
    for row in table.to_dict("records"):
        key = row["arm"], row["seed"]
        compute, alone = machine.times[row["source"]]
        outcome = replay(futures[key], g.cache(row["source"], int(row["slots"])), machine.disk, compute=compute, prefetch=g.prefetch(row["source"], futures[key].num_layers))
        resident = outcome.hits["resident"]
        bound = max(alone, row["decode_bytes"] / row["tokens"] / machine.gb_per_s / 1e6)
        rows.append(row | {
            "sim_tok_s": outcome.tokens_per_s, "sim_read_bytes": outcome.read_bytes, "sim_hits": resident, "sim_stall_ms": outcome.stall_ms / row["tokens"],
            "error_tok_s": outcome.tokens_per_s / row["tok_s"] - 1, "error_bytes": _share(outcome.read_bytes, row["read_bytes"]), "error_hits": _share(resident, row["hits"]),
            "compute_ms": alone, "bound_ms": bound, "over_bound": row["ms_per_token"] / bound})  # fmt: skip
    return pd.DataFrame(rows)


def _share(simulated: float, measured: float) -> float:
    return 0.0 if simulated == measured else simulated / measured - 1 if measured else np.inf


# --- effects and sentences -----------------------------------------------------------------------------------------------------

def arm_records(table: pd.DataFrame, share: float) -> list[dict]:
    """The cells at one cache share as results.json holds arms, named MODEL-SOURCE."""
    columns = ("tok_s", "stall_ms", "hit_rate", "ttft_ms", "p99_ms")
    return [{"arm": f"{row['arm']}-{row['source']}", "seed": int(row["seed"])} | {name: float(row[name]) for name in columns}
            for row in table[table.share == share].to_dict("records")]  # fmt: skip


def effects(rows: pd.DataFrame, share: float, pairs: Iterable[tuple[tuple[str, str], tuple[str, str]]]) -> list[dict]:
    """Change of tok/s, paired by prompt within each model seed: ((arm, source), (arm, source) it is compared with).

    The unit of replication is the prompt; model seeds are listed one by one, since prompts say nothing about another model.
    """
    found = []
    at = rows[rows.share == share].assign(tok_s=lambda part: 1000 * part.tokens / part.ms)
    for mine, theirs in pairs:
        for seed in sorted(at.seed.unique()):
            values = [at[(at.arm == arm) & (at.source == source) & (at.seed == seed)].set_index("prompt").tok_s.to_dict() for arm, source in (mine, theirs)]
            name = f"{'-'.join(mine)} - {'-'.join(theirs)}, tok_s, seed {seed}"
            effect = stats.paired(*values, relative=True, name=name, unit="share")
            found.append(effect.as_dict() | {"treatment": "-".join(mine), "control": "-".join(theirs), "metric": "tok_s", "family": "over prompts, within one model seed", "model_seed": int(seed)})
    return found


def say_exactness(table: pd.DataFrame) -> str:
    worst = table.logit_difference.max()
    return (f"Greedy tokens equal the resident model's in {int((table.equal == table.tokens).sum())} of {len(table)} settings of policy, cache and prefetch ({table.tokens.min():,} tokens each); "
            f"the largest difference of a logit is {worst:.1e}.")  # fmt: skip


def disk_table(table: pd.DataFrame) -> pd.DataFrame:
    """`DiskGauge.table` for reading."""
    return table.rename(columns={"depth": "reads under way", "bytes": "bytes of each", "ms": "ms until the last has come", "gb_per_s": "GB/s, one following another"})


def say_machine(machine: Machine) -> list[str]:
    """The disk and the processor as the simulator is told of them, one sentence for each thing that was measured."""
    disk, experts = machine.disk, machine.table[machine.table.bytes == machine.table.bytes.max()]
    alone, best = experts[experts.depth == 1].iloc[0], machine.table.loc[machine.table.gb_per_s.idxmax()]
    times = ", ".join(f"{'none' if source == DEMAND else source} {ms:.2f}" for source, (_, ms) in machine.times.items() if not source.endswith(ORACLE))
    return [
        f"The disk: {disk.latency_ms:.3f} ms latency; experts of {alone.bytes / 1000:.0f} kB come at {alone.gb_per_s:.2f} GB/s with one read under way, "
        f"and at {best.gb_per_s:.2f} GB/s at best, with {best.depth:.0f}.",
        f"What reads cost the processor: {disk.issue_ms:.3f} ms at a router to hand them over, and {machine.times[DEMAND][0].fresh_ms:.3f} ms more to compute with "
        "an expert that has just been read than with one that has not.",
        f"Computing alone, with every expert in memory, takes per token, with each predictor at work, in ms: {times}.",
    ]  # fmt: skip


def say_effect(effect: Mapping) -> str:
    """One effect over prompts as a sentence."""
    low, high = effect["ci95"] or (0.0, 0.0)
    verb = "faster than" if low > 0 else "slower than" if high < 0 else "not measurably faster or slower than"
    mean, interval = results.effect_parts(effect, "percent")
    return (f"{effect['treatment']} is {verb} {effect['control']} (model seed {effect['model_seed']}): {mean}% tok/s {interval or '(no interval)'} over "
            f"{effect['n']} prompt{'s' if effect['n'] > 1 else ''}, {min(effect['per_seed']):+z.0%} to {max(effect['per_seed']):+z.0%}.")  # fmt: skip


def say_prediction(table: pd.DataFrame) -> list[str]:
    """How far the simulator is off, without and with prefetch, where it is worst, and how much of that is the machine's own drift."""
    sentences, demand, ahead = [], table[table.source == DEMAND], table[table.source != DEMAND]
    for name, part in (("without prefetch", demand), ("with prefetch", ahead)):
        if len(part):
            worst = part.loc[part.error_tok_s.abs().idxmax()]
            sentences.append(
                f"Simulated against measured tok/s {name}, {len(part)} cells: median error {part.error_tok_s.abs().median():.1%}, worst {worst.error_tok_s:+z.1%} "
                f"({worst.arm}, {worst.source}, {worst.share:.0%} of the experts); "
                f"bytes are off by {part.error_bytes.abs().max():.2%} at most, hits by {part.error_hits.abs().max():.2%}.")  # fmt: skip
    if len(demand) > 1 and len(ahead) and not demand.error_bytes.any() and not demand.error_hits.any():
        low, high = demand.error_tok_s.min(), demand.error_tok_s.max()
        sentences.append(f"Without prefetch the simulator counts what the engine counts, and its speed is off by {low:+z.1%} to {high:+z.1%} all the same: so far do disk and processor stray from what was "
                         f"measured in turns with them. {int(ahead.error_tok_s.between(low, high).sum())} of {len(ahead)} cells with prefetch lie within that range.")  # fmt: skip
    off = ahead.error_bytes.abs().groupby(ahead.source, sort=False).max().sort_values()
    if len(off) > 1 and off.iloc[-1]:
        sentences.append(f"Bytes are off most for {off.index[-1]}; for no other source by more than {off.iloc[-2]:.2%}.")
    return sentences


def say_roofline(table: pd.DataFrame) -> str:
    parts = [f"{source} {part.over_bound.min():.2f} to {part.over_bound.max():.2f}" for source, part in table.groupby("source", sort=False)]
    bound = "the larger of computing alone and the bytes at the disk's best bandwidth"
    below = int((table.over_bound < 1).sum())
    drift = f" {below} of {len(table)} cells lie below 1: while they ran, the machine was faster than when it was measured." if below else ""
    return f"Time per token over its bound, {bound}: {'; '.join(parts)} (least and most over models and caches).{drift}"
