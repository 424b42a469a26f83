"""The second measurement: locality by hand, inputs before attention, the next token, and its place in the store."""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_backbone import E, K, L, SHAPE, T, heads_of, windows_of
from tiny_runs import POSTHOC, clone, stored, tiny

from predmoe import measure_locality, runs
from predmoe.config import ConfigError, LocalityConfig, PosthocConfig, PredictorConfig, stable_hash
from predmoe.measure_locality import NextToken, capture_inputs, heldout_trace, measure_trace, own_router, same_layer_hit, share_name
from predmoe.model import MoEModel
from predmoe.posthoc import capture, fit
from predmoe.predictor import Predictor
from predmoe.traces import Meta, build

FEW = PosthocConfig(tokens=800, batch_tokens=128, eval_every=10, max_steps=30)
HOW = LocalityConfig(segment=4, shares=(0.25, 0.5), fit=FEW)


# --- of a trace -------------------------------------------------------------------------------------------------------

def trace_of(ids, experts):
    ids = np.array(ids).reshape(len(ids), 1, -1)
    return build(Meta(model="m", num_experts=experts, top_k=ids.shape[2], layers=[0], expert_bytes=[1]), ids)


def test_a_cyclic_trace_by_hand():
    """a b c a b c with one expert a token of four: nothing is used twice running. One slot never hits; two slots under LRU never hit
    either, while the optimum keeps one of three: at each of the last three tokens but one."""
    found = measure_trace(trace_of([0, 1, 2, 0, 1, 2], 4), LocalityConfig(segment=3, shares=(0.25, 0.5, 1.0)))
    assert (found["reuse"], found["switch_rate"], found["slots"]) == (0.0, 1.0, {"1/4": 1, "1/2": 2, "1": 4})
    assert found["lru"] == {"1/4": 0.0, "1/2": 0.0, "1": 0.5}
    assert found["belady"] == {"1/4": 0.0, "1/2": pytest.approx(2 / 6), "1": 0.5}
    assert found["srp"] == pytest.approx(0.5)   # three experts held for three tokens, one right in each: F1 = 2 * 3 / (9 + 3)


def test_a_cache_holds_at_least_one_tokens_experts_and_the_optimum_is_never_worse():
    rng = np.random.default_rng(0)
    trace = trace_of([rng.choice(8, 2, replace=False, p=np.arange(8, 0, -1) / 36) for _ in range(60)], 8)
    found = measure_trace(trace, LocalityConfig(segment=4))
    assert found["slots"] == {"1/8": 2, "1/4": 2, "1/2": 4} and list(found["lru"]) == ["1/8", "1/4", "1/2"]
    assert all(found["lru"][size] <= found["belady"][size] for size in found["lru"]) and found["lru"]["1/2"] > found["lru"]["1/4"]
    assert found["lru"]["1/8"] == pytest.approx(found["reuse"] * 59 / 60)   # such a cache holds the token before, and the first token finds it empty


def test_sizes_are_named_as_fractions():
    assert [share_name(share) for share in (0.125, 1 / 3, 1.0)] == ["1/8", "1/3", "1"]


@pytest.mark.parametrize("settings, words", [({"shares": ()}, "shares=()"), ({"shares": (0.5, 0.5)}, "distinct"), ({"shares": (1.5,)}, "at most 1"), ({"segment": 0}, "segment=0")])
def test_an_impossible_second_measurement_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(").replace(")", r"\)")):
        LocalityConfig(**settings)


def test_the_addresses_of_the_second_measurement_do_not_move():
    """Committed files lie under these names; see test_config.GOLDEN for what may move them."""
    assert (stable_hash(LocalityConfig()), runs.measurement_name(LocalityConfig())) == ("4491b9916ce6", "locality-4491b9916ce6")
    assert runs.measurement_name(PosthocConfig()) == "posthoc-d020602aa887"


# --- predictors of the same layer -----------------------------------------------------------------------------------------

