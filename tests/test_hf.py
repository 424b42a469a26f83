"""Capture at the gates of transformers models: what the experts were given, for every family; errors that name what is wrong."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_families import ASKED, CONTEXT, FAMILIES, LAYERS, D, E, K, V, tiny
from predmoe.checkpoint import save_checkpoint
from predmoe.config import ConfigError, ModelConfig, ObjectiveConfig, PredictorConfig
from predmoe.hf import Backbone, Gate, NextGate, capture, find_gates, lifted, read_gate
from predmoe.model import MoEModel
from predmoe.objectives import prediction_of
from predmoe.predictor import Predictor, membership, predicted_top_k

# B batch, T time, N tokens, D model width, E experts, K chosen, L MoE layers

B, T = 3, 7
SOFTMAX = [name for name in FAMILIES if name not in ("deepseek_v2", "deepseek_v3", "glm4_moe", "dots1", "ernie4_5_moe", "minimax_m2", "lfm2_moe", "afmoe", "exaone_moe")]
HELD = {}


def backbone_of(family):
    if family not in HELD:
        HELD[family] = Backbone(tiny(family))
    return HELD[family]


def text(seed=0, batch=B, length=T):
    return torch.randint(3, V, (batch, length), generator=torch.Generator().manual_seed(seed))


def masked(side):
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, slice(0, 3) if side == "left" else slice(4, T)] = 0
    mask[2, slice(0, 1) if side == "left" else slice(6, T)] = 0
    return mask


def inside_the_experts(gates):
    """What each layer's experts are called with, by wrapping the call itself; returns the list and a function that unwraps."""
    calls, undo = [], []
    for gate in gates:
        original = gate.experts.forward

        def wrapped(*args, original=original, **kwargs):
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            hidden = given[0].reshape(-1, D)
            ids = next(value for value in given[1:] if not value.is_floating_point())
            weights = next(value for value in given[1:] if value.is_floating_point() and value.shape == ids.shape)
            calls.append((hidden.clone(), ids.clone(), weights.clone()))   # as they are now, whatever is done to them later
            return original(*args, **kwargs)

        gate.experts.forward = wrapped
        undo.append(gate.experts)
    return calls, lambda: [experts.__dict__.pop("forward") for experts in undo]


