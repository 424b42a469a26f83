"""The third measurement of a finished run: zero-shot tasks, item by item, and the harness's own transformers class beside our adaptor.

It needs the weights, so it is taken right after training, once, and kept as a small file beside the post-hoc one (`DownstreamConfig` is its
address). Of each item it keeps whether it was answered rightly and the log-likelihood of the gold answer: enough to pair two models.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from predmoe import downstream_tasks
from predmoe.config import ConfigError, DownstreamConfig, RunConfig, to_dict
from predmoe.data import Tokens
from predmoe.downstream import PredmoeLM, Whole, transformers_tokenizer, words_of
from predmoe.model import MoEModel
from predmoe.tokenizer import load_tokenizer

SAME = 1e-3   # nats: sums of a hundred float32 terms in another order differ by a tenth of it
TIE = 1e-6    # of a router's probabilities: two that differ by less may change places by rounding
OPEN = "lambada_openai"   # an open answer: no guess is right by chance, and there is nothing to normalise


# --- one task ----------------------------------------------------------------------------------------------------------

def run_task(lm, name: str, task) -> list[dict]:
    """The harness's own record of every item of `task` under `lm`, in their order."""
    from lm_eval import evaluator

    with downstream_tasks.quiet():
        found = evaluator.evaluate(lm, {name: task}, bootstrap_iters=0, log_samples=True)
    return sorted(found["samples"][name], key=lambda sample: sample["doc_id"])


def gold_of(sample: Mapping) -> float:
    """Log-likelihood of the gold answer, nats, over all of its tokens."""
    answers = sample["filtered_resps"]
    return float(answers[0][0] if len(answers) == 1 else answers[int(sample["target"])][0])


def summary(samples: Sequence[Mapping], chance: float, name: str) -> tuple[dict, dict]:
    """Means with standard errors over the items of task `name`, and the items themselves, packed. Raises ConfigError where a log-likelihood is not finite."""
    values = {"accuracy": np.array([sample["acc"] for sample in samples], float), "gold": np.array([gold_of(sample) for sample in samples])}
    if "acc_norm" in samples[0]:
        values["accuracy_norm"] = np.array([sample["acc_norm"] for sample in samples], float)
    if not np.isfinite(values["gold"]).all():
        item = int(np.argmin(np.isfinite(values["gold"])))
        raise ConfigError(f"{name}: the log-likelihood of item {item} is {values['gold'][item]}: the model's weights are damaged, or it diverged in training")
    n = len(samples)
    means = {name: float(x.mean()) for name, x in values.items()}
    errors = {f"{name}_se": float(x.std(ddof=1) / np.sqrt(n)) if n > 1 else 0.0 for name, x in values.items()}
    packed = {name: pack_numbers(x) if name == "gold" else pack_bits(x) for name, x in values.items()}
    return {"items": n, "chance": chance} | means | errors, packed


def chance_of(name: str, task) -> float:
    """The accuracy of guessing: one over the number of answers, mean over the items; 0 for an open answer."""
    return 0.0 if name == OPEN else float(np.mean([1 / len(task.doc_to_choice(doc)) for doc in task.eval_docs]))


def fitting(lm: PredmoeLM, task) -> list[int]:
    """Which items have answers that the model's context can hold, all of them: the others cannot be scored, by the harness's own class neither."""
    delimiter, kept = task.config.target_delimiter, []
    for i, doc in enumerate(task.eval_docs):
        question = task.doc_to_text(doc)
        answers = [f"{delimiter}{choice}" for choice in task.doc_to_choice(doc)] if task.OUTPUT_TYPE == "multiple_choice" else [task.doc_to_target(doc)]
        if all(lm.length(question, answer) <= lm.max_length for answer in answers):
            kept.append(i)
    return kept


# --- items in few bytes ------------------------------------------------------------------------------------------------------

def pack_bits(values: np.ndarray) -> str:
    return base64.b64encode(np.packbits(values.astype(bool))).decode()


def unpack_bits(text: str, count: int) -> np.ndarray:
    """(count,) bool."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=count).astype(bool)


def pack_numbers(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<f4")).decode()


def unpack_numbers(text: str) -> np.ndarray:
    """float64, rounded to float32 when packed."""
    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float64)


# --- the whole of it -----------------------------------------------------------------------------------------------------------

def peer(checkpoint: Path, run: RunConfig):
    """The harness's own transformers class on the same checkpoint and device, with our tokenizer."""
    from lm_eval.models.huggingface import HFLM
    from transformers import OlmoeForCausalLM

    with downstream_tasks.quiet():
        model = OlmoeForCausalLM.from_pretrained(checkpoint).to(run.train.device)
        return HFLM(pretrained=model, tokenizer=transformers_tokenizer(load_tokenizer(run.data.tokenizer)), batch_size=16)


