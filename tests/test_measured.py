"""A measurement's file is whole, or one sentence names it and the entry that is not."""

import json
import re

import pytest
from tiny_runs import stored

from predmoe import experiments, runs
from predmoe.config import DownstreamConfig, FinetuneConfig, LocalityConfig, PosthocConfig, tier, to_dict
from predmoe.measured import FINETUNED, fault, read_measurement
from predmoe.strict import ConfigError

TUNED = {"drift": {"kept": 0.9, "kept_per_layer": [0.9], "weights": {"router": 0.1, "experts": 0.2, "attention": 0.3}}, "trained": {"parameters": 100, "experts": 60}}
OF_A_FINE_TUNE = {"config": {"finetune": {"trained": "lora"}}}


def refused(file, words, kind=PosthocConfig):
    with pytest.raises(ConfigError) as told:
        read_measurement(file, kind)
    assert str(told.value) == f"{file} is damaged ({words}); restore it from a copy, or remove it to measure the run again"


def test_a_measurement_without_a_predictor_or_its_text_is_damaged(tmp_path):
    whole, file = {"hit": {"linear": {}, "ranking": {}}, "converged": {"linear": True, "ranking": True}, "documents": {"tokens": []}}, tmp_path / "posthoc-1.json"
    file.write_text(stored(**whole))
    assert read_measurement(file, PosthocConfig)["converged"] == whole["converged"]
    for entry, lost in (("hit", "linear"), ("hit", "ranking"), ("converged", "ranking"), ("documents", "tokens")):
        file.write_text(stored(**whole | {entry: {name: value for name, value in whole[entry].items() if name != lost}}))
        refused(file, f"{entry} lacks {lost}")


@pytest.mark.parametrize("more, words", [
    ({"drift": {}}, "drift lacks kept, weights"), ({"drift": None}, "drift is null"), ({"drift": TUNED["drift"] | {"kept": "most"}}, 'drift.kept is "most"'),
    ({"drift": TUNED["drift"] | {"weights": {"router": 0.1}}}, "drift.weights lacks experts, attention"), ({"drift": TUNED["drift"] | {"weights": [0.1]}}, "drift.weights is [0.1]"),
    ({"trained": None}, "trained is null"), ({"trained": {}}, "trained lacks parameters, experts"), ({"trained": {"parameters": 9, "experts": True}}, "trained.experts is true"),
    ({"trained": {"parameters": 9, "experts": 1.5}}, "trained.experts is 1.5"),
])  # fmt: skip
def test_a_fine_tune_that_does_not_say_what_it_trained_or_how_far_it_moved_is_damaged(tmp_path, more, words):
    file = tmp_path / "posthoc-1.json"
    file.write_text(stored(**OF_A_FINE_TUNE | TUNED))
    assert read_measurement(file, PosthocConfig)["drift"] == TUNED["drift"]
    file.write_text(stored(**OF_A_FINE_TUNE | TUNED | more))
    refused(file, words)


def test_what_a_fine_tune_has_is_not_asked_of_other_runs(tmp_path):
    file = tmp_path / "posthoc-1.json"
    for finetune in ({}, {"finetune": None}):
        file.write_text(stored(config=finetune))
        assert "drift" not in read_measurement(file, PosthocConfig)
    file.write_text(json.dumps({name: value for name, value in json.loads(stored(**OF_A_FINE_TUNE)).items() if name not in FINETUNED}))
    refused(file, "it lacks drift, trained")


@pytest.mark.parametrize("more, words", [
    ({"hit": {"linear": {"1": None}, "ranking": {}}}, "hit.linear.1 is null"), ({"hit": {"linear": {}, "ranking": {}, "token_id": []}}, "hit.token_id is []"),
    ({"hit_per_layer": {"linear": {"1": [0.5, "x"]}}}, 'hit_per_layer.linear.1[1] is "x"'), ({"static_hit": {"1": {}}}, "static_hit.1 is {}"), ({"val_loss": True}, "val_loss is true"),
    ({"converged": {"linear": True, "ranking": None}}, "converged.ranking is null"), ({"documents": {"tokens": [3, None]}}, "documents.tokens[1] is null"), ({"seed": "0"}, 'seed is "0"'),
    ({"margin_over_token_id": {"linear": "x" * 50}}, "margin_over_token_id.linear is a str"),
])  # fmt: skip
def test_an_entry_of_another_type_is_named_with_its_place(tmp_path, more, words):
    file = tmp_path / "posthoc-1.json"
    file.write_text(stored(**more))
    refused(file, words)


def test_other_measurements_are_read_as_closely(tmp_path):
    file = tmp_path / "x-1.json"
    for kind, more, words in ((LocalityConfig, {"lru": None}, "lru is null"), (DownstreamConfig, {"tasks": {"piqa": None}}, "tasks.piqa is null"), (DownstreamConfig, {"left_out": {"piqa": "1"}}, 'left_out.piqa is "1"')):
        file.write_text(stored(kind))
        assert read_measurement(file, kind) == json.loads(stored(kind))
        file.write_text(stored(kind, **more))
        refused(file, words, kind)


def test_a_number_is_no_truth_and_nothing_else_is_asked():
    assert fault(1, bool) == "it is 1" and fault(True, (int, float)) == "it is true" and fault(True, bool) == "" == fault({"a": object}, dict)
    assert fault({"a": 1, "b": "free"}, {"a": int}) == "" and fault({"b": "held"}, {...: int}) == 'b is "held"'


def test_a_study_that_reads_a_damaged_fine_tune_says_so(tmp_path, monkeypatch):
    """As a notebook asks: not a KeyError from where the entry is used."""
    monkeypatch.setenv("PREDMOE_STORE", str(tmp_path))
    fit, run = PosthocConfig(), tier("smoke", finetune=FinetuneConfig(checkpoint="some/model"))
    file = runs.open_run(run, tmp_path).path / f"{runs.measurement_name(fit)}.json"
    file.write_text(stored(**{"config": to_dict(run)} | TUNED | {"drift": {}}))
    with pytest.raises(ConfigError, match=f"^{re.escape(str(file))} is damaged .drift lacks kept, weights.;"):
        experiments.measure_arms([("baseline", run)], fit, profile="none", parallel=1)
