"""Ranks plans that may be faster than the cheapest once communication overlaps.

In: the result of a search. Out: ``rivals``, further results of the same problem, and
those of several that may be the fastest (``nearest``), by the simulated step. The
additive problem knows no overlap: it pays for a gradient's reduction though the
backward hides it. So plans that are the best with such communication at a discount are
tried as well. Never: leaves the memory limit.

``Overlap`` is the simulated step of a choice of the solver. Ops and reshards cost what
they cost in the additive problem; it adds when they run (``choice_tasks``,
``streams``), and that collectives in a bucket start once. A kernel an op, as
``passes.simulate.simulate_step`` of a lowered plan has them. A change of strategies
changes durations and axes of the tasks of its nodes and their edges, never the order,
so a step is simulated again from the first of them on.

Source: the task graph and delta simulation of FlexFlow (Jia, Zaharia and Aiken, SysML
2019, section 5), with one rank for all, since all do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fxpar.errors import PlanError
from fxpar.sharding.cost import collectives
from fxpar.sharding.cost.streams import Simulation, Task
from fxpar.sharding.reshard import all_pairs
from fxpar.sharding.search.choice_tasks import layout
from fxpar.sharding.search.formulate import Formulation, cost_of, decode
from fxpar.sharding.search.run_search import SearchOptions, SearchResult
from fxpar.sharding.solver import Infeasible, Problem, evaluate, solve
from fxpar.sharding.solver.problem import FORBIDDEN
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy

Found = TypeVar("Found")
# Seconds, and axes as ``Simulation.bits``, by index of the task.
_Runs = tuple[dict[int, float], dict[int, int]]
# (seconds, axes) of each collective.
_Steps = tuple[tuple[float, int], ...]
# Whether a reshard's source is partial; seconds of copies; its collectives.
_Cell = tuple[bool, float, _Steps]


@dataclass(frozen=True)
class Portion:
    """Says how much of a formulation of a batch in parts is simulated."""

    # Share of the work done with each part.
    each: float = 1.0
    # Share of the work done once for all.
    once: float = 1.0


class Overlap:
    """Is a simulated step. ``choice``: strategy per node, ``seconds``: of the step.

    ``overlap=False``: one stream for everything, so that ``seconds`` is the cost of the
    problem and its launches.
    """

    def __init__(
        self, formulation: Formulation, choice: Sequence[int], *, overlap: bool = True
    ) -> None:
        self.formulation, self.problem = formulation, formulation.problem
        self._portion = Portion()
        self.choice = list(choice)
        sizes = formulation.mesh.sizes
        self.axes = tuple(axis for axis in formulation.mesh.names if sizes[axis] > 1)
        self.edges_of: list[list[int]] = [[] for _ in formulation.nodes]
        for e, (i, j, _) in enumerate(self.problem.edges):
            for node in {i, j}:
                self.edges_of[node].append(e)
        self.layout = layout(formulation, self.axes)
        self._cells: dict[tuple[int, int, int, bool], _Cell] = {}
        self._overlap, tasks = overlap, self.layout.tasks
        if not overlap:
            tasks = tuple(Task(task.name) for task in tasks)
        self.simulation = Simulation(tasks, axes=self.axes)
        self._owed: _Runs = {}, {}
        self.seconds = self.change(dict(enumerate(self.choice)))

    def _kernel(self, i: int, k: int) -> float:
        """Return the seconds of a node's kernels under a strategy, with their
        launches."""
        form, node = self.formulation, self.formulation.nodes[i]
        seconds = float(self.problem.costs[i][k])
        if node.kind != "op":
            return seconds * self._share_of_value(node.of)
        seconds += form.launches_of(node.of)
        if form.parts is None:
            return seconds
        adding = float(form.adding[i][k]) if i in form.adding else 0.0
        is_cut = bool(form.parts.cut.factors[node.of])
        share = self._portion.each if is_cut else self._portion.once
        return (seconds - adding) * share + adding * self._portion.each

    def _share_of_value(self, v: int) -> float:
        """Return the share of a value's resharding that is simulated."""
        parts = self.formulation.parts
        is_cut = parts is None or bool(parts.cut.dims[v])
        return self._portion.each if is_cut else self._portion.once

    def seconds_of(self, portion: Portion) -> float:
        """Return ``seconds``, if no more than a portion is run."""
        self._portion, self._cells = portion, {}
        return self.change(dict(enumerate(self.choice)))

    def change(self, strategies: Mapping[int, int]) -> float:
        """Give nodes other strategies; return ``seconds``."""
        self.seconds = self._run(strategies)
        for node, k in strategies.items():
            self.choice[node] = k
        return self.seconds

    def seconds_with(self, strategies: Mapping[int, int]) -> float:
        """Return what ``change`` would; ``choice`` and ``seconds`` stay. The next
        simulation also puts the tasks changed for it back."""
        seconds = self._run(strategies)
        self._owed = self._runs({node: self.choice[node] for node in strategies})
        return seconds

    def _run(self, strategies: Mapping[int, int]) -> float:
        seconds, axes = self._runs(strategies)
        seconds, axes = self._owed[0] | seconds, self._owed[1] | axes
        self._owed = {}, {}
        return self.simulation.change(seconds, axes if self._overlap else None)

    def _runs(self, strategies: Mapping[int, int]) -> _Runs:
        """Return seconds and axes of the tasks of nodes and of their edges."""
        seconds: dict[int, float] = {}
        axes: dict[int, int] = {}
        problem, kernels, rows = self.problem, self.layout.kernels, self.layout.rows
        for node, k in strategies.items():
            if node in kernels:
                seconds[kernels[node]] = self._kernel(node, k)
        for e in {e for node in strategies for e in self.edges_of[node]}:
            row = rows[e]
            if row.copy is None:
                continue
            i, j, _ = problem.edges[e]
            a = strategies.get(i, self.choice[i])
            b = strategies.get(j, self.choice[j])
            partial, seconds[row.copy], steps = self._cell(e, a, b)
            seconds.update(dict.fromkeys((*row.after, *row.before), 0.0))
            for task, (duration, along) in zip(row.of(partial), steps, strict=False):
                seconds[task], axes[task] = duration, along
        return seconds, axes

    def _cell(self, e: int, a: int, b: int) -> _Cell:
        """Return the copies and collectives of an edge under strategies of its
        nodes."""
        i, j, table = self.problem.edges[e]
        joins = self._overlap and self._is_joinable(e)
        key = table, a, b, joins
        if key not in self._cells:
            edge_value, formulation = self.layout.edge_values[e], self.formulation
            total = float(self.problem.tables[table][a, b])
            if edge_value is None:
                total *= self._share_of_value(formulation.nodes[i].of)
                self._cells[key] = False, total, ()
                return self._cells[key]
            source = formulation.pool[formulation.nodes[i].specs[a, edge_value.source]]
            target = formulation.pool[formulation.nodes[j].specs[b, edge_value.target]]
            copies, steps = 0.0, tuple[tuple[float, int], ...]()
            total *= self._share_of_value(edge_value.value)
            if 0 < total < FORBIDDEN:
                v = edge_value.value
                copies, steps = self._steps(v, source, target, total, joins)
                # Kernels wait for the share of the time that a collective takes.
                held = self.formulation.hardware.beside
                copies += held * sum(seconds for seconds, _ in steps)
                steps = tuple((x * (1 - held), bits) for x, bits in steps)
            self._cells[key] = bool(source.partial), copies, steps
        return self._cells[key]

    def _is_joinable(self, e: int) -> bool:
        """Return whether the value of an edge may be in a bucket: a parameter or a
        gradient."""
        program, edge_value = self.formulation.program, self.layout.edge_values[e]
        if edge_value is None or not self.layout.aside[e] or not program.backward:
            return False
        maker = program.producers.get(edge_value.value)
        return maker is None or maker[0] in program.backward

    def _steps(
        self, v: int, source: Spec, target: Spec, total: float, joins: bool
    ) -> tuple[float, _Steps]:
        """Return the seconds of copies, and the collectives, of a reshard that takes
        ``total``; at most one for each mesh axis. ``joins``: small ones are in buckets,
        which start once for all in them."""
        value, mesh = self.formulation.program.values[v], self.formulation.mesh
        way = all_pairs.path(source, target, mesh, value.shape, value.dtype.itemsize)
        local = value.nbytes / mesh.count(source.sharded_axes)
        runs: list[tuple[float, int]] = []
        saved = 0.0
        for step in way or ():
            seconds, growth = 0.0, step.growth(mesh)
            if not step.local:
                curve = collectives.along(step.kind, mesh, step.axes)
                seconds = curve.seconds(local)
                if joins:
                    filled = local * max(1.0, growth) / collectives.FULL
                    saved += max(0.0, 1 - filled) * curve.line(local).alpha
            local *= growth
            bits = self.simulation.bits([a for a in step.axes if a in self.axes])
            if step.local or not bits:
                continue
            if runs and (runs[-1][1] == bits or len(runs) == len(self.axes)):
                before, along = runs.pop()
                seconds, bits = seconds + before, bits | along
            runs.append((seconds, bits))
        whole = sum(seconds for seconds, _ in runs)
        if way is None:  # no path of single steps: all links, for as long as it takes
            return 0.0, ((total, self.simulation.bits(self.axes)),)
        if not whole:
            return total, ()
        part = min(1.0, total / whole)
        copies = total - whole * part
        part *= 1 - saved / whole
        return copies, tuple((x * part, bits) for x, bits in runs)


