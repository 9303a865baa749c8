"""Programs given to HiGHS: their limit of work, and that of wall-clock time."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from fxpar.sharding.solver import milp, work_clock


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


def test_a_program_that_would_take_longer_is_left() -> None:
    """What the relaxation shows is there, and work is no more than asked for."""
    program = packed(600)
    before = work_clock.now()
    solved = milp.run_highs(program, 5.0)
    work = work_clock.now() - before
    left = milp.run_highs(program, 0.5 * work)
    assert solved.x is not None and solved.bound is not None
    assert left.x is None and left.bound is not None
    assert left.bound <= float(program["cost"] @ solved.x)
    assert work_clock.now() - before <= 1.5 * work
    tiny = milp.run_highs(program, 1e-6)  # not even the relaxation
    assert tiny.x is None and tiny.bound is None


def test_answers_are_the_same_each_time() -> None:
    program = packed(600, seed=1)
    first, again = milp.run_highs(program, 5.0), milp.run_highs(program, 5.0)
    assert first.bound == again.bound and (first.x is None) == (again.x is None)
    assert first.x is None or np.array_equal(first.x, again.x)


@pytest.mark.parametrize("size", [20, 600])
def test_any_number_of_seconds_is_a_limit(size: int) -> None:
    """HiGHS counts steps and nodes in 32 bits."""
    assert milp.run_highs(packed(size), 1e9).x is not None


def test_a_program_ends_where_wall_clock_time_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However much work is left, a plan of the time so far is not the plan of another
    run, and says so."""
    ticks = count(0.0, work_clock.GRACE)
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    with work_clock.within(0.0):
        assert milp.run_highs(packed(3000), 1e3).status == 1
        assert work_clock.is_stopped()