# --- the record is what the experts received ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right", None])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_captured_routing_is_what_the_experts_received(family, side):
    backbone = backbone_of(family)
    mask = None if side is None else masked(side)
    keep = torch.ones(B * T, dtype=torch.bool) if mask is None else mask.reshape(-1).bool()
    calls, undo = inside_the_experts(backbone.gates)
    try:
        _, routing = backbone.body(text(), mask)
    finally:
        undo()
    assert len(routing) == len(calls) == len(backbone.layers) >= 2
    for record, (hidden, ids, weights) in zip(routing, calls):
        assert torch.equal(record.hidden_ND, hidden[keep]) and len(record.hidden_ND) == keep.sum() == (B * T if side is None else B * T - 4)
        dense = lambda ids, weights: torch.zeros(len(ids), E).scatter_(1, ids, weights.float())  # noqa: E731
        assert torch.equal(dense(record.experts_NK, record.gates_NK), dense(ids[keep], weights[keep]))
        assert torch.equal(membership(record.experts_NK, E), membership(ids[keep], E)) and (membership(ids, E).sum(1) == K).all()
        assert record.logits_NE.dtype == record.gates_NK.dtype == torch.float32 and record.experts_NK.dtype == torch.int64
        best_first = record.logits_NE.gather(1, record.experts_NK)
        assert (best_first[:, :-1] >= best_first[:, 1:]).all() and record.logits_NE.std() > 0.1
    assert len({tuple(record.experts_NK.flatten().tolist()) for record in routing}) == len(routing)   # no layer's record stands for another's


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_and_sizes_are_the_models_own(family):
    backbone = backbone_of(family)
    assert backbone.layers == tuple(FAMILIES[family][1]) and backbone.model_layers == LAYERS
    config = backbone.config
    assert (config.num_layers, config.hidden_size, config.num_experts, config.top_k, config.vocab_size, config.context) == (len(backbone.layers), D, E, K, V, CONTEXT)
    sizes = backbone.trace_sizes
    biases = 4 * (2 * 24 + D) if family == "gpt_oss" else 0
    assert sizes["shared_experts"] == FAMILIES[family][2] and sizes["expert_bytes"] == [3 * D * 24 * 4 + biases] * len(backbone.layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_router_matrix_times_the_input(family):
    backbone = backbone_of(family)
    for record, gate in zip(backbone.body(text())[1], backbone.gates):
        matrices = [p for p in gate.module.parameters() if p.shape == (E, D)]
        assert len(matrices) == 1
        bias = gate.module.bias if family == "gpt_oss" else None
        torch.testing.assert_close(record.logits_NE, F.linear(record.hidden_ND, matrices[0], bias).detach(), rtol=1e-4, atol=1e-5)


def test_the_choice_of_biased_and_grouped_gates_is_not_the_largest_logits():
    """Else the tests above could not tell a gate's own choice from a plain top-k."""
    for family in set(FAMILIES) - set(SOFTMAX):
        records = backbone_of(family).body(text())[1]
        assert any((membership(predicted_top_k(r.logits_NE, K), E) != membership(r.experts_NK, E)).any() for r in records), family
    for family in SOFTMAX:
        for r in backbone_of(family).body(text())[1]:
            assert torch.equal(predicted_top_k(r.logits_NE, K), r.experts_NK), family


def test_our_own_model_gives_the_same_records_through_transformers(tmp_path):
    config = ModelConfig(vocab_size=V, hidden_size=D, num_layers=3, num_heads=4, expert_size=24, num_experts=E, top_k=K, context=CONTEXT, init_std=0.3)
    ours = MoEModel(config).initialise(0)
    from transformers import AutoModelForCausalLM

    theirs = Backbone(AutoModelForCausalLM.from_pretrained(save_checkpoint(ours, tmp_path / "checkpoint"), dtype=torch.float32))
    with torch.no_grad():
        want = ours(text()[:, :-1], text()[:, 1:])
        got = theirs(text()[:, :-1], text()[:, 1:])
    torch.testing.assert_close(got.losses_BT, want.losses_BT, rtol=1e-4, atol=1e-5)
    for a, b in zip(got.routing, want.routing, strict=True):
        assert torch.equal(a.experts_NK, b.experts_NK)
        for name in ("hidden_ND", "logits_NE", "gates_NK"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-3, atol=1e-4)


# --- a layer's gate on another layer's hidden state ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_layers_gate_chooses_as_it_does_in_the_model(family):
    """Given the very input of layer l+h, the scorer names what layer l+h chose; given layer l's, what the gate module says to that."""
    backbone = backbone_of(family)
    routing = backbone.body(text())[1]
    hidden = torch.stack([record.hidden_ND for record in routing])
    true = torch.stack([record.experts_NK for record in routing])
    if family == "dbrx":   # its block chooses: the gate gives logits, softmax and top-k follow
        assert all(gate.more == ((), {}) for gate in backbone.gates)
    scorer = NextGate(backbone)
    L = len(routing)
    for h in range(1, L):
        own = scorer(torch.cat([hidden[h:], hidden[:h]]), h, text().reshape(-1))
        assert own.shape == (L - h, B * T, E) and torch.equal(membership(predicted_top_k(own, K), E), membership(true[h:], E))
    early = scorer(hidden, 1, text().reshape(-1))
    assert (membership(predicted_top_k(early, K), E) != membership(true[1:], E)).any()
    gate, args = backbone.gates[1], (hidden[0].unsqueeze(0) if backbone.gates[1].rank == 3 else hidden[0])
    output = gate.module(args, *gate.more[0], **gate.more[1])
    ids = predicted_top_k(output.reshape(-1, E), K) if isinstance(output, torch.Tensor) else next(part for part in output if not part.is_floating_point())
    assert torch.equal(membership(predicted_top_k(early[0], K), E), membership(ids, E))


def test_lifting_keeps_what_is_right_and_moves_what_is_not():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    got = lifted(logits, torch.tensor([[1, 0], [2, 3], [2, 3]]))
    assert got[0].tolist() == [3.0, 2.0, 1.0, 0.0]
    assert predicted_top_k(got, 2).tolist() == [[0, 1], [2, 3], [2, 3]] and got[1, :2].tolist() == [3.0, 2.0]
    assert got[1, 2] - got[1, 3] == pytest.approx(1.0)


# --- what a gate may return ----------------------------------------------------------------------------------------------------------------


def a_gate(weight=None):
    module = nn.Module()
    if weight is not None:
        module.weight = nn.Parameter(weight)
    return Gate(3, "layers.3.mlp.gate", module, nn.Module(), nn.Module())


LOGITS = torch.randn(6, E, generator=torch.Generator().manual_seed(1))
WEIGHTS, IDS = LOGITS.softmax(-1).topk(K)


@pytest.mark.parametrize("output", [(LOGITS, WEIGHTS, IDS), [IDS, WEIGHTS, LOGITS], (LOGITS.view(2, 3, E), IDS, WEIGHTS, None, torch.tensor(0.5))], ids=["scores first", "ids first", "more"])
def test_a_tuple_in_any_order(output):
    logits, ids, weights = read_gate(a_gate(), torch.randn(6, D), output)
    assert torch.equal(logits, LOGITS) and torch.equal(ids, IDS) and torch.equal(weights, WEIGHTS)


def test_a_tensor_alone():
    logits, ids, weights = read_gate(a_gate(), torch.randn(6, D), LOGITS)
    assert torch.equal(logits, LOGITS) and ids is None and weights is None


def test_probabilities_are_not_taken_for_logits():
    hidden, weight = torch.randn(6, D, generator=torch.Generator().manual_seed(2)), torch.randn(E, D, generator=torch.Generator().manual_seed(3)) / 4
    true = F.linear(hidden, weight)
    softmaxed, _, _ = read_gate(a_gate(weight), hidden, (true.softmax(-1), WEIGHTS, IDS))
    assert torch.allclose(softmaxed.softmax(-1), true.softmax(-1), atol=1e-6) and not torch.allclose(softmaxed, true.softmax(-1))
    squashed, _, _ = read_gate(a_gate(weight), hidden, (true.sigmoid(), WEIGHTS, IDS))
    assert torch.allclose(squashed, true, atol=1e-4)
    small = hidden.abs() * 0.01   # logits that happen to lie in 0..1 stay what they are
    kept, _, _ = read_gate(a_gate(weight.abs()), small, (F.linear(small, weight.abs()), WEIGHTS, IDS))
    assert torch.equal(kept, F.linear(small, weight.abs()))
    assert torch.equal(read_gate(a_gate(weight), hidden, (IDS, WEIGHTS))[0], true)   # no scores at all: the matrix gives them


def test_a_gate_without_scores_or_ids_is_an_error():
    with pytest.raises(ConfigError, match=r"layer 3: the gate layers\.3\.mlp\.gate returns no scores"):
        read_gate(a_gate(), torch.randn(6, D), (IDS,))
    with pytest.raises(ConfigError, match="layer 0: the gate .* returns no ids of experts, and its experts are given none"):
        Backbone(stub(lambda block, x: block.experts(block.gate(x))))


def stub(mixture):
    """A causal model of two gated layers whose experts see what `mixture` shows them."""
    from transformers import LlamaConfig, PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(D, E, bias=False), nn.Linear(E, D)

        def forward(self, x):
            return mixture(self, x)

    class Model(PreTrainedModel):
        config_class = LlamaConfig

        def __init__(self, config):
            super().__init__(config)
            self.embed_tokens, self.layers = nn.Embedding(V, D), nn.ModuleList([Block(), Block()])

        def forward(self, input_ids, **_):
            x = self.embed_tokens(input_ids)
            for layer in self.layers:
                x = x + layer(x)
            return BaseModelOutputWithPast(last_hidden_state=x)

    return Model(LlamaConfig(vocab_size=V, hidden_size=D, max_position_embeddings=CONTEXT))


# --- gradients -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ASKED)
def test_a_loss_on_the_records_reaches_the_model_where_it_may(family):
    model = tiny(family)
    gates = find_gates(model)
    with capture(gates, detach=False) as seen:
        model(input_ids=text())
        routing = seen.take()
    heads = Predictor(PredictorConfig(horizons=(1,)), hidden_size=D, num_experts=E, num_layers=len(gates)).initialise(0)
    loss = prediction_of(heads, routing, ObjectiveConfig(lambda_pred=1.0, gradient="both", target="soft")) + routing[-1].gates_NK.square().sum()
    loss.backward()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0   # through the hidden states
    assert next(p for p in gates[-1].module.parameters() if p.shape == (E, D)).grad.abs().sum() > 0   # through logits and weights
    with capture(gates) as seen:
        model(input_ids=text())
        assert not any(part.requires_grad for record in seen.take() for part in record)


def test_a_model_under_peft_is_seen_and_its_adapters_get_gradients():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny("olmoe"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["gate"]))
    backbone = Backbone(model)
    assert backbone.layers == tuple(range(LAYERS)) and backbone.model_layers == LAYERS
    with backbone.capture(detach=False) as seen:
        model(input_ids=text())
        routing = seen.take()
    routing[-1].hidden_ND.square().sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for name, p in model.named_parameters() if "lora_B" in name)
    plain = Backbone(tiny("olmoe")).body(text())[1]
    assert all(torch.equal(a.experts_NK, b.experts_NK) for a, b in zip(routing, plain))   # fresh adapters change nothing


