"""Tracks how far a search of the solver has come: its best choice and bound, clock and
log.

In: choices and bounds that phases offer. Out: the best of them as a Solution, or
Infeasible raised. Never: takes a choice that does not fit, or a bound it is not given.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

import numpy as np

from fxpar.sharding.solver import work_clock
from fxpar.sharding.solver.flat_arrays import Flat, cost_of, fits, usage_of
from fxpar.sharding.solver.network import Network
from fxpar.sharding.solver.problem import (
    Infeasible,
    Problem,
    Solution,
    SolverPhase,
    evaluate,
    largest_at,
    peak,
)


class Search:
    """Holds the best choice and bound so far, and the log."""

    def __init__(self, problem: Problem, seconds: float, tolerance: float) -> None:
        self.problem, self.tolerance = problem, tolerance
        self.begun = self.lap = time.perf_counter()
        began = work_clock.now()
        self.enough = math.inf  # a bound that ends the search
        # Phases may be late by the work they do between two looks at the clock.
        self.deadline = began + seconds - min(0.05 * seconds, 0.3 + 0.02 * seconds)
        self.choice: tuple[int, ...] | None = None
        self.cost, self.bound = math.inf, -math.inf
        # Where nothing fits: the choice of the smallest peak met, and a bound on peaks.
        self.nearest: tuple[int, ...] | None = None
        self.least = 0.0
        self.notes: list[SolverPhase] = []
        self.prices: tuple[tuple[int, float], ...] = ()
        arrays = itertools.chain(problem.costs, problem.tables)
        self.whole = all(np.all(np.isinf(x) | (x == np.rint(x))) for x in arrays)

    def offer(self, choice: Sequence[int] | None) -> bool:
        """Take a choice of the Problem's nodes if it fits and is cheaper; return
        whether it is."""
        if choice is None:
            return False
        cost, top = evaluate(self.problem, choice)
        limit = self.problem.limit
        if cost >= self.cost or (limit is not None and top > limit * (1 + 1e-12)):
            return False
        self.choice, self.cost = tuple(int(k) for k in choice), cost
        return True

    def raise_bound(self, bound: float) -> None:
        """Take a bound if it is higher. Whole costs have a whole optimum."""
        if bound == math.inf and self.choice is not None:
            return  # a choice that fits only within rounding may count as infeasible
        bound -= 1e-11 * abs(bound)
        if self.whole and math.isfinite(bound):
            bound = math.ceil(bound - 1e-6)
        self.bound = max(self.bound, bound)

    def note(self, name: str) -> None:
        """Write a line of the log."""
        now = time.perf_counter()
        self.notes.append(SolverPhase(name, now - self.lap, self.cost, self.bound))
        self.lap = now

    def seconds_left(self) -> float:
        """Return the seconds of work until the deadline."""
        return work_clock.left(self.deadline)

    def closed(self) -> bool:
        """Return whether the choice is proved to be within the tolerance of the
        optimum, or the bound is enough."""
        if self.choice is None:
            return self.bound == math.inf
        if self.bound >= self.enough:
            return True
        return self.cost - self.bound <= self.tolerance * abs(self.cost)

    def result(self) -> Solution:
        """Return the Solution, or raise Infeasible."""
        if self.choice is None:
            raise _nothing_fits(self)
        bound = min(self.bound, self.cost)
        gap = (self.cost - bound) / abs(self.cost) if self.cost > bound else 0.0
        return Solution(
            self.choice,
            self.cost,
            bound,
            gap,
            time.perf_counter() - self.begun,
            peak(self.problem, self.choice)[0],
            tuple(self.notes),
            self.prices,
            stopped=work_clock.is_stopped(),
        )


def choice_by_node(flat: Flat, choice: np.ndarray) -> dict[int, int]:
    return {int(i): int(k) for i, k in zip(flat.nodes, choice, strict=True)}


def offer(search: Search, net: Network, flat: Flat, choice: np.ndarray | None) -> bool:
    if choice is None:
        return False
    return search.offer(net.expand(choice_by_node(flat, choice)))


def inside(search: Search, net: Network, flat: Flat) -> np.ndarray | None:
    """Return the best choice in the Flat, or None if it is not there or not known."""
    if search.choice is None:
        return None
    choice = project(net, flat, search.choice)
    allowed = math.isfinite(cost_of(flat, choice))
    return choice if allowed and fits(flat, usage_of(flat, choice)) else None


def project(net: Network, flat: Flat, choice: Sequence[int]) -> np.ndarray:
    """Return a choice of the Problem in the Flat; strategies that were removed become
    the first one left."""
    out = np.zeros(len(flat.size), np.int64)
    for place, i in enumerate(flat.nodes.tolist()):
        at = np.flatnonzero(net.names[i] == choice[i])
        out[place] = at[0] if len(at) else 0
    return out


def _nothing_fits(search: Search) -> Infeasible:
    """Return the error for a problem without an answer, with the choice that came
    closest."""
    problem, closest = search.problem, search.nearest
    if closest is None:
        return Infeasible(
            "no choice is allowed: every one is forbidden or exceeds the limit"
            if search.bound == math.inf
            else "no allowed choice was found in the time given",
            limit=problem.limit,
        )
    least_peak, time_of_peak = peak(problem, closest)
    proved = search.bound == math.inf or search.least > (problem.limit or 0.0)
    largest = largest_at(problem, closest, time_of_peak)
    items = ", ".join(f"node {i}: {usage:.4g}" for i, usage in largest)
    return Infeasible(
        f"the limit is {problem.limit:.6g}; the smallest peak "
        f"{'there is' if proved else 'found'} needs {least_peak:.6g} "
        f"(at time {time_of_peak}; largest: {items})",
        least_peak,
        search.least,
        problem.limit,
        largest,
        closest,
    )
