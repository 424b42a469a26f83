"""The places where a training step spends its time, as autograd functions with few passes over memory.

The experts never gather weights per token or build a tensor over all experts for a token; the head never holds the
logits of the whole batch; norm and rotation save the passes that a composite of elementwise operations makes.
"""
# B batch, T time, H heads, C head size, N tokens, K chosen experts per token, M = N*K dispatched rows, D model width, F expert width, E experts, V vocabulary

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from predmoe import gpu

# Logits are made for HEAD_ROWS rows at a time, in blocks of HEAD_BLOCK vocabulary entries: a block stays in a core's cache.
# On a GPU the whole vocabulary is one block: there a kernel's start is dear and its memory is not.
HEAD_ROWS, HEAD_BLOCK, GPU_HEAD_ROWS = 1024, 512, 2048


def _product_dtype(x: Tensor) -> torch.dtype:
    """What matrix products compute in: autocast's dtype where it is on, which products with out= do not take up by themselves."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _groups(flat_M: Tensor, order_M: Tensor, experts: int, grouped: bool) -> list[int] | Tensor:
    """How many rows each expert has; or, for grouped_mm, where each one's end: on the device, so that nothing waits for it."""
    if not grouped:
        return torch.bincount(flat_M, minlength=experts).tolist()
    return torch.searchsorted(flat_M[order_M], torch.arange(experts, device=flat_M.device), right=True, out_int32=True)


def _by_group(x_MA: Tensor, matrices_EAB: Tensor, sizes: list[int] | Tensor) -> Tensor:
    """Each group of rows times its own matrix, (M, B). (On a CPU torch's grouped_mm is as fast, but takes no float64 and no odd sizes.)"""
    if isinstance(sizes, Tensor):
        return F.grouped_mm(x_MA, matrices_EAB, offs=sizes)
    out_MB = x_MA.new_empty(x_MA.shape[0], matrices_EAB.shape[2])
    for x, matrix, out in zip(x_MA.split(sizes), matrices_EAB.unbind(0), out_MB.split(sizes)):
        torch.mm(x, matrix, out=out)
    return out_MB


def _over_group(a_MA: Tensor, b_MB: Tensor, sizes: list[int] | Tensor) -> Tensor:
    """a.T @ b of each group of rows, (E, A, B); zero for an empty group."""
    if isinstance(sizes, Tensor):
        empty_E = torch.diff(sizes, prepend=sizes.new_zeros(1)) == 0
        return F.grouped_mm(a_MA.t(), b_MB, offs=sizes).masked_fill_(empty_E.view(-1, 1, 1), 0.0)
    out_EAB = a_MA.new_empty(len(sizes), a_MA.shape[1], b_MB.shape[1])
    for a, b, out in zip(a_MA.split(sizes), b_MB.split(sizes), out_EAB.unbind(0)):
        torch.mm(a.t(), b, out=out)
    return out_EAB


