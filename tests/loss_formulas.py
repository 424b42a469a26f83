"""What the tests of loss terms are made of: drawn tensors, formulas in float64 and their slopes."""

import numpy as np
import torch

from predmoe.model import Routing

# N tokens, E experts, K chosen, D model width, L layers, S source layers of a horizon

S, N, E, K = 2, 6, 5, 2
L, D = 4, 3


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def choose(*shape, k=K, experts=E, seed=0):
    return torch.rand(*shape, experts, generator=torch.Generator().manual_seed(seed)).argsort(-1)[..., :k]


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def one_hot(experts, num_experts=E):
    return np.eye(num_experts)[experts.numpy()].sum(-2)


def slope(formula, x, eps=1e-5):
    """Central differences of a scalar formula of a float64 array: an error of the order of 1e-10."""
    grad = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i] += eps
        down[i] -= eps
        grad[i] = (formula(up) - formula(down)) / (2 * eps)
    return grad


def records(seed=0, requires_grad=False):
    out = []
    for i in range(L):
        hidden, logits = normal(N, D, seed=seed + i), normal(N, E, seed=seed + 50 + i)
        experts = logits.topk(K).indices
        out.append(Routing(hidden.requires_grad_(requires_grad), logits.requires_grad_(requires_grad), experts, torch.ones(N, K) / K))
    return out
