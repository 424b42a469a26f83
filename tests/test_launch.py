"""How the processes of a run end, one of them or all: what is said, and what is left."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed
from tiny_runs import folder_of, lines, tiny
from torch.distributed.elastic.multiprocessing.api import ProcessFailure, SignalException

from predmoe import distributed, launch, locking, runs, sharding, worker
from predmoe.children import remains
from predmoe.config import ConfigError, to_dict
from predmoe.files import write_json
from predmoe.launch import first, sentence
from predmoe.train import Trainer, TrainingError

KEPT = "the last checkpoint stays, and the same command goes on from it"


def test_a_run_that_another_machine_has_taken_over_is_left_at_once(corpus, tmp_path):
    """A machine that slept: its lock has gone to another one, which works on the run; two that write would spoil it."""
    folder = folder_of(tiny(corpus, steps=1_000_000), tmp_path / "run")
    child = subprocess.Popen([sys.executable, "-m", "predmoe.worker", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not (folder / "timing.json").exists():
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.05)
    other = json.dumps({"pid": 1, "started": "1", "host": "elsewhere", "place": "there"})
    (folder / "taken").write_text(other)
    (folder / "taken").replace(folder / "lock")
    said = child.communicate(timeout=60)[1]
    assert child.returncode == 2 and said.splitlines()[-1].startswith(f"predmoe: process 1 on elsewhere has taken over the run in {folder}, since nothing had been heard")
    assert (folder / "lock").read_text() == other


def test_a_job_that_is_submitted_again_waits_until_its_last_one_is_surely_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(locking, "STALE_SECONDS", 0.2)
    (tmp_path / "lock").write_text(json.dumps({"pid": 1, "started": "1", "host": "elsewhere", "place": "there"}))
    told = []
    lock = locking.FolderLock(tmp_path, waiting=told.append)
    worker.claim(lock, look_seconds=0.01)
    assert told == ["process 1 on elsewhere"] and lock.held()
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on .* works on the run in .*; wait until it has ended"):
        worker.claim(locking.FolderLock(tmp_path), look_seconds=0.01)
    lock.release()


def test_a_process_that_is_killed_ends_the_job_with_a_sentence_and_little_is_lost(corpus, tmp_path):
    """Through get_or_train: kill -9 of one rank, the reason in RunFailed, and the second call goes on from the last checkpoint."""
    config = tiny(corpus, steps=100_000, eval_every=1_000_000)   # until it is killed
    folder = tmp_path / config.hash
    killed = {}

    def kill():
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            ranks = {p.environ().get("RANK"): p for p in psutil.Process().children(recursive=True) if "predmoe.worker" in p.cmdline()} if sharding.saved(folder) else {}
            if "1" in ranks:
                killed["step"] = sharding.saved(folder)["step"]
                return os.kill(ranks["1"].pid, signal.SIGKILL)
            time.sleep(0.05)

    watcher = threading.Thread(target=kill)
    watcher.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "_start", functools.partial(runs._start, options=("--checkpoint-seconds", "0.3")))
        with pytest.raises(runs.RunFailed, match=r"process 1 was ended by signal 9, so the others were stopped; the last checkpoint stays"):
            runs.get_or_train(config, store=tmp_path, nproc=2, engine="fsdp", report=lambda line: None)
    watcher.join()
    pointer = sharding.saved(folder)
    assert pointer["step"] >= killed["step"] > 0
    assert json.loads((folder / "provenance.json").read_text())["processes"] == [{"processes": 2, "engine": "fsdp", "device": "cpu"}]
    short = to_dict(config) | {"train": to_dict(config)["train"] | {"steps": pointer["step"] + 2}}
    write_json(folder / "config.json", short)   # the same run, ended soon
    assert worker.main([str(folder)]) == 0
    assert lines(folder)[-1]["step"] == pointer["step"] + 2
    assert json.loads((folder / "provenance.json").read_text())["processes"][-1] == {"processes": 1, "engine": "one process", "device": "cpu"}


def test_the_cause_is_told_and_not_what_followed_from_it(tmp_path):
    """A process that lost its peer fails as well, perhaps in the same instant: neither hides the one that was killed nor the one that says why."""
    lost = SimpleNamespace(exitcode=1, message="To enable traceback see: ...", timestamp=1)
    killed = SimpleNamespace(exitcode=-9, message="Signal 9 (SIGKILL) received", timestamp=2)
    refused = SimpleNamespace(exitcode=2, message="ConfigError: lr=0 must be positive\nmore", timestamp=2)
    assert sentence(*first({0: lost, 1: killed}), left=KEPT) == (
        "process 1 was ended by signal 9, so the others were stopped; the last checkpoint stays, and the same command goes on from it")
    assert sentence(*first({0: lost, 3: refused}), left=KEPT).startswith("process 3 ended with exit code 2 (ConfigError: lr=0 must be positive), so")
    ended = SimpleNamespace(exitcode=-15, message="Signal 15 (SIGTERM) received", timestamp=0)   # by the launcher, or by a person
    assert first({0: ended, 3: refused}) == (3, refused) and first({0: ended, 1: killed}) == (1, killed) and first({0: lost, 1: ended}) == (1, ended)
    assert sentence(*first({0: lost}), left=remains(tmp_path)) == "process 0 ended with exit code 1, so the others were stopped; no checkpoint exists yet, so the same command begins anew"


def test_what_a_process_reported_is_told_without_its_traceback(tmp_path, monkeypatch):
    """What torchrun hands on of a report holds the call stack as well."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    try:
        raise TrainingError("cannot save step 2: No space left on device")
    except TrainingError as error:
        distributed.report(error)
    failure = ProcessFailure(local_rank=0, pid=os.getpid(), exitcode=2, error_file=str(tmp_path / "error.json"))
    assert sentence(*first({0: failure}), left=KEPT) == f"process 0 ended with exit code 2 (TrainingError: cannot save step 2: No space left on device), so the others were stopped; {KEPT}"


