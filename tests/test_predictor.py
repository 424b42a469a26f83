"""Predictor heads and hit@k: chance for the ignorant, one for the oracle, lower ids for ties."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from predmoe.config import ConfigError, PredictorConfig
from predmoe.predictor import Predictor, exact_set, hit_at_k, hits, membership, predicted_top_k

# N tokens, D model width, E experts, K chosen, L layers


def heads(kind="linear", horizons=(1, 2), D=6, E=8, L=4, seed=0):
    return Predictor(PredictorConfig(kind=kind, horizons=horizons), hidden_size=D, num_experts=E, num_layers=L).initialise(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(n, E, k, seed=0):
    """k distinct experts per row, uniformly."""
    return torch.rand(n, E, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :k]


# --- hit@k --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "ranking"])
@pytest.mark.parametrize("E, k", [(8, 2), (16, 2), (64, 8)])
def test_an_untrained_predictor_on_random_labels_hits_by_chance(kind, E, k):
    """The overlap of a fixed k-set with a random one is hypergeometric: mean k*k/E, variance k (k/E)(1-k/E)(E-k)/(E-1)."""
    n, L = 6000, 3
    predictor = heads(kind, horizons=(1, 2), D=16, E=E, L=L)
    p = k / E
    for h in (1, 2):
        rows = n * (L - h)
        chosen = labels(rows, E, k, seed=h).view(L - h, n, k)
        sigma = math.sqrt(k * p * (1 - p) * (E - k) / (E - 1)) / k / math.sqrt(rows)
        assert abs(hit_at_k(predictor(normal(L, n, 16), h), chosen) - p) < 4 * sigma


def test_the_oracle_is_exact():
    chosen = labels(500, 16, 3)
    assert hit_at_k(membership(chosen, 16), chosen) == 1.0 and exact_set(membership(chosen, 16), chosen) == 1.0
    assert hit_at_k(-membership(chosen, 16), chosen) == 0.0 and exact_set(-membership(chosen, 16), chosen) == 0.0


def test_hits_by_hand():
    scores = torch.tensor([[0.1, 0.9, 0.8, 0.0], [0.1, 0.9, 0.8, 0.0], [0.1, 0.9, 0.8, 0.0]])
    chosen = torch.tensor([[2, 1], [1, 3], [0, 3]])  # guessed: 1 and 2
    assert hits(scores, chosen).tolist() == [2, 1, 0]
    assert hit_at_k(scores, chosen) == 0.5 and exact_set(scores, chosen) == pytest.approx(1 / 3)


def test_equal_scores_go_to_the_lower_id():
    assert predicted_top_k(torch.zeros(2, 9), 3).tolist() == [[0, 1, 2]] * 2
    assert predicted_top_k(torch.tensor([1.0, 2.0, 2.0, 1.0, 2.0]), 4).tolist() == [1, 2, 4, 0]


@pytest.mark.parametrize("E, k", [(5, 1), (16, 2), (40, 8), (300, 8)])
def test_ranking_with_ties_agrees_with_a_sort_by_score_and_id(E, k):
    scores = np.random.default_rng(E).integers(0, 4, (50, E)).astype(np.float32)
    want = [sorted(range(E), key=lambda e: (-row[e], e))[:k] for row in scores]
    assert predicted_top_k(torch.from_numpy(scores), k).tolist() == want


def test_the_order_of_the_realized_experts_does_not_matter():
    scores, chosen = normal(200, 16), labels(200, 16, 4)
    assert torch.equal(hits(scores, chosen), hits(scores, chosen.flip(1)))


def test_the_whole_set_is_predicted_at_most_as_often_as_its_members():
    for seed in range(5):
        scores, chosen = normal(300, 8, seed=seed), labels(300, 8, 2, seed=seed)
        assert 0 < exact_set(scores, chosen) <= hit_at_k(scores, chosen) < 1


def test_choosing_every_expert_is_always_predicted():
    assert hit_at_k(normal(20, 4), labels(20, 4, 4)) == 1.0


def test_a_score_of_nan_ranks_nothing_and_is_an_error_with_its_row():
    scores = torch.zeros(2, 5, 4)
    scores[1, 3, 2] = float("nan")
    with pytest.raises(ValueError, match=r"row \[1, 3\]"):
        hit_at_k(scores, torch.zeros(2, 5, 1, dtype=torch.long))


def test_membership_by_hand():
    assert membership(torch.tensor([[2, 0], [1, 3]]), 4).tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]


# --- heads ----------------------------------------------------------------------------------------------------------------------------


def test_a_linear_head_is_torchs_linear_per_layer():
    predictor, hidden = heads("linear"), normal(4, 10, 6)
    for h in (1, 2):
        with torch.no_grad():
            predictor.biases[f"{h}_0"].copy_(normal(4 - h, 1, 8, seed=5))
        got = predictor(hidden, h)
        assert got.shape == (4 - h, 10, 8)
        for s in range(4 - h):
            want = F.linear(hidden[s], predictor.weights[f"{h}_0"][s], predictor.biases[f"{h}_0"][s, 0])
            assert torch.allclose(got[s], want, atol=1e-6)


def test_a_ranking_head_is_an_mlp_with_gelu_per_layer():
    predictor, hidden = heads("ranking"), normal(4, 10, 6)
    with torch.no_grad():
        for i, bias in enumerate(predictor.biases.values()):
            bias.copy_(normal(*bias.shape, seed=i))
    for h in (1, 2):
        got = predictor(hidden, h)
        for s in range(4 - h):
            a, b = (predictor.weights[f"{h}_{i}"][s] for i in (0, 1))
            u, v = (predictor.biases[f"{h}_{i}"][s, 0] for i in (0, 1))
            want = F.linear(F.gelu(F.linear(hidden[s], a, u)), b, v)
            assert a.shape == (6, 6) and b.shape == (8, 6) and torch.allclose(got[s], want, atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "ranking"])
def test_a_head_reads_its_own_layer_and_no_other(kind):
    predictor, hidden = heads(kind), normal(4, 10, 6).requires_grad_()
    predictor(hidden, 2)[1].sum().backward()  # the head of layer 1, about layer 3
    assert [bool(g.any()) for g in hidden.grad] == [False, True, False, False]
    used = {name for name, p in predictor.named_parameters() if p.grad is not None}
    assert used and all(".2_" in name for name in used)
    for name, parameter in predictor.named_parameters():
        if name in used:
            assert parameter.grad[1].any() and not parameter.grad[0].any()


@pytest.mark.parametrize("horizons", [(4,), (1, 2, 5)])
def test_a_horizon_beyond_the_last_layer_is_refused(horizons):
    with pytest.raises(ConfigError, match="below num_layers=4"):
        heads(horizons=horizons)


@pytest.mark.parametrize("kind", ["linear", "ranking"])
def test_initialisation_is_a_function_of_the_seed(kind):
    a, b, c = (heads(kind, seed=s).state_dict() for s in (0, 0, 1))
    torch.manual_seed(123)
    d = heads(kind, seed=0).initialise(1).initialise(0).state_dict()
    assert all(torch.equal(a[n], b[n]) and torch.equal(a[n], d[n]) for n in a)
    assert all(not torch.equal(a[n], c[n]) for n in a if n.startswith("weights"))
    assert all(not a[n].any() for n in a if n.startswith("biases"))


def test_weights_are_uniform_within_one_over_the_root_of_fan_in():
    weight = heads(D=64, E=64, L=9).weights["1_0"]
    bound = 1 / 8
    assert weight.abs().max() <= bound and weight.abs().max() > 0.99 * bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)  # 32,768 draws: standard error 0.3%


def test_scores_are_float32_whatever_the_heads_are():
    predictor = heads().bfloat16()
    assert predictor(normal(4, 3, 6).bfloat16(), 1).dtype == torch.float32
