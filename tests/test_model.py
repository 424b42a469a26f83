"""The decoder: causality, determinism, sizes, each kind of routing, bfloat16."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import TINY, lively, tokens_of
from watch import Watch

from predmoe import kernels
from predmoe.config import TIERS, ModelConfig
from predmoe.model import MoEModel, count_parameters, top_k

# B batch, T time, N = B*T tokens, D model width, F expert width, E experts, K chosen, L layers, V vocabulary


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
