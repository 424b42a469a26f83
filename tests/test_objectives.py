"""Every loss term against a direct formula in numpy float64, and its gradient against finite differences of that formula."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loss_formulas import D, E, K, L, N, S, choose, normal, one_hot, records, slope, softmax

from predmoe.config import ModelConfig, ObjectiveConfig, PredictorConfig
from predmoe.model import MoEModel
from predmoe.objectives import balance, entropy, margin, margin_all, prediction, prediction_of, ramp, stack, sticky, terms
from predmoe.predictor import Predictor

# B batch, T time, N tokens, E experts, K chosen, D model width, L layers, S source layers of a horizon

TARGETS = ("topk", "soft", "membership")


def agrees(term, formula, *inputs):
    """`term` of float32 tensors equals `formula` of float64 arrays in value and in the gradient to every input."""
    tensors = [x.clone().requires_grad_() for x in inputs]
    arrays = [x.double().numpy() for x in inputs]
    value = term(*tensors)
    assert value.dtype == torch.float32 and value.item() == pytest.approx(formula(*arrays), rel=2e-6, abs=1e-7)
    gradients = torch.autograd.grad(value, tensors)
    for i, got in enumerate(gradients):
        want = slope(lambda x, i=i: formula(*arrays[:i], x, *arrays[i + 1 :]), arrays[i])
        assert np.abs(got.numpy() - want).max() < 1e-6 and np.abs(want).max() > 1e-3


# --- balance, entropy, sticky ----------------------------------------------------------------------------------------------------------


def test_balance_equals_its_formula():
    experts = choose(N)
    share = one_hot(experts).sum(0) / (N * K)  # a constant: no gradient flows through the choice
    agrees(lambda z: balance(z, experts), lambda z: E * (share * softmax(z).mean(0)).sum(), normal(N, E))


def test_balance_is_one_for_uniform_use_and_e_for_a_collapse():
    even = torch.arange(8).repeat(3).view(-1, 2)
    assert balance(torch.zeros(12, 8), even).item() == pytest.approx(1.0)
    assert balance(normal(12, 8), even).item() == pytest.approx(1.0)  # even dispatch: any mean probability gives 1
    collapsed = torch.zeros(12, 8)
    collapsed[:, 3] = 100.0
    assert balance(collapsed, torch.full((12, 1), 3)).item() == pytest.approx(8.0)
    assert balance(collapsed, torch.tensor([[3, 5]] * 12)).item() == pytest.approx(4.0)  # half of the dispatches elsewhere


def test_balance_agrees_with_transformers():
    """Theirs sums the k slots' shares, ours takes their mean."""
    from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

    logits = normal(50, 8)
    experts = logits.softmax(-1).topk(3).indices
    assert balance(logits, experts).item() == pytest.approx(load_balancing_loss_func((logits,), 8, 3).item() / 3, rel=1e-6)


def test_descending_the_balance_term_unloads_the_busiest_expert():
    logits = torch.zeros(10, 4, requires_grad=True)
    balance(logits, torch.tensor([[0]] * 7 + [[1]] * 3)).backward()
    assert (logits.grad[:, 0] > 0).all() and (logits.grad[:, 2:] < 0).all()


def test_entropy_equals_its_formula():
    agrees(entropy, lambda z: -(softmax(z) * np.log(softmax(z))).sum(-1).mean(), normal(N, E))


def test_entropy_of_a_flat_and_of_a_certain_router():
    assert entropy(torch.zeros(3, 16)).item() == pytest.approx(math.log(16))
    certain = torch.zeros(3, 16, requires_grad=True)
    value = entropy(certain + F.one_hot(torch.tensor([1, 2, 3]), 16) * 200.0)
    value.backward()
    assert value.item() == 0.0 and torch.isfinite(certain.grad).all()


def sticky_formula(z, batch):
    p = softmax(z).reshape(batch, -1, z.shape[-1])
    return ((p[:, 1:] - p[:, :-1]) ** 2).sum(-1).mean()


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_sticky_equals_its_formula(batch):
    agrees(lambda z: sticky(z, batch), lambda z: sticky_formula(z, batch), normal(N, E))


def test_sticky_of_constant_routing_is_zero_and_sequences_are_not_neighbours():
    constant = normal(2, 1, E).expand(2, 4, E).reshape(8, E)
    assert sticky(constant, 2).item() == 0.0 and sticky(constant, 1).item() > 0.0


def test_sticky_by_hand():
    sure = 200.0 * torch.eye(3)
    assert sticky(sure[[0, 1, 1]], 1).item() == pytest.approx((2.0 + 0.0) / 2)  # one full change (1 + 1), one none


