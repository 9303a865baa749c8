"""The solver against every choice of small problems, and what it promises of others."""

from __future__ import annotations

import importlib
import math
import time
from dataclasses import replace

import numpy as np
import pytest

from fxpar.sharding.solver import (
    Edge,
    Infeasible,
    Live,
    Problem,
    evaluate,
    solve,
)
from tests.helpers.solver_problems import brute, layered, small

# The package's function hides the module of the same name.
phases = importlib.import_module("fxpar.sharding.solver.solve")


def near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


@pytest.mark.parametrize("block", range(8))
def test_small_problems_are_solved_to_the_optimum(block: int) -> None:
    for seed in range(40 * block, 40 * block + 40):
        problem = small(seed)
        best, peak = brute(problem)
        try:
            found = solve(problem, 10.0)
        except Infeasible as error:
            assert best == math.inf, seed
            if peak < math.inf:
                cost, usage = evaluate(problem, error.choice)
                assert cost < math.inf and usage > problem.limit, seed
            continue
        cost, usage = evaluate(problem, found.choice)
        assert near(cost, best) and found.cost == cost, seed
        assert usage == found.peak
        assert problem.limit is None or usage <= problem.limit * (1 + 1e-12)
        assert found.bound <= best + 1e-9 * abs(best) and found.gap <= 2e-9, seed


def test_the_fuzz_meets_every_case() -> None:
    problems = [small(seed) for seed in range(150)]
    optima = [brute(p)[0] for p in problems]
    assert sum(best == math.inf for best in optima) > 10
    assert (
        sum(
            p.limit is not None and b < math.inf
            for p, b in zip(problems, optima, strict=True)
        )
        > 30
    )
    slack = [brute(replace(p, limit=None))[0] for p in problems]
    binding = [b < math.inf and a < b for a, b in zip(slack, optima, strict=True)]
    assert sum(binding) > 15


def test_an_infeasible_problem_says_what_it_needs() -> None:
    usage = np.array([4.0, 6.0])
    memory = (Live(0, 0, 4, usage), Live(1, 2, 6, usage), Live(2, 5, 9, usage))
    problem = Problem((np.zeros(2),) * 3, (), (), memory, limit=7.0)
    with pytest.raises(Infeasible, match="8") as caught:
        solve(problem)
    error = caught.value
    assert (error.limit, error.choice) == (7.0, (0, 0, 0))
    assert isinstance(error, ValueError)


def test_a_limit_that_is_met_exactly_but_for_rounding_is_met() -> None:
    usage = np.array([0.1, 0.2])
    memory = tuple(Live(i, 0, 2, usage) for i in range(3))
    costs = (np.array([2.0, 1.0]),) * 3
    assert 0.1 + 0.1 + 0.1 > 0.3
    found = solve(Problem(costs, (), (), memory, limit=0.3))
    assert found.choice == (0, 0, 0)
    with pytest.raises(Infeasible):
        solve(Problem(costs, (), (), memory, limit=0.3 - 1e-9))


def test_forbidden_everywhere_is_infeasible() -> None:
    table = np.full((2, 2), np.inf)
    problem = Problem((np.zeros(2), np.zeros(2)), (Edge(0, 1, 0),), (table,))
    with pytest.raises(Infeasible, match="allowed"):
        solve(problem)


@pytest.mark.parametrize("limit", [None, 0.3])
def test_order_of_nodes_does_not_change_the_cost(limit: float | None) -> None:
    problem = replace(layered(5, 3, 4, limit=limit), tied=None)
    order = np.random.default_rng(1).permutation(len(problem.costs))
    place = {int(old): new for new, old in enumerate(order)}
    turned = Problem(
        tuple(problem.costs[i] for i in order),
        tuple(Edge(place[j], place[i], t) for i, j, t in reversed(problem.edges)),
        tuple(np.ascontiguousarray(t.T) for t in problem.tables),
        tuple(m._replace(node=place[m.node]) for m in problem.memory),
        problem.limit,
    )
    a, b = solve(problem, 60.0), solve(turned, 60.0)
    assert near(a.cost, b.cost) and a.gap <= 2e-9 and b.gap <= 2e-9


