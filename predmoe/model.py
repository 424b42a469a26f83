"""The MoE decoder: an OLMoE block (RMSNorm, RoPE, QK-norm, SwiGLU experts, softmax top-k router, untied embeddings).

`MoEModel.forward` returns the loss or the logits and one `Routing` record per layer. Checkpoints are OLMoE checkpoints.
"""
# B batch, T time, N = B*T tokens, D model width, F expert width, E experts, K chosen, H heads, L layers, V vocabulary

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from predmoe import gpu
from predmoe.config import ConfigError, ModelConfig, build, to_dict
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
    with torch.device("meta"):
        model = MoEModel(config)
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for layer in model.layers for p in layer.experts.parameters())
    return {"total": total, "active": total - experts * (config.num_experts - config.top_k) // config.num_experts}


# --- OLMoE checkpoints: config.json and model.safetensors with one entry per expert and projection --------------------

_PLAIN = {
    "attention_norm.weight": "input_layernorm.weight",
    "moe_norm.weight": "post_attention_layernorm.weight",
    "router.weight": "mlp.gate.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
}
_TOP = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}


def to_olmoe(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our state dict under OLMoE's names, one tensor per expert and projection."""
    out = {theirs: state[ours] for ours, theirs in _TOP.items()}
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        out |= {theirs + b: state[ours + a] for a, b in _PLAIN.items()}
        for name, part in zip("qkv", state[ours + "attention.qkv.weight"].chunk(3)):
            out[f"{theirs}self_attn.{name}_proj.weight"] = part
        gate_up, down = state[ours + "experts.gate_up"], state[ours + "experts.down"]
        for e in range(config.num_experts):
            gate, up = gate_up[e].chunk(2)
            for name, part in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[e])):
                out[f"{theirs}mlp.experts.{e}.{name}.weight"] = part
    return {name: tensor.detach().contiguous() for name, tensor in out.items()}


def dense_entries(config: ModelConfig) -> dict[str, list[str]]:
    """Our name of each tensor outside the experts -> the checkpoint's entries that it is made of, joined along their rows."""
    out = {ours: [theirs] for ours, theirs in _TOP.items()}
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        out |= {ours + a: [theirs + b] for a, b in _PLAIN.items()}
        out[ours + "attention.qkv.weight"] = [f"{theirs}self_attn.{n}_proj.weight" for n in "qkv"]
    return out


