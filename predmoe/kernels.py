"""The places where a training step spends its time, as autograd functions with few passes over memory.

The experts never gather weights per token or build a tensor over all experts for a token; the head never holds the
logits of the whole batch; norm and rotation save the passes that a composite of elementwise operations makes.
"""
# B batch, T time, H heads, C head size, N tokens, K chosen experts per token, M = N*K dispatched rows, D model width, F expert width, E experts, V vocabulary

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_CHUNK = 128  # rows of logits held at once: few enough that they stay in the cache


def _product_dtype(x: Tensor) -> torch.dtype:
    """What matrix products compute in: autocast's dtype where it is on, which products with out= do not take up by themselves."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _segments(experts_NK: Tensor, num_experts: int):
    """Rows sorted by expert: (order_M into the flattened choices, its inverse, [(expert, first row, end row)])."""
    flat_M = experts_NK.reshape(-1)
    order_M = torch.argsort(flat_M, stable=True)
    inverse_M = torch.empty_like(order_M)
    inverse_M[order_M] = torch.arange(order_M.numel(), device=order_M.device)
    ends = torch.bincount(flat_M, minlength=num_experts).cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    return order_M, inverse_M, [(e, s, t) for e, (s, t) in enumerate(zip(starts, ends)) if t > s]


class _GroupedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, gates_NK, experts_NK, gate_up_EGD, down_EDF):
        K = experts_NK.shape[1]
        order_M, inverse_M, segments = _segments(experts_NK, gate_up_EGD.shape[0])
        x_MD = x_ND.index_select(0, order_M // K)
        pre_MG = x_MD.new_empty(x_MD.shape[0], gate_up_EGD.shape[1])
        for e, s, t in segments:
            torch.mm(x_MD[s:t], gate_up_EGD[e].t(), out=pre_MG[s:t])
        gate_MF, up_MF = pre_MG.chunk(2, dim=1)
        act_MF = F.silu(gate_MF).mul_(up_MF)
        y_MD = torch.empty_like(x_MD)
        for e, s, t in segments:
            torch.mm(act_MF[s:t], down_EDF[e].t(), out=y_MD[s:t])
        y_NKD = y_MD.index_select(0, inverse_M).view(*experts_NK.shape, -1)
        ctx.save_for_backward(x_MD, gates_NK, order_M, inverse_M, pre_MG, act_MF, y_NKD, gate_up_EGD, down_EDF)
        ctx.segments = segments
        return torch.bmm(gates_NK.to(y_NKD.dtype).unsqueeze(1), y_NKD).squeeze(1)

    @staticmethod
    def backward(ctx, grad_ND):
        x_MD, gates_NK, order_M, inverse_M, pre_MG, act_MF, y_NKD, gate_up_EGD, down_EDF = ctx.saved_tensors
        N, K = gates_NK.shape
        grad_gates_NK = torch.bmm(y_NKD, grad_ND.unsqueeze(2)).squeeze(2).to(gates_NK.dtype)
        gates_M1 = gates_NK.reshape(-1).index_select(0, order_M).to(grad_ND.dtype).unsqueeze(1)
        dy_MD = grad_ND.index_select(0, order_M // K).mul_(gates_M1)
        d_down_EDF = torch.zeros_like(down_EDF)
        d_gate_up_EGD = torch.zeros_like(gate_up_EGD)
        d_act_MF = torch.empty_like(act_MF)
        for e, s, t in ctx.segments:
            torch.mm(dy_MD[s:t].t(), act_MF[s:t], out=d_down_EDF[e])
            torch.mm(dy_MD[s:t], down_EDF[e], out=d_act_MF[s:t])
        gate_MF, up_MF = pre_MG.chunk(2, dim=1)
        d_pre_MG = torch.empty_like(pre_MG)
        d_gate_MF, d_up_MF = d_pre_MG.chunk(2, dim=1)
        torch.mul(d_act_MF, F.silu(gate_MF), out=d_up_MF)
        d_gate_MF.copy_(torch.ops.aten.silu_backward(d_act_MF.mul_(up_MF), gate_MF))
        dx_MD = dy_MD  # no longer needed: reuse its memory
        for e, s, t in ctx.segments:
            torch.mm(d_pre_MG[s:t].t(), x_MD[s:t], out=d_gate_up_EGD[e])
            torch.mm(d_pre_MG[s:t], gate_up_EGD[e], out=dx_MD[s:t])
        dx_ND = dx_MD.index_select(0, inverse_M).view(N, K, -1).sum(1)
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
        wanted = any(ctx.needs_input_grad[:2])
        losses_N = h_ND.new_empty(N, dtype=torch.float32)
        dh_ND = torch.empty_like(h_ND) if wanted else None
        dw_VD = torch.zeros_like(weight_VD) if wanted else None
        for s in range(0, N, HEAD_CHUNK):
            rows = slice(s, s + HEAD_CHUNK)
            target = targets_N[rows].unsqueeze(1)
            logits = (h_ND[rows] @ cast_VD.t()).float()
            high = logits.amax(dim=1, keepdim=True)
            own = logits.gather(1, target)
            exp = logits.sub_(high).exp_()  # in place and step by step: torch's fused log_softmax is slower on a CPU
            total = exp.sum(dim=1, keepdim=True)
            losses_N[rows] = (total.log() + high - own).squeeze(1)
            if wanted:
                grad = exp.mul_(total.reciprocal())
                grad.scatter_add_(1, target, torch.full_like(target, -1, dtype=torch.float32))
                grad = grad.to(h_ND.dtype)
                torch.mm(grad, cast_VD, out=dh_ND[rows])
                if dw_VD.dtype == grad.dtype:
                    dw_VD.addmm_(grad.t(), h_ND[rows])
                else:  # products in bf16, their sum over chunks in the weight's float32
                    dw_VD += grad.t() @ h_ND[rows]
        ctx.save_for_backward(dh_ND, dw_VD)
        ctx.mark_non_differentiable(losses_N)
        return losses_N.mean(), losses_N

    @staticmethod
    def backward(ctx, grad, _):
        dh_ND, dw_VD = ctx.saved_tensors
        grad = grad / dh_ND.shape[0]
        return dh_ND.mul_(grad), dw_VD.mul_(grad), None


def head_loss(h_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy in nats of softmax(h @ weight.T) against `targets_N`, and each token's loss (no gradient).

    Logits exist for HEAD_CHUNK rows at a time, in float32; gradients are formed in the same pass. Products are
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
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def rotate(x_BTHC: Tensor, cos_T1C: Tensor, sin_T1C: Tensor) -> Tensor:
    """Rotary position embedding in the rotate-half convention: (first, second) turns by the angle of its position."""
    return _Rotate.apply(x_BTHC, cos_T1C, sin_T1C)
