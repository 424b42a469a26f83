"""Child processes of runs: what they say where nothing can be written, and that they do not outlive who waits for them."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from predmoe import children
from predmoe.files import reason


def ended(pid: int) -> bool:
    """Whether a process is gone, be it that nobody has asked yet how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_last_words_that_cannot_be_written_are_in_the_exit_code():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}   # so that a line waits to be written
    code = "import sys; from predmoe import children; print('half a line', end=''); sys.exit(children.last_words('no room'))"
    with open("/dev/full", "w") as full:
        child = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full, env=environment)
    assert children.unsaid(child.returncode) == os.strerror(errno.ENOSPC)
    child = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert (child.returncode, child.stdout) == (children.FAILED, "predmoe: no room\nhalf a line")


@pytest.mark.parametrize("code", [0, 1, children.FAILED, -9])
def test_other_exit_codes_say_nothing_of_the_log(code):
    assert children.unsaid(code) is None


def test_an_error_that_hides_the_systems_own_is_told_by_that():
    hidden, plain = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RuntimeError("shapes differ")
    try:
        try:
            raise hidden
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")   # as torch.save, when it closes what it could not write
    except RuntimeError as error:
        assert reason(error) is hidden
    assert reason(plain) is plain and reason(hidden) is hidden


PARENT = """
import os, subprocess, sys, time
from predmoe import children
child = "from pathlib import Path; from predmoe import children; import sys, time; children.end_with_parent(Path(sys.argv[1]).parent); print('ready', flush=True); time.sleep(60)"
process = subprocess.Popen([sys.executable, "-c", child, sys.argv[1]], stdout=open(sys.argv[1], "w"), env=os.environ | children.work_for_parent())
print(process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how, saved, said", [(signal.SIGTERM, True, "goes on from it"), (signal.SIGKILL, False, "no checkpoint exists yet, so the same command begins anew")])
def test_a_child_ends_with_its_parent_however_that_ends(tmp_path, how, saved, said):
    log = tmp_path / "log.txt"
    if saved:
        (tmp_path / "state.pt").touch()
    with subprocess.Popen([sys.executable, "-c", PARENT, str(log)], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        try:
            deadline = time.monotonic() + 30
            while "ready" not in log.read_text() and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not ended(child)
            parent.send_signal(how)
            while not ended(child) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert ended(child) and said in log.read_text()
        finally:
            parent.kill()
            if not ended(child):
                os.kill(child, signal.SIGKILL)


def test_a_process_that_no_run_started_has_nobody_to_end_with(tmp_path, monkeypatch):
    monkeypatch.delenv(children.PARENT, raising=False)
    monkeypatch.setattr(children.threading, "Thread", lambda **_: pytest.fail("it watches"))
    children.end_with_parent(tmp_path)