# --- prediction -------------------------------------------------------------------------------------------------------------------------


def prediction_formula(target, experts):
    """Value as a function of predictor logits q, and the value whose slope in the router logits z is wanted for "both"."""
    hard = one_hot(experts)

    def log_q(q):
        return np.log(softmax(q))

    def bce(q, goal):
        return -(goal * -np.logaddexp(0, -q) + (1 - goal) * -np.logaddexp(0, q)).mean()

    return {
        "topk": (lambda q, z: -(hard / K * log_q(q)).sum(-1).mean(), lambda q, z: -(softmax(z) * log_q(q)).sum(-1).mean()),
        "soft": (lambda q, z: (softmax(z) * (np.log(softmax(z)) - log_q(q))).sum(-1).mean(),) * 2,
        "membership": (lambda q, z: bce(q, hard), lambda q, z: bce(q, softmax(z))),
    }[target]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("gradient", ["input", "both"])
def test_prediction_equals_its_formula(target, gradient):
    """Value; slope in the predictor's logits; slope in the router's logits: none for "input", the probability's for "both"."""
    experts = choose(S, N)
    value, router = prediction_formula(target, experts)
    q, z = normal(S, N, E).requires_grad_(), normal(S, N, E, seed=1).requires_grad_()
    got = prediction(q, z, experts, target=target, gradient=gradient)
    q64, z64 = q.detach().double().numpy(), z.detach().double().numpy()
    assert got.item() == pytest.approx(value(q64, z64), rel=2e-6)
    dq, dz = torch.autograd.grad(got, (q, z), allow_unused=True)
    assert np.abs(dq.numpy() - slope(lambda x: value(x, z64), q64)).max() < 1e-6
    if gradient == "input":
        assert dz is None or not dz.any()
    else:
        want = slope(lambda x: router(q64, x), z64)
        assert np.abs(dz.numpy() - want).max() < 1e-6 and np.abs(want).max() > 1e-3


@pytest.mark.parametrize("target", TARGETS)
def test_straight_through_changes_no_value(target):
    q, z, experts = normal(S, N, E), normal(S, N, E, seed=1), choose(S, N)
    a, b = (prediction(q, z, experts, target=target, gradient=g) for g in ("input", "both"))
    assert torch.equal(a, b)


def test_prediction_agrees_with_torchs_losses():
    q, z, experts = normal(S, N, E), normal(S, N, E, seed=1), choose(S, N)
    hard = torch.from_numpy(one_hot(experts)).float()
    value = {t: prediction(q, z, experts, target=t, gradient="input").item() for t in TARGETS}
    assert value["topk"] == pytest.approx(F.cross_entropy(q.view(-1, E), (hard / K).view(-1, E)).item(), rel=1e-6)
    assert value["soft"] == pytest.approx(F.kl_div(q.log_softmax(-1).view(-1, E), z.softmax(-1).view(-1, E), reduction="batchmean").item(), rel=1e-6)
    assert value["membership"] == pytest.approx(F.binary_cross_entropy(q.sigmoid(), hard).item(), rel=1e-6)


def test_prediction_of_known_values():
    experts, flat = choose(S, N), torch.zeros(S, N, E)
    z = normal(S, N, E)
    assert prediction(flat, z, experts, target="topk", gradient="input").item() == pytest.approx(math.log(E))
    assert prediction(z, z, experts, target="soft", gradient="input").item() == pytest.approx(0.0, abs=1e-7)
    assert prediction(flat, z, experts, target="membership", gradient="input").item() == pytest.approx(math.log(2))
    best = 50.0 * torch.from_numpy(one_hot(experts)).float()  # all mass on the realized experts: the floor of the hard term
    assert prediction(best, z, experts, target="topk", gradient="input").item() == pytest.approx(math.log(K))
    assert prediction(best - 25, z, experts, target="membership", gradient="input").item() == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("target", TARGETS)
def test_bfloat16_logits_are_computed_in_float32(target):
    q, z, experts = normal(S, N, E).bfloat16(), normal(S, N, E, seed=1).bfloat16(), choose(S, N)
    low, high = (prediction(a, b, experts, target=target, gradient="input") for a, b in ((q, z), (q.float(), z.float())))
    assert low.dtype == torch.float32 and torch.equal(low, high)


