"""What a user would take instead of the engine, each in a process of its own (`contender`), on the same checkpoint with the same threads.

    transformers   the whole model in memory, generate with its key-value cache
    offload        the same with every layer's experts on disk (accelerate), the dense part in memory
    engine         the engine with every expert in memory
    engine-disk    the engine with a share of the experts in memory
    llama.cpp      llama-cpp-python on the checkpoint as a GGUF file in bf16, mapped into memory (where it is installed: `gguf_file.INSTALL`)

Rates are of decoding alone, after loading and a warm-up.

**How memory is counted.** `peak_mb` is the process's peak resident memory while it generates (VmHWM): anonymous memory and pages of mapped
files. llama.cpp maps its model, so its resident pages are in it; accelerate reads its files through the page cache, most of which is not
mapped at any one time and then in nobody's count, and the kernel keeps as much of it as the machine has room for. So on a machine with
memory to spare neither is held to a budget, and only the engine, which reads past the page cache, is.

**The same memory for all**, therefore, is a limit: with `memory_mb`, each contender that has its experts on disk runs in a memory control group
of its own (`process.memory_group`), which is charged for its heap and for its page cache, mapped or not. The limit is of the whole process, not
of experts beyond what its libraries take: that is what a machine has or has not, and a lean process may well use for experts what a heavy one
needs for itself. It is put in force when the model is loaded (offload holds all of it once); what the files had in the page cache is
dropped before. Shared libraries that another process has loaded are charged to that one, for all contenders alike, so that `peak_mb`
may exceed the limit; `charged_mb` is the group's own peak. Where no group can be had, they run without a limit, and `limited` says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from . import gguf_file
from .config import ConfigError
from .engine import load_manifest
from .process import forget, memory_group

LLAMA = "llama.cpp"
KINDS = ("transformers", "offload", "engine", "engine-disk", LLAMA)
DISK = ("offload", "engine-disk", LLAMA)   # those that a memory limit is for: they can do with less than the model
NUMBERS = ["tok_s", "ttft_ms", "peak_mb", "charged_mb", "major_faults", "read_mb", "tokens"]
COLUMNS = ["kind", "round", *NUMBERS, "same_tokens", "memory_mb", "limited", "ran"]
TYPES = dict.fromkeys([*NUMBERS, "same_tokens", "memory_mb"], float) | {"limited": bool, "ran": bool}   # of the columns, also where there is no row


class PeerFailed(RuntimeError):
    """A contender's process ended with an error; the message has its last words."""


def compare(kinds: Sequence[str], checkpoint: Path, folder: Path, prompts: Sequence[Sequence[int]], *, new_tokens: int, share: float, threads: int = 1,
            lanes: int = 4, rounds: int = 1, memory_mb: float = 0) -> pd.DataFrame:  # fmt: skip
    """The contenders take turns, `rounds` times, on the same prompts (token ids). One row per kind and round.

    `checkpoint`: OLMoE format; `folder`: its export, whose dtype transformers takes, too (float32 for an int8 export). `memory_mb`: the
    limit (10^6 bytes) of those that have experts on disk, 0 for none.

    Columns: tok_s; ttft_ms; peak_mb; charged_mb (of the group, missing without one); major_faults and read_mb, page faults that waited for the disk
    and bytes that the kernel fetched from it, while generating; tokens, timed; same_tokens, the share of greedy tokens before the first
    that is not the first contender's; memory_mb, what was asked for; limited, whether it was in force; ran, False where it does not run within
    the limit (no numbers then). Contenders that compute alike must agree in every token: PeerFailed where they do not.
    """
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ConfigError(f"peers: {unknown[0]!r} is unknown; choose of {', '.join(KINDS)}")
    if not 0 <= memory_mb < float("inf"):
        raise ConfigError(f"peers: a memory limit of {memory_mb!r} MB is none; 0 stands for no limit")
    if LLAMA in kinds and (why := gguf_file.missing()):
        raise ConfigError(f"peers: {why}")
    rows, texts = [], {}
    with contextlib.ExitStack() as stack:
        spec = {"checkpoint": str(checkpoint), "folder": str(folder), "files": [str(checkpoint), str(folder)], "prompts": [list(map(int, prompt)) for prompt in prompts],
                "new_tokens": new_tokens, "share": share, "lanes": lanes, "threads": threads}  # fmt: skip
        if kinds:
            spec["dtype"] = load_manifest(folder).dtype
        if LLAMA in kinds:
            made = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=Path(folder).parent)))
            spec["gguf"] = str(gguf_file.write_gguf(checkpoint, made / "model.gguf"))
            spec["files"].append(spec["gguf"])
        for number in range(rounds):
            for kind in kinds:
                row = _ask(spec | {"kind": kind, "memory_mb": memory_mb if kind in DISK else 0})
                text = row.pop("text", None)
                texts[kind] = texts.get(kind) or text
                rows.append({"kind": kind, "round": number} | row)
    first = next((text for text in texts.values() if text), None)
    for row in rows:
        row["same_tokens"] = _same(texts[row["kind"]], first)
    _agree(texts, spec.get("dtype"))
    return pd.DataFrame(rows, columns=COLUMNS).astype(TYPES)