def test_capture_leaves_the_model_as_it_was():
    model = tiny("mixtral").train()
    Backbone(model)
    assert model.training and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with capture(find_gates(model)) as seen:
        model(input_ids=text())
        model(input_ids=text(1))
        last = seen.take()
        with pytest.raises(ConfigError, match="was not called in the forward pass"):
            seen.take()
    model.eval()
    assert torch.equal(last[0].hidden_ND, Backbone(model).body(text(1))[1][0].hidden_ND)   # of two passes the last one


# --- bad input -----------------------------------------------------------------------------------------------------------------------------


def test_a_dense_model_is_refused():
    from transformers import LlamaConfig, LlamaForCausalLM

    with pytest.raises(ConfigError, match="LlamaForCausalLM has no recognisable gate"):
        Backbone(LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=D, num_hidden_layers=1, num_attention_heads=4, intermediate_size=24)))


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3"])
def test_a_router_row_of_nan_is_named(family):
    backbone = Backbone(tiny(family))
    second = backbone.gates[1]
    clean = second.module.weight.data.clone()
    tokens, mask = text(), masked("right")
    hook = second.module.register_forward_pre_hook(lambda _, args: (poisoned(args[0], 9),))
    with pytest.raises(ConfigError, match=rf"layer {second.layer}: the router's logits of token 9 are NaN .*gate"):
        backbone.body(tokens)
    hook.remove()
    hook = second.module.register_forward_pre_hook(lambda _, args: (poisoned(args[0], T + 5),))   # a padded token
    backbone.gates = backbone.gates[:2]
    backbone.body(tokens, mask)
    hook.remove()
    assert torch.equal(second.module.weight.data, clean)


