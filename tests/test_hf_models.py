"""Checkpoints of transformers models: weights that a model has not are refused, those that the library itself passes over are not."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_families import LAYERS, tiny
from predmoe.config import ConfigError
from predmoe.hf_models import load


def stored(folder, family="olmoe", more=(), **changes):
    """A tiny model's checkpoint with further entries."""
    tiny(family, **changes).save_pretrained(folder)
    save_file(load_file(folder / "model.safetensors") | dict(more), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# --- weights that a model has not ----------------------------------------------------------------------------------------------------------

def test_weights_that_the_model_has_not_are_named_and_counted(tmp_path):
    for name, more, words in (("one", ["zeta"], "has zeta, which"), ("two", ["zeta", "model.layers.9.mlp.gate.weight"], "has model.layers.9.mlp.gate.weight and 1 more entry, which")):
        folder = stored(tmp_path / name, more={entry: torch.ones(3) for entry in more})
        with pytest.raises(ConfigError) as told:
            load(str(folder))
        assert str(told.value) == f"{folder}: the checkpoint {words} the model that its config.json describes has not: one of the two is another model's"


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "deepseek_v3"])
def test_a_description_of_fewer_layers_than_the_checkpoint_has_is_refused(family, tmp_path):
    folder = stored(tmp_path / "model", family)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS - 1}))
    with pytest.raises(ConfigError, match=rf"the checkpoint has model\.layers\.{LAYERS - 1}\.\S+ and \d+ more entries, which the model"):
        load(str(folder))


def test_what_transformers_itself_passes_over_is_no_reason_to_refuse(tmp_path):
    """Rotary frequencies, a head that is tied to the embeddings, and a family's layers that foretell later tokens."""
    tied = stored(tmp_path / "tied", "mixtral", tie_word_embeddings=True)
    state = load_file(tied / "model.safetensors")
    assert "lm_head.weight" not in state
    more = {"lm_head.weight": state["model.embed_tokens.weight"].clone(), "model.rotary_emb.inv_freq": torch.ones(4), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(state | more, tied / "model.safetensors", metadata={"format": "pt"})
    tokens = torch.arange(3, 12).unsqueeze(0)
    assert torch.equal(load(str(tied))(tokens).logits_BTV, tiny("mixtral", tie_word_embeddings=True)(tokens).logits)
    later = stored(tmp_path / "later", "glm4_moe", {"model.layers.46.eh_proj.weight": torch.ones(2, 2)})
    assert load(str(later)).config.num_layers == LAYERS - 1
    other = stored(tmp_path / "other", "qwen3_moe", {"model.layers.46.eh_proj.weight": torch.ones(2, 2)})   # the same name where the family does not know it
    with pytest.raises(ConfigError, match="model.layers.46.eh_proj.weight, which"):
        load(str(other))


# --- damaged weights -----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named_though_a_short_text_may_not_show_it(value, tmp_path):
    folder = stored(tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    for names, words in ((["model.layers.0.self_attn.q_proj.weight"], "the weight model.layers.0.self_attn.q_proj.weight is not finite"),
                         (["model.layers.0.self_attn.q_proj.weight", "lm_head.weight"], "the weights lm_head.weight and 1 more entry are not finite")):   # fmt: skip
        for name in names:
            state[name][1, 2] = value
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError) as told:
            load(str(folder))
        assert str(told.value) == f"{folder}: {words} in float32 (NaN or infinite numbers): the checkpoint is damaged, or its numbers are too large for that dtype"


def test_weights_that_overflow_in_a_dtype_are_told(tmp_path):
    folder = stored(tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"][0, 0] = 1e5
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert load(str(folder)).config.num_layers == LAYERS == load(str(folder), dtype="bfloat16").config.num_layers
    with pytest.raises(ConfigError, match="the weight lm_head.weight is not finite in float16 .*too large for that dtype$"):
        load(str(folder), dtype="float16")


def test_integers_without_their_scales_are_no_weights(tmp_path):
    folder = stored(tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    save_file({name: (100 * tensor).to(torch.int8) if "_proj" in name else tensor.double() for name, tensor in state.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model: the checkpoint stores model.layers.0.self_attn.k_proj.weight and \d+ more entries as I8: quantised weights cannot be read, only F64, F32, BF16, F16$"):
        load(str(folder))


# --- half a download -----------------------------------------------------------------------------------------------------------------------

def test_of_shards_the_one_that_is_missing_or_cut_is_named(tmp_path):
    folder = tmp_path / "model"
    tiny("olmoe").save_pretrained(folder, max_shard_size="40KB")
    index, second = folder / "model.safetensors.index.json", sorted(folder.glob("model-*.safetensors"))[1]
    whole = second.read_bytes()
    for damage, words in ((lambda: second.write_bytes(whole[: len(whole) // 2]), f"{second} is damaged: "), (second.unlink, f"{folder} lacks {second.name}: the checkpoint is incomplete"),
                          (lambda: index.write_text("{"), f"{index} is damaged, it is not JSON"), (lambda: index.write_text('{"weight_map": {}}'), f"{index} is damaged, its weight_map")):   # fmt: skip
        damage()
        with pytest.raises(ConfigError) as told:
            load(str(folder))
        assert str(told.value).startswith(words) and str(told.value).endswith("copy the checkpoint again") and "\n" not in str(told.value)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n")   # a pointer in place of the file
    with pytest.raises(ConfigError, match="model.safetensors is damaged: .*; copy the checkpoint again"):
        load(str(folder))


def test_a_file_or_nothing_is_no_model(tmp_path):
    folder = stored(tmp_path / "model")
    for name, words in ((str(folder / "config.json"), "is a file: a model is the folder of a checkpoint, or a hub id"), ("", "'' is no name: a model is"), (" ", "' ' is no name: a model is")):
        with pytest.raises(ConfigError) as told:
            load(name)
        assert words in str(told.value)
