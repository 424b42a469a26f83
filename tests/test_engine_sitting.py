"""What 11_engine measured is kept, stage by stage, and read again to the bit."""

import dataclasses
import json
import shutil

import numpy as np
import pandas as pd
import pytest

from predmoe import engine_sitting, engine_study, execute, paths, runs, studies
from predmoe.config import ConfigError
from predmoe.engine_sitting import Asked, Sitting

HOW = {"tier": "smoke", "seeds": [0], "horizons": [1], "lambda_pred": 0.3, "train": {}, "data": {}, "posthoc": {}}
TABLE = pd.DataFrame({"name": "a", "share": 10 ** np.random.default_rng(0).uniform(-300, 300, 1000), "count": 2**53 + np.arange(1000)})


@pytest.fixture
def asked():
    return Asked(pairs=studies.pair(HOW)["models"], fit=studies.posthoc_config("smoke", {}), generation=engine_study.Generation(new_tokens=3, horizon=1, budget=0, lanes=2),
                 sources={"baseline": ["demand"], "joint": ["demand"]}, dtype="float32", shares=[0.4], per_domain=1, prompt=6, exact_policies=["lru"], exact_horizons=[1],
                 disk_reads=8, peers=[], peer_rounds=1, peer_tokens=3, peers_memory_mb=0, threads=1)  # fmt: skip


@pytest.fixture
def sitting(asked, tmp_path, monkeypatch):
    monkeypatch.setenv("PREDMOE_OUTPUTS", str(tmp_path))
    monkeypatch.delenv("PREDMOE_STORE", raising=False)
    exported = []
    monkeypatch.setattr(engine_study, "exported", lambda *given, **named: exported.append(given) or {})
    made = Sitting(asked, profile="smoke", report=lambda line: None)
    made.exports = exported
    yield made
    made.close()


def test_a_stage_is_measured_once_and_read_to_the_bit(sitting, asked):
    first = sitting._stage("race", [], lambda: {"race": TABLE, "disk": TABLE[:1]})
    again = Sitting(asked, profile="smoke")._stage("race", [], lambda: pytest.fail("it was measured"))
    for tables in (first, again):
        pd.testing.assert_frame_equal(tables["race"], TABLE, check_exact=True)
        pd.testing.assert_frame_equal(tables["disk"], TABLE[:1], check_exact=True)
    assert len(sitting.exports) == 1, "models are exported for what is measured alone"
    assert " on " in sitting.say() and sitting.say().startswith("Measured ")


def test_what_ended_half_way_is_measured_again(sitting):
    (sitting.folder / "race.csv").write_text("cut off")

    def fails():
        raise RuntimeError("the disk went away")

    with pytest.raises(RuntimeError):
        sitting._stage("race", [], fails)
    pd.testing.assert_frame_equal(sitting._stage("race", [], lambda: {"race": TABLE})["race"], TABLE)


@pytest.mark.parametrize("name, damage", [("race.csv", None), ("race.csv", b""), ("race.csv", b"\xff\xfe\x00"), ("race.csv", b"name,share,count\na,1.0,3\n"), ("race.json", b"{"), ("race.json", b"{}")])
def test_damage_is_one_sentence_with_the_file(sitting, name, damage):
    sitting._stage("race", [], lambda: {"race": TABLE})
    (sitting.folder / name).unlink() if damage is None else (sitting.folder / name).write_bytes(damage)
    with pytest.raises(ConfigError, match=f"{name} (is missing or not as it was measured|is damaged|.*no entry|lacks)"):
        sitting._stage("race", [], lambda: pytest.fail("what is damaged is told, not measured over"))


def test_a_run_that_ended_with_other_weights_since_makes_its_stages_void(sitting, asked, tmp_path):
    """Named by its run alone, a measurement would be told of a model that it did not measure. Where the store does not know the run, as in a clone without runs, it stands."""
    first, second = (run for _, run in asked.pairs)
    race = lambda measure: sitting._stage("race", [first, second], measure)  # noqa: E731
    peers = lambda measure: sitting._stage("peers", [first], measure)  # noqa: E731
    kept = lambda: pytest.fail("it was measured")  # noqa: E731

    def ended(run, weights):
        folder = tmp_path / "smoke" / "runs" / run.hash
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "finished.json").write_text(json.dumps({"val_loss": 5.0, "weights": weights}))

    for run, weights in ((first, "aaaaaaaaaaaa"), (second, "bbbbbbbbbbbb")):
        ended(run, weights)
    race(lambda: {"race": TABLE}), peers(lambda: {"peers": TABLE})
    assert json.loads((sitting.folder / "race.json").read_text())["weights"] == {first.hash: "aaaaaaaaaaaa", second.hash: "bbbbbbbbbbbb"}
    race(kept), peers(kept)
    ended(second, "cccccccccccc")
    peers(kept)
    said = f"race.json was measured with the weights bbbbbbbbbbbb of run {second.hash}, which has ended with cccccccccccc since; .* remove the folder .*{asked.key} to measure again"
    with pytest.raises(ConfigError, match=said):
        race(kept)
    (tmp_path / "smoke" / "runs" / second.hash / "finished.json").unlink()
    race(kept)
    stage = sitting.folder / "race.json"
    stage.write_text(json.dumps({name: value for name, value in json.loads(stage.read_text()).items() if name != "weights"}))
    with pytest.raises(ConfigError, match="race.json is damaged .without a usable weights.; .* to measure again"):
        race(kept)


