"""One pass over a set in batches equals the whole worked out directly; each confound against counts made by hand."""

import json

import numpy as np
import pytest
import torch
from tiny_evaluation import HORIZONS, E, K, L, T, V, W, make_model, make_set

from predmoe import metrics
from predmoe.config import PredictorConfig
from predmoe.evaluation import Heads, Lookup, NextRouter, evaluate
from predmoe.posthoc import capture, token_counts
from predmoe.predictor import Predictor, hit_at_k, predicted_top_k

# W windows, T time, N = W*T tokens, E experts, K chosen, L layers, V vocabulary


@pytest.fixture(scope="module")
def setting():
    model = make_model()
    heads = {k: Heads(Predictor(PredictorConfig(kind=k, horizons=HORIZONS), hidden_size=16, num_experts=E, num_layers=L).initialise(1)) for k in ("linear", "ranking")}
    counts = torch.randint(5, (L, V, E), generator=torch.Generator().manual_seed(0)).float()
    scorers = heads | {"next_router": NextRouter(model), "token_id": Lookup(counts, True), "static": Lookup(counts, False)}
    return model, make_set(), scorers


@pytest.fixture(scope="module")
def direct(setting):
    """The same numbers from one forward pass over everything and sets of ids in Python."""
    model, evalset, scorers = setting
    windows = torch.from_numpy(evalset.tokens)
    with torch.no_grad():
        output = model(windows[:, :-1], windows[:, 1:])
        hidden = torch.stack([r.hidden_ND for r in output.routing])
        overlap = {}
        for name, scorer in scorers.items():
            for h in HORIZONS:
                scores = scorer(hidden, h, windows[:, :-1].reshape(-1)).tolist()
                overlap[name, h] = np.array([
                    [len(set(sorted(range(E), key=lambda e: (-row[e], e))[:K]) & set(true)) for row, true in zip(scores[s], output.routing[s + h].experts_NK.tolist())]
                    for s in range(L - h)
                ])
    return output, overlap


@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
def test_any_batch_size_gives_the_direct_result(setting, direct, batch_size):
    model, evalset, scorers = setting
    output, overlap = direct
    got = evaluate(model, evalset, ("even", "odd"), HORIZONS, scorers, batch_size=batch_size)
    for (name, h), hits_SN in overlap.items():
        assert got["hit"][name][str(h)] == pytest.approx(hits_SN.mean() / K, abs=1e-12)
        assert got["exact_set"][name][str(h)] == pytest.approx((hits_SN == K).mean(), abs=1e-12)
        assert got["hit_per_layer"][name][str(h)] == pytest.approx((hits_SN.mean(1) / K).tolist(), abs=1e-12)
    logits = torch.stack([r.logits_NE for r in output.routing])
    loads = [metrics.load(r.experts_NK, E) for r in output.routing]
    hidden = [r.hidden_ND for r in output.routing]
    want = {
        "val_loss": output.losses_BT.double().mean().item(),
        "router_entropy": metrics.router_entropy(logits),
        "router_entropy_fraction": metrics.router_entropy(logits) / np.log(E),
        "top_k_mass": metrics.top_k_mass(logits, K),
        "reuse": np.mean([metrics.reuse(r.experts_NK.view(W, T, K), E) for r in output.routing]),
        "hidden_cosine": np.mean([metrics.hidden_cosine(a, b) for a, b in zip(hidden, hidden[1:])]),
        "load_entropy": np.mean([metrics.load_entropy(load) for load in loads]),
        "largest_load": max(load.max().item() for load in loads),
        "dead_experts": sum(metrics.dead_experts(load) for load in loads),
    }
    assert {name: got[name] for name in want} == pytest.approx(want, rel=2e-6)


def test_documents_add_up_to_the_whole(setting, direct):
    model, evalset, scorers = setting
    output, overlap = direct
    got = evaluate(model, evalset, ("even", "odd"), HORIZONS, scorers, batch_size=3)
    documents = got["documents"]
    ids, counts = np.unique(evalset.document, return_counts=True)
    assert documents["tokens"] == counts.tolist() and documents["domain"] == [("even", "odd")[i % 2] for i in ids]
    share = np.array(documents["tokens"]) / (W * T)
    assert share @ documents["loss"] == pytest.approx(got["val_loss"], rel=1e-12)
    for (name, h), hits_SN in overlap.items():
        per_document = documents["hit"][name][str(h)]
        assert share @ per_document == pytest.approx(got["hit"][name][str(h)], rel=1e-12)
        third = evalset.document.reshape(-1) == ids[2]
        assert per_document[2] == pytest.approx(hits_SN[:, third].mean() / K, rel=1e-12)


def test_the_result_is_plain_numbers(setting):
    model, evalset, scorers = setting
    got = evaluate(model, evalset, ("even", "odd"), HORIZONS, scorers)
    assert json.loads(json.dumps(got, allow_nan=False)) == got


def test_exact_sets_are_never_more_frequent_than_hits(setting):
    model, evalset, scorers = setting
    got = evaluate(model, evalset, ("even", "odd"), HORIZONS, scorers)
    for name in scorers:
        assert all(0 <= got["exact_set"][name][str(h)] <= got["hit"][name][str(h)] <= 1 for h in HORIZONS)


