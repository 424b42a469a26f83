"""What a training run needs, on paper: operations, memory, communication, time and cost, from its configuration alone.

Operations, the memory of a step and the bytes that it sends are checked against measured small runs (tests/test_budget.py, tests/test_distributed.py); the rest is
arithmetic on them.
"""
# B batch, T time, N = B*T tokens of a process, D model width, F expert width, E experts, K chosen, H heads, L layers, V vocabulary, G processes

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from predmoe.config import ConfigError, ModelConfig, RunConfig, tier
from predmoe.kernels import GPU_HEAD_ROWS, HEAD_BLOCK, HEAD_ROWS
from predmoe.model import count_parameters

# OLMoE-1B-7B's shape (arXiv 2409.02060): 7B parameters in all.
SEVEN_B = ModelConfig(vocab_size=50304, hidden_size=2048, num_layers=16, num_heads=16, expert_size=1024, num_experts=64, top_k=8, context=4096)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs of one kind. The defaults are an H100 SXM's data sheet (dense bf16), eight in a node with NVLink, 400 Gb/s of network
    for each. `share_of_peak`: what a step is assumed to reach; `dollars_per_hour`: assumed price of a GPU hour."""

    gpus: int = 64
    gpus_per_node: int = 8
    peak_flops: float = 989e12
    memory_gb: float = 80.0
    node_gb_per_s: float = 450.0
    network_gb_per_s: float = 50.0
    share_of_peak: float = 0.35
    dollars_per_hour: float = 2.5

    def __post_init__(self):
        for name in ("gpus", "gpus_per_node", "peak_flops", "memory_gb", "node_gb_per_s", "network_gb_per_s", "share_of_peak", "dollars_per_hour"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be positive")
        if self.share_of_peak > 1:
            raise ConfigError(f"share_of_peak={self.share_of_peak} must be at most 1")


def pairs(config: RunConfig) -> int:
    """How many (layer, horizon) heads are trained with the backbone; 0 without the prediction term."""
    if not config.objective.lambda_pred:
        return 0
    return sum(config.model.num_layers - h for h in config.predictor.depths)


def head_size(config: RunConfig) -> int:
    """Weights of one head without its biases."""
    D, E = config.model.hidden_size, config.model.num_experts
    return D * E if config.predictor.kind == "linear" else D * D + D * E


def flops_per_token(config: RunConfig) -> dict[str, float]:
    """Floating-point operations of a training step per token: "model" (active parameters) and "term" (the heads).

    2 per multiplication and addition of a matrix product, twice as many backward as forward. Per layer 4 D^2 for queries, keys,
    values and output, D E for the router, 3 D F for each of K experts, and D (T + 1) for causal attention, which reads half of the
    context on average; D V for the head. Lookups, norms, rotations, softmaxes and the optimiser are left out.
    """
    m = config.model
    D, F, E, K, L, V, T = m.hidden_size, m.expert_size, m.num_experts, m.top_k, m.num_layers, m.vocab_size, m.context
    layer = 4 * D * D + D * E + 3 * D * F * K + D * (T + 1)
    return {"model": 3.0 * 2 * (L * layer + D * V), "term": 3.0 * 2 * pairs(config) * head_size(config)}


def parameters(config: RunConfig) -> dict[str, int]:
    """"total" and "active" of the model, and "heads" of the prediction term, biases included."""
    width = config.model.num_experts + (0 if config.predictor.kind == "linear" else config.model.hidden_size)
    return count_parameters(config.model) | {"heads": pairs(config) * (head_size(config) + width)}


def layer_bytes(m: ModelConfig, half: bool) -> float:
    """Bytes per token that a layer keeps for its backward pass; `half`: under bf16 autocast.

    12 vectors of D: two norms of the stream each with its scaled copy, queries, keys and values (3), both again normed and again
    turned, attention's output; for each chosen expert its input and output (2 D), its two projections and their product (3 F), and
    the sorting; two vectors of E, and a row's sums. In bf16 what norms keep stays float32.
    """
    D, F, E, K, H = m.hidden_size, m.expert_size, m.num_experts, m.top_k, m.num_heads
    rows = 4.0 * (2 * E + H + 5)
    if half:
        return 34.0 * D + K * (4 * D + 6 * F + 32) + rows
    return 4.0 * (12 * D + K * (2 * D + 3 * F + 8)) + rows


def step_memory(config: RunConfig, *, sequences: int | None = None) -> dict[str, float]:
    """Bytes that one process holds in training without sharding: "held" between steps, "step" at most on top of it, and its parts.

    `sequences`: of a process's part of the batch (default: all). The most is reached while logits exist, or in the backward pass
    of the uppermost experts, or, with few tokens, at its end with all gradients; the largest of them is taken.
    """
    m, half = config.model, config.train.dtype == "bfloat16"
    D, F, E, K, L, V = m.hidden_size, m.expert_size, m.num_experts, m.top_k, m.num_layers, m.vocab_size
    count, size = parameters(config), 2.0 if half else 4.0
    N = (sequences or config.train.batch_size // config.train.accumulate) * m.context
    P = count["total"] + count["heads"]
    casts = L * 2.0 * 3 * E * D * F if half else 0.0   # autocast's copies of the experts, kept for the backward pass as those of attention are
    kept = L * layer_bytes(m, half) * N + casts + (L * 2.0 * 4 * D * D if half else 0.0)
    gpu = config.train.device != "cpu"
    rows, block = min(GPU_HEAD_ROWS if gpu else HEAD_ROWS, N), V if gpu else min(HEAD_BLOCK, V)
    # The head's weight in bf16, and of a block of logits what is so before it is float32 and, of the one before, after.
    head = 2.0 * V * D + 2.0 * rows * block * (1 + (N > rows or V > block)) if half else 0.0
    copies = 1 + pairs(config) / max(L, 1) if pairs(config) else 0.0   # the stacked MoE inputs, and what flows back into them
    term = (L * D * 4.0 * min(copies, 2.0) + pairs(config) * 5 * E * 4.0) * N
    moments = {
        "logits": kept + 12.0 * D * N + 48.0 * N + 4.0 * V * D + 4.0 * rows * (V + (N > rows) * block) + head,
        "term": kept + 4.0 * D * N + 4.0 * V * D + term,
        "experts": kept + (8.0 * D + K * size * (2 * D + 3 * F) + 40.0) * N + 4.0 * V * D + size * 3 * E * D * F + (4.0 * L * D * N if pairs(config) else 0.0),
        "gradients": 4.0 * P + layer_bytes(m, half) * N + 8.0 * D * N,
    }
    return {"held": 12.0 * P, "step": max(moments.values()), "kept": kept, "casts": casts, **{f"at {name}": value for name, value in moments.items()}}


def check_memory(config: RunConfig, available: int | None = None) -> None:
    """Raise ConfigError where what a process holds, between steps or in one, is more than the machine's memory, or `available` bytes: it would be killed sooner or later."""
    available, needed = psutil.virtual_memory().total if available is None else available, step_memory(config)
    if needed["held"] > available:
        raise ConfigError(too_large(config, f"this machine has {available:,}"))
    if needed["held"] + needed["step"] > 1.2 * available:   # the formula is right within a tenth
        t = config.train
        raise ConfigError(f"batch_size={t.batch_size} sequences of {config.model.context} tokens in {t.accumulate} part(s) take {needed['step']:,.0f} bytes a step beside {needed['held']:,.0f} held, "
                          f"more than this machine's memory ({available:,}); lower batch_size, or raise accumulate")


