"""Workers on one store: every run is done once, whoever dies."""

import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import refused
from team import CONTEXT
from tiny_runs import POSTHOC, finished, results, stored, tiny

from predmoe import cli, fleet, runs
from predmoe.config import tier
from predmoe.locking import alive

# A run's child process in small: it holds the run's lock, takes its time and leaves a measurement; witness says who did what.
CHILD = """
import os, random, sys, time
from pathlib import Path
from predmoe.locking import FolderLock
folder, measured, name = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
def say(word):
    with open(folder.parent / "witness", "a") as file:
        file.write(f"{word} {folder.name}\\n")
with FolderLock(folder, poll_seconds=0.01):
    if not (folder / f"{name}.json").exists():
        say("begin")
        time.sleep(random.random() * 0.3)
        if (folder / "broken").exists():
            sys.exit("a broken run")
        partial = folder / f"{os.getpid()}.partial"
        partial.write_text(measured)
        say("end")
        partial.replace(folder / f"{name}.json")
"""


def small(run, measurements, **_):
    log = open(run.path / "log.txt", "a")
    return subprocess.Popen([sys.executable, "-c", CHILD, str(run.path), stored(), *map(runs.measurement_name, measurements)], stdout=log, stderr=log)


def worker(environment, path, wanted, store, start, options):
    """A worker in a session of its own, so that it can be ended with its children, as a machine is."""
    os.setsid()
    os.environ.update(environment)
    sys.path[:] = path
    runs.POLL_SECONDS, fleet.LOOK_SECONDS = 0.02, 0.05
    runs._start = start or functools.partial(runs._start, options=options)
    try:
        with (store / f"said-{os.getpid()}").open("a") as said:
            fleet.work(wanted, store=store, report=lambda line: print(line, file=said))
    except runs.RunFailed as error:
        (store / f"failed-{os.getpid()}").write_text(str(error))
        sys.exit(3)


def started(count, wanted, store, start=small, options=()):
    processes = [CONTEXT.Process(target=worker, args=(dict(os.environ), list(sys.path), wanted, store, start, options)) for _ in range(count)]
    for process in processes:
        process.start()
    return processes


def until(condition, what):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def witness(store) -> list[list[str]]:
    file = store / "witness"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize("seed", [0, 1])
def test_of_thirty_runs_each_is_done_once_though_a_worker_is_killed(tmp_path, seed):
    wanted = [(tier("smoke", seed=i), [POSTHOC]) for i in range(30)]
    workers = started(3, wanted, tmp_path)
    when = random.Random(seed).randrange(5, 20)
    until(lambda: len(witness(tmp_path)) >= when, "no worker works")
    os.killpg(workers[seed % 3].pid, signal.SIGKILL)
    for process in workers:
        process.join(240)
    assert sorted(process.exitcode for process in workers) == [-signal.SIGKILL, 0, 0]
    said = witness(tmp_path)
    ended = [run for word, run in said if word == "end"]
    begun = [run for word, run in said if word == "begin"]
    hashes = {config.hash for config, _ in wanted}
    assert set(ended) == set(begun) == hashes
    # Only the run that the dead worker was at may have been begun twice, or have ended unseen in its last instant.
    assert len(ended) <= len(begun) <= len(hashes) + 1
    assert all(runs.Run(tmp_path / config.hash, config).measurement(POSTHOC) for config, _ in wanted)
    dead = workers[seed % 3].pid   # its last run may have been done but for giving the claim back
    assert all(json.loads(claim.read_text())["pid"] == dead and not alive(claim) for claim in tmp_path.glob("*/lock.claim"))
    assert not list(tmp_path.glob("failed-*"))


def test_a_run_that_fails_stops_nobody_and_is_told_at_the_end(tmp_path):
    wanted = [(tier("smoke", seed=i), [POSTHOC]) for i in range(4)]
    broken = runs.open_run(wanted[1][0], tmp_path).path
    (broken / "broken").touch()
    workers = started(2, wanted, tmp_path)
    for process in workers:
        process.join(240)
    assert [process.exitcode for process in workers] == [3, 3]   # each has tried it
    assert all(f"run {wanted[1][0].hash} failed: a broken run" in file.read_text() for file in (*tmp_path.glob("failed-*"), *tmp_path.glob("said-*")))   # at once and at the end
    assert sorted(run for word, run in witness(tmp_path) if word == "end") == sorted(config.hash for i, (config, _) in enumerate(wanted) if i != 1)


