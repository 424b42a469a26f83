"""The run store: what is there is returned, what is missing is made, one process at a time and each run once."""

import json
import os
import re
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_runs import POSTHOC, clone, finished, folder_of, lines, results, stored, tiny

from predmoe import paths, runs, worker
from predmoe.config import PREDICTORS, ConfigError, LocalityConfig, PredictorConfig
from predmoe.posthoc import heads_file, load_heads
from predmoe.runs import RunFailed, get_or_fit, get_or_measure, get_or_train, open_run, posthoc_name
from predmoe.train import Trainer, TrainingError


@pytest.fixture(scope="module")
def pair(corpus):
    """The joint run and its baseline."""
    return [tiny(corpus), tiny(corpus, objective={})]


@pytest.fixture(scope="module")
def measured(pair, tmp_path_factory):
    """(store, measurements) of both, trained and measured in child processes, side by side."""
    store = tmp_path_factory.mktemp("measured")
    return store, get_or_measure(pair, POSTHOC, profile="none", store=store, parallel=2, report=lambda line: None)


def stamps(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


# -------------------------------------------------------------------------------------------------------- measurements


def test_measurements_come_in_the_order_asked_for(pair, measured):
    found = measured[1]
    assert [m["config_hash"] for m in found] == [config.hash for config in pair]
    assert [m["lambda_pred"] for m in found] == [0.3, 0.0]
    assert "cotrained" in found[0]["hit"] and "cotrained" not in found[1]["hit"]
    for m in found:
        assert m["hit"].keys() >= {"linear", "ranking", "next_router", "token_id", "static"}
        assert all(0 <= hit <= 1 for by_horizon in m["hit"].values() for hit in by_horizon.values())
        assert m["curves"]["linear"][0]["step"] == 10 and isinstance(m["converged"]["ranking"], bool)
        assert m["seconds"]["train"] > 0 and m["terms_nats"]["lm"] > 0


def test_nothing_is_done_the_second_time(pair, measured, no_children):
    store, found = measured
    before = {name: stamp for name, stamp in stamps(store).items() if not name.endswith(".config.json")}
    assert get_or_measure(pair[::-1] + pair, POSTHOC, profile="none", store=store) == found[::-1] + found
    assert get_or_train(pair[0], store=store).has_checkpoint
    assert {name: stamp for name, stamp in stamps(store).items() if name in before} == before


def test_a_run_is_fitted_in_two_ways_by_one_child(pair, measured, tmp_path, monkeypatch):
    """Each fit has a file and heads of its own; only the ranking MLP's loss differs, so the linear predictor is the same."""
    store, begun, start = tmp_path / "store", [], runs._start
    shutil.copytree(measured[0] / pair[0].hash, store / pair[0].hash, ignore=shutil.ignore_patterns("posthoc-*"))
    monkeypatch.setattr(runs, "_start", lambda *args, **kwargs: begun.append(args) or start(*args, **kwargs))
    fits = [POSTHOC, replace(POSTHOC, ranking_loss="margin_all")]
    runs.measure_missing([(pair[0], fits)], store=store, parallel=1, report=lambda line: None)
    run = open_run(pair[0], store)
    first, second = (run.measurement(how) for how in fits)
    assert len(begun) == 1 and all(run.has_heads(how) for how in fits)
    assert first["hit"] == measured[1][0]["hit"] and first["hit"]["linear"] == second["hit"]["linear"] and first["hit"]["ranking"] != second["hit"]["ranking"]
    assert (first["posthoc_config"]["ranking_loss"], second["posthoc_config"]["ranking_loss"]) == ("margin", "margin_all")


def test_a_fresh_clone_needs_no_checkpoint_to_read_measurements(pair, measured, no_children, tmp_path):
    store = clone(measured[0], tmp_path / "clone")
    assert get_or_measure(pair, POSTHOC, profile="none", store=store) == measured[1]
    assert not list(store.rglob("*.safetensors"))


def test_a_measurement_holds_neither_host_nor_path(pair, measured):
    for config in pair:
        folder = measured[0] / config.hash
        for file in (folder / "provenance.json", folder / f"{posthoc_name(POSTHOC)}.json"):
            value = json.loads(file.read_text())
            value.get("config", {}).get("data", {}).pop("corpus", None)  # the local text's path is a parameter
            assert str(measured[0]) not in json.dumps(value) and os.uname().nodename not in json.dumps(value).split('"')


@pytest.mark.parametrize("described", [False, True], ids=["no checkpoint", "only its description"])
def test_a_missing_checkpoint_is_trained_again_to_the_same_bits(pair, measured, tmp_path, described):
    store = clone(measured[0], tmp_path / "clone")
    folder = store / pair[0].hash
    if described:
        (folder / "checkpoint").mkdir()
        shutil.copy(measured[0] / pair[0].hash / "checkpoint" / "config.json", folder / "checkpoint")
    assert not open_run(pair[0], store).has_checkpoint
    if described:  # the second child process would show nothing new
        return
    run = get_or_train(pair[0], store=store, report=lambda line: None)
    assert run.path == folder and run.has_checkpoint
    trained = results(folder)
    assert trained == {name: value for name, value in results(measured[0] / pair[0].hash).items() if name in trained}
    assert {"model.safetensors", "predictor.safetensors", "metrics.jsonl"} <= trained.keys()


def test_other_bits_than_before_are_told_and_no_measurement_of_the_other_weights_stays(pair, measured, tmp_path):
    """As on another kind of machine: the clone's run ended with another loss, and the second of its measurements is missing."""
    store, told = clone(measured[0], tmp_path / "clone"), []
    folder, other = store / pair[1].hash, replace(POSTHOC, patience=2)
    source = folder / f"{posthoc_name(POSTHOC)}.json"
    mine = json.loads(source.read_text())
    source.write_text(json.dumps(mine | {"val_loss": 1.0}))
    (folder / "finished.json").write_text(json.dumps(json.loads((folder / "finished.json").read_text()) | {"val_loss": 1.0, "weights": "0" * 12}))
    runs.measure_missing([(pair[1], [POSTHOC, other])], store=store, parallel=1, report=told.append)
    assert "held-out loss" in (folder / "log.txt").read_text() and any("other bits" in line for line in told)
    weights = json.loads((folder / "finished.json").read_text())["weights"]
    for how in (POSTHOC, other):
        found = json.loads((folder / f"{posthoc_name(how)}.json").read_text())
        assert (found["val_loss"], found["weights"]) == (mine["val_loss"], weights) and mine["weights"] == weights


@pytest.mark.parametrize("key, said", [("data_hash", "the text of .* changed after the run"), ("weights", "the checkpoint's weights changed after the run")])
def test_a_run_whose_text_or_weights_changed_is_not_measured(pair, measured, tmp_path, capsys, key, said):
    folder = shutil.copytree(measured[0] / pair[1].hash, tmp_path / pair[1].hash)
    name = posthoc_name(POSTHOC)
    (folder / f"{name}.json").unlink()
    (folder / "finished.json").write_text(json.dumps(json.loads((folder / "finished.json").read_text()) | {key: "0" * 12}))
    assert worker.main([str(folder), "--posthoc", name]) == 2
    assert re.search(said + r".*restore (it|them), or remove the folder", capsys.readouterr().err) and not (folder / f"{name}.json").exists()


def test_a_finished_run_whose_weights_file_is_cut_is_not_called_done(pair, measured, tmp_path):
    folder = shutil.copytree(measured[0] / pair[1].hash, tmp_path / pair[1].hash)
    weights = folder / "checkpoint" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="the checkpoint's weights changed after the run .*restore them, or remove the folder"):
        runs.get_or_train(pair[1], store=tmp_path)