def test_a_launcher_that_is_stopped_says_so(tmp_path, monkeypatch, capsys):
    """As a job is by its scheduler: torch's launcher has ended its processes by then, and raises an error of its own."""
    def stopped(*_):
        raise SignalException("Process 7 got signal: 15", sigval=signal.SIGTERM)

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *_: stopped)
    monkeypatch.setattr(launch, "work_for_parent", dict)   # which the environment would keep
    (tmp_path / "state.json").touch()
    assert launch.main(["--nproc", "2", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"predmoe: stopped by SIGTERM; {KEPT}\n"


def nodes(folder, *options):
    """The two processes of a run, as on two nodes whose launchers do not know of each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = os.environ | {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [subprocess.Popen([sys.executable, "-m", "predmoe.worker", str(folder), *options], env=both | {"RANK": str(rank)}, stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE, text=True) for rank in (0, 1)]  # fmt: skip


@pytest.mark.parametrize("engine, killed", [("fsdp", 1), ("ddp", 0)])
def test_where_a_node_dies_the_other_ends_with_a_sentence_and_both_go_on_from_the_checkpoint(corpus, tmp_path, engine, killed):
    folder = folder_of(tiny(corpus, steps=100_000, eval_every=1_000_000), tmp_path / "run")
    pair = nodes(folder, "--engine", engine, "--checkpoint-seconds", "0.3")
    deadline = time.monotonic() + 200
    while not any((folder / name).exists() for name in ("state.json", "state.pt")):
        assert time.monotonic() < deadline and all(process.poll() is None for process in pair)
        time.sleep(0.05)
    pair[killed].kill()
    said = pair[1 - killed].communicate(timeout=100)[1].splitlines()
    pair[killed].communicate()
    assert pair[1 - killed].returncode == 2
    (mine,) = [line for line in said if line.startswith("predmoe: ")]
    assert mine.startswith("predmoe: another process of this run has ended, or cannot be reached any more (") and mine.endswith(f"; {KEPT}") and "\U0001f3d6" not in mine
    assert not any("Traceback" in line for line in said)
    pair = nodes(folder, "--engine", engine, "--pause-after", "0")
    assert [process.communicate(timeout=200) and process.returncode for process in pair] == [0, 0]


def test_a_lost_connection_is_no_full_disk(tmp_path):
    """All processes write a checkpoint together; where one dies meanwhile, nobody is told to free some space."""
    two = object.__new__(distributed.DistributedTrainer)
    two.owned, two.step, two.folder = lambda: None, 3, tmp_path
    lost = RuntimeError("[/x/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:2442: Connection reset by peer. This is typically caused by")
    with pytest.raises(RuntimeError) as found, two._saving():
        raise lost
    assert found.value is lost and distributed.connection_lost(lost) and distributed.connection_lost(torch.distributed.DistBackendError("NCCL"))
    assert "(Read error [127.0.0.1]:2442: Connection reset by peer)" in distributed.lost_sentence(lost, KEPT)
    with pytest.raises(TrainingError, match="cannot save step 3 .* No space left on device.*free some space"), two._saving():
        raise OSError(28, "No space left on device")
    assert not distributed.connection_lost(RuntimeError("No space left on device"))


# --------------------------------------------------------------------------------------- a run that became another one's


def test_who_has_lost_the_run_writes_nothing_any_more(corpus, tmp_path):
    """Between two heartbeats, too: the step that was interrupted ends first and would be logged and saved."""
    folder = folder_of(tiny(corpus), tmp_path / "run")
    trainer = Trainer(tiny(corpus), folder, pause_after=0.0)
    trainer.train()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    class Gone(BaseException):   # the worker ends its process instead
        pass

    def lost(who):
        raise Gone(who)

    lock = locking.FolderLock(folder, lost=lost)
    with lock:
        later = Trainer(tiny(corpus), folder, owned=lock.check, checkpoint_seconds=0.0)
        later.restore()
        lock.path.write_text(json.dumps({"pid": 1, "started": "1", "host": "elsewhere", "place": "there"}))
        for write in (later.save, lambda: later.log(terms={}), later.train):
            with pytest.raises(Gone, match="process 1 on elsewhere"):
                write()
    assert {path: path.read_bytes() for path in before} == before


def test_a_checkpoint_is_not_spoilt_by_who_was_stopped_while_writing_one(corpus, tmp_path):
    """It still has the file open that it had begun, and goes on writing when it wakes up."""
    folder = folder_of(tiny(corpus), tmp_path / "run")
    with open(folder / "state.partial", "wb") as sleeper:
        sleeper.write(b"begun")
        trainer = Trainer(tiny(corpus), folder, pause_after=0.0)
        trainer.train()
        saved = (folder / "state.pt").read_bytes()
        sleeper.write(b"and ended" * 1000)
    assert (folder / "state.pt").read_bytes() == saved and not (folder / "state.partial").exists()
