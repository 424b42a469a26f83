"""One contender of `peers`, in a process of its own: `python -m predmoe.contender SPEC`. Imports only what the contender itself asks for.

The last line of its output is a JSON object: of decoding alone, after loading and a warm-up, tokens/s, time to the first token, memory,
page faults and bytes read.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import tempfile
import time
from pathlib import Path

from .process import MemoryGroup, forget, give_back, kernel_bytes, major_faults, peak_resident_bytes, reset_peak


def main(spec: dict) -> dict:
    """Loads, and only then puts the memory limit in force: loading is not generating, and some contenders must hold the whole model for it.
    `{"ran": False}` where what is left after loading does not fit the limit."""
    kinds = {"transformers": _transformers, "offload": _transformers, "engine": _engine, "engine-disk": _engine, "llama.cpp": _llama}
    with contextlib.ExitStack() as stack:
        ask = kinds[spec["kind"]](spec, stack)
        gc.collect()
        give_back()
        group = MemoryGroup(Path(spec["group"])) if spec["group"] else None
        if group:
            forget(Path(path) for path in spec["files"])   # what loading left in the page cache is nobody's need; mapped pages stay
            if not group.limit(spec["memory_mb"]):
                return {"ran": False}
        ask(spec["prompts"][0], min(8, spec["new_tokens"]))   # warm up
        reset_peak()
        charged = group.peak() if group else lambda: None
        faults, read = major_faults(), kernel_bytes()
        seconds, first, tokens, text = 0.0, [], 0, []
        for prompt in spec["prompts"]:
            began, times, new = ask(prompt, spec["new_tokens"])
            first.append(1000 * (times[0] - began))
            seconds += times[-1] - times[0]
            tokens += len(times) - 1
            text.append(new)
        most = charged()
        return {"ran": True, "tok_s": tokens / seconds, "ttft_ms": sum(first) / len(first), "peak_mb": peak_resident_bytes() / 1e6,
                "charged_mb": None if most is None else most / 1e6, "major_faults": major_faults() - faults,
                "read_mb": None if read is None else (kernel_bytes() - read) / 1e6, "tokens": tokens, "text": text}  # fmt: skip


# Each takes what it needs of the specification and gives ask(prompt, new_tokens) -> (start, the time of each new token, the new tokens).

def _engine(spec: dict, stack: contextlib.ExitStack):
    from .engine import Engine, load_manifest
    from .simulator import Cache

    model = load_manifest(spec["folder"]).model
    keys = model.num_layers * model.num_experts
    share = 1.0 if spec["kind"] == "engine" else spec["share"]
    engine = stack.enter_context(Engine(spec["folder"], cache=Cache(slots=max(model.top_k, round(share * keys))), lanes=spec["lanes"], announce=lambda line: None))
    if share == 1.0:
        for prompt in spec["prompts"]:   # brings every expert in that will be used
            engine.generate([prompt], max_new_tokens=spec["new_tokens"])

    def ask(prompt, new_tokens):
        times, began = [], time.perf_counter()
        (new,) = engine.generate([prompt], max_new_tokens=new_tokens, on_tokens=lambda _: times.append(time.perf_counter()))
        return began, times, new

    return ask


def _transformers(spec: dict, stack: contextlib.ExitStack):
    import torch
    from transformers import OlmoeForCausalLM, StoppingCriteria, StoppingCriteriaList

    model = OlmoeForCausalLM.from_pretrained(spec["checkpoint"], dtype=torch.bfloat16 if spec["dtype"] == "bf16" else torch.float32)
    if spec["kind"] == "offload":
        from accelerate import dispatch_model

        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=Path(spec["folder"]).parent))
        places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
        for i, layer in enumerate(model.model.layers):
            places |= {f"model.layers.{i}.{name}": "cpu" for name, _ in layer.named_children() if name != "mlp"}
            places |= {f"model.layers.{i}.mlp.{name}": "disk" if name == "experts" else "cpu" for name, _ in layer.mlp.named_children()}
        model = dispatch_model(model, places, main_device="cpu", offload_dir=folder)

    class Clock(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    times: list[float] = []

    def ask(prompt, new_tokens):
        times.clear()
        ids = torch.tensor([prompt])
        began = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
                             stopping_criteria=StoppingCriteriaList([Clock()]))  # fmt: skip
        return began, list(times), out[0, len(prompt) :].tolist()

    return ask


def _llama(spec: dict, stack: contextlib.ExitStack):
    """Its defaults, but for greedy choice and the number of threads: the file is mapped, so that the kernel's page cache is its expert cache."""
    from llama_cpp import Llama

    threads, room = spec["threads"], max(map(len, spec["prompts"])) + spec["new_tokens"]
    model = Llama(model_path=spec["gguf"], n_ctx=room, n_threads=threads, n_threads_batch=threads, use_mmap=True, verbose=False)
    stack.callback(model.close)

    def ask(prompt, new_tokens):
        model.reset()   # no token of the prompt is known from before
        times, new, began = [], [], time.perf_counter()
        for token in model.generate(prompt, temp=0.0):
            times.append(time.perf_counter())
            new.append(int(token))
            if len(new) == new_tokens:
                return began, times, new

    return ask


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
