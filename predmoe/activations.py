"""Where the cached activations of a frozen model lie, in memory or on disk, so that what they take stays within a stated budget."""
# N tokens, D model width, E experts, L layers, T time, V vocabulary

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from predmoe.config import ConfigError

MOST_ROWS, MOST_WINDOWS = 8192, 32   # read or computed in one piece where the budget allows it


class DiskRows:
    """Rows (N, L, D) in a temporary file that has no name: written by slices, read by row numbers.

    It is read, not mapped, so that the process holds the rows asked for and no others. Raises ConfigError where the disk has no room for it.
    """

    def __init__(self, N: int, L: int, D: int, *, dtype: torch.dtype, folder: Path | None = None):
        self.shape, self.dtype, self.row_bytes = (N, L, D), dtype, L * D * dtype.itemsize
        folder = Path(folder or tempfile.gettempdir())
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder to keep activations in")
        free = shutil.disk_usage(folder).free
        if free < N * self.row_bytes:
            sizes = f"activations need {N * self.row_bytes / 1e9:.2f} GB, and {folder} has {free / 1e9:.2f} GB free"
            raise ConfigError(f"{sizes}: name another folder, or take fewer tokens")
        self._file = tempfile.TemporaryFile(dir=folder)

    def __setitem__(self, rows: slice, values_nLD: Tensor) -> None:
        data = memoryview(values_nLD.to(self.dtype).contiguous().view(torch.uint8).numpy()).cast("B")
        at = rows.start * self.row_bytes
        while data:
            done = os.pwrite(self._file.fileno(), data, at)
            data, at = data[done:], at + done

    def __getitem__(self, rows: Tensor) -> Tensor:
        """The rows as a tensor (n, L, D); neighbours are read in one piece."""
        rows = rows.numpy()
        out = torch.empty(len(rows), *self.shape[1:], dtype=self.dtype)
        view = memoryview(out.view(torch.uint8).numpy()).cast("B") if len(rows) else memoryview(b"")
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        for first, end in zip([0, *breaks], [*breaks, len(rows)]):
            part, at = view[first * self.row_bytes : end * self.row_bytes], int(rows[first]) * self.row_bytes if end else 0
            while part:
                done = os.preadv(self._file.fileno(), [part], at)
                if not done:
                    raise OSError(errno.EIO, f"the file of activations ends at byte {at}")
                part, at = part[done:], at + done
        return out


@dataclass(frozen=True)
class Plan:
    """How much is held at a time. `on_disk`: the cache is a file; the rest counts what one piece of work may be."""

    on_disk: bool
    cache_bytes: int
    rows_at_once: int
    capture_windows: int
    score_windows: int
    folder: Path | None = None

    @property
    def room(self):
        """What holds the activations, for `posthoc.capture`."""
        return partial(DiskRows, folder=self.folder) if self.on_disk else torch.empty


def plan(budget: int, shape, *, tokens: int, batch_tokens: int, horizons: int, T: int, folder: Path | None = None) -> Plan:
    """A way to stay within `budget` bytes with the activations of `tokens` tokens: float16 in the cache, float32 in a batch.

    Counted are the cache, the batch that heads are fitted on (with what its backward pass keeps, per horizon) and the records of the
    windows in flight, not the model, what it computes with, nor the heads. Raises ConfigError where not even one batch or window fits.
    """
    width, scores = shape.num_layers * shape.hidden_size, shape.num_layers * shape.num_experts
    fitted = width * (10 + 8 + 8 * horizons) + scores * 24 * horizons   # bytes a row: as read, as float32, gradients, and two layers of each head
    captured, scored = width * 12 + scores * 16, width * 8 + scores * 48 + shape.vocab_size * 12
    least = max(batch_tokens * fitted, T * captured, T * scored)
    if least > budget:
        raise ConfigError(f"a budget of {round(budget / 1e6, 2):,g} MB does not hold one batch ({batch_tokens} tokens) or window ({T} tokens), "
                          f"which takes {round(least / 1e6, 2):,g} MB: raise it (--memory-mb), or lower the batch or the context")  # fmt: skip
    cache = tokens * width * 2
    on_disk = cache + least > budget
    left = budget - (0 if on_disk else cache)
    within = lambda size, most: max(1, min(most, left // (2 * size)))  # noqa: E731 (half of it: allocators keep what they were given back)
    return Plan(on_disk, cache, within(fitted, MOST_ROWS), within(T * captured, MOST_WINDOWS), within(T * scored, MOST_WINDOWS), folder)
