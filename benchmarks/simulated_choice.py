"""Simulates the step of a choice of the solver, before its plan is lowered.

``Overlap``: ops and reshards cost what they cost in the additive problem; it adds when
they run (``choice_tasks``, ``streams``), and that collectives in a bucket start once. A
kernel an op, as ``passes.simulate.simulate_step`` of a lowered plan has them. A change
of strategies changes durations and axes of the tasks of its nodes and their edges,
never the order, so a step is simulated again from the first of them on.

Source: the task graph and delta simulation of FlexFlow (Jia, Zaharia and Aiken, SysML
2019, section 5), with one rank for all, since all do the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from choice_tasks import layout
from delta_simulation import DeltaSimulation

from fxpar.passes.simulate.simulate_step import Task
from fxpar.sharding.cost import collectives
from fxpar.sharding.reshard import all_pairs
from fxpar.sharding.search.formulate import Formulation
from fxpar.sharding.spec import Spec

# Seconds, and axes as ``DeltaSimulation.bits``, by index of the task.
_Runs = tuple[dict[int, float], dict[int, int]]
# (seconds, axes) of each collective.
_Steps = tuple[tuple[float, int], ...]
# Whether a reshard's source is partial; seconds of copies; its collectives.
_Cell = tuple[bool, float, _Steps]


class Overlap:
    """Is a simulated step. ``choice``: strategy per node, ``seconds``: of the step.

    ``overlap=False``: one stream for everything, so that ``seconds`` is the cost of the
    problem and its launches.
    """

    def __init__(
        self, formulation: Formulation, choice: Sequence[int], *, overlap: bool = True
    ) -> None:
        self.formulation, self.problem = formulation, formulation.problem
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
        self.simulation = DeltaSimulation(tasks, axes=self.axes)
        self._owed: _Runs = {}, {}
        self.seconds = self.change(dict(enumerate(self.choice)))

    def _kernel(self, i: int, k: int) -> float:
        """Return the seconds of a node's kernels under a strategy, with their
        launches."""
        form, node = self.formulation, self.formulation.nodes[i]
        seconds = float(self.problem.costs[i][k])
        if node.kind != "op":
            return seconds
        return seconds + form.launches_of(node.of)

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
                self._cells[key] = False, total, ()
                return self._cells[key]
            source = formulation.pool[formulation.nodes[i].specs[a, edge_value.source]]
            target = formulation.pool[formulation.nodes[j].specs[b, edge_value.target]]
            copies, steps = 0.0, tuple[tuple[float, int], ...]()
            if 0 < total < math.inf:
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
        if edge_value is None or not self.formulation.hidden[e] or not program.backward:
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
