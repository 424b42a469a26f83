"""What a result was made with: code, packages, machine. No host name and no path, so that it can be published."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

from . import paths, variables

PACKAGES = (
    "torch", "numpy", "scipy", "pandas", "numba", "matplotlib", "transformers", "accelerate", "peft", "safetensors",
    "datasets", "tiktoken", "lm_eval", "papermill", "nbconvert",
)  # fmt: skip


def capture() -> dict:
    """Commit, dirty flag, Python and package versions, hardware, threads and the start time (UTC, ISO 8601).

    `dirty` is true where anything but outputs/ differs from the commit. Outside a git checkout `commit` says so and
    `dirty` is None. Packages that are not installed are left out.
    """
    commit, dirty = _git_state()
    return {
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "hardware": {"cpu": _cpu_model(), "instructions": _instructions(), "cores": _cores(), "memory_gb": _memory_gb(), "gpu": _gpu()},
        "threads": _threads(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _git_state() -> tuple[str, bool | None]:
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return "none: not a git checkout", None
    return commit, bool(_git("status", "--porcelain", "--", ".", ":(exclude)outputs"))


def _git(*arguments) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(paths.ROOT), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _memory_gb() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)


def _gpu() -> str | None:
    torch = sys.modules.get("torch")   # not imported for this alone: it takes seconds
    return torch.cuda.get_device_name(0) if torch and torch.cuda.is_available() else None


def _instructions() -> str | None:
    """The vector instructions that torch's own kernels take, on which the last bits of a result depend."""
    torch = sys.modules.get("torch")
    return torch.backends.cpu.get_cpu_capability() if torch else None


def _threads() -> int:
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch else variables.threads() or _cores()
