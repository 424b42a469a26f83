"""Post-hoc heads: a planted problem is solved and said to be, the rule of convergence is followed, the backbone stays as it is."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from tiny_backbone import D, E, K, L, SHAPE, T, V, heads_of, windows_of

from predmoe.config import ConfigError, ModelConfig, PosthocConfig, PredictorConfig, RunConfig
from predmoe.measurements import RANKING_LOSSES
from predmoe.model import MoEModel
from predmoe.objectives import margin, prediction
from predmoe.posthoc import Activations, capture, dev_hit, fit, head_loss_of, measure, token_counts
from predmoe.predictor import Predictor

# N tokens, D model width, E experts, K chosen, L layers, V vocabulary

QUICK = PosthocConfig(batch_tokens=256, lr=1e-2, eval_every=25, min_gain=1e-3, max_steps=1500, patience=3)


def planted(n, seed, choose=lambda scores_NLP: scores_NLP.argmax(-1), gap=1.5):
    """About n tokens whose experts come in pairs (0,1) (2,3) ..: in layer l the pair that a fixed linear map of layer l-1's
    hidden state likes best, by at least `gap`. So linear heads can reach both the goal and the floor of their loss."""
    hidden = torch.randn(5 * n, L, D, generator=torch.Generator().manual_seed(seed)).half()
    maps = torch.randn(L, E // 2, D, generator=torch.Generator().manual_seed(99))
    scores = torch.einsum("lpd,nld->nlp", maps, hidden.roll(1, dims=1).float())
    best, second = scores.topk(2).values.unbind(-1)
    clear = ((best - second) > gap).all(1)
    hidden, pair = hidden[clear], 2 * choose(scores[clear]).unsqueeze(-1)
    return Activations(hidden, torch.cat([pair, pair + 1], -1).to(torch.uint8), torch.zeros(len(hidden), dtype=torch.long))


def unrelated(n, seed):
    """Experts drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(n, L, E, generator=generator).argsort(-1)[..., :K].to(torch.uint8)
    return Activations(torch.randn(n, L, D, generator=generator).half(), experts, torch.zeros(n, dtype=torch.long))


@pytest.fixture(scope="module")
def problem():
    return planted(1200, 0), planted(400, 1)


@pytest.fixture(scope="module")
def solved(problem):
    return fit("linear", *problem, SHAPE, (1,), QUICK)


# --- fit --------------------------------------------------------------------------------------------------------------------------------


def test_a_linear_problem_is_solved_and_said_to_be_converged(problem, solved):
    predictor, curve, converged = solved
    assert converged and curve[-1]["step"] < QUICK.max_steps
    assert dev_hit(predictor, problem[1]) > 0.99


def test_labels_that_cannot_be_predicted_are_not():
    train, dev = unrelated(3000, 0), unrelated(3000, 1)
    config = PosthocConfig(batch_tokens=256, eval_every=25, max_steps=1500, min_gain=1e-3, patience=1)
    predictor, _, converged = fit("linear", train, dev, SHAPE, (1,), config)
    p, rows = K / E, 3000 * (L - 1)
    sigma = (K * p * (1 - p) * (E - K) / (E - 1)) ** 0.5 / K / rows**0.5
    assert converged and abs(dev_hit(predictor, dev) - p) < 5 * sigma  # the best of several evaluations: a little more room than 4


def test_the_map_is_found_at_its_own_horizon_only(problem):
    """Nothing about layer l+2 is in layer l's hidden state."""
    predictor, _, _ = fit("linear", *problem, SHAPE, (2,), PosthocConfig(batch_tokens=256, eval_every=25, max_steps=200))
    assert dev_hit(predictor, problem[1]) < 0.4  # chance is 0.25


def test_a_fit_that_is_stopped_is_not_called_converged(problem):
    config = PosthocConfig(batch_tokens=64, lr=1e-3, eval_every=10, max_steps=45)
    _, curve, converged = fit("linear", *problem, SHAPE, (1,), config)
    assert not converged and [point["step"] for point in curve] == [10, 20, 30, 40]


def replay(curve, config):
    """The rule of PosthocConfig: learning rates of the evaluations, and whether the last one ends the fit."""
    best, lr, cuts, rates = -1.0, config.lr, 0, []
    for point in curve:
        rates.append(lr)
        if point["dev_hit"] - best < config.min_gain:
            cuts, lr = cuts + 1, lr / 4
        best = max(best, point["dev_hit"])
    return rates, cuts > config.patience


