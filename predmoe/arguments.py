"""What the command line takes: numbers, paths and devices. Nonsense is one sentence that names its option, before any work is done."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from .strict import ConfigError
from .strict import device as known_device


LARGEST = 1e15   # of a number, and DIGITS of a whole one: nothing here is beyond them, and messages tell numbers in full
DIGITS = 30


class Parser(argparse.ArgumentParser):
    """argparse, with what it cannot use as a ConfigError of one sentence instead of a page of usage; the parsers of its subcommands are of this kind, too."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.register("type", int, whole)   # of every `type=int`

    def _print_message(self, message: str, file=None):
        print(message, end="", file=file or sys.stderr, flush=True)   # argparse keeps a failure to itself

    def error(self, message: str):
        raise ConfigError(f"{message.removeprefix('argument ')} ({self.prog} --help lists what it takes)")


def number(least: float | None = None, *, above: float | None = None, infinite: bool = False) -> Callable[[str], float]:
    """An argument's type: a finite number, of at least `least`, or more than `above`; `infinite`: inf is one, too."""
    bound = f" of at least {least:g}" if least is not None else f" above {above:g}" if above is not None else ""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        usable = math.isfinite(value) or (infinite and value == math.inf)
        if not usable or (least is not None and value < least) or (above is not None and value <= above):
            raise argparse.ArgumentTypeError(f"{_cut(text)} is not a {'' if infinite else 'finite '}number{bound}")
        if LARGEST < abs(value) < math.inf:
            raise argparse.ArgumentTypeError(f"{_cut(text)} is too large: at most {LARGEST:g}")
        return value

    return read


def whole(text: str) -> int:
    """An argument's type: a whole number of DIGITS digits at most. Raises ValueError for what is none, as int does."""
    if len(text.strip()) > DIGITS:   # Python itself refuses thousands of them
        raise argparse.ArgumentTypeError(f"{_cut(text)} is not a whole number of at most {DIGITS} digits")
    return int(text)


def unused(given: Mapping[str, object], why: str) -> None:
    """Raise ConfigError for options that would be ignored, and `why`. `given`: option -> its value, None or an empty list where it was not given."""
    if idle := [option for option, value in given.items() if value is not None and value != []]:
        it = "it" if len(idle) == 1 else "them"
        raise ConfigError(f"{', '.join(idle)} would have no effect {why}, or leave {it} out")


def _cut(text: str) -> str:
    return text if len(text) <= DIGITS + 10 else f"{text[:DIGITS]}..."


def text(given: str) -> str:
    """An argument's type: text, which bytes that are no UTF-8 are not: a tokenizer would put something else in their place."""
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"it is not UTF-8 text: character {error.start + 1} cannot be read") from None
    return given


def path(text: str) -> Path:
    """An argument's type: a path, which an empty text (of a shell's unset variable, say) is not."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: name a file or a folder, or leave the option out")
    return Path(text)


def folder(text: str) -> Path:
    """An argument's type: a folder to write in, which is there or can be made."""
    found = path(text)
    over = next((part for part in (found, *found.parents) if part.exists()), found)
    if over.exists() and not over.is_dir():
        raise argparse.ArgumentTypeError(f"{over} is a file: name a folder")
    return found


def device(text: str) -> str:
    """An argument's type: cpu, cuda or cuda:N, by the rule of the configuration."""
    try:
        known_device(text)
        return text
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
