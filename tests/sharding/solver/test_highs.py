"""The process in which HiGHS runs: its limit of work, and that of wall-clock time."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from fxpar.sharding.solver import highs, work_clock
from fxpar.sharding.solver.highs_process import INSIDE


@pytest.fixture
def program() -> dict[str, Any]:
    """The cheapest of more choices than are solved in this process."""
    highs._end()
    size = INSIDE + 1
    return {
        "cost": np.arange(size, 0.0, -1.0),
        "whole": np.ones(size),
        "gap": 0.0,
        "equal": sparse.csr_array(np.ones((1, size))),
        "right": np.ones(1),
        "below": None,
        "top": None,
    }


def packed(size: int, seed: int = 0) -> dict[str, Any]:
    """Which of many things to take into a few full boxes: no relaxation is whole."""
    random = np.random.default_rng(seed)
    weights = random.integers(10, 100, (2, size)).astype(float)
    return {
        "cost": -random.integers(10, 100, size).astype(float),
        "whole": np.ones(size),
        "gap": 0.01,
        "equal": sparse.csr_array((1, size)),
        "right": np.zeros(1),
        "below": sparse.csr_array(weights),
        "top": weights.sum(1) / 2,
    }


def test_a_program_is_solved_in_a_process_of_its_own(program: dict[str, Any]) -> None:
    before = work_clock.now()
    outcome = highs.run(program, 0.2)
    assert outcome is not None and outcome.x is not None and outcome.status == 0
    assert outcome.x.argmax() == len(program["cost"]) - 1
    assert highs._running and 0 < work_clock.now() - before < 0.2


def test_a_slower_clock_gives_the_worker_more_time(
    program: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    with work_clock.within(0.0):
        outcome = highs.run(program, 0.2)
        assert outcome is not None and outcome.x is not None
        assert not work_clock.is_stopped()


def test_a_worker_is_ended_where_wall_clock_time_is_up(
    program: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count(0.0, work_clock.GRACE / 2)
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    with work_clock.within(0.0):
        assert highs.run(program, 0.2) is None
        assert work_clock.is_stopped() and not highs._running


def test_a_program_that_would_take_longer_is_left() -> None:
    """What the relaxation shows is there, and work is no more than asked for."""
    program = packed(600)
    solved = highs.run(program, 5.0)
    before = work_clock.now()
    left = highs.run(program, 0.5 * solved.work if solved else 0.0)
    assert solved is not None and solved.x is not None and solved.bound is not None
    assert left is not None and left.x is None and left.bound is not None
    assert left.bound <= float(program["cost"] @ solved.x)
    assert work_clock.now() - before <= 0.5 * solved.work
    tiny = highs.run(program, 1e-6)  # not even the relaxation
    assert tiny is not None and tiny.x is None and tiny.bound is None


def test_answers_are_the_same_each_time() -> None:
    program = packed(600, seed=1)
    first, again = highs.run(program, 5.0), highs.run(program, 5.0)
    assert first is not None and again is not None
    assert first.work == again.work and first.bound == again.bound
    assert (first.x is None) == (again.x is None)
    assert first.x is None or np.array_equal(first.x, again.x)
