"""Runs the search: formulate, tie, solve, decode.

In: a Program, a Mesh, and ``SearchOptions``. Out: ``SearchResult``: strategies, specs,
and the solved problem, from which explanations are made. Its seconds are those of work
(``work_clock``), so that the same program has the same plan on every run; one rank
searches and sends the others its plan. Never: changes or runs a graph.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fxpar.errors import PlanError
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Program
from fxpar.sharding.propagate.propagation_state import Seed
from fxpar.sharding.reshard import all_pairs
from fxpar.sharding.search.batch_parts import PartProgram
from fxpar.sharding.search.formulate import Formulation, cost_of, decode, formulate
from fxpar.sharding.search.problem_builder import FixedFacts
from fxpar.sharding.search.ties import repeated, ties
from fxpar.sharding.search.too_large import nothing_fits
from fxpar.sharding.solver import (
    Infeasible,
    Problem,
    Solution,
    evaluate,
    solve,
    work_clock,
)
from fxpar.sharding.solver.problem import peak, tie
from fxpar.sharding.solver.solve import EXACT
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy

# A plan within this gap of its bound counts as proved to be the best.
_CLOSE = 1e-4
# Seconds of work of pricing a node, and an entry of a table.
_NODE, _ENTRY = 1.1e-4, 1e-6
# The note of a plan if wall-clock time ended its search.
STOPPED = (
    "search: ended by wall-clock time, long before search_seconds of CPU time, "
    "so another run may choose another plan: lower search_seconds, or run less "
    "else on the machine"
)
# Gap at which the first rough solve ends.
_ROUGH = 0.01
# The share of the seconds that beginning again takes in addition.
AGAIN = 0.25


@dataclass(frozen=True)
class SearchOptions:
    """Holds the options of a search."""

    # The hardware that costs are for.
    hardware: Hardware
    # How long to solve at most, in seconds of work.
    seconds: float = 30.0
    # Bytes of one rank; None takes the hardware's.
    memory: float | None = None
    # The search ends when a step is proved to take at least this many seconds.
    enough: float = math.inf
    # Gap at which it ends; problems with few strategies are solved to the optimum.
    tolerance: float = _CLOSE
    # Whether further plans that may be faster once communication overlaps are given.
    ranked: bool = True
    # Whether layers that repeat take equal choices: quick, and nothing is proved.
    equal_layers: bool = False
    # Whether, if the gap is wide, it begins again from plans as made by hand.
    by_hand: bool = True

    @property
    def budget(self) -> float:
        return self.hardware.memory if self.memory is None else self.memory


@dataclass(frozen=True)
class SearchResult:
    """Holds the chosen plan, and the problem it solves."""

    # Strategy of each op.
    strategies: tuple[Strategy, ...]
    # Spec of each value.
    settled: tuple[Spec, ...]
    # The mesh, with its links.
    mesh: Mesh
    # The problem.
    formulation: Formulation
    # The choice, its cost and bound.
    solution: Solution
    built: float  # seconds that formulating took
    rivals: float = math.inf  # seconds of a step that no other such mesh can beat
    first: Solution | None = None  # of the search, where ranking took another

    @property
    def predicted(self) -> float:
        return self.solution.cost + self.formulation.launches

    @property
    def unlimited(self) -> float:
        """Return the seconds of a step if memory had no limit, where that was
        searched."""
        cost = self.solution.unlimited
        cost = self.solution.cost if cost is None else min(cost, self.solution.cost)
        return cost + self.formulation.launches

    @property
    def bound(self) -> float:
        """Return seconds of a step that no plan on this mesh can beat."""
        return self.solution.bound + self.formulation.launches

    def with_bound(self, bound: float) -> SearchResult:
        """Return the result with a higher bound on a step, proved elsewhere."""
        cost = self.solution.cost
        bound = min(bound - self.formulation.launches, cost)
        gap = (cost - bound) / abs(cost) if cost > bound else 0.0
        return replace(self, solution=replace(self.solution, bound=bound, gap=gap))

    @property
    def is_proved(self) -> bool:
        """Return whether a longer search on this mesh can find nothing better."""
        return (self.first or self.solution).gap <= _CLOSE

    def __str__(self) -> str:
        solution, problem = self.solution, self.formulation.problem
        return (
            f"search: proved within {solution.gap * 100:.2g}% of the best, before "
            f"communication overlaps; {len(problem.costs)} choices of "
            f"{sum(map(len, problem.costs))} strategies, {self.built:.1f} s to price, "
            f"{solution.seconds:.1f} s to solve"
        )


def has_too_many_axes(mesh: Mesh) -> bool:
    """Return whether the space of strategies on this mesh is too large to be
    searched."""
    return sum(size > 1 for _, size in mesh.axes) > all_pairs.MOST


def search(
    program: Program,
    mesh: Mesh,
    options: SearchOptions,
    seeds: Mapping[int, Sequence[Seed]],
    *,
    keep_gathered: bool = False,
    before: SearchResult | None = None,
    parts: PartProgram | None = None,
) -> SearchResult:
    """Return the fastest plan that fits.

    ``before``: a shorter search of the same, whose priced problem is solved again.
    ``parts``: the batch is cut, and the plan that is fastest for one part is searched.
    Raises PlanError if no plan fits, naming the largest tensors and the bytes needed.
    """
    begun = time.perf_counter()
    if has_too_many_axes(mesh):
        raise PlanError(
            f"a search takes at most {all_pairs.MOST} axes of more than one rank, "
            f"the mesh is {mesh}",
            fix="join axes of the mesh, or set FXPAR_PLAN=propagate",
        )
    mesh = options.hardware.on(mesh)
    # Shards are equal, so the slowest rank decides.
    options = replace(options, hardware=options.hardware.at_speed(mesh.slowest))
    if before is None:
        facts = FixedFacts(seeds, keep_gathered, parts)
        formulation = formulate(program, mesh, options.hardware, facts, options.budget)
        tied = repeated(formulation.program, program.backward)
        formulation = replace(
            formulation,
            problem=replace(formulation.problem, tied=ties(formulation, tied)),
        )
        built = time.perf_counter() - begun
        problem = formulation.problem
        entries = sum(table.size for table in problem.tables)
        work_clock.did(_NODE * len(problem.costs) + _ENTRY * entries)
    else:
        formulation, built = before.formulation, before.built
    try:
        solution = _solved(
            formulation.problem, options, options.enough - formulation.launches
        )
    except Infeasible as error:
        raise _too_large(error, formulation) from None
    strategies, settled = decode(formulation, solution.choice)
    return SearchResult(
        tuple(strategies), tuple(settled), mesh, formulation, solution, built
    )


def begun_from(
    result: SearchResult, options: SearchOptions, by_hand: Iterable[Sequence[Strategy]]
) -> SearchResult:
    """Return the result of a search that begins again from the cheapest of some known
    strategies of all ops, if that is cheaper than ``result``; else ``result``. Takes at
    most the share ``AGAIN`` of the seconds."""
    begun, end = time.perf_counter(), work_clock.now() + AGAIN * options.seconds
    best, start = result.solution.cost, None
    for strategies in by_hand:
        try:
            priced = cost_of(
                result.formulation, strategies, options.seconds * AGAIN / 3
            )
        except (Infeasible, PlanError):
            continue
        if priced.cost < best:
            best, start = priced.cost, priced.choice
    if start is None:
        return result
    problem, first_solution = result.formulation.problem, result.solution
    solution = solve(problem, work_clock.left(end), start=start, tolerance=_CLOSE)
    bound = max(first_solution.bound, solution.bound)
    solution = replace(
        solution,
        bound=bound,
        gap=max(solution.cost - bound, 0.0) / abs(solution.cost),
        seconds=first_solution.seconds + time.perf_counter() - begun,
        notes=first_solution.notes + solution.notes,
        stopped=first_solution.stopped or solution.stopped,
    )
    strategies, settled = decode(result.formulation, solution.choice)
    return replace(
        result,
        strategies=tuple(strategies),
        settled=tuple(settled),
        solution=solution,
    )


# Problems with at most this many strategies count as small.
_FEW = 2000

# The share of the seconds in which a problem is solved without its limit; the rest is
# for solving it with the limit, if the plan does not fit.
_FIRST = 0.75
# Seconds of that at least.
_LEAST = 1.0


def _solved(problem: Problem, options: SearchOptions, enough: float) -> Solution:
    """Solve the problem without its limit, which is easier; with it, if that plan does
    not fit. Together they take about the seconds asked for at most, and end when a
    bound is ``enough``."""
    if options.equal_layers:
        return _fitting_tied(problem, options.seconds)
    many = sum(map(len, problem.costs)) > _FEW
    tolerance = options.tolerance if many else EXACT
    end = work_clock.now() + options.seconds
    if problem.limit is None:
        return solve(problem, options.seconds, tolerance=tolerance, enough=enough)
    if not (many and _is_over_limit(problem, options.seconds / 10)):
        free = replace(problem, limit=None)
        share = _FIRST if many else 0.5  # a glance has said that it is likely to fit
        seconds = share * work_clock.left(end)
        solution = solve(free, seconds, tolerance=tolerance, enough=enough)
        if solution.peak <= problem.limit:
            return solution
    # The first may have taken all: finding no plan would be an error.
    seconds = max(work_clock.left(end), _LEAST, options.seconds / 10)
    return solve(problem, seconds, tolerance=tolerance, enough=enough)


def _is_over_limit(problem: Problem, seconds: float) -> bool:
    """Return whether a rough solution with equal choices in all repeated layers,
    without the limit, needs more than the limit. Ties need not be feasible: hints may
    differ between layers."""
    assert problem.limit is not None
    try:
        return _solved_tied(replace(problem, limit=None), seconds).peak > problem.limit
    except Infeasible:
        return False


def _fitting_tied(problem: Problem, seconds: float) -> Solution:
    """Return an equal choice in all repeated layers: without the limit, if that
    fits."""
    solution = _solved_tied(replace(problem, limit=None), seconds)
    if problem.limit is None or solution.peak <= problem.limit:
        return solution
    return replace(_solved_tied(problem, seconds), unlimited=solution.cost)


def _solved_tied(problem: Problem, seconds: float) -> Solution:
    """Return a choice that is equal in all repeated layers; nothing is proved of
    others. Raises Infeasible if none such is found."""
    once, to = tie(problem)
    try:
        glance = solve(once, seconds=seconds, tolerance=_ROUGH)
    except Infeasible as error:
        if error.choice is not None:
            error.choice = tuple(error.choice[k] for k in to)
        raise
    choice = tuple(glance.choice[k] for k in to)
    cost, peak = evaluate(problem, choice)
    return replace(glance, choice=choice, cost=cost, bound=0.0, gap=1.0, peak=peak)


def _too_large(error: Infeasible, formulation: Formulation) -> PlanError:
    """Return the error of a problem that has no plan within its limit."""
    if error.limit is None or error.choice is None:
        return PlanError(
            f"no plan keeps all hints: {error.what}",
            fix="leave some of their dims open with '?', or increase search_seconds",
        )
    problem, choice = formulation.problem, error.choice
    _, time_of_peak = peak(problem, choice)
    rows = zip(formulation.memory_entries, problem.memory, strict=True)
    held = [
        (entry, float(live.usage[choice[live.node]]))
        for entry, live in rows
        if live.begin <= time_of_peak < live.end
    ]
    ranks = formulation.mesh.size
    return nothing_fits(formulation.program, error.limit, held, ranks)
