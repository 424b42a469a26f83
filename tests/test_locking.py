"""The folder lock: one holder at a time, dead ones are replaced, living ones are waited for."""

import fcntl
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from predmoe import locking
from predmoe.locking import STALE_SECONDS, FolderLock, alive

SPAWN = multiprocessing.get_context("spawn")


def write_lock(folder, *, pid=None, started="0", host=None, place=None, age=0.0):
    """A lock file as a holder would have left it `age` seconds ago; with another host or place it is another machine's."""
    path = folder / "lock"
    path.write_text(json.dumps({"pid": os.getpid() if pid is None else pid, "started": started, "host": host or socket.gethostname(),
                                "place": place or (locking.place() if host is None else "there")}))  # fmt: skip
    os.utime(path, (time.time() - age,) * 2)
    return path


def is_free(folder) -> bool:
    """Whether somebody who comes now gets the lock without waiting."""
    lock = FolderLock(folder)
    taken = lock._try()
    if taken:
        lock.__exit__()
    return taken


@pytest.fixture
def sleeper():
    """A living process that is not ours to end but for the test's end."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_the_lock_is_held_inside_and_gone_afterwards(tmp_path):
    with FolderLock(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
        assert not is_free(tmp_path)
    assert not (tmp_path / "lock").exists() and is_free(tmp_path)


def test_an_error_inside_frees_the_lock(tmp_path):
    with pytest.raises(ZeroDivisionError), FolderLock(tmp_path):
        1 / 0
    assert is_free(tmp_path)


def test_a_living_holder_is_waited_for_and_named_once(tmp_path, sleeper):
    write_lock(tmp_path, pid=sleeper.pid, started=locking._started(sleeper.pid))
    told, got = [], threading.Event()

    def wait():
        with FolderLock(tmp_path, waiting=told.append, poll_seconds=0.01):
            got.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not got.wait(0.3)
    assert told == [f"process {sleeper.pid} on {socket.gethostname()}"]
    sleeper.kill()
    sleeper.wait()
    assert got.wait(30)
    thread.join()
    assert len(told) == 1


def test_a_holder_that_was_killed_is_replaced_even_before_its_parent_knows(tmp_path):
    script = "import sys, time; from predmoe.locking import FolderLock\nwith FolderLock(sys.argv[1]): print('held', flush=True); time.sleep(600)"
    holder = subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    assert not is_free(tmp_path)
    os.kill(holder.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
    assert is_free(tmp_path)
    assert holder.wait() == -signal.SIGKILL
    holder.stdout.close()


def test_a_reused_process_number_is_not_the_holder(tmp_path, sleeper):
    real = locking._started(sleeper.pid)
    assert alive(write_lock(tmp_path, pid=sleeper.pid, started=real))
    assert not alive(write_lock(tmp_path, pid=sleeper.pid, started=str(int(real) - 1)))
    assert is_free(tmp_path)


def test_a_process_of_this_machine_needs_no_heartbeat(tmp_path, sleeper):
    """It may be stopped or the machine asleep: it lives, and would go on writing."""
    assert alive(write_lock(tmp_path, pid=sleeper.pid, started=locking._started(sleeper.pid), age=100 * STALE_SECONDS))


@pytest.fixture
def clock(monkeypatch):
    """This process's own clock, in seconds, to be moved by hand."""
    now = [1000.0]
    monkeypatch.setattr(locking, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    return now


@pytest.mark.parametrize("ahead", [-7200.0, 0.0, 7200.0])
def test_another_machine_is_alive_as_long_as_it_touches_the_lock_whatever_its_clock_says(tmp_path, clock, ahead):
    path = write_lock(tmp_path, pid=1, host="elsewhere", age=-ahead)
    for _ in range(4):
        assert not is_free(tmp_path)
        clock[0] += 0.8 * STALE_SECONDS
        assert not is_free(tmp_path)
        os.utime(path, ns=(path.stat().st_mtime_ns + 1_000_000,) * 2)   # its heartbeat
    assert not is_free(tmp_path)
    clock[0] += 1.2 * STALE_SECONDS
    assert is_free(tmp_path)


def test_another_holder_is_watched_anew(tmp_path, clock):
    write_lock(tmp_path, pid=1, host="elsewhere", age=100.0)
    assert not is_free(tmp_path)
    clock[0] += 1.2 * STALE_SECONDS
    mtime = (tmp_path / "lock").stat().st_mtime_ns
    os.utime(write_lock(tmp_path, pid=2, host="elsewhere"), ns=(mtime, mtime))   # taken over in the meantime, at the same instant of a coarse clock
    assert not is_free(tmp_path)


@pytest.mark.parametrize("place", ["another boot pid:[1]", None])
def test_a_machine_of_the_same_name_is_not_this_one(tmp_path, sleeper, place):
    """Containers share host names: a process number there means nothing here, nor in a lock that does not say where it is."""
    path = write_lock(tmp_path, pid=sleeper.pid, started="0", place=place or "x")
    if place is None:
        path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != "place"}))
    assert alive(path)
    assert not alive(write_lock(tmp_path, pid=sleeper.pid, started="0"))