class _GroupedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, gates_NK, experts_NK, gate_up_EGD, down_EDF):
        N, K = experts_NK.shape
        flat_M = experts_NK.reshape(-1)
        order_M = torch.argsort(flat_M, stable=True)
        inverse_M = torch.empty_like(order_M)
        inverse_M[order_M] = torch.arange(order_M.numel(), device=order_M.device)
        sizes = _groups(flat_M, order_M, gate_up_EGD.shape[0], gpu.grouped_mm_holds(x_ND, down_EDF.shape[2]))
        x_MD = x_ND.index_select(0, order_M // K)
        pre_MG = _by_group(x_MD, gate_up_EGD.transpose(1, 2), sizes)
        gate_MF, up_MF = pre_MG.chunk(2, dim=1)
        act_MF = F.silu(gate_MF).mul_(up_MF)
        y_MD = _by_group(act_MF, down_EDF.transpose(1, 2), sizes)
        inverse_NK = inverse_M.view(N, K)
        ctx.save_for_backward(x_MD, gates_NK, order_M, inverse_NK, pre_MG, act_MF, y_MD, gate_up_EGD, down_EDF)
        ctx.sizes = sizes
        return F.embedding_bag(inverse_NK, y_MD, mode="sum", per_sample_weights=gates_NK.to(y_MD.dtype))

    @staticmethod
    def backward(ctx, grad_ND):
        x_MD, gates_NK, order_M, inverse_NK, pre_MG, act_MF, y_MD, gate_up_EGD, down_EDF = ctx.saved_tensors
        gates_M1 = gates_NK.reshape(-1).index_select(0, order_M).to(grad_ND.dtype).unsqueeze(1)
        grad_MD = grad_ND.index_select(0, order_M // gates_NK.shape[1])
        grad_gates_NK = torch.linalg.vecdot(y_MD, grad_MD)[inverse_NK].to(gates_NK.dtype)
        dy_MD = grad_MD.mul_(gates_M1)
        d_down_EDF = _over_group(dy_MD, act_MF, ctx.sizes)
        d_act_MF = _by_group(dy_MD, down_EDF, ctx.sizes)
        gate_MF, up_MF = pre_MG.chunk(2, dim=1)
        d_pre_MG = torch.empty_like(pre_MG)
        d_gate_MF, d_up_MF = d_pre_MG.chunk(2, dim=1)
        torch.mul(d_act_MF, F.silu(gate_MF), out=d_up_MF)
        d_gate_MF.copy_(torch.ops.aten.silu_backward(d_act_MF.mul_(up_MF), gate_MF))
        d_gate_up_EGD = _over_group(d_pre_MG, x_MD, ctx.sizes)
        dx_MD = _by_group(d_pre_MG, gate_up_EGD, ctx.sizes)
        dx_ND = F.embedding_bag(inverse_NK, dx_MD, mode="sum")
        return dx_ND, grad_gates_NK, None, d_gate_up_EGD, d_down_EDF


def grouped_experts(x_ND: Tensor, gates_NK: Tensor, experts_NK: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor) -> Tensor:
    """sum_k gates[n,k] * SwiGLU_{experts[n,k]}(x[n]), shape (N, D).

    gate_up_EGD (E, 2F, D) stacks gate and up projections, down_EDF is (E, D, F). Tokens are grouped by expert, one
    matrix product per expert and projection; a token's experts must be distinct. Deterministic: no scatter-add.
    Computed in x's dtype, or in autocast's.
    """
    dtype = _product_dtype(x_ND)
    with torch.autocast(x_ND.device.type, enabled=False):
        return _GroupedExperts.apply(x_ND.to(dtype), gates_NK, experts_NK, gate_up_EGD.to(dtype), down_EDF.to(dtype))


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h_ND, weight_VD, targets_N):
        N = h_ND.shape[0]
        cast_VD = weight_VD.to(h_ND.dtype)
        step, width = (GPU_HEAD_ROWS, len(weight_VD)) if gpu.on_gpu(h_ND) else (HEAD_ROWS, HEAD_BLOCK)
        wanted = any(ctx.needs_input_grad[:2])
        losses_N = h_ND.new_empty(N, dtype=torch.float32)
        dh_ND = torch.zeros_like(h_ND) if wanted else None
        dw_VD = torch.zeros_like(weight_VD) if wanted else None
        for s in range(0, N, step):
            rows = slice(s, s + step)
            exps, highs, totals, own = [], [], [], 0.0
            for v, block in _blocks(cast_VD, width):
                logits = (h_ND[rows] @ block.t()).float()
                index, inside = _within(targets_N[rows], v, block)
                own = own + logits.gather(1, index) * inside
                highs.append(logits.amax(dim=1, keepdim=True))
                exps.append(logits.sub_(highs[-1]).exp_())  # in place and step by step: torch's fused log_softmax is slower on a CPU
                totals.append(exps[-1].sum(dim=1, keepdim=True))
            highs = torch.cat(highs, dim=1)
            high = highs.amax(dim=1, keepdim=True)
            share = highs.sub_(high).exp_()  # brings each block's exponentials to the row's common maximum
            total = (torch.cat(totals, dim=1) * share).sum(dim=1, keepdim=True)
            losses_N[rows] = (total.log() + high - own).squeeze(1)
            if not wanted:
                continue
            share /= total
            for (v, block), exp, share_N1 in zip(_blocks(cast_VD, width), exps, share.split(1, dim=1)):
                index, inside = _within(targets_N[rows], v, block)
                grad = exp.mul_(share_N1).scatter_add_(1, index, -inside).to(h_ND.dtype)
                dh_ND[rows].addmm_(grad, block)
                dw_block = dw_VD[v : v + width]
                if dw_VD.dtype == grad.dtype:
                    dw_block.addmm_(grad.t(), h_ND[rows])
                else:  # products in bf16, their sum over chunks in the weight's float32
                    dw_block += grad.t() @ h_ND[rows]
        ctx.save_for_backward(dh_ND, dw_VD)
        ctx.mark_non_differentiable(losses_N)
        return losses_N.mean(), losses_N

    @staticmethod
    def backward(ctx, grad, _):
        dh_ND, dw_VD = ctx.saved_tensors
        grad = grad / dh_ND.shape[0]
        return dh_ND.mul_(grad), dw_VD.mul_(grad), None


def _blocks(weight_VD: Tensor, width: int):
    """(first entry, rows) of the head's weight in blocks of `width` entries of the vocabulary."""
    return zip(range(0, weight_VD.shape[0], width), weight_VD.split(width))


def _within(targets_N: Tensor, first: int, block: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's target as an index into the block (clamped), and 1.0 where it lies in it; both (N, 1)."""
    index = (targets_N - first).unsqueeze(1)
    inside = (index >= 0) & (index < block.shape[0])
    return index.clamp_(0, block.shape[0] - 1), inside.float()


def head_loss(h_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy in nats of softmax(h @ weight.T) against `targets_N`, and each token's loss (no gradient).

    Logits exist for HEAD_ROWS rows at a time (GPU_HEAD_ROWS on a GPU), in float32; gradients are formed in the same pass. Products are
    computed in h's dtype, or in autocast's.
    """
    dtype = _product_dtype(h_ND)
    with torch.autocast(h_ND.device.type, enabled=False):
        return _HeadLoss.apply(h_ND.to(dtype), weight_VD, targets_N)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        D = x.shape[-1]
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_().div_(D).add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    def backward(ctx, grad):
        normed, scale, weight = ctx.saved_tensors
        D = normed.shape[-1]
        dot = grad * normed
        d_weight = dot.reshape(-1, D).sum(0)
        share = (dot.reshape(-1, D) @ weight).div_(-D).view_as(scale)
        return torch.mul(grad, weight, out=dot).addcmul_(normed, share).mul_(scale), d_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return _RMSNorm.apply(x, weight, eps)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x, cos, sin):
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def rotary(context: int, num_heads: int, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """The tables of `rotate`, each (context, num_heads, head_size): cosines, and sines with the sign that each half takes.

    Repeated for every head, since an operation on the CPU is two to three times as fast without that broadcast.
    """
    inverse = 1.0 / theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    angle = torch.outer(torch.arange(context, dtype=torch.float32), inverse)
    tables = torch.cat([angle.cos()] * 2, dim=1), torch.cat([-angle.sin(), angle.sin()], dim=1)
    return tuple(table.unsqueeze(1).repeat(1, num_heads, 1) for table in tables)


def rotate(x_BTHC: Tensor, cos_THC: Tensor, sin_THC: Tensor) -> Tensor:
    """Rotary position embedding in the rotate-half convention: (first, second) turns by the angle of its position."""
    return _Rotate.apply(x_BTHC, cos_THC, sin_THC)