def test_inputs_before_attention_are_the_residual_under_the_moe_norm():
    model, windows = MoEModel(SHAPE).initialise(0), windows_of(3)
    for layer in model.layers:
        layer.moe_norm.weight.data.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(1))
    got = capture_inputs(model, windows, autocast=None)
    embedded = model.embed(torch.from_numpy(windows[:, :-1])).reshape(-1, SHAPE.hidden_size)
    first = F.rms_norm(embedded, (SHAPE.hidden_size,), model.layers[0].moe_norm.weight, SHAPE.rms_norm_eps)
    assert torch.allclose(got.hidden_NLD[:, 0].float(), first, rtol=2.0**-9, atol=1e-4)
    assert torch.equal(got.experts_NLK, capture(model, windows).experts_NLK)   # the hooks change nothing
    assert not any(layer.attention_norm._forward_pre_hooks for layer in model.layers)


def test_without_attention_the_own_router_knows_the_layer_exactly_before_it():
    """Attention that adds nothing: the input before it is the MoE input, so the router applied early is the router."""
    model, windows = MoEModel(SHAPE).initialise(0), windows_of(4)
    with_attention = same_layer_hit(own_router(model), capture_inputs(model, windows))
    for layer in model.layers:
        layer.attention.out.weight.data.zero_()
    assert same_layer_hit(own_router(model), capture_inputs(model, windows)) > 0.995 > with_attention   # float16 of the inputs may turn a near tie


def test_a_row_is_paired_with_the_token_after_it_in_its_window():
    captured = capture(MoEModel(SHAPE).initialise(0), windows_of(3))
    pairs = NextToken(captured, T)
    assert len(pairs.tokens_N) == 3 * (T - 1) and pairs.tokens_N.tolist() == windows_of(3)[:, : T - 1].flatten().tolist()
    rows = torch.arange(len(pairs.tokens_N))
    hidden, experts = pairs.batch(rows)
    sources = [w * T + t for w in range(3) for t in range(T - 1)]
    assert torch.equal(hidden, captured.hidden_NLD[sources].transpose(0, 1).float())
    assert torch.equal(experts, captured.experts_NLK[[s + 1 for s in sources]].transpose(0, 1).long())


def test_experts_that_follow_from_the_token_before_are_found():
    """Layer l's experts of token t + 1 are a map of its state at token t: the heads of the same layer find it."""
    captured = capture(MoEModel(SHAPE).initialise(0), windows_of(150))
    maps = torch.randn(L, E, SHAPE.hidden_size, generator=torch.Generator().manual_seed(3))
    best = torch.einsum("led,nld->nle", maps, captured.hidden_NLD.float()).topk(K).indices.to(torch.uint8)
    captured.experts_NLK[1:] = best[:-1]
    config = PosthocConfig(batch_tokens=256, lr=1e-2, eval_every=50, max_steps=400, patience=2)
    predictor, _, _ = fit("ranking", NextToken(captured, T), NextToken(captured, T), SHAPE, (0,), config)
    assert same_layer_hit(lambda hidden: predictor(hidden, 0), NextToken(captured, T)) > 0.9   # chance is 0.25


# --- the whole of it -------------------------------------------------------------------------------------------------------

def test_a_measurement_says_what_was_asked_for(finished):
    run, tokens = finished
    heads = Predictor(PredictorConfig(horizons=(1, 2), next_token=True), hidden_size=8, num_experts=E, num_layers=3).initialise(5)
    model = MoEModel(run.model).initialise(0)
    found = measure_locality.measure(model, heads, run, tokens, HOW)
    assert found["next_token"].keys() == {"ranking", "previous", "cotrained"} and found["pre_attention"].keys() == {"ranking", "router"}
    assert found["next_token"]["previous"] == found["reuse"] and found["tokens"] == 480 // T * T
    assert found["converged"].keys() == found["curves"].keys() == {"next_token", "pre_attention"} and found["config_hash"] == run.hash
    trace = heldout_trace(model, run, tokens)
    assert found["reuse"] == measure_trace(trace, HOW)["reuse"] and len(np.unique(trace.sequence)) == 480 // T
    json.dumps(found, allow_nan=False)
    without = measure_locality.measure(MoEModel(run.model).initialise(0), heads_of(run, 5), run, tokens, HOW)
    assert without["next_token"] == {name: hit for name, hit in found["next_token"].items() if name != "cotrained"}
    same = ("reuse", "srp", "sch", "lru", "belady", "pre_attention")
    assert all(without[name] == found[name] for name in same)


