"""The program `predmoe`, and `python -m predmoe`: `cli`, for whose import it takes a moment in which Ctrl-C is heard as well."""

import os
import signal
import sys


def main() -> int:
    """Run a command and return its exit code (`cli.main`), 130 where it is interrupted before it has begun."""
    heard = signal.getsignal(signal.SIGINT)
    if heard is signal.default_int_handler:   # else Ctrl-C is ignored, as in a shell's background
        signal.signal(signal.SIGINT, _leave)
    from predmoe.cli import main

    signal.signal(signal.SIGINT, heard)
    return main()


def _leave(*_) -> None:
    """At once, and not by an exception: some of what imports run keeps one to itself."""
    os.write(2, b"predmoe: interrupted before it began\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