def test_the_same_problem_has_the_same_answer() -> None:
    problem = layered(5, 3, 4, limit=0.25, noise=0.2)
    a, b = solve(problem, 60.0), solve(problem, 60.0)
    assert a.choice == b.choice and a.gap <= 2e-9  # no clock ended the search


def test_ties_cost_nothing_when_memory_is_slack() -> None:
    problem = layered(30, 6, 5)
    tied = solve(problem, 10.0)
    free = solve(replace(problem, tied=None), 10.0)
    assert near(tied.cost, free.cost) and tied.gap <= 2e-9


def test_tied_problems_cost_what_their_spread_choices_cost() -> None:
    problem = layered(5, 4, 3, limit=0.5, noise=0.3)
    tied, to = phases.tie(problem)
    random = np.random.default_rng(0)
    for _ in range(20):
        choice = [int(random.integers(len(c))) for c in tied.costs]
        wide = [choice[k] for k in to]
        cost, peak = evaluate(problem, wide)
        assert near(evaluate(tied, choice)[0], cost)
        assert near(evaluate(tied, choice)[1], peak)


@pytest.mark.slow
def test_repeated_layers_under_a_limit_are_certified() -> None:
    problem = layered(40, 8, 6, limit=0.3)
    found = solve(problem, 40.0, tolerance=0.02)
    slack = solve(replace(problem, limit=None), 10.0)
    assert found.peak <= problem.limit * (1 + 1e-12)
    assert found.bound <= found.cost and found.gap <= 0.02
    assert found.cost > slack.cost  # or the limit tested nothing


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_the_time_limit_is_kept(seconds: float) -> None:
    random = np.random.default_rng(0)
    count, k = 1500, 12
    tables = tuple(random.random((k, k)) for _ in range(40))
    ends = random.integers(0, count, (4000, 2))
    edges = tuple(
        Edge(int(i), int(j), int(t))
        for (i, j), t in zip(ends, random.integers(0, 40, 4000), strict=True)
    )
    costs = tuple(random.random(k) for _ in range(count))
    memory = tuple(Live(i, i, i + 200, random.random(k)) for i in range(count))
    problem = Problem(costs, edges, tables, memory, limit=60.0)
    solve(problem, 0.05)  # compiles, once
    begun = time.process_time()  # other processes' work does not count
    found = solve(problem, seconds)
    assert time.process_time() - begun < seconds + 0.5
    assert found.gap > 0  # it did need the time
    assert evaluate(problem, found.choice) == (found.cost, found.peak)
    assert found.peak <= 60.0 * (1 + 1e-12)


def test_pinned_problems_are_solved_to_the_optimum() -> None:
    tried = 0
    for seed in range(1000, 1040):
        problem = small(seed)
        if brute(problem)[0] == math.inf:
            continue
        node, start = seed % len(problem.costs), solve(problem, 10.0)
        for strategy in range(len(problem.costs[node])):
            fixed = {node: strategy}
            best = brute(problem, fixed)[0]
            if best == math.inf:
                with pytest.raises(Infeasible):
                    solve(problem, fixed=fixed)
                continue
            found = solve(problem, fixed=fixed)
            assert found.choice[node] == strategy
            assert near(found.cost, best), (seed, fixed)
            assert found.bound <= best + 1e-9 * abs(best)
            tried += found.cost > start.cost
    assert tried > 10


def test_evaluate_counts_by_the_definition() -> None:
    table = np.array([[1.0, 2.0], [3.0, np.inf]])
    memory = (
        Live(0, 0, 3, np.array([1.0, 5.0])),
        Live(0, 2, 4, np.array([2.0, 2.0])),
        Live(1, 3, 9, np.array([4.0, 1.0])),
        Live(1, 5, 5, np.array([99.0, 99.0])),
    )
    costs = (np.array([10.0, 20.0]), np.array([0.5, 0.25]))
    problem = Problem(costs, (Edge(0, 1, 0), Edge(1, 1, 0)), (table,), memory, 9.0)
    assert evaluate(problem, (0, 0)) == (10 + 0.5 + 1 + 1, 6.0)
    assert evaluate(problem, (1, 0)) == (20 + 0.5 + 3 + 1, 7.0)
    assert evaluate(problem, (0, 1))[0] == math.inf
