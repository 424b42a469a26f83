"""What a user would take instead of the engine, each in a process of its own, on the same checkpoint with the same threads.

    transformers   the whole model in memory, generate with its key-value cache
    offload        the same with every layer's experts on disk (accelerate), the dense part in memory
    engine         the engine with every expert in memory
    engine-disk    the engine with a share of the experts in memory

Run as `python -m predmoe.peers SPEC`; `compare` starts it. Rates are of decoding alone, after a warm-up; memory is the process's peak while it generates.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from .config import ConfigError

KINDS = ("transformers", "offload", "engine", "engine-disk")


class PeerFailed(RuntimeError):
    """A contender's process ended with an error; the message has its last words."""


def compare(kinds: Sequence[str], checkpoint: Path, folder: Path, prompts: Sequence[Sequence[int]], *, new_tokens: int, share: float, threads: int = 1,
            lanes: int = 4, rounds: int = 1) -> pd.DataFrame:  # fmt: skip
    """Columns kind, round, tok_s, ttft_ms, peak_mb, tokens: the contenders take turns, `rounds` times. `checkpoint`: OLMoE format; `folder`: its export."""
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ConfigError(f"peers: {unknown[0]!r} is unknown; choose of {', '.join(KINDS)}")
    spec = {"checkpoint": str(checkpoint), "folder": str(folder), "prompts": [list(map(int, prompt)) for prompt in prompts], "new_tokens": new_tokens, "share": share, "lanes": lanes}
    rows = []
    for number in range(rounds):
        for kind in kinds:
            rows.append({"kind": kind, "round": number} | _ask(spec | {"kind": kind}, threads))
    frame = pd.DataFrame(rows, columns=["kind", "round", "tok_s", "ttft_ms", "peak_mb", "tokens", "text"])
    different = frame.groupby("kind").text.first().nunique() if len(frame) else 0
    if different > 1:
        raise PeerFailed("the contenders do not give the same greedy tokens, so their speeds are of different work")
    return frame.drop(columns="text")


def _ask(spec: dict, threads: int) -> dict:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, "-m", "predmoe.peers", json.dumps(spec)], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise PeerFailed(f"{spec['kind']}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


# --- in the child --------------------------------------------------------------------------------------------------------------

def _main(spec: dict) -> dict:
    with contextlib.ExitStack() as stack:
        ask = _engine(spec, stack) if spec["kind"].startswith("engine") else _transformers(spec, stack)
        ask(spec["prompts"][0], min(8, spec["new_tokens"]))   # warm up
        _reset_peak()
        seconds, first, tokens, text = 0.0, [], 0, []
        for prompt in spec["prompts"]:
            began, times, new = ask(prompt, spec["new_tokens"])
            first.append(1000 * (times[0] - began))
            seconds += times[-1] - times[0]
            tokens += len(times) - 1
            text.append(new)
        from .engine.summary import peak_resident_bytes

        return {"tok_s": tokens / seconds, "ttft_ms": sum(first) / len(first), "peak_mb": peak_resident_bytes() / 1e6, "tokens": tokens, "text": str(text)}


def _reset_peak() -> None:
    """From here on VmHWM counts anew: loading is not generating. Where that is forbidden the peak has loading in it, for all alike."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


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

    model = OlmoeForCausalLM.from_pretrained(spec["checkpoint"], dtype=torch.float32)
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


def say(table: pd.DataFrame) -> list[str]:
    """The engine beside each peer, as ratios of medians over the rounds."""
    at = table.groupby("kind")[["tok_s", "peak_mb"]].median()
    pairs = [("engine", "transformers", "with every expert in memory"), ("engine-disk", "offload", "with experts on disk")]
    return [f"The engine {how}: {at.tok_s[ours] / at.tok_s[theirs]:.2f} times the decoding tokens/s of {theirs} ({at.tok_s[ours]:.1f} against {at.tok_s[theirs]:.1f}), "
            f"at {at.peak_mb[ours]:.0f} MB of peak resident memory against {at.peak_mb[theirs]:.0f} MB."
            for ours, theirs, how in pairs if ours in at.index and theirs in at.index]  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(_main(json.loads(sys.argv[1]))))
