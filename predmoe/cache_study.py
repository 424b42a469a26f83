"""What 05_cache_simulation measures beyond the reference's table: our models' traces, public traces, published machines, an engine's timings.

Traces are read from files or made; the tables are tidy, one row per replay.
"""
# N tokens, L layers, E experts, K chosen

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from . import locality, paths, results, stats, traces, variables
from .simulator import Cache, Compute, Disk, Fit, Prefetch, count, fit, replay, sweep, uses
from .traces import COLIBRI, PREFILL, Accuracy, Trace, TraceError

MODELS = ("baseline", "joint")
OURS = dict(layers=8, num_experts=16, top_k=2)   # the shape of the cpu profile's models, for traces that stand in for theirs
OUR_REUSE = 0.22                                 # and their reuse from token to token
POLICIES = {
    "LRU": dict(policy="lru"), "FIFO": dict(policy="fifo"), "LFU": dict(policy="lfu"), "LFRU": dict(policy="lfru"),
    "Least-Stale": dict(policy="least-stale"), "half pinned, LRU": dict(policy="lru"), "LRU per layer": dict(policy="lru", scope="layer"),
    "Belady": dict(policy="belady"),
}  # fmt: skip
HALF_PINNED = "half pinned, LRU"


# --- our models ---------------------------------------------------------------------------------------------------------

def model_traces(profile: str, *, tokens: int, accuracies: Mapping[str, Mapping[int, float]], seed: int = 0) -> tuple[dict[str, Trace], str]:
    """The recorded traces of a profile's baseline and joint model, and one sentence that says what they are.

    Where they are not there, two synthetic ones of the same shape stand in, and the sentence says so. `accuracies`: what the
    stand-ins' predictors reach, "MODEL-PREDICTOR" -> horizon -> hit@k.
    """
    files = recordings(profile)
    found = {model: path for model, path in files.items() if path.exists()}
    if len(found) == len(files):
        held = {model: traces.load(path) for model, path in found.items()}
        first = held[MODELS[0]]
        return held, (f"Recorded traces of the {profile} profile's baseline and joint model: {first.num_tokens} tokens each, "
                      f"{first.num_layers} layers of {first.meta.num_experts} experts, top-{first.meta.top_k}; {first.meta.source}.")  # fmt: skip
    missing = ", ".join(path.name for model, path in files.items() if model not in found)
    made = {}
    for model in MODELS:
        predictors = {name.removeprefix(f"{model}-"): Accuracy(recall=dict(by_horizon)) for name, by_horizon in accuracies.items() if name.startswith(model)}
        made[model] = traces.synthetic(tokens=tokens, **OURS, reuse=OUR_REUSE, predictors=predictors, seed=seed)
    return made, (f"The {profile} profile has no {missing}: SYNTHETIC traces stand in for our models ({tokens} tokens each, {OURS['layers']} layers of "
                  f"{OURS['num_experts']} experts, top-{OURS['top_k']}, errors that are near misses).")  # fmt: skip


def trace_file(profile: str, recording: str) -> Path:
    """Where a profile keeps a recording, to be read: a model's name, followed by -generated for its own text."""
    return paths.borrowed(profile, f"traces/{recording}.trace.safetensors")


def recordings(profile: str, text: str = "") -> dict[str, Path]:
    """The `trace_file` of each of MODELS on given text, or with "-generated" on its own; where they are not those of the folder that PREDMOE_OUTPUTS names, that is printed."""
    files = {model: trace_file(profile, f"{model}{text}") for model in MODELS}
    paths.say_borrowed(profile, f"recorded traces of our models{' on their own text' if text else ''}", *files.values())
    return files


def of_size(trace: Trace, expert_bytes: int) -> Trace:
    """The same routing with experts of another size, so that a small model's routing can be replayed on a large one's machine."""
    return dataclasses.replace(trace, meta=dataclasses.replace(trace.meta, expert_bytes=[int(expert_bytes)] * trace.num_layers))


