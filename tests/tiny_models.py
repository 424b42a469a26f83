"""Small models whose every weight matters, ours and transformers'."""

import torch

from predmoe.config import ModelConfig
from predmoe.model import MoEModel

TINY = dict(vocab_size=61, hidden_size=32, num_layers=4, num_heads=2, expert_size=24, num_experts=8, top_k=2, context=32, init_std=0.2)


def lively(seed=0, **changes):
    """A small model whose every weight matters: wide initialisation, norm weights away from one."""
    model = MoEModel(ModelConfig(**(TINY | changes))).initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens_of(model, B=2, T=None, seed=0):
    shape = (B, T or model.config.context)
    return torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def their_model(seed=0, **changes):
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(seed)
    config = OlmoeConfig(**(dict(
        vocab_size=61, hidden_size=32, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, num_experts=8,
        num_experts_per_tok=2, max_position_embeddings=32, initializer_range=0.2, pad_token_id=None, eos_token_id=1, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ) | changes))
    model = OlmoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model
