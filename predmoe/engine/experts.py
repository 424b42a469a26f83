"""An expert's computation from its block in a buffer, in float32 whatever the block holds.

The order of operations does not depend on which buffer it is, nor on when the block arrived, so that every cache and every prefetch
gives the same bits.
"""
# n tokens of an expert, A and B a matrix's output and input width, D model width, F expert width

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ModelConfig
from .layout import DTYPES, Block
from .storage import Buffers

ROOM = 1 << 16   # entries that are widened to float32 at a time: they stay in a core's cache, so that memory is read in the narrow type only


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
            scales = raw[block.weights :].view(torch.float32).split([2 * F_, D]) if dtype == "int8" else (None, None)
            self._views.append((*matrices, *scales))
        self._room = torch.empty(max(ROOM, D, F_))

    def one(self, buffer: int, x_D: Tensor, out_D: Tensor) -> None:
        """SwiGLU of one token, written to `out_D`."""
        gate_up, down, *scales = self._views[buffer]
        if self._plain:
            gate, up = torch.mv(gate_up, x_D).view(2, self._F).unbind()
            torch.mv(down, F.silu(gate).mul_(up), out=out_D)
        else:
            gate, up = self._widened(gate_up, scales[0], x_D.unsqueeze(0)).view(2, self._F).unbind()
            out_D.copy_(self._widened(down, scales[1], F.silu(gate).mul_(up).unsqueeze(0))[0])

    def many(self, buffer: int, x_nD: Tensor) -> Tensor:
        """SwiGLU of n tokens, (n, D)."""
        gate_up, down, *scales = self._views[buffer]
        times = (lambda matrix, _, x: x @ matrix.t()) if self._plain else self._widened
        gate, up = times(gate_up, scales[0], x_nD).view(-1, 2, self._F).unbind(1)
        return times(down, scales[1], F.silu(gate).mul_(up))

    def _widened(self, matrix_AB: Tensor, scale_A: Tensor | None, x_nB: Tensor) -> Tensor:
        """x times the transposed matrix, (n, A), a few rows of the matrix in float32 at a time."""
        A, B = matrix_AB.shape
        out_nA = torch.empty(len(x_nB), A)
        rows = max(1, ROOM // B)
        for first in range(0, A, rows):
            part = matrix_AB[first : first + rows]
            wide = self._room[: part.numel()].view(part.shape).copy_(part)
            if len(x_nB) == 1:
                torch.mv(wide, x_nB[0], out=out_nA[0, first : first + rows])
            else:
                out_nA[:, first : first + rows] = x_nB @ wide.t()
        return out_nA if scale_A is None else out_nA.mul_(scale_A)
