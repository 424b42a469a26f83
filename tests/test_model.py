"""The decoder: agreement with transformers' OLMoE both ways, causality, each kind of routing, checkpoints and their errors."""

import copy
import dataclasses
import json
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_models import TINY, lively, their_model, tokens_of
from watch import Watch

import predmoe.checkpoint
from predmoe import kernels
from predmoe.checkpoint import from_olmoe, load_checkpoint, model_config, olmoe_config, save_checkpoint, to_olmoe
from predmoe.config import TIERS, ConfigError, ModelConfig
from predmoe.model import MoEModel, count_parameters, top_k
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
        ({"vocab_size": 18}, ("embed.weight", "(17, 32)", "(18, 32)")),
        ({"intermediate_size": 12}, ("experts.gate_up", "(8, 48, 32)", "(8, 24, 32)")),
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


# --- what a decoder must be -------------------------------------------------------------------------------------------------------------


def test_the_future_never_changes_the_past():
    """The gradient of position t's logits to the embedding of position s is zero for every s > t and not for s <= t."""
    model = lively()
    embedded = []
    model.embed.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    logits = model(tokens_of(model, B=1, T=12)).logits_BTV
    for t in range(12):
        grad, = torch.autograd.grad(logits[0, t].square().sum(), embedded[0], retain_graph=True)
        reached = grad[0].abs().amax(-1) > 0
        assert reached.tolist() == [s <= t for s in range(12)]


def test_sequences_of_a_batch_do_not_see_each_other():
    model = lively()
    tokens = tokens_of(model, B=3)
    with torch.no_grad():
        together = model(tokens).logits_BTV
        alone = torch.cat([model(row[None]).logits_BTV for row in tokens])
    assert torch.allclose(together, alone, rtol=0, atol=2e-5)


def test_a_prefix_has_the_logits_it_has_in_the_whole():
    model = lively()
    tokens = tokens_of(model)
    with torch.no_grad():
        assert torch.allclose(model(tokens[:, :11]).logits_BTV, model(tokens).logits_BTV[:, :11], rtol=0, atol=2e-5)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_choosing_every_expert_equals_the_dense_mixture(norm_topk_prob):
    layer = lively(top_k=8, norm_topk_prob=norm_topk_prob).layers[1]
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    _, experts, gates = layer.route(x, torch.zeros(20, dtype=torch.long))
    x64, gate_up, down = x.double(), layer.experts.gate_up.double(), layer.experts.down.double()
    probs = (x64 @ layer.router.weight.double().T).softmax(1)
    gate, up = torch.einsum("nd,egd->neg", x64, gate_up).chunk(2, dim=2)
    dense = torch.einsum("ne,nef,edf->nd", probs, F.silu(gate) * up, down)
    got = layer.experts(x, gates, experts)
    assert (got - dense).norm() < 1e-5 * dense.norm()


def test_loss_is_the_cross_entropy_of_the_logits_and_the_logits_are_not_kept():
    model = lively()
    inputs, targets = tokens_of(model, B=5, seed=1), tokens_of(model, B=5, seed=2)  # 160 tokens: two chunks of the head
    with torch.no_grad():
        logits, output = model(inputs).logits_BTV, model(inputs, targets)
    want = F.cross_entropy(logits.double().view(-1, 61), targets.view(-1), reduction="none").view(5, 32)
    assert output.logits_BTV is None and (output.losses_BT - want).abs().max() < 1e-5
    assert output.loss.item() == pytest.approx(want.mean().item(), abs=1e-6)


def test_a_training_step_never_holds_the_logits_of_the_batch(monkeypatch):
    monkeypatch.setattr(kernels, "HEAD_ROWS", 64)
    model = lively(vocab_size=6000, num_layers=1, hidden_size=16, expert_size=16)
    inputs, targets = tokens_of(model, B=16, seed=1), tokens_of(model, B=16, seed=2)
    with Watch() as watch:
        model(inputs, targets).loss.backward()
    assert 64 * 6000 <= watch.held < inputs.numel() * 6000 // 2


def test_more_tokens_than_the_context_are_refused():
    with pytest.raises(ValueError, match="33 tokens exceed the model's context of 32"):
        lively()(torch.zeros(1, 33, dtype=torch.long))


# --- determinism ------------------------------------------------------------------------------------------------------------------------


