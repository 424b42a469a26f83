"""A checkpoint as a GGUF file: llama.cpp, where it is installed, gives our logits."""

import numpy as np
import pytest
import torch
from tiny_models import lively, tokens_of

from predmoe import gguf_file
from predmoe.checkpoint import save_checkpoint
from predmoe.config import ConfigError
from predmoe.engine.export import Checkpoint, stored_model
from predmoe.gguf_file import write_gguf

NO_LLAMA = gguf_file.missing()
needs_llama = pytest.mark.skipif(NO_LLAMA is not None, reason=str(NO_LLAMA))


def theirs(path, tokens):
    """llama.cpp's logits (T, V) of one sequence, keys and values kept in float32."""
    from llama_cpp import GGML_TYPE_F32, Llama

    model = Llama(str(path), n_ctx=len(tokens), logits_all=True, type_k=GGML_TYPE_F32, type_v=GGML_TYPE_F32, n_threads=1, verbose=False)
    model.eval(tokens)
    logits = np.array(model.scores[: len(tokens)])
    model.close()
    return torch.from_numpy(logits)


@needs_llama
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("dtype, within, narrow", [("float32", 1e-4, 0.0), ("bf16", 2**-6, 0.005)])
def test_llama_cpp_gives_our_logits(tmp_path, norm_topk_prob, dtype, within, narrow):
    """In float32 they are equal but for the order of sums. In bf16 it rounds its activations, too (8 bits), so that a token's error, as a share of its
    logits' size, is of the order of 2^-8, until such a rounding turns the choice of an expert: tokens count up to the first at which the
    last expert chosen and the first that is not are closer than `narrow`. The other setting of norm_topk_prob is farther off."""
    settings = dict(top_k=3, rope_theta=500.0)
    model, other = (lively(norm_topk_prob=norm, **settings) for norm in (norm_topk_prob, not norm_topk_prob))
    other.load_state_dict(stored_model(model, dtype).state_dict())
    (tokens,) = tokens_of(model, B=1, T=24, seed=5).tolist()
    logits = theirs(write_gguf(save_checkpoint(model, tmp_path / "checkpoint"), tmp_path / "model.gguf", dtype=dtype), tokens)
    with torch.no_grad():
        ours, others = model(torch.tensor([tokens])), other(torch.tensor([tokens])).logits_BTV[0]
    ordered = torch.stack([routing.logits_NE.sort(dim=1, descending=True).values for routing in ours.routing])
    close = (ordered[:, :, 2] - ordered[:, :, 3] < narrow).any(0).tolist()
    sure = close.index(True) if any(close) else len(tokens)
    ours = ours.logits_BTV[0]
    error, apart = ((one - ours).norm(dim=1)[:sure] / ours.norm(dim=1)[:sure] for one in (logits, others))
    assert sure >= 8 and error.max() < within < apart.min() / 3, (sure, error, apart)


@needs_llama
def test_the_file_holds_the_checkpoint_in_bf16(tmp_path):
    from gguf import GGUFReader

    model = lively()
    source = Checkpoint(save_checkpoint(model, tmp_path / "checkpoint"))
    reader = GGUFReader(write_gguf(source, tmp_path / "model.gguf"))
    held = {tensor.name: tensor for tensor in reader.tensors}
    down = held["blk.1.ffn_down_exps.weight"]
    assert down.tensor_type.name == "BF16" and down.shape.tolist() == [model.config.expert_size, model.config.hidden_size, model.config.num_experts]
    bits = torch.from_numpy(np.array(down.data)).view(torch.bfloat16).float().view(model.layers[1].experts.down.shape)
    assert torch.equal(bits, model.layers[1].experts.down.bfloat16().float())
    assert held["blk.0.ffn_gate_inp.weight"].tensor_type.name == held["output_norm.weight"].tensor_type.name == "F32"
    assert reader.fields["general.architecture"].contents() == "minimax-m2"
    assert reader.fields["minimax-m2.expert_used_count"].contents() == model.config.top_k


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_every_entry_of_the_checkpoint_is_in_the_file_once(tmp_path, norm_topk_prob):
    model = lively(norm_topk_prob=norm_topk_prob)
    source = Checkpoint(save_checkpoint(model, tmp_path / "checkpoint"))
    layout = gguf_file._layout(model.config)
    assert sorted(entry for entries, _ in layout.values() for entry in entries) == sorted(source.names())
    for entries, shape in layout.values():
        assert gguf_file._stored(source, entries, shape, True).shape == shape
    assert sum("exp_probs_b" in name for name in layout) == (model.config.num_layers if norm_topk_prob else 0)


def test_what_cannot_be_a_gguf_file_is_named(tmp_path):
    checkpoint = save_checkpoint(lively(routing="hash"), tmp_path / "hash")
    with pytest.raises(ConfigError, match="routing='hash': llama.cpp chooses experts by the layer's own router alone"):
        write_gguf(checkpoint, tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="dtype='int8' is unknown; choose one of float32, bf16"):
        write_gguf(checkpoint, tmp_path / "model.gguf", dtype="int8")
    assert not list(tmp_path.glob("model.gguf*"))


@needs_llama
def test_a_file_that_fails_half_way_leaves_nothing(tmp_path):
    class Broken(Checkpoint):
        def get(self, name):
            if "layers.1." in name:
                raise OSError("gone")
            return super().get(name)

    with pytest.raises(OSError, match="gone"):
        write_gguf(Broken(save_checkpoint(lively(), tmp_path / "checkpoint")), tmp_path / "model.gguf")
    assert not list(tmp_path.glob("model.gguf*"))
