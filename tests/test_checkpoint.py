"""The open format: transformers computes the same from our checkpoints and we from theirs; a bad checkpoint is a sentence."""

import dataclasses
import json
import re

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_models import TINY, lively, their_model, tokens_of

import predmoe.checkpoint
from predmoe.checkpoint import from_olmoe, load_checkpoint, model_config, olmoe_config, save_checkpoint, to_olmoe
from predmoe.config import ConfigError, ModelConfig
from predmoe.engine.export import Checkpoint
from predmoe.tokenizer import load_tokenizer

# B batch, T time, N = B*T tokens, D model width, F expert width, E experts, K chosen, L layers, V vocabulary


def olmoe(folder):
    from transformers import OlmoeForCausalLM

    return OlmoeForCausalLM.from_pretrained(folder, dtype=torch.float32)


# --- the open format: transformers computes the same ------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_transformers_gives_our_logits_and_our_routing(tmp_path, norm_topk_prob):
    """Logits within 1e-4, and at each layer's gate the same MoE input, router logits, experts and gate weights."""
    ours = lively(norm_topk_prob=norm_topk_prob, top_k=3)
    theirs = olmoe(save_checkpoint(ours, tmp_path))
    gates = []
    for layer in theirs.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, inputs, output: gates.append((inputs[0], *output)))
    tokens = tokens_of(ours)
    with torch.no_grad():
        output, logits = ours(tokens), theirs(tokens).logits
    assert logits.abs().max() > 1 and (output.logits_BTV - logits).abs().max() < 1e-4
    assert len(gates) == len(output.routing) == 4
    for record, (hidden, router_logits, weights, experts) in zip(output.routing, gates):
        assert torch.equal(record.experts_NK, experts)
        for a, b in ((record.hidden_ND, hidden.reshape(-1, 32)), (record.logits_NE, router_logits), (record.gates_NK, weights)):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    sums = torch.cat([record.gates_NK.sum(1) for record in output.routing])
    assert torch.allclose(sums, torch.ones_like(sums)) if norm_topk_prob else sums.max() < 1


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_transformers_gives_our_logits_on_real_tokens(tmp_path, norm_topk_prob):
    tokenizer = load_tokenizer("bpe8k")
    text = "Four score and seven years ago our fathers brought forth, upon this continent, a new nation, conceived in liberty.\n\ndef main():\n    return 0\n"
    ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(text)][:32]])
    ours = lively(vocab_size=tokenizer.vocab_size, norm_topk_prob=norm_topk_prob, num_layers=2)
    theirs = olmoe(save_checkpoint(ours, tmp_path))
    with torch.no_grad():
        mine, other = ours(ids).logits_BTV, theirs(ids).logits
    assert ids.shape == (1, 32) and other.abs().max() > 1 and (mine - other).abs().max() < 1e-4


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("shard", ["20KB", "1GB"])
def test_we_give_the_logits_of_a_transformers_checkpoint(tmp_path, norm_topk_prob, shard):
    theirs = their_model(norm_topk_prob=norm_topk_prob)
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 3) == (shard == "20KB")
    ours = load_checkpoint(tmp_path)
    assert (ours.config.norm_topk_prob, ours.config.rope_theta, ours.config.rms_norm_eps) == (norm_topk_prob, 500.0, 1e-6)
    tokens = tokens_of(ours)
    with torch.no_grad():
        mine, other = ours(tokens).logits_BTV, theirs(tokens).logits
    assert other.abs().max() > 1 and (mine - other).abs().max() < 1e-4


def their_gradient(gradients, name):
    """The gradient of a checkpoint entry; transformers holds a layer's experts fused, as gate_up_proj and down_proj."""
    if part := re.fullmatch(r"(.*experts)\.(\d+)\.(gate|up|down)_proj\.weight", name):
        stem, expert, kind = part[1], int(part[2]), part[3]
        if kind == "down":
            return gradients[f"{stem}.down_proj"][expert]
        return gradients[f"{stem}.gate_up_proj"][expert].chunk(2)[kind == "up"]
    return gradients[name]


