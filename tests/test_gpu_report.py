"""The resumable report of one machine, at a tiny size on the CPU: what a call leaves, the next one goes on with."""

import json

import pytest
import torch
from tiny_runs import stored, tiny

from predmoe import cli, gpu_report, runs, throughput, traces
from predmoe.config import ConfigError, to_dict

POSTHOC = {"tokens": 512, "batch_tokens": 128, "eval_every": 10, "max_steps": 40, "patience": 1}


def changes(corpus, **training) -> dict:
    """The tiny run's sections as changes to the smoke tier."""
    found = to_dict(tiny(corpus, objective={}, **training))
    return {name: found[name] for name in ("model", "data", "predictor")} | {"train": {k: v for k, v in found["train"].items() if k != "seed"}}


def test_a_call_goes_on_where_the_last_one_stopped(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "FINISHING", 3600.0)   # so that training is paused at once
    told = []
    settings = dict(tier="smoke", seeds=[0], changes=changes(corpus, steps=300), posthoc=POSTHOC, report=told.append)
    before = torch.get_num_threads()
    assert gpu_report.run(tmp_path, minutes=5, **settings) == 2
    torch.set_num_threads(before)
    assert "baseline, seed 0: paused, goes on with the next call" in told
    baseline, joint = gpu_report.jobs("smoke", [0], settings["changes"])
    folder = tmp_path / "runs" / baseline.run.hash
    assert (folder / "state.pt").exists() and not (folder / "finished.json").exists()
    assert json.loads((tmp_path / "results.json").read_text())["missing"] == ["baseline, seed 0", "joint, seed 0"]
    speed = (tmp_path / "throughput.json").read_bytes()

    monkeypatch.setattr(gpu_report, "FINISHING", 0.0)
    assert gpu_report.run(tmp_path, minutes=30, **settings) == 0
    assert (tmp_path / "throughput.json").read_bytes() == speed   # once per device
    assert "resumed at step" in (folder / "log.txt").read_text()
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(row["arm"], row["seed"], row["config_hash"]) for row in results["arms"]] == [("baseline", 0, baseline.run.hash), ("joint", 0, joint.run.hash)]
    assert results["missing"] == [] and all(0 < row["hit"]["ranking"]["1"] <= 1 for row in results["arms"])
    for job in (baseline, joint):
        trace = gpu_report.trace_file(tmp_path, job)
        assert trace.stat().st_size < gpu_report.TRACE_BYTES and job.run.hash in traces.load(trace).meta.notes
    assert not list(tmp_path.rglob("model.safetensors")) and not list(tmp_path.rglob("state.pt"))   # small enough to carry home
    report = (tmp_path / "report.md").read_text()
    assert "Seed 0, joint - baseline under the ranking MLP:" in report and f"{results['arms'][0]['val_loss']:.4f}" in report

    monkeypatch.setattr(runs, "_start", None)   # nothing is left to start
    assert gpu_report.run(tmp_path, minutes=1, **settings) == 0


class Interrupted(BaseException):
    """A call that is ended where it stands, as by its machine's time limit."""


def a_measurement():
    hit = {kind: {str(h): 0.5 for h in (1, 2)} for kind in ("linear", "ranking")}
    return stored(hit=hit, val_loss=5.0, tokens_per_second=100.0)


