"""How fast a training step is on this device: ours, with and without the prediction term, beside transformers' OLMoE of the same size."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from . import budget, gpu
from .config import RunConfig, to_dict
from .checkpoint import olmoe_config
from .train import Trainer

OURS, JOINT = "ours", "ours, with the term"
ROUNDS, STEPS, WARMUP = 5, 4, 3


def measure(config: RunConfig, *, rounds: int = ROUNDS, steps: int = STEPS, warmup: int = WARMUP, peers: bool = True, peak_size: int | None = None,
            say: Callable[[str], None] = lambda line: None) -> dict:  # fmt: skip
    """Seconds of a step of each contender, the median of `rounds` taken in turns, and what follows from them.

    Rows have tokens per second, operations per second of the active parameters (`budget.flops_per_token`), their share of the peak of
    matrix products measured beside them, and the most memory on a GPU. A contender that cannot run here is a row that says why.
    """
    device, dtype = config.train.device, torch.bfloat16 if config.train.dtype == "bfloat16" else torch.float32
    torch.set_num_threads(config.train.threads)
    peak_size = peak_size or (8192 if device.startswith("cuda") else 1024)
    peak = gpu.matrix_peak(device, dtype, size=peak_size)
    plain = dataclasses.replace(config, objective=dataclasses.replace(config.objective, lambda_pred=0.0))
    joint = dataclasses.replace(config, objective=dataclasses.replace(config.objective, lambda_pred=0.3, ramp_start=0.0, ramp_end=0.0))
    makers: dict[str, Callable] = {OURS: lambda: _ours(plain), JOINT: lambda: _ours(joint)}
    if peers:
        makers |= {f"transformers, {name}": lambda name=name: _theirs(plain, name) for name in _implementations(device)}
    rows, running = [], {}
    # One after the other, since a GPU need not hold all of them; the step is timed alone on it, so turns would tell nothing more.
    for name, make in makers.items():
        say(f"throughput: {name}")
        try:
            if device.startswith("cuda"):
                torch.cuda.reset_peak_memory_stats()
            step = make()
            for _ in range(warmup):
                step()
            taken = [_timed(step, steps, device) for _ in range(rounds)]
            seconds = statistics.median(taken)
        except (RuntimeError, ValueError, ImportError, NotImplementedError) as error:
            rows.append({"contender": name, "refused": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:120]}"})
            continue
        tokens = config.train.batch_size * config.model.context
        per_token = budget.flops_per_token(joint if name == JOINT else plain)
        flops = sum(per_token.values()) * tokens / seconds
        running[name] = seconds
        rows.append({"contender": name, "seconds": seconds, "rounds": taken, "tokens_per_second": tokens / seconds, "tflops": flops / 1e12, "share_of_peak": flops / peak,
                     "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if device.startswith("cuda") else None})  # fmt: skip
        del step
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
    theirs = {name: seconds for name, seconds in running.items() if name.startswith("transformers")}
    fastest = min(theirs, key=theirs.get) if theirs else None
    return {"rows": rows, "peak_tflops": peak / 1e12, "dtype": config.train.dtype, "model": to_dict(config.model), "fastest_peer": fastest,
            "of_the_fastest_peer": theirs[fastest] / running[OURS] if fastest else None, "term_share_of_step": running[JOINT] / running[OURS] - 1,
            "term_share_of_operations": budget.flops_per_token(joint)["term"] / budget.flops_per_token(joint)["model"]}  # fmt: skip


def _timed(step: Callable, steps: int, device: str) -> float:
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - started) / steps


def _ours(config: RunConfig) -> Callable:
    """The trainer's own step, on its corpus."""
    with tempfile.TemporaryDirectory() as folder:   # nothing is written there: neither log nor checkpoint is due
        trainer = Trainer(config, Path(folder))

    def step():
        values = trainer.training_step()
        trainer.step += 1
        return values

    return step


def _implementations(device: str) -> list[str]:
    """transformers' experts implementations; its loop over experts last."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    kernels_of_others = {"deepgemm", "sonicmoe"}   # need packages that are not among ours
    slow = {"batched_mm"} if device == "cpu" else set()   # copies weights for every token
    return [name for name in sorted(ALL_EXPERTS_FUNCTIONS.valid_keys()) if name not in kernels_of_others | slow] + ["eager"]


def _theirs(config: RunConfig, implementation: str) -> Callable:
    """A step of transformers' OlmoeForCausalLM of the same size and batch: autocast, clipping and AdamW as ours, the router loss on."""
    import transformers

    shape = transformers.OlmoeConfig(**{k: v for k, v in olmoe_config(config.model).items() if k not in ("architectures", "model_type", "predmoe", "rope_theta", "dtype")})
    shape._attn_implementation, shape._experts_implementation = "sdpa", implementation
    t, device = config.train, config.train.device
    model = transformers.OlmoeForCausalLM(shape).to(device)
    model.router_aux_loss_coef = config.objective.balance
    model.train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=t.lr, betas=(t.beta1, t.beta2), weight_decay=t.weight_decay, fused=True)
    windows = torch.randint(0, config.model.vocab_size, (t.batch_size, config.model.context + 1), generator=torch.Generator().manual_seed(0)).to(device)
    inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def step():
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=t.dtype == "bfloat16"):
            loss = model(input_ids=inputs, labels=inputs, shift_labels=targets, use_cache=False, output_router_logits=True).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, t.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def table(found: dict) -> str:
    """The measurement as markdown."""
    lines = ["| step | tokens/s | TFLOP/s of active parameters | of the matrix-product peak | memory |", "|---|---|---|---|---|"]
    for row in found["rows"]:
        if "refused" in row:
            lines.append(f"| {row['contender']} | not run: {row['refused']} | | | |")
            continue
        memory = f"{row['peak_memory_gb']:.1f} GB" if row["peak_memory_gb"] is not None else ""
        lines.append(f"| {row['contender']} | {row['tokens_per_second']:,.0f} | {row['tflops']:.3g} | {row['share_of_peak']:.0%} | {memory} |")
    said = f"Peak of matrix products in the same run: {found['peak_tflops']:.3g} TFLOP/s ({found['dtype']}). The term takes {found['term_share_of_step']:+z.1%} of a step, "
    said += f"{found['term_share_of_operations']:.2%} of its operations"
    ours = [row["rounds"] for row in found["rows"] if row["contender"] in (OURS, JOINT) and "rounds" in row]   # none in a table of before they were kept
    if ours:
        said += f"; rounds of the same step differ by up to {max((max(taken) - min(taken)) / statistics.median(taken) for taken in ours):.0%}"
    said += "."
    if found["fastest_peer"]:
        said += f" Ours is {found['of_the_fastest_peer']:.2f}x as fast as {found['fastest_peer']}."
    return "\n".join(lines) + f"\n\n{said}"
