"""An engine that keeps a model's experts on disk: export, direct reads, expert cache, decoding. Policies, queue and ledger are the simulator's own."""

from .decode import Engine
from .export import export, stored_model
from .layout import load_manifest
from .storage import EngineError, ReadError
from .summary import Summary

__all__ = ["Engine", "EngineError", "ReadError", "Summary", "export", "load_manifest", "stored_model"]
