"""How a run's child process ends: with a sentence in its log, or, where the log cannot be written, with an exit code that says why; and with its parent."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

from predmoe import variables

FAILED = 2
SILENT = 64   # plus the errno of the write that failed: the exit code of a child that could not write its last words
PARENT = "PREDMOE_PARENT"   # the process without which the child has nobody to work for
LOOK_SECONDS = 0.5
MARK = "predmoe: "   # what every sentence on standard error begins with


def last_words(sentence: str) -> int:
    """Write a failed child's sentence and return its exit code. On a full disk there may be no room for it: then the exit code has to do."""
    try:
        print(f"{MARK}{sentence}", file=sys.stderr, flush=True)
        return FAILED
    except OSError as error:
        _silence()
        return SILENT + error.errno


def unsaid(exit_code: int) -> str | None:
    """Why a child could not write its last words, from its exit code; None where it could."""
    return os.strerror(exit_code - SILENT) if SILENT < exit_code < 256 else None


def _silence() -> None:
    """What is still held back for the log is dropped: Python would try to write it once more, and end with an exit code of its own."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())


def remains(folder: Path) -> str:
    """What is left of a run whose process was ended, and what to do: the end of every sentence about that."""
    if (folder / "finished.json").exists():
        return "its training is done, and the same command does the rest"
    if any((folder / name).exists() for name in ("state.pt", "state.json")):
        return "the last checkpoint stays, and the same command goes on from it"
    return "no checkpoint exists yet, so the same command begins anew"


def say(line: str) -> None:
    """A line of progress in the log. Raises OSError where it cannot be written: the disk is full, and the next checkpoint will not fit either."""
    print(line, flush=True)


def work_for_parent() -> dict[str, str]:
    """What the environment tells a child, so that it ends with this process."""
    return {PARENT: str(os.getpid())}


def end_with_parent(folder: Path) -> None:
    """End this process, which works on the run in `folder`, when the one that started it has ended, however it did, kill -9 included: nobody would wait for the result.

    Without effect where no parent of ours started it, as under torchrun on a cluster. What was saved stays, and a later call goes on from it.
    """
    parent = variables.whole(PARENT)
    os.environ.pop(PARENT, None)
    if parent is None:
        return

    def watch():
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        with contextlib.suppress(OSError):
            say(f"the process that started this run has ended, and so does this one; {remains(folder)}")
        os._exit(FAILED)

    threading.Thread(target=watch, daemon=True).start()