def test_loss_and_every_gradient_equal_those_of_transformers(tmp_path):
    ours = lively()
    theirs = olmoe(save_checkpoint(ours, tmp_path))
    inputs, targets = tokens_of(ours, B=4, seed=1), tokens_of(ours, B=4, seed=2)
    mine = ours(inputs, targets).loss
    other = F.cross_entropy(theirs(inputs).logits.view(-1, 61), targets.view(-1))
    assert mine.item() == pytest.approx(other.item(), rel=1e-5)
    mine.backward()
    other.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    compared = to_olmoe({name: parameter.grad for name, parameter in ours.named_parameters()}, ours.config)
    unused = set()
    for name, got in compared.items():
        want = their_gradient(gradients, name)
        assert (got - want).norm() <= 1e-4 * want.norm(), name
        if not want.any():
            unused.add(name.rsplit(".", 2)[0])
    assert len(unused) < 4 and all(".experts." in name for name in unused)  # of 32 experts, the few that no token chose
    assert sum(g.numel() for g in compared.values()) == sum(p.numel() for p in theirs.parameters())


def test_a_checkpoint_goes_to_transformers_and_back_bit_for_bit(tmp_path):
    ours = lively()
    olmoe(save_checkpoint(ours, tmp_path / "ours")).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    back = load_checkpoint(tmp_path / "theirs", ours.config)
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in ours.state_dict().items())


@pytest.mark.parametrize("changes", [{}, {"routing": "hash"}, {"routing": "early", "early_by": 2}])
def test_our_checkpoint_comes_back_bit_for_bit(tmp_path, changes):
    ours = lively(**changes)
    back = load_checkpoint(save_checkpoint(ours, tmp_path), ours.config)
    tokens = tokens_of(ours)
    assert back.config == ours.config
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in ours.state_dict().items())
    assert torch.equal(ours(tokens).logits_BTV, back(tokens).logits_BTV)


@pytest.mark.parametrize("changes, kind", [({"routing": "hash"}, "predmoe_hash"), ({"routing": "early", "early_by": 2}, "predmoe_early")])
def test_a_routing_that_olmoe_does_not_know_is_refused_by_transformers(tmp_path, changes, kind):
    from transformers import AutoModelForCausalLM

    save_checkpoint(lively(**changes), tmp_path)
    with pytest.raises(ValueError, match=kind):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_transformers_finds_the_architecture_of_an_ordinary_checkpoint(tmp_path):
    from transformers import AutoModelForCausalLM, OlmoeForCausalLM

    assert type(AutoModelForCausalLM.from_pretrained(save_checkpoint(lively(), tmp_path))) is OlmoeForCausalLM


def test_the_names_of_a_checkpoint_are_a_bijection():
    model = lively(num_layers=2)
    state = model.state_dict()
    back = from_olmoe(to_olmoe(state, model.config), model.config)
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)


# --- bad checkpoints: one sentence each --------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    return save_checkpoint(lively(num_layers=2, vocab_size=17), tmp_path / "checkpoint")


def edit(folder, **changes):
    source = folder / "config.json"
    values = json.loads(source.read_text()) | changes
    source.write_text(json.dumps({name: value for name, value in values.items() if value != "REMOVED"}))


def refused(folder, *words, expected=None):
    with pytest.raises(ConfigError) as caught:
        load_checkpoint(folder, expected)
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message, message


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    refused(tmp_path, str(tmp_path), "config.json")
    refused(tmp_path / "nowhere", "nowhere", "config.json")


