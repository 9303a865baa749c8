"""The process in which HiGHS runs: its clock and its limit."""

from __future__ import annotations

import time
from itertools import count

import numpy as np
import pytest
from scipy import sparse

from fxpar.sharding.solver import highs


@pytest.fixture
def program():
    """The cheapest of more choices than are solved in this process."""
    highs._end()
    size = highs._INSIDE + 1
    return {
        "cost": np.arange(size, 0.0, -1.0),
        "whole": np.ones(size),
        "gap": 0.0,
        "equal": sparse.csr_array(np.ones((1, size))),
        "right": np.ones(1),
        "below": None,
        "top": None,
    }


def test_a_slower_clock_gives_the_worker_more_time(program, monkeypatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    found = highs.run(program, 0.2)  # it takes longer to start
    assert found is not None
    assert found.x is not None
    assert found.x.argmax() == len(program["cost"]) - 1


def test_a_worker_is_late_by_that_clock(program, monkeypatch) -> None:
    ticks = count(0.0, 0.1)
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    assert highs.run(program, 0.2) is None