def replay_models(held: Mapping[str, Trace], *, shares: Sequence[float], disk: Disk, compute: Compute, horizon: int, guard: str, warmup: int,
                  progress: bool) -> pd.DataFrame:  # fmt: skip
    """Columns model, source (demand, each predictor, oracle), share (of all experts that fit in the cache), and a replay's figures."""
    parts = []
    for model, trace in held.items():
        keys = trace.num_layers * trace.meta.num_experts
        slots = {max(trace.meta.top_k, round(share * keys)): share for share in shares}
        sources = ["demand", *trace.predictors, "oracle"]
        part = sweep(trace, slots=list(slots), policy=sources, disk=disk, compute=compute, prefetch=Prefetch(horizon=horizon, guard=guard),
                     warmup=warmup, progress=progress)  # fmt: skip
        parts.append(part.assign(model=model, share=part.slots.map(slots)).rename(columns={"policy": "source"}))
    return pd.concat(parts, ignore_index=True)


def say_models(found: pd.DataFrame, share: float) -> str:
    """Speed without prefetch, with the ranking MLP and with the oracle, on each model's own trace, and joint against baseline."""
    at = found[found.share == share].set_index(["model", "source"]).tok_s
    models = list(dict.fromkeys(found.model))
    parts = [f"{model} {at[model, 'demand']:.2f} tok/s without prefetch, {at[model, 'ranking']:.2f} with the ranking MLP, {at[model, 'oracle']:.2f} with the oracle" for model in models]
    first, last = models[0], models[-1]
    ratio = {source: at[last, source] / at[first, source] - 1 for source in ("demand", "ranking")}
    return (f"On our models' traces with {share:.0%} of the experts in memory: {'; '.join(parts)}. The {last} model against the {first}: {ratio['demand']:+z.1%} without prefetch, "
            f"{ratio['ranking']:+z.1%} with it (one trace each, so without an interval).")  # fmt: skip


# --- text that was given, and text that the model wrote ---------------------------------------------------------------------------

GIVEN, OWN = "given", "own"


def own_traces(profile: str) -> dict[str, Trace]:
    """The traces of a profile's baseline and joint model on their own generations; empty unless these and those on given text are all there."""
    if not all(trace_file(profile, f"{model}{text}").exists() for model in MODELS for text in ("", "-generated")):
        return {}
    return {model: traces.load(path) for model, path in recordings(profile, "-generated").items()}


def by_text(given: Mapping[str, Trace], own: Mapping[str, Trace], *, share: float, disk: Disk, compute: Compute, horizon: int, guard: str, m: int = 16) -> pd.DataFrame:
    """Teacher-forced against on-policy routing, prompt by prompt: columns model, text (GIVEN or OWN), prompt (a number), and of the decode tokens alone
    srp and sch over m tokens, reuse, hit_rate (one LRU with `share` of all experts, filled by the prompt), hit@k of each predictor as
    hit_PREDICTOR, tok_s without prefetch, and gain_PREDICTOR over it.

    Taken are the sequences of both traces that begin with the same prompt. Raises TraceError where a model has none.
    """
    rows = []
    for model, trace in own.items():
        theirs, ours = _by_prompt(given[model]), _by_prompt(trace)
        shared = [prompt for prompt in ours if prompt in theirs]
        if not shared:
            raise TraceError(f"no sequence of the {model} model's two traces begins with the same prompt, so there is nothing to compare")
        slots = max(trace.meta.top_k, round(share * trace.num_layers * trace.meta.num_experts))
        for number, prompt in enumerate(shared):
            for text, part in ((GIVEN, theirs[prompt]), (OWN, ours[prompt])):
                line = _of_text(part, slots, disk, compute, horizon, guard, m)
                rows.append({"model": model, "text": text, "prompt": number, "tokens": part.num_tokens - len(prompt)} | line)
    return pd.DataFrame(rows)