def test_missing_weights_are_refused(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    refused(checkpoint, "lacks model.safetensors", "incomplete")


def test_a_missing_shard_is_named(tmp_path):
    their_model().save_pretrained(tmp_path, max_shard_size="20KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[2]
    gone.unlink()
    refused(tmp_path, f"lacks {gone.name}")


@pytest.mark.parametrize("left", [0, 4, 200, 0.5, 0.999])
def test_cut_weights_are_refused(checkpoint, left):
    source = checkpoint / "model.safetensors"
    whole = source.read_bytes()
    source.write_bytes(whole[: left if isinstance(left, int) else int(len(whole) * left)])
    refused(checkpoint, "model.safetensors is damaged")


def test_a_cut_description_is_refused(checkpoint):
    source = checkpoint / "config.json"
    source.write_text(source.read_text()[:100])
    refused(checkpoint, "config.json is damaged")


@pytest.mark.parametrize("text", ["[]", "3", '"olmoe"', "null"])
def test_a_description_that_is_no_object_is_a_sentence(checkpoint, text):
    (checkpoint / "config.json").write_text(text)
    refused(checkpoint, f"{checkpoint / 'config.json'} is damaged", "instead of an object; copy the checkpoint again")


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_names_no_files_is_a_sentence(checkpoint, text):
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors.index.json").write_text(text)
    refused(checkpoint, "model.safetensors.index.json is damaged")


def test_a_missing_tensor_is_named(checkpoint):
    state = load_file(checkpoint / "model.safetensors")
    del state["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(state, checkpoint / "model.safetensors")
    refused(checkpoint, "model.layers.1.mlp.experts.5.up_proj.weight")


def test_integers_without_their_scales_are_no_weights(checkpoint):
    state = load_file(checkpoint / "model.safetensors")
    save_file(state | {name: state[name].to(torch.int8) for name in ("lm_head.weight", "model.norm.weight")}, checkpoint / "model.safetensors")
    refused(checkpoint, "the checkpoint stores lm_head.weight and 1 more entry as I8: quantised weights cannot be read, only F64, F32, BF16, F16")
    with pytest.raises(ConfigError, match="stores lm_head.weight and 1 more entry as I8"):
        Checkpoint(checkpoint)


@pytest.mark.parametrize("more, words", [
    (["zeta"], "the checkpoint has zeta, which a model of 2 layers and 8 experts has not"),
    (["zeta", "model.layers.2.mlp.gate.weight"], "the checkpoint has model.layers.2.mlp.gate.weight and 1 more entry, which"),
    (["b", "a", "c", "model.rotary_emb.inv_freq"], "the checkpoint has a and 2 more entries, which"),
])  # fmt: skip
def test_surplus_weights_are_named_and_counted(checkpoint, more, words):
    save_file(load_file(checkpoint / "model.safetensors") | {name: torch.ones(1) for name in more}, checkpoint / "model.safetensors")
    refused(checkpoint, words)


def test_rotary_frequencies_of_an_old_checkpoint_are_passed_over_as_in_transformers(checkpoint):
    state = load_file(checkpoint / "model.safetensors")
    save_file(state | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}, checkpoint / "model.safetensors")
    again = to_olmoe(load_checkpoint(checkpoint).state_dict(), load_checkpoint(checkpoint).config)
    assert again.keys() == state.keys() and all(torch.equal(again[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "llama"}, ("model_type='llama'",)),
        ({"model_type": "REMOVED"}, ("model_type=None",)),
        ({"predmoe": {"routing": "hash", "early_by": 0}}, ("model_type='olmoe'",)),
        ({"predmoe": {}}, ("model_type='olmoe'",)),
        ({"hidden_size": "REMOVED", "num_experts": "REMOVED"}, ("lacks hidden_size, num_experts",)),
        ({"hidden_size": "32"}, ("hidden_size='32'",)),
        ({"num_experts_per_tok": 9}, ("top_k=9",)),
        ({"hidden_size": 64}, ("(17, 32)", "(17, 64)")),
        ({"vocab_size": 18}, ("model.embed_tokens.weight", "(17, 32)", "(18, 32)")),
        ({"intermediate_size": 12}, ("layers.0.mlp.experts.0.gate_proj.weight", "(24, 32)", "(12, 32)")),
        ({"num_hidden_layers": 10**9}, ("model.layers.2.", "1000000000 layers")),
        ({"hidden_size": 10**9}, ("(17, 32)", "(17, 1000000000)")),
        ({"num_hidden_layers": 3}, ("model.layers.2.", "3 layers")),
        ({"num_hidden_layers": 1}, ("model.layers.1.", "1 layers")),
        ({"num_experts": 9}, ("experts.8.", "9 experts")),
        ({"num_experts": 7}, ("experts.7.", "7 experts")),
        ({"clip_qkv": 8.0}, ("clip_qkv=8.0",)),
        ({"attention_bias": True}, ("attention_bias=True",)),
        ({"tie_word_embeddings": True}, ("tie_word_embeddings=True",)),
        ({"hidden_act": "gelu"}, ("hidden_act='gelu'",)),
        ({"num_key_value_heads": 1}, ("key-value heads",)),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, ("rotary",)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ("rotary",)),
        ({"rope_parameters": ["default"]}, ("config.json: rope_parameters holds a list",)),
        ({"predmoe": ["topk"]}, ("config.json: predmoe holds a list",)),
        ({"rope_parameters": {"rope_theta": None}}, ("config.json: ", "rope_theta=None")),
        ({"rms_norm_eps": 0.0}, ("config.json: rms_norm_eps=0.0 must be positive",)),
        ({"num_experts": []}, ("config.json: ", "num_experts=[]")),
    ],
)
def test_a_description_that_does_not_fit_is_refused_by_name(checkpoint, changes, words):
    edit(checkpoint, **changes)
    refused(checkpoint, *words)