def test_the_reuse_of_the_trace_is_that_of_the_evaluation(finished):
    from predmoe.evaluation import evaluate

    run, tokens = finished
    model = MoEModel(run.model).initialise(0)
    assert measure_trace(heldout_trace(model, run, tokens), HOW)["reuse"] == pytest.approx(evaluate(model, tokens.heldout(T), tokens.domains, (1,), {})["reuse"], abs=1e-6)


# --- in the store ------------------------------------------------------------------------------------------------------------

def test_a_child_is_asked_for_what_is_missing_alone(corpus, tmp_path, stand_in):
    files = {"--posthoc": stored(config_hash="a"), "--locality": stored(LocalityConfig, tokens=7)}
    choices = "; ".join(f"[ $1 = {option} ] && echo '{text}' > $run/$2.json" for option, text in files.items())
    stand_in(f"shift 3; echo $* >> $events; while [ $# -gt 0 ]; do {choices}; shift 2; done")
    configs, store = [tiny(corpus), tiny(corpus, seed=1)], tmp_path / "store"
    runs.get_or_measure(configs[:1], POSTHOC, profile="none", store=store, report=lambda line: None)
    found = runs.get_or_measure(configs, POSTHOC, profile="none", locality=HOW, store=store, parallel=1, report=lambda line: None)
    both = f"--posthoc {runs.posthoc_name(POSTHOC)} --locality {runs.measurement_name(HOW)}"
    asked = (tmp_path / "events").read_text().splitlines()
    assert asked == [f"--posthoc {runs.posthoc_name(POSTHOC)}", f"--locality {runs.measurement_name(HOW)}", both]
    assert found == [json.loads(files["--posthoc"]) | {"locality": json.loads(files["--locality"])}] * 2
    assert json.loads((store / configs[0].hash / f"{runs.measurement_name(HOW)}.config.json").read_text())["fit"]["tokens"] == 800


def test_a_run_is_measured_after_training_and_a_clone_without_weights_trains_it_again_and_says_so(corpus, tmp_path):
    config, told = tiny(corpus, steps=6, objective={}), []
    ask = lambda store: runs.get_or_measure([config], POSTHOC, profile="none", locality=HOW, store=store, parallel=1, report=told.append)  # noqa: E731
    (first,) = ask(tmp_path / "a")
    name = f"{runs.measurement_name(HOW)}.json"
    assert first["locality"]["config_hash"] == config.hash and first["locality"]["measured_by"]["packages"] and not any("trained again" in line for line in told)
    here = clone(tmp_path / "a", tmp_path / "b")
    assert ask(here) == [first] and not list(here.rglob("*.safetensors"))   # all that was asked for is in the clone
    (here / config.hash / name).unlink()
    kept = (here / config.hash / f"{runs.posthoc_name(POSTHOC)}.json").read_bytes()
    (again,) = ask(here)
    assert sum("1 finished runs have no checkpoint here" in line and "baseline, seed 0" in line for line in told) == 1
    assert (here / config.hash / f"{runs.posthoc_name(POSTHOC)}.json").read_bytes() == kept
    timed = ("seconds", "measured_by", "provenance")
    assert {k: v for k, v in again["locality"].items() if k not in timed} == {k: v for k, v in first["locality"].items() if k not in timed}
    shutil.rmtree(here)
