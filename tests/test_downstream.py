"""The adaptor: trees of tokens score what lines score, and what the harness's own transformers class scores; folders and tokenizers that do not fit are refused."""

import gc
import json
import random
import shutil
import threading

import numpy as np
import pytest
import tokenizers
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from predmoe import downstream, measure_downstream
from predmoe.checkpoint import save_checkpoint
from predmoe.config import ConfigError, ModelConfig
from predmoe.downstream import PredmoeLM, Tree, Whole, batches, load, plant, score, transformers_tokenizer, words_of
from predmoe.engine import export
from predmoe.model import MoEModel
from predmoe.tokenizer import load_tokenizer

SHAPE = ModelConfig(vocab_size=8192, hidden_size=32, num_layers=3, num_heads=2, expert_size=32, num_experts=4, top_k=2, context=24, init_std=0.3)
TOKENIZER = load_tokenizer("bpe8k")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(MoEModel(SHAPE).initialise(0), tmp_path_factory.mktemp("run") / "checkpoint")


@pytest.fixture(scope="module")
def lm(checkpoint):
    return load(checkpoint, tokenizer="bpe8k")


def asked(pairs):
    return [Instance("loglikelihood", doc={}, arguments=pair, idx=0) for pair in pairs]


LONG = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it was the epoch of belief"
PAIRS = [("Question: why?\nAnswer:", f" {answer}") for answer in ("because", "because it is", "because it was", "no")]
PAIRS += [("Question: why?\nAnswer: because", " it"), ("A space at the end ", "is moved"), (LONG, " and the end"), (LONG, " and the start"), ("", "Nothing before it"), ("x", " y")]


# --- trees -------------------------------------------------------------------------------------------------------------

def test_a_common_beginning_is_in_the_tree_once():
    (tree,) = plant([([1, 2], [3, 4, 5]), ([1, 2], [3, 4, 6]), ([1, 2], [7])], 10, share=True)
    assert (tree.tokens, tree.parent) == ([1, 2, 3, 4], [-1, 0, 1, 2])
    assert [(request, nodes, targets) for request, nodes, targets in tree.reads] == [(0, [1, 2, 3], [3, 4, 5]), (1, [1, 2, 3], [3, 4, 6]), (2, [1], [7])]


def test_a_token_sees_what_it_comes_after_and_no_other_branch():
    tree = Tree()
    tree.add(0, [1, 2, 3], [9])
    tree.add(1, [1, 2, 4, 5], [9])
    position, seen = tree.seen(6)
    assert tree.tokens == [1, 2, 3, 4, 5] and position.tolist() == [0, 1, 2, 2, 3, 0]
    assert [np.flatnonzero(row).tolist() for row in seen] == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3, 4], [5]]   # the last is padding


def test_too_long_a_request_loses_its_beginning_as_in_the_harness():
    (tree,) = plant([([1, 2, 3, 4], [5, 6])], 3, share=True)
    assert tree.tokens == [3, 4, 5] and tree.reads == [(0, [1, 2], [5, 6])]


@pytest.mark.parametrize("continuation, count", [([], 0), ([1, 2, 3, 4], 4)])
def test_a_continuation_that_cannot_be_scored_is_refused(continuation, count):
    with pytest.raises(ConfigError, match=f"request 1: a continuation of {count} tokens cannot be scored; it takes 1 to 3"):
        plant([([1], [2]), ([1], continuation)], 3, share=True)


def test_a_continuation_with_nothing_before_it_is_refused():
    with pytest.raises(ConfigError, match="request 1: no token stands before its continuation"):
        plant([([1], [2]), ([], [2, 3])], 3, share=True)


def test_a_batch_stays_within_its_budget_and_none_is_lost():
    trees = [Tree(tokens=[0] * n) for n in (30, 9, 9, 5, 5, 5, 1)]
    found = list(batches(trees, 20))
    assert [tree for batch in found for tree in batch] == trees and [[len(t.tokens) for t in batch] for batch in found] == [[30], [9, 9], [5, 5, 5, 1]]


