"""One step of a choice of the solver, simulated with communication beside compute.

In: a Formulation and a choice. Out: ``Overlap``: the seconds of the step; ``change``
gives nodes other strategies. What ops and reshards cost is what they cost in the
additive problem; what this adds is when they run (``tasks``, ``streams``). A kernel an
op, no buckets: ``passes.simulate.simulate_step`` of a lowered plan has them.

A change of strategies changes durations and axes of the tasks of its nodes and their
edges, never the order, so a step is simulated again from the first of them on.

Source: the task graph and delta simulation of FlexFlow (Jia, Zaharia and Aiken, SysML
2019, section 5), with one rank for all, since all do alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxpar.sharding.cost import collectives
from fxpar.sharding.cost.streams import Simulation, Task
from fxpar.sharding.reshard import all_pairs
from fxpar.sharding.search.choice_tasks import layout
from fxpar.sharding.search.formulate import Formulation
from fxpar.sharding.solver.problem import FORBIDDEN
from fxpar.sharding.spec import Spec

# Seconds and axes of tasks.
_Runs = tuple[dict[int, float], dict[int, int]]
# (seconds, axes) of each collective.
_Steps = tuple[tuple[float, int], ...]
# Whether a reshard's source is partial; seconds of copies; its collectives.
_Cell = tuple[bool, float, _Steps]


class Overlap:
    """A simulated step. ``choice``: strategy per node, ``seconds``: of the step.

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
        self._launch = self._launches()
        self._cells: dict[tuple[int, int, int], _Cell] = {}
        self._overlap, tasks = overlap, self.layout.tasks
        if not overlap:
            tasks = tuple(Task(task.name) for task in tasks)
        self.simulation = Simulation(tasks, axes=self.axes)
        self._owed: _Runs = {}, {}
        self.seconds = self.change(dict(enumerate(self.choice)))

    def _launches(self) -> dict[int, float]:
        """Seconds that ops pay for starting their kernels, by node."""
        works = self.formulation.kernels.works
        each = self.formulation.launches / max(1, sum(work.launches for work in works))
        return {
            i: each * works[node.of].launches
            for i, node in enumerate(self.formulation.nodes)
            if node.kind == "op"
        }

    def change(self, strategies: Mapping[int, int]) -> float:
        """Give nodes other strategies; returns ``seconds``."""
        self.seconds = self._run(strategies)
        for node, k in strategies.items():
            self.choice[node] = k
        return self.seconds

    def tried(self, strategies: Mapping[int, int]) -> float:
        """What ``change`` would return; ``choice`` and ``seconds`` stay. What was run
        for it is put back by the next simulation, in one go with that."""
        seconds = self._run(strategies)
        self._owed = self._runs({node: self.choice[node] for node in strategies})
        return seconds

    def _run(self, strategies: Mapping[int, int]) -> float:
        seconds, axes = self._runs(strategies)
        seconds, axes = self._owed[0] | seconds, self._owed[1] | axes
        self._owed = {}, {}
        return self.simulation.change(seconds, axes if self._overlap else None)

    def _runs(self, strategies: Mapping[int, int]) -> _Runs:
        """What tasks that nodes have a part in take."""
        seconds: dict[int, float] = {}
        axes: dict[int, int] = {}
        problem, kernels, rows = self.problem, self.layout.kernels, self.layout.rows
        for node, k in strategies.items():
            if node in kernels:
                duration = float(problem.costs[node][k])
                seconds[kernels[node]] = duration + self._launch[node]
        for e in {e for node in strategies for e in self.edges_of[node]}:
            row = rows[e]
            if row.copy is None:
                continue
            i, j, _ = problem.edges[e]
            a = strategies.get(i, self.choice[i])
            b = strategies.get(j, self.choice[j])
            partial, seconds[row.copy], steps = self._cell(e, a, b)
            seconds.update(dict.fromkeys((*row.behind, *row.before), 0.0))
            for task, (duration, along) in zip(row.of(partial), steps, strict=False):
                seconds[task], axes[task] = duration, along
        return seconds, axes

    def _cell(self, e: int, a: int, b: int) -> _Cell:
        """What an edge takes under strategies of its nodes."""
        i, j, table = self.problem.edges[e]
        key = table, a, b
        if key not in self._cells:
            edge_value, formulation = self.layout.edge_values[e], self.formulation
            source = formulation.pool[formulation.nodes[i].specs[a, edge_value.source]]
            target = formulation.pool[formulation.nodes[j].specs[b, edge_value.target]]
            total = float(self.problem.tables[table][a, b])
            copies, steps = 0.0, tuple[tuple[float, int], ...]()
            if 0 < total < FORBIDDEN:
                copies, steps = self._steps(edge_value.value, source, target, total)
            self._cells[key] = bool(source.partial), copies, steps
        return self._cells[key]

    def _steps(
        self, v: int, source: Spec, target: Spec, total: float
    ) -> tuple[float, _Steps]:
        """Seconds of copies, and the collectives, of a reshard that takes ``total``; at
        most one for each mesh axis."""
        value, mesh = self.formulation.program.values[v], self.formulation.mesh
        way = all_pairs.path(source, target, mesh, value.shape, value.dtype.itemsize)
        local = value.nbytes / mesh.count(source.sharded_axes)
        runs: list[tuple[float, int]] = []
        for step in way or ():
            seconds = 0.0
            if not step.local:
                curve = collectives.along(step.kind, mesh, step.axes)
                seconds = curve.seconds(local)
            local *= step.growth(mesh)
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
        return total - whole * part, tuple((x * part, bits) for x, bits in runs)
