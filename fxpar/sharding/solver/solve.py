"""From a Problem to a Solution: the phases, their order and their clock.

In: a Problem and seconds. Out: the cheapest choice found that fits, with a lower bound
that holds for every choice that fits. Cheap exact phases come first; each later phase
starts only if a gap and time are left. Never answers with a choice that does not fit,
and never with a bound above the optimum.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from fxpar.sharding.solver import (
    feasible,
    fixing,
    messages,
    milp,
    mix,
    prices,
    window,
)
from fxpar.sharding.solver.flat import Flat, cost_of, fits, flatten, usage_of
from fxpar.sharding.solver.network import Network, build
from fxpar.sharding.solver.problem import (
    Infeasible,
    Phase,
    Problem,
    Solution,
    evaluate,
    largest_at,
    peak,
    tie,
)
from fxpar.sharding.solver.reduce import reduce

# A gap below this is rounding.
EXACT = 1e-9
# An integer program with more variables than this rarely ends in useful time.
_PROGRAM = 250_000
# With tied nodes as one at most this share of a problem's nodes is left where it pays
# to solve that first.
_REPEATS = 0.6
# With no more than this, solving again takes no longer than looking for a short cut.
_SMALL = 20_000


class Search:
    """The best choice and bound so far, and the log."""

    def __init__(self, problem: Problem, seconds: float, tolerance: float) -> None:
        self.problem, self.tolerance = problem, tolerance
        self.begun = self.lap = time.perf_counter()
        self.enough = math.inf  # a bound that ends the search
        # Phases may be late by what they do between two looks at the clock.
        self.deadline = self.begun + seconds - min(0.05 * seconds, 0.3 + 0.02 * seconds)
        self.choice: tuple[int, ...] | None = None
        self.cost, self.bound = math.inf, -math.inf
        # Where nothing fits: the choice of the smallest peak met, and a bound on peaks.
        self.nearest: tuple[int, ...] | None = None
        self.least = 0.0
        self.notes: list[Phase] = []
        self.prices: tuple[tuple[int, float], ...] = ()
        integers = [np.all(np.isinf(c) | (c == np.rint(c))) for c in problem.costs]
        tables = [np.all(np.isinf(t) | (t == np.rint(t))) for t in problem.tables]
        self.whole = all(integers) and all(tables)

    def offer(self, choice: Sequence[int] | None) -> bool:
        """Take a choice of the Problem's nodes if it fits and is cheaper."""
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
            return  # what fits only within rounding, a program may call infeasible
        bound -= 1e-11 * abs(bound)
        if self.whole and math.isfinite(bound):
            bound = math.ceil(bound - 1e-6)
        self.bound = max(self.bound, bound)

    def note(self, name: str) -> None:
        """Write a line of the log."""
        now = time.perf_counter()
        self.notes.append(Phase(name, now - self.lap, self.cost, self.bound))
        self.lap = now

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.perf_counter()

    def closed(self) -> bool:
        """Whether the choice is proved to be within the tolerance of the optimum, or
        the bound is enough."""
        if self.choice is None:
            return self.bound == math.inf
        if self.bound >= self.enough:
            return True
        return self.cost - self.bound <= self.tolerance * abs(self.cost)

    def result(self) -> Solution:
        """The Solution, or Infeasible raised."""
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
            True,
            peak(self.problem, self.choice)[0],
            tuple(self.notes),
            self.prices,
        )


def solve(
    problem: Problem,
    seconds: float = 10.0,
    certify_seconds: float | None = None,
    *,
    seed: int = 0,
    fixed: Mapping[int, int] | None = None,
    start: Sequence[int] | None = None,
    tolerance: float = EXACT,
    enough: float = math.inf,
) -> Solution:
    """The cheapest choice that fits, found in at most ``seconds``.

    ``certify_seconds``: how many of them a bound may take while a choice could still
    be improved (a quarter by default). ``fixed``: nodes pinned to a strategy.
    ``start``: a known choice to improve on. Ends early once the gap is within
    ``tolerance``, or the bound reaches ``enough``. The same problem and ``seed`` have
    the same answer unless the clock ended a phase. The first call on a machine also
    compiles the inner loops, which is not counted.

    Raises Infeasible if nothing is allowed or nothing that fits was found.
    """
    messages.warm()
    search = Search(problem, seconds, tolerance)
    search.enough = enough
    certify = seconds / 4 if certify_seconds is None else certify_seconds
    net = build(problem, fixed)
    if start is not None and all(start[i] == k for i, k in (fixed or {}).items()):
        search.offer(start)
    search.note("build")
    if _repeats(problem) and not fixed:
        _layered(search, net, seed)
    elif not len(net.room):
        _pass(search, net, flatten(net), 0.15)
        search.note("messages")
    if not search.closed() and search.left() > 0:
        reduce(net, time.perf_counter() + 0.4 * search.left())
        search.note("reduce")
        _core(search, net, certify, seed)
    return search.result()