# --- margin -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scores, chosen, loss, gradient",
    [
        ([3.0, 1.0, 2.5, 0.0], [0, 1], 2.5, [0, -1, 1, 0]),  # weakest true 1, strongest intruder 2.5
        ([3.0, 1.0, 0.5, 0.0], [1, 0], 0.5, [0, -1, 1, 0]),  # right, but by less than 1
        ([3.0, 2.0, 0.5, 0.0], [0, 1], 0.0, [0, 0, 0, 0]),  # right by 1.5: nothing to learn
        ([3.0, 2.0, 0.5, 0.0], [0, 1, 2, 3], 0.0, [0, 0, 0, 0]),  # no intruder
    ],
)
def test_margin_by_hand(scores, chosen, loss, gradient):
    q = torch.tensor([[scores]], requires_grad=True)
    value = margin(q, torch.tensor([[chosen]]))
    value.backward()
    assert value.item() == loss and q.grad[0, 0].tolist() == gradient


def test_margin_equals_its_formula():
    experts = choose(S, N)
    chosen = one_hot(experts).astype(bool)
    formula = lambda q: np.maximum(0, 1 - np.where(chosen, q, np.inf).min(-1) + np.where(chosen, -np.inf, q).max(-1)).mean()  # noqa: E731
    agrees(lambda q: margin(q, experts), formula, 2 * normal(S, N, E))


@pytest.mark.parametrize(
    ("scores", "chosen", "loss", "gradient"),
    [
        # strongest intruder 0.25, weakest true one 0.5: the true ones lose 0 and 0.75, the intruders 0.75 and 0.5
        ([2.0, 0.5, 0.25, 0.0], [0, 1], (0.75 / 2 + 1.25 / 2) / 2, [0, -0.25 - 0.5, 0.25 + 0.25, 0.25]),
        ([3.0, 2.0, 0.5, 0.0], [0, 1], 0.0, [0, 0, 0, 0]),  # right by 1.5: nothing to learn
        ([3.0, 2.0, 0.5, 0.0], [0, 1, 2, 3], 0.0, [0, 0, 0, 0]),  # no intruder
        ([2.0, 0.0, 1.0, -2.0], [0, 1], (2 / 2 + 2 / 2) / 2, [0, -0.25 - 0.25, 0.25 + 0.25, 0]),  # a pair in the wrong order
    ],
)
def test_margin_of_all_by_hand(scores, chosen, loss, gradient):
    q = torch.tensor([[scores]], requires_grad=True)
    value = margin_all(q, torch.tensor([[chosen]]))
    value.backward()
    assert value.item() == pytest.approx(loss) and (gradient is None or q.grad[0, 0].tolist() == gradient)


def test_margin_of_all_equals_its_formula():
    experts = choose(S, N)
    chosen = one_hot(experts).astype(bool)

    def formula(q):
        weakest, strongest = np.where(chosen, q, np.inf).min(-1, keepdims=True), np.where(chosen, -np.inf, q).max(-1, keepdims=True)
        return (np.maximum(0, 1 - q + strongest)[chosen].mean() + np.maximum(0, 1 - weakest + q)[~chosen].mean()) / 2

    agrees(lambda q: margin_all(q, experts), formula, 2 * normal(S, N, E))


@pytest.mark.parametrize("loss", [margin, margin_all])
def test_equal_scores_cost_one(loss):
    assert loss(torch.zeros(1, 5, E), choose(1, 5)).item() == 1.0


# --- L_pred over layers and horizons ------------------------------------------------------------------------------------------------------


def heads(kind="linear", horizons=(1, 2), size=D, experts=E, layers=L):
    return Predictor(PredictorConfig(kind=kind, horizons=horizons), hidden_size=size, num_experts=experts, num_layers=layers).initialise(0)


@pytest.mark.parametrize("target", TARGETS)
def test_l_pred_is_the_mean_over_all_pairs_of_layer_and_horizon(target):
    routing, predictor = records(), heads()
    pairs = []
    for h in (1, 2):
        for s in range(L - h):
            q = F.linear(routing[s].hidden_ND, predictor.weights[f"{h}_0"][s])
            pairs.append(prediction(q[None], routing[s + h].logits_NE[None], routing[s + h].experts_NK[None], target=target, gradient="input").item())
    got = prediction_of(predictor, routing, ObjectiveConfig(lambda_pred=1.0, target=target))
    assert len(pairs) == 5 and got.item() == pytest.approx(np.mean(pairs), rel=1e-6)


def test_l_pred_of_the_ranking_kind_is_its_margin():
    routing, predictor = records(), heads("ranking")
    pairs = [margin(predictor(stack(routing, "hidden_ND"), h)[s], routing[s + h].experts_NK).item() for h in (1, 2) for s in range(L - h)]
    assert prediction_of(predictor, routing, ObjectiveConfig(lambda_pred=1.0)).item() == pytest.approx(np.mean(pairs), rel=1e-6)


