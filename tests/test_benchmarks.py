"""The step that the benchmarks time is the trainer's own: it has to go on working when the trainer changes."""

import importlib
import math
import sys

import numpy as np
import pytest

from predmoe import config, paths


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.syspath_prepend(paths.ROOT / "benchmarks")
    steps = importlib.import_module("steps")

    yield steps
    sys.modules.pop("steps")


def test_the_step_that_is_timed_is_the_trainers(steps):
    step = steps.our_step(config.tier("smoke"), mask=False)
    losses = [float(step()) for _ in range(2)]
    assert losses[0] == pytest.approx(math.log(8192), abs=0.5) and losses[1] != losses[0]


def test_a_part_of_a_batch_is_rows_of_the_whole(steps):
    batches = steps.Batches(50)
    assert np.array_equal(batches.batch(3, 4, 6, slice(1, 3)), batches.batch(3, 4, 6)[1:3]) and batches.batch(3, 4, 6).shape == (4, 7)


def test_the_cost_of_capture_is_a_median_with_an_interval_of_ranks(steps):
    capture = importlib.import_module("capture")
    values = [float(v) for v in range(1, 21)]
    assert capture.over_rounds(values[::-1]) == (10.5, 6.0, 15.0)   # of 20 values the 6th and the 15th: 95.9% by Binomial(20, 1/2)
    assert capture.over_rounds([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert capture.share(0.034, (-0.001, 0.07)) == "+3.4% [-0.1%, +7.0%]"
