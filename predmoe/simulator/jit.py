"""`compiled`: njit with a cache between processes that notices a change in any of the compiled modules.

Numba's own cache looks at the file of the function alone, so a change in residency.py would leave events.py's old machine code,
with the old functions inlined, in use. Here the cache folder is named after the text of all of them.

Compiled functions allocate nothing (they are given their working memory), so Numba's runtime is left out: with it every access
to an array of a NamedTuple counts references, atomically, and the event loop takes four times as long. `forceinline` gives as much
again: a call hands over some thirty arrays.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numba

_HERE = Path(__file__).parent
_TEXT = b"".join((_HERE / name).read_bytes() for name in ("jit.py", "residency.py", "counting.py", "diskqueue.py", "events.py"))


def compiler(*files: Path, **settings):
    """A decorator as `compiled` is for this package, for modules of another that inline its functions: `files` are all of them, whose text
    names the cache, too. `settings`: changes to what numba is asked for."""
    text = _TEXT + b"".join(path.read_bytes() for path in files)
    folder = f"numba-{hashlib.sha256(text).hexdigest()[:12]}"

    def compiled(function):
        usual = numba.config.CACHE_DIR
        base = Path(usual) if usual else _HERE / "__pycache__"
        writable = os.access(base if base.exists() else base.parent, os.W_OK)
        numba.config.CACHE_DIR = str(base / folder) if writable else usual
        try:
            return numba.njit(**{"cache": True, "nogil": True, "error_model": "numpy", "forceinline": True, "_nrt": False} | settings)(function)
        finally:
            numba.config.CACHE_DIR = usual

    return compiled


compiled = compiler()   # compiles on first call; compiled code runs without holding the interpreter's lock


def is_ready(function, *types) -> bool:
    """Whether a `compiled` function starts at once for arguments of these numba types: it was compiled in this process, or an earlier one left its machine
    code for this processor."""
    if types in function.overloads:
        return True
    cache = function._cache   # numba has no question for it
    return cache._index_key(types, function.targetctx.codegen()) in cache._cache_file._load_index()


def is_compiled(function) -> bool:
    """Whether calling a `compiled` function starts at once: it has been called, or an earlier process left its machine code."""
    return bool(function.signatures) or any(Path(function.stats.cache_path).glob(f"*{function.py_func.__name__}-*.nbi"))
