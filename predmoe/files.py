"""The small files of a run: JSON that is replaced as a whole, and read with a sentence about what is damaged; and YAML that a person writes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import yaml

from predmoe.config import ConfigError, build


def write_json(path: Path, value) -> None:
    """Replace `path` by `value` as JSON, whole or not at all; several processes may do so at a time. Raises ConfigError, and leaves what is there, where a number is
    not finite: JSON has no word for it, and it is no result."""
    try:
        text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    except ValueError:
        raise ConfigError(f"{path} is not written: {_first_not_finite(value)}, which is no result") from None
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:  # of a failed write, which does not say of which file
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def _first_not_finite(value, place: str = "") -> str:
    """Where in it, and what: "hit.linear.2 is nan"; empty where every number is finite."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{place or 'it'} is {value}"
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return next(filter(None, (_first_not_finite(part, f"{place}.{name}" if place else str(name)) for name, part in parts)), "")


def write_text(path: Path, text: str) -> None:
    """Write a result to a file, a pipe or a device that a person named; a file is replaced whole or not at all where its folder lets it be (see `replaced_by`), and
    keeps its permissions. Raises ConfigError where that fails."""
    partial = None
    try:
        place, stream = replaced_by(path), _stream_of(path)
        if place:
            partial = place.with_name(f".{os.getpid()}-{threading.get_ident()}.partial")   # short: `place` may have the longest name that there can be
            partial.write_text(text, encoding="utf-8")
            if place.exists():
                shutil.copymode(place, partial)
            try:
                partial.replace(place)
            except OSError:
                if not place.exists():
                    raise
                path.write_text(text, encoding="utf-8")   # mounted by itself, or somebody else's in a folder such as /tmp: it can be written into alone
        elif stream:
            stream.flush()   # what was printed before comes before
            with open(os.dup(1 if stream is sys.stdout else 2), "w", encoding="utf-8") as file:
                file.write(text)
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {os.strerror(error.errno)}; name a file elsewhere and run the same command again") from None
    finally:
        if partial:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def replaced_by(path: Path) -> Path | None:
    """The file that `write_text` replaces, or makes: what `path` leads to if it is a link. None where it writes into what is there: a pipe, a device, a file
    that has no name any more, one that is write-protected or in a folder that takes no new file, or what this process prints to (/dev/stdout, say)."""
    place = Path(os.path.realpath(path))
    if _stream_of(path) is not None or place.is_symlink():   # of links that lead in a circle
        return None
    if place.is_file():
        return place if _can_write(place) and _can_write(place.parent) else None
    return None if path.exists() else place


def _can_write(place: Path) -> bool:
    return os.access(place, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _stream_of(path: Path):
    """sys.stdout or sys.stderr, where `path` is what it writes to; else None."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        with contextlib.suppress(OSError):   # no such file yet; a closed stream
            if os.path.samestat(os.fstat(number), path.stat()):
                return stream
    return None


class _Strict(yaml.SafeLoader):
    """YAML as it is defined: PyYAML lets the last of two entries of one name stand without a word."""

    def construct_mapping(self, node, deep=False):
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for number, (key, _) in enumerate(node.value) if isinstance(key, yaml.ScalarNode) and key.value in names[:number]]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0].value} is there twice", twice[0].start_mark)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str):
    """The value of a YAML document of plain types. Raises ValueError, on one line, for all that cannot be read."""
    try:
        return yaml.load(text, _Strict)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:   # an integer of thousands of digits is no YAMLError; nor is a mapping as a name
        raise ValueError(" ".join(str(error).split())) from None


def parse_json(text: str | bytes, *, finite: bool = False):
    """json.loads, with a ValueError for all that it cannot read: nesting beyond what Python can follow as well, and, where all has to be `finite`, NaN, Infinity
    (which JSON has not, but Python's reader takes) and numbers too large for a float."""
    try:
        return json.loads(text, parse_constant=_refused, parse_float=_finite) if finite else json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refused(constant: str):
    raise ValueError(f"it holds {constant}, which is not a finite number")


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _refused(text)


def read_config(path: Path, kind: type, *, remedy: str = ""):
    """The configuration of type `kind` that `write_json` wrote as a mapping. Raises ConfigError that names the file where it is damaged or not usable."""
    try:
        return build(kind, read_json(path, remedy=remedy))
    except ConfigError as error:
        if str(error).startswith(f"{path} "):
            raise
        raise ConfigError(f"{path} is damaged or of another version ({error}); restore it from a copy, or {remedy or f'remove the folder {path.parent} to make it again'}") from None


def reason(error: BaseException) -> BaseException:
    """The system's own error that `error` came of, or `error`: torch hides a failed write behind one of its own about positions in the file."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


def read_json(path: Path, needed: Mapping[str, type | tuple] = {}, *, remedy: str = "") -> dict:
    """The object that `write_json` wrote. Raises ConfigError where the file is damaged, or lacks an entry of `needed`, name -> its type."""
    remedy = remedy or f"remove the folder {path.parent} to make it again"
    try:
        value = parse_json(path.read_text())
    except ValueError as error:  # JSON's and UTF-8's own errors are ValueErrors
        raise ConfigError(f"{path} is damaged ({error}); restore it from a copy, or {remedy}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is damaged (it holds a {type(value).__name__} instead of an object); restore it from a copy, or {remedy}")
    if wrong := [name for name, kind in needed.items() if not isinstance(value.get(name), kind)]:
        raise ConfigError(f"{path} is damaged (without a usable {', '.join(wrong)}); restore it from a copy, or {remedy}")
    return value


def read_lines(path: Path) -> list[dict]:
    """The lines of a metrics.jsonl. Raises ConfigError with the number of the first that is damaged."""
    lines = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        with contextlib.suppress(ValueError):
            lines.append(parse_json(line))
        if len(lines) < number or not isinstance(lines[-1], dict):
            raise ConfigError(f"{path}, line {number} is damaged; restore the file from a copy, or remove the folder {path.parent} to train the run again")
    return lines
