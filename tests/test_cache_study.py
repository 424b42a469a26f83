"""What 05 measures besides the reference's table: our traces or their stand-ins, public traces, published machines, an engine's timings."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from conftest import PUBLIC, needs_public

from predmoe import cache_study, locality, reference_table, traces

ACCURACIES = {f"{model}-{predictor}": {1: 0.8} for model in cache_study.MODELS for predictor in ("linear", "ranking")}


def test_recorded_traces_are_used_where_they_are():
    held, sentence = cache_study.model_traces("cpu", tokens=5, accuracies=ACCURACIES)
    assert sentence.startswith("Recorded traces of the cpu profile") and set(held) == {"baseline", "joint"}
    assert {"linear", "ranking", "next_router"} <= set(held["joint"].predictors)


def test_traces_that_are_borrowed_are_announced_and_own_ones_are_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PREDMOE_OUTPUTS", str(tmp_path))
    held, _ = cache_study.model_traces("cpu", tokens=5, accuracies=ACCURACIES)
    assert capsys.readouterr().out == f"{tmp_path / 'cpu'} has no recorded traces of our models: those that the repository holds are taken.\n"
    assert set(cache_study.own_traces("cpu")) == set(held)
    assert capsys.readouterr().out == f"{tmp_path / 'cpu'} has no recorded traces of our models on their own text: those that the repository holds are taken.\n"
    for model, trace in held.items():
        path = tmp_path / "cpu" / "traces" / f"{model}.trace.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        traces.save(trace, path)
    cache_study.model_traces("cpu", tokens=5, accuracies=ACCURACIES)
    cache_study.model_traces("nowhere", tokens=5, accuracies=ACCURACIES)
    assert capsys.readouterr().out == ""


def test_a_stand_in_says_that_it_is_one():
    held, sentence = cache_study.model_traces("nowhere", tokens=5, accuracies=ACCURACIES)
    assert "SYNTHETIC" in sentence and "joint.trace.safetensors" in sentence
    assert held["joint"].predictors == {"linear": (1,), "ranking": (1,)} and held["joint"].num_tokens == 5


def test_another_size_changes_no_routing():
    trace = traces.synthetic(tokens=3, layers=2, num_experts=8, top_k=2)
    scaled = cache_study.of_size(trace, 19_000_000)
    assert np.array_equal(scaled.experts_NLK, trace.experts_NLK) and scaled.meta.expert_bytes == (19_000_000,) * 2


def test_models_are_replayed_with_every_predictor_they_have():
    held, _ = cache_study.model_traces("nowhere", tokens=30, accuracies=ACCURACIES)
    found = cache_study.replay_models({m: cache_study.of_size(t, 19_000_000) for m, t in held.items()}, shares=[0.25, 0.5], disk=reference_table.DISK, compute=reference_table.COMPUTE,
                                      horizon=1, guard="window", warmup=5, progress=False)  # fmt: skip
    assert set(found.source) == {"demand", "linear", "ranking", "oracle"} and len(found) == 2 * 2 * 4
    speed = found.set_index(["model", "share", "source"]).tok_s.unstack()
    assert (speed["oracle"] >= speed["demand"]).all() and "25%" in cache_study.say_models(found, 0.25)


def test_given_and_own_text_are_compared_prompt_by_prompt():
    """Two prompts are in both traces, one is in the given text alone. On own text the second prompt's continuation never changes its experts."""
    def trace(prompts, still):
        predictors = {name: traces.Accuracy(recall={1: 0.8}) for name in ("linear", "ranking")}
        made = traces.synthetic(tokens=20, prompt=4, sequences=len(prompts), layers=3, num_experts=8, top_k=2, predictors=predictors)
        if still:
            made.experts_NLK[24 + 4 :] = [0, 1]
        return dataclasses.replace(made, token_ids=np.concatenate([np.r_[prompt, np.arange(20)] for prompt in prompts]).astype(np.int32))

    given, own = trace([[9, 9, 9, 9], [5, 6, 7, 8], [1, 2, 3, 4]], False), trace([[1, 2, 3, 4], [5, 6, 7, 8]], True)
    machine = dict(share=0.5, disk=reference_table.DISK, compute=reference_table.COMPUTE, horizon=1, guard="none")
    found = cache_study.by_text({"joint": given}, {"joint": own}, **machine)
    assert found.groupby("prompt").text.apply(list).tolist() == [["given", "own"]] * 2 and (found.tokens == 20).all()
    still = found[(found.prompt == 1) & (found.text == "own")].iloc[0]
    assert still.reuse == still.srp == 1.0 and still.hit_rate > 0.9
    first = found[(found.prompt == 0) & (found.text == "given")].iloc[0]   # the third sequence of the given text
    assert first.hit_ranking == locality.hit_at_k(given.passes(42 + 1, 63), "ranking", 1)
    assert "2 prompts of one model seed" in cache_study.say_texts(found)
    with pytest.raises(traces.TraceError, match="begins with the same prompt"):
        cache_study.by_text({"joint": given}, {"joint": trace([[3, 3, 3, 3]], False)}, **machine)


