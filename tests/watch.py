"""What tensor operations made, while a block runs: for tests of memory and of the dtypes of products."""

from __future__ import annotations

import weakref
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """`largest`: elements of the largest tensor made; `held`: the most elements that lived at a time in storages made inside
    and still named in Python; `products`: operations of matrix products by dtype."""

    def __init__(self):
        super().__init__()
        self.largest, self.held, self.products = 0, 0, {}
        self._names, self._sizes = Counter(), {}

    def _note(self, tensor):
        self.largest = max(self.largest, tensor.numel())
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        self._names[key] += 1
        self._sizes[key] = storage.nbytes() // tensor.element_size()
        self.held = max(self.held, sum(self._sizes.values()))
        weakref.finalize(tensor, self._forget, key)

    def _forget(self, key):
        self._names[key] -= 1
        if not self._names[key]:
            del self._names[key], self._sizes[key]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor)
        name = function.name().split("::")[1].split(".")[0]
        if name in ("mm", "bmm", "addmm", "addmm_", "baddbmm"):
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            flops = 2 * tensors[-2].numel() * tensors[-1].shape[-1]
            self.products[tensors[-1].dtype] = self.products.get(tensors[-1].dtype, 0) + flops
        return out
