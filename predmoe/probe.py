"""How far ahead a transformers mixture of experts can be foretold: the post-hoc measurement of our own runs, on any model with gates.

Predictors are fitted on the frozen model and evaluated on whole held-out documents by the code and the rules of `posthoc` and `evaluation`;
activations are kept within a budget (`activations`).
"""
# L MoE layers, T time

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from predmoe.activations import plan
from predmoe.config import ConfigError, DataConfig, PosthocConfig, to_dict
from predmoe.data import Tokens, prepare
from predmoe.hf import Backbone, NextGate
from predmoe.hf_models import check_tokenizer
from predmoe.posthoc import ACTIVATION_ORDER, capture, fit_and_evaluate
from predmoe.predictor import Predictor

HORIZONS = (1, 2, 4)
COLUMNS = ("linear", "ranking", "next_router", "token_id", "static")


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """What is probed. `horizons`: layers ahead, counted in MoE layers (None: of 1, 2, 4 those that the model has). `context`: tokens of a window
    (None: 512, or the model's context if that is smaller). `fit.tokens`: training tokens. `memory`: the budget in bytes that
    `activations.plan` keeps to; `scratch`: the folder of the file that activations go to beyond it.
    """

    horizons: tuple[int, ...] | None = None
    context: int | None = None
    data: DataConfig = DataConfig()
    fit: PosthocConfig = PosthocConfig(tokens=100_000)
    memory: int = 4_000_000_000
    scratch: str | None = None

    def __post_init__(self):
        if self.horizons is not None and (not self.horizons or min(self.horizons) < 1 or len(set(self.horizons)) != len(self.horizons)):
            raise ConfigError(f"horizons={self.horizons} must be distinct positive layer counts")
        if self.context is not None and self.context < 2:
            raise ConfigError(f"context={self.context} must be at least 2")
        if self.memory < 1:
            raise ConfigError(f"memory={self.memory} must be positive, bytes")

    def horizons_of(self, backbone: Backbone) -> tuple[int, ...]:
        """The horizons asked for, checked against the model's MoE layers."""
        L = backbone.config.num_layers
        if L < 2:
            raise ConfigError(f"the model has {L} MoE layer: there is no layer ahead to foretell")
        if self.horizons is None:
            return tuple(h for h in HORIZONS if h < L)
        if max(self.horizons) >= L:
            raise ConfigError(f"horizon {max(self.horizons)} is beyond the last layer: a model of {L} MoE layers can be asked at 1..{L - 1}")
        return self.horizons

    def context_of(self, backbone: Backbone) -> int:
        """The window asked for, checked against the model's context."""
        if self.context is None:
            return min(512, backbone.config.context)
        if self.context > backbone.config.context:
            raise ConfigError(f"context={self.context} exceeds the model's, which is {backbone.config.context} tokens")
        return self.context


def probe(backbone: Backbone, tokenizer, config: ProbeConfig, *, name: str = "the model", cache: Path | None = None,
          progress=lambda line: None) -> tuple[dict, dict[str, Predictor]]:  # fmt: skip
    """The probe's result and the fitted predictors by kind.

    The result has `evaluate`'s figures of linear, ranking, next_router, token_id and static (`hit[predictor][horizon]`, `hit_per_layer`, ..., as
    in a run's measurement), `layers` (the model's index of each MoE layer), curves, whether each fit converged, seconds, and where the activations lay.
    """
    horizons, T = config.horizons_of(backbone), config.context_of(backbone)
    check_tokenizer(tokenizer, backbone, name)
    data = dataclasses.replace(config.data, tokenizer=tokenizer.name)
    windows, started = max(1, config.fit.tokens // T), time.perf_counter()
    held = plan(config.memory, backbone.config, tokens=windows * T + data.dev_tokens, batch_tokens=config.fit.batch_tokens, horizons=len(horizons), T=T,
                folder=Path(config.scratch) if config.scratch else None)  # fmt: skip
    tokens = prepare(data, cache=cache, tokenizer=tokenizer)
    dev = tokens.dev(T).tokens
    first = torch.from_numpy(dev[:1].astype("int64")).to(backbone.device)
    with torch.inference_mode():
        check_loss(backbone(first[:, :-1], first[:, 1:]).loss.item(), name)   # before the fits, not after them
    where = "in a file" if held.on_disk else "in memory"
    progress(f"caching activations: {held.cache_bytes / 1e6:,.0f} MB {where}, at most {config.memory / 1e6:,.0f} MB in memory")
    read = lambda text: capture(backbone, text, batch_size=held.capture_windows, room=held.room, rows_at_once=held.rows_at_once)  # noqa: E731
    train, dev = read(training_text(tokens, data, windows, T)), read(dev)
    captured = time.perf_counter() - started
    result, fitted, curves, converged, seconds = fit_and_evaluate(backbone, train, dev, tokens.heldout(T), tokens.domains, horizons, config.fit,
                                                                  next_router=NextGate(backbone), batch_size=held.score_windows, progress=progress)  # fmt: skip
    check_loss(result["val_loss"], name)
    return result | {
        "model": name,
        "layers": list(backbone.layers),
        "model_layers": backbone.model_layers,
        "sizes": dataclasses.asdict(backbone.config),
        "tokenizer": tokenizer.name,
        "context": T,
        "config": to_dict(config),
        "curves": curves,
        "converged": converged,
        "seconds": {"capture": captured} | seconds | {"all": time.perf_counter() - started},
        "activations": {"on_disk": held.on_disk, "bytes": held.cache_bytes, "budget": config.memory},
        "data_hash": tokens.hash,
    }, fitted


def check_loss(loss: float, name: str) -> None:
    """Raise ConfigError where a model's loss (nats per token) is not finite."""
    if not math.isfinite(loss):
        raise ConfigError(f"{name}: the loss of held-out text is {loss}: the model's weights are damaged, or overflow in this --dtype")


def training_text(tokens: Tokens, data: DataConfig, windows: int, T: int):
    """The windows (n, T+1) that predictors are fitted on, in the order that our own runs' are."""
    return tokens.stream(ACTIVATION_ORDER, data.shuffle_buffer).batch(0, windows, T)


def table(result: dict, horizon: int) -> pd.DataFrame:
    """hit@k of each predictor at one horizon: a row per layer whose experts are foretold (its index in the model), then all of them."""
    layers = result["layers"][horizon:]
    columns = {name: [*result["hit_per_layer"][name][str(horizon)], result["hit"][name][str(horizon)]] for name in COLUMNS}
    return pd.DataFrame(columns, index=pd.Index([*map(str, layers), "all"], name="layer"))
