"""Recorders of models (ours, or a transformers one as `hf.Backbone`): teacher-forced on text that is given, or on the model's own generations.

A sequence is one prefill pass over its first `prompt` tokens, then one decode pass for each further token; sequences follow one
another, as an engine with batch size 1 serves them. Predictions are of any scorers: post-hoc heads, heads trained with the
model, the free next-layer router, lookups. They end at the last layer: guesses for the next token are ABSENT, since heads are
fitted within one token.

This module needs torch; the rest of `traces` does not, so it is imported by its own name.
"""
# B sequences of T tokens, N = B*T tokens, P prompt tokens, D width, L layers, E experts, K chosen, M guesses, S = L - h source layers

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import strict
from ..evaluation import Heads, Lookup, Scorer
from ..model import MoEModel, Routing
from ..objectives import stack
from ..predictor import predicted_top_k
from .schema import ABSENT, DECODE, PREFILL, Meta, Prediction, Trace, TraceError, build


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a trace comes from, in words, for its metadata."""

    model: str
    source: str = ""
    domain: str = ""
    notes: str = ""


@torch.no_grad()
def record(model: MoEModel, tokens_BT, scorers: Mapping[str, Scorer], horizons: Iterable[int], *, prompt: int, origin: Origin, guesses: int | None = None,
           half: bool = False, batch_size: int = 32, autocast: torch.dtype | None = None, lengths: Sequence[int] | None = None) -> Trace:  # fmt: skip
    """The routing of `model` on given text: row b of `tokens_BT` is one sequence, and the trace is not on-policy.

    `lengths`: how many tokens of each row are its text, where rows are padded at their ends (a `Backbone` alone takes those); the rest is left out.

    `guesses`: how many experts each scorer names per (token, layer), best first, by default 2k + 2 of the E. Scores are
    probabilities over experts: a softmax of a head's logits, a lookup's frequencies; `half` keeps them as float16. Weights are the gate
    weights that the layer used. Raises TraceError for a prompt or a horizon that cannot be.
    """
    tokens_BT = torch.as_tensor(np.ascontiguousarray(tokens_BT)).long()
    horizons = _checked(model, scorers, horizons)
    mask_BT = None if lengths is None else torch.arange(tokens_BT.shape[1]) < torch.as_tensor(lengths).unsqueeze(1)
    parts = []
    for at in range(0, len(tokens_BT), batch_size):
        rows, mask = tokens_BT[at : at + batch_size], None if mask_BT is None else mask_BT[at : at + batch_size]
        routing = _forward(model, rows, autocast, mask)[1]
        parts.append(_asked(routing, rows, scorers, horizons, _guesses(model, guesses), half, mask))
    steps = [{name: np.concatenate([part[name] for part in parts]) for name in parts[0]}]
    return _assemble(model, tokens_BT, steps, prompt, horizons, scorers, origin, False, lengths)


@torch.no_grad()
def generate(model: MoEModel, prompts_BP, scorers: Mapping[str, Scorer], horizons: Iterable[int], *, new_tokens: int, origin: Origin, temperature: float = 1.0,
             seed: int = 0, guesses: int | None = None, half: bool = False, autocast: torch.dtype | None = None) -> Trace:  # fmt: skip
    """The routing of `model` on its own generations: each row of `prompts_BP` is gone on with for `new_tokens` tokens.

    A sampled token is fed back and makes one decode pass, and what is recorded is what that pass chose; the token that the last
    pass would give is not drawn. `temperature` 0 takes the likeliest token (the lower id of equals), else tokens are drawn with
    `seed`. The other arguments and errors are those of `record`; prompt and new tokens together must fit the model's context.
    """
    tokens = torch.as_tensor(np.ascontiguousarray(prompts_BP)).long()
    if new_tokens < 1:
        raise TraceError(f"new_tokens={new_tokens} must be at least 1")
    try:
        strict.temperature("temperature", temperature)
    except strict.ConfigError as error:
        raise TraceError(str(error)) from None
    prompt = tokens.shape[1]
    if prompt + new_tokens > model.config.context:
        raise TraceError(f"{prompt} prompt and {new_tokens} new tokens exceed the model's context of {model.config.context}")
    horizons = _checked(model, scorers, horizons)
    generator = torch.Generator().manual_seed(seed)
    final_BTD, routing = _forward(model, tokens, autocast)
    steps = [_asked(routing, tokens, scorers, horizons, _guesses(model, guesses), half)]
    for _ in range(new_tokens):
        tokens = torch.cat([tokens, _sample(model.head(final_BTD[:, -1]), temperature, generator)], dim=1)
        final_BTD, routing = _forward(model, tokens, autocast)
        last = [Routing(*(field.view(*tokens.shape, -1)[:, -1] for field in layer)) for layer in routing]
        steps.append(_asked(last, tokens[:, -1:], scorers, horizons, _guesses(model, guesses), half))
    return _assemble(model, tokens, steps, prompt, horizons, scorers, origin, True)


def _forward(model: MoEModel, tokens_BT: Tensor, autocast: torch.dtype | None, mask_BT: Tensor | None = None) -> tuple[Tensor, list[Routing]]:
    with torch.autocast(model.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
        tokens_BT = tokens_BT.to(model.device)
        return model.body(tokens_BT) if mask_BT is None else model.body(tokens_BT, mask_BT.to(model.device))


def _sample(logits_BV: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One token id per row, (B, 1), on the processor, where a seed gives the same draw whatever the device."""
    logits = logits_BV.double().cpu()
    if not temperature:
        return logits.argmax(1, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(1), 1, generator=generator)