def step_seconds(formulation: Formulation, choice: Sequence[int]) -> float:
    """Return the seconds of a simulated step. For a batch in parts: of the last part,
    with which gradients are reduced, and of the others without the work done once for
    all."""
    step, parts = Overlap(formulation, choice), formulation.parts
    if parts is None:
        return step.seconds
    last = step.seconds_of(Portion(1 / parts.count))
    other = step.seconds_of(Portion(1 / parts.count, once=0.0))
    return last + (parts.count - 1) * other


# Shares of its price that communication costs where it may be hidden. Not zero: the
# compute that hides it may be too short.
DISCOUNTS = (0.5, 0.2, 0.02)

# Plans of programs with more ops than _SIMULATED are estimated without overlap. Plans
# that are estimated to take _FAR times as long as the best are dropped, an expert's
# plan only if the program has more than _FEW ops.
_SIMULATED, _FAR, _FEW = 2500, 1.25, 200


def rivals(result: SearchResult, options: SearchOptions) -> list[SearchResult]:
    """Return plans that may be faster than the cheapest one once communication
    overlaps: those that are best with hidden communication at a discount."""
    discounts = DISCOUNTS[1:2] if is_large(result) else DISCOUNTS
    choices = cheaper(result, discounts, min(1.0, options.seconds / 10))
    cheap = [_with_first(result, choice) for choice in choices]
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
    return _with_first(result, solution.choice)


