"""What environment variables say, read strictly: nonsense is one sentence that names the variable, where a library would show a traceback."""

from __future__ import annotations

import os
from pathlib import Path

from predmoe.strict import ConfigError

MOST_THREADS = 4096
FOLDERS = ("PREDMOE_OUTPUTS", "PREDMOE_STORE", "PREDMOE_CACHE", "PREDMOE_TRACES", "PREDMOE_EVAL_DATA")
THREADS = ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
TEAM = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")   # what torchrun tells each process that it starts


def whole(name: str, default: int | None = None, *, least: int = 0, most: int = 2**31 - 1) -> int | None:
    """The whole number from `least` to `most` that the variable `name` holds; `default` where it is not set, or empty. Raises ConfigError for all else."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ConfigError(f"the environment variable {name}={text[:40]!r} must be a whole number from {least} to {most}: mend it, or unset it")
    return int(text)


def threads() -> int | None:
    """OMP_NUM_THREADS, of a list for nested levels the first; None where it is not set."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if first and (not first.isdecimal() or not 1 <= int(first) <= MOST_THREADS):
        raise ConfigError(f"the environment variable OMP_NUM_THREADS={first[:40]!r} must be a whole number from 1 to {MOST_THREADS}: mend it, or unset it")
    return int(first) if first else None


def folder(name: str) -> Path | None:
    """The folder that the variable `name` names, which need not be there yet; None where it is not set, or empty. Raises ConfigError where it can be none."""
    text = os.environ.get(name, "")
    if not text:
        return None
    try:
        found = Path(text).expanduser()
    except RuntimeError:   # ~ of somebody who is not known here
        raise ConfigError(f"the environment variable {name}={text!r} names a home that is not here: write the folder in full") from None
    if found.exists() and not found.is_dir():
        raise ConfigError(f"the environment variable {name}={text!r} names a file: it must name a folder")
    return found


def check() -> None:
    """Raise ConfigError for the first of the variables that this project or its libraries read that holds nonsense."""
    for name in FOLDERS:
        folder(name)
    for name in THREADS[:1] + THREADS[2:]:
        whole(name, least=1, most=MOST_THREADS)
    if os.environ.get("NUMBA_NUM_THREADS") == "":   # at which numba shows a traceback
        raise ConfigError("the environment variable NUMBA_NUM_THREADS is empty: unset it, or give a whole number")
    threads()
    size, local = whole("WORLD_SIZE", least=1), whole("LOCAL_WORLD_SIZE", least=1)
    if size is not None and size > 1:   # a cluster may set the port for a purpose of its own: Kubernetes does, of a service named master
        whole("MASTER_PORT", most=65535)
    for name, most, of in (("RANK", size, "WORLD_SIZE"), ("LOCAL_RANK", local, "LOCAL_WORLD_SIZE")):
        own = whole(name)
        if own is not None and most is not None and own >= most:
            raise ConfigError(f"the environment variable {name}={own} must be below {of}={most}: start the processes with torchrun, or unset both")
