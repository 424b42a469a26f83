"""Batches made in a thread of their own while a GPU computes, in pinned memory, from which a copy does not wait."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch


class Loader:
    """`batch(step, part)` as `make(step, part)` gives it, as a tensor; the one that follows is being made when it returns.

    `make` is a pure function (`data.Stream.batch`), so that nothing is lost where training goes on at another step.
    """

    def __init__(self, make: Callable[[int, int], np.ndarray], *, parts: int, pin: bool):
        self.make, self.parts, self.pin = make, parts, pin
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._ahead: tuple[tuple[int, int], Future] | None = None

    def batch(self, step: int, part: int) -> torch.Tensor:
        """The sequences of this part of this step's batch, on the host."""
        wanted, self._ahead = self._ahead, None
        found = wanted[1].result() if wanted and wanted[0] == (step, part) else self._made(step, part)
        following = (step, part + 1) if part + 1 < self.parts else (step + 1, 0)
        self._ahead = following, self._pool.submit(self._made, *following)
        return found

    def _made(self, step: int, part: int) -> torch.Tensor:
        tensor = torch.from_numpy(self.make(step, part))
        return tensor.pin_memory() if self.pin else tensor
