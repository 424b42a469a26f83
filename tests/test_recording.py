"""Traces of the run store: the right text of each domain, the measured predictors, and a file that is taken only for what it is."""

import json

import numpy as np
import pytest
import torch
from tiny_runs import POSTHOC, tiny, write_corpus

from predmoe import recording, runs, traces
from predmoe.checkpoint import load_checkpoint
from predmoe.config import ConfigError
from predmoe.data import EvalSet, prepare
from predmoe.evaluation import evaluate
from predmoe.recording import Recording, choose_windows, get_or_record, record_run

SHORT = Recording(tokens=16, prompt=4, per_domain=1, predictors=("linear", "ranking", "next_router", "cotrained", "token_id"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A measured joint run; its file of traces is made once."""
    folder = tmp_path_factory.mktemp("recording")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREDMOE_CACHE", str(folder / "cache"))
        config = tiny(write_corpus(folder / "text"))
        yield runs.get_or_fit(config, POSTHOC, store=folder / "store", report=lambda line: None)


def test_the_traces_hit_at_k_is_the_evaluations_on_the_same_windows(run):
    """Through the store: checkpoint and heads as they were saved, on whole windows of the held-out set."""
    config = run.config
    T, K, L = config.model.context, config.model.top_k, config.model.num_layers
    tokens = prepare(config.data)
    whole = Recording(tokens=T, prompt=4, per_domain=1, predictors=SHORT.predictors)
    trace = record_run(run, POSTHOC, whole)
    evalset = tokens.heldout(T)
    rows = [int(np.flatnonzero((evalset.tokens[:, :T] == window).all(1))[0]) for window in trace.token_ids.reshape(-1, T)]
    chosen = EvalSet(evalset.tokens[rows], evalset.document[rows], evalset.domain[rows])
    model = load_checkpoint(run.path / "checkpoint", config.model)
    scorers = recording.load_scorers(run, POSTHOC, model, tokens, SHORT.predictors)
    expected = evaluate(model, chosen, tokens.domains, config.predictor.horizons, scorers)["hit"]
    for (name, h), prediction in trace.predictions.items():
        guessed, true = prediction.experts_NLM[:, : L - h, :K], trace.experts_NLK[:, h:]
        assert (guessed[..., :, None] == true[..., None, :]).any(-1).mean() == pytest.approx(expected[name][str(h)], abs=1e-12), (name, h)


def test_a_recording_is_kept_and_taken_only_for_what_it_is(run, tmp_path, monkeypatch):
    path, told = tmp_path / "a" / "joint.trace.safetensors", []
    ask = lambda what: get_or_record(run.config, POSTHOC, what, path=path, store=run.path.parent, report=told.append)  # noqa: E731
    first = ask(SHORT)
    assert first.meta.notes == recording.identity(run, POSTHOC, SHORT) and first.meta.on_policy is False and first.meta.model == runs.describe(run.config)
    assert str(run.path.parent.parent) not in str(first.meta)
    monkeypatch.setattr(recording, "record_run", None)   # the second time nothing is recorded
    assert (ask(SHORT).experts_NLK == first.experts_NLK).all() and not told
    monkeypatch.undo()
    ended = json.loads((run.path / "finished.json").read_text())
    assert ended["weights"] in first.meta.notes
    monkeypatch.setattr(recording, "read_json", lambda path: ended | {"weights": "of another machine"})
    monkeypatch.setattr(recording, "record_run", lambda *_: first)
    assert ask(SHORT) is first and "holds another recording" in told.pop(), "a run that ended with other weights is recorded again"
    monkeypatch.undo()
    other = Recording(kind="generated", tokens=16, prompt=4, per_domain=1, predictors=("linear",))
    second = ask(other)
    assert second.meta.on_policy is True and second.predictors == {"linear": run.config.predictor.horizons} and "holds another recording" in told[0]
    assert (second.token_ids.reshape(-1, 16)[:, :4] == first.token_ids.reshape(-1, 16)[:, :4]).all()
    assert traces.load(path).meta == second.meta and not list(path.parent.glob(".*"))


def test_windows_are_mostly_of_their_domain_and_from_few_documents():
    document = np.array([[0, 0, 0, 0], [1, 1, 2, 2], [3, 3, 3, 3], [3, 3, 3, 4], [5, 5, 5, 5]], np.int32)
    domain = np.array([[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]], np.int16)
    evalset = EvalSet(np.arange(25).reshape(5, 5), document, domain)
    windows, words = choose_windows(evalset, ("code", "plays"), 2, 3)
    assert windows[:, 0].tolist() == [0, 20, 10, 15] and windows.shape == (4, 3)   # 1 is of two documents; the first 3 tokens of 3 are all plays
    assert words == "sequences 0-1 code, 2-3 plays" and choose_windows(evalset, ("code", "plays"), 1, 4)[1] == "sequences 0 code, 1 plays"
    with pytest.raises(ConfigError, match="no 3 windows that are mostly plays"):
        choose_windows(evalset, ("code", "plays"), 3, 4)


@pytest.mark.parametrize("settings, message", [
    (dict(kind="both"), "kind='both' is unknown"),
    (dict(prompt=96), "prompt=96 lie in 1..95"),
    (dict(per_domain=0), "per_domain=0"),
    (dict(predictors=("linear", "psychic")), "must be different ones of linear, ranking"),
])
def test_impossible_recordings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Recording(**settings)


def test_heads_that_a_run_has_not_are_named(tmp_path, monkeypatch):
    config = tiny("files:nowhere", objective={})
    monkeypatch.setattr(recording, "load_heads", lambda *_: {})
    monkeypatch.setattr(recording, "NextRouter", lambda model: None)
    with pytest.raises(ConfigError, match="baseline, seed .* has no heads trained with it"):
        recording.load_scorers(runs.Run(tmp_path, config), POSTHOC, torch.nn.Identity(), None, ["cotrained"])


def test_the_trace_of_an_arm_lies_with_its_profile(monkeypatch, tmp_path):
    monkeypatch.setenv("PREDMOE_OUTPUTS", str(tmp_path))
    assert recording.trace_path("cpu", "joint") == tmp_path / "cpu" / "traces" / "joint.trace.safetensors"
    assert recording.trace_path("cpu", "joint", Recording(kind="generated")).name == "joint-generated.trace.safetensors"
