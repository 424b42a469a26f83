"""Training steps of one contender in a process of its own, taken when asked: what train_step.py and parallel_runs.py measure.

A `Stepper` starts the process (`python steps.py SPEC`), which builds its model, warms up, and then answers one JSON line
per command: {"steps": n} -> {"wall": s, "cpu": s, "loss": nats}; "memory" -> MB; {"profile": n} -> ms per step by kind of work.
Memory is VmHWM of /proc/self/status, above what the process held before it built anything.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MATMUL = 1024  # the size of the products that give the machine's peak
WIDE = {"hidden_size": 256, "expert_size": 256, "num_heads": 4}
SIZES = {"cpu": {}, "wide": WIDE}  # changes to the model of the cpu tier
OURS, JOINT, MASK, PEAK = "ours", "ours, joint objective", "ours with a boolean mask per expert", "matmul"


# --- parent ------------------------------------------------------------------------------------------------------------


class Stepper:
    """A contender's process. `failed` says why there is none. `checkout`: another copy of the project, whose package and whose own steps.py it runs."""

    def __init__(self, contender: str, *, size: str, threads: int, warmup: int, batch_size: int | None = None, checkout: Path | None = None):
        from predmoe import runs

        spec = json.dumps({"contender": contender, "size": size, "threads": threads, "warmup": warmup, "batch_size": batch_size})
        threads_too = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        # The memory settings of the run store's processes, for every contender alike.
        environment = getattr(runs, "KEEP_MEMORY", {}) | getattr(runs, "same_bits", dict)() | os.environ | threads_too
        self.name, script = contender, Path(__file__)
        if checkout is not None:
            environment["PYTHONPATH"], script = str(checkout), checkout / "benchmarks" / "steps.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script), spec], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        ready = self._read()
        self.failed = ready.get("error")
        self.tokens_per_step, self.first_loss = ready.get("tokens"), ready.get("loss")
        self.rounds: list[dict] = []

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": f"its process ended with {self.process.wait()}"}

    def send(self, command) -> None:
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict:
        answer = self._read()
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def ask(self, command) -> dict:
        self.send(command)
        return self.receive()

    def memory(self) -> dict:
        """The process's peak until now, MB: {"peak": all of it, "above": beyond what the imports took}."""
        return self.ask("memory") if self.failed is None else {}

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def median(rounds: list[dict], name: str) -> float:
    return statistics.median(r[name] for r in rounds)


