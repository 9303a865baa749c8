"""Runs the search: formulate, tie, solve, decode; then ranks plans that may be faster
than the cheapest one once communication overlaps.

In: a Program, a Mesh, and ``SearchOptions``. Out: ``SearchResult``: strategies, specs,
and the solved problem, from which explanations are made. Its seconds are those of work
(``work_clock``), so that the same program has the same plan on every run; one rank
searches and sends the others its plan.

Layers that repeat are tied, forward and backward each by itself: ops are compared by
target, rule, shapes and dtypes. Ties guide the search and constrain no answer.

The additive problem knows no overlap: it pays for a gradient's reduction though the
backward hides it. So plans that are the best with such communication at a discount are
``rivals``, and plans are ranked at one (``nearest``). The steps of those that are near
are predicted in ``fxpar.choose_plan``. Never: changes or runs a graph, or leaves the
memory limit.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from fxpar.errors import PlanError
from fxpar.layers import numbered, rows_of_layers
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Program
from fxpar.sharding.propagate.propagation import Seed
from fxpar.sharding.reshard import all_pairs
from fxpar.sharding.search.batch_parts import PartProgram
from fxpar.sharding.search.formulate import (
    Formulation,
    cost_of,
    decode,
    formulate,
)
from fxpar.sharding.search.too_large import nothing_fits
from fxpar.sharding.solver import (
    Infeasible,
    Problem,
    Solution,
    evaluate,
    solve,
    work_clock,
)
from fxpar.sharding.solver.problem import peak
from fxpar.sharding.solver.solve import EXACT, solve_tied
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy


def repeated(program: Program, backward: Collection[int]) -> list[int]:
    """Return for each op its counterpart in the first of the layers that it is in."""
    shapes = [(value.shape, value.dtype) for value in program.values]
    labels = numbered(
        (op.target, op.rule, *map(shapes.__getitem__, op.tensors), op.index in backward)
        for op in program.ops
    )
    tied = list(range(len(labels)))
    for begin, end, distance in rows_of_layers(labels):
        for i in range(begin, end):
            tied[i] = begin + (i - begin) % distance
    return tied


def ties(formulation: Formulation, tied: Sequence[int]) -> tuple[int, ...]:
    """Return for each node of a problem the node it is tied to, given the ties of
    ops."""
    program, nodes = formulation.program, formulation.nodes
    value = _values(program, tied)
    inputs = {v: k for k, v in enumerate(program.inputs) if v is not None}
    outputs = {v: k for k, v in enumerate(program.outputs) if v is not None}
    others: dict[str, Callable[[int], int]] = {
        "op": tied.__getitem__,
        "value": lambda v: value.get(v, v),
        "copy": lambda v: value.get(v, v),
        "input": lambda k: inputs.get(value.get(program.inputs[k], -1), k),
        "output": lambda k: outputs.get(value.get(program.outputs[k], -1), k),
        "constant": lambda v: v,
    }
    index: dict[tuple[str, int, int], int] = {}
    nth: list[int] = []  # by node, which it is of those of its kind and value
    count: Counter[tuple[str, int]] = Counter()
    for i, node in enumerate(nodes):
        nth.append(count[node.kind, node.of])
        count[node.kind, node.of] += 1
        index[node.kind, node.of, nth[i]] = i
    for v, (_, backward) in formulation.settling.items():
        index["value", v, 1] = backward
    out = []
    for i, node in enumerate(nodes):
        to = index.get((node.kind, others[node.kind](node.of), nth[i]), i)
        out.append(to if np.array_equal(nodes[to].specs, node.specs) else i)
    return _heads(out)


def _heads(to: Sequence[int]) -> tuple[int, ...]:
    """Return for each node the least one it is tied to through others. A parameter of
    the first layer and one of the last, where the backward begins, name each other."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    ends = (np.arange(len(to)), np.array(to, int))
    pairs = coo_array((np.ones(len(to)), ends), shape=(len(to), len(to)))
    _, label = connected_components(pairs, directed=False)
    _, first = np.unique(label, return_index=True)
    return tuple(first[label].tolist())