def _checked(model: MoEModel, scorers: Mapping[str, Scorer], horizons: Iterable[int]) -> tuple[int, ...]:
    L = model.config.num_layers
    horizons = tuple(horizons)
    for h in horizons:
        if not 1 <= h < L:
            raise TraceError(f"horizon {h} is {'beyond the last layer' if h >= L else 'no number of layers ahead'}: a model of {L} layers can be asked at 1..{L - 1}")
        for name, scorer in scorers.items():
            if isinstance(scorer, Heads) and h not in scorer.predictor.config.horizons:
                raise TraceError(f"{name} has no heads for horizon {h}; it has {', '.join(map(str, scorer.predictor.config.horizons))}")
    for name in scorers:
        if "/" in name:
            raise TraceError(f"predictor name {name!r} must not contain '/'")
    return horizons


def _guesses(model: MoEModel, wanted: int | None) -> int:
    E, K = model.config.num_experts, model.config.top_k
    if wanted is None:
        return min(E, 2 * K + 2)
    if not K <= wanted <= E:
        raise TraceError(f"guesses={wanted} must lie in top-k={K}..{E} experts")
    return wanted


def _asked(routing: list[Routing], tokens_BT: Tensor, scorers, horizons, M: int, half: bool, mask_BT: Tensor | None = None) -> dict:
    """Arrays [B, T, L, ...] of one forward pass: experts, gates, and per (scorer, horizon) the ids and scores of its guesses; 0 where
    the mask leaves a token out, of which the records know nothing."""
    B, T = tokens_BT.shape
    tokens_N = tokens_BT.reshape(-1) if mask_BT is None else tokens_BT[mask_BT]

    def by_sequence(array_LNX: Tensor) -> np.ndarray:
        array_NLX = array_LNX.transpose(0, 1).cpu()
        if mask_BT is not None:
            array_NLX = array_NLX.new_zeros(B * T, *array_NLX.shape[1:]).index_copy_(0, mask_BT.reshape(-1).nonzero().squeeze(1), array_NLX)
        return array_NLX.reshape(B, T, array_LNX.shape[0], -1).numpy()

    hidden = stack(routing, "hidden_ND")
    found = {"experts": by_sequence(stack(routing, "experts_NK")).astype(np.int16), "gates": by_sequence(stack(routing, "gates_NK").float())}
    for name, scorer in scorers.items():
        for h in horizons:
            scores_SNE = scorer(hidden, h, tokens_N.to(hidden.device))
            best_SNM = predicted_top_k(scores_SNE, M)
            probabilities = _probabilities(scorer, scores_SNE).gather(-1, best_SNM)
            ids = np.full((B, T, len(routing), M), ABSENT, np.int16)
            values = np.zeros(ids.shape, np.float16 if half else np.float32)
            ids[:, :, : len(routing) - h], values[:, :, : len(routing) - h] = by_sequence(best_SNM), by_sequence(probabilities)
            found[name, h, "ids"], found[name, h, "scores"] = ids, values
    return found


def _probabilities(scorer: Scorer, scores_SNE: Tensor) -> Tensor:
    """Scores as shares of one over the experts, in double, so that rounding keeps their order."""
    scores = scores_SNE.double()
    return scores / scores.sum(-1, keepdim=True) if isinstance(scorer, Lookup) else scores.softmax(-1)


def _assemble(model: MoEModel, tokens_BT: Tensor, steps: list[dict], prompt: int, horizons, scorers, origin: Origin, on_policy: bool, lengths: Sequence[int] | None = None) -> Trace:
    """The recorded steps, side by side along T, as a trace of B sequences, of which each has its own length (T without `lengths`)."""
    B, T = tokens_BT.shape
    lengths = np.full(B, T) if lengths is None else np.asarray(lengths)
    if not 0 <= prompt <= lengths.min():
        raise TraceError(f"prompt={prompt} must lie in 0..{lengths.min()}, the tokens of {'a' if (lengths == T).all() else 'the shortest'} sequence")
    real = (np.arange(T) < lengths[:, None]).reshape(-1)
    joined = {}
    for name in steps[0]:
        array = np.concatenate([step[name] for step in steps], axis=1)
        joined[name] = array.reshape(B * T, *array.shape[2:])[real]
    meta = Meta(model=origin.model, **_sizes(model), source=origin.source, domain=origin.domain, notes=origin.notes, on_policy=on_policy)
    opens = [([0] if prompt else []) + list(range(prompt, length)) for length in lengths]
    starts = np.concatenate([end - length + at for end, length, at in zip(np.cumsum(lengths), lengths, opens)])
    phase = [PREFILL if prompt and at == 0 else DECODE for passes in opens for at in passes]
    return build(meta, joined["experts"], starts=[*starts, lengths.sum()], phase=phase, sequence=np.repeat(np.arange(B), lengths), weights_NLK=joined["gates"],
                 token_ids=tokens_BT.reshape(-1).numpy()[real],
                 predictions=[(name, Prediction(h, joined[name, h, "ids"], joined[name, h, "scores"])) for name in scorers for h in horizons])  # fmt: skip


def _sizes(model) -> dict:
    """What a trace's metadata takes from the model's shape; a transformers model says it itself (`hf.Backbone.trace_sizes`)."""
    if not isinstance(model, MoEModel):
        return model.trace_sizes
    config, weight = model.config, model.layers[0].experts.gate_up
    return dict(num_experts=config.num_experts, top_k=config.top_k, layers=range(config.num_layers), model_layers=config.num_layers,
                expert_bytes=[3 * config.hidden_size * config.expert_size * weight.element_size()] * config.num_layers)  # fmt: skip