def test_real_runs_are_taken_over_to_the_same_bits(corpus, tmp_path):
    """Two workers, two runs, the real child processes: one worker is killed with its child, the other does both."""
    wanted = [(tiny(corpus, seed=seed, steps=60), []) for seed in (0, 1)]
    folders = [tmp_path / config.hash for config, _ in wanted]
    workers = started(2, wanted, tmp_path, start=None, options=("--checkpoint-seconds", "0"))
    holders: dict[Path, int] = {}

    def both_at_work():
        for folder in folders:
            if (folder / "state.pt").exists() and (folder / "lock.claim").exists():
                holders[folder] = json.loads((folder / "lock.claim").read_text())["pid"]
        return any(process.pid in holders.values() for process in workers)

    until(both_at_work, "no worker has begun")
    (folder, pid), *_ = holders.items()
    os.killpg(pid, signal.SIGKILL)
    for process in workers:
        process.join(240)
    assert sorted(process.exitcode for process in workers) == [-signal.SIGKILL, 0]
    for i, ((config, _), place) in enumerate(zip(wanted, folders)):
        assert results(place) == results(finished(config, tmp_path / f"alone {i}"))
    assert "resumed at step" in (folder / "log.txt").read_text()


def test_a_run_that_was_taken_over_while_the_machine_slept_has_not_failed(tmp_path, monkeypatch):
    wanted = [(tier("smoke", seed=0), [POSTHOC])]
    folder = runs.open_run(wanted[0][0], tmp_path).path

    def slept(*_, **__):   # another worker has the claim by now, and does the run
        (folder / "lock.claim").write_text(json.dumps({"pid": 1, "started": "1", "host": "elsewhere", "place": "there"}))
        (folder / f"{runs.posthoc_name(POSTHOC)}.json").write_text(stored())
        raise runs.RunFailed("the run was taken over")

    monkeypatch.setattr(fleet, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(runs, "measure_missing", slept)
    assert fleet.work(wanted, store=tmp_path, report=lambda line: None) == 0
    assert (folder / "lock.claim").exists()   # the other one's


def test_of_a_fine_tune_every_worker_makes_one_process(tmp_path, monkeypatch):
    found, told = [], []
    tuned = tier("smoke", finetune={"checkpoint": "somewhere", "rank": 4})
    wanted = [(tuned, [POSTHOC]), (tier("smoke"), [POSTHOC])]

    def measure(jobs, *, store, nproc, **_):
        found.append(nproc)
        (runs.open_run(jobs[0][0], store).path / f"{runs.posthoc_name(POSTHOC)}.json").write_text(stored())

    monkeypatch.setattr(runs, "measure_missing", measure)
    assert fleet.work(wanted, store=tmp_path, report=told.append, nproc=2) == 2
    assert found == [1, 2] and "by one process as every fine-tune" in told[0] and "by one process" not in told[1]


def test_the_command_refuses_what_it_cannot_mean(capsys):
    assert cli.main(["plan", "--profile", "smoke", "--worker"]) == 2
    assert "write --run --worker" in capsys.readouterr().err
    assert cli.main(["plan", "--profile", "smoke", "--nproc", "0"]) == 2
    assert "--nproc 0" in capsys.readouterr().err
    for wrong, said in ((["--run", "--nproc", "2"], "--nproc would have no effect here: give --run --worker"),
                        (["--engine", "fsdp"], "--engine would have no effect on a run of one process: give --nproc"),
                        (["--run", "--worker", "--parallel", "2"], "--parallel would have no effect on a worker, which has one run at a time")):
        refused(capsys, ["plan", "--profile", "smoke", *wrong], said)


def test_the_command_works_off_what_is_missing(monkeypatch, tmp_path, capsys):
    """Every run of the smoke profile's first notebook, claimed and measured as the plan says."""
    monkeypatch.setenv("PREDMOE_STORE", str(tmp_path))
    monkeypatch.setattr(runs, "_start", small)
    monkeypatch.setattr(runs, "POLL_SECONDS", 0.01)
    arguments = ["plan", "--profile", "smoke", "--only", "01", "--run", "--worker"]
    assert cli.main(arguments) == 0
    count = len({run for word, run in witness(tmp_path) if word == "end"})
    assert count >= 2 and f"runs done by this worker: {count}; nothing is left" in capsys.readouterr().err
