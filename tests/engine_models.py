"""What the engine's tests share: one small exported model, its resident twin's greedy tokens and logits, and a trace of them."""

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from tiny_models import lively, tokens_of

from predmoe.checkpoint import save_checkpoint
from predmoe.config import PredictorConfig
from predmoe.engine import Engine, export
from predmoe.predictor import Predictor
from predmoe.simulator import Cache

# B prompts of P tokens, each gone on with for NEW tokens: 1,040 in all
B, P, NEW = 8, 6, 130
PATIENCE = 300.0   # seconds; a busy machine is no fault


def heads(path, model, kind, horizons=(1, 2)):
    config = model.config
    predictor = Predictor(PredictorConfig(kind=kind, horizons=horizons), hidden_size=config.hidden_size, num_experts=config.num_experts, num_layers=config.num_layers)
    save_file(predictor.initialise(0).state_dict(), path)
    return path


@torch.no_grad()
def resident_tokens(model, prompts, new):
    """Greedy tokens and logits of the whole model, from a full forward pass for each token."""
    tokens, logits = torch.tensor(prompts), []
    for _ in range(new):
        logits.append(model(tokens).logits_BTV[:, -1])
        tokens = torch.cat([tokens, logits[-1].argmax(1, keepdim=True)], dim=1)
    return tokens[:, len(prompts[0]) :].tolist(), logits


def opened(folder, **more):
    settings = {"cache": Cache(slots=6), "lanes": 2, "patience": PATIENCE, "announce": lambda line: None} | more
    return Engine(folder, **settings)


@functools.cache
def house():
    """model, folder (a float32 export with both predictors), prompts, tokens and logits of the resident model, and the engine's trace of the same."""
    model = lively(context=P + NEW)
    kept = tempfile.TemporaryDirectory()
    root = Path(kept.name)
    save_checkpoint(model, root / "checkpoint")
    export(root / "checkpoint", root / "out", dtype="float32", heads={kind: heads(root / f"{kind}.safetensors", model, kind) for kind in ("linear", "ranking")})
    prompts = tokens_of(model, B=B, T=P, seed=3).tolist()
    tokens, logits = resident_tokens(model, prompts, NEW)
    with opened(root / "out", record={"next_router": (1, 2), "ranking": (1,)}) as engine:
        assert engine.generate(prompts, max_new_tokens=NEW) == tokens
        trace = engine.trace(source="tests")
    return SimpleNamespace(model=model, root=root, folder=root / "out", prompts=prompts, tokens=tokens, logits=logits, trace=trace, kept=kept)
