"""What an engine cannot do is refused before it is opened, or before a pass: settings that only the simulator has, a trace of another model, prompts that cannot be."""

from __future__ import annotations

from collections.abc import Sequence

from .. import strict
from ..config import ConfigError, ModelConfig
from ..simulator import Cache, Prefetch
from ..simulator.config import ORACLE
from ..traces.schema import Trace, TraceError
from .layout import Manifest

GUARDS = ("none", "idle")   # the simulator's "window" compares with a clock's future, which an engine does not have


def check_settings(cache: Cache, prefetch: Prefetch | None, future: Trace | None, usage, manifest: Manifest) -> None:
    """Raise ConfigError for what the simulator can and an engine cannot, TraceError for a future that is another model's."""
    config = manifest.model
    if cache.sample:
        raise ConfigError("sample is for the simulator's sequential replay only")
    if prefetch is not None and prefetch.guard not in GUARDS:
        raise ConfigError(f"guard={prefetch.guard!r} is for the simulator only; an engine has {', '.join(GUARDS)}")
    if prefetch is not None and prefetch.cross_token and prefetch.source != ORACLE:
        raise ConfigError("cross_token is for the simulator and the oracle only: predictors are fitted within a token")
    if prefetch is not None and prefetch.threshold is not None and not 0 <= prefetch.threshold <= 1:
        raise ConfigError(f"threshold={prefetch.threshold!r} must lie in 0..1: here a guess's score is a probability")
    if prefetch is not None and config.top_k + prefetch.budget > config.num_experts:
        raise ConfigError(f"budget={prefetch.budget} and top-{config.top_k} exceed the {config.num_experts} experts of a layer")
    needs = [what for what, asked in (("the oracle", prefetch is not None and prefetch.source == ORACLE), ("the policy belady", cache.policy == "belady")) if asked]
    if needs and future is None:
        raise ConfigError(f"{' and '.join(needs)} must know the future: give the trace of the same generation (--future)")
    if future is None and usage is None and (cache.pinned or cache.policy == "static"):
        raise ConfigError("pinned and static experts are chosen by their use: give the trace of an earlier generation (--future), or usage")
    if future is not None and (future.num_layers, future.meta.num_experts, future.meta.top_k) != (config.num_layers, config.num_experts, config.top_k):
        raise TraceError(f"the trace is of {future.num_layers} layers of {future.meta.num_experts} experts, top-{future.meta.top_k}, the model {manifest.name!r} is not")
    deepest = max(prefetch.horizons) if prefetch else 0
    furthest = config.num_layers if prefetch and prefetch.cross_token else config.num_layers - 1
    if deepest > furthest:
        raise ConfigError(f"horizon {deepest} is beyond the last layer: the model has {config.num_layers} MoE layers, so at most {furthest}")


def check_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float, config: ModelConfig) -> None:
    """Raise ConfigError for what cannot be gone on with."""
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} must be at least 1")
    strict.temperature("temperature", temperature)
    check_tokens(prompts, max_new_tokens, config)


def check_tokens(prompts: Sequence[Sequence[int]], max_new_tokens: int, config: ModelConfig) -> None:
    """Raise ConfigError for token ids that the model has not, and for more of them than its context."""
    if not len(prompts):
        raise ConfigError("there is no prompt")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ConfigError(f"prompt {i} is empty: the model needs at least one token to go on from")
        if len(prompt) + max_new_tokens > config.context:
            raise ConfigError(f"prompt {i}: {len(prompt)} tokens and {max_new_tokens} new ones exceed the model's context of {config.context}")
        if min(prompt) < 0 or max(prompt) >= config.vocab_size:
            raise ConfigError(f"prompt {i} has a token id outside 0..{config.vocab_size - 1}")
