"""Heads per (layer, horizon) that say which experts layer l+h will choose, from the MoE input of layer l; and hit@k.

One `Predictor` holds all heads, stacked over layers, so that a horizon is one batched matrix product.
"""
# N tokens, D model width, E experts, K chosen, L layers, S = L - h source layers of horizon h

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from predmoe.config import ConfigError, PredictorConfig


class Predictor(nn.Module):
    """Logits over experts for every (source layer, horizon); "linear" is D -> E, "ranking" D -> D -> E with GELU."""

    def __init__(self, config: PredictorConfig, *, hidden_size: int, num_experts: int, num_layers: int):
        super().__init__()
        if max(config.depths) >= num_layers:
            raise ConfigError(f"horizons={config.horizons} must be below num_layers={num_layers}")
        self.config = config
        D, E = hidden_size, num_experts
        shapes = {"linear": [(E, D)], "ranking": [(D, D), (E, D)]}[config.kind]
        self.weights, self.biases = nn.ParameterDict(), nn.ParameterDict()
        for h in config.depths:
            for i, (out, into) in enumerate(shapes):
                self.weights[f"{h}_{i}"] = nn.Parameter(torch.empty(num_layers - h, out, into))
                self.biases[f"{h}_{i}"] = nn.Parameter(torch.zeros(num_layers - h, 1, out))

    def initialise(self, seed: int) -> Predictor:
        """Weights uniform in +-1/sqrt(fan-in), as torch's Linear draws them; biases zero."""
        generator = torch.Generator().manual_seed(seed)
        for name in sorted(self.weights, key=lambda name: (name.startswith("0_"), name)):   # the others as they are without
            weight = self.weights[name]
            bound = 1.0 / math.sqrt(weight.shape[-1])
            weight.data.copy_(torch.empty(weight.shape).uniform_(-bound, bound, generator=generator))
            nn.init.zeros_(self.biases[name])
        return self

    def forward(self, hidden_LND: Tensor, horizon: int) -> Tensor:
        """Logits (S, N, E), float32: entry s predicts layer s + horizon from the MoE input of layer s.

        Horizon 0 asks the heads of the same layer, about another token or from another input (`PredictorConfig.next_token`).
        """
        x = hidden_LND[: hidden_LND.shape[0] - horizon]
        x = torch.baddbmm(self.biases[f"{horizon}_0"], x, self.weights[f"{horizon}_0"].transpose(1, 2))
        if self.config.kind == "ranking":
            x = torch.baddbmm(self.biases[f"{horizon}_1"], F.gelu(x), self.weights[f"{horizon}_1"].transpose(1, 2))
        return x.float()


def restore(predictor: Predictor, path: Path) -> Predictor:
    """`predictor` with the weights in `path`. Raises ConfigError where that is missing, damaged or holds heads of another shape."""
    try:
        predictor.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()[:200]
        raise ConfigError(f"{path} does not hold the heads of this run ({why}); restore it from a copy, or remove it to make them again") from None
    return predictor


def membership(experts_NK: Tensor, num_experts: int) -> Tensor:
    """1.0 where an expert was chosen, else 0.0; shape (..., E) for (..., K)."""
    out = torch.zeros(*experts_NK.shape[:-1], num_experts, device=experts_NK.device)
    return out.scatter_(-1, experts_NK, 1.0)


def predicted_top_k(scores_NE: Tensor, k: int) -> Tensor:
    """Ids of the k largest scores, equal scores by lower id; shape (..., K). Raises ValueError where a score is NaN."""
    if torch.isnan(scores_NE).any():
        row = torch.isnan(scores_NE).any(-1).nonzero()[0].tolist()
        raise ValueError(f"predictor scores of row {row} are NaN: they rank no expert")
    return scores_NE.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def hits(scores_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """How many of each token's realized experts are among its k best scores; shape (...), integers 0..K."""
    k, E = experts_NK.shape[-1], scores_NE.shape[-1]
    guessed = membership(predicted_top_k(scores_NE, k), E)
    return guessed.gather(-1, experts_NK).sum(-1)


def hit_at_k(scores_NE: Tensor, experts_NK: Tensor) -> float:
    """Mean over tokens of |predicted top-k and realized top-k| / k (METHOD.md); chance is k/E."""
    return (hits(scores_NE, experts_NK).mean() / experts_NK.shape[-1]).item()


def exact_set(scores_NE: Tensor, experts_NK: Tensor) -> float:
    """Share of tokens whose whole top-k set was predicted."""
    return (hits(scores_NE, experts_NK) == experts_NK.shape[-1]).float().mean().item()
