"""Diagnostics on routings whose numbers can be worked out by hand."""

import math

import pytest
import torch

from predmoe import metrics

# B batch, T time, N tokens, E experts, K chosen


def test_router_entropy_of_known_distributions():
    flat, half, certain = [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, -1e4, -1e4], [0.0, -1e4, -1e4, -1e4]
    assert metrics.router_entropy(torch.tensor([flat])) == pytest.approx(math.log(4))
    assert metrics.router_entropy(torch.tensor([half])) == pytest.approx(math.log(2))
    assert metrics.router_entropy(torch.tensor([certain])) == 0.0
    assert metrics.router_entropy(torch.tensor([flat, half, certain])) == pytest.approx(math.log(8) / 3)


def test_router_entropy_agrees_with_torchs_distribution():
    logits = torch.randn(3, 20, 7, generator=torch.Generator().manual_seed(0))
    assert metrics.router_entropy(logits) == pytest.approx(torch.distributions.Categorical(logits=logits).entropy().mean().item(), rel=1e-6)


def test_top_k_mass_by_hand():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4]]))
    assert metrics.top_k_mass(logits, 1) == pytest.approx(0.45)
    assert metrics.top_k_mass(logits, 2) == pytest.approx(0.75)
    assert metrics.top_k_mass(torch.zeros(5, 8), 2) == pytest.approx(0.25)
    assert metrics.top_k_mass(logits, 4) == pytest.approx(1.0)


def test_load_counts_every_dispatch():
    load = metrics.load(torch.tensor([[0, 1], [0, 2], [0, 1], [1, 0]]), 4)
    assert load.tolist() == [0.5, 0.375, 0.125, 0.0]


@pytest.mark.parametrize(
    "load, entropy",
    [([0.25] * 4, 1.0), ([1, 0, 0, 0], 0.0), ([0.5, 0.5, 0, 0], 0.5), ([0.5, 0.25, 0.25, 0], 0.75)],
)
def test_load_entropy_by_hand(load, entropy):
    # of four experts, in bits out of two
    assert metrics.load_entropy(torch.tensor(load, dtype=torch.float64)) == pytest.approx(entropy, abs=1e-12)


def test_a_single_expert_is_evenly_loaded():
    assert metrics.load_entropy(torch.ones(1)) == 1.0


@pytest.mark.parametrize("load, dead", [([0.25] * 4, 0), ([1, 0, 0, 0], 3), ([0.5, 0.4975, 0.0025, 0.0], 1), ([0.5, 0.4976, 0.0024, 0.0], 2)])
def test_an_expert_is_dead_below_a_hundredth_of_an_even_share(load, dead):
    assert metrics.dead_experts(torch.tensor(load, dtype=torch.float64)) == dead


def test_reuse_by_hand():
    # Sequence 1: {0,1} {1,0} {1,2} {3,0}: shares 1, 1/2, 0; sequence 2: {2,3} all along: 1, 1, 1.
    # The step from one sequence to the next does not count, nor does the same place in another sequence.
    experts = torch.tensor([[[0, 1], [1, 0], [1, 2], [3, 0]], [[2, 3], [2, 3], [2, 3], [3, 2]]])
    assert metrics.reuse(experts, 4) == pytest.approx((1 + 0.5 + 0 + 3) / 6)


def test_reuse_of_independent_choices_is_k_over_e():
    experts = torch.rand(8, 2000, 16, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :2]
    p, rows = 2 / 16, 8 * 1999
    sigma = math.sqrt(2 * p * (1 - p) * 14 / 15) / 2 / math.sqrt(rows)  # hypergeometric overlap; neighbours' pairs are uncorrelated
    assert abs(metrics.reuse(experts, 16) - p) < 4 * sigma


def test_cosine_of_known_vectors():
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0], [1.0, 0.0]])
    y = torch.tensor([[5.0, 0.0], [0.0, -1.0], [0.0, 1.0], [0.0, 4.0]])
    assert metrics.hidden_cosine(x, y) == pytest.approx((1 - 1 + math.sqrt(0.5) + 0) / 4)