def test_a_checkpoint_of_another_shape_than_expected_is_refused_with_both(checkpoint):
    wanted = load_checkpoint(checkpoint).config
    refused(checkpoint, "another shape", "top_k=2 (wanted 3)", expected=dataclasses.replace(wanted, top_k=3))
    refused(checkpoint, "routing=topk (wanted hash)", expected=dataclasses.replace(wanted, routing="hash"))


def test_description_and_configuration_are_inverse():
    for changes in ({}, {"routing": "hash"}, {"routing": "early", "early_by": 3}, {"norm_topk_prob": False, "rope_theta": 77.0, "rms_norm_eps": 1e-6}):
        config = ModelConfig(**(TINY | changes))
        assert model_config(json.loads(json.dumps(olmoe_config(config)))) == config


def test_an_older_description_with_rope_theta_at_the_top_is_read():
    theirs = olmoe_config(ModelConfig(**TINY)) | {"rope_theta": 123.0, "rope_scaling": None}
    del theirs["rope_parameters"], theirs["predmoe"]
    assert model_config(theirs) == ModelConfig(**(TINY | {"rope_theta": 123.0}))


def test_a_failed_save_leaves_the_last_good_checkpoint(checkpoint, monkeypatch):
    before = load_checkpoint(checkpoint)

    def full(state, path, metadata=None):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(predmoe.checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(lively(seed=5, num_layers=2, vocab_size=17), checkpoint)
    after = load_checkpoint(checkpoint)
    assert all(torch.equal(tensor, after.state_dict()[name]) for name, tensor in before.state_dict().items())


def test_a_checkpoint_saved_over_shards_is_the_one_that_is_loaded(tmp_path):
    """Of a single file and an index, transformers reads the single file; so do we."""
    their_model().save_pretrained(tmp_path, max_shard_size="20KB")
    ours = lively(seed=3, num_layers=3)
    save_checkpoint(ours, tmp_path)
    assert torch.equal(load_checkpoint(tmp_path).embed.weight, ours.embed.weight)
    assert torch.equal(olmoe(tmp_path).model.embed_tokens.weight, ours.embed.weight)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644   # others may load it: safetensors writes files for their owner alone