@pytest.mark.parametrize("name, damage, said", [
    ("config.json", lambda raw: raw.replace(b'"hidden_size": 32', b'"hidden_size": 64'), "is a checkpoint of another shape: hidden_size=64 .wanted 32."),
    ("config.json", lambda raw: raw[:50], "config.json is damaged, it is not JSON"),
    ("predictor.safetensors", lambda raw: raw[:1000], "predictor.safetensors does not hold the heads of this run"),
])  # fmt: skip
def test_a_finished_run_whose_checkpoint_does_not_fit_it_is_not_called_done(pair, measured, tmp_path, no_children, name, damage, said):
    folder = shutil.copytree(measured[0] / pair[0].hash, tmp_path / pair[0].hash)
    file = folder / "checkpoint" / name
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match=said):
        runs.get_or_train(pair[0], store=tmp_path)


def test_a_run_goes_on_with_no_other_text(pair, measured, corpus, tmp_path):
    """A run that was broken off, and its text changed since."""
    config = tiny(corpus, seed=5)
    folder = folder_of(config, tmp_path / "run")
    trainer = Trainer(config, folder)
    trainer.restore()
    trainer.save()
    (folder / "provenance.json").write_text('{"data_hash": "0123456789ab"}')
    with pytest.raises(TrainingError, match="has changed since this run began .it was 0123456789ab, now .*remove .* to train the run anew"):
        worker.train(folder, config)


