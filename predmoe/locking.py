"""A lock on a folder that survives kill -9 and works for several machines on one shared disk.

The holder writes who it is and touches the file now and then. A lock whose holder is dead (no such process on this
machine, or no heartbeat from another one in STALE_SECONDS of watching) may be taken over; who has lost its lock is told so and
leaves it alone. Machines' clocks are never compared: each waits by its own for the file's time to change.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path

from predmoe.files import parse_json

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0


class FolderLock:
    """Context manager: waits until the folder's lock is free or its holder is dead, then holds it.

    `waiting(description)` is called once when another living process holds it. `claim()` takes it without waiting, `release()`
    gives it back. `name`: of the lock, for folders that have several. `lost(description)` is called, in a thread of its own, where
    another one has taken the lock while this process did not run (its machine slept, say): it must not write there any more.
    """

    def __init__(self, folder: Path, *, waiting=lambda who: None, lost=lambda who: None, poll_seconds: float = 0.5, name: str = "lock"):
        self.path = Path(folder) / name
        self.waiting, self.lost, self.poll_seconds = waiting, lost, poll_seconds
        self._me = {"pid": os.getpid(), "started": _started(os.getpid()), "host": socket.gethostname(), "place": place()}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> FolderLock:
        told = False
        while not self.claim():
            if not told:
                self.waiting(describe(self.path))
                told = True
            time.sleep(self.poll_seconds)
        return self

    def held(self) -> bool:
        """Whether the lock is still this process's."""
        return _holder(self.path) == self._me

    def check(self) -> None:
        """Call `lost` where the lock is another one's by now: before a write, since the next heartbeat may come after it."""
        with contextlib.suppress(OSError):   # a shared disk that does not answer for a moment: the next beat asks again
            if not self.held():
                self.lost(describe(self.path))

    def claim(self) -> bool:
        """Hold the lock from now on, where nobody living does; returns whether it is held."""
        if not self._try():
            return False
        self._stop.clear()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()
        return True

    def __exit__(self, *_):
        self.release()

    def release(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(FileNotFoundError), self._guarded():
            if self.held():
                self.path.unlink()

    def _guarded(self):
        """A context in which nobody else looks at the lock or changes it; the kernel ends it however its holder ends."""
        guard = open(self.path.with_name(f"{self.path.name}.guard"), "w")
        fcntl.flock(guard, fcntl.LOCK_EX)
        return guard

    def _try(self) -> bool:
        with self._guarded():
            if alive(self.path):
                return False
            partial = self.path.with_name(f"{self.path.name}.partial")
            partial.write_text(json.dumps(self._me))
            partial.replace(self.path)
            return True

    def _beat(self):
        while not self._stop.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):   # a shared disk that does not answer for a moment: the next beat asks again
                if not self.held():
                    return self.lost(describe(self.path))
                os.utime(self.path)


_beats: dict[Path, tuple[tuple, float]] = {}   # of locks held elsewhere: holder and time of the file, and since when they are known here


def alive(path: Path) -> bool:
    """Whether the holder of the lock file still lives; a lock that cannot be read is nobody's.

    A holder elsewhere is dead when its heartbeat has not moved for STALE_SECONDS since this process first looked.
    """
    holder = _holder(path)
    if holder is None:
        return False
    if holder.get("place") == place():
        return _started(holder["pid"]) == holder["started"] is not None
    beat, now = (tuple(holder.values()), path.stat().st_mtime_ns), time.monotonic()
    if _beats.get(path, (None,))[0] != beat:
        _beats[path] = beat, now
    return now - _beats[path][1] < STALE_SECONDS


def place() -> str:
    """Where process numbers mean what they mean here: this machine since it was started, and the container. (Two may share a host name.)"""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def describe(path: Path) -> str:
    holder = _holder(path)
    return f"process {holder['pid']} on {holder['host']}" if holder else "another process"


def _holder(path: Path) -> dict | None:
    """Who holds the lock, or None where the file is missing or does not say so."""
    try:
        holder = parse_json(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return holder if isinstance(holder, dict) and {"pid", "started", "host"} <= holder.keys() else None


def _started(pid: int) -> str | None:
    """Start time of a living process as the kernel counts it, so that a reused number is not taken for the holder.

    None for a process that has ended with all its threads, even if its parent has not yet asked how.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, threads, started = fields[0], int(fields[17]), fields[19]
    return None if state in "ZX" and threads <= 1 else started
