"""Goes from a Problem to a Solution: the phases, their order and their clock.

In: a Problem and seconds of work (``work_clock``). Out: the cheapest choice found that
fits, with a lower bound that holds for every choice that fits; ``Search`` holds the
best of both so far. Cheap exact phases come first; each later phase starts only if a
gap and seconds are left. Never: answers with a choice that does not fit, or with a
bound above the optimum.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fxpar.sharding.solver import (
    lagrangian,
    message_passing,
    milp,
    neighborhood_search,
    work_clock,
)
from fxpar.sharding.solver.exact_reductions import reduce
from fxpar.sharding.solver.network import (
    Flat,
    Network,
    build,
    cost_of,
    fits,
    usage_of,
)
from fxpar.sharding.solver.problem import (
    Infeasible,
    Problem,
    Solution,
    evaluate,
    peak,
    tie,
)


class Search:
    """Holds the best choice and bound so far."""

    def __init__(self, problem: Problem, seconds: float, tolerance: float) -> None:
        self.problem, self.tolerance = problem, tolerance
        self.begun = time.perf_counter()
        began = work_clock.now()
        self.enough = math.inf  # a bound that ends the search
        # Phases may be late by the work they do between two looks at the clock.
        self.deadline = began + seconds - min(0.05 * seconds, 0.3 + 0.02 * seconds)
        self.choice: tuple[int, ...] | None = None
        self.cost, self.bound = math.inf, -math.inf
        # Where nothing fits: the choice of the smallest peak met.
        self.nearest: tuple[int, ...] | None = None

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
        """Take a bound if it is higher."""
        if bound == math.inf and self.choice is not None:
            return  # a choice that fits only within rounding may count as infeasible
        self.bound = max(self.bound, bound - 1e-11 * abs(bound))

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
        return Solution(
            self.choice,
            self.cost,
            min(self.bound, self.cost),
            time.perf_counter() - self.begun,
            peak(self.problem, self.choice)[0],
            stopped=work_clock.is_stopped(),
        )


def offer(search: Search, net: Network, flat: Flat, choice: np.ndarray | None) -> bool:
    if choice is None:
        return False
    return search.offer(net.expand(flat.nodes, choice))


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
    if closest is not None:
        need = peak(problem, closest)[0]
        what = f"the smallest peak found is {need:.6g}, the limit {problem.limit:.6g}"
    elif search.bound == math.inf:
        what = "no choice is allowed: every one is forbidden or exceeds the limit"
    else:
        what = "no allowed choice was found in the time given"
    return Infeasible(what, problem.limit, closest)


# A gap below this is rounding.
EXACT = 1e-9
# An integer program with more variables than this rarely ends in useful time.
_PROGRAM = 250_000
# Solving with tied nodes as one first pays if at most this share of a problem's nodes
# is left.
_REPEATS = 0.6


def solve(
    problem: Problem,
    seconds: float = 10.0,
    *,
    fixed: Mapping[int, int] | None = None,
    start: Sequence[int] | None = None,
    tolerance: float = EXACT,
    enough: float = math.inf,
) -> Solution:
    """Return the cheapest choice that fits, found in at most ``seconds`` of work.

    ``fixed``: nodes pinned to a strategy. ``start``: a known choice to improve on. Ends
    early once the gap is within ``tolerance``, or the bound reaches ``enough``. The
    same problem has the same answer, unless wall-clock time far above it
    ended it (``Solution.stopped``). The first call on a machine also compiles the inner
    loops, which is not counted.

    Raises Infeasible if nothing is allowed or nothing that fits was found.
    """
    message_passing.warm()
    with work_clock.within(seconds):
        search = Search(problem, seconds, tolerance)
        search.enough = enough
        net = build(problem, fixed)
        if start is not None and all(start[i] == k for i, k in (fixed or {}).items()):
            search.offer(start)
        if _is_repetitive(problem) and not fixed:
            _layered(search, net)
        elif not len(net.room):
            _pass(search, net, Flat(net), 0.15)
        if not search.closed() and search.seconds_left() > 0:
            reduce(net, work_clock.now() + 0.4 * search.seconds_left())
            _core(search, net, seconds / 4)
        return search.result()


def _core(search: Search, net: Network, certify: float) -> None:
    """Run the phases after reduction. ``certify``: seconds that a bound may take while
    a choice could still be improved."""
    flat = Flat(net)
    if not len(flat.size):
        if fits(flat, np.zeros(len(flat.room))):
            search.offer(net.expand())
            search.raise_bound(net.constant)
        elif search.choice is None:
            search.nearest = net.expand()
            search.bound = math.inf
        return
    _pass(search, net, flat, 0.03 if len(flat.room) else 0.2)
    if search.closed():
        return
    unary = flat.unary
    if len(flat.room):
        until = work_clock.now() + min(certify, 0.5 * search.seconds_left())
        priced = lagrangian.raise_prices(flat, until, target=search.cost)
        unary = _take(search, net, flat, priced)
    if search.choice is None and len(flat.room):
        _fit(search, net, flat)
    small = milp.variables(flat) <= _PROGRAM
    if not search.closed() and (small or search.choice is None):
        share = 0.4 if search.choice is not None else 0.7
        until = work_clock.now() + share * search.seconds_left()
        magnitude = abs(search.bound) or 1.0
        answer = milp.solve_program(flat, until, magnitude=magnitude)
        search.raise_bound(answer.bound)
        offer(search, net, flat, answer.choice)
    if search.choice is not None and not search.closed():
        _improve(search, net, flat, unary)


def _take(
    search: Search, net: Network, flat: Flat, priced: lagrangian.Priced
) -> np.ndarray:
    """Take the bound and choice that prices have brought; return costs with them."""
    search.raise_bound(priced.bound)
    offer(search, net, flat, priced.choice)
    return lagrangian.priced_unary(flat, priced.prices)


def _is_repetitive(problem: Problem) -> bool:
    """Return whether the problem with tied nodes as one is much smaller."""
    tied = problem.tied
    return tied is not None and len(set(tied)) <= _REPEATS * len(tied)


def solve_tied(problem: Problem, seconds: float, tolerance: float) -> Solution:
    """Return a choice that is equal for all tied nodes; nothing is proved of others.
    Raises Infeasible if none such is found."""
    once, to = tie(problem)
    try:
        solution = solve(once, seconds, tolerance=tolerance)
    except Infeasible as error:
        if error.choice is not None:
            error.choice = tuple(error.choice[k] for k in to)
        raise
    choice = tuple(solution.choice[k] for k in to)
    cost, top = evaluate(problem, choice)
    return replace(solution, choice=choice, cost=cost, bound=0.0, peak=top)


def _layered(search: Search, net: Network) -> None:
    """Solve with tied nodes as one, which is small, and give all nodes its answer; then
    bound the whole problem, under a limit from the prices found so."""
    small, to = tie(search.problem)
    try:
        share = 0.08 if len(net.room) else 0.45
        tied_solution = solve(small, share * search.seconds_left(), tolerance=1e-4)
    except Infeasible:
        return
    search.offer([tied_solution.choice[k] for k in to])
    if search.choice is None:
        return
    reduce(net, work_clock.now() + 0.3 * search.seconds_left())
    flat = Flat(net)
    if search.closed() or not len(flat.size):
        return
    unary = flat.unary
    if len(flat.room):
        prices = _tied_prices(search, small)
        until = work_clock.now() + 0.5 * search.seconds_left()
        priced = lagrangian.raise_prices(
            flat,
            until,
            target=search.cost,
            prices=lagrangian.prices_at(flat, prices),
            patience=10,
            tolerance=max(1e-6, search.tolerance),
        )
        unary = _take(search, net, flat, priced)
    else:
        until = work_clock.now() + 0.95 * search.seconds_left()
        choice, bound = pass_pruned(flat, search.cost, until, search.tolerance)
        search.raise_bound(bound)
        offer(search, net, flat, choice)
    if not search.closed():
        _improve(search, net, flat, unary)


def pass_pruned(
    flat: Flat, upper: float, deadline: float, tolerance: float
) -> tuple[np.ndarray | None, float]:
    """Return a choice or None, and a bound that holds for all choices below ``upper``:
    by messages on everything, then, reduced, without the strategies that are in no
    choice below ``upper``. Memory is ignored.

    A strategy's excess over the bound of message passing is the least that a choice
    with it costs more: reduced-cost fixing by min-marginals (Savchynskyy et al.,
    "Global MAP optimality by shrinking the combinatorial search area", NIPS 2013).
    """
    begun = work_clock.now()
    state = message_passing.start(flat)
    enough = upper - tolerance * abs(upper) - flat.constant
    until = begun + 0.35 * (deadline - begun)
    bound, before = message_passing.converge(state, flat.unary, until, enough=enough)
    bound += flat.constant
    choice = state.choice.copy()
    state.descend(flat.unary, choice)
    if upper - bound <= tolerance * abs(upper):
        return choice, bound
    keep = state.excess <= upper - (before + flat.constant) + 1e-9 * abs(upper)
    net = neighborhood_search.restrict(flat, choice, np.arange(len(flat.size)))
    try:
        for i in range(len(flat.size)):
            net.keep(i, np.flatnonzero(keep[flat.at[i] : flat.at[i + 1]]))
        now = work_clock.now()
        reduce(net, now + 0.5 * (deadline - now))
    except Infeasible:  # ``upper`` is the optimum, but for rounding
        return choice, max(bound, upper)
    core = Flat(net)
    better, _, higher = message_passing.pass_messages(
        core, deadline, tolerance=tolerance
    )
    bound = max(bound, min(higher, upper))
    if better is None:
        return choice, bound
    return np.array(net.expand(core.nodes, better), np.int64), bound


def _tied_prices(search: Search, small: Problem) -> tuple[tuple[int, float], ...]:
    """Return the prices that are best with tied nodes as one, found with more patience
    than a problem of all nodes allows."""
    core = build(small)
    reduce(core, work_clock.now() + 0.1 * search.seconds_left())
    tied = Flat(core)
    until = work_clock.now() + 0.1 * search.seconds_left()
    priced = lagrangian.raise_prices(tied, until, patience=200)
    return lagrangian.prices_by_moment(tied, priced.prices)


def _pass(search: Search, net: Network, flat: Flat, share: float) -> None:
    until = work_clock.now() + share * search.seconds_left()
    choice, _, bound = message_passing.pass_messages(flat, until)
    search.raise_bound(bound)
    offer(search, net, flat, choice)


def _fit(search: Search, net: Network, flat: Flat) -> None:
    """Look for any choice that fits, or a proof that there is none."""
    assert search.problem.limit is not None
    until = work_clock.now() + 0.3 * search.seconds_left()
    excess = lagrangian.least_excess(flat, until)
    if excess.choice is not None:
        search.nearest = net.expand(flat.nodes, excess.choice)
        search.offer(search.nearest)
    if search.choice is None and excess.bound > flat.slack:
        search.bound = math.inf


def _improve(search: Search, net: Network, flat: Flat, unary: np.ndarray) -> None:
    """Search large neighbourhoods from the best choice; ``unary``: with prices."""
    assert search.choice is not None
    choice = project(net, flat, search.choice)
    allowed = math.isfinite(cost_of(flat, choice))
    if not (allowed and fits(flat, usage_of(flat, choice))):  # not in the Flat
        return
    state = message_passing.start(flat)
    until = work_clock.now() + 0.1 * search.seconds_left()
    message_passing.converge(state, unary, until, patience=10)
    choice = neighborhood_search.improve(
        flat,
        choice,
        search.deadline,
        bound=search.bound,
        merit=state.excess,
        tolerance=search.tolerance,
    )
    offer(search, net, flat, choice)
