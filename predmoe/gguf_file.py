"""A checkpoint as a GGUF file for llama.cpp, written in a stream: one layer's experts of one projection are in memory at a time.

llama.cpp's `olmoe` graph is our block but for one thing: it never renormalises the gate weights (OLMoE-1B-7B has norm_topk_prob = false),
and no entry of the file changes that. A checkpoint with norm_topk_prob = true, as ours are by default, is therefore written for its
`minimax-m2` graph, which is the same block (QK-norm over the whole width, rotation by halves, softmax, top-k, SwiGLU) with renormalised
gates; that graph adds a bias per expert before the choice, which is zero here. Neither graph rotates neighbouring pairs, so the rows of
the query and key matrices keep their order.

The file has no tokenizer ("no_vocab"): prompts are given as ids.
"""
# D model width, F expert width, E experts

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .config import ConfigError, ModelConfig
from .engine.export import Checkpoint, Source
from .checkpoint import check_entries, expert_entries

# Exact versions: another version may compute another thing. Not in requirements.lock: llama-cpp-python is built from its sources by a C++ compiler
# (minutes), and only the comparison asks for it. (The other two are light: gguf writes the file, llama-cpp-python imports diskcache.)
WANTED = {"llama-cpp-python": "0.3.36", "gguf": "0.19.0", "diskcache": "5.6.3"}
INSTALL = "pip install --no-deps " + " ".join(f"{name}=={version}" for name, version in WANTED.items())
DTYPES = ("float32", "bf16")
_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")   # in the order of `expert_entries`


def missing() -> str | None:
    """Why llama.cpp cannot be compared with here, in one sentence; None where it can."""
    for name in WANTED:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"llama.cpp needs {name}, which is not installed: {INSTALL} (needs a C++ compiler; builds for some minutes)"
    return None


def write_gguf(source: str | Path | Source, path: str | Path, *, dtype: str = "bf16") -> Path:
    """Write the model in `source` (an OLMoE-format folder, or a Source) to the GGUF file `path`, which appears whole or not at all.

    `dtype`: of the matrices, "bf16" or "float32"; norms and routers are float32 always, as llama.cpp's own conversion has them. Raises
    ConfigError for a model that llama.cpp does not compute and where `gguf` is not installed.
    """
    path = Path(path)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    source = Checkpoint(source) if isinstance(source, (str, Path)) else source
    config = source.config
    check_entries(source.names(), config)
    if config.routing != "topk":
        raise ConfigError(f"routing={config.routing!r}: llama.cpp chooses experts by the layer's own router alone, so this model cannot be a GGUF file")
    try:
        import gguf
    except ImportError:
        raise ConfigError(f"a GGUF file needs the package gguf: {INSTALL}") from None
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, "minimax-m2" if config.norm_topk_prob else "olmoe")
    try:
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if dtype == "bf16" else gguf.LlamaFileType.ALL_F32)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
        _describe(writer, config)
        layout = _layout(config)
        for name, (entries, shape) in layout.items():
            small = dtype == "float32" or _kept(name)
            writer.add_tensor_info(name, shape, np.dtype(np.float32 if small else np.float16), int(np.prod(shape)) * (4 if small else 2),
                                   None if small else gguf.GGMLQuantizationType.BF16)  # fmt: skip
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, (entries, shape) in layout.items():
            writer.write_tensor_data(_stored(source, entries, shape, dtype == "float32" or _kept(name)))
        writer.close()
        os.rename(partial, path)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)
    return path


def _describe(writer, config: ModelConfig) -> None:
    width = config.hidden_size // config.num_heads
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.expert_size)
    writer.add_expert_feed_forward_length(config.expert_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.top_k)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _layout(config: ModelConfig) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """GGUF's names, in the file's order -> (the checkpoint's entries, the shape); no entry for a tensor of zeros."""
    D, F, E, V = config.hidden_size, config.expert_size, config.num_experts, config.vocab_size
    out = {name: ((entry,), (D,) if entry == "model.norm.weight" else (V, D)) for name, entry in _TOP.items()}
    for i in range(config.num_layers):
        for entry, name in _LAYER.items():
            shape = (D,) if name.endswith("norm") else (E, D) if name == "ffn_gate_inp" else (D, D)
            out[f"blk.{i}.{name}.weight"] = (f"model.layers.{i}.{entry}.weight",), shape
        if config.norm_topk_prob:
            out[f"blk.{i}.exp_probs_b.bias"] = (), (E,)
        for name, entries in zip(_EXPERTS, zip(*(expert_entries(i, e) for e in range(E)))):
            out[f"blk.{i}.{name}.weight"] = entries, (E, D, F) if name == "ffn_down_exps" else (E, F, D)
    return out


def _kept(name: str) -> bool:
    """Whether a tensor is float32 in a bf16 file, too."""
    return name.endswith(("norm.weight", "ffn_gate_inp.weight", "exp_probs_b.bias"))


def _stored(source: Source, entries: tuple[str, ...], shape: tuple[int, ...], full: bool) -> np.ndarray:
    tensors = [source.get(entry) for entry in entries]
    tensor: Tensor = torch.zeros(shape) if not tensors else tensors[0] if len(shape) < 3 else torch.stack(tensors)
    if tuple(tensor.shape) != shape:
        raise ConfigError(f"{entries[0]} is {tuple(tensor.shape)}, config.json says {shape}")
    if full:
        return tensor.float().contiguous().numpy()
    return tensor.to(torch.bfloat16).contiguous().view(torch.float16).numpy()   # the bits; numpy has no bf16
