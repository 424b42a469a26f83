"""Routing traces: one schema, readers of public formats, and a generator of synthetic ones."""

from .readers import READERS, read
from .schema import ABSENT, DECODE, PREFILL, VERSION, Meta, Prediction, Trace, TraceError, TraceWarning, build, load, looks_uniform, save
from .generate import COLIBRI, REFERENCE, Accuracy, reuse_rate, synthetic

__all__ = ["ABSENT", "COLIBRI", "DECODE", "PREFILL", "READERS", "REFERENCE", "VERSION", "Accuracy", "Meta", "Prediction", "Trace", "TraceError",
           "TraceWarning", "build", "load", "looks_uniform", "read", "reuse_rate", "save", "synthetic"]  # fmt: skip