@pytest.mark.skipif(not (paths.ROOT / "outputs" / "cpu" / "engine").exists(), reason="no sitting is committed")
def test_the_committed_sitting_is_of_the_committed_runs(tmp_path, monkeypatch):
    """As 11 asks for it at the cpu profile, every stage stands without weights and without being measured."""
    committed = paths.ROOT / "outputs" / "cpu"
    shutil.copytree(committed / "engine", tmp_path / "cpu" / "engine")
    (tmp_path / "cpu" / "runs").symlink_to(committed / "runs")
    monkeypatch.delenv("PREDMOE_STORE", raising=False)
    monkeypatch.setenv("PREDMOE_OUTPUTS", str(tmp_path))
    (job,) = execute.plan("cpu", ["11"])
    values = execute.check(job.notebook, job.params)
    cells = [cell["source"] for cell in json.loads(job.notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    setup = next("".join(source) for source in cells if any("engine_sitting.Sitting" in line for line in source))
    monkeypatch.setattr("predmoe.results.start", lambda *given: None)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monkeypatch.setattr(engine_study, "exported", lambda *given, **named: pytest.fail("weights were asked for"))
    exec(setup, names := dict(values))
    sitting = names["sitting"]
    for stage in (sitting.exactness, sitting.rounding, sitting.race, sitting.peers):
        stage()
    assert all(len(json.loads((sitting.folder / f"{stage}.json").read_text())["weights"]) == (len(sitting.asked.pairs) if stage == "race" else 1) for stage in engine_sitting.STAGES)
    sitting.close()


def test_another_question_is_another_sitting(asked):
    others = [dataclasses.replace(asked, **change) for change in ({"threads": 2}, {"shares": [0.5]}, {"peers": ["engine"]}, {"pairs": asked.pairs[:1]},
              {"generation": dataclasses.replace(asked.generation, horizon=2)}, {"fit": dataclasses.replace(asked.fit, tokens=64)})]  # fmt: skip
    keys = [each.key for each in (asked, *others)]
    assert len(set(keys)) == len(keys) and dataclasses.replace(asked).key == asked.key


def test_a_machine_is_kept_whole(sitting, monkeypatch):
    """Disk, processor, table: what the simulator is told, as it was measured."""
    from predmoe.simulator import Compute, Disk

    compute = Compute(attention_ms=(0.1 + 0.2, 0.25), expert_ms=(0.01, 0.02), head_ms=1 / 3, extra_token=0.5, overlap=True, fresh_ms=0.007)
    machine = engine_study.Machine(disk=Disk(latency_ms=0.1, gb_per_s=(1.0, 1.7), lanes=2, issue_ms=0.003), times={"demand": (compute, 2 / 3)}, table=TABLE, gb_per_s=1.7)

    class Gauge:
        def __init__(self, *given, **named): ...
        def turn(self): ...
        def machine(self):
            return machine

    sitting._exports, sitting._prompts = {key: None for key in (("baseline", 0), ("joint", 0))}, ([], "")
    monkeypatch.setattr(engine_study, "record", lambda *given, **named: None)
    monkeypatch.setattr(engine_study, "calibration_prompts", lambda *given, **named: [])
    monkeypatch.setattr(engine_study, "Gauge", Gauge)
    monkeypatch.setattr(engine_study, "race", lambda *given, **named: TABLE)
    monkeypatch.setattr(engine_sitting, "save", lambda trace, path: None)
    monkeypatch.setattr(engine_sitting, "load", lambda path: path.name)
    rows, found, traces = sitting.race()
    assert dataclasses.replace(found, table=None) == dataclasses.replace(machine, table=None)
    pd.testing.assert_frame_equal(found.table, TABLE, check_exact=True)
    assert traces == {("baseline", 0): "baseline-0.trace.safetensors", ("joint", 0): "joint-0.trace.safetensors"}
    assert runs.posthoc_name(sitting.asked.fit) in (sitting.folder / "asked.json").read_text()
