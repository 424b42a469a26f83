"""The compiled path of single tokens: its arithmetic against numpy's in float64, and that the compiler reads whole vectors."""

import re

import numba
import numpy as np
import pytest

from predmoe.engine import fused
from predmoe.engine.table import FAST

KERNELS = {
    "_times": "void(float32[::1], int64, int64, int64, float32[::1], float32[::1])",
    "_norm": "void(float32[::1], float32[::1], float64, float32[::1])",
    "_attention": "void(float32[::1], float32[:,:,::1], float32[:,:,::1], int64, int64, float32[::1], float32[::1])",
}


@pytest.mark.parametrize("name, signature", KERNELS.items())
def test_rows_are_read_as_vectors(name, signature):
    """An index that may count from the end is asked for each entry, which then are gathered one by one: several times as slow."""
    compiled = numba.njit(signature, error_model="numpy", fastmath=FAST, _nrt=False)(getattr(fused, name).py_func)
    code = next(iter(compiled.inspect_llvm().values()))
    assert re.search(r"load <\d+ x float>", code) and "gather" not in code


@pytest.mark.parametrize("rows, columns, first", [(7, 5, 0), (8, 96, 13), (1, 33, 4)])
def test_a_matrix_that_begins_anywhere_times_the_beginning_of_a_vector(rows, columns, first):
    draw = np.random.default_rng(0).standard_normal
    flat, x, y = (draw(n).astype(np.float32) for n in (first + rows * columns + 9, columns + 3, rows + 2))
    beyond = y[rows:].copy()
    fused._times(flat, first, rows, columns, x, y)
    matrix = flat[first : first + rows * columns].reshape(rows, columns).astype(np.float64)
    assert y[:rows] == pytest.approx(matrix @ x[:columns].astype(np.float64), abs=1e-5) and np.array_equal(y[rows:], beyond)
