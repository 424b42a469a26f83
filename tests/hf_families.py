"""Tiny random models of transformers' mixture-of-experts families, with what makes each of them special switched on."""

from __future__ import annotations

import torch

E, K, LAYERS, D, V, CONTEXT = 8, 2, 4, 32, 61, 32

COMMON = dict(vocab_size=V, hidden_size=D, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=24,
              moe_intermediate_size=24, max_position_embeddings=CONTEXT, initializer_range=0.3, num_experts_per_tok=K, pad_token_id=0, bos_token_id=1, eos_token_id=2,
              tie_word_embeddings=False)  # fmt: skip
LATENT = dict(num_key_value_heads=4, head_dim=None, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, kv_lora_rank=16, q_lora_rank=16)   # DeepSeek's attention
NOT_DBRX = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size",
                          "max_position_embeddings", "num_experts_per_tok"))  # fmt: skip
GROUPS = dict(n_group=4, topk_group=2)

# family -> (what its configuration changes, layers with a gate, shared experts)
FAMILIES = {
    "olmoe": (dict(num_experts=E), range(LAYERS), 0),
    "mixtral": (dict(num_local_experts=E), range(LAYERS), 0),
    "qwen2_moe": (dict(num_experts=E, shared_expert_intermediate_size=24, mlp_only_layers=[2]), (0, 1, 3), 1),
    "qwen3_moe": (dict(num_experts=E, decoder_sparse_step=2), (1, 3), 0),
    "deepseek_v2": (LATENT | GROUPS | dict(n_routed_experts=E, n_shared_experts=2, first_k_dense_replace=1, topk_method="group_limited_greedy",
                                             topk_group=1), (1, 2, 3), 2),   # with as many groups as experts chosen, groups would change nothing
    "deepseek_v3": (LATENT | GROUPS | dict(n_routed_experts=E, n_shared_experts=1, first_k_dense_replace=2), (2, 3), 1),
    "gpt_oss": (dict(num_local_experts=E, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}), range(LAYERS), 0),
    "granitemoe": (dict(num_local_experts=E), range(LAYERS), 0),
    "glm4_moe": (GROUPS | dict(n_routed_experts=E, n_shared_experts=1, first_k_dense_replace=1), (1, 2, 3), 1),
    "phimoe": (dict(num_local_experts=E), range(LAYERS), 0),
    # recognised without a line of their own
    "ernie4_5_moe": (dict(moe_num_experts=E, moe_k=K, moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=3), (1, 2, 3), 2),
    "minimax_m2": (dict(num_local_experts=E), range(LAYERS), 0),
    "flex_olmo": (dict(num_experts=E), range(LAYERS), 0),
    "dots1": (GROUPS | dict(n_routed_experts=E, n_shared_experts=1, first_k_dense_replace=1), (1, 2, 3), 1),
    "lfm2_moe": (dict(num_experts=E, num_dense_layers=1, layer_types=["full_attention"] * LAYERS), (1, 2, 3), 0),
    "afmoe": (dict(num_experts=E, num_shared_experts=1, num_dense_layers=1, layer_types=["full_attention"] * LAYERS), (1, 2, 3), 1),
    "exaone_moe": (GROUPS | dict(num_experts=E, num_shared_experts=1, first_k_dense_replace=1, layer_types=["full_attention"] * LAYERS), (1, 2, 3), 1),
    "granitemoeshared": (dict(num_local_experts=E, shared_intermediate_size=24), range(LAYERS), 1),
    "minimax": (dict(num_local_experts=E, layer_types=["full_attention"] * LAYERS), range(LAYERS), 0),
    "jamba": (dict(num_experts=E, attn_layer_period=1, attn_layer_offset=0, expert_layer_period=2, expert_layer_offset=1, use_mamba_kernels=False), (1, 3), 0),
    "dbrx": (NOT_DBRX | dict(d_model=D, n_heads=4, n_layers=LAYERS, max_seq_len=CONTEXT, attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
                             ffn_config=dict(ffn_hidden_size=24, moe_num_experts=E, moe_top_k=K)), range(LAYERS), 0),   # its gate returns a tensor, its block chooses
    "hunyuan_v1_moe": (dict(num_experts=E, moe_topk=K), range(LAYERS), 1),
}
ASKED = list(FAMILIES)[:10]


def tiny(family: str, seed: int = 0, **changes):
    """A random model of a family, in evaluation mode; neither routers nor the biases of their choice are zero, so that they matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    settings = {name: value for name, value in (COMMON | FAMILIES[family][0] | changes).items() if value is not None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()
    for name, buffer in [*model.named_buffers(), *model.named_parameters()]:
        if "correction_bias" in name or name.endswith("expert_bias"):
            buffer.data.uniform_(-0.5, 0.5)
        elif buffer.shape == (E, D) and not buffer.any():   # a router that the family initialises with zeros
            buffer.data.normal_(0.0, 0.3)
    return model