def _values(program: Program, tied: Sequence[int]) -> dict[int | None, int]:
    """Return for each value its counterpart: for results by their op, for inputs by the
    op that first reads them."""
    out: dict[int | None, int] = {}
    for op in program.ops:
        other = program.ops[tied[op.index]]
        if other is op:
            continue
        out.update(zip(op.results, other.results, strict=True))
        for mine, theirs in zip(op.operands, other.operands, strict=True):
            inputs = mine not in program.producers and theirs not in program.producers
            if inputs and mine != theirs:
                out.setdefault(mine, theirs)
    return out


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

    @property
    def budget(self) -> float:
        return self.hardware.memory if self.memory is None else self.memory


@dataclass(frozen=True, eq=False)
class SearchResult:
    """Holds the chosen plan, and the problem it solves."""

    # The problem.
    formulation: Formulation
    # The choice, its cost and bound.
    solution: Solution
    built: float  # seconds that formulating took
    rivals: float = math.inf  # seconds of a step that no other such mesh can beat
    first: Solution | None = None  # of the search, where ranking took another

    @cached_property
    def _decoded(self) -> tuple[tuple[Strategy, ...], tuple[Spec, ...]]:
        return decode(self.formulation, self.solution.choice)

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Return the strategy of each op."""
        return self._decoded[0]

    @property
    def settled(self) -> tuple[Spec, ...]:
        """Return the spec that each value settles in."""
        return self._decoded[1]

    @property
    def mesh(self) -> Mesh:
        """Return the mesh, with its links."""
        return self.formulation.mesh

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
        bound = min(bound - self.formulation.launches, self.solution.cost)
        return replace(self, solution=replace(self.solution, bound=bound))

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
        formulation = formulate(
            program,
            mesh,
            options.hardware,
            options.budget,
            seeds=seeds,
            parts=parts,
        )
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
    return SearchResult(formulation, solution, built)


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
    free = replace(problem, limit=None)
    if options.equal_layers:
        solution = solve_tied(free, options.seconds, _ROUGH)
        if problem.limit is None or solution.peak <= problem.limit:
            return solution
        limited = solve_tied(problem, options.seconds, _ROUGH)
        return replace(limited, unlimited=solution.cost)
    many = sum(map(len, problem.costs)) > _FEW
    tolerance = options.tolerance if many else EXACT
    end = work_clock.now() + options.seconds
    if problem.limit is None:
        return solve(problem, options.seconds, tolerance=tolerance, enough=enough)
    if not (many and _is_over_limit(problem, options.seconds / 10)):
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
        free = replace(problem, limit=None)
        return solve_tied(free, seconds, _ROUGH).peak > problem.limit
    except Infeasible:
        return False


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


Found = TypeVar("Found")

# Shares of its price that communication costs where it may be hidden. Not zero: the
# compute that hides it may be too short.
DISCOUNTS = (0.5, 0.2, 0.02)
# The one at which plans are ranked.
_SHARE = DISCOUNTS[1]

# Programs with more ops than _LARGE are large: their plans are ranked by full prices.
# Plans that are estimated to take _FAR times as long as the cheapest are dropped, an
# expert's plan only if the program has more than _SHORT ops.
_LARGE, _FAR, _SHORT = 2500, 1.25, 200


def rivals(result: SearchResult, options: SearchOptions) -> list[SearchResult]:
    """Return plans that may be faster than the cheapest one once communication
    overlaps: those that are best with hidden communication at a discount."""
    discounts = (_SHARE,) if is_large(result) else DISCOUNTS
    choices = cheaper(result, discounts, min(1.0, options.seconds / 10))
    cheap = [with_choice(result, choice) for choice in choices]
    closest = nearest([result, *cheap], lambda x: x)
    return [x for x in cheap if x in closest]


def priced_as(
    result: SearchResult, strategies: Sequence[Strategy]
) -> SearchResult | None:
    """Return the search result with these strategies of all ops; None if they are not
    in the search space, or do not fit in memory."""
    limit = result.formulation.problem.limit
    try:
        solution = cost_of(result.formulation, strategies, 1.0)
    except (Infeasible, PlanError):
        return None
    if limit is not None and solution.peak > limit:
        return None
    return with_choice(result, solution.choice)


def is_large(result: SearchResult) -> bool:
    """Return whether lowering a plan takes longer than a search."""
    return len(result.strategies) > _LARGE


def nearest(
    plans: Sequence[Found], search_of: Callable[[Found], SearchResult]
) -> list[Found]:
    """Return the plans that may be the fastest, sorted by estimate: the price with
    communication that compute may hide at a discount, or the seconds of that
    communication, if it takes longer."""
    results = list(map(search_of, plans))
    pairs = zip(results, map(_hidden_seconds, results), strict=True)
    saved = 1 - _SHARE
    times = [max(x.predicted - saved * hidden, hidden) for x, hidden in pairs]
    most = _FAR * min(x.predicted for x in results)
    order = sorted(range(len(plans)), key=times.__getitem__)
    return [plans[i] for i in order if times[i] <= most]


def can_be_faster(result: SearchResult, other: SearchResult | None) -> bool:
    """Return whether an expert's plan can be faster than the one found. ``other``: the
    result of ``priced_as`` for it."""
    if len(result.strategies) <= _SHORT:
        return True
    if other is None:
        return not is_large(result)
    return other.predicted - _hidden_seconds(other) <= _FAR * result.predicted


def _hidden_seconds(result: SearchResult) -> float:
    """Return the price of communication that compute may hide, none for a large
    program."""
    if is_large(result):
        return 0.0
    form, choice = result.formulation, result.solution.choice
    edges = zip(form.problem.edges, form.hidden, strict=True)
    return sum(
        float(form.problem.tables[table][choice[i], choice[j]])
        for (i, j, table), is_hidden in edges
        if is_hidden
    )


def with_choice(result: SearchResult, choice: Sequence[int]) -> SearchResult:
    """Return the result of ranking that took this choice of the problem."""
    cost, peak = evaluate(result.formulation.problem, choice)
    solution = replace(result.solution, choice=tuple(choice), cost=cost, peak=peak)
    return replace(result, solution=solution, first=result.solution)


def cheaper(
    result: SearchResult, discounts: Sequence[float], seconds: float
) -> list[tuple[int, ...]]:
    """Return the plans that are best with communication that compute may hide
    (gradients that nothing computes with, parameters gathered ahead) at these shares of
    its price; those that fit in memory and are not known yet."""
    problem = result.formulation.problem
    choices: dict[tuple[int, ...], None] = {}
    for share in discounts:
        priced = replace(discounted(result.formulation, share), limit=None)
        try:
            solution = solve(priced, seconds, tolerance=1e-4)
            if problem.limit is not None and solution.peak > problem.limit:
                priced = replace(priced, limit=problem.limit)
                solution = solve(priced, seconds, tolerance=1e-4)
        except Infeasible:
            continue
        choices[solution.choice] = None
    return [choice for choice in choices if choice != result.solution.choice]


def discounted(formulation: Formulation, share: float) -> Problem:
    """Return the problem with communication that compute may hide at a share of its
    price."""
    problem, tables = formulation.problem, list(formulation.problem.tables)
    cheap: dict[int, int] = {}
    edges = []
    for edge, is_hidden in zip(problem.edges, formulation.hidden, strict=True):
        if is_hidden and edge.table not in cheap:
            cheap[edge.table] = len(tables)
            tables.append(tables[edge.table] * share)
        edges.append(edge._replace(table=cheap[edge.table]) if is_hidden else edge)
    return replace(problem, edges=tuple(edges), tables=tuple(tables))