@pytest.mark.parametrize("kind", ["linear", "ranking"])
def test_the_curve_follows_the_rule(problem, solved, kind):
    config = QUICK if kind == "linear" else PosthocConfig(batch_tokens=256, lr=1e-2, eval_every=20, min_gain=0.01, patience=1, max_steps=1500)
    _, curve, converged = solved if kind == "linear" else fit(kind, *problem, SHAPE, (1,), config)
    rates, ended = replay(curve, config)
    assert [point["lr"] for point in curve] == rates and converged == ended is True
    assert not replay(curve[:-1], config)[1]
    assert rates[-1] == config.lr / 4**config.patience


def test_the_best_weights_of_the_curve_are_returned(problem):
    """Training text that teaches the contrary, the least liked pair: each step makes the heads worse on the dev set."""
    contrary = planted(1200, 0, choose=lambda scores_NLP: scores_NLP.argmin(-1))
    config = PosthocConfig(batch_tokens=256, lr=1e-2, eval_every=5, max_steps=60, patience=100)
    predictor, curve, _ = fit("linear", contrary, problem[1], SHAPE, (1,), config)
    hits = [point["dev_hit"] for point in curve]
    assert dev_hit(predictor, problem[1]) == max(hits) == hits[0] > hits[-1]


@pytest.mark.parametrize("kind", ["linear", "ranking"])
def test_the_same_seed_gives_the_same_heads(problem, kind):
    config = PosthocConfig(batch_tokens=64, eval_every=5, max_steps=10)
    torch.manual_seed(0)
    a, curve_a, _ = fit(kind, *problem, SHAPE, (1, 2), config)
    torch.manual_seed(1)
    b, curve_b, _ = fit(kind, *problem, SHAPE, (1, 2), config)
    c, _, _ = fit(kind, *problem, SHAPE, (1, 2), PosthocConfig(batch_tokens=64, eval_every=5, max_steps=10, seed=1))
    assert curve_a == curve_b and all(torch.equal(tensor, b.state_dict()[name]) for name, tensor in a.state_dict().items())
    assert not all(torch.equal(tensor, c.state_dict()[name]) for name, tensor in a.state_dict().items())


def test_horizons_beyond_the_model_are_refused(problem):
    with pytest.raises(ConfigError, match="below num_layers=4"):
        fit("linear", *problem, SHAPE, (4,), QUICK)


def test_the_heads_loss_is_their_own(problem):
    hidden, experts = problem[1].batch(torch.arange(50))
    for kind in ("linear", "ranking"):
        heads = Predictor(PredictorConfig(kind=kind, horizons=(1, 3)), hidden_size=D, num_experts=E, num_layers=L).initialise(0)
        pairs = []
        for h in (1, 3):
            for s in range(L - h):
                q, true = heads(hidden, h)[s], experts[s + h]
                pairs.append((margin(q, true) if kind == "ranking" else prediction(q, q, true, target="topk", gradient="input")).item())
        assert head_loss_of(heads, hidden, experts).item() == pytest.approx(np.mean(pairs), rel=1e-6)


def test_the_ranking_loss_of_a_fit_is_the_one_that_is_asked_for(problem):
    first = {}
    for name in RANKING_LOSSES:
        _, curve, _ = fit("ranking", *problem, SHAPE, (1, 2), dataclasses.replace(QUICK, max_steps=25, ranking_loss=name))
        first[name] = curve[0]["train_loss"]
    assert len(set(first.values())) == 2
    with pytest.raises(ConfigError, match="ranking_loss='hinge' is unknown"):
        PosthocConfig(ranking_loss="hinge")


# --- activations of a backbone -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_captured_activations_are_the_models(batch_size):
    model, windows = MoEModel(SHAPE).initialise(0), windows_of(5)
    got = capture(model, windows, batch_size=batch_size)
    with torch.no_grad():
        routing = model(torch.from_numpy(windows[:, :-1])).routing
    assert got.tokens_N.tolist() == windows[:, :-1].flatten().tolist()
    for layer, record in enumerate(routing):
        assert torch.equal(got.experts_NLK[:, layer].long(), record.experts_NK)
        assert torch.allclose(got.hidden_NLD[:, layer].float(), record.hidden_ND, rtol=2.0**-10, atol=1e-5)
    hidden, experts = got.batch(torch.tensor([7, 3]))
    assert hidden.shape == (L, 2, D) and hidden.dtype == torch.float32 and torch.equal(hidden[2, 1], got.hidden_NLD[3, 2].float())
    assert experts.dtype == torch.int64 and torch.equal(experts[2, 1], got.experts_NLK[3, 2].long())


def test_expert_ids_beyond_a_byte_are_kept():
    config = ModelConfig(vocab_size=V, hidden_size=D, num_layers=2, num_heads=2, expert_size=1, num_experts=300, top_k=2, context=T, init_std=0.3)
    model, windows = MoEModel(config).initialise(0), windows_of(4)
    got = capture(model, windows)
    assert got.experts_NLK.max() > 255
    with torch.no_grad():
        assert torch.equal(got.experts_NLK[:, 1].long(), model(torch.from_numpy(windows[:, :-1])).routing[1].experts_NK)


