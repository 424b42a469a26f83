"""Diagnostics of routing: how sharp, how balanced, how repetitive, and how alike neighbouring layers' inputs are."""
# B batch, T time, N tokens, E experts, K chosen, D model width

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from predmoe.predictor import membership


def router_entropy(logits_NE: Tensor) -> float:
    """Mean entropy of the router distribution, nats; ln E for a flat one."""
    log_p = logits_NE.float().log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1).mean().item()


def top_k_mass(logits_NE: Tensor, k: int) -> float:
    """Mean router probability on the k likeliest experts; k/E for a flat router."""
    return logits_NE.float().softmax(-1).topk(k, -1).values.sum(-1).mean().item()


def load(experts_NK: Tensor, num_experts: int) -> Tensor:
    """Share of dispatches that each expert received, (E,); sums to 1."""
    counts_E = torch.bincount(experts_NK.reshape(-1), minlength=num_experts).double()
    return counts_E / counts_E.sum()


def load_entropy(load_E: Tensor) -> float:
    """Entropy of the load divided by ln E: 1 for even use, 0 where one expert does everything."""
    positive = load_E[load_E > 0]
    return (-(positive * positive.log()).sum() / math.log(load_E.numel())).item() if load_E.numel() > 1 else 1.0


def dead_experts(load_E: Tensor, threshold: float = 0.01) -> int:
    """Experts with less than `threshold` of an even share."""
    return int((load_E < threshold / load_E.numel()).sum())


def reuse(experts_BTK: Tensor, num_experts: int) -> float:
    """Mean share of a token's experts that the previous token of its sequence chose too; k/E for independent choices."""
    chosen = membership(experts_BTK, num_experts)
    return ((chosen[:, 1:] * chosen[:, :-1]).sum(-1).mean() / experts_BTK.shape[-1]).item()


def hidden_cosine(x_ND: Tensor, y_ND: Tensor) -> float:
    """Mean cosine of two layers' inputs of the same token."""
    return F.cosine_similarity(x_ND.float(), y_ND.float(), dim=-1).mean().item()
