"""A frozen backbone and its windows, for the tests of what is fitted on it."""

import json

import numpy as np
from tiny_runs import WORDS

from predmoe.config import DataConfig, ModelConfig, ObjectiveConfig, PredictorConfig, RunConfig, TrainConfig
from predmoe.data import prepare
from predmoe.predictor import Predictor

# D model width, E experts, K chosen, L layers, T time, V vocabulary

V, D, E, K, L, T = 61, 16, 8, 2, 4, 16
SHAPE = ModelConfig(vocab_size=V, hidden_size=D, num_layers=L, num_heads=2, expert_size=16, num_experts=E, top_k=K, context=T, init_std=0.3)


def windows_of(n, seed=0, vocab=V):
    return np.random.default_rng(seed).integers(0, vocab, (n, T + 1))


def heads_of(run, seed):
    return Predictor(run.predictor, hidden_size=8, num_experts=E, num_layers=3).initialise(seed)


def finished_run(folder):
    """A run, not trained, and the tokens of a small corpus written to `folder`, which is there."""
    rng = np.random.default_rng(0)
    with open(folder / "text.jsonl", "w") as file:
        for i in range(150):
            text = f"Document {i}. " + " ".join(rng.choice(WORDS, size=rng.integers(5, 60)))
            file.write(json.dumps({"text": text, "domain": ("north", "south")[i % 2]}) + "\n")
    run = RunConfig(
        model=ModelConfig(vocab_size=8192, hidden_size=8, num_layers=3, num_heads=2, expert_size=8, num_experts=E, top_k=K, context=T, init_std=0.3),
        train=TrainConfig(steps=1, batch_size=1, lr=1e-3, warmup_steps=0),
        data=DataConfig(corpus=f"files:{folder}", heldout_tokens=480, dev_tokens=240),
        objective=ObjectiveConfig(lambda_pred=0.3),
        predictor=PredictorConfig(horizons=(1, 2)),
    )
    return run, prepare(run.data, cache=folder / "cache")