def _by_prompt(trace: Trace) -> dict[tuple[int, ...], Trace]:
    """Each sequence as a trace of its own, by the tokens of its prefill."""
    if trace.token_ids is None:
        raise TraceError("the trace holds no token ids, so its prompts cannot be found again")
    cuts = np.flatnonzero(np.diff(trace.sequence[trace.starts[:-1]])) + 1
    parts = [trace.passes(int(first), int(end)) for first, end in zip([0, *cuts], [*cuts, trace.num_passes])]
    return {tuple(part.token_ids[: part.starts[(part.phase == PREFILL).sum()]].tolist()): part for part in parts}


def _of_text(part: Trace, slots: int, disk: Disk, compute: Compute, horizon: int, guard: str, m: int) -> dict[str, float]:
    prefill = int((part.phase == PREFILL).sum())
    decode = part.passes(prefill, part.num_passes)
    run = lambda ahead: replay(part, Cache(slots=slots), disk, compute=compute, prefetch=ahead, warmup=prefill)  # noqa: E731
    demand = run(None)
    line = {"srp": locality.srp(decode, m)[0].f1, "sch": locality.sch(decode, m, scope="layer"), "reuse": locality.reuse(decode), "hit_rate": demand.hit_rate}
    line |= {f"hit_{name}": locality.hit_at_k(decode, name, horizon) for name in decode.predictors} | {"tok_s": demand.tokens_per_s}
    ahead = {name: run(Prefetch(source=name, horizon=horizon, guard=guard)) for name in (*decode.predictors, "oracle")}
    return line | {f"gain_{name}": outcome.tokens_per_s / demand.tokens_per_s - 1 for name, outcome in ahead.items()}


def say_texts(rows: pd.DataFrame, predictor: str = "ranking") -> str:
    """Own against given text, per model and quantity: the mean difference with its interval over the texts, and which of them differ."""
    asked = {"reuse": "reuse", "srp": "SRP", "sch": "SCH", "hit_rate": "cache hits", f"hit_{predictor}": f"hit@k ({predictor})", f"gain_{predictor}": "prefetch gain"}
    parts, apart = [], []
    for model, mine in rows.groupby("model", sort=False):
        by = {text: part.set_index("prompt") for text, part in mine.groupby("text")}
        found = {what: stats.paired(by[OWN][name].to_dict(), by[GIVEN][name].to_dict()).as_dict() for name, what in asked.items()}
        told = [f"{what} {by[GIVEN][name].mean():.1%} on given text, {results.effect_text(found[what], 'points')}" for name, what in asked.items()]
        parts.append(f"{model}: {'; '.join(told)}")
        apart += [f"{what} ({model})" for what, effect in found.items() if effect["ci95"] and (effect["ci95"][0] > 0 or effect["ci95"][1] < 0)]
    none = "No interval excludes zero: so few texts show no difference, which does not mean that there is none."
    verdict = f"Intervals that exclude zero: {', '.join(apart)}." if apart else none
    return f"A model's own continuations against the given ones, {rows.prompt.nunique()} prompts of one model seed, intervals over prompts. {'. '.join(parts)}. {verdict}"


# --- public traces --------------------------------------------------------------------------------------------------------

def public_folder() -> Path | None:
    """Where the public traces lie: $PREDMOE_TRACES, or shared/traces beside the repository; None where there is no such folder."""
    folder = variables.folder("PREDMOE_TRACES") or paths.ROOT.parent / "shared" / "traces"
    return folder if folder.is_dir() else None


def public_traces(folder: Path, *, sequences: int, seed: int = 0) -> dict[str, Trace]:
    """The public traces by model; of gpt-oss-20b's hundreds of sequences, `sequences` drawn with `seed`."""
    fingerprints = folder / "gptoss20b" / "gptoss20b_routes.npz"
    with np.load(fingerprints) as file:
        total = len(file["seq_offsets"]) - 1
    chosen = np.sort(np.random.default_rng(seed).choice(total, min(sequences, total), replace=False))
    return {
        "Qwen3-30B-A3B": traces.read(folder / "bigmoe" / "qwen.route.csv"),
        "OLMoE-1B-7B": traces.read(folder / "olmoe" / "trace_olmoe_299.jsonl", num_experts=64),
        "Granite-3.0-1b-a400m": traces.read(folder / "granite" / "moe_expert_trace.json"),
        "gpt-oss-20b": traces.read(fingerprints, num_experts=32, sequences=chosen),
    }


