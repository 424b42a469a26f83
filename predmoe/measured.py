"""What a measurement's file in the run store holds: read, it is whole, or a sentence names the file and the entry that is not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from .config import PREDICTORS, ConfigError, DownstreamConfig, LocalityConfig, PosthocConfig
from .files import read_json

# What is read of a measurement: a type, [what each element is], or name -> what is there, `...` standing for every other name. A file that lacks any of it is damaged.
_NUMBER = (int, float)
_BY_HORIZON = {...: _NUMBER}
_HITS = dict.fromkeys((*PREDICTORS, ...), _BY_HORIZON)   # a fit that is not there has not converged
MEASURED = {
    PosthocConfig: {"hit": _HITS, "exact_set": {...: _BY_HORIZON}, "margin_over_token_id": {...: _BY_HORIZON}, "hit_per_layer": {...: {...: [_NUMBER]}}}
    | dict.fromkeys(("static_hit", "token_id_hit", "seconds", "terms_nats"), _BY_HORIZON) | dict.fromkeys(("config", "parameters", "provenance"), dict)
    | {"documents": {"tokens": [_NUMBER]}, "curves": {...: list}, "converged": dict.fromkeys((*PREDICTORS, ...), bool), "config_hash": str, "seed": int}
    | dict.fromkeys(("val_loss", "router_entropy", "router_entropy_fraction", "top_k_mass", "load_entropy", "largest_load", "dead_experts", "reuse", "hidden_cosine",
                     "lambda_pred", "tokens_per_second"), _NUMBER),
    LocalityConfig: dict.fromkeys(("slots", "lru", "belady", "next_token", "pre_attention", "converged"), dict)
    | dict.fromkeys(("tokens", "reuse", "switch_rate", "srp", "srp_size", "sch", "sch_global"), _NUMBER),
    DownstreamConfig: {"tasks": {...: dict}, "answers": {...: dict}, "harness": {...: dict}, "left_out": {...: int}},
}  # fmt: skip
FINETUNED = {   # and of a fine-tune's besides
    "drift": {"kept": _NUMBER, "weights": dict.fromkeys(("router", "experts", "attention"), _NUMBER)}, "trained": {"parameters": int, "experts": int},
}  # fmt: skip


def fault(value, needed, where: str = "") -> str:
    """What of `value` is not as `needed` (of the form of MEASURED), in words with its place; empty where all is as it should be."""
    kind = dict if isinstance(needed, Mapping) else list if isinstance(needed, list) else needed
    if not isinstance(value, kind) or isinstance(value, bool) and kind is not bool:
        text = json.dumps(value)
        return f"{where or 'it'} is {text if len(text) <= 40 else f'a {type(value).__name__}'}"
    if isinstance(needed, Mapping):
        if lacking := [name for name in needed if name is not ... and name not in value]:
            return f"{where or 'it'} lacks {', '.join(lacking)}"
        inside = [(f"{where}.{name}" if where else name, held, needed.get(name, needed.get(...))) for name, held in value.items()]
    else:
        inside = [(f"{where}[{i}]", held, needed[0]) for i, held in enumerate(value)] if isinstance(needed, list) else []
    return next((words for name, held, wanted in inside if wanted is not None and (words := fault(held, wanted, name))), "")


def read_measurement(source: Path, kind: type) -> dict:
    """The measurement in a file, of the configuration type `kind`. Raises ConfigError that names the file, and the entry that is missing or of another type."""
    remedy = "remove it to measure the run again"
    found = read_json(source, remedy=remedy)
    tuned = FINETUNED if kind is PosthocConfig and isinstance(found.get("config"), dict) and found["config"].get("finetune") else {}
    if words := fault(found, MEASURED[kind] | tuned):
        raise ConfigError(f"{source} is damaged ({words}); restore it from a copy, or {remedy}")
    return found