def compare(ours: Sequence[Mapping], theirs: Sequence[Mapping], gap: Callable[[Mapping], float] = lambda sample: math.inf) -> dict:
    """Item for item: how many were judged otherwise; how many log-likelihoods are `apart` by more than SAME nats, and the largest difference
    of the others, over all answers. `ties`: of those apart, the ones in which some router's choice is a tie but for rounding, which each
    side breaks its own way; `gap` gives the nearest one of an item.
    """
    found = {"items": len(ours), "largest_difference": 0.0, "judged_otherwise": 0, "apart": 0, "ties": 0}
    for mine, his in zip(ours, theirs, strict=True):
        difference = max(abs(a[0] - b[0]) for a, b in zip(mine["filtered_resps"], his["filtered_resps"], strict=True))
        found["judged_otherwise"] += any(mine[metric] != his[metric] for metric in ("acc", "acc_norm") if metric in mine)
        if difference > SAME:
            found["apart"] += 1
            found["ties"] += gap(mine) < TIE
        else:
            found["largest_difference"] = max(found["largest_difference"], float(difference))
    return found


@torch.inference_mode()
def nearest_tie(lm: PredmoeLM, model: MoEModel, sample: Mapping) -> float:
    """The smallest difference between the probabilities of the last chosen and the first unchosen expert, over an item's answers, tokens and layers."""
    K, nearest = model.config.top_k, math.inf
    for context, continuation in sample["arguments"]:
        _, routing = model.body(torch.tensor([lm.line(context, continuation)], device=model.device))
        for layer in routing if K < model.config.num_experts else ():
            probs_NE = layer.logits_NE.softmax(1).sort(1, descending=True).values
            nearest = min(nearest, float((probs_NE[:, K - 1] - probs_NE[:, K]).min()))
    return nearest


def measure(model: MoEModel, checkpoint: Path, run: RunConfig, tokens: Tokens, config: DownstreamConfig, *, progress=lambda line: None) -> dict:
    """Everything `DownstreamConfig` asks of a finished run, in float32. `tasks`: per task the numbers of `summary`; `answers`: the same items,
    packed; `harness`: per task what `compare` says of the first items; `left_out`: per task how many items have an answer longer than the model's
    context. A task of such items alone has no numbers. Raises ConfigError where items are not here or are damaged."""
    started = time.perf_counter()
    found: dict = {"tasks": {}, "answers": {}, "harness": {}, "left_out": {}}
    lm = PredmoeLM(model=Whole(model), words=words_of(run.data.tokenizer, checkpoint))
    other = peer(checkpoint, run) if config.peer_items and run.model.routing == "topk" else None   # transformers knows no other routing
    for name, task in downstream_tasks.load(config, tokens).items():
        kept, total = fitting(lm, task), len(task.eval_docs)
        found["left_out"][name] = total - len(kept)
        if not kept:
            progress(f"{name}: every item has an answer longer than the model's context")
            continue
        task = task.of(kept) if len(kept) < total else task
        before, begun = lm.cut, time.perf_counter()
        samples = run_task(lm, name, task)
        seconds = time.perf_counter() - begun
        found["tasks"][name], found["answers"][name] = summary(samples, chance_of(name, task), name)
        requests = sum(len(sample["filtered_resps"]) for sample in samples)
        found["tasks"][name] |= {"fingerprint": downstream_tasks.fingerprint(task), "requests": requests, "cut": lm.cut - before, "seconds": seconds}
        progress(f"{name}: {len(samples)} items in {seconds:.0f} s, accuracy {found['tasks'][name]['accuracy']:.3f}")
        if other is not None:
            few = task.of(range(min(config.peer_items, len(samples))))
            found["harness"][name] = compare(samples[: config.peer_items], run_task(other, name, few), lambda sample: nearest_tie(lm, model, sample))
    return found | {"config_hash": run.hash, "seed": run.train.seed, "downstream_config": to_dict(config), "data_hash": tokens.hash,
                    "seconds": {"downstream": time.perf_counter() - started}}   # fmt: skip
