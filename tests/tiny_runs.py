"""Runs of a model that trains in a second, on a corpus of made-up sentences: shared by the tests of training, store and what is measured in it."""

import json
import random
import shutil
from pathlib import Path

from predmoe import worker
from predmoe.config import PosthocConfig, RunConfig, build, to_dict
from predmoe.files import write_json
from predmoe.measured import FINETUNED, MEASURED
from predmoe.runs import Measurement

WORDS = "the of and expert router token layer disk cache reads before after predicts nothing else in time".split()
JOINT = {"lambda_pred": 0.3, "ramp_start": 0.1, "ramp_end": 0.5}
STEPS = 30


def write_corpus(folder: Path, documents: int = 200) -> str:
    """A JSONL corpus of sentences of 20 words in a fixed cycle, each from another start; returns its spec."""
    folder.mkdir(parents=True)
    rng = random.Random(0)
    with open(folder / "text.jsonl", "w") as file:
        for i in range(documents):
            start = rng.randrange(len(WORDS))
            text = " ".join(WORDS[(start + j) % len(WORDS)] for j in range(20 + i % 30))
            file.write(json.dumps({"text": f"{i}: {text}."}) + "\n")
    return f"files:{folder}"


def tiny(corpus: str, *, seed=0, model=None, objective=None, **training) -> RunConfig:
    """A model of three layers that takes some milliseconds a step; horizons 1 and 2."""
    return build(RunConfig, {
        "model": {"vocab_size": 8192, "hidden_size": 32, "num_layers": 3, "num_heads": 2, "expert_size": 32, "num_experts": 4, "top_k": 2,
                  "context": 16} | (model or {}),
        "train": {"steps": STEPS, "batch_size": 4, "lr": 5e-3, "warmup_steps": 5, "predictor_lr_scale": 5.0, "eval_every": 12, "seed": seed} | training,
        "data": {"corpus": corpus, "heldout_tokens": 256, "dev_tokens": 128},
        "objective": JOINT if objective is None else objective,
        "predictor": {"horizons": [1, 2]},
    })  # fmt: skip


def folder_of(config: RunConfig, path: Path) -> Path:
    """A run's folder as the store makes it."""
    path.mkdir(parents=True)
    write_json(path / "config.json", to_dict(config))
    return path


def finished(config: RunConfig, path: Path) -> Path:
    """A run brought to its end in this process."""
    folder = folder_of(config, path)
    worker.train(folder, config, progress=lambda line: None)
    return folder


def results(folder: Path) -> dict[str, bytes]:
    """What must not depend on interruptions: final weights and heads, the checkpoint's description, log and final loss."""
    files = [*sorted((folder / "checkpoint").iterdir()), folder / "metrics.jsonl", folder / "finished.json"]
    return {file.name: file.read_bytes() for file in files}


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


POSTHOC = PosthocConfig(tokens=512, batch_tokens=128, eval_every=10, max_steps=40, patience=1)


def clone(store: Path, to: Path) -> Path:
    """What a repository holds of a store: no weights, no log, no locks."""
    ignored = shutil.ignore_patterns("*.safetensors", "*.pt", "lock*", "log.txt", "*.partial", "checkpoint")
    return shutil.copytree(store, to, ignore=ignored)


def stored(kind: type[Measurement] = PosthocConfig, **more) -> str:
    """A measurement's file as JSON: all that is read of it is there, empty but for what is given."""
    tuned = FINETUNED if kind is PosthocConfig and more.get("config", {}).get("finetune") else {}
    return json.dumps(empty(MEASURED[kind] | tuned) | more)


def empty(needed):
    """The least that is as `needed`, of the form of `MEASURED`."""
    if isinstance(needed, dict):
        return {name: empty(held) for name, held in needed.items() if name is not ...}
    return [] if isinstance(needed, list) else (needed[0] if isinstance(needed, tuple) else needed)()
