"""Fine-tunes: what is trained and what is not, merged weights, isolation, the same bits after a kill, and what is refused in a sentence."""

import dataclasses
import json
import math
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import JOINT, POSTHOC, lines, results, tiny

from predmoe import finetune, runs, worker
from predmoe.checkpoint import load_checkpoint, save_checkpoint
from predmoe.config import ConfigError, FinetuneConfig, RunConfig, build, to_dict
from predmoe.finetune import FinetuneTrainer, Tuned, adapt, as_ours, drift, load_stock, merged
from predmoe.hf import find_gates
from predmoe.model import MoEModel
from predmoe.objectives import terms
from predmoe.train import Trainer, TrainingError, new_predictor

STEPS = 6
QUICK = dict(steps=STEPS, warmup_steps=1, lr=5e-3, eval_every=4)
JOINED = JOINT | {"ramp_start": 0.0, "ramp_end": 0.0, "lambda_pred": 1.0}
SOME = torch.arange(48).view(3, 16) % 31


@pytest.fixture(scope="module")
def stock(corpus):
    return tiny(corpus, objective={}, steps=40, lr=1e-2)


@pytest.fixture(scope="module")
def store(stock, tmp_path_factory):
    """A store that holds the trained stock model."""
    store = tmp_path_factory.mktemp("store")
    worker.train(runs.open_run(stock, store).path, stock, progress=lambda line: None)
    return store


def tuned(stock, *, trained="lora", objective=None, seed=0, rank=4, changes=None, **training) -> RunConfig:
    """A fine-tune of the stock run that takes a second."""
    plain = to_dict(stock)
    return build(RunConfig, {
        "model": plain["model"], "data": plain["data"], "predictor": {"horizons": [1, 2]}, "objective": JOINED if objective is None else objective,
        "train": plain["train"] | QUICK | {"seed": seed} | training, "finetune": FinetuneConfig(stock=stock, trained=trained, rank=rank, alpha=2 * rank),
    } | (changes or {}))  # fmt: skip


def trainer(config, store) -> FinetuneTrainer:
    return FinetuneTrainer(config, runs.open_run(config, store).path)


def trained_in(config, store):
    """The finished run's folder."""
    path = runs.open_run(config, store).path
    worker.train(path, config, progress=lambda line: None)
    return path


# ------------------------------------------------------------------------------------------------------ what is trained

def test_adapters_train_attention_and_every_expert_of_every_layer_and_routers_whole(stock, store):
    at = trainer(tuned(stock), store)
    named = dict(at.model.named_parameters())
    L, E = stock.model.num_layers, stock.model.num_experts
    for i in range(L):
        mine = {name for name in named if f".layers.{i}." in name}
        assert sum("self_attn" in name and "lora" in name for name in mine) == 2 * 4 and sum(name.endswith("mlp.gate.weight") for name in mine) == 1
        assert sorted(named[name].shape[0] for name in mine if "experts" in name and "lora_A" in name) == [4 * E] * 2, "rank times experts, of both tensors"
    assert all("lora_" in name or name.endswith("mlp.gate.weight") for name in named)
    before = {name: p.detach().clone() for name, p in at.model.model.named_parameters()}
    own = as_ours(merged(trainer(tuned(stock), store).model.model), stock.model)
    for at.step in range(2):   # the first moves B alone, which is zero at first, and A's gradient with it
        at.training_step()
    changed = {name for name, p in at.model.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name, p in at.model.model.named_parameters() if p.requires_grad} == set(named)
    after = as_ours(merged(at.model.model), stock.model)
    for i in range(L):
        for name in ("gate_up", "down"):
            a, b = (getattr(model.layers[i].experts, name) for model in (own, after))
            assert all(not torch.equal(a[e], b[e]) for e in range(E)), "the adapters reach the weight of each expert that was chosen"


@pytest.mark.parametrize("trained, blocks", [("full", (0, 1, 2)), ("half", (1, 2)), ("none", ())])
def test_whole_weights_are_trained_in_the_blocks_that_are_named(stock, store, trained, blocks):
    at = trainer(tuned(stock, trained=trained), store)
    names = [name for name, _ in at.model.named_parameters()]
    assert {int(name.split(".")[2]) for name in names if ".layers." in name} == set(blocks)
    everything = [name for name, _ in at.model.model.named_parameters()]
    assert names == (everything if trained == "full" else [name for name in everything if any(f".layers.{i}." in name for i in blocks)])


def test_no_trained_expert_parameter_is_an_error(stock, store, monkeypatch):
    model = load_stock(tuned(stock), store)
    monkeypatch.setattr(finetune, "EXPERTS", ())   # as where transformers names them otherwise
    with pytest.raises(ConfigError, match="no parameter of the experts of layer 0 is trained"):
        adapt(model, FinetuneConfig(stock=stock, rank=2), 0)


