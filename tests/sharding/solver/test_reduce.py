"""Reductions keep the least cost, also where parts of a problem share their tables."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from fxpar.sharding.solver import Edge, Live, Problem, evaluate
from fxpar.sharding.solver.exact_reductions import reduce
from fxpar.sharding.solver.network import (
    Flat,
    Tables,
    build,
    cost_of,
    fits,
    usage_of,
)
from tests.helpers.solver_problems import brute


def two_triangles(seed: int, differs: str) -> Problem:
    """Two triangles of nodes of three strategies, one of which occupies memory: alike
    but for ``differs``, of which all of the second is drawn anew."""
    random = np.random.default_rng(seed)

    def drawn(kind: str, *shape: int) -> list[np.ndarray]:
        first = list(random.integers(0, 9, shape).astype(float))
        again = list(random.integers(0, 9, shape).astype(float))
        return first + (again if kind == differs else first)

    costs, usages = drawn("costs", 3, 3), drawn("usages", 1, 3)
    tables = drawn("tables", 3, 3, 3)
    edges = []
    for part in range(2):
        at = 3 * part
        for e, (i, j) in enumerate(((0, 1), (1, 2), (0, 2))):
            edges.append(Edge(at + i, at + j, at + e if differs == "tables" else e))
    memory = tuple(Live(3 * part, 0, 9, usages[part]) for part in range(2))
    limit = 0.5 * sum(float(u.max()) for u in usages)
    return Problem(tuple(costs), tuple(edges), tuple(tables), memory, limit)


def least(flat: Flat) -> float:
    """The least cost of what is left, by trying everything."""
    choices = itertools.product(*map(range, flat.size.tolist()))
    every = [np.array(choice, np.int64) for choice in choices]
    fitting = [cost_of(flat, c) for c in every if fits(flat, usage_of(flat, c))]
    return min(fitting, default=math.inf)


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("differs", ["costs", "tables", "usages", "nothing"])
def test_what_differs_is_not_shared(differs: str, limited: bool) -> None:
    smaller = 0
    for seed in range(20):
        problem = two_triangles(seed, differs)
        if not limited:
            problem = Problem(problem.costs, problem.edges, problem.tables)
        best, _ = brute(problem)
        net = build(problem)
        reduce(net, math.inf)
        flat = Flat(net)
        assert least(flat) == pytest.approx(best), seed
        smaller += len(flat.size) < 6
        if not len(flat.size) and best < math.inf:
            cost, _ = evaluate(problem, net.expand({}))
            assert cost == pytest.approx(best), seed
    assert smaller > 15


def test_what_is_alike_is_reduced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = [], Tables.once

    def once(self: Tables, key: tuple, sources: object, make: Any) -> Any:
        return real(self, key, sources, lambda: made.append(1) or make())

    monkeypatch.setattr(Tables, "once", once)
    counts = []
    for differs in ("nothing", "costs"):
        made.clear()
        reduce(build(two_triangles(0, differs)), math.inf)
        counts.append(len(made))
    assert 0 < counts[0] < counts[1]
