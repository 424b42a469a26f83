"""What a GPU changes in training: which kernels hold on it, and what is compiled. Nothing here is used on a CPU.

Every fallback is said and recorded in the run's provenance: a step that is slower than it need be shall not look as if it were meant.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

COMPILE = "PREDMOE_COMPILE"   # "0" turns compilation off


def on_gpu(x: Tensor) -> bool:
    """Whether work on `x` goes the GPU's way: nothing that waits for the device, few large kernels."""
    return x.is_cuda


def grouped_mm_holds(x_ND: Tensor, expert_size: int) -> bool:
    """Whether torch's grouped_mm takes these experts: bf16 on CUDA from compute capability 8.0 on, rows of 16 bytes.

    Elsewhere (ROCm, float32, odd sizes) each expert is a product of its own, which waits once per layer for the sizes of the groups.
    """
    if not x_ND.is_cuda or torch.version.hip is not None or x_ND.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(x_ND.device) >= (8, 0) and x_ND.shape[1] % 8 == 0 and expert_size % 8 == 0


def prepare(model: nn.Module, *, autocast: torch.dtype | None, say=lambda line: None) -> dict:
    """Compile what holds and allow TF32 for what stays float32; returns what is in force, for the provenance.

    Attention (norms, rotation, fused attention, projections) is compiled: static shapes, no branch on data. Routers and the
    grouped experts are not: their cost is in sorting and in products that are single kernels already.
    """
    torch.set_float32_matmul_precision("high" if autocast else "highest")
    config = model.config
    probe = torch.empty(1, config.hidden_size, dtype=autocast or torch.float32, device=model.device)
    found = {"grouped_mm": grouped_mm_holds(probe, config.expert_size), "compiled": False}
    if not found["grouped_mm"]:
        say("grouped_mm does not hold here: experts are computed one after the other")
    if os.environ.get(COMPILE) == "0":
        return found
    try:
        _probe(model, autocast)
    except Exception as error:  # noqa: BLE001  compilers raise their own; whatever it is, the step is right without them
        say(f"attention is not compiled ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]})")
        return found
    for layer in model.layers:
        layer.attention.compile(fullgraph=True, dynamic=False)
    return found | {"compiled": True}


def _probe(model: nn.Module, autocast: torch.dtype | None) -> None:
    """A forward and backward pass of a compiled attention of this shape; gradients are thrown away."""
    attention, T = model.layers[0].attention, model.config.context
    compiled = torch.compile(attention, fullgraph=True, dynamic=False)
    x_BTD = torch.zeros(1, T, model.config.hidden_size, device=model.device, requires_grad=True)
    with torch.autocast(model.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
        torch.autograd.grad(compiled(x_BTD, model.cos[:T], model.sin[:T]).float().sum(), x_BTD)


def matrix_peak(device: str, dtype: torch.dtype, *, size: int = 8192, seconds: float = 1.0) -> float:
    """Floating-point operations per second of `size`-square matrix products, the best of several rounds: the yardstick of a step."""
    import time

    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    best, ending = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < ending or best == float("inf"):
        wait()
        started = time.perf_counter()
        for _ in range(4):
            a @ b
        wait()
        best = min(best, (time.perf_counter() - started) / 4)
    return 2 * size**3 / best