def too_large(config: RunConfig, why: str) -> str:
    """The sentence about a run that does not fit into memory."""
    count = parameters(config)
    return (f"the model is too large for memory: training its {count['total'] + count['heads']:,} parameters holds {step_memory(config)['held']:,.0f} bytes, "
            f"weights and AdamW's two moments alone ({why}); lower hidden_size, expert_size, num_experts, num_layers or vocab_size, or train it where more is")  # fmt: skip


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory could not be had, on the host or on a GPU."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def shards(cluster: Cluster, engine: str) -> int:
    """Over how many GPUs a model is divided: all of them ("fsdp") or those of a node ("hsdp"), each node then holding a copy."""
    return min(cluster.gpus, cluster.gpus_per_node) if engine == "hsdp" else cluster.gpus


def _units(m: ModelConfig) -> tuple[int, int]:
    """Parameters of a layer's experts and of its attention: the units that `distributed` divides the model into, beside the rest."""
    return 3 * m.num_experts * m.hidden_size * m.expert_size, 4 * m.hidden_size**2 + 2 * m.hidden_size


def sharded_memory(config: RunConfig, cluster: Cluster, *, sequences: int, engine: str = "hsdp") -> dict[str, float]:
    """Bytes per GPU under FSDP2 as `distributed` divides it: weights, gradients and AdamW's moments in parts; whole while they are
    used, the unit of embeddings, head, routers, norms and heads with its gradients, and two layers' experts and attention; and the step's activations."""
    m, count = config.model, parameters(config)
    P, (experts, attention) = count["total"] + count["heads"], _units(m)
    root = P - m.num_layers * (experts + attention)
    step, head = step_memory(config, sequences=sequences), 4.0 * m.vocab_size * m.hidden_size   # the head's gradient is of the root
    size = 2.0 if config.train.dtype == "bfloat16" else 4.0
    activations = max(step["at logits"] - head, step["at term"] - head, step["at experts"] - head - size * experts)
    activations -= step["casts"]   # gathered as bf16, experts need no copy
    parts = {"parts of weights, gradients, moments": 16.0 * P / shards(cluster, engine), "activations": activations,
             "whole while used": 8.0 * root + 2 * (size * experts + 4.0 * attention) + 4.0 * experts}  # fmt: skip
    return parts | {"total": sum(parts.values())}


