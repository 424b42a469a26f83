"""What is told of a long task: the last line that it printed, over and over on a terminal, now and then elsewhere."""

import io
import os
import time

import pytest

from predmoe import progress
from predmoe.progress import Heard, told


@pytest.mark.parametrize("written, last", [
    ([], ""), (["step 1\n"], "step 1"), (["step 1\nstep ", "2"], "step 2"), (["step 1\n\n  \n"], "step 1"), (["10%\r20%\r"], "20%"), (["a\n", "x" * 5000], "x" * progress.LONGEST),
])  # fmt: skip
def test_the_last_line_with_anything_in_it_is_remembered_and_all_is_passed_on(written, last):
    onward = io.StringIO()
    heard, alone = Heard(onward), Heard()
    for text in written:
        heard.write(text), alone.write(text)
    assert heard.last == alone.last == last and onward.getvalue() == "".join(written)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def work(heard, until, *lines):
    """Print the lines and wait until something is told of the last."""
    heard.write("\n".join(lines) + "\n")
    deadline = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline, "nothing was told"
        time.sleep(0.005)


def test_a_terminal_has_one_line_that_is_cut_to_its_width_and_is_gone_at_the_end(monkeypatch):
    monkeypatch.setattr(progress.sys, "stdout", screen := Terminal())
    monkeypatch.setattr(progress.shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((40, 24)))
    heard, said = Heard(), []
    with told("[1/3] 01_mechanism", heard, said.append, seconds=0.01):
        work(heard, lambda: "…" in screen.getvalue(), "baseline: loss 5.5, and more than there is room for")
    shown = screen.getvalue().split("\r\x1b[K")
    assert said == [] and "\n" not in screen.getvalue() and shown[-1] == "" and max(map(len, shown)) == 39 and shown[-2].endswith("…")


@pytest.mark.parametrize("stdout, verbose", [(io.StringIO, False), (Terminal, True)], ids=["a log", "a terminal that shows what is printed"])
def test_elsewhere_a_line_is_said_now_and_then(monkeypatch, stdout, verbose):
    monkeypatch.setattr(progress.sys, "stdout", screen := stdout())
    heard, said = Heard(io.StringIO() if verbose else None), []
    with told("[1/3] 01_mechanism", heard, said.append, seconds=0.01):
        work(heard, lambda: any(line.endswith("; step 2") for line in said), "step 1", "step 2")
    many = len(said)
    time.sleep(0.05)
    assert said[-1] == "[1/3] 01_mechanism: 0 s so far; step 2" and len(said) == many and screen.getvalue() == ""


def test_a_log_is_not_flooded_and_a_terminal_not_left_alone():
    assert progress.LOG_SECONDS >= 60 and progress.TERMINAL_SECONDS <= 20


def test_an_error_passes_and_nothing_is_told_after_it():
    said = []
    with pytest.raises(ValueError, match="mine"), told("x", Heard(), said.append, seconds=0.001):
        raise ValueError("mine")
    many = len(said)
    time.sleep(0.02)
    assert len(said) == many