def hit_curves(held: Mapping[str, Trace], shares: Sequence[float], *, policies: Iterable[str] = POLICIES, progress: bool = True) -> pd.DataFrame:
    """Columns model, policy, share, slots, hit_rate (decode passes), hit_all (prefill too), by cache size (share of all experts, in equal slots).

    Belady sees the future and is the bound of all that start cold. "half pinned" does not: half of its slots hold, from before the first
    token, the experts most used in the first half of the trace. Sizes at which a policy cannot hold one top-k set are left out.
    """
    jobs = [(model, policy, share) for model in held for policy in policies for share in shares]
    rows = []
    for model, policy, share in tqdm(jobs, unit="replay", disable=not progress):
        trace, settings = held[model], POLICIES[policy]
        groups = trace.num_layers if settings.get("scope") == "layer" else 1
        slots = int(share * trace.num_layers * trace.meta.num_experts) // groups
        pinned = slots // 2 if policy == HALF_PINNED else 0
        if slots - pinned < trace.meta.top_k:
            continue
        usage = uses(trace.passes(0, max(1, trace.num_passes // 2))) if pinned else None
        counted = count(trace, Cache(slots=slots, pinned=pinned, **settings), usage=usage)
        rows.append({"model": model, "policy": policy, "share": share, "slots": slots * groups, "hit_rate": counted.decode.hit_rate, "hit_all": counted.hit_rate})
    return pd.DataFrame(rows)


def above_belady(curves: pd.DataFrame) -> pd.DataFrame:
    """The rows in which a policy that starts cold hits more than Belady over the whole trace, prefill included: there must be none."""
    bound = curves[curves.policy == "Belady"].set_index(["model", "share"]).hit_all.rename("bound")
    return curves[curves.policy != HALF_PINNED].join(bound, on=["model", "share"]).query("hit_all > bound + 1e-12")


def locality_table(held: Mapping[str, Trace], m: int = 16) -> pd.DataFrame:
    """Per model: SRP and SCH over segments of m tokens, reuse, switch rate, and hit rates of a cache of twice a token's experts."""
    return pd.DataFrame([{"model": model} | locality.locality(trace, m) for model, trace in held.items()])


def best_policy(curves: pd.DataFrame) -> pd.DataFrame:
    """Per model and share: the best policy that starts cold and does not see the future, its hit rate, plain LRU's, and Belady's."""
    wide = curves.pivot_table(index=["model", "share"], columns="policy", values="hit_rate", sort=False)
    real = wide.drop(columns=["Belady", HALF_PINNED], errors="ignore").fillna(-1.0)
    return pd.DataFrame({"best": real.idxmax(axis=1), "best_hit": real.max(axis=1), "lru_hit": wide["LRU"], "belady_hit": wide["Belady"]}).reset_index()


def say_policies(best: pd.DataFrame) -> str:
    """Per model, at the cache size nearest to a quarter of the experts: LRU, the best policy that does not see the future, and the bound."""
    share = min(best.share.unique(), key=lambda value: abs(value - 0.25))
    parts = [f"{row.model} LRU {row.lru_hit:.1%}, best {row.best} {row.best_hit:.1%}, Belady {row.belady_hit:.1%}" for row in best[best.share == share].itertuples()]
    gap = best.assign(gap=best.belady_hit - best.best_hit).groupby("model", sort=False).gap.mean()
    return (f"With {share:.0%} of the experts in memory: {'; '.join(parts)}. Between the best policy and Belady lie on average "
            f"{', '.join(f'{100 * gap[model]:.0f} points ({model})' for model in gap.index)}.")  # fmt: skip


# --- an engine's own timings -----------------------------------------------------------------------------------------------

def engine_timings(path: Path) -> pd.DataFrame:
    """The engine's file of timings (BigMoeOnEdge), one row per decode token: step, wall_ms, io_ms, compute_ms, stall_ms, read_bytes."""
    frame = pd.read_csv(path, comment="#")
    return frame[["step", "wall_ms", "io_ms", "compute_ms", "stall_ms", "read_bytes"]]


def fit_engine(folder: Path) -> tuple[Fit, pd.DataFrame]:
    """The machine fitted to the first half of the Qwen3-30B-A3B run, and per token: measured_ms, predicted_ms, compute_ms, slow.

    `slow` marks tokens in which the engine's processor took over 1.5 times its usual time, which no routing tells.
    """
    trace = traces.read(folder / "bigmoe" / "qwen.route.csv")
    timings = engine_timings(folder / "bigmoe" / "qwen.metrics")
    found = fit(trace, timings.wall_ms.to_numpy(), Cache(bytes=4000 * 2**20), compute=Compute(attention_ms=1.0, expert_ms=0.1))
    slow = timings.compute_ms > 1.5 * timings.compute_ms.median()
    return found, pd.DataFrame({"token": timings.step, "half": np.where(np.arange(len(timings)) < found.fitted_on, "fitted", "predicted"),
                                "measured_ms": found.measured_ms, "predicted_ms": found.predicted_ms, "compute_ms": timings.compute_ms, "slow": slow})  # fmt: skip


def say_fit(found: Fit, tokens: pd.DataFrame) -> str:
    """The fitted machine and its errors on the half that it has not seen."""
    calm = tokens[(tokens.half == "predicted") & ~tokens.slow]
    seen = int((tokens.half == "predicted").sum())
    return (f"Fitted on {found.fitted_on} tokens: {found.disk.table[0]:.2f} GB/s, {found.disk.latency_ms:.2f} ms per read, {found.compute.attention_ms:.2f} ms per layer "
            f"beside {found.compute.expert_ms:g} ms per expert. On the {seen} tokens after them the median absolute error is {found.median_error:.1%} and the total "
            f"is {found.total_error:+z.1%} off; without the {seen - len(calm)} tokens in which the engine's processor itself was slow (over 1.5 times its median), the "
            f"total is {calm.predicted_ms.sum() / calm.measured_ms.sum() - 1:+z.1%} off.")  # fmt: skip


# --- published machines ------------------------------------------------------------------------------------------------------

def _colibri_trace(tokens: int, reuse: float, seed: int) -> Trace:
    router = Accuracy(recall={1: float(np.mean(results.field()["recall"]["next-router"]))})
    return traces.synthetic(tokens=tokens, **COLIBRI, reuse=reuse, predictors={"next-router": router}, seed=seed)


def colibri(tokens: int, warmup: int, seed: int = 0, progress: bool = True) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Colibri's published points beside ours: (machines, prefetch).

    What is published as a range is simulated at both ends: the reuse from token to token, and the other work per layer. `hit_low`..`hit_high`
    and `tok_s_low`..`tok_s_high` are therefore ranges over what is unknown, not error bars. The prefetch table's machine is
    not published; it is replayed at the disk of the 64 GB machine and the middle of each range, and only its changes compare.
    """
    known = results.field()
    ends = {reuse: _colibri_trace(tokens, reuse, seed) for reuse in known["recall"]["previous_token"]}
    rows = []
    for point in tqdm(known["machines"], unit="machine", disable=not progress):
        cache = Cache(slots=point["slots"], scope="layer", pinned=point["pinned"], streaming=True)
        found = [replay(trace, cache, Disk(gb_per_s=point["gb_per_s"]), compute=Compute(attention_ms=work, expert_ms=0.0), warmup=warmup)
                 for trace in ends.values() for work in known["layer_ms"]]  # fmt: skip
        hits, speeds = [o.hit_rate for o in found], [o.tokens_per_s for o in found]
        rows.append({"machine": point["machine"], "gb_per_s": point["gb_per_s"], "slots": point["slots"], "pinned": point["pinned"],
                     "hit_published": float(np.mean(point["hit"])), "hit_low": min(hits), "hit_high": max(hits),
                     "tok_s_published": point["tok_s"], "tok_s_low": min(speeds), "tok_s_high": max(speeds)})  # fmt: skip
    machines = pd.DataFrame(rows)
    cold = COLIBRI["layers"] * COLIBRI["top_k"] * known["expert_bytes"] / 1e9
    machines["implied_gb_per_s"] = (1 - machines.hit_published) * cold * machines.tok_s_published
    for name in ("hit", "tok_s"):
        machines[f"{name}_verdict"] = [_fits(*values) for values in zip(machines[f"{name}_published"], machines[f"{name}_low"], machines[f"{name}_high"])]
    return machines, _colibri_prefetch(tokens, warmup, seed)


def _colibri_prefetch(tokens: int, warmup: int, seed: int) -> pd.DataFrame:
    known = results.field()
    trace = _colibri_trace(tokens, float(np.mean(known["recall"]["previous_token"])), seed)
    compute = Compute(attention_ms=float(np.mean(known["layer_ms"])), expert_ms=0.0)
    rows = []
    for point in known["prefetch"]:
        ahead = Prefetch(source="next-router", guard=point["guard"]) if point["guard"] else None
        outcome = replay(trace, Cache(slots=known["prefetch_slots"], scope="layer"), Disk(gb_per_s=6.44), compute=compute, prefetch=ahead, warmup=warmup)
        rows.append({"prefetch": point["prefetch"], "hit_published": np.mean(point["hit"]), "hit_here": 1 - outcome.hits["missing"] / outcome.accesses,
                     "mb_published": np.mean(point["mb_per_token"]), "mb_here": outcome.read_bytes / outcome.tokens / 1e6,
                     "wait_published": np.mean(point["wait_s"]), "wait_here": outcome.stall_ms / outcome.tokens / 1e3})  # fmt: skip
    frame = pd.DataFrame(rows)
    for name in ("mb", "wait"):
        for whose in ("published", "here"):
            frame[f"{name}_change_{whose}"] = frame[f"{name}_{whose}"] / frame[f"{name}_{whose}"].iloc[0] - 1
    return frame


def say_machines(machines: pd.DataFrame) -> str:
    """How many published points lie inside the simulated range, and which do not."""
    parts = []
    for name, what in (("hit", "hit rates"), ("tok_s", "speeds")):
        verdicts = machines[f"{name}_verdict"]
        off = "; ".join(f"{machine}: {verdict}" for machine, verdict in zip(machines.machine, verdicts) if verdict != "inside")
        parts.append(f"{int((verdicts == 'inside').sum())} of {len(machines)} published {what} lie inside the simulated range" + (f" ({off})" if off else ""))
    implied = machines.implied_gb_per_s / machines.gb_per_s
    return (f"Of Colibri's machines {', and '.join(parts)}. Whatever the cache, the published hits and speeds together mean that the machines read at {implied.min():.0%} to "
            f"{implied.max():.0%} of their disk's stated bandwidth; the simulator lets them read at all of it.")  # fmt: skip


def say_prefetch(guarded: pd.DataFrame) -> str:
    """Direction and size of what prefetching changes, published and here."""
    parts = [f"{row.prefetch}: bytes {row.mb_change_published:+z.0%} published, {row.mb_change_here:+z.0%} here; wait {row.wait_change_published:+z.0%} and {row.wait_change_here:+z.0%}"
             for row in guarded[1:].itertuples()]  # fmt: skip
    first = guarded.iloc[0]
    return f"Colibri's prefetch, against none (hits {first.hit_published:.0%} published, {first.hit_here:.0%} here): {'. '.join(parts)}."


def _fits(published: float, low: float, high: float) -> str:
    """Where a published value lies against a simulated range, and how far off."""
    if low <= published <= high:
        return "inside"
    if published > high:
        return f"published is {published / high:.2f} times the highest simulated"
    return f"published is {published / low:.2f} times the lowest simulated"
