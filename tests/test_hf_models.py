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
