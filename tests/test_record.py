"""A recorded trace is the model's own routing, its predictions are the scorers', and both survive the file."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tiny_evaluation import E, HORIZONS, K, L, T, V, make_model, make_set

from predmoe import traces
from predmoe.evaluation import Heads, Lookup, NextRouter, evaluate
from predmoe.config import PredictorConfig
from predmoe.predictor import Predictor
from predmoe.simulator import Cache, Compute, Disk, Prefetch, replay
from predmoe.traces import ABSENT, TraceError
from predmoe.traces.record import Origin, generate, record

# B sequences, P prompt tokens, N = B*T tokens

ORIGIN = Origin(model="tiny", source="test", domain="random")
P = 5


@pytest.fixture(scope="module")
def setting():
    model = make_model()
    heads = {k: Heads(Predictor(PredictorConfig(kind=k, horizons=HORIZONS), hidden_size=16, num_experts=E, num_layers=L).initialise(1)) for k in ("linear", "ranking")}
    counts = torch.randint(5, (L, V, E), generator=torch.Generator().manual_seed(0)).float()
    return model, make_set(), heads | {"next_router": NextRouter(model), "token_id": Lookup(counts, True)}


@pytest.fixture(scope="module")
def recorded(setting):
    model, evalset, scorers = setting
    return record(model, evalset.tokens[:, :-1], scorers, HORIZONS, prompt=P, origin=ORIGIN, batch_size=3)


def test_the_recorded_experts_and_gates_are_the_models(setting, recorded):
    model, evalset, _ = setting
    for window, tokens in enumerate(evalset.tokens[:, :-1]):   # one sequence at a time: the batch changes nothing
        with torch.no_grad():
            routing = model(torch.from_numpy(tokens)[None]).routing
        rows = slice(window * T, (window + 1) * T)
        for layer in range(L):
            assert (recorded.experts_NLK[rows, layer] == routing[layer].experts_NK.numpy()).all()
            np.testing.assert_allclose(recorded.weights_NLK[rows, layer], routing[layer].gates_NK.numpy(), rtol=1e-5)
        assert (recorded.token_ids[rows] == tokens).all()


def test_a_sequence_is_one_prefill_pass_and_decode_passes(setting, recorded):
    per = 1 + T - P
    assert recorded.num_passes == len(setting[1].tokens) * per and recorded.phase[: per + 1].tolist() == [0] + [1] * (T - P) + [0]
    assert np.diff(recorded.starts)[: per + 1].tolist() == [P] + [1] * (T - P) + [P]
    assert recorded.sequence[:: T].tolist() == list(range(len(setting[1].tokens)))
    assert recorded.meta.on_policy is False and recorded.meta.expert_bytes == (3 * 16 * 16 * 4,) * L
    model, evalset, scorers = setting
    whole = record(model, evalset.tokens[:2, :-1], {}, [], prompt=0, origin=ORIGIN)
    assert (whole.phase == traces.DECODE).all() and whole.num_passes == 2 * T


def hit_at_k(trace, name, h):
    """From the trace alone: mean over tokens and source layers of |first k guesses and true set| / k."""
    guessed = trace.prediction(name, h).experts_NLM[:, : L - h, :K]
    true = trace.experts_NLK[:, h:]
    return (guessed[..., :, None] == true[..., None, :]).any(-1).mean()


def test_hit_at_k_of_the_trace_is_the_evaluations(setting, recorded):
    model, evalset, scorers = setting
    expected = evaluate(model, evalset, ("a", "b"), HORIZONS, scorers)["hit"]
    for name in scorers:
        for h in HORIZONS:
            assert hit_at_k(recorded, name, h) == pytest.approx(expected[name][str(h)], abs=1e-12), (name, h)


def test_predictions_are_ranked_by_probability_and_end_at_the_last_layer(setting, recorded):
    for (name, h), prediction in recorded.predictions.items():
        assert prediction.experts_NLM.shape[2] == 2 * K + 2
        assert (prediction.experts_NLM[:, L - h :] == ABSENT).all() and (prediction.experts_NLM[:, : L - h] != ABSENT).all()
        assert (prediction.scores_NLM[:, : L - h].sum(-1) <= 1 + 1e-6).all() and (prediction.scores_NLM[:, : L - h] >= 0).all()
    model, evalset, scorers = setting
    every = record(model, evalset.tokens[:2, :-1], {"linear": scorers["linear"]}, [1], prompt=P, origin=ORIGIN, guesses=E)
    assert (np.sort(every.prediction("linear", 1).experts_NLM[:, : L - 1]) == np.arange(E)).all()
    np.testing.assert_allclose(every.prediction("linear", 1).scores_NLM[:, : L - 1].sum(-1), 1, rtol=1e-5)


def test_it_comes_back_from_its_file_with_half_scores(setting, recorded, tmp_path):
    model, evalset, scorers = setting
    half = record(model, evalset.tokens[:, :-1], scorers, HORIZONS, prompt=P, origin=ORIGIN, half=True, batch_size=3)
    traces.save(half, tmp_path / "t.trace.safetensors")
    back = traces.load(tmp_path / "t.trace.safetensors")
    assert back.meta == recorded.meta and back.predictors == recorded.predictors
    for name, array in half._arrays().items():
        assert back._arrays()[name].dtype == array.dtype and (back._arrays()[name] == array).all()
    for key, prediction in back.predictions.items():
        assert prediction.scores_NLM.dtype == np.float16 and (prediction.experts_NLM == recorded.predictions[key].experts_NLM).all()
        np.testing.assert_allclose(prediction.scores_NLM, recorded.predictions[key].scores_NLM, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_generation_teacher_forced_gives_the_same_trace(setting, temperature):
    model, evalset, scorers = setting
    own = generate(model, evalset.tokens[:3, :P], scorers, HORIZONS, new_tokens=T - P, temperature=temperature, seed=4, origin=ORIGIN)
    assert own.meta.on_policy is True and own.num_tokens == 3 * T
    forced = record(model, own.token_ids.reshape(3, T), scorers, HORIZONS, prompt=P, origin=ORIGIN)
    assert (own.experts_NLK == forced.experts_NLK).all() and (own.starts == forced.starts).all() and (own.phase == forced.phase).all()
    np.testing.assert_allclose(own.weights_NLK, forced.weights_NLK, rtol=1e-4)
    for key, prediction in own.predictions.items():
        assert (prediction.experts_NLM == forced.predictions[key].experts_NLM).all()


def test_greedy_tokens_are_the_likeliest_and_a_seed_gives_the_same_ones(setting):
    model, evalset, _ = setting
    ask = lambda **how: generate(model, evalset.tokens[:2, :P], {}, [], new_tokens=T - P, origin=ORIGIN, **how).token_ids.reshape(2, T)  # noqa: E731
    greedy = ask(temperature=0.0)
    with torch.no_grad():
        likeliest = model(torch.from_numpy(greedy).long()).logits_BTV.argmax(-1).numpy()
    assert (greedy[:, P:] == likeliest[:, P - 1 : -1]).all() and (greedy[:, :P] == evalset.tokens[:2, :P]).all()
    assert (ask(seed=1) == ask(seed=1)).all() and (ask(seed=1) != ask(seed=2)).any()


def test_the_simulator_takes_what_was_recorded(recorded):
    outcome = replay(recorded, Cache(slots=8), Disk(), compute=Compute(), prefetch=Prefetch(source="linear", horizon=(1, 2), budget=2))
    outcome.ledger.check()
    assert outcome.tokens == recorded.num_tokens and outcome.ledger.issued > 0


@pytest.mark.parametrize("change, message", [
    (dict(horizons=[L]), f"horizon {L} is beyond the last layer"),
    (dict(prompt=T + 1), f"prompt={T + 1} must lie in 0..{T}"),
    (dict(guesses=K - 1), f"guesses={K - 1} must lie in top-k={K}..{E}"),
    (dict(guesses=E + 1), f"guesses={E + 1}"),
    (dict(name="a/b"), "'a/b' must not contain"),
])
def test_a_recording_that_cannot_be_made_says_why(setting, change, message):
    model, evalset, scorers = setting
    asked = dict(horizons=[1], prompt=P, guesses=None, name="linear") | change
    with pytest.raises(TraceError, match=message):
        record(model, evalset.tokens[:1, :-1], {asked["name"]: scorers["linear"]}, asked["horizons"], prompt=asked["prompt"], origin=ORIGIN, guesses=asked["guesses"])


def test_heads_without_the_horizon_are_named(setting):
    model, evalset, _ = setting
    short = Heads(Predictor(PredictorConfig(horizons=(1,)), hidden_size=16, num_experts=E, num_layers=L).initialise(0))
    with pytest.raises(TraceError, match="linear has no heads for horizon 2; it has 1"):
        record(model, evalset.tokens[:1, :-1], {"linear": short}, [2], prompt=P, origin=ORIGIN)


@pytest.mark.parametrize("how, message", [(dict(new_tokens=T), "exceed the model's context"), (dict(new_tokens=0), "new_tokens=0"), *[(dict(new_tokens=1, temperature=t), f"temperature={t} must be 0,") for t in (-1.0, 1e-320, float("nan"))]])
def test_a_generation_that_cannot_be_made_says_why(setting, how, message):
    model, evalset, _ = setting
    with pytest.raises(TraceError, match=message):
        generate(model, evalset.tokens[:1, :P], {}, [], origin=ORIGIN, **how)


def test_traces_and_the_simulator_load_without_torch():
    code = "import sys; import predmoe.traces, predmoe.simulator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
