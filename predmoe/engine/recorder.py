"""A trace of what the engine does, pass by pass, in the schema that the simulator reads."""
# N tokens of a pass, L layers, K chosen, M guesses

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from ..config import ConfigError, ModelConfig
from ..traces.schema import ABSENT, Meta, Prediction, Trace, build
from .layout import Manifest
from .resident import Guesser, best


class Recorder:
    """`guessers`: predictor -> (what scores, its horizons): recorded whether or not anything is prefetched by them, 2k + 2 guesses each."""

    def __init__(self, config: ModelConfig, guessers: Mapping[str, tuple[Guesser, tuple[int, ...]]]):
        self._config, self._guessers = config, guessers
        self._guesses = min(config.num_experts, 2 * config.top_k + 2)
        self._passes: list[dict] = []

    def open(self, tokens_N: Tensor, numbers: list[int], phase: int) -> None:
        """A pass begins."""
        N, L, K = len(tokens_N), self._config.num_layers, self._config.top_k
        held = {"tokens": tokens_N.numpy().astype(np.int32), "sequence": np.array(numbers, np.int32), "phase": phase,
                "experts": np.zeros((N, L, K), np.int16), "gates": np.zeros((N, L, K), np.float32)}  # fmt: skip
        for name, (_, horizons) in self._guessers.items():
            for h in horizons:
                held[name, h] = np.full((N, L, self._guesses), ABSENT, np.int16), np.zeros((N, L, self._guesses), np.float32)
        self._passes.append(held)

    def layer(self, layer: int, hidden_ND: Tensor, experts_NK: np.ndarray, gates_NK: Tensor) -> None:
        """What was chosen at `layer`, and what would have been guessed there."""
        held = self._passes[-1]
        held["experts"][:, layer], held["gates"][:, layer] = experts_NK, gates_NK.numpy()
        for name, (guesser, horizons) in self._guessers.items():
            for h in horizons:
                scores_NE = guesser.scores(layer, h, hidden_ND)
                if scores_NE is not None:
                    ids, scores = held[name, h]
                    ids[:, layer] = best(scores_NE.numpy(), self._guesses, f"{name} at layer {layer}")
                    scores[:, layer] = np.take_along_axis(scores_NE.double().softmax(1).numpy(), ids[:, layer].astype(np.int64), 1)

    def trace(self, manifest: Manifest, *, source: str = "", domain: str = "", notes: str = "") -> Trace:
        """The passes so far; a pass that was broken off is left out. Raises ConfigError where there is none."""
        whole = [held for held in self._passes if held["gates"][:, -1].any()]
        if not whole:
            raise ConfigError("nothing has been generated yet, so there is no trace")
        L = self._config.num_layers
        joined = lambda name: np.concatenate([held[name] for held in whole])  # noqa: E731
        meta = Meta(model=manifest.name, num_experts=self._config.num_experts, top_k=self._config.top_k, layers=range(L), expert_bytes=[manifest.block.size] * L,
                    source=source, domain=domain, notes=notes, on_policy=True)  # fmt: skip
        predictions = [(name, Prediction(h, *(np.concatenate([held[name, h][i] for held in whole]) for i in (0, 1))))
                       for name, (_, horizons) in self._guessers.items() for h in horizons]  # fmt: skip
        return build(meta, joined("experts"), starts=np.cumsum([0, *(len(held["tokens"]) for held in whole)]), phase=[held["phase"] for held in whole],
                     sequence=joined("sequence"), weights_NLK=joined("gates"), token_ids=joined("tokens"), predictions=predictions)  # fmt: skip
