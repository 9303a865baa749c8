"""Layers that repeat, under a limit, and their prices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fxpar.sharding.solver import (
    Edge,
    Live,
    Problem,
    evaluate,
    solve,
)
from fxpar.sharding.solver.solve import solve_tied
from tests.helpers.solver_problems import layered


def knapsack(layers: int) -> Problem:
    """Layers of two nodes that save memory or time together; all alike, room for the
    quick way in 7 of 10."""
    quick_or_small = np.array([1.0, 2.0])
    apart = np.array([[0.0, 5.0], [5.0, 0.0]])
    costs = tuple(quick_or_small for _ in range(2 * layers))
    edges = tuple(Edge(2 * k, 2 * k + 1, 0) for k in range(layers))
    usage = np.array([10.0, 0.0])
    memory = tuple(Live(2 * k, 0, 9, usage) for k in range(layers))
    tied = tuple(k % 2 for k in range(2 * layers))
    return Problem(costs, edges, (apart,), memory, 7.0 * layers, tied)


def test_some_layers_are_one_way_and_the_rest_the_other() -> None:
    problem = knapsack(10)
    found = solve(problem, 10.0)
    assert solve_tied(problem, 10.0, 1e-9).cost == 40.0  # all small
    assert found.cost == 2 * (7 * 1.0 + 3 * 2.0)
    assert found.gap <= 1e-9
    assert evaluate(problem, found.choice) == (26.0, 70.0)


@pytest.mark.parametrize("limit", [0.15, 0.3, 0.6])
def test_ties_do_not_change_what_is_found_under_a_limit(limit: float) -> None:
    problem = layered(5, 3, 4, limit=limit, noise=0.1)
    tied = solve(problem, 60.0)
    free = solve(replace(problem, tied=None), 60.0)
    assert tied.cost == pytest.approx(free.cost, rel=1e-9)
    assert tied.gap <= 2e-9 and free.gap <= 2e-9
