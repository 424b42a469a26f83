"""What configurations are made with: checks of single parameters, strict construction from plain values, and a stable hash.

A hash must not move when a field is added later. A field that comes after a release is therefore declared with `later(default)`; it
enters the hash only where it differs from its default.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import types
import typing
from dataclasses import field

import yaml

LEAST_TEMPERATURE = 1e-6   # of drawing tokens
SEEDS = (-(2**63), 2**63 - 1)   # what torch takes
SHOWN = 80                   # characters of a value that is refused
MOST = 2**31 - 1             # of whatever is counted: beyond it sizes overflow far from where they were given


class ConfigError(ValueError):
    """A parameter that cannot be used; the message says which, why, and what is possible."""


def shown(value) -> str:
    """A refused value as a message has it: its beginning, where it is longer than anybody reads."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def later(default):
    """A field added after runs were published: omitted from the hash while it has its default."""
    return field(default=default, metadata={"later": True})


def choice(name, value, allowed):
    """Raise ConfigError unless `value`, of the parameter `name`, is one of the allowed values."""
    if value not in allowed:
        raise ConfigError(f"{name}={shown(value)} is unknown; choose one of {', '.join(map(str, allowed))}")


def at_least(name, value, least):
    """Raise ConfigError unless `value`, of the parameter `name`, is finite and at least `least`."""
    if not least <= value < math.inf:
        raise ConfigError(f"{name}={shown(value)} must be at least {least}{'' if value < math.inf else ' and finite'}")


def count(name, value, least=1, most=MOST):
    """Raise ConfigError unless `value`, of the parameter `name`, is an integer from `least` to `most`."""
    if not least <= value <= most:
        raise ConfigError(f"{name}={shown(value)} must be at least {least}{f' and at most {most}' if value > most else ''}")


def positive(name, value):
    """Raise ConfigError unless `value`, of the parameter `name`, is above zero and finite."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}={shown(value)} must be positive and finite")


def momentum(name, value):
    """Raise ConfigError unless `value`, of the parameter `name`, is at least 0 and below 1."""
    if not 0.0 <= value < 1.0:   # at 1 the running mean never moves
        raise ConfigError(f"{name}={shown(value)} must be at least 0 and below 1")


def temperature(name, value):
    """Raise ConfigError unless `value`, of the parameter `name`, is 0, which takes the likeliest token, or LEAST_TEMPERATURE or more: logits divided by less have no softmax."""
    if value != 0 and not LEAST_TEMPERATURE <= value < math.inf:
        raise ConfigError(f"{name}={shown(value)} must be 0, for the likeliest token, or finite and at least {LEAST_TEMPERATURE:g}")


def within(name, value, low, high):
    """Raise ConfigError unless `value`, of the parameter `name`, is from `low` to `high`."""
    if not low <= value <= high:
        raise ConfigError(f"{name}={shown(value)} must lie in {low}..{high}")


def device(value):
    """Raise ConfigError unless `value` is cpu, cuda or cuda:N; whether that is there, `train.check_device` says."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise ConfigError(f"device={shown(value)} is unknown; choose one of cpu, cuda, cuda:N")


def to_dict(config) -> dict:
    """Nested plain dict of a configuration, tuples as lists: what JSON and YAML hold."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def stable_hash(config, **instead) -> str:
    """12 hex digits of the SHA-256 of the canonical JSON; fields declared `later` count only where they differ.

    `instead`: fields of `config` that are hashed with these values, which need not fit the others.
    """

    def canonical(value, **instead):
        if dataclasses.is_dataclass(value):
            return {
                f.name: canonical(instead.get(f.name, getattr(value, f.name)))
                for f in dataclasses.fields(value)
                if not (f.metadata.get("later") and getattr(value, f.name) == f.default)
            }
        return list(value) if isinstance(value, tuple) else value

    text = json.dumps({type(config).__name__: canonical(config, **instead)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def build(cls, params: dict):
    """Construct `cls` (a configuration) from nested plain values; unknown names and wrong types are refused.

    An int is taken for a float, a list for a tuple; nothing else is converted, so the string "3e-4" is an error.
    """
    if not isinstance(params, dict):
        raise ConfigError(f"{cls.__name__} is built from a mapping, not from {type(params).__name__}")
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(params) - set(hints))
    if unknown:
        raise ConfigError(f"unknown parameter {', '.join(unknown)} for {cls.__name__}; it has {', '.join(hints)}")
    missing = [f.name for f in dataclasses.fields(cls) if f.name not in params and f.default is dataclasses.MISSING]
    if missing:
        raise ConfigError(f"{cls.__name__} lacks {', '.join(missing)}")
    return cls(**{name: coerce(f"{cls.__name__}.{name}", value, hints[name]) for name, value in params.items()})


def coerce(name: str, value, kind):
    """`value` as `kind`, or a ConfigError that names it. int -> float and list -> tuple are the only conversions."""
    if dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else build(kind, value)
    origin = typing.get_origin(kind)
    if origin is types.UnionType:
        options = [option for option in typing.get_args(kind) if option is not type(None)]
        if len(options) == 1 and value is not None:   # it may be left out: what is wrong with it is said of the one kind that it can be
            return coerce(name, value, options[0])
        for option in typing.get_args(kind):
            try:
                return coerce(name, value, option)
            except ConfigError:
                continue
        raise ConfigError(f"{name}={shown(value)} must be one of {kind}")
    if kind is type(None) and value is None:
        return None
    if origin in (tuple, list) and isinstance(value, (list, tuple)):
        item = typing.get_args(kind)[0]
        return origin(coerce(f"{name}[{i}]", v, item) for i, v in enumerate(value))
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{name} is an integer of {value.bit_length()} bits, too large for a float") from None
    if not origin and type(value) is kind:
        return value
    hint = number_hint(value, kind) if kind in (int, float) and isinstance(value, str) and len(value) <= SHOWN else ""
    raise ConfigError(f"{name}={shown(value)} is {type(value).__name__}, not {getattr(kind, '__name__', kind)}{hint}")


def number_hint(text: str, kind: type) -> str:
    """How a number is written in YAML where it came as text: without the quotes that it was in, or, where YAML has no quotes to blame, a float with a point, and a
    sign in its exponent. Empty where it is no number."""
    try:
        kind(text)
    except ValueError:
        return ""
    mantissa, _, exponent = text.strip().lower().partition("e")
    if not any(character.isdigit() for character in mantissa):   # "nan", "inf"
        return ""
    if isinstance(yaml.safe_load(text), (int, float)):
        return f"; it was given in quotes: write {text.strip()} without them"
    if kind is float:
        mantissa += "" if "." in mantissa else ".0"
        exponent = exponent and f"e{'' if exponent[0] in '+-' else '+'}{exponent}"
    return f"; YAML reads {text} as text: write {mantissa}{exponent}, without quotes"
