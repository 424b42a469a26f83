"""The penalty on what a lookup by token id knows: the table by hand, the term against its formula in float64, and in training."""

import math

import numpy as np
import pytest
import torch
from loss_formulas import E, K, N, choose, normal, one_hot, records, slope, softmax
from tiny_runs import lines, results, tiny

from predmoe import token_table, worker
from predmoe.config import ObjectiveConfig, to_dict
from predmoe.files import write_json
from predmoe.objectives import familiarity, terms
from predmoe.token_table import DECAY, PRIOR, TokenTable
from predmoe.train import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

L, V = 3, 11


def by_hand(batches, vocab, layers):
    """(L, V, E) counts of a list of (tokens, experts), each batch fading by DECAY with every later one."""
    counts = np.zeros((layers, vocab, E))
    for tokens, experts in batches:
        counts *= DECAY
        for layer in range(layers):
            for token, chosen in zip(tokens.tolist(), experts[layer].tolist()):
                counts[layer, token, chosen] += 1
    return counts


def batches(n=3):
    return [(torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(i)), choose(L, N, seed=i)) for i in range(n)]


def test_the_table_counts_and_fades_as_by_hand_and_tells_the_log_ratio():
    table, seen = TokenTable(L, V, E), batches()
    for tokens, experts in seen:
        table.add(tokens, experts)
    counts = by_hand(seen, V, L)
    assert np.allclose(table.counts_LVE.numpy(), counts, rtol=1e-6)
    asked = torch.tensor([0, 3, 3, 10])
    got = table.advantage(asked).numpy()
    for layer in range(L):
        share = (counts[layer].sum(0) + 1) / (counts[layer].sum() + E)
        for i, token in enumerate(asked.tolist()):
            own = (counts[layer, token] + PRIOR * share) / (counts[layer, token].sum() + PRIOR)
            assert np.allclose(got[layer, i], np.log(own / share), atol=1e-5)


def test_an_id_that_was_never_seen_tells_nothing_and_one_that_always_chooses_the_same_tells_much():
    table = TokenTable(1, V, E)
    assert not table.advantage(torch.arange(V)).any()
    for token, expert in [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)] * 20:
        table.add(torch.tensor([token]), torch.tensor([[[expert]]]))
    told = table.advantage(torch.tensor([0, 10]))[0]
    assert told[0, 0] > 0.9 * math.log(E) and (told[0, 1:] < -1).all()   # the whole of it would be log E
    assert told[1].abs().max() < 1e-6


@pytest.mark.parametrize("seed", [0, 1])
def test_familiarity_equals_its_formula_and_its_slope_is_the_probabilitys(seed):
    logits, experts, told = normal(L, N, E, seed=seed), choose(L, N, seed=seed), normal(L, N, E, seed=seed + 9)
    told64, hard = told.double().numpy(), one_hot(experts) / K
    z = logits.clone().requires_grad_()
    value = familiarity(z, experts, told)
    assert value.item() == pytest.approx((hard * told64).sum(-1).mean(), rel=2e-6)
    (gradient,) = torch.autograd.grad(value, z)
    want = slope(lambda x: (softmax(x) * told64).sum(-1).mean(), logits.double().numpy())
    assert np.abs(gradient.numpy() - want).max() < 1e-6 and np.abs(want).max() > 1e-3


def test_descending_it_moves_the_router_off_what_the_lookup_names():
    told = torch.zeros(1, 1, E)
    told[0, 0, 2] = 1.0
    z = torch.zeros(1, 1, E, requires_grad=True)
    familiarity(z, torch.tensor([[[2, 0]]]), told).backward()
    assert z.grad[0, 0, 2] > 0 and (z.grad[0, 0, [0, 1, 3, 4]] < 0).all()


def test_the_term_estimates_the_mutual_information_of_id_and_expert():
    """Ids choose experts by fixed laws, each id as often as the others: the mean log ratio is I(id; expert)."""
    generator = torch.Generator().manual_seed(0)
    law_VE = torch.rand(V, E, generator=generator).pow(3)
    law_VE /= law_VE.sum(1, keepdim=True)
    table = TokenTable(1, V, E)
    for _ in range(60):
        tokens = torch.arange(V).repeat(40)
        table.add(tokens, torch.multinomial(law_VE[tokens], 1, generator=generator)[None])
    tokens = torch.arange(V).repeat(400)
    experts = torch.multinomial(law_VE[tokens], 1, generator=generator)[None]
    share = law_VE.mean(0)
    information = (law_VE * (law_VE / share).log()).sum(1).mean().item()
    assert familiarity(torch.zeros(1, len(tokens), E), experts, table.advantage(tokens)).item() == pytest.approx(information, rel=0.05)
    assert information > 0.2


def test_the_term_carries_its_weight_and_reads_the_table_only(monkeypatch):
    routing, tokens = records(), torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(5))
    table = TokenTable(len(routing), V, E)
    table.add(tokens, torch.stack([r.experts_NK for r in routing]))
    before = table.counts_LVE.clone()
    got = terms(torch.tensor(4.5), routing, None, ObjectiveConfig(lambda_lookup=0.5), batch=2, progress=1.0, table=table, tokens_N=tokens)
    logits, experts = torch.stack([r.logits_NE for r in routing]), torch.stack([r.experts_NK for r in routing])
    assert got.keys() == {"lm", "balance", "lookup"} and torch.equal(before, table.counts_LVE)
    assert got["lookup"].item() == pytest.approx(0.5 * familiarity(logits, experts, table.advantage(tokens)).item(), rel=1e-6) and got["lookup"].item() != 0


# --- in training --------------------------------------------------------------------------------------------------------

BOTH = {"lambda_pred": 0.3, "lambda_lookup": 0.1}


def test_a_run_counts_earlier_batches_alone_and_goes_on_to_the_same_bits(corpus, tmp_path):
    """The first batch finds an empty table; a run that was broken off takes up the table with the weights."""
    config = tiny(corpus, objective=BOTH, steps=14, eval_every=100)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
        write_json(folder / "config.json", to_dict(config))
    worker.train(whole, config, progress=lambda line: None)
    logged = [line["terms"]["lookup"] for line in lines(whole) if "terms" in line]
    assert logged[0] == 0.0 and logged[-1] != 0.0
    trainer = Trainer(config, broken)
    trainer.log(terms={})   # a log to cut back to
    trainer.restore()
    for _ in range(7):
        trainer.training_step()
        trainer.step += 1
    assert trainer.table.counts_LVE.sum() > 0
    (broken / "metrics.jsonl").write_text("".join((whole / "metrics.jsonl").read_text().splitlines(keepends=True)[:1]))   # what step 1 logged
    trainer.save()
    again = Trainer(config, broken)
    assert again.table.counts_LVE.sum() == 0
    again.train()
    assert results(broken) == results(whole)


def test_a_run_without_the_term_has_no_table(corpus, tmp_path):
    assert Trainer(tiny(corpus), tmp_path).table is None


def test_the_constants_are_what_the_description_says():
    assert math.log(1 / 3) / math.log(token_table.DECAY) == pytest.approx(109, abs=1)   # "a choice of 100 steps ago counts a third"