def resolve(
    problem: Problem,
    fixed: Mapping[int, int],
    start: Solution,
    seconds: float = 2.0,
    *,
    seed: int = 0,
) -> Solution:
    """Solve again with some nodes pinned to a strategy, from a solution of the problem
    without the pins, in at most ``seconds``.

    Small problems are solved to the end. In others the choice changes in windows that
    grow around the pinned nodes until growing no longer pays; the bound is that of
    ``start``. Where no window fits, the whole problem is solved.

    Raises Infeasible as ``solve`` does.
    """
    messages.warm()
    search = Search(problem, seconds, EXACT)
    net = build(problem, fixed)
    flat = flatten(net)
    search.bound = start.bound
    search.note("build")
    if milp.variables(flat) > _SMALL:
        choice = project(net, flat, start.choice)
        pinned = [i for i in fixed if start.choice[i] != fixed[i]]
        found = window.around(flat, choice, pinned, search.deadline, seed)
        _offer(search, net, flat, found)
        search.note("windows")
    if search.choice is not None:
        return search.result()
    return solve(problem, max(search.left(), 0.05), seed=seed, fixed=fixed)


def _core(search: Search, net: Network, certify: float, seed: int) -> None:
    """The phases after reduction."""
    flat = flatten(net)
    if not len(flat.size):
        if fits(flat, np.zeros(len(flat.room))):
            search.offer(net.expand({}))
            search.raise_bound(net.constant)
        elif search.choice is None:
            search.nearest = net.expand({})
            search.least = (search.problem.limit or 0.0) - float(flat.room.min())
            search.bound = math.inf
        return
    _pass(search, net, flat, 0.03 if len(flat.room) else 0.2)
    search.note("messages on the core")
    if search.closed():
        return
    unary, off = flat.unary, 0.0
    if len(flat.room):
        until = time.perf_counter() + min(certify, 0.5 * search.left())
        priced = prices.raise_prices(flat, until, target=search.cost)
        _take(search, net, flat, priced)
        unary = prices.priced_unary(flat, priced.prices)
        off = float(priced.prices @ flat.room)
        search.note("prices")
    if search.choice is None and len(flat.room):
        _fit(search, net, flat)
        search.note("least excess")
    size = milp.variables(flat)
    if size > _SMALL and not search.closed():
        until = time.perf_counter() + 0.4 * search.left()
        choice = _inside(search, net, flat)
        better, bound = fixing.solve_near(
            flat, unary, off, choice, until, search.tolerance
        )
        search.raise_bound(bound)
        _offer(search, net, flat, better)
        search.note("integer program of the best strategies")
    small = size <= _PROGRAM
    if not search.closed() and (small or search.choice is None):
        share = 0.4 if search.choice is not None else 0.7
        until = time.perf_counter() + share * search.left()
        magnitude = max(abs(search.bound), 1e-300)
        answer = milp.solve_program(flat, until, magnitude=magnitude)
        search.raise_bound(answer.bound)
        _offer(search, net, flat, answer.choice)
        search.note("integer program")
    if search.choice is not None and not search.closed():
        _improve(search, net, flat, unary, seed)
        search.note("windows")


def _take(
    search: Search,
    net: Network,
    flat: Flat,
    priced: prices.Priced,
    layer: np.ndarray | None = None,
) -> None:
    """What prices have brought, and mixtures of the choices met."""
    search.raise_bound(priced.bound)
    _offer(search, net, flat, priced.choice)
    where = np.flatnonzero(priced.prices)
    search.prices = tuple(
        (int(flat.when[r]), float(priced.prices[r])) for r in where.tolist()
    )
    choice = _inside(search, net, flat)
    if choice is not None and not search.closed():
        share = 0.05 if layer is None else 0.3
        until = time.perf_counter() + share * search.left()
        mixed = mix.mix(flat, choice, priced.met, until, layer)
        _offer(search, net, flat, mixed)
        if layer is not None:
            until = time.perf_counter() + 0.5 * search.left()
            _offer(search, net, flat, window.combine(flat, mixed, priced.met, until))


def _repeats(problem: Problem) -> bool:
    """Whether with tied nodes as one the problem is much smaller."""
    tied = problem.tied
    return tied is not None and len(set(tied)) <= _REPEATS * len(tied)


