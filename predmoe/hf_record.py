"""Traces of transformers models on given text, with the guesses of predictors that `probe` fitted; and where those are kept."""
# B sequences of T tokens

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file

from predmoe.config import PredictorConfig
from predmoe.engine.export import read_heads
from predmoe.evaluation import Heads
from predmoe.hf import Backbone, NextGate
from predmoe.hf_models import check_tokenizer, encode
from predmoe.predictor import Predictor
from predmoe.probe import HORIZONS
from predmoe.traces import Trace
from predmoe.traces.record import Origin, record
from predmoe.train import new_predictor

PROMPT = 32        # as `recording.Recording`
AT_ONCE = 4096     # tokens of a forward pass: its records are held whole


def save_heads(fitted: dict[str, Predictor], folder: Path) -> list[Path]:
    """The fitted predictors as KIND.safetensors in `folder`, which is made; read back by `engine.export.read_heads`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind, predictor in fitted.items():
        paths.append(folder / f"{kind}.safetensors")
        partial = paths[-1].with_suffix(".partial")
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in predictor.state_dict().items()}, partial)
        partial.chmod(0o644)   # the library leaves it to its owner alone
        os.replace(partial, paths[-1])
    return paths


def load_heads(kind: str, path: Path, backbone: Backbone) -> Predictor:
    """A predictor that `save_heads` wrote. Raises ConfigError where the file is none of this model's."""
    state, horizons = read_heads(kind, Path(path), backbone.config)
    predictor = new_predictor(PredictorConfig(kind=kind, horizons=horizons), backbone.config)
    predictor.load_state_dict(state)
    return predictor.to(backbone.device).requires_grad_(False)


def record_texts(backbone: Backbone, tokenizer, texts: Sequence[str], names: Sequence[str], *, model: str, prompt: int | None = None, tokens: int | None = None,
                 horizons: Sequence[int] | None = None, heads: Mapping[str, Path] | None = None, guesses: int | None = None,
                 source: str = "given text") -> Trace:  # fmt: skip
    """The trace of a transformers model on texts, one sequence each: its own routing, and the guesses of the next layer's router and of `heads`.

    `prompt`: tokens of a sequence that are its prefill pass (None: 32, or all of the shortest text); `tokens` cuts each text to its first ones.
    `horizons` (None: those of the heads, without any 1, 2 and 4) count MoE layers. Raises ConfigError or TraceError for what cannot be recorded.
    """
    check_tokenizer(tokenizer, backbone, model)
    padded, lengths = encode(texts, names, tokenizer, backbone, tokens=tokens)
    fitted = {kind: load_heads(kind, path, backbone) for kind, path in (heads or {}).items()}
    scorers = {"next_router": NextGate(backbone)} | {kind: Heads(predictor) for kind, predictor in fitted.items()}
    if horizons is None and fitted:
        horizons = sorted(set.intersection(*(set(predictor.config.horizons) for predictor in fitted.values())))
    if horizons is None:
        horizons = [h for h in HORIZONS if h < backbone.config.num_layers]
    ragged = lengths if len(set(lengths)) > 1 else None
    prompt = min(PROMPT, *lengths) if prompt is None else prompt
    return record(backbone, padded, scorers, horizons, prompt=prompt, origin=Origin(model=model, source=source), guesses=guesses, half=True,
                  batch_size=max(1, AT_ONCE // padded.shape[1]), lengths=ragged)  # fmt: skip
