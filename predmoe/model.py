"""The MoE decoder: an OLMoE block (RMSNorm, RoPE, QK-norm, SwiGLU experts, softmax top-k router, untied embeddings).

`MoEModel.forward` returns the loss or the logits and one `Routing` record per layer. Its checkpoints are in `checkpoint`.
"""
# B batch, T time, N = B*T tokens, D model width, F expert width, E experts, K chosen, H heads, L layers, V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from predmoe import gpu
from predmoe.config import ModelConfig
from predmoe.kernels import grouped_experts, head_loss, rms_norm, rotary, rotate


class Routing(NamedTuple):
    """What one layer decided for N tokens: everything predictor, losses, diagnostics and traces need."""

    hidden_ND: Tensor  # MoE input, after its norm: where predictors read
    logits_NE: Tensor  # router logits, float32
    experts_NK: Tensor  # chosen experts, best first; equal probabilities go to the lower id
    gates_NK: Tensor  # their weights, float32


@dataclass
class Output:
    loss: Tensor | None  # mean next-token cross-entropy, nats; None without targets
    losses_BT: Tensor | None  # each token's loss
    logits_BTV: Tensor | None  # None where targets were given: the batch's logits are then never held
    routing: list[Routing]


def top_k(scores_NE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their ids, largest first, equal scores by lower id (torch.topk leaves ties open).

    Raises ValueError where a score is NaN: a NaN has no rank, and no expert may be chosen by accident. On a GPU, where asking would
    wait for the device, the NaN goes on into the loss, which is found out there (`Trainer.read`).
    """
    if gpu.on_gpu(scores_NE):
        values, ids = scores_NE.sort(dim=1, descending=True, stable=True)
        return values[:, :k], ids[:, :k]
    if torch.isnan(scores_NE).any():
        row = int(torch.isnan(scores_NE).any(1).nonzero()[0])
        raise ValueError(f"router scores of token {row} are NaN: no expert can be chosen")
    if k > 4 or torch.isneginf(scores_NE).any():  # the loop below would choose such an expert twice
        values, ids = scores_NE.sort(dim=1, descending=True, stable=True)
        return values[:, :k], ids[:, :k]
    rest = scores_NE.detach().clone()
    ids = []
    for _ in range(k):  # argmax returns the first of equal maxima; for small k far cheaper than a stable sort
        ids.append(rest.argmax(dim=1, keepdim=True))
        rest.scatter_(1, ids[-1], float("-inf"))
    ids_NK = torch.cat(ids, dim=1)
    return scores_NE.gather(1, ids_NK), ids_NK


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        D = config.hidden_size
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.q_norm = RMSNorm(D, config.rms_norm_eps)
        self.k_norm = RMSNorm(D, config.rms_norm_eps)
        self.out = nn.Linear(D, D, bias=False)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, mask_B1TT: Tensor | None = None) -> Tensor:
        """Causal, unless `mask_B1TT` says which tokens (last axis) each token sees."""
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(x_BTD).chunk(3, dim=-1)
        q, k, v = (z.view(B, T, self.num_heads, -1) for z in (self.q_norm(q), self.k_norm(k), v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (z.to(v.dtype).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1TT, is_causal=mask_B1TT is None)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


class Experts(nn.Module):
    """All experts of a layer, stacked as transformers stacks them: gate_up (E, 2F, D), down (E, D, F)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        E, D, F_ = config.num_experts, config.hidden_size, config.expert_size
        self.gate_up = nn.Parameter(torch.empty(E, 2 * F_, D))
        self.down = nn.Parameter(torch.empty(E, D, F_))

    def forward(self, x_ND: Tensor, gates_NK: Tensor, experts_NK: Tensor) -> Tensor:
        return grouped_experts(x_ND, gates_NK, experts_NK, self.gate_up, self.down)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.config = config
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.moe_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        if config.routing == "hash":
            generator = torch.Generator().manual_seed(index)
            order = torch.rand(config.vocab_size, config.num_experts, generator=generator).argsort(dim=1)
            self.register_buffer("hash_VK", order[:, : config.top_k].contiguous(), persistent=False)

    def route(self, source_ND: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Router logits (float32), chosen experts and their gate weights, from the MoE input `source_ND`."""
        with torch.autocast(source_ND.device.type, enabled=False):
            logits_NE = F.linear(source_ND.float(), self.router.weight.float())
            probs_NE = logits_NE.softmax(dim=-1)
            if self.config.routing == "hash":
                experts_NK = self.hash_VK[tokens_N]
                gates_NK = probs_NE.gather(1, experts_NK)
            else:
                gates_NK, experts_NK = top_k(probs_NE, self.config.top_k)
            if self.config.norm_topk_prob:
                gates_NK = gates_NK / gates_NK.sum(dim=1, keepdim=True)
        return logits_NE, experts_NK, gates_NK


class MoEModel(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        cos, sin = rotary(config.context, config.num_heads, config.hidden_size // config.num_heads, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def initialise(self, seed: int) -> MoEModel:
        """Every matrix normal(0, init_std) in the order of their names, norms at one; the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in sorted(self.named_parameters()):
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                draw = torch.empty(parameter.shape).normal_(0.0, self.config.init_std, generator=generator)
                parameter.data.copy_(draw)
        return self

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Output:
        """Loss (with targets) or logits, and one Routing record per layer; tokens beyond the context are refused."""
        B, T = tokens_BT.shape
        h_BTD, routing = self.body(tokens_BT)
        if targets_BT is None:
            return Output(None, None, self.head(h_BTD), routing)
        loss, losses_N = head_loss(h_BTD.reshape(B * T, -1), self.head.weight, targets_BT.reshape(-1))
        return Output(loss, losses_N.view(B, T), None, routing)

    def body(self, tokens_BT: Tensor, tree: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, list[Routing]]:
        """Final hidden states (B, T, D), after the last norm and before the head, and the routing of every layer.

        `tree`: positions (B, T) and which tokens each token sees (B, 1, T, T) bool, for rows whose tokens are a tree in place of
        a line; then T may exceed the context, positions may not.
        """
        B, T = tokens_BT.shape
        positions_BT, mask_B1TT = tree or (None, None)
        longest = T if tree is None else int(positions_BT.max()) + 1
        if longest > self.config.context:
            raise ValueError(f"{longest} tokens exceed the model's context of {self.config.context}")
        tokens_N = tokens_BT.reshape(-1)
        cos, sin = (self.cos[:T], self.sin[:T]) if tree is None else (self.cos[positions_BT], self.sin[positions_BT])
        x_BTD = self.embed(tokens_BT)
        routing: list[Routing] = []
        early = self.config.early_by if self.config.routing == "early" else 0
        for i, layer in enumerate(self.layers):
            x_BTD = x_BTD + layer.attention(layer.attention_norm(x_BTD), cos, sin, mask_B1TT)
            m_ND = layer.moe_norm(x_BTD).reshape(B * T, -1)
            source_ND = routing[max(i - early, 0)].hidden_ND if early and i else m_ND
            logits_NE, experts_NK, gates_NK = layer.route(source_ND, tokens_N)
            routing.append(Routing(m_ND, logits_NE, experts_NK, gates_NK))
            x_BTD = x_BTD + layer.experts(m_ND, gates_NK, experts_NK).view(B, T, -1)
        return self.norm(x_BTD), routing

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters in all and active per token (all but the unchosen experts), without building the model."""
    D, E, L = config.hidden_size, config.num_experts, config.num_layers
    experts = 3 * E * D * config.expert_size * L
    total = 2 * config.vocab_size * D + D + L * (4 * D * D + 4 * D + E * D) + experts
    return {"total": total, "active": total - experts * (config.num_experts - config.top_k) // config.num_experts}