def test_initialisation_is_a_function_of_the_seed():
    config = ModelConfig(**TINY)
    torch.manual_seed(1)
    a = MoEModel(config).initialise(0)
    torch.manual_seed(2)
    b, c = MoEModel(config).initialise(0), MoEModel(config).initialise(1)
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, b.state_dict()[name])
        assert torch.equal(tensor, c.state_dict()[name]) == (tensor.dim() == 1)  # norms start at one


def test_matrices_start_with_the_standard_deviation_of_the_configuration():
    model = MoEModel(ModelConfig(**(TINY | {"init_std": 0.02, "vocab_size": 200}))).initialise(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == 1).all()
        else:  # the standard error of a standard deviation is 1/sqrt(2n)
            assert parameter.std().item() == pytest.approx(0.02, rel=4 / (2 * parameter.numel()) ** 0.5), name
            assert abs(parameter.mean().item()) < 4 * 0.02 / parameter.numel() ** 0.5, name


def test_the_same_seed_gives_the_same_bits_after_training_steps():
    def trained():
        model = lively()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            optimizer.zero_grad()
            model(tokens_of(model, seed=step), tokens_of(model, seed=step + 1)).loss.backward()
            optimizer.step()
        return model.state_dict()

    a, b = trained(), trained()
    assert all(torch.equal(a[name], b[name]) for name in a)


# --- sizes --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier, total, active", [("a", 341e6, 99e6), ("b", 94e6, 56e6)])
def test_parameter_counts_are_those_of_the_reference_within_5_percent(tier, total, active):
    counted = count_parameters(TIERS[tier].model)
    assert counted["total"] == pytest.approx(total, rel=0.05) and counted["active"] == pytest.approx(active, rel=0.05)


@pytest.mark.parametrize("changes", [{}, {"routing": "hash"}, {"routing": "early", "early_by": 1}, {"top_k": 8}])
def test_counted_parameters_are_the_models(changes):
    config = ModelConfig(**(TINY | changes))
    counted = count_parameters(config)
    one = 3 * 32 * 24  # an expert: gate, up and down
    assert counted["total"] == sum(p.numel() for p in MoEModel(config).parameters())
    assert counted["active"] == counted["total"] - 4 * (8 - config.top_k) * one


# --- routing ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 4, 5, 8])
def test_the_k_best_are_in_order_and_ties_go_to_the_lower_id(k):
    scores = torch.from_numpy(np.random.default_rng(k).integers(0, 4, (200, 8)).astype(np.float32))
    values, ids = top_k(scores, k)
    assert ids.tolist() == [sorted(range(8), key=lambda e: (-row[e], e))[:k] for row in scores.tolist()]
    assert torch.equal(values, scores.gather(1, ids))


@pytest.mark.parametrize("k", [2, 6])
def test_minus_infinity_is_a_score_and_no_expert_comes_twice(k):
    low = float("-inf")
    _, ids = top_k(torch.tensor([[0.0, low, low, 1.0, low, low, low], [low] * 7]), k)
    assert ids.tolist() == [[3, 0, 1, 2, 4, 5][:k], [0, 1, 2, 3, 4, 5][:k]]


@pytest.mark.parametrize("k", [2, 6])
def test_a_router_without_an_opinion_takes_the_lowest_ids(k):
    model = lively(top_k=k)
    with torch.no_grad():
        for layer in model.layers:
            layer.router.weight.zero_()
        routing = model(tokens_of(model)).routing
    for record in routing:
        assert record.experts_NK.tolist() == [list(range(k))] * 64
        assert torch.allclose(record.gates_NK, torch.full((64, k), 1 / k))


@pytest.mark.parametrize("k", [2, 6])
def test_a_score_of_nan_is_an_error_that_names_the_row(k):
    scores = torch.rand(9, 8)
    scores[5, 3] = float("nan")
    scores[7] = float("nan")
    with pytest.raises(ValueError, match="token 5 are NaN"):
        top_k(scores, k)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_hidden_state_that_is_not_finite_chooses_no_expert(bad):
    x = torch.randn(6, 32)
    x[4, 0] = bad
    with pytest.raises(ValueError, match="token 4 are NaN"):
        lively().layers[0].route(x, torch.zeros(6, dtype=torch.long))


def chosen_by(source_ND, router):
    return [sorted(range(8), key=lambda e: (-row[e], e))[:2] for row in (source_ND @ router.weight.T).tolist()]