@pytest.mark.parametrize("folder", sorted((paths.ROOT / "outputs").glob("*/runs/*/")), ids=lambda folder: folder.name)
def test_committed_measurements_are_of_the_weights_that_the_run_ended_with(folder):
    """Weights by their hash; the loss to the bit, but of a fine-tune, which ends on its adapters' sums and is measured by the model that they were merged into: rounding apart,
    and a token's expert where two are all but equal."""
    ended = json.loads((folder / "finished.json").read_text())
    same = pytest.approx(ended["val_loss"], rel=1e-5) if json.loads((folder / "config.json").read_text()).get("finetune") else ended["val_loss"]
    for described in folder.glob("*.config.json"):
        found = json.loads(described.with_name(described.name.replace(".config.json", ".json")).read_text())
        assert found.get("val_loss", ended["val_loss"]) == same and found.get("weights", ended.get("weights")) == ended.get("weights"), described.name


def test_fitted_heads_are_kept_and_asking_again_starts_nothing(pair, measured, no_children):
    run = get_or_fit(pair[0], POSTHOC, store=measured[0])
    heads = load_heads(run.path, posthoc_name(POSTHOC), pair[0])
    assert run.has_heads(POSTHOC) and list(heads) == ["linear", "ranking"] and heads["ranking"].config.horizons == pair[0].predictor.horizons


def test_heads_of_other_weights_are_not_those_of_the_run(pair, measured, tmp_path, no_children):
    """Heads that are there do not hide a checkpoint that changed, nor count where their measurement was discarded with earlier weights."""
    folder = shutil.copytree(measured[0] / pair[0].hash, tmp_path / pair[0].hash)
    weights, run = folder / "checkpoint" / "model.safetensors", runs.open_run(pair[0], tmp_path)
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(ConfigError, match="the checkpoint's weights changed after the run .* ended"):
        get_or_fit(pair[0], POSTHOC, store=tmp_path)
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert get_or_fit(pair[0], POSTHOC, store=tmp_path).has_heads(POSTHOC)
    (folder / f"{posthoc_name(POSTHOC)}.json").unlink()
    assert not run.has_heads(POSTHOC)


def test_missing_heads_are_fitted_again_to_the_same_bits_and_the_measurement_stays(pair, measured, tmp_path):
    folder = shutil.copytree(measured[0] / pair[1].hash, tmp_path / pair[1].hash)
    name = posthoc_name(POSTHOC)
    heads = {kind: heads_file(folder, name, kind).read_bytes() for kind in PREDICTORS}
    heads_file(folder, name, "ranking").unlink()
    before = (folder / f"{name}.json").read_bytes()
    run = get_or_fit(pair[1], POSTHOC, store=tmp_path, report=lambda line: None)
    assert {kind: heads_file(folder, name, kind).read_bytes() for kind in PREDICTORS} == heads
    assert run.has_heads(POSTHOC) and (folder / f"{name}.json").read_bytes() == before and not list(folder.rglob("*.partial"))


