"""A state of some hundred arrays and numbers as one table of addresses, so that a compiled function is handed a single array.

Numba would take each array apart at every call, which costs more than most of these calls take.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import from_dtype, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from ..simulator.jit import compiler, is_ready

WIDTH = 5   # entries per field: an array's address and its shape, or a number

_HERE = Path(__file__).parent
FILES = [_HERE / name for name in ("table.py", "kernelqueue.py", "fused.py", "control.py", "loop.py")]
compiled = compiler(*FILES)
step = compiler(*FILES, forceinline=False)   # for what is handed the table alone: calling it costs nothing, inlining it much time to compile
FAST = {"reassoc", "contract", "nsz", "arcp"}   # sums in any order, so that they are vectorised; NaN stays NaN
kernel = compiler(*FILES, forceinline=False, fastmath=FAST)


TABLE = types.Array(types.int64, 1, "C")   # what a `step` is handed


def ready(kernels: Sequence[tuple]) -> bool:
    """Whether `prepare` returns at once."""
    return all(is_ready(function, *signature) for function, *signature in kernels)


def prepare(kernels: Sequence[tuple]) -> None:
    """Compile functions for their arguments' types, each a (function, type, ...), or take what an earlier process left: so that no clock runs meanwhile, and no read waits."""
    for function, *signature in kernels:
        function.compile(tuple(signature))


def table_of(parts: Sequence[NamedTuple]) -> np.ndarray:
    """The table, int64, one row after another. The arrays must outlive it."""
    table = np.zeros((sum(map(len, parts)), WIDTH), np.int64)
    for row, value in zip(table, (value for part in parts for value in part)):
        if isinstance(value, np.ndarray):
            assert value.flags.c_contiguous and value.ndim < WIDTH
            row[0], row[1 : 1 + value.ndim] = value.ctypes.data, value.shape
        elif isinstance(value, float):
            row[:1].view(np.float64)[0] = value
        else:
            row[0] = value
    return table.reshape(-1)


def readers(parts: Sequence[NamedTuple]) -> list:
    """For each part of a state such as `parts` an intrinsic that makes its compiled twin from the table."""
    first = np.cumsum([0, *map(len, parts)]).tolist()
    return [_reader(part, at) for part, at in zip(parts, first)]


def _reader(example: NamedTuple, first: int):
    """An intrinsic, since a compiled function without Numba's runtime may not return an array."""
    kinds = {bool: types.boolean, int: types.int64, float: types.float64}
    fields = [types.Array(from_dtype(value.dtype), value.ndim, "C") if isinstance(value, np.ndarray) else kinds[type(value)] for value in example]
    whole = types.NamedTuple(fields, type(example))

    @intrinsic
    def read(typing, table):
        def generate(context, builder, signature, arguments):
            data = make_array(signature.args[0])(context, builder, arguments[0]).data
            entry = lambda row, column: builder.load(cgutils.gep_inbounds(builder, data, (first + row) * WIDTH + column))  # noqa: E731
            values = []
            for row, kind in enumerate(fields):
                if isinstance(kind, types.Array):
                    array, pointer = make_array(kind)(context, builder), context.get_data_type(kind.dtype).as_pointer()
                    size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
                    shape = [entry(row, 1 + axis) for axis in range(kind.ndim)]
                    strides, step = [], context.get_constant(types.intp, size)
                    for length in reversed(shape):
                        strides.insert(0, step)
                        step = builder.mul(step, length)
                    populate_array(array, builder.inttoptr(entry(row, 0), pointer), shape, strides, context.get_constant(types.intp, size), None)
                    values.append(array._getvalue())
                elif kind is types.float64:
                    values.append(builder.bitcast(entry(row, 0), context.get_value_type(kind)))
                else:
                    values.append(context.cast(builder, entry(row, 0), types.int64, kind))
            return context.make_tuple(builder, signature.return_type, values)

        return whole(table), generate

    return read
