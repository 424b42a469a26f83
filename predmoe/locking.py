"""A lock on a folder that survives kill -9 and works for several machines on one shared disk.

The holder writes who it is and touches the file now and then. A lock whose holder is dead (no such process on this
machine, or no heartbeat for STALE_SECONDS) may be taken over.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0


class FolderLock:
    """Context manager: waits until the folder's lock is free or its holder is dead, then holds it.

    `waiting(description)` is called once when another living process holds it.
    """

    def __init__(self, folder: Path, *, waiting=lambda who: None, poll_seconds: float = 0.5):
        self.path = Path(folder) / "lock"
        self.waiting, self.poll_seconds = waiting, poll_seconds
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> FolderLock:
        told = False
        while not self._try():
            if not told:
                self.waiting(describe(self.path))
                told = True
            time.sleep(self.poll_seconds)
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.path.unlink(missing_ok=True)

    def _try(self) -> bool:
        # The guard makes "look, then take" one step; the kernel frees it however its holder ends.
        with open(self.path.with_name("lock.guard"), "w") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            if self.path.exists() and alive(self.path):
                return False
            partial = self.path.with_name("lock.partial")
            partial.write_text(json.dumps({"pid": os.getpid(), "started": _started(os.getpid()), "host": socket.gethostname()}))
            partial.replace(self.path)
            return True

    def _beat(self):
        while not self._stop.wait(HEARTBEAT_SECONDS):
            os.utime(self.path)


def alive(path: Path) -> bool:
    """Whether the holder of the lock file still lives; a lock that cannot be read is nobody's."""
    try:
        holder = json.loads(path.read_text())
        age = time.time() - path.stat().st_mtime
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    if holder["host"] == socket.gethostname():
        return _started(holder["pid"]) == holder["started"] is not None
    return age < STALE_SECONDS


def describe(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return "another process"
    return f"process {holder['pid']} on {holder['host']}"


def _started(pid: int) -> str | None:
    """Start time of a process as the kernel counts it, so that a reused number is not taken for the holder."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None
