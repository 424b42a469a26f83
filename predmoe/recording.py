"""Traces of the run store's models: recorded on held-out text or on their own generations, and kept as one small file each.

A trace's `meta.notes` names the run, the predictor fit and the recording that it holds, so a file is taken only for what it is.
"""
# B sequences of T tokens, P prompt tokens

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from . import paths, runs, strict, traces
from .config import ConfigError, PosthocConfig, RunConfig, stable_hash
from .data import EvalSet, prepare
from .evaluation import Heads, NextRouter, Scorer
from .checkpoint import load_checkpoint
from .files import read_json
from .model import MoEModel
from .posthoc import load_heads, lookups, training_activations
from .traces.record import Origin, generate, record
from .train import check_device, load_predictor

HELDOUT, GENERATED = "heldout", "generated"
PREDICTORS = ("linear", "ranking", "next_router", "cotrained", "token_id", "static")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What is recorded. `kind` "heldout": the first `tokens` tokens of `per_domain` held-out windows of each domain, given to
    the model; "generated": the same windows' first `prompt` tokens, gone on with by the model itself up to `tokens`, drawn at
    `temperature` with `seed`. `tokens` is cut to the model's context. The first `prompt` tokens of a sequence are its prefill pass.

    `predictors`: of PREDICTORS; "token_id" and "static" are counted anew on the training text, which takes a while. `guesses`:
    experts named by each (None: 2k + 2). The defaults make a trace of the cpu profile's models that is below 2 MB.
    """

    kind: str = HELDOUT
    per_domain: int = 2
    tokens: int = 96
    prompt: int = 32
    temperature: float = 1.0
    seed: int = 0
    guesses: int | None = None
    predictors: tuple[str, ...] = ("linear", "ranking", "next_router")

    def __post_init__(self):
        if self.kind not in (HELDOUT, GENERATED):
            raise ConfigError(f"kind={self.kind!r} is unknown; choose {HELDOUT} or {GENERATED}")
        if self.per_domain < 1 or not 1 <= self.prompt < self.tokens:
            raise ConfigError(f"per_domain={self.per_domain} must be at least 1, and prompt={self.prompt} lie in 1..{self.tokens - 1}, below tokens")
        strict.temperature("temperature", self.temperature)
        unknown = sorted(set(self.predictors) - set(PREDICTORS))
        if unknown or len(set(self.predictors)) != len(self.predictors):
            raise ConfigError(f"predictors={self.predictors} must be different ones of {', '.join(PREDICTORS)}")


def trace_path(profile: str, arm: str, recording: Recording = Recording()) -> Path:
    """Where a profile keeps the trace of an arm: outputs/PROFILE/traces/ARM.trace.safetensors, generations in a file beside it."""
    suffix = "" if recording.kind == HELDOUT else f"-{recording.kind}"
    return paths.outputs(profile) / "traces" / f"{arm}{suffix}.trace.safetensors"


def get_or_record(config: RunConfig, posthoc: PosthocConfig, recording: Recording, *, path: Path, store: Path, report=print) -> traces.Trace:
    """The trace in `path` where it is the one asked for; else it is recorded, the run trained and its heads fitted where need be, and saved there."""
    path = Path(path)
    if path.exists():
        trace = traces.load(path)
        if trace.meta.notes == identity(runs.Run(Path(store) / config.hash, config), posthoc, recording):
            return trace
        report(f"{path.name} holds another recording ({trace.meta.notes}): recorded again")
    trace = record_run(runs.get_or_fit(config, posthoc, store=store, report=report), posthoc, recording)
    path.parent.mkdir(parents=True, exist_ok=True)
    traces.save(trace, path)
    return trace


def identity(run: runs.Run, posthoc: PosthocConfig, recording: Recording) -> str:
    """Which run, fit and recording a trace holds, by their hashes; and the weights that the run ended with, since on another kind of machine it ends otherwise."""
    weights = read_json(run.path / "finished.json").get("weights") if run.finished else None
    return f"run {run.config.hash}, weights {weights}, {runs.posthoc_name(posthoc)}, recording {stable_hash(recording)}"


def record_run(run: runs.Run, posthoc: PosthocConfig, recording: Recording) -> traces.Trace:
    """Record a finished run that has its checkpoint and heads (see `runs.get_or_fit`); scores are kept as float16.

    Raises ConfigError where the run has no such predictor or the held-out set no text of a domain.
    """
    config = run.config
    check_device(config.train.device)
    model = load_checkpoint(run.path / "checkpoint", config.model).to(config.train.device).requires_grad_(False)
    tokens = prepare(config.data)
    T = min(recording.tokens, config.model.context)
    if recording.prompt >= T:
        raise ConfigError(f"prompt={recording.prompt} leaves nothing of the {T} tokens that the model's context takes")
    windows, domain = choose_windows(tokens.heldout(config.model.context), tokens.domains, recording.per_domain, T)
    more = dict(guesses=recording.guesses, half=True, autocast=torch.bfloat16 if config.train.dtype == "bfloat16" else None)
    text = f"held-out windows of corpus {config.data.corpus.split(':')[0]}"   # a local corpus has a path, which is nobody's business
    origin = lambda source: Origin(model=runs.describe(config), source=source, domain=domain, notes=identity(run, posthoc, recording))  # noqa: E731
    scorers = load_scorers(run, posthoc, model, tokens, recording.predictors)
    if recording.kind == HELDOUT:
        return record(model, windows, scorers, config.predictor.horizons, prompt=recording.prompt, origin=origin(f"{text}, {T} tokens each"), **more)
    how = f"temperature {recording.temperature:g}, seed {recording.seed}"
    return generate(model, windows[:, : recording.prompt], scorers, config.predictor.horizons, new_tokens=T - recording.prompt, temperature=recording.temperature,
                    seed=recording.seed, origin=origin(f"{text}, {recording.prompt} tokens each, gone on with up to {T} at {how}"), **more)  # fmt: skip


def load_scorers(run: runs.Run, posthoc: PosthocConfig, model: MoEModel, tokens, names: Sequence[str]) -> dict[str, Scorer]:
    """The predictors `names` of a finished run on the model's device."""
    config = run.config
    held: dict[str, Scorer] = {"next_router": NextRouter(model)}
    held |= {kind: Heads(heads.to(model.device)) for kind, heads in load_heads(run.path, runs.posthoc_name(posthoc), config).items()}
    if "cotrained" in names:
        heads = load_predictor(run.path / "checkpoint", config)
        if heads is None:
            raise ConfigError(f"{runs.describe(config)} has no heads trained with it: leave 'cotrained' out of predictors")
        held["cotrained"] = Heads(heads.to(model.device))
    if {"token_id", "static"} & set(names):
        held |= lookups(training_activations(model, config, tokens, posthoc), config.model.vocab_size, config.model.num_experts, model.device)
    return {name: held[name] for name in names}


def choose_windows(evalset: EvalSet, domains: Sequence[str], per_domain: int, T: int) -> tuple[np.ndarray, str]:
    """The first T tokens of `per_domain` windows of each domain, [B, T], domain by domain, and which sequences are which in words.

    Taken are the windows with most text of the domain in their first T tokens, from the fewest documents; earlier ones first.
    """
    rows, words = [], []
    for index, name in enumerate(domains):
        share = (evalset.domain[:, :T] == index).mean(1)
        documents = 1 + (np.diff(evalset.document[:, :T], axis=1) != 0).sum(1)
        best = np.lexsort((documents, -share))[:per_domain]
        if len(best) < per_domain or share[best].min() < 0.5:
            raise ConfigError(f"the held-out set has no {per_domain} windows that are mostly {name}: lower per_domain, or raise heldout_tokens")
        last = f"-{len(rows) + per_domain - 1}" if per_domain > 1 else ""
        words.append(f"{len(rows)}{last} {name}")
        rows += best.tolist()
    return evalset.tokens[rows, :T], "sequences " + ", ".join(words)