def communication(config: RunConfig, cluster: Cluster, *, engine: str = "hsdp") -> dict[str, float]:
    """Bytes that each GPU sends in a step, and the seconds that takes if nothing else is done.

    "gathered": weights (bf16 experts under autocast, else float32; experts and attention twice, forward and backward). "scattered": gradients,
    float32. Both (S-1)/S of the whole among S shards, at the speed of a node where a node holds them. "across": the sum of the
    nodes' gradients, 2 (R-1)/R of a GPU's part among R copies, over the network.
    """
    m, count = config.model, parameters(config)
    experts, attention = (unit * m.num_layers for unit in _units(m))
    P = count["total"] + count["heads"]
    S = shards(cluster, engine)
    copies, width = cluster.gpus / S, 2.0 if config.train.dtype == "bfloat16" else 4.0
    gathered = (S - 1) / S * (2 * (width * experts + 4.0 * attention) + 4.0 * (P - experts - attention))
    scattered = (S - 1) / S * 4.0 * P
    across = 2 * (copies - 1) / copies * 4.0 * P / S
    link = cluster.node_gb_per_s if S <= cluster.gpus_per_node else cluster.network_gb_per_s
    return {"gathered": gathered, "scattered": scattered, "across": across, "seconds": (gathered + scattered) / (link * 1e9) + across / (cluster.network_gb_per_s * 1e9)}


@dataclass(frozen=True)
class Plan:
    """A run on a cluster: bytes per GPU, seconds of a step, days, GPU hours and dollars; `term_share`: of operations, the prediction term's."""

    parameters: dict[str, int]
    flops: float
    term_share: float
    memory: dict[str, float]
    communication: dict[str, float]
    compute_seconds: float
    step_seconds: float
    steps: int
    days: float
    gpu_hours: float
    dollars: float