@pytest.fixture
def stages(corpus, tmp_path, monkeypatch):
    """A report whose training, fit and recording take no time: (a call of it, the settable stage at which it is ended, what was done)."""
    end_at, done = [None], []

    def stage(name, work):
        def does(*arguments, **keywords):
            if end_at[0] == f"before {name}":
                raise Interrupted
            done.append(name)
            result = work(*arguments, **keywords)
            if end_at[0] == f"after {name}":
                raise Interrupted
            return result

        return does

    def train(wanted, *, store, **_):
        for run, (fit,) in wanted:
            folder = runs.open_run(run, store).path
            if not (measured := folder / f"{runs.posthoc_name(fit)}.json").exists():
                (folder / "checkpoint").mkdir(exist_ok=True)
                (folder / "checkpoint" / "model.safetensors").write_bytes(b"weights")
                measured.write_text(a_measurement())

    def weights(run, fit, *, store, report):   # what the trace is recorded from
        assert (store / run.hash / "checkpoint" / "model.safetensors").exists()

    speed = {"rows": [], "peak_tflops": 1.0, "dtype": "float32", "term_share_of_step": 0.0, "term_share_of_operations": 0.0, "fastest_peer": None}
    monkeypatch.setattr(throughput, "measure", stage("throughput", lambda *_, **__: speed))
    monkeypatch.setattr(runs, "measure_missing", stage("train", train))
    monkeypatch.setattr(runs, "get_or_fit", weights)
    monkeypatch.setattr(gpu_report.recording, "record_run", lambda *_: None)
    monkeypatch.setattr(traces, "save", stage("trace", lambda trace, path: path.write_bytes(b"trace")))
    monkeypatch.setattr(gpu_report, "discard_weights", stage("discard", gpu_report.discard_weights))
    monkeypatch.setattr(gpu_report, "write", stage("write", gpu_report.write))
    settings = dict(tier="smoke", seeds=[0], changes=changes(corpus), posthoc=POSTHOC, report=lambda line: None)
    return (lambda: gpu_report.run(tmp_path / "out", **settings)), end_at, done


@pytest.mark.parametrize("when", [f"{side} {name}" for name in ("throughput", "train", "trace", "discard", "write") for side in ("before", "after")])
def test_a_call_that_is_ended_anywhere_is_gone_on_with(stages, tmp_path, when):
    call, end_at, done = stages
    end_at[0] = when
    with pytest.raises(Interrupted):
        call()
    end_at[0] = None
    assert call() == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["arm"] for row in results["arms"]] == ["baseline", "joint"] and results["missing"] == []
    assert len(list((tmp_path / "out" / "traces").glob("*"))) == 2
    assert not list((tmp_path / "out").rglob("model.safetensors")) and not list((tmp_path / "out").rglob("*partial*"))
    done.clear()
    assert call() == 0 and done == ["write", "discard", "discard"]   # nothing is made twice


def test_a_call_that_is_ended_leaves_the_report_of_what_is_done(stages, tmp_path, monkeypatch):
    call, end_at, _ = stages
    finish = gpu_report.finish

    def then_end(*arguments, **keywords):
        finish(*arguments, **keywords)
        end_at[0] = "before train"

    monkeypatch.setattr(gpu_report, "finish", then_end)
    with pytest.raises(Interrupted):
        call()
    report = tmp_path / "out" / "report.md"
    assert "| baseline | 0 |" in report.read_text() and "Missing yet: joint, seed 0.\n" in report.read_text()
    end_at[0] = None
    monkeypatch.setattr(gpu_report, "finish", finish)
    assert call() == 0 and "| joint | 0 |" in report.read_text() and "Missing" not in report.read_text()


def test_a_damaged_table_of_throughput_is_a_sentence_and_another_device_has_its_own(stages, tmp_path):
    call, _, done = stages
    call()
    table = tmp_path / "out" / "throughput.json"
    good = json.loads(table.read_text())
    for text in ("", "[]", '{"rows": 1}'):
        table.write_text(text)
        with pytest.raises(ConfigError, match="throughput.json is damaged .* or remove it to measure anew"):
            call()
    good["provenance"]["hardware"]["gpu"] = "another"
    table.write_text(json.dumps(good))
    done.clear()
    call()
    assert "throughput" in done and json.loads(table.read_text())["provenance"]["hardware"]["gpu"] != "another"


def test_a_folder_of_other_settings_is_refused_and_left(corpus, stages, tmp_path):
    """Its throughput would be taken for that of this model, and its traces, which go by arm and seed, for these runs'."""
    call, _, done = stages
    assert call() == 0
    out = tmp_path / "out"
    before, keep = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}, lambda line: None
    done.clear()
    for settings, said in ((dict(changes=changes(corpus, steps=31), posthoc=POSTHOC), r"train.steps=30, now 31"), (dict(changes=changes(corpus), posthoc=POSTHOC | {"patience": 2}), r"patience=1, now 2")):
        with pytest.raises(ConfigError, match=rf"{out} is a report of other settings \({said}\): give the same --tier and --set as before, or name another folder with --out"):
            gpu_report.run(out, tier="smoke", seeds=[0], report=keep, **settings)
    assert {path: path.read_bytes() for path in before} == before and not done
    assert gpu_report.run(out, tier="smoke", seeds=[0, 1], changes=changes(corpus), posthoc=POSTHOC, report=keep) == 0   # more seeds are more of the same
    for text in ("", "[]", "{}"):
        (out / "settings.json").write_text(text)
        with pytest.raises(ConfigError, match="settings.json is damaged .* or remove it where the folder is of the same settings"):
            call()


