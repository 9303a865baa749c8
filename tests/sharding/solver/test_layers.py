"""Layers that repeat, under a limit: mixtures against every one of them, and prices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from fxpar.sharding.solver import (
    Edge,
    Infeasible,
    Live,
    Problem,
    evaluate,
    lagrangian,
    neighborhood_search,
    solve,
    work_clock,
)
from fxpar.sharding.solver.network import Flat, build, cost_of, fits, usage_of
from tests.helpers.solver_problems import brute, layered, small

SEEDS = range(60)


def soon() -> float:
    return work_clock.now() + 20.0


def pairs(memory: bool) -> Iterator[tuple[Flat, np.ndarray, np.ndarray]]:
    """Random problems with two random choices, and what may be forbidden in them."""
    for seed in SEEDS:
        try:
            flat = Flat(build(small(seed, memory=memory)))
        except Infeasible:
            continue
        random = np.random.default_rng(seed)
        if len(flat.size):
            yield flat, random.integers(0, flat.size), random.integers(0, flat.size)


def test_combined_choices_are_the_best_of_all_combinations() -> None:
    better = 0
    for flat, a, b in pairs(memory=True):
        both = [sorted({int(x), int(y)}) for x, y in zip(a, b, strict=True)]
        every = [np.array(c) for c in itertools.product(*both)]
        fitting = [cost_of(flat, c) for c in every if fits(flat, usage_of(flat, c))]
        best = min(fitting, default=math.inf)
        if cost_of(flat, a) == math.inf:
            continue
        found = neighborhood_search.combine(flat, a, [b], soon())
        fitted = fits(flat, usage_of(flat, a))
        if found is None:
            assert best == math.inf or (fitted and best >= cost_of(flat, a) - 1e-9)
            continue
        assert fits(flat, usage_of(flat, found))
        assert all(k in own for k, own in zip(found.tolist(), both, strict=True))
        assert cost_of(flat, found) <= best + 1e-4 * abs(best)
        better += not fitted or best < cost_of(flat, a)
    assert better > 10


def test_what_is_combined_are_the_first_of_the_others() -> None:
    """The best come first."""
    count = neighborhood_search._COMBINED
    problem = Problem((np.arange(count + 2.0)[::-1],))
    flat = Flat(build(problem))
    others = [np.array([k]) for k in range(1, count + 2)]
    found = neighborhood_search.combine(flat, np.array([0]), others, soon())
    assert found is not None and found.tolist() == [count]


def test_prices_of_columns_prove_no_more_than_is_true() -> None:
    met = tight = equal = 0
    for seed in SEEDS:
        problem = small(seed, memory=True)
        best, _ = brute(problem)
        if best == math.inf:
            continue
        flat = Flat(build(problem))
        if not len(flat.room) or not len(flat.size):
            continue
        priced = lagrangian.generate(flat, soon(), np.zeros(len(flat.room)))
        assert (priced.prices >= 0).all()
        assert priced.bound <= best + 1e-9 * (1 + abs(best)), seed
        if priced.choice is not None:
            assert fits(flat, usage_of(flat, priced.choice))
            assert priced.cost == pytest.approx(cost_of(flat, priced.choice))
            assert priced.cost >= best - 1e-9 * (1 + abs(best))
            equal += priced.cost <= best + 1e-9 * (1 + abs(best))
        slow = lagrangian.raise_prices(flat, work_clock.now() + 0.05)
        scale = 1e-3 * (1 + abs(best))
        met, tight = met + 1, tight + (priced.bound >= slow.bound - scale)
    assert met > 20 and tight > 0.9 * met and equal > met / 2


def test_choices_that_fit_and_that_do_not_come_in_turn_the_best_first() -> None:
    costs, usage = np.array([0.0, 1.0, 2.0, 1.5]), np.array([10.0, 3.0, 0.0, 8.0])
    problem = Problem((costs,), (), (), (Live(0, 0, 1, usage),), 5.0)
    flat = Flat(build(problem))
    met = [np.array([k]) for k in range(4)]
    turns = lagrangian.in_turn(flat, np.array([1.0]), met)
    assert [int(choice[0]) for choice in turns] == [2, 3, 1, 0]
    turns = lagrangian.in_turn(flat, np.array([0.0]), met)
    assert [int(choice[0]) for choice in turns] == [1, 0, 2, 3]


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
    one = next(note for note in found.notes if note.name == "layers as one")
    mixed = next(note for note in found.notes if note.name == "layers mixed")
    assert one.cost == 40.0  # all small
    assert mixed.cost == found.cost == 2 * (7 * 1.0 + 3 * 2.0)
    assert found.gap <= 1e-9
    assert evaluate(problem, found.choice) == (26.0, 70.0)


@pytest.mark.parametrize("limit", [0.15, 0.3, 0.6])
def test_ties_do_not_change_what_is_found_under_a_limit(limit: float) -> None:
    problem = layered(5, 3, 4, limit=limit, noise=0.1)
    tied = solve(problem, 60.0)
    free = solve(replace(problem, tied=None), 60.0)
    assert any(note.name == "layers mixed" for note in tied.notes)
    assert tied.cost == pytest.approx(free.cost, rel=1e-9)
    assert tied.gap <= 2e-9 and free.gap <= 2e-9
