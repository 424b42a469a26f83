"""A small model and a made-up evaluation set."""

import numpy as np

from predmoe.config import ModelConfig
from predmoe.data import EvalSet
from predmoe.model import MoEModel

# W windows, T time, N = W*T tokens, E experts, K chosen, L layers, V vocabulary

W, T, V, E, K, L = 7, 12, 31, 8, 2, 4
HORIZONS = (1, 2, 3)


def make_model(seed=0, **changes):
    shape = dict(vocab_size=V, hidden_size=16, num_layers=L, num_heads=2, expert_size=16, num_experts=E, top_k=K, context=T, init_std=0.3)
    return MoEModel(ModelConfig(**(shape | changes))).initialise(seed)


def make_set(seed=0, windows=W, vocab=V):
    """Random tokens in documents of uneven length that cross windows; ids as of a larger file; two domains."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (windows, T + 1))
    document = np.repeat([40, 7, 12, 3, 99], [5, 20, windows * T - 60, 25, 10]).reshape(windows, T).astype(np.int32)
    return EvalSet(tokens, document, (document % 2).astype(np.int16))