def test_a_folder_in_which_nothing_came_of_the_first_settings_takes_others(corpus, stages, tmp_path):
    call, _, _ = stages
    with pytest.raises(ConfigError, match="there is no file"):
        gpu_report.run(tmp_path / "out", tier="smoke", seeds=[0], changes=changes(corpus, steps=31), posthoc=POSTHOC, tokens=tmp_path / "none")
    assert call() == 0


def test_a_seed_that_is_named_twice_is_refused(corpus, tmp_path):
    """Its arms would stand twice in the results."""
    with pytest.raises(ConfigError, match="^seeds 0 1 0: one is there twice; name each once$"):
        gpu_report.run(tmp_path / "out", tier="smoke", seeds=[0, 1, 0], changes=changes(corpus))
    assert not (tmp_path / "out").exists()


def test_the_table_of_throughput_has_every_contender(corpus):
    before = torch.get_num_threads()
    found = throughput.measure(tiny(corpus), rounds=2, steps=2, warmup=1, peak_size=256)
    torch.set_num_threads(before)
    names = [row["contender"] for row in found["rows"]]
    assert names[:2] == [throughput.OURS, throughput.JOINT] and "transformers, eager" in names and "transformers, grouped_mm" in names
    done = [row for row in found["rows"] if "refused" not in row]
    assert {throughput.OURS, throughput.JOINT, "transformers, eager"} <= {row["contender"] for row in done}
    for row in done:
        assert row["tokens_per_second"] == pytest.approx(4 * 16 / row["seconds"])
        assert row["share_of_peak"] == pytest.approx(row["tflops"] / found["peak_tflops"]) and 0 < row["share_of_peak"] < 1
    theirs = min(row["seconds"] for row in done if row["contender"].startswith("transformers"))
    ours = next(row["seconds"] for row in done if row["contender"] == throughput.OURS)
    assert found["of_the_fastest_peer"] == pytest.approx(theirs / ours)
    assert all(name in throughput.table(found) for name in names) and "of its operations; rounds of the same step differ by up to" in throughput.table(found)


def test_arms_come_in_pairs_seed_by_seed(corpus):
    found = gpu_report.jobs("a", [0, 3], {"data": {"corpus": "offline-large"}})
    assert [(job.arm, job.seed) for job in found] == [("baseline", 0), ("joint", 0), ("baseline", 3), ("joint", 3)]
    assert len({job.run.hash for job in found}) == 4 and all(job.run.train.device == "cuda" for job in found)


def test_settings_without_sense_and_a_missing_gpu_are_refused(corpus, tmp_path, capsys):
    assert cli.main(["gpu-report", "--out", str(tmp_path), "--minutes", "0"]) == 2
    assert "--minutes: 0 is not a finite number above 0" in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=f"no CUDA device here, .*on a CPU a small tier shows every stage: predmoe gpu-report --tier smoke --seeds 0 --out {tmp_path / 'a'}"):
            gpu_report.run(tmp_path / "a", changes={"data": {"corpus": corpus, "tokenizer": "bpe8k"}}, report=lambda line: None)
        assert not (tmp_path / "a").exists()   # nothing is made up where there is no GPU


def test_a_trace_that_is_too_large_to_carry_is_refused_and_not_left(tmp_path, monkeypatch):
    job = gpu_report.jobs("smoke", [0], {})[0]
    monkeypatch.setattr(runs, "get_or_fit", lambda *_, **__: None)
    monkeypatch.setattr(gpu_report.recording, "record_run", lambda *_: None)
    monkeypatch.setattr(gpu_report.traces, "save", lambda trace, path: path.write_bytes(bytes(gpu_report.TRACE_BYTES + 1)))
    with pytest.raises(ConfigError, match="the trace of baseline, seed 0, has 16 MB, more than 16"):
        gpu_report.finish(tmp_path, job, None, keep_weights=False, report=print)
    assert not list((tmp_path / "traces").iterdir())