def _with_first(result: SearchResult, choice: Sequence[int]) -> SearchResult:
    return replace(with_choice(result, choice), first=result.solution)


def is_large(result: SearchResult) -> bool:
    """Return whether simulating a plan takes longer than a search."""
    return len(result.strategies) > _SIMULATED


def nearest(
    plans: Sequence[Found], search_of: Callable[[Found], SearchResult]
) -> list[Found]:
    """Return the plans that may be the fastest, sorted by estimate."""
    times = [_estimate(search_of(x)) for x in plans]
    order = sorted(range(len(plans)), key=times.__getitem__)
    return [plans[i] for i in order if times[i] <= _FAR * min(times)]


def can_be_faster(result: SearchResult, other: SearchResult | None) -> bool:
    """Return whether an expert's plan can be faster than the one found. ``other``: the
    result of ``priced_as`` for it."""
    if len(result.strategies) <= _FEW:
        return True
    if other is None:
        return not is_large(result)
    return other in nearest([result, other], lambda x: x)


def _estimate(result: SearchResult) -> float:
    """Estimate the seconds of a step, for a large program without overlap."""
    if is_large(result):
        return result.predicted
    return step_seconds(result.formulation, result.solution.choice)


def with_choice(result: SearchResult, choice: Sequence[int]) -> SearchResult:
    """Return the result as if the search had taken this choice of its problem."""
    strategies, settled = decode(result.formulation, choice)
    cost, peak = evaluate(result.formulation.problem, choice)
    gap = max(0.0, (cost - result.solution.bound) / abs(cost)) if cost else 0.0
    solution = replace(
        result.solution, choice=tuple(choice), cost=cost, peak=peak, gap=gap
    )
    return replace(
        result, strategies=tuple(strategies), settled=tuple(settled), solution=solution
    )


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
    for edge, aside in zip(problem.edges, layout(formulation, ()).aside, strict=True):
        if aside and edge.table not in cheap:
            cheap[edge.table] = len(tables)
            tables.append(tables[edge.table] * share)
        edges.append(edge._replace(table=cheap[edge.table]) if aside else edge)
    return replace(problem, edges=tuple(edges), tables=tuple(tables))