def test_a_disk_that_does_not_answer_for_a_moment_costs_no_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(locking, "HEARTBEAT_SECONDS", 0.01)
    asked, lost, real = [], [], locking._holder

    def hangs(path):
        asked.append(path)
        if 2 < len(asked) < 6:
            raise OSError(5, "Input/output error")
        return real(path)

    monkeypatch.setattr(locking, "_holder", hangs)
    with FolderLock(tmp_path, lost=lost.append):
        deadline = time.monotonic() + 30
        while len(asked) < 12:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not lost and not (tmp_path / "lock").exists()


def test_the_heartbeat_keeps_a_lock_fresh(tmp_path, monkeypatch):
    monkeypatch.setattr(locking, "HEARTBEAT_SECONDS", 0.01)
    with FolderLock(tmp_path):
        os.utime(tmp_path / "lock", (0, 0))
        deadline = time.monotonic() + 30
        while time.time() - (tmp_path / "lock").stat().st_mtime > STALE_SECONDS:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_who_has_lost_its_lock_neither_touches_nor_removes_the_new_one(tmp_path, monkeypatch):
    """A machine that slept for minutes comes back to a run that another one has taken over."""
    monkeypatch.setattr(locking, "HEARTBEAT_SECONDS", 0.01)
    lost = []
    with FolderLock(tmp_path, lost=lost.append) as lock:
        partial = write_lock(tmp_path / "..", pid=1, host="elsewhere", age=1000.0)
        partial.replace(tmp_path / "lock")
        lock._thread.join(30)
        assert not lock._thread.is_alive() and not lock.held() and lost == ["process 1 on elsewhere"]
        assert time.time() - (tmp_path / "lock").stat().st_mtime > 900
    assert json.loads((tmp_path / "lock").read_text())["host"] == "elsewhere"


@pytest.mark.parametrize("text", ["", "null", "{}", '{"pid": 1', "[1, 2]", "\0\0\0"])
def test_a_lock_that_cannot_be_read_is_nobodys(tmp_path, text):
    (tmp_path / "lock").write_text(text)
    assert locking.describe(tmp_path / "lock") == "another process"
    assert is_free(tmp_path)


def test_a_folder_removed_meanwhile_does_not_hide_what_happened(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(ZeroDivisionError), FolderLock(folder):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        1 / 0


def compete(folder, seed, rounds, dies):
    """Take and leave the lock `rounds` times; a holder that finds another one inside says so, one that `dies` ends inside."""
    rng = random.Random(seed)
    for i in range(rounds):
        with FolderLock(folder, poll_seconds=0.001), open(folder / "witness", "a") as witness:
            try:
                fcntl.flock(witness, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed by the kernel, so that the dead leave no trace
            except BlockingIOError:
                (folder / f"two-at-a-time-{os.getpid()}").touch()
            count = int((folder / "count").read_text())
            time.sleep(rng.random() * 0.002)
            (folder / "count").write_text(str(count + 1))
            if dies and i == rounds - 1:
                os.kill(os.getpid(), signal.SIGKILL)


def test_of_many_processes_exactly_one_is_inside_though_some_die_there(tmp_path):
    (tmp_path / "count").write_text("0")
    processes = [SPAWN.Process(target=compete, args=(tmp_path, seed, 25, seed % 2 == 1)) for seed in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [p.exitcode for p in processes] == [0, -signal.SIGKILL] * 4
    assert not list(tmp_path.glob("two-at-a-time-*"))
    assert int((tmp_path / "count").read_text()) == 8 * 25  # no increment was lost
    assert is_free(tmp_path)
