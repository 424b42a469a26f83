"""What a long task is doing, while it runs: on a terminal one line that is written over, elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

TERMINAL_SECONDS = 5.0   # between two looks at a task: where the line is written over
LOG_SECONDS = 60.0       # and where it stays
LONGEST = 300            # characters of what was printed last


class Heard(io.TextIOBase):
    """A text stream that remembers the last line with anything in it and passes all on to `onward`, if there is one."""

    def __init__(self, onward: TextIO | None = None):
        self.onward, self._begun, self._whole = onward, "", ""

    @property
    def last(self) -> str:
        return (self._begun.strip() or self._whole)[:LONGEST]

    def write(self, text: str) -> int:
        *whole, self._begun = (self._begun + text).replace("\r", "\n").split("\n")
        self._whole = next((line.strip() for line in reversed(whole) if line.strip()), self._whole)
        self._begun = self._begun[-LONGEST:]
        return len(text) if self.onward is None else self.onward.write(text)

    def flush(self) -> None:
        if self.onward is not None:
            self.onward.flush()


@contextlib.contextmanager
def told(head: str, heard: Heard, say: Callable[[str], None], *, seconds: float | None = None) -> Iterator[None]:
    """Within, tell now and then that `head` still runs, for how long, and what it printed last. `seconds`: between two tellings.

    Where standard output is a terminal and nothing else is written to it, one line is written over and is gone at the end; elsewhere `say` gets a line.
    """
    over = sys.stdout.isatty() and heard.onward is None
    seconds = seconds or (TERMINAL_SECONDS if over else LOG_SECONDS)
    began, ended = time.monotonic(), threading.Event()

    def tell():
        while not ended.wait(seconds):
            line = f"{head}: {time.monotonic() - began:.0f} s so far{f'; {heard.last}' if heard.last else ''}"
            with contextlib.suppress(OSError):   # nobody reads any longer, which the task itself may find out
                if over:
                    width = shutil.get_terminal_size().columns - 1
                    print(f"\r\x1b[K{line if len(line) <= width else line[: width - 1] + '…'}", end="", flush=True)
                else:
                    say(line)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if over:
            print("\r\x1b[K", end="", flush=True)