def plan(config: RunConfig, cluster: Cluster, *, tokens: float, sequences: int, engine: str = "hsdp") -> Plan:
    """`tokens` trained with `sequences` sequences per GPU and step under an engine of `distributed`. Communication is overlapped with computing, so a step takes the longer of both.

    Raises ConfigError where a GPU's memory does not hold it.
    """
    memory = sharded_memory(config, cluster, sequences=sequences, engine=engine)
    if memory["total"] > cluster.memory_gb * 1e9:
        raise ConfigError(f"{sequences} sequences of {config.model.context} tokens need {memory['total'] / 1e9:.0f} GB on each GPU, of {cluster.memory_gb:g} GB: "
                          "take fewer sequences, or more GPUs")  # fmt: skip
    per_token = flops_per_token(config)
    flops, own = sum(per_token.values()), sequences * config.model.context
    compute, sent = flops * own / (cluster.peak_flops * cluster.share_of_peak), communication(config, cluster, engine=engine)
    step = max(compute, sent["seconds"])
    steps = round(tokens / (own * cluster.gpus))
    hours = steps * step / 3600 * cluster.gpus
    return Plan(parameters(config), flops * tokens, per_token["term"] / flops, memory, sent, compute, step, steps, steps * step / 86400, hours, hours * cluster.dollars_per_hour)


def seven_b(lambda_pred: float = 0.3) -> RunConfig:
    """The run that the plan in docs/many_gpus.md is about; its learning rate and schedule are of no matter here."""
    from predmoe.config import to_dict

    return tier("a", model=to_dict(SEVEN_B), objective={"lambda_pred": lambda_pred}, data={"heldout_tokens": 1 << 20, "dev_tokens": 1 << 19})


def table(cluster: Cluster = Cluster(), *, tokens: float = 100e9, sequences: int = 4) -> str:
    """The plan as markdown: baseline, joint, and the difference that the term makes."""
    found = {name: plan(seven_b(weight), cluster, tokens=tokens, sequences=sequences) for name, weight in (("ordinary", 0.0), ("with the term", 0.3))}
    rows = {
        "parameters, active per token (B)": lambda p: (p.parameters["total"] / 1e9, p.parameters["active"] / 1e9),
        "parameters of the term's heads (M)": lambda p: (p.parameters["heads"] / 1e6,),
        "operations of the run (1e21)": lambda p: (p.flops / 1e21,),
        "memory per GPU (GB)": lambda p: (p.memory["total"] / 1e9,),
        "of it activations (GB)": lambda p: (p.memory["activations"] / 1e9,),
        "sent per GPU and step within a node (GB)": lambda p: ((p.communication["gathered"] + p.communication["scattered"]) / 1e9,),
        "between nodes (GB)": lambda p: (p.communication["across"] / 1e9,),
        "computing, a step (s)": lambda p: (p.compute_seconds,),
        "communication, a step (s)": lambda p: (p.communication["seconds"],),
        "steps": lambda p: (float(p.steps),),
        "days": lambda p: (p.days,),
        "GPU hours": lambda p: (p.gpu_hours,),
        "cost (dollars)": lambda p: (p.dollars,),
    }
    show = lambda values: ", ".join(f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in values)  # noqa: E731
    lines = ["| | " + " | ".join(found) + " | more |", "|---|---|---|---|"]
    for name, of in rows.items():
        a, b = (of(p) for p in found.values())
        more = f"{(b[0] / a[0] - 1):+z.2%}" if a[0] else ""
        lines.append(f"| {name} | {show(a)} | {show(b)} | {more} |")
    c = cluster
    full = communication(seven_b(), c, engine="fsdp")["seconds"]
    note = (f"{tokens / 1e9:g}B tokens, {sequences} sequences of {SEVEN_B.context} tokens per GPU and step, {c.gpus} GPUs of {c.peak_flops / 1e12:g} TFLOP/s (bf16) and "
            f"{c.memory_gb:g} GB, of which a step is assumed to reach {c.share_of_peak:.0%}, {c.node_gb_per_s:g} GB/s to the others of its node and "
            f"{c.network_gb_per_s:g} GB/s of network for each, {c.dollars_per_hour:g} dollars a GPU hour (assumed). "
            "Computing and communication are taken to go on side by side: a step lasts as long as the longer of both. "
            f"Each node holds a copy that its GPUs divide (--engine hsdp); divided over all {c.gpus} GPUs (fsdp), communication alone would take {full:.2f} s a step.")
    return "\n".join(lines) + "\n\n" + note