def markdown(rows: list[dict]) -> str:
    """A table; numbers come as text."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([row[n] for n in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every measured number to this file as well")
    return parser


def write(path: Path | None, value: dict, *, markdown: str) -> None:
    """Every number, and `markdown`: what README.md shows of it (outputs/benchmarks/*.json, `predmoe readme`)."""
    from predmoe import provenance

    if path is not None:
        found = provenance.capture()
        machine = f"Measured on {found['hardware']['cpu']}, {found['hardware']['cores']} cores, commit {found['commit'][:9]}."
        path.write_text(json.dumps(value | {"markdown": f"{markdown.strip()}\n\n{machine}", "provenance": found}, indent=1) + "\n")


def keep_memory() -> None:
    """Start this command again with the memory settings of the run store's processes, which glibc reads at a process's start alone."""
    from predmoe.runs import KEEP_MEMORY

    if not KEEP_MEMORY.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], KEEP_MEMORY | os.environ)


# --- child -------------------------------------------------------------------------------------------------------------


def config_of(size: str, *, threads: int, batch_size: int | None = None, joint: bool = False):
    """The run that every contender of a size trains: the cpu tier's recipe; `joint` with the whole prediction loss on."""
    from predmoe.config import tier

    objective = {"lambda_pred": 0.3, "ramp_start": 0.0, "ramp_end": 0.0} if joint else {}
    train = {"threads": threads} | ({"batch_size": batch_size} if batch_size else {})
    return tier("cpu", model=SIZES[size], objective=objective, train=train)


def memory(name: str) -> float:
    """VmHWM (peak) or VmRSS (now) of this process in MB; unlike ru_maxrss, not inherited from the parent."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


class Batches:
    """Random tokens with the frequencies of text (Zipf), the same for every contender; the interface of data.Stream."""

    def __init__(self, vocab_size: int):
        import numpy as np

        weights = 1.0 / np.arange(1, vocab_size + 1)
        self.p, self.vocab_size, self.numpy = weights / weights.sum(), vocab_size, np

    def batch(self, step: int, batch_size: int, context: int, rows: slice = slice(None)):
        return self.numpy.random.default_rng(step).choice(self.vocab_size, size=(batch_size, context + 1), p=self.p)[rows]


def our_step(config, *, mask: bool):
    """Trainer.training_step itself, on `Batches` in place of a corpus."""
    import torch

    import predmoe.model
    from predmoe.train import Trainer, build_parts

    if mask:
        predmoe.model.grouped_experts = masked_experts
    trainer = object.__new__(Trainer)
    trainer.config, trainer.step, trainer.autocast = config, 0, torch.bfloat16 if config.train.dtype == "bfloat16" else None
    trainer.stream = Batches(config.model.vocab_size)
    trainer.model, trainer.predictor, trainer.optimizer = build_parts(config)

    def step():
        values = trainer.training_step()
        trainer.step += 1
        return values["lm"]

    return step


def masked_experts(x_ND, gates_NK, experts_NK, gate_up_EGD, down_EDF):
    """What grouped_experts computes, the way it is often written: each expert on the tokens that a boolean mask picks."""
    import torch
    import torch.nn.functional as F

    out_ND = torch.zeros_like(x_ND)
    for e in range(gate_up_EGD.shape[0]):
        chosen_NK = experts_NK == e
        mask_N = chosen_NK.any(1)
        if mask_N.any():
            gate, up = F.linear(x_ND[mask_N], gate_up_EGD[e]).chunk(2, dim=1)
            weight = (gates_NK * chosen_NK).sum(1)[mask_N].unsqueeze(1)
            out_ND[mask_N] = out_ND[mask_N] + weight * F.linear(F.silu(gate) * up, down_EDF[e])
    return out_ND


def their_step(config, implementation: str):
    """One step of transformers' OlmoeForCausalLM from the same weights: the same batch, clip and AdamW, the router loss on."""
    import torch
    from transformers import OlmoeForCausalLM

    from predmoe.checkpoint import save_checkpoint
    from predmoe.model import MoEModel
    from predmoe.train import learning_rate

    m, t = config.model, config.train
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(MoEModel(m).initialise(t.seed), folder)
        model = OlmoeForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation=implementation)
    model.router_aux_loss_coef = config.objective.balance
    model.train()
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": t.weight_decay},
              {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=t.lr, betas=(t.beta1, t.beta2), fused=True)
    batches, count = Batches(m.vocab_size), [0]

    def step():
        windows = torch.from_numpy(batches.batch(count[0], t.batch_size, m.context))
        inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        out = model(input_ids=inputs, labels=inputs, shift_labels=targets, use_cache=False, output_router_logits=True)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, t.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = t.lr * learning_rate(t, count[0])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        count[0] += 1
        return out.loss.item() - config.objective.balance * out.aux_loss.item()

    return step


def refused(config, contender: str) -> str | None:
    """Why this contender cannot be tried here."""
    m, t = config.model, config.train
    if contender in ("deepgemm", "sonicmoe"):
        return "a CUDA kernel"
    if contender == "batched_mm":  # gathers a copy of three matrices for every token and choice, and keeps it for backward
        need = 4 * t.batch_size * m.context * m.top_k * 3 * m.hidden_size * m.expert_size * m.num_layers / 2**30
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 2**30
        if need > 0.5 * free:
            return f"copies weights per token: {need:.0f} GB of {free:.0f} GB free"
    return None


def matmul_step(threads: int):
    import torch

    a, b = torch.randn(MATMUL, MATMUL), torch.randn(MATMUL, MATMUL)
    out = torch.empty(MATMUL, MATMUL)
    return lambda: torch.mm(a, b, out=out) is None or 0.0


KINDS = {  # first match of the operation's name decides
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm"),
    "attention": ("scaled_dot_product", "flash_attention"),
    "optimiser and clipping": ("adam", "Optimizer", "_foreach_", "aten::stack"),
    "indexing, sorting, copies": (
        "index", "gather", "scatter", "sort", "bincount", "histc", "embedding", "aten::copy_", "aten::cat", "topk", "argmax", "nonzero", "one_hot",
        "cumsum", "where",
    ),
    "allocation and zeroing": ("aten::empty", "aten::zero", "aten::fill_", "aten::resize_", "aten::ones", "aten::new_"),
    "softmax and reductions": ("softmax", "aten::sum", "aten::mean", "aten::amax", "norm", "logsumexp", "nll_loss", "cross_entropy", "aten::max"),
    "elementwise": (
        "aten::mul", "aten::add", "aten::sub", "aten::div", "aten::exp", "silu", "sigmoid", "aten::neg", "rsqrt", "aten::pow", "reciprocal", "aten::log",
        "gelu", "square", "aten::eq", "isnan", "isinf", "aten::lt", "aten::bitwise", "isneginf", "clamp", "isfinite", "aten::abs", "aten::ne",
    ),
}  # fmt: skip


def profiled(step, count: int) -> dict[str, float]:
    """Milliseconds per step that the main thread spends in each kind of work; the rest is Python and dispatch."""
    from torch.profiler import ProfilerActivity, profile

    with open(os.devnull, "w") as nowhere:  # the profiler announces itself
        errors = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            for _ in range(count):
                step()
        os.dup2(errors, 2)
        os.close(errors)
    kinds = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for event in found.key_averages():
        kind = next((kind for kind, names in KINDS.items() if any(name in event.key for name in names)), "the rest")
        kinds[kind] += event.self_cpu_time_total / 1e3 / count
    return kinds


def serve(spec: dict) -> None:
    import torch

    contender, threads = spec["contender"], spec["threads"]
    torch.set_num_threads(threads)
    config = config_of(spec["size"], threads=threads, batch_size=spec["batch_size"], joint=contender == JOINT)
    if contender not in (OURS, JOINT, MASK, PEAK):
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        from transformers import OlmoeForCausalLM  # noqa: F401  its memory belongs to the imports
    import predmoe.train  # noqa: F401

    torch.ones(8, 8) @ torch.ones(8, 8)
    before = memory("VmRSS")
    if reason := refused(config, contender):
        return answer({"error": reason})
    if contender == PEAK:
        step = matmul_step(threads)
    elif contender in (OURS, JOINT, MASK):
        step = our_step(config, mask=contender == MASK)
    else:
        step = their_step(config, contender)
    losses = [step() for _ in range(max(1, spec["warmup"]))]
    answer({"tokens": config.train.batch_size * config.model.context, "loss": losses[0]})
    for line in sys.stdin:
        command = json.loads(line)
        if command == "memory":
            answer({"peak": memory("VmHWM"), "above": memory("VmHWM") - before})
            continue
        if "profile" in command:
            answer({"ms": profiled(step, command["profile"])})
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(command["steps"]):
            loss = step()
        answer({"wall": (time.perf_counter() - wall) / command["steps"], "cpu": (time.process_time() - cpu) / command["steps"], "loss": loss})


def answer(value: dict) -> None:
    print(json.dumps(value), file=OUT, flush=True)


if __name__ == "__main__":
    OUT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    with contextlib.suppress(BrokenPipeError):
        try:
            serve(json.loads(sys.argv[1]))
        except Exception as error:  # noqa: BLE001  said by the parent, beside the contender's name
            text = (str(error).strip().splitlines() or [""])[0]
            answer({"error": f"{type(error).__name__}: {text}"})
            raise