def test_the_gradient_to_the_hidden_state_is_that_of_a_softmax_regression():
    """d/dx of the hard term, by hand: W'(softmax(Wx) - goal) / tokens / pairs, summed over the horizons that start there."""
    routing, predictor = records(requires_grad=True), heads()
    prediction_of(predictor, routing, ObjectiveConfig(lambda_pred=1.0)).backward()
    for s in range(L):
        want = np.zeros((N, D))
        for h in (1, 2):
            if s + h < L:
                weight = predictor.weights[f"{h}_0"][s].detach().double().numpy()
                q = routing[s].hidden_ND.detach().double().numpy() @ weight.T
                want += (softmax(q) - one_hot(routing[s + h].experts_NK) / K) @ weight / N / 5
        got = routing[s].hidden_ND.grad
        assert np.abs(got.numpy() - want).max() < 1e-7 and want.any() == (s < L - 1)
        assert routing[s].logits_NE.grad is None or not routing[s].logits_NE.grad.any()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("gradient", ["input", "both"])
def test_what_l_pred_reaches_in_the_model(target, gradient):
    """The last layer is only a target: nothing of it is trained by "input", its router is by "both". Earlier ones always are."""
    config = ModelConfig(vocab_size=13, hidden_size=8, num_layers=3, num_heads=2, expert_size=8, num_experts=E, top_k=K, context=6, init_std=0.3)
    model, predictor = MoEModel(config).initialise(0), heads(size=8, layers=3)
    tokens = torch.arange(12).view(2, 6)
    _, routing = model.body(tokens)
    prediction_of(predictor, routing, ObjectiveConfig(lambda_pred=1.0, target=target, gradient=gradient)).backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert {"embed.weight", "layers.0.moe_norm.weight", "layers.0.router.weight", "layers.1.moe_norm.weight", "layers.0.experts.down"} <= reached
    assert not any(name.startswith(("norm", "head", "layers.2.experts")) for name in reached)
    last = {name for name in reached if name.startswith("layers.2.")}
    assert ("layers.2.router.weight" in last) == (gradient == "both") and bool(last) == (gradient == "both")


# --- the ramp and the sum -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start, end, points", [
    (0.1, 0.5, {0.0: 0, 0.1: 0, 0.2: 0.25, 0.3: 0.5, 0.5: 1, 0.9: 1, 1.0: 1}),
    (0.0, 0.5, {0.0: 0, 0.25: 0.5, 0.5: 1}),
    (0.0, 0.0, {0.0: 1, 0.5: 1}),  # no ramp
    (0.3, 0.3, {0.0: 0, 0.29: 0, 0.3: 1, 0.31: 1}),  # a step
    (0.0, 1.0, {0.0: 0, 0.75: 0.75, 1.0: 1}),
])
def test_ramp_by_hand(start, end, points):
    objective = ObjectiveConfig(lambda_pred=0.3, ramp_start=start, ramp_end=end)
    assert {p: pytest.approx(ramp(objective, p), abs=1e-12) for p in points} == points


def test_each_term_carries_its_weight():
    routing, predictor, lm = records(), heads(), torch.tensor(4.5)
    objective = ObjectiveConfig(balance=0.02, lambda_pred=0.3, ramp_start=0.2, ramp_end=0.6, lambda_sticky=2.0, lambda_ent=0.05)
    got = terms(lm, routing, predictor, objective, batch=2, progress=0.3)
    each = lambda f: np.mean([f(r) for r in routing])  # noqa: E731
    want = {
        "lm": 4.5,
        "balance": 0.02 * each(lambda r: balance(r.logits_NE, r.experts_NK).item()),
        "pred": 0.3 * 0.25 * prediction_of(predictor, routing, objective).item(),
        "sticky": 2.0 * each(lambda r: sticky(r.logits_NE, 2).item()),
        "ent": 0.05 * each(lambda r: entropy(r.logits_NE).item()),
    }
    assert {name: value.item() for name, value in got.items()} == pytest.approx(want, rel=1e-6)


def test_without_weights_only_the_language_model_and_balance_remain():
    routing = records()
    assert terms(torch.tensor(4.5), routing, None, ObjectiveConfig(), batch=2, progress=1.0).keys() == {"lm", "balance"}
    assert terms(torch.tensor(4.5), routing, None, ObjectiveConfig(lambda_sticky=1.0), batch=2, progress=1.0).keys() == {"lm", "balance", "sticky"}
    assert terms(torch.tensor(4.5), routing, None, ObjectiveConfig(balance=0.0), batch=2, progress=1.0)["balance"].item() == 0.0


