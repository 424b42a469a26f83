"""OLMoE checkpoints: config.json and model.safetensors with one entry per expert and projection, which transformers and other engines load."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from predmoe.config import ConfigError, ModelConfig, build, to_dict
from predmoe.files import parse_json
from predmoe.model import MoEModel

COPY_AGAIN = "copy the checkpoint again"   # what a person can do about a damaged one
WORKED_OUT = "rotary_emb.inv_freq"         # an entry that old checkpoints have though config.json says it all: transformers passes over it, too
FLOATING = ("F64", "F32", "BF16", "F16")   # safetensors' names of what weights may be stored as

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
        out |= _layer_entries(i)
    return out


def _layer_entries(layer: int) -> dict[str, list[str]]:
    ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
    return {ours + a: [theirs + b] for a, b in _PLAIN.items()} | {ours + "attention.qkv.weight": [f"{theirs}self_attn.{n}_proj.weight" for n in "qkv"]}


def expert_entries(layer: int, expert: int) -> tuple[str, str, str]:
    """The checkpoint's entries of one expert: gate, up and down projection."""
    return tuple(f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight" for name in ("gate", "up", "down"))


def _dense_shape(ours: str, config: ModelConfig) -> tuple[int, ...]:
    """Of each of the checkpoint's entries that `ours` is made of."""
    V, D, E = config.vocab_size, config.hidden_size, config.num_experts
    kind = ours.split(".", 2)[-1] if ours.startswith("layers.") else ours
    return {"embed.weight": (V, D), "head.weight": (V, D), "router.weight": (E, D), "attention.qkv.weight": (D, D), "attention.out.weight": (D, D)}.get(kind, (D,))


def dense_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Our name of each tensor outside the experts -> its shape."""
    found = {ours: (len(entries), _dense_shape(ours, config)) for ours, entries in dense_entries(config).items()}
    return {ours: (count * rows, *rest) for ours, (count, (rows, *rest)) in found.items()}


def entry_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every entry of an OLMoE checkpoint of this shape with its tensor's shape, one after another: a damaged config.json claims more than fits in memory."""
    D, F = config.hidden_size, config.expert_size
    for ours, theirs in _TOP.items():
        yield theirs, _dense_shape(ours, config)
    for layer in range(config.num_layers):
        for ours, entries in _layer_entries(layer).items():
            yield from ((name, _dense_shape(ours, config)) for name in entries)
        for expert in range(config.num_experts):
            yield from zip(expert_entries(layer, expert), ((F, D), (F, D), (D, F)))


def counted(names: Iterable[str]) -> str:
    """Entries in few words: the first by name, and how many more there are."""
    first, *more = sorted(names)
    return first + (f" and {len(more)} more {'entry' if len(more) == 1 else 'entries'}" if more else "")


def check_entries(names: Iterable[str], config: ModelConfig, shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
    """Raise a ConfigError that names a missing entry, or the first surplus one and how many there are, unless `names` are those of an OLMoE checkpoint of this
    shape; with the tensors' `shapes` by name, also one of another shape."""
    held, expected = set(names), {}
    for name, shape in entry_shapes(config):   # ends at the first that is missing, however many `config` claims
        if name not in held:
            raise ConfigError(f"the checkpoint has no {name}: it is not an OLMoE checkpoint of {config.num_layers} layers and {config.num_experts} experts")
        expected[name] = shape
    if surplus := [name for name in held - set(expected) if not name.endswith(WORKED_OUT)]:
        raise ConfigError(f"the checkpoint has {counted(surplus)}, which a model of {config.num_layers} layers and {config.num_experts} experts has not")
    for name, shape in expected.items() if shapes is not None else ():
        if tuple(shapes[name]) != shape:
            raise ConfigError(f"{name} is {tuple(shapes[name])}, config.json says {shape}")


def from_olmoe(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The inverse of `to_olmoe`; a missing or surplus entry, or one of another shape, is a ConfigError that names it."""
    check_entries(state, config, {name: tensor.shape for name, tensor in state.items()})
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
    partial.chmod(0o644)   # the library leaves it to its owner alone
    partial.rename(weights)
    partial = folder / "config.partial"
    partial.write_text(json.dumps(olmoe_config(model.config), indent=2) + "\n")
    partial.rename(folder / "config.json")
    return folder


def _read_json(source: Path) -> dict:
    try:
        value = parse_json(source.read_text())
    except ValueError as error:
        raise ConfigError(f"{source} is damaged, it is not JSON: {error}; {COPY_AGAIN}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{source} is damaged, it holds a {type(value).__name__} instead of an object; {COPY_AGAIN}")
    return value


def _shards(index: Path) -> list[str]:
    """The files that an index of shards names."""
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ConfigError(f"{index} is damaged, its weight_map does not name the checkpoint's files; {COPY_AGAIN}")
    return sorted(set(names.values()))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint's folder: one, or shards with an index. Raises ConfigError for one that is not there."""
    names, index = ["model.safetensors"], folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / names[0]).is_file():  # transformers takes the single file first, too
        names = _shards(index)
    for name in names:
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} lacks {name}: the checkpoint is incomplete; {COPY_AGAIN}")
    return [folder / name for name in names]


def headers(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Entry -> its shape and safetensors' name of its dtype, without reading the weights. Raises ConfigError where the file is damaged."""
    try:
        with safe_open(file, "pt") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
    except SafetensorError as error:
        raise ConfigError(f"{file} is damaged: {error}; {COPY_AGAIN}") from None


def check_floating(dtypes: Mapping[str, str]) -> None:
    """Raise a ConfigError that names the first entry (of name -> safetensors' dtype) that is no plain floating-point one: integers without their scales say nothing."""
    if quantised := [name for name, dtype in dtypes.items() if dtype not in FLOATING]:
        raise ConfigError(f"the checkpoint stores {counted(quantised)} as {dtypes[min(quantised)]}: quantised weights cannot be read, only {', '.join(FLOATING)}")


def find_checkpoint(folder: str | Path, expected: ModelConfig | None = None) -> tuple[ModelConfig, list[Path]]:
    """What the OLMoE checkpoint in `folder` is, and its safetensors files (one, or shards with an index). Raises ConfigError where it is none, incomplete, or
    not what is `expected`."""
    folder = Path(folder)
    source = folder / "config.json"
    if not source.is_file():
        raise ConfigError(f"{folder} holds no config.json: it is not a checkpoint")
    config = model_config(_read_json(source), str(source))
    if expected is not None and config != expected:
        a, b = to_dict(config), to_dict(expected)
        differing = ", ".join(f"{n}={a[n]} (wanted {b[n]})" for n in a if a[n] != b[n])
        raise ConfigError(f"{folder} is a checkpoint of another shape: {differing}")
    return config, weight_files(folder)


def load_checkpoint(folder: str | Path, expected: ModelConfig | None = None) -> MoEModel:
    """The model in an OLMoE folder (one safetensors file or shards with an index).

    Raises ConfigError where files are missing or damaged, the format is another, or `expected` differs from what is stored.
    """
    config, files = find_checkpoint(folder, expected)
    stored = {name: dtype for file in files for name, (_, dtype) in headers(file).items()}
    state: dict[str, Tensor] = {}
    for file in files:
        state |= load_file(file)
    try:
        check_floating(stored)
        ours = {name: tensor.float() for name, tensor in from_olmoe(state, config).items()}   # before a model is made: config.json may claim any size
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    model = MoEModel(config)
    model.load_state_dict(ours)
    return model