@pytest.mark.parametrize("change", [{}, {"routing": "hash"}, {"routing": "early", "early_by": 1}])
def test_trees_score_what_each_request_scores_alone(change):
    """By a plain forward pass per request: log-softmax at each position, and the likeliest token of each."""
    model = MoEModel(ModelConfig(**(vars(SHAPE) | change))).initialise(1)
    rng = np.random.default_rng(0)
    requests = [(context, rng.integers(0, 40, n).tolist()) for context in (rng.integers(0, 40, m).tolist() for m in (3, 9, 22)) for n in (1, 1, 2, 5, 8, 8)]
    requests += [(context, continuation[:-1] + [int(continuation[-1] + 1)]) for context, continuation in requests]
    with torch.no_grad():
        for context, continuation in (likely := list(requests[:3])):   # some that are greedy: the model's own words
            requests.append((context, [int(model(torch.tensor([context])).logits_BTV[0, -1].argmax())]))
        expected = []
        for context, continuation in requests:
            line = (context + continuation)[-(SHAPE.context + 1) :]
            logp = model(torch.tensor([line[:-1]])).logits_BTV[0].log_softmax(1)[-len(continuation) :]
            expected.append((float(logp.gather(1, torch.tensor(continuation)[:, None]).sum()), logp.argmax(1).tolist() == continuation))
    found = score(Whole(model), requests, budget=64)
    assert [same for _, same in found] == [same for _, same in expected] and sum(same for _, same in expected) >= len(likely)
    assert np.allclose([ll for ll, _ in found], [ll for ll, _ in expected], atol=2e-4)
    assert max(len(tree.tokens) for tree in plant(requests, SHAPE.context, share=True)) > SHAPE.context   # a tree may be larger than the context


def test_a_tree_whose_positions_exceed_the_context_is_refused():
    model = MoEModel(SHAPE)
    with pytest.raises(ValueError, match="25 tokens exceed the model's context of 24"):
        model.body(torch.zeros(1, 2, dtype=torch.long), (torch.tensor([[0, 24]]), torch.eye(2, dtype=torch.bool)[None, None]))


# --- beside the harness's own class ------------------------------------------------------------------------------------------

def test_our_tokenizer_in_transformers_gives_the_same_ids():
    theirs, rng = transformers_tokenizer(TOKENIZER), random.Random(0)
    texts = [LONG, "  two  spaces\n\n\tand a tab ", "can't WON'T they'll", "x\n", " \n ", "don’t 漢字 😀 ½ ３"]
    texts += ["".join(rng.choice("ab Z  \n\t'sé漢😀9.,!\u2003\u200b\x85") for _ in range(rng.randint(1, 30))) for _ in range(500)]
    for text in texts:
        assert theirs.encode(text) == TOKENIZER.encode(text) and theirs.decode(theirs.encode(text)) == text
    assert theirs.eos_token_id == TOKENIZER.eot


@pytest.fixture(scope="module")
def harness(checkpoint):
    from lm_eval.models.huggingface import HFLM
    from transformers import OlmoeForCausalLM

    return HFLM(pretrained=OlmoeForCausalLM.from_pretrained(checkpoint), tokenizer=transformers_tokenizer(TOKENIZER), batch_size=4)


def test_scores_equal_the_harness_own_transformers_class_item_for_item(lm, harness):
    pairs = [*PAIRS, ("Question: why?\nAnswer:", lm.generate_until(asked([("Question: why?\nAnswer:", {"max_gen_toks": 1})]))[0])]
    before = lm.cut
    ours, theirs = lm.loglikelihood(asked(pairs), disable_tqdm=True), harness.loglikelihood(asked(pairs), disable_tqdm=True)
    assert [same for _, same in ours] == [same for _, same in theirs] and ours[-1][1]   # the model's own word is the likeliest
    assert np.allclose([ll for ll, _ in ours], [ll for ll, _ in theirs], atol=2e-4)
    assert lm.cut - before == 2   # the two that are longer than the context


def test_rolling_and_generation_equal_the_harness_own(lm, harness):
    texts = [(LONG,), ("short",)]
    assert np.allclose(lm.loglikelihood_rolling(asked(texts)), harness.loglikelihood_rolling(asked(texts), disable_tqdm=True), atol=1e-3)
    wanted = asked([("It was the best", {"until": ["\n\n"], "max_gen_toks": 6}), (LONG[:60], {"until": [" "], "max_gen_toks": 5})])
    assert lm.generate_until(wanted) == harness.generate_until(wanted, disable_tqdm=True)
    with pytest.raises(ConfigError, match="likeliest tokens only"):
        lm.generate_until(asked([("x", {"temperature": 1.0})]))