def test_own_text_is_there_where_both_models_recorded_it():
    assert set(cache_study.own_traces("cpu")) == {"baseline", "joint"} and cache_study.own_traces("nowhere") == {}


def test_no_policy_hits_more_than_belady():
    held = {"a": traces.synthetic(tokens=80, prompt=5, layers=4, num_experts=16, top_k=2, reuse=0.4)}
    curves = cache_study.hit_curves(held, [0.02, 0.06, 0.3, 0.6], progress=False)
    assert not len(cache_study.above_belady(curves)) and set(curves.policy) == set(cache_study.POLICIES)
    assert curves.slots.min() >= 2 and 0.02 not in set(curves.share), "one slot holds no set of two"
    assert 0.06 not in set(curves[curves.policy == "LRU per layer"].share), "three slots are none for each of four layers"
    best = cache_study.best_policy(curves)
    assert (best.best_hit <= best.belady_hit + 1e-12).all() and "Belady" in cache_study.say_policies(best)


def test_published_points_stand_beside_a_range():
    machines, guarded = cache_study.colibri(6, 3, progress=False)
    assert (machines.hit_low <= machines.hit_high).all() and (machines.tok_s_low < machines.tok_s_high).all()
    assert len(machines) == 5 and "published hit rates lie inside" in cache_study.say_machines(machines)
    assert guarded.mb_change_published.iloc[2] == pytest.approx(7293.5 / 5662 - 1) and "against none" in cache_study.say_prefetch(guarded)


@pytest.mark.parametrize("value, verdict", [(0.5, "inside"), (2.0, "2.00 times the highest"), (0.2, "0.50 times the lowest")])
def test_a_point_outside_the_range_is_told_by_how_much(value, verdict):
    assert verdict in cache_study._fits(value, 0.4, 1.0)


@needs_public
def test_the_public_traces_have_the_models_shapes():
    held = cache_study.public_traces(PUBLIC, sequences=3)
    assert {name: (t.num_layers, t.meta.num_experts, t.meta.top_k) for name, t in held.items()} == {
        "Qwen3-30B-A3B": (48, 128, 6), "OLMoE-1B-7B": (16, 64, 8), "Granite-3.0-1b-a400m": (24, 32, 8), "gpt-oss-20b": (24, 32, 4)}  # fmt: skip
    assert len(np.unique(held["gpt-oss-20b"].sequence)) == 3


@needs_public
def test_the_engine_fit_is_told_with_and_without_slow_tokens():
    found, tokens = cache_study.fit_engine(PUBLIC)
    assert isinstance(tokens, pd.DataFrame) and len(tokens) == 128 and found.median_error < 0.1
    assert f"{found.median_error:.1%}" in cache_study.say_fit(found, tokens)