def charge_of(kind: str, checkpoint: Path, folder: Path, prompts: Sequence[Sequence[int]], **settings) -> float | None:
    """MB that the contender's group is charged for at its peak when memory is not scarce; None where it cannot be had. `settings`: as for `compare`."""
    plenty = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6
    charged = compare([kind], checkpoint, folder, prompts, **settings, memory_mb=plenty).charged_mb[0]
    return None if pd.isna(charged) else float(charged)


def _ask(spec: dict) -> dict:
    threads = str(spec["threads"])
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    with memory_group() if spec["memory_mb"] else contextlib.nullcontext() as group:
        if group:
            forget(map(Path, spec["files"]))
        command = [sys.executable, "-m", "predmoe.contender", json.dumps(spec | {"group": str(group.folder) if group else None})]
        done = subprocess.run(group.command(command) if group else command, capture_output=True, text=True, env=environment)
    limited = {"memory_mb": spec["memory_mb"], "limited": group is not None}
    if group and done.returncode == -signal.SIGKILL:   # by the kernel, since nothing more could be reclaimed
        return limited | {"ran": False}
    if done.returncode:
        raise PeerFailed(f"{spec['kind']}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    return limited | json.loads(done.stdout.splitlines()[-1])


def _same(text: list[list[int]] | None, other: list[list[int]] | None) -> float | None:
    if not text or not other:
        return None
    before = sum(next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), len(mine)) for mine, theirs in zip(text, other))
    return before / sum(map(len, text))


def _agree(texts: dict[str, list[list[int]] | None], dtype: str | None) -> None:
    """Those that compute in the same arithmetic agree: the engine in float32, as transformers on a float32 export; llama.cpp rounds to bf16 within."""
    families = [("engine", "engine-disk"), ("transformers", "offload")]
    if dtype == "float32":
        families = [families[0] + families[1]]
    for family in families:
        ran = {kind: texts[kind] for kind in family if texts.get(kind)}
        if any(text != next(iter(ran.values())) for text in ran.values()):
            raise PeerFailed(f"the contenders {', '.join(ran)} do not give the same greedy tokens, so their speeds are of different work")


PAIRS = (("engine", "transformers", "with every expert in memory"), *(("engine-disk", peer, "with experts on disk") for peer in ("offload", LLAMA)))


def say(table: pd.DataFrame) -> list[str]:
    """The engine beside each peer, as ratios of medians over the rounds, and under what limit."""
    at = table[table.ran].groupby("kind")[["tok_s", "peak_mb"]].median()
    said = [f"The engine {how}: {at.tok_s[ours] / at.tok_s[theirs]:.2f} times the decoding tokens/s of {theirs} "
            f"({at.tok_s[ours]:.1f} against {at.tok_s[theirs]:.1f}), "
            f"at {at.peak_mb[ours]:.0f} MB of peak resident memory against {at.peak_mb[theirs]:.0f} MB."
            for ours, theirs, how in PAIRS if ours in at.index and theirs in at.index]  # fmt: skip
    return said + say_limit(table)


def say_limit(table: pd.DataFrame) -> list[str]:
    """One sentence on the memory limit; none where none was asked for."""
    asked = table[table.memory_mb > 0]
    if not len(asked):
        return []
    limit, names = asked.memory_mb.iloc[0], lambda rows: ", ".join(dict.fromkeys(rows.kind))
    if not asked.limited.all():
        return [f"A limit of {limit:.0f} MB was asked for, but no memory control group can be had here: {names(asked)} ran without a limit."]
    failed = asked[~asked.ran]
    within = f"; within that {names(failed)} does not run." if len(failed) else "."
    return [f"Each of {names(asked)} in a memory control group of {limit:.0f} MB, its page cache included{within}"]