def test_weights_of_nan_are_named_where_the_logits_are_not():
    model = tiny("gpt_oss")
    model.model.layers[LAYERS - 1].mlp.router.bias.data[3] = float("inf")   # softmax of infinity, in the last layer: no later router shows it
    with pytest.raises(ConfigError, match=rf"layer {LAYERS - 1}: the gate weights of token 0 are NaN .*router.: a logit is infinite"):
        Backbone(model)


def poisoned(hidden, row):
    hidden = hidden.clone()
    hidden.reshape(-1, D)[row] = float("nan")
    return hidden


@pytest.mark.parametrize("family", ASKED)
def test_equal_logits_are_recorded_as_the_family_broke_the_tie(family):
    backbone = Backbone(tiny(family))
    for gate in backbone.gates:
        for parameter in gate.module.parameters():
            parameter.data.zero_()
    calls, undo = inside_the_experts(backbone.gates)
    _, routing = backbone.body(text())
    undo()
    hidden = torch.stack([record.hidden_ND for record in routing])
    guess = NextGate(backbone)(hidden, 1, text().reshape(-1))
    for record, (_, ids, _) in zip(routing, calls):
        assert (record.logits_NE == 0).all() and torch.equal(membership(record.experts_NK, E), membership(ids, E))
    for s, (_, ids, _) in enumerate(calls[1:]):   # and the gate breaks it the same way when it is asked early
        assert torch.equal(membership(predicted_top_k(guess[s], K), E), membership(ids, E))


def test_tokens_that_do_not_fit_are_refused():
    backbone = backbone_of("olmoe")
    with pytest.raises(ConfigError, match=f"{CONTEXT + 1} tokens exceed the model's context of {CONTEXT}"):
        backbone.body(text(length=CONTEXT + 1))
    with pytest.raises(ConfigError, match=f"token ids reach from 5 to {V}, .*the tokenizer is another model's"):
        backbone.body(torch.tensor([[5, V]]))
    with pytest.raises(ConfigError, match="the mask has 4 tokens, the forward pass had 6"):
        with backbone.capture() as seen:
            backbone.model(input_ids=text(length=2))
            seen.take(torch.ones(1, 4))


def test_layers_of_different_routing_are_refused():
    model = tiny("mixtral")
    model.model.layers[2].mlp.gate.top_k = 3
    with pytest.raises(ConfigError, match="layer 2 has width, experts and top-k of .*3.*, layer 0 of"):
        Backbone(model)