def test_a_run_is_found_by_its_configuration(pair, measured, corpus):
    assert open_run(pair[1], measured[0]).metrics() == lines(measured[0] / pair[1].hash)
    heads = replace(pair[1], predictor=PredictorConfig(kind="ranking", horizons=(1,)))
    assert open_run(heads, measured[0]).has_checkpoint  # without the term, heads change nothing: one baseline per seed
    assert open_run(replace(pair[0], predictor=heads.predictor), measured[0]).has_checkpoint is False


def test_a_folder_of_another_configuration_is_refused(pair, tmp_path):
    folder_of(pair[1], tmp_path / pair[0].hash)
    with pytest.raises(ConfigError, match=f"config.json describes run {pair[1].hash}, not {pair[0].hash}"):
        open_run(pair[0], tmp_path)


def test_a_checkpoint_of_another_shape_is_refused_by_the_worker(pair, measured, corpus, tmp_path, capsys):
    other = tiny(corpus, model={"hidden_size": 64}, objective={})
    folder = shutil.copytree(measured[0] / pair[1].hash, tmp_path / "run")
    (folder / "config.json").write_text((folder_of(other, tmp_path / "other") / "config.json").read_text())
    name = posthoc_name(POSTHOC)
    (folder / f"{name}.json").unlink()
    assert worker.main([str(folder), "--posthoc", name]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("predmoe: ") and "checkpoint of another shape: hidden_size=32 (wanted 64)" in error and "\n" not in error


def test_the_store_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("PREDMOE_STORE", str(tmp_path / "shared"))
    assert runs.default_store("cpu") == tmp_path / "shared"
    monkeypatch.delenv("PREDMOE_STORE")
    monkeypatch.setenv("PREDMOE_OUTPUTS", str(tmp_path / "out"))
    assert runs.default_store("cpu") == tmp_path / "out" / "cpu" / "runs"


# ------------------------------------------------------------------------------------------------ failure, interruption


def test_a_failing_child_is_named_with_its_last_words_and_the_others_finish(pair, measured, corpus, tmp_path):
    bad, good = tiny(corpus, lr=1e30), pair[1]
    shutil.copytree(measured[0] / good.hash, tmp_path / good.hash, ignore=shutil.ignore_patterns("posthoc-*"))
    told = []
    with pytest.raises(RunFailed) as failure:
        get_or_measure([bad, good], POSTHOC, profile="none", store=tmp_path, parallel=1, report=told.append)
    log = tmp_path / bad.hash / "log.txt"
    said = log.read_text().splitlines()[-1]
    assert said.startswith("predmoe: the loss is not finite at step ")
    assert str(failure.value) == f"run {bad.hash} failed: {said.removeprefix('predmoe: ')} (log: {log})"   # who passes it on says who speaks
    assert [line for line in told if line.startswith("[")] == ["[1/2] joint 0.3 topk/input, seed 0: failed", "[2/2] baseline, seed 0: done"]
    assert open_run(good, tmp_path).measurement(POSTHOC)["hit"] == measured[1][1]["hit"]


def test_what_this_machine_cannot_train_is_told_before_a_process_is_started(corpus, tmp_path, no_children, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RunFailed, match=r"^run \w+ not started: device='cuda': no CUDA device here; use device: cpu$"):
        get_or_train(tiny(corpus, device="cuda"), store=tmp_path)
    (tmp_path / "text.pdf").touch()
    for name, said in (("absent.txt", "does not exist"), ("text.pdf", "is neither a directory nor a file of .txt, .md, .jsonl")):
        with pytest.raises(RunFailed, match=rf"^run \w+ not started: corpus 'files': {tmp_path / name} {said}$"):
            get_or_train(tiny(f"files:{tmp_path / name}"), store=tmp_path)


def test_a_run_that_cannot_be_started_is_told_at_once_and_the_others_go_on(corpus, tmp_path, stand_in):
    stand_in(f"echo '{stored()}' > $run/$name.json")
    told, absent = [], tiny(f"files:{tmp_path / 'absent.txt'}")
    with pytest.raises(RunFailed, match=f"^run {absent.hash} not started: .*absent.txt does not exist$"):
        get_or_measure([absent, tiny(corpus)], POSTHOC, profile="none", store=tmp_path / "store", report=told.append)
    assert told[0].startswith(f"run {absent.hash} not started: ") and told[1:] == ["[1/1] joint 0.3 topk/input, seed 0: done"]


def test_an_interrupt_stops_the_child_and_the_next_call_goes_on_to_the_same_bits(corpus, tmp_path):
    config = tiny(corpus, steps=100)
    reference = finished(config, tmp_path / "reference")
    run = open_run(config, tmp_path)
    trainer = Trainer(config, run.path, checkpoint_seconds=0.0)  # somebody trained some steps of it before
    trainer.evaluate_on = lambda which: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.step == 12 and (run.path / "state.pt").exists()
    done, log = threading.Event(), run.path / "log.txt"

    def interrupt():
        while not (log.exists() and "step 25/" in log.read_text()):
            if done.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            get_or_train(config, store=tmp_path, report=lambda line: None)
    finally:
        done.set()
        thread.join()
    holder = json.loads((run.path / "lock").read_text())["pid"]
    assert not Path(f"/proc/{holder}").exists()  # the child has gone, and left its lock
    assert not run.finished
    assert get_or_train(config, store=tmp_path, report=lambda line: None).has_checkpoint
    assert log.read_text().count("resumed at step 11") == 2  # the last state that was saved
    assert results(run.path) == results(reference)


def test_two_at_the_same_run_train_it_once(pair, tmp_path):
    config, got = pair[0], []

    def ask():
        got.append(get_or_train(config, store=tmp_path, report=lambda line: None))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    log = (tmp_path / config.hash / "log.txt").read_text()
    assert [run.has_checkpoint for run in got] == [True, True]
    assert log.count("step 30/30") == 1 and re.search(r"waiting: process \d+ on \S+ works on this run", log), log
    assert not (tmp_path / config.hash / "lock").exists()


# ---------------------------------------------------------------------------------------------------- damaged files, many at a time


@pytest.mark.parametrize("text", ["{}", "[]", "1", "{", '{"hit": {}}'])
@pytest.mark.parametrize("how", [POSTHOC, LocalityConfig()], ids=["posthoc", "locality"])
def test_a_damaged_measurement_is_a_sentence_that_names_it(corpus, tmp_path, no_children, how, text):
    run = open_run(tiny(corpus), tmp_path)
    for kind in (POSTHOC, LocalityConfig()):
        (run.path / f"{runs.measurement_name(kind)}.json").write_text(stored(type(kind)))
    source = run.path / f"{runs.measurement_name(how)}.json"
    source.write_text(text)
    with pytest.raises(ConfigError, match=f"^{source} is damaged .*; restore it from a copy, or remove it to measure the run again$"):
        get_or_measure([tiny(corpus)], POSTHOC, profile="none", locality=LocalityConfig(), store=tmp_path)


@pytest.mark.parametrize("name", ["timing.json", "provenance.json", "config.json", "metrics.jsonl"])
def test_a_worker_refuses_what_holds_a_list_before_it_fits(pair, measured, tmp_path, capsys, monkeypatch, name):
    folder = shutil.copytree(measured[0] / pair[0].hash, tmp_path / "run")
    (folder / f"{posthoc_name(POSTHOC)}.json").unlink()
    (folder / name).write_text("[]\n")
    monkeypatch.setattr(worker, "measure", lambda *_, **__: pytest.fail("it fits"))
    assert worker.main([str(folder), "--posthoc", posthoc_name(POSTHOC)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"predmoe: {folder / name}") and "damaged" in said and said.count("\n") == 1


def test_many_processes_may_open_a_run_at_a_time(corpus, tmp_path):
    """Threads stand for processes: what they share is the file system."""
    config, errors = tiny(corpus), []

    def open_it():
        try:
            for seed in range(20):
                open_run(replace(config, train=replace(config.train, seed=seed)), tmp_path)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and len(list(tmp_path.iterdir())) == 20