def test_the_same_seed_gives_the_same_adapters_and_leaves_the_generator_alone(stock, store):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (adapt(load_stock(tuned(stock), store), FinetuneConfig(stock=stock, rank=2), seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


# ------------------------------------------------------------------------------------------------------ merged, isolated

@pytest.mark.parametrize("trained", ["lora", "half", "full"])
def test_merged_weights_give_the_same_logits_and_routing(stock, store, trained):
    at = trainer(tuned(stock, trained=trained), store)
    for at.step in range(3):
        at.training_step()
    with torch.no_grad():
        stock_logits = load_checkpoint(store / stock.hash / "checkpoint")(SOME).logits_BTV
        output = at.model(SOME)
        own = as_ours(merged(at.model.model), stock.model)(SOME)
    torch.testing.assert_close(own.logits_BTV, output.logits_BTV, atol=2e-4, rtol=1e-4)
    assert (own.logits_BTV - stock_logits).abs().max() > 0.05, "it was trained at all"
    for mine, theirs in zip(own.routing, output.routing):
        assert torch.equal(mine.experts_NK, theirs.experts_NK)


def gradients(stock, store, gradient, trained):
    """Of the backbone and of the heads, from a step's terms with heads beside it."""
    config = tuned(stock, trained=trained, objective=JOINED | {"gradient": gradient} if gradient else {})
    at = trainer(config, store)
    parts, _ = at.losses(at.windows(0))
    sum(parts.values()).backward()
    return {name: p.grad for name, p in at.model.named_parameters()}, at.predictor


@pytest.mark.parametrize("trained", ["lora", "full"])
def test_isolated_heads_leave_the_backbones_gradients_alone(stock, store, trained):
    alone, _ = gradients(stock, store, None, trained)
    isolated, heads = gradients(stock, store, "none", trained)
    joint, _ = gradients(stock, store, "input", trained)
    assert alone.keys() == isolated.keys()
    assert all(torch.equal(alone[name], isolated[name]) for name in alone if alone[name] is not None)
    assert any(not torch.equal(alone[name], joint[name]) for name in alone if alone[name] is not None)
    assert all(p.grad.abs().sum() > 0 for p in heads.parameters())


def test_an_isolated_run_ends_with_the_baselines_backbone_and_heads_of_its_own(stock, store):
    baseline, isolated = (trained_in(tuned(stock, objective=o), store) for o in ({}, JOINED | {"gradient": "none"}))
    weights = "checkpoint/model.safetensors"
    assert (baseline / weights).read_bytes() == (isolated / weights).read_bytes()
    assert "cotrained" in lines(isolated)[-2]["heldout"]["hit"] and not (baseline / "checkpoint" / "predictor.safetensors").exists()


def test_a_joint_fine_tune_moves_routing_and_says_how_far(stock, store):
    folder = trained_in(tuned(stock), store)
    (told,) = [line for line in lines(folder) if "drift" in line]
    own, before = (load_checkpoint(path / "checkpoint", stock.model) for path in (folder, store / stock.hash))
    windows = Trainer(stock, store / stock.hash).tokens.dev(stock.model.context).tokens
    assert told["drift"] == drift(own, before, windows) and told["merged_apart"] < 1e-4
    E, D, F, L = (getattr(stock.model, name) for name in ("num_experts", "hidden_size", "expert_size", "num_layers"))
    adapters = 4 * L * E * ((D + 2 * F) + (D + F))   # of rank 4
    assert told["trained"] == {"experts": adapters, "parameters": adapters + 4 * L * 4 * 2 * D + L * E * D}
    assert 0 < told["drift"]["kept"] < 1 and len(told["drift"]["kept_per_layer"]) == stock.model.num_layers
    assert all(value > 0 for value in told["drift"]["weights"].values())
    still = drift(before, before, windows)
    assert still["kept"] == 1 and set(still["weights"].values()) == {0.0}


def test_merged_weights_that_are_another_model_are_not_saved(stock, store, monkeypatch):
    at = trainer(tuned(stock, seed=8), store)
    monkeypatch.setattr(finetune, "as_ours", lambda model, config: MoEModel(config).initialise(1))
    with pytest.raises(TrainingError, match="the merged weights give another model"):
        at.train()
    assert not (at.folder / "finished.json").exists()


# ------------------------------------------------------------------------------------------------------ a run of the store

@pytest.mark.parametrize("trained", ["lora", "half"])
def test_a_fine_tune_that_was_broken_off_ends_with_the_same_bits(stock, store, tmp_path, trained):
    config = tuned(stock, trained=trained, seed=2)
    whole = results(trained_in(config, store))
    other = shutil.copytree(store / stock.hash, tmp_path / stock.hash).parent
    folder = runs.open_run(config, other).path
    for step in (1, 2):   # ends with a checkpoint after a step
        FinetuneTrainer(config, folder, pause_after=0.0).train()
        assert torch.load(folder / "state.pt", weights_only=True)["step"] == step
    with open(folder / "metrics.jsonl", "a") as log:   # and was killed with a line further in its log
        log.write('{"step": 3, "terms": {"lm": 0.0}}\n')
    worker.train(folder, config, progress=lambda line: None)
    assert results(folder) == whole and not (folder / "state.pt").exists()


def test_the_stock_model_is_trained_first_where_it_is_missing_and_the_run_measured(corpus, tmp_path):
    stock = tiny(corpus, objective={}, steps=8, seed=3)
    config = tuned(stock, objective=JOINED)
    (found,) = runs.get_or_measure([config], POSTHOC, profile="none", store=tmp_path, report=lambda line: None)
    assert runs.open_run(stock, tmp_path).has_checkpoint and "stock model: step" in (tmp_path / config.hash / "log.txt").read_text()
    assert found["config_hash"] == config.hash and found["hit"].keys() >= {"cotrained", "linear", "ranking"} and found["drift"]["kept"] < 1
    own = load_checkpoint(tmp_path / config.hash / "checkpoint", config.model)
    assert found["provenance"]["stock_weights"] == finetune.digest(load_stock(config, tmp_path)) != finetune.digest(own)


def test_the_address_holds_the_stock_model_and_what_is_trained_of_it(stock, corpus):
    config = tuned(stock)
    others = [tuned(stock, rank=8), tuned(stock, trained="full"), tuned(tiny(corpus, objective={}, steps=41, lr=1e-2)),
              dataclasses.replace(config, finetune=None), dataclasses.replace(config, finetune=FinetuneConfig(checkpoint="a/b", rank=4, alpha=8))]  # fmt: skip
    assert len({config.hash, *(other.hash for other in others)}) == 6
    assert tuned(stock, trained="full", rank=8).hash == tuned(stock, trained="full").hash, "there is no adapter to have a rank"
    assert build(RunConfig, json.loads(json.dumps(to_dict(config)))) == config
    assert "LoRA of rank 4" in runs.describe(config) and stock.hash in runs.describe(config)


def test_a_run_goes_on_with_no_other_stock_model(stock, store):
    config = tuned(stock, seed=5)
    at = trainer(config, store)
    at.restore()
    at.save()
    (at.folder / "provenance.json").write_text(json.dumps({"stock_weights": "0123456789ab"}))
    with pytest.raises(TrainingError, match="the stock model has changed since this run began .it was 0123456789ab"):
        worker.train(at.folder, config, progress=lambda line: None)


def test_a_checkpoint_in_a_folder_serves_as_it_is_or_trained(stock, store, tmp_path):
    """As a model from the hub would: nothing of the run store is known of it."""
    save_checkpoint(load_checkpoint(store / stock.hash / "checkpoint"), tmp_path / "model")
    as_it_is = dataclasses.replace(tuned(stock, objective={}, steps=1), finetune=FinetuneConfig(checkpoint=str(tmp_path / "model"), trained="none"))
    folder = trained_in(as_it_is, tmp_path / "store")
    weights = [(path / "checkpoint" / "model.safetensors").read_bytes() for path in (folder, store / stock.hash)]
    assert weights[0] == weights[1] and [line["drift"]["kept"] for line in lines(folder) if "drift" in line] == [1.0]
    heads = dataclasses.replace(as_it_is, objective=build(type(stock.objective), JOINED))
    before, after = new_predictor(heads.predictor, heads.model).initialise(heads.train.seed).state_dict(), trained_in(heads, tmp_path / "store") / "checkpoint"
    assert (after / "model.safetensors").read_bytes() == weights[0]
    assert all(not torch.equal(before[name], trained) for name, trained in load_file(after / "predictor.safetensors").items())
    adapted = dataclasses.replace(tuned(stock), finetune=FinetuneConfig(checkpoint=str(tmp_path / "model"), rank=4, alpha=8))
    assert (trained_in(adapted, tmp_path / "store") / "checkpoint" / "model.safetensors").read_bytes() == \
        (trained_in(tuned(stock), store) / "checkpoint" / "model.safetensors").read_bytes()


def test_routers_stay_float32_under_autocast(stock, store):
    config = tuned(stock, dtype="bfloat16")
    at = trainer(config, store)
    with torch.autocast("cpu", torch.bfloat16):
        routing = at.model(SOME).routing
    logits_NE = routing[0].logits_NE
    assert logits_NE.dtype == torch.float32 and not torch.equal(logits_NE, logits_NE.bfloat16().float())
    plain = Tuned(load_stock(config, store))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(plain(SOME).routing[0].logits_NE, plain(SOME).routing[0].logits_NE.bfloat16().float()), "without it they would be bf16's"


# ------------------------------------------------------------------------------------------------------ bad input

def test_shapes_and_texts_that_do_not_fit_are_refused_before_anything_runs(stock):
    plain = to_dict(stock)
    for changes, words in (
        ({"model": plain["model"] | {"context": 17}}, "context=17 is longer than that of the stock model, 16"),
        ({"model": plain["model"] | {"num_experts": 8}}, "num_experts=8 is not the stock model's, 4"),
        ({"data": plain["data"] | {"tokenizer": "gpt2"}}, "tokenizer='gpt2' is not the stock model's, 'bpe8k'"),
        ({"finetune": {"trained": "lora"}}, "starts from one model"),
        ({"finetune": {"checkpoint": "a/b", "stock": plain}}, "starts from one model"),
        ({"finetune": {"checkpoint": "a/b", "trained": "router"}}, "trained='router' is unknown; choose one of lora"),
        ({"finetune": {"checkpoint": "a/b", "rank": 0}}, "rank=0 must be at least 1"),
        ({"finetune": {"checkpoint": "a/b", "rnak": 2}}, "unknown parameter rnak for FinetuneConfig"),
        ({"finetune": {"stock": plain | {"model": plain["model"] | {"routing": "hash"}}}}, "routing='hash' is not OLMoE's"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            tuned(stock, changes=changes)
    assert tuned(stock, changes={"model": plain["model"] | {"context": 8}}).model.context == 8


def checkpoint_run(stock, name, **changes) -> RunConfig:
    return dataclasses.replace(tuned(stock, objective={}), finetune=FinetuneConfig(checkpoint=str(name), rank=2), **changes)


def ended(config, store, capsys) -> str:
    """The one sentence that the child process ends with."""
    path = runs.open_run(config, store).path
    assert worker.main([str(path)]) == 2
    told = capsys.readouterr().err.strip()
    assert "\n" not in told and told.startswith("predmoe: ")
    return told


def test_models_that_cannot_be_fine_tuned_are_refused_in_a_sentence(stock, store, tmp_path, capsys, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16))
    dense.save_pretrained(tmp_path / "dense")
    shape = dataclasses.replace(stock.model, context=32)
    for name, changes, words in (
        (tmp_path / "dense", {}, "no recognisable gate"),
        ("nobody/has-this-model", {}, "nobody/has-this-model: no such folder, and the hub gave no model"),
        (tmp_path / "nowhere", {}, "no such folder"),
        (store / stock.hash, {"model": shape}, "context=32 is longer than that of"),
        (store / stock.hash, {"model": dataclasses.replace(stock.model, top_k=1)}, r"top_k=2 .the run has 1"),
    ):  # fmt: skip
        assert re.search(words, ended(checkpoint_run(stock, name, **changes), tmp_path / "store", capsys))


def test_a_tokenizer_that_is_another_models_is_told_by_its_loss(stock, store, tmp_path, capsys):
    """The ids fit, and mean nothing to the model: its embeddings are in another order."""
    model = load_checkpoint(store / stock.hash / "checkpoint")
    with torch.no_grad():
        model.head.weight.copy_(10 * model.head.weight.roll(1, dims=0))
    save_checkpoint(model, tmp_path / "model")
    assert "no better than chance: the tokenizer 'bpe8k' is another model's" in ended(checkpoint_run(stock, tmp_path / "model"), tmp_path / "store", capsys)
    larger = dataclasses.replace(stock.data, tokenizer=str(tmp_path / "model"))
    assert "has no tokenizer" in ended(checkpoint_run(stock, store / stock.hash, data=larger), tmp_path / "store", capsys)


def test_several_processes_are_refused(stock, store):
    class Team:
        size = 2

    config = tuned(stock, seed=9)
    with pytest.raises(ConfigError, match="a fine-tune is trained by one process, not by 2"):
        worker.train(runs.open_run(config, store).path, config, team=Team())


def test_the_objective_is_the_one_of_our_own_models(stock, store):
    """Every term on the transformers model before a step is that of our model of the same weights, text and heads."""
    config = tuned(stock, trained="full", objective=JOINED | {"lambda_sticky": 0.1, "lambda_ent": 0.1})
    at = trainer(config, store)
    windows = at.windows(0)
    parts, _ = at.losses(windows)
    own = load_checkpoint(store / stock.hash / "checkpoint")(windows[:, :-1], windows[:, 1:])
    expected = terms(own.loss, own.routing, at.predictor, config.objective, batch=len(windows), progress=0.0)
    assert parts.keys() == expected.keys() and all(math.isclose(parts[n].item(), expected[n].item(), rel_tol=1e-4) for n in parts)
    assert len(find_gates(at.model.model)) == stock.model.num_layers