def test_before_the_ramp_the_term_is_zero_and_trains_nothing():
    routing, predictor = records(requires_grad=True), heads()
    objective = ObjectiveConfig(lambda_pred=0.3, ramp_start=0.1, ramp_end=0.5)
    value = terms(torch.tensor(4.5), routing, predictor, objective, batch=2, progress=0.05)["pred"]
    value.backward()
    assert value.item() == 0.0 and not any(r.hidden_ND.grad is not None and r.hidden_ND.grad.any() for r in routing)


def test_stacked_records_keep_layer_order():
    routing = records()
    stacked = stack(routing, "hidden_ND")
    assert stacked.shape == (L, N, D) and all(torch.equal(stacked[i], r.hidden_ND) for i, r in enumerate(routing))


# --- heads for the next token -----------------------------------------------------------------------------------------------------------------


def with_next(kind="linear", horizons=(1, 2)):
    config = PredictorConfig(kind=kind, horizons=horizons, next_token=True)
    return Predictor(config, hidden_size=D, num_experts=E, num_layers=L).initialise(0)


@pytest.mark.parametrize("kind", ["linear", "ranking"])
@pytest.mark.parametrize("target", TARGETS)
def test_with_the_next_token_each_layer_is_one_pair_more(kind, target):
    """Two sequences of three tokens: tokens 0, 1 and 3, 4 have a next one."""
    routing, predictor = records(), with_next(kind)
    pairs = []
    for s in range(L):
        for h in (0, 1, 2):
            if s + h < L:
                rows, after = ([0, 1, 3, 4], [1, 2, 4, 5]) if h == 0 else (list(range(N)),) * 2
                q = predictor(stack(routing, "hidden_ND")[:, rows], h)[s][None]
                true = routing[s + h].experts_NK[after][None]
                if kind == "ranking":
                    pairs.append(margin(q, true).item())
                else:
                    pairs.append(prediction(q, routing[s + h].logits_NE[after][None], true, target=target, gradient="input").item())
    got = prediction_of(predictor, routing, ObjectiveConfig(lambda_pred=1.0, target=target), batch=2)
    assert len(pairs) == 9 and got.item() == pytest.approx(np.mean(pairs), rel=1e-6)


@pytest.mark.parametrize("gradient", ["input", "both"])
def test_the_next_tokens_gradient_is_that_of_a_softmax_regression_on_the_token_before(gradient):
    """By hand, for the next token alone: W'(softmax(Wx_t) - goal_{t+1}) / pairs in x_t; in the router of t + 1 only for "both"."""
    routing, predictor = records(requires_grad=True), with_next(horizons=())
    prediction_of(predictor, routing, ObjectiveConfig(lambda_pred=1.0, gradient=gradient), batch=2).backward()
    for s in range(L):
        weight = predictor.weights["0_0"][s].detach().double().numpy()
        x, z = (getattr(routing[s], name).detach().double().numpy() for name in ("hidden_ND", "logits_NE"))
        before, after = [0, 1, 3, 4], [1, 2, 4, 5]
        q = x[before] @ weight.T
        want = np.zeros((N, D))
        want[before] = (softmax(q) - one_hot(routing[s].experts_NK)[after] / K) @ weight / (4 * L)
        assert np.abs(routing[s].hidden_ND.grad.numpy() - want).max() < 1e-7 and want.any()
        router = np.zeros((N, E))
        router[after] = slope(lambda y: -(softmax(y) * np.log(softmax(q))).sum() / (4 * L), z[after])  # noqa: B023
        if gradient == "both":
            assert np.abs(routing[s].logits_NE.grad.numpy() - router).max() < 1e-7 and router.any()
        else:
            assert routing[s].logits_NE.grad is None or not routing[s].logits_NE.grad.any()


def test_without_the_number_of_sequences_the_next_token_is_refused():
    with pytest.raises(ValueError, match="need batch"):
        prediction_of(with_next(), records(), ObjectiveConfig(lambda_pred=1.0))


def test_heads_for_the_next_token_leave_the_others_as_they_are():
    without, more = heads(), with_next()
    assert all(torch.equal(tensor, more.state_dict()[name]) for name, tensor in without.state_dict().items())
    assert more.weights["0_0"].shape == (L, E, D) and more.config.depths == (1, 2, 0)