@pytest.mark.parametrize("by", [1, 2, 3])
def test_early_routing_chooses_from_the_moe_input_of_an_earlier_layer(by):
    model = lively(routing="early", early_by=by)
    with torch.no_grad():
        routing = model(tokens_of(model)).routing
        for i, (record, layer) in enumerate(zip(routing, model.layers)):
            source = routing[max(i - by, 0)].hidden_ND
            assert record.experts_NK.tolist() == chosen_by(source, layer.router)
            probs = (source @ layer.router.weight.T).softmax(1).gather(1, record.experts_NK)
            assert torch.allclose(record.gates_NK, probs / probs.sum(1, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("changes, fixed", [({"routing": "early", "early_by": 2}, True), ({}, False)])
def test_what_happens_after_the_source_layer_does_not_change_an_early_choice(changes, fixed):
    """Layer 3 chooses from layer 1: other experts in layer 1 and other weights in layers 2 and 3 change its input, not its experts."""
    model = lively(**changes)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.layers[1].experts.down.mul_(-3)
        for i in (2, 3):
            other.layers[i].attention.out.weight.mul_(-3)
        other.layers[2].experts.down.mul_(-3)
        other.layers[2].router.weight.neg_()
        before, after = (m(tokens_of(model)).routing for m in (model, other))
    assert torch.equal(before[1].hidden_ND, after[1].hidden_ND)
    assert not torch.allclose(before[3].hidden_ND, after[3].hidden_ND, atol=0.1)
    assert torch.equal(before[3].experts_NK, after[3].experts_NK) == fixed


def test_hash_routing_is_a_function_of_layer_and_token_id():
    model = lively(routing="hash")
    tokens = tokens_of(model, B=8)
    with torch.no_grad():
        routing = model(tokens).routing
    tables = []
    for record in routing:
        table = {}
        for token, experts in zip(tokens.flatten().tolist(), record.experts_NK.tolist()):
            assert table.setdefault(token, experts) == experts and len(set(experts)) == 2 and 0 <= min(experts) <= max(experts) < 8
        tables.append(table)
    assert len(tables[0]) > 50 and all(tables[0] != table for table in tables[1:])
    with torch.no_grad():
        again = lively(seed=7, routing="hash")(tokens).routing  # other weights, the same table
    assert all(torch.equal(a.experts_NK, b.experts_NK) for a, b in zip(routing, again))


def test_hash_routing_loads_experts_evenly():
    """2 of 16 drawn uniformly for each of 8192 ids: an expert's share is binomial with p = 1/8."""
    table = lively(routing="hash", vocab_size=8192, num_experts=16, num_layers=1).layers[0].hash_VK
    counts = torch.bincount(table.flatten(), minlength=16)
    sigma = (8192 * 1 / 8 * 7 / 8) ** 0.5
    assert (counts - 1024).abs().max() < 4 * sigma


def test_hash_gates_are_the_routers_probabilities_of_the_fixed_experts():
    model = lively(routing="hash", norm_topk_prob=False)
    with torch.no_grad():
        for record in model(tokens_of(model)).routing:
            assert torch.allclose(record.gates_NK, record.logits_NE.softmax(1).gather(1, record.experts_NK))


# --- bfloat16 autocast ------------------------------------------------------------------------------------------------------------------


def test_under_autocast_routing_stays_float32_and_loss_and_gradients_agree_with_float32():
    """Hash routing, so that no rounding changes a choice. About ten roundings of 2^-9 a layer on the way there and back."""
    model = lively(routing="hash", num_layers=3)
    inputs, targets = tokens_of(model, seed=1), tokens_of(model, seed=2)

    def step(enabled):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = model(inputs, targets)
        output.loss.backward()
        return output, torch.cat([p.grad.flatten() for p in model.parameters()])

    (exact, want), (output, got) = step(False), step(True)
    assert output.loss.item() != exact.loss.item()
    assert output.loss.item() == pytest.approx(exact.loss.item(), rel=10 * 2.0**-9)
    assert got.dtype == torch.float32 and (got - want).norm() < 30 * 2.0**-9 * want.norm()
    for record in output.routing:
        assert record.hidden_ND.dtype == record.logits_NE.dtype == record.gates_NK.dtype == torch.float32


def test_under_autocast_experts_are_chosen_in_float32():
    model = lively()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        routing = model(tokens_of(model)).routing
    for record, layer in zip(routing, model.layers):
        assert torch.allclose(record.logits_NE, record.hidden_ND @ layer.router.weight.T, rtol=1e-5, atol=1e-5)
        assert record.experts_NK.tolist() == chosen_by(record.hidden_ND, layer.router)