def test_evaluation_changes_nothing_and_keeps_no_graph(setting):
    model, evalset, scorers = setting
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, second = (evaluate(model, evalset, ("even", "odd"), HORIZONS, scorers) for _ in range(2))
    assert first == second and all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


# --- confounds --------------------------------------------------------------------------------------------------------------------------

# Choices of two layers by three token ids over four experts; token 2 was never seen. Popularity: layer 0 (unused), layer 1 (3, 1, 2, 2), layer 2 (1, 6, 1, 1).
COUNTS = torch.tensor([
    [[9, 0, 0, 0], [9, 0, 0, 0], [0, 0, 0, 0]],
    [[3, 1, 0, 0], [0, 0, 2, 2], [0, 0, 0, 0]],
    [[1, 1, 1, 0], [0, 5, 0, 1], [0, 0, 0, 0]],
]).float()
NO_HIDDEN = torch.zeros(3, 3, 1)


def test_token_lookup_by_hand():
    guess = predicted_top_k(Lookup(COUNTS, True)(NO_HIDDEN, 1, torch.tensor([0, 1, 2])), 2)
    assert guess[0].tolist() == [[0, 1], [2, 3], [0, 2]]  # counted; a tie, lower id first; unseen: the most popular, of two equals the lower id
    assert guess[1].tolist() == [[1, 0], [1, 3], [1, 0]]  # a tie of three that popularity decides, then the lower id
    assert predicted_top_k(Lookup(COUNTS, True)(NO_HIDDEN, 2, torch.tensor([1])), 2).tolist() == [[[1, 3]]]  # horizon 2: layer 2 alone


def test_popularity_never_overrules_a_count():
    counts = torch.tensor([[[0, 1, 0], [1000, 0, 0], [0, 0, 0]]] * 2).float()
    scores = Lookup(counts, True)(torch.zeros(2, 1, 1), 1, torch.tensor([0]))
    assert predicted_top_k(scores, 3).tolist() == [[[1, 0, 2]]]


def test_static_lookup_by_hand():
    scores = Lookup(COUNTS, False)(NO_HIDDEN, 1, torch.tensor([0, 1, 2]))
    assert scores.shape == (2, 3, 4)
    assert predicted_top_k(scores, 2).tolist() == [[[0, 2]] * 3, [[1, 0]] * 3]


def test_next_router_applies_the_target_layers_router_to_this_layers_input(setting):
    model, _, _ = setting
    hidden = torch.randn(L, 5, 16, generator=torch.Generator().manual_seed(0))
    for h in HORIZONS:
        got = NextRouter(model)(hidden, h, torch.zeros(5))
        want = np.stack([hidden[s].double().numpy() @ model.layers[s + h].router.weight.detach().double().numpy().T for s in range(L - h)])
        assert got.shape == (L - h, 5, E) and np.abs(got.numpy() - want).max() < 1e-6


@pytest.mark.parametrize("by", [1, 2, 3])
def test_an_early_router_is_known_exactly_at_its_horizon(by):
    """Layer l+by chooses from layer l's MoE input by its own router: the free predictor is then an oracle, and only there."""
    model = make_model(routing="early", early_by=by)
    got = evaluate(model, make_set(), ("even", "odd"), HORIZONS, {"next_router": NextRouter(model)})["hit"]["next_router"]
    assert got[str(by)] == 1.0 and all(value < 1.0 for h, value in got.items() if h != str(by))


def test_hash_routing_is_known_exactly_from_the_token_id():
    """Every id that was counted is known at every horizon; of ids never counted only popularity is known."""
    model = make_model(routing="hash")
    seen = make_set(seed=1, vocab=20, windows=40)
    assert len(np.unique(seen.tokens[:, :-1])) == 20
    counts = token_counts(capture(model, seen.tokens), V, E)
    lookup = {"token_id": Lookup(counts, True), "static": Lookup(counts, False)}
    got = evaluate(model, make_set(seed=2, vocab=20), ("even", "odd"), HORIZONS, lookup)
    assert set(got["hit"]["token_id"].values()) == set(got["exact_set"]["token_id"].values()) == {1.0}
    assert all(value < 0.6 for value in got["hit"]["static"].values())
    with_unseen = make_set(seed=3)
    unseen = np.isin(with_unseen.tokens[:, :-1], seen.tokens[:, :-1], invert=True).reshape(-1)
    model_out = model(torch.from_numpy(with_unseen.tokens[:, :-1])).routing
    ids = torch.from_numpy(with_unseen.tokens[:, :-1].reshape(-1))
    for h in HORIZONS:
        experts = torch.stack([r.experts_NK for r in model_out[h:]])
        by_token, static = (lookup[n](torch.zeros(L, 1, 1), h, ids) for n in ("token_id", "static"))
        assert 0 < unseen.sum() < len(unseen)
        assert hit_at_k(by_token[:, ~unseen], experts[:, ~unseen]) == 1.0
        assert hit_at_k(by_token[:, unseen], experts[:, unseen]) == hit_at_k(static[:, unseen], experts[:, unseen]) < 1.0