def _layered(search: Search, net: Network, seed: int) -> None:
    """Solve with tied nodes as one, which is small, and spread the answer out; from its
    prices those of the whole problem are near."""
    small, to = tie(search.problem)
    try:
        share = 0.25 if len(net.room) else 0.45
        found = solve(small, share * search.left(), seed=seed, tolerance=1e-4)
    except Infeasible:
        search.note("layers as one: none")
        return
    search.offer([found.choice[k] for k in to])
    search.note("layers as one")
    if search.choice is None:
        return
    flat = flatten(net)
    until = time.perf_counter() + (0.7 if len(flat.room) else 0.95) * search.left()
    if len(flat.room):
        begin = prices.prices_at(flat, found.prices)
        priced = prices.raise_prices(flat, until, target=search.cost, prices=begin)
        _take(search, net, flat, priced, mix.layers(flat, to))
        unary = prices.priced_unary(flat, priced.prices)
        search.note("prices")
    else:
        choice, bound = fixing.pass_pruned(flat, search.cost, until, search.tolerance)
        search.raise_bound(bound)
        _offer(search, net, flat, choice)
        unary = flat.unary
        search.note("messages")
    if search.choice is not None and not search.closed():
        _improve(search, net, flat, unary, seed)
        search.note("windows")


def _pass(search: Search, net: Network, flat: Flat, share: float) -> None:
    until = time.perf_counter() + share * search.left()
    choice, _, bound = messages.pass_messages(flat, until)
    search.raise_bound(bound)
    _offer(search, net, flat, choice)


def _fit(search: Search, net: Network, flat: Flat) -> None:
    """Look for any choice that fits, or a proof that there is none."""
    assert search.problem.limit is not None
    until = time.perf_counter() + 0.3 * search.left()
    found = feasible.least_excess(flat, until)
    if found.choice is not None:
        search.nearest = net.expand(_named(flat, found.choice))
        search.offer(search.nearest)
    search.least = max(search.least, search.problem.limit + found.bound)
    if search.choice is None and found.bound > flat.slack:
        search.bound = math.inf


def _named(flat: Flat, choice: np.ndarray) -> dict[int, int]:
    return {int(i): int(k) for i, k in zip(flat.nodes, choice, strict=True)}


def _offer(search: Search, net: Network, flat: Flat, choice: np.ndarray | None) -> bool:
    if choice is None:
        return False
    return search.offer(net.expand(_named(flat, choice)))


def _improve(
    search: Search,
    net: Network,
    flat: Flat,
    unary: np.ndarray,
    seed: int,
) -> None:
    """Large neighbourhood search from the best choice; ``unary``: with prices."""
    choice = _inside(search, net, flat)
    if choice is None:
        return
    state = messages.start(flat)
    until = time.perf_counter() + 0.1 * search.left()
    messages.converge(state, unary, until, patience=10)
    choice, _ = window.improve(
        flat,
        choice,
        search.deadline,
        bound=search.bound,
        merit=state.excess,
        seed=seed,
        tolerance=search.tolerance,
    )
    _offer(search, net, flat, choice)


def _inside(search: Search, net: Network, flat: Flat) -> np.ndarray | None:
    """The best choice in the Flat, or None if it is not there or not known."""
    if search.choice is None:
        return None
    choice = project(net, flat, search.choice)
    allowed = math.isfinite(cost_of(flat, choice))
    return choice if allowed and fits(flat, usage_of(flat, choice)) else None


def project(net: Network, flat: Flat, choice: Sequence[int]) -> np.ndarray:
    """A choice of the Problem in the Flat; strategies that were removed become the
    first one left."""
    out = np.zeros(len(flat.size), np.int64)
    for place, i in enumerate(flat.nodes.tolist()):
        at = np.flatnonzero(net.names[i] == choice[i])
        out[place] = at[0] if len(at) else 0
    return out


def _nothing_fits(search: Search) -> Infeasible:
    """The error for a problem without an answer, with the choice that came closest."""
    problem, near = search.problem, search.nearest
    if near is None:
        return Infeasible(
            "no choice is allowed: every one is forbidden or exceeds the limit"
            if search.bound == math.inf
            else "no allowed choice was found in the time given",
            limit=problem.limit,
        )
    needed, time_of_peak = peak(problem, near)
    proved = search.bound == math.inf or search.least > (problem.limit or 0.0)
    largest = largest_at(problem, near, time_of_peak)
    items = ", ".join(f"node {i}: {usage:.4g}" for i, usage in largest)
    return Infeasible(
        f"the limit is {problem.limit:.6g}; the smallest peak "
        f"{'there is' if proved else 'found'} needs {needed:.6g} "
        f"(at time {time_of_peak}; largest: {items})",
        needed,
        search.least,
        problem.limit,
        largest,
    )