def test_the_nearest_tie_of_a_router_is_found(checkpoint, lm):
    """Two equal rows of the last router: any token that chooses one of them last is a tie; without them none is that near."""
    model, sample = MoEModel(SHAPE).initialise(0), {"arguments": PAIRS[:2]}
    assert 1e-6 < measure_downstream.nearest_tie(lm, model, sample) < 1
    with torch.no_grad():
        model.layers[-1].router.weight[:] = model.layers[-1].router.weight[:1]
    assert measure_downstream.nearest_tie(lm, model, sample) == 0.0


# --- folders -------------------------------------------------------------------------------------------------------------------

def test_an_export_scores_what_its_checkpoint_scores_by_the_engine(checkpoint, lm, tmp_path):
    export(checkpoint, tmp_path / "out", dtype="float32", tokenizer="bpe8k")
    exported = load(tmp_path / "out")
    mine, resident = (one.loglikelihood(asked(PAIRS), disable_tqdm=True) for one in (exported, lm))
    assert type(exported.model) is downstream.Exported and [same for _, same in mine] == [same for _, same in resident]
    assert np.allclose([ll for ll, _ in mine], [ll for ll, _ in resident], atol=2e-4)
    assert exported.model.engine.summary().demand_bytes > 0   # it was the engine that computed
    del exported
    gc.collect()
    assert not any(thread.name.startswith("reader") for thread in threading.enumerate())
    with pytest.raises(ConfigError, match="the engine computes on the CPU"):
        load(tmp_path / "out", device="cuda")


def test_a_run_of_the_store_knows_its_tokenizer_and_the_harness_knows_the_model_by_name(checkpoint, lm, tmp_path):
    run = tmp_path / "0123456789ab"
    shutil.copytree(checkpoint, run / "checkpoint")
    (run / "config.json").write_text(json.dumps({"data": {"tokenizer": "bpe8k"}}))
    named = get_model("predmoe").create_from_arg_string(f"pretrained={run},batch_tokens=64", {"batch_size": 1, "device": "cpu"})
    assert isinstance(named, PredmoeLM) and named.batch_tokens == 64 and named.tokenizer_name == "bpe8k"
    assert np.allclose([ll for ll, _ in named.loglikelihood(asked(PAIRS), disable_tqdm=True)], [ll for ll, _ in lm.loglikelihood(asked(PAIRS), disable_tqdm=True)], atol=2e-4)
    (run / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is damaged: it does not say which tokenizer"):
        load(run)
    with pytest.raises(ConfigError, match="the adaptor takes no pretraind"):
        PredmoeLM(run, pretraind="x")


@pytest.mark.parametrize("size", [8191, 8192 + 257, 50304])
def test_a_tokenizer_that_does_not_fit_the_model_is_refused_before_weights_are_read(size, tmp_path):
    save_checkpoint(MoEModel(ModelConfig(**(vars(SHAPE) | {"vocab_size": size}))), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=f"tokenizer bpe8k has 8192 entries and the model's vocabulary {size}"):
        load(tmp_path, tokenizer="bpe8k")


def test_a_folder_that_is_no_model_or_names_no_tokenizer_is_one_sentence(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="holds no config.json"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="does not say which tokenizer its model has"):
        load(checkpoint)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer.json is damaged"):
        words_of(None, tmp_path)


def test_a_tokenizer_file_serves_as_well(checkpoint, lm, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "model")
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "model" / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"neither <\|endoftext\|> nor </s>"):
        words_of(None, tmp_path / "model")
    transformers_tokenizer(TOKENIZER).backend_tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    fast = load(tmp_path / "model")
    assert np.allclose([ll for ll, _ in fast.loglikelihood(asked(PAIRS), disable_tqdm=True)], [ll for ll, _ in lm.loglikelihood(asked(PAIRS), disable_tqdm=True)], atol=2e-4)


def test_a_router_of_nan_is_a_sentence():
    model = MoEModel(SHAPE).initialise(0)
    router = next(parameter for name, parameter in model.named_parameters() if parameter.shape == (SHAPE.num_experts, SHAPE.hidden_size))
    router.data[1] = float("nan")
    with pytest.raises(ConfigError, match="the model cannot be scored: router scores of token 0 are NaN: no expert can be chosen; its weights are damaged"):
        Whole(model).states(plant([([1, 2], [3])], 24, share=True))