def expert_entries(layer: int, expert: int) -> tuple[str, str, str]:
    """The checkpoint's entries of one expert: gate, up and down projection."""
    return tuple(f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight" for name in ("gate", "up", "down"))


def check_entries(names, config: ModelConfig) -> None:
    """Raise a ConfigError that names a missing or surplus entry, unless `names` are those of an OLMoE checkpoint of this shape."""
    known = {name for entries in dense_entries(config).values() for name in entries}
    known |= {name for i in range(config.num_layers) for e in range(config.num_experts) for name in expert_entries(i, e)}
    if missing := sorted(known - set(names)):
        raise ConfigError(f"the checkpoint has no {missing[0]}: it is not an OLMoE checkpoint of {config.num_layers} layers and {config.num_experts} experts")
    if surplus := sorted(set(names) - known):
        raise ConfigError(f"the checkpoint has {surplus[0]}, which a model of {config.num_layers} layers and {config.num_experts} experts has not")


def from_olmoe(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The inverse of `to_olmoe`; a missing or surplus entry is a ConfigError that names it."""
    check_entries(state, config)
    out = {ours: state[entries[0]] if len(entries) == 1 else torch.cat([state[name] for name in entries]) for ours, entries in dense_entries(config).items()}
    for i in range(config.num_layers):
        gates, ups, downs = zip(*([state[name] for name in expert_entries(i, e)] for e in range(config.num_experts)))
        out[f"layers.{i}.experts.gate_up"] = torch.stack([torch.cat(pair) for pair in zip(gates, ups)])
        out[f"layers.{i}.experts.down"] = torch.stack(downs)
    return out


def olmoe_config(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict:
    """config.json of a checkpoint. A model whose routing OLMoE does not know gets a model_type that it will not load."""
    return {
        "architectures": ["OlmoeForCausalLM"] if config.routing == "topk" else ["PredmoeForCausalLM"],
        "model_type": "olmoe" if config.routing == "topk" else f"predmoe_{config.routing}",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.expert_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "norm_topk_prob": config.norm_topk_prob,
        "max_position_embeddings": config.context,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "clip_qkv": None,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": config.vocab_size - 1,
        "pad_token_id": None,
        "dtype": str(dtype).removeprefix("torch."),
        "predmoe": {"routing": config.routing, "early_by": config.early_by},
    }


def model_config(olmoe: dict, source: str = "config.json") -> ModelConfig:
    """ModelConfig of an OLMoE config.json; anything that this decoder does not compute is refused by name."""
    ours, rope = olmoe.get("predmoe", {"routing": "topk", "early_by": 0}), olmoe.get("rope_parameters") or {}
    for name, part in (("predmoe", ours), ("rope_parameters", rope)):
        if not isinstance(part, dict):
            raise ConfigError(f"{source}: {name} holds a {type(part).__name__}, it needs `name: value` entries")
    expected = "olmoe" if ours.get("routing") == "topk" else f"predmoe_{ours.get('routing')}"
    if olmoe.get("model_type") != expected:
        raise ConfigError(f"{source}: model_type={olmoe.get('model_type')!r} is not an OLMoE checkpoint")
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_experts",
              "num_experts_per_tok", "max_position_embeddings", "norm_topk_prob", "rms_norm_eps")
    if missing := [name for name in needed if name not in olmoe]:
        raise ConfigError(f"{source} lacks {', '.join(missing)}: it does not describe an OLMoE checkpoint")
    fixed = {"hidden_act": "silu", "attention_bias": False, "clip_qkv": None, "tie_word_embeddings": False}
    for name, value in fixed.items():
        if olmoe.get(name, value) != value:
            raise ConfigError(f"{source}: {name}={olmoe[name]!r} is not supported, only {value!r}")
    if olmoe.get("num_key_value_heads") not in (None, olmoe["num_attention_heads"]):
        raise ConfigError(f"{source}: grouped key-value heads are not supported")
    if rope.get("rope_type", "default") != "default" or olmoe.get("rope_scaling"):
        raise ConfigError(f"{source}: scaled rotary embeddings are not supported")
    theta = rope.get("rope_theta", olmoe.get("rope_theta", 10000.0))
    parameters = {
        "vocab_size": olmoe["vocab_size"],
        "hidden_size": olmoe["hidden_size"],
        "num_layers": olmoe["num_hidden_layers"],
        "num_heads": olmoe["num_attention_heads"],
        "expert_size": olmoe["intermediate_size"],
        "num_experts": olmoe["num_experts"],
        "top_k": olmoe["num_experts_per_tok"],
        "context": olmoe["max_position_embeddings"],
        "norm_topk_prob": olmoe["norm_topk_prob"],
        "rope_theta": theta,
        "rms_norm_eps": olmoe["rms_norm_eps"],
        "init_std": olmoe.get("initializer_range", 0.02),
        **ours,
    }
    try:
        return build(ModelConfig, parameters)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def save_checkpoint(model: MoEModel, folder: str | Path) -> Path:
    """Write an OLMoE checkpoint that transformers and other engines load. Each file is written aside, then renamed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: p.detach().cpu() for name, p in model.state_dict().items()}
    weights = folder / "model.safetensors"
    partial = weights.with_suffix(".partial")
    save_file(to_olmoe(state, model.config), partial, metadata={"format": "pt"})
    partial.rename(weights)
    partial = folder / "config.partial"
    partial.write_text(json.dumps(olmoe_config(model.config), indent=2) + "\n")
    partial.rename(folder / "config.json")
    return folder


def _read_json(source: Path) -> dict:
    try:
        value = json.loads(source.read_text())
    except ValueError as error:
        raise ConfigError(f"{source} is damaged, it is not JSON: {error}; copy the checkpoint again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{source} is damaged, it holds a {type(value).__name__} instead of an object; copy the checkpoint again")
    return value


def _shards(index: Path) -> list[str]:
    """The files that an index of shards names."""
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ConfigError(f"{index} is damaged, its weight_map does not name the checkpoint's files; copy the checkpoint again")
    return sorted(set(names.values()))


def find_checkpoint(folder: str | Path) -> tuple[ModelConfig, list[Path]]:
    """What the OLMoE checkpoint in `folder` is, and its safetensors files (one, or shards with an index). Raises ConfigError where it is none or incomplete."""
    folder = Path(folder)
    source = folder / "config.json"
    if not source.is_file():
        raise ConfigError(f"{folder} holds no config.json: it is not a checkpoint")
    config = model_config(_read_json(source), str(source))
    names, index = ["model.safetensors"], folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / names[0]).is_file():  # transformers takes the single file first, too
        names = _shards(index)
    for name in names:
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} lacks {name}: the checkpoint is incomplete")
    return config, [folder / name for name in names]


def load_checkpoint(folder: str | Path, expected: ModelConfig | None = None) -> MoEModel:
    """The model in an OLMoE folder (one safetensors file or shards with an index).

    Raises ConfigError where files are missing or damaged, the format is another, or `expected` differs from what is stored.
    """
    config, files = find_checkpoint(folder)
    if expected is not None and config != expected:
        a, b = to_dict(config), to_dict(expected)
        differing = ", ".join(f"{n}={a[n]} (wanted {b[n]})" for n in a if a[n] != b[n])
        raise ConfigError(f"{folder} is a checkpoint of another shape: {differing}")
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            state |= load_file(file)
        except SafetensorError as error:
            raise ConfigError(f"{file} is damaged: {error}") from None
    model = MoEModel(config)
    ours = {name: tensor.float() for name, tensor in from_olmoe(state, config).items()}
    for name, parameter in model.state_dict().items():
        if ours[name].shape != parameter.shape:
            raise ConfigError(f"{folder}: {name} is {tuple(ours[name].shape)}, config.json says {tuple(parameter.shape)}")
    model.load_state_dict(ours)
    return model
