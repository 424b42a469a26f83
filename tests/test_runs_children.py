"""Which child processes the run store starts, when, and what is said of how they end: a stand-in in the worker's place."""

import json
import sys
from pathlib import Path

import pytest
from tiny_runs import POSTHOC, stored, tiny

from predmoe import runs
from predmoe.config import ConfigError
from predmoe.runs import RunFailed, get_or_measure, get_or_train, open_run


@pytest.mark.parametrize("parallel", [1, 2, 3])
def test_no_more_children_than_allowed_run_side_by_side(corpus, tmp_path, stand_in, parallel):
    stand_in(f"echo + >> $events; sleep 0.3; echo - >> $events; sed s/RUN/$(basename $run)/ > $run/$name.json <<'END'\n{stored(config_hash='RUN')}\nEND")
    configs = [tiny(corpus, seed=seed) for seed in range(5)]
    found = get_or_measure(configs, POSTHOC, profile="none", store=tmp_path / "store", parallel=parallel, report=lambda line: None)
    assert [m["config_hash"] for m in found] == [config.hash for config in configs]
    side_by_side, most = 0, 0
    for event in (tmp_path / "events").read_text().split():
        side_by_side += 1 if event == "+" else -1
        most = max(most, side_by_side)
    assert most == parallel


def test_the_same_run_asked_for_twice_is_done_once(corpus, tmp_path, stand_in):
    stand_in(f"echo + >> $events; echo '{stored()}' > $run/$name.json")
    assert get_or_measure([tiny(corpus)] * 3, POSTHOC, profile="none", store=tmp_path / "store", report=lambda line: None) == [json.loads(stored())] * 3
    assert (tmp_path / "events").read_text() == "+\n"


def test_a_child_ended_by_a_signal_says_which(corpus, tmp_path, stand_in):
    stand_in('echo "step 25/30"; kill -9 $$')
    with pytest.raises(RunFailed, match=r"run \w+ was ended by signal 9, which is also how the kernel ends .*, after: step 25/30 \(log: .*log.txt\); no checkpoint exists yet, so the same command begins anew$"):
        get_or_train(tiny(corpus), store=tmp_path / "store", report=lambda line: None)
    (tmp_path / "store" / tiny(corpus).hash / "state.pt").touch()
    with pytest.raises(RunFailed, match=r"after: step 25/30 .*; the last checkpoint stays, and the same command goes on from it$"):
        get_or_train(tiny(corpus), store=tmp_path / "store", report=lambda line: None)


def test_a_disk_without_room_for_the_log_is_told_and_not_the_logs_last_line(corpus, tmp_path, stand_in):
    """/dev/full in the log's place: a device on which every write fails as on a full disk."""
    stand_in(f'exec {sys.executable} -m predmoe.worker "$run" > /dev/full 2>&1')
    config = tiny(corpus, objective={})
    run = open_run(config, tmp_path)
    (run.path / "log.txt").write_text("step 25/30, loss 5.495\n")
    with pytest.raises(RunFailed) as failure:
        get_or_train(config, store=tmp_path, report=lambda line: None)
    assert str(failure.value) == (f"run {config.hash} failed: cannot write to the disk of {run.path}, not even to its log: No space left on device; "
                                  "no earlier checkpoint exists; free some space there and run again")  # fmt: skip


def test_a_child_that_ends_without_a_word_is_not_told_by_an_old_one(corpus, tmp_path, stand_in):
    stand_in("exit 3")
    run = open_run(tiny(corpus), tmp_path / "store")
    (run.path / "log.txt").write_text("step 25/30, loss 5.495\n")
    with pytest.raises(RunFailed, match=r"run \w+ failed: exit code 3 without a word in its log \(log: .*log.txt\)"):
        get_or_train(tiny(corpus), store=tmp_path / "store", report=lambda line: None)


def test_children_get_the_threads_of_their_run(corpus, tmp_path, stand_in):
    stand_in(f"sed s/THREADS/$OMP_NUM_THREADS+$MKL_NUM_THREADS/ > $run/$name.json <<'END'\n{stored(config_hash='THREADS')}\nEND")
    configs = [tiny(corpus, threads=threads) for threads in (1, 2)]
    found = get_or_measure(configs, POSTHOC, profile="none", store=tmp_path / "store", report=lambda line: None)
    assert [m["config_hash"] for m in found] == ["1+1", "2+2"]


def test_processors_with_wider_vectors_take_the_same_kernels(corpus, tmp_path, stand_in, monkeypatch):
    stand_in(f"sed s/KERNELS/$ATEN_CPU_CAPABILITY/ > $run/$name.json <<'END'\n{stored(config_hash='KERNELS')}\nEND")
    ask = lambda seed: get_or_measure([tiny(corpus, seed=seed)], POSTHOC, profile="none", store=tmp_path / "store", report=lambda line: None)[0]["config_hash"]  # noqa: E731
    wide = " avx2 " in Path("/proc/cpuinfo").read_text()
    assert ask(0) == ("avx2" if wide else "")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert ask(1) == "default"


def test_progress_is_told_now_and_then(corpus, tmp_path, stand_in, monkeypatch):
    monkeypatch.setattr(runs, "REPORT_SECONDS", 0.05)
    stand_in('echo "step 1/30, loss 9.011"; sleep 0.5; echo "step 2/30"')
    told = []
    get_or_train(tiny(corpus), store=tmp_path / "store", report=told.append)
    assert told[0] == "joint 0.3 topk/input, seed 0: step 1/30, loss 9.011" and told[-1] == "[1/1] joint 0.3 topk/input, seed 0: done"


def test_what_an_earlier_child_said_is_no_progress(corpus, tmp_path, stand_in, monkeypatch):
    """Nor what it was doing when a later one was killed: the log goes on from call to call."""
    monkeypatch.setattr(runs, "REPORT_SECONDS", 0.05)
    stand_in("sleep 0.3; kill -9 $$")
    (open_run(tiny(corpus), tmp_path / "store").path / "log.txt").write_text("predmoe: cannot save step 18: No space left on device\n")
    told = []
    with pytest.raises(RunFailed, match="ended by signal 9, .*, after: starting "):
        get_or_train(tiny(corpus), store=tmp_path / "store", report=told.append)
    assert told[0] == "joint 0.3 topk/input, seed 0: starting"


def test_parallel_below_one_is_refused(corpus, tmp_path, no_children):
    with pytest.raises(ConfigError, match="parallel=0 must be at least 1"):
        get_or_measure([tiny(corpus)], POSTHOC, profile="none", store=tmp_path, parallel=0)


def test_bf16_is_not_held_to_kernels_that_lack_it(corpus, tmp_path, monkeypatch):
    seen = []
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setattr(runs, "same_bits", lambda: {"ATEN_CPU_CAPABILITY": "avx2"})
    monkeypatch.setattr(runs.subprocess, "Popen", lambda command, *, env, **_: seen.append(env.get("ATEN_CPU_CAPABILITY")))
    for dtype in ("float32", "bfloat16"):
        runs._start(runs.open_run(tiny(corpus, dtype=dtype), tmp_path), [])
    assert seen == ["avx2", None]