def test_token_counts_equal_a_loop():
    got = capture(MoEModel(SHAPE).initialise(0), windows_of(5))
    counts = token_counts(got, V, E)
    want = np.zeros((L, V, E))
    for token, layers in zip(got.tokens_N.tolist(), got.experts_NLK.tolist()):
        for layer, experts in enumerate(layers):
            want[layer, token, experts] += 1
    assert np.array_equal(counts.numpy(), want) and counts.sum().item() == 5 * T * L * K


def test_routing_that_is_a_function_of_the_layer_before_is_found():
    """An early router by one layer: layer l+1's expert is the argmax of a linear map of layer l's MoE input. With one
    expert a token, cross-entropy has its floor at that map; with more it asks the chosen ones' logits to be equal."""
    model = MoEModel(ModelConfig(**(vars(SHAPE) | {"routing": "early", "early_by": 1, "top_k": 1}))).initialise(0)
    train, dev = capture(model, windows_of(200)), capture(model, windows_of(40, seed=1))
    config = PosthocConfig(batch_tokens=256, lr=3e-2, eval_every=250, min_gain=1e-3, patience=1, max_steps=3000)
    predictor, _, converged = fit("linear", train, dev, model.config, (1,), config)
    assert converged and dev_hit(predictor, dev) > 0.97


# --- measure: the whole of a result -------------------------------------------------------------------------------------------------------


FEW = PosthocConfig(tokens=800, batch_tokens=128, eval_every=10, max_steps=30)


@pytest.fixture(scope="module")
def measured(finished):
    run, tokens = finished
    model, cotrained = MoEModel(run.model).initialise(0), heads_of(run, 5)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    heads = {name: tensor.clone() for name, tensor in cotrained.state_dict().items()}
    result, fitted = measure(model, cotrained, run, tokens, FEW)
    return result, fitted, (state, model.state_dict()), (heads, cotrained.state_dict())


def test_a_measurement_leaves_backbone_and_cotrained_heads_as_they_are(measured):
    for before, after in measured[2:]:
        assert before.keys() == after.keys() and all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize("seed", [None, 6])
def test_fresh_heads_do_not_depend_on_the_heads_trained_with_the_backbone(finished, measured, seed):
    run, tokens = finished
    result, fitted, _, _ = measured
    other, again = measure(MoEModel(run.model).initialise(0), None if seed is None else heads_of(run, seed), run, tokens, FEW)
    assert other["curves"] == result["curves"]
    for kind in ("linear", "ranking"):
        assert all(torch.equal(tensor, again[kind].state_dict()[name]) for name, tensor in fitted[kind].state_dict().items())
        assert other["hit"][kind] == result["hit"][kind]
    if seed is None:
        assert "cotrained" not in other["hit"]
    else:
        assert other["hit"]["cotrained"] != result["hit"]["cotrained"]


def test_a_measurement_says_what_a_result_needs(finished, measured):
    run, tokens = finished
    result, fitted, _, _ = measured
    assert result["hit"].keys() == {"linear", "ranking", "next_router", "token_id", "static", "cotrained"}
    assert all(by_horizon.keys() == {"1", "2"} for by_horizon in result["hit"].values())
    assert (result["config_hash"], result["seed"], result["lambda_pred"], result["data_hash"]) == (run.hash, 0, 0.3, tokens.hash)
    assert result["static_hit"] == result["hit"]["static"] and result["token_id_hit"] == result["hit"]["token_id"]
    assert result["margin_over_token_id"].keys() == {"linear", "ranking", "next_router", "cotrained"}
    for name, margins in result["margin_over_token_id"].items():
        assert margins == {h: result["hit"][name][h] - result["hit"]["token_id"][h] for h in ("1", "2")}
    assert result["converged"].keys() == result["curves"].keys() == fitted.keys() == {"linear", "ranking"}
    assert result["seconds"]["posthoc"] >= result["seconds"]["linear"] + result["seconds"]["ranking"] > 0
    assert sum(result["documents"]["tokens"]) == 480 and set(result["documents"]["domain"]) == {"north", "south"}
    json.dumps(result, allow_nan=False)


def test_a_hash_model_can_be_measured_and_its_experts_are_known_from_the_token(finished):
    """Every routing goes through the same measurement; the lookup counts tokens of the training text, so most are known."""
    run, tokens = finished
    config = ModelConfig(**(vars(run.model) | {"routing": "hash"}))
    run = RunConfig(model=config, train=run.train, data=run.data, predictor=run.predictor)
    result, _ = measure(MoEModel(config).initialise(0), None, run, tokens, FEW)
    assert all(result["hit"]["token_id"][h] > max(0.9, result["hit"]["static"][h]) for h in ("1", "2"))
