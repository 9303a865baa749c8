"""Reduced costs: no bound they prove is above the optimum, on every choice tried."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from fxpar.sharding.solver import (
    Infeasible,
    Problem,
    message_passing,
    work_clock,
)
from fxpar.sharding.solver.network import Flat, Network, build
from tests.helpers.solver_problems import brute, small

# The package has a function of this name.
phases = importlib.import_module("fxpar.sharding.solver.solve")

SEEDS = range(120)


def cases(memory: bool) -> Iterator[tuple[Problem, Network, Flat, float]]:
    """Random problems of which something is left to choose, with their least cost."""
    for seed in SEEDS:
        problem = small(seed, memory=memory)
        if not memory:
            problem = replace(problem, limit=None)
        try:
            net = build(problem)
        except Infeasible:
            continue
        best, _ = brute(problem)
        if math.isfinite(best):
            yield problem, net, Flat(net), best


def above(bound: float, best: float) -> bool:
    return bound > best + 1e-9 * (1 + abs(best))


def test_a_strategy_costs_at_least_its_excess() -> None:
    tried = tight = 0
    for problem, net, flat, _ in cases(memory=False):
        state = message_passing.start(flat)
        until = work_clock.now() + 1.0
        _, before = message_passing.converge(state, flat.unary, until, patience=4)
        for place, i in enumerate(flat.nodes.tolist()):
            for k, name in enumerate(net.names[i].tolist()):
                excess = float(state.excess[flat.at[place] + k])
                with_it, _ = brute(problem, {i: name})
                claimed = before + flat.constant + excess
                assert not above(claimed, with_it), (problem, i, name)
                tried += 1
                tight += claimed > with_it - 1e-6 * (1 + abs(with_it))
    assert tried > 200 and tight > tried / 2


@pytest.mark.parametrize("slack", [0.0, 0.3])
def test_messages_without_hopeless_strategies(slack: float) -> None:
    closed = 0
    for problem, _, flat, best in cases(memory=False):
        upper = best + slack * abs(best)
        until = work_clock.now() + 1.0
        choice, bound = phases.pass_pruned(flat, upper, until, 1e-9)
        assert not above(bound, best), problem
        assert choice is None or (choice < flat.size).all()
        closed += bound >= best - 1e-6 * (1 + abs(best))
    assert closed > 50


def test_what_rounding_leaves_nothing_of_is_proved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then nothing is below what is known."""

    def nothing(*args: object, **how: object) -> None:
        raise Infeasible("nothing is left")

    monkeypatch.setattr(phases, "reduce", nothing)
    closed = 0
    for _, _, flat, best in cases(memory=False):
        upper = best + 0.5 * abs(best)  # not proved before the reduction
        until = work_clock.now() + 1.0
        choice, bound = phases.pass_pruned(flat, upper, until, 1e-9)
        assert choice is not None
        closed += bound == upper
    assert closed > 20


def test_excess_is_of_the_costs_it_was_made_with() -> None:
    for _, _, flat, best in cases(memory=False):
        state = message_passing.start(flat)
        state.sweep(flat.unary, 3)
        least = np.minimum.reduceat(state.excess, flat.at[:-1])
        assert least == pytest.approx(0.0, abs=1e-9) and math.isfinite(best)
