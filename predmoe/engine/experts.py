"""An expert's computation from its block in a buffer, in float32 whatever the block holds.

The order of operations does not depend on which buffer it is, nor on when the block arrived, so that every cache and every prefetch
gives the same bits.
"""
# n tokens of an expert, D model width, F expert width

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ModelConfig
from .layout import DTYPES, Block
from .storage import Buffers


class Blocks:
    """Views of every buffer as the matrices of an expert; `one` and `many` compute it."""

    def __init__(self, buffers: Buffers, config: ModelConfig, dtype: str, block: Block):
        D, F_ = config.hidden_size, config.expert_size
        self._F, self._plain = F_, dtype == "float32"
        split = 2 * F_ * D * DTYPES[dtype].itemsize
        self._views = []
        for i in range(buffers.count):
            raw = torch.from_numpy(buffers.array(i)[: block.payload])
            matrices = raw[:split].view(DTYPES[dtype]).view(2 * F_, D), raw[split : block.weights].view(DTYPES[dtype]).view(D, F_)
            scales = raw[block.weights :].view(torch.float32).split([2 * F_, D]) if dtype == "int8" else None
            self._views.append((*matrices, scales))
        if not self._plain:
            self._room = torch.empty(2 * F_, D), torch.empty(D, F_)

    def _matrices(self, buffer: int) -> tuple[Tensor, Tensor]:
        """gate_up (2F, D) and down (D, F) in float32; without int8's scales."""
        gate_up, down, _ = self._views[buffer]
        if self._plain:
            return gate_up, down
        return self._room[0].copy_(gate_up), self._room[1].copy_(down)

    def one(self, buffer: int, x_D: Tensor, out_D: Tensor) -> None:
        """SwiGLU of one token, written to `out_D`."""
        gate_up, down = self._matrices(buffer)
        scales = self._views[buffer][2]
        pre = torch.mv(gate_up, x_D)
        if scales:
            pre.mul_(scales[0])
        gate, up = pre.split(self._F)
        torch.mv(down, F.silu(gate).mul_(up), out=out_D)
        if scales:
            out_D.mul_(scales[1])

    def many(self, buffer: int, x_nD: Tensor) -> Tensor:
        """SwiGLU of n tokens, (n, D)."""
        gate_up, down = self._matrices(buffer)
        scales = self._views[buffer][2]
        pre = x_nD @ gate_up.t()
        if scales:
            pre.mul_(scales[0])
        gate, up = pre.split(self._F, dim=1)
        y = F.silu(gate).mul_(up) @ down.t()
        return y.mul_(scales[1]) if scales else y
