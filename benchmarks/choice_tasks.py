"""Lists the tasks of one step of any choice of the solver, in the order of their
launch.

In: a Formulation. Out: ``Layout``: tasks without durations, and the node or edge of
each: a kernel for each op, and for each edge one that copies and a row of collectives,
one for each step that its reshard may take. No choice changes them or their order;
durations and axes are added by ``simulated_choice.Overlap``. Never: looks at a cost,
except to leave out edges that have none.

Collectives are placed as lowering does (``passes.localize``,
``passes.order.order_collectives``): a value settles, and a partial result is reduced,
after the op that makes it; a parameter is gathered where the one read before it is
first read; anything else moves right before its reader. A result is waited for where an
op first reads it (views do not count), and by the next collective that moves it on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxpar.passes.simulate.simulate_step import Task
from fxpar.sharding.program import Program, is_view
from fxpar.sharding.search.formulate import Formulation
from fxpar.sharding.search.search_space import Node

# Around an op, in order: its operands move, are waited for, it runs, results reduce.
_MOVE, _WAIT, _RUN, _REDUCE = range(4)


@dataclass(frozen=True)
class EdgeValue:
    """Is the value that an edge of the problem moves."""

    # Index of the value.
    value: int
    # Column of the first node's specs that is of the value.
    source: int
    # Column of the second node's specs that is of the value.
    target: int


@dataclass(frozen=True)
class EdgeTasks:
    """Holds the tasks of an edge. Where it has both collectives ``after`` and
    ``before``, a partial value takes the first, any other the second."""

    # Collectives after the op that makes the value.
    after: tuple[int, ...] = ()
    # Collectives before the op that reads it.
    before: tuple[int, ...] = ()
    # The kernel that copies, before its collectives.
    copy: int | None = None

    def of(self, partial: bool) -> tuple[int, ...]:
        """Return the tasks that a reshard takes."""
        if self.after and self.before:
            return self.after if partial else self.before
        return self.after or self.before


@dataclass(frozen=True)
class Layout:
    """Holds the tasks of one step, and the node or edge of each."""

    # In the order they are launched.
    tasks: tuple[Task, ...]
    # Task of each node that is an op, or an exchange for several.
    kernels: dict[int, int]
    # Tasks of each edge.
    rows: tuple[EdgeTasks, ...]
    # The value that each edge moves, None if it moves none.
    edge_values: tuple[EdgeValue | None, ...]


def layout(formulation: Formulation, axes: Sequence[str]) -> Layout:
    """Return the tasks of a formulation; a row has as many collectives as there are
    axes."""
    tasks = _TasksOfChoice(formulation, tuple(axes))
    for e in range(len(formulation.problem.edges)):
        tasks.edge(e)
    return tasks.layout()


def edge_values(formulation: Formulation) -> tuple[EdgeValue | None, ...]:
    """Return the value that each edge of the problem moves; None for edges of the price
    of exchanged rows. Several edges between two nodes are distinguished by their
    order."""
    count: dict[tuple[int, int], int] = defaultdict(int)
    out: list[EdgeValue | None] = []
    for i, j, _ in formulation.problem.edges:
        if formulation.nodes[i].kind == "exchange":
            out.append(None)
            continue
        out.append(_edge_value(formulation, i, j, count[i, j]))
        count[i, j] += 1
    return tuple(out)


def _edge_value(formulation: Formulation, i: int, j: int, nth: int) -> EdgeValue:
    """Return the value that the n-th of the edges between two nodes moves."""
    program, a, b = formulation.program, formulation.nodes[i], formulation.nodes[j]
    if a.kind == "op" and b.kind == "op":
        maker, reader = program.ops[a.of], program.ops[b.of]
        common = set(maker.results) & set(reader.operands) - set(formulation.settling)
        v = sorted(common)[nth]
        return EdgeValue(v, _column_of(program, a, v), reader.operands.index(v))
    v = _value(program, b if a.kind == "op" else a)
    if b.kind != "op":
        return EdgeValue(v, _column_of(program, a, v), 0)
    operands = program.ops[b.of].operands
    return EdgeValue(v, 0, [k for k, x in enumerate(operands) if x == v][nth])


def _value(program: Program, node: Node) -> int:
    """Return the value of a node that is no op."""
    ends = {"input": program.inputs, "output": program.outputs}.get(node.kind)
    v = node.of if ends is None else ends[node.of]
    assert v is not None
    return v


def _column_of(program: Program, node: Node, v: int) -> int:
    """Return the column of a value that a node makes."""
    if node.kind != "op":
        return 0
    op = program.ops[node.of]
    return len(op.operands) + op.results.index(v)


# (op, part of it, number): the order of tasks.
_Place = tuple[int, int, int]


class _TasksOfChoice:
    """Collects tasks edge by edge, each with its place."""

    def __init__(self, formulation: Formulation, axes: tuple[str, ...]) -> None:
        self.formulation, self.axes = formulation, axes
        self.program = formulation.program
        self.end = len(self.program.ops)
        self.edge_values = edge_values(formulation)
        self.moves = [_has_costs(table) for table in formulation.problem.tables]
        self.views = {op.index for op in self.program.ops if is_view(op)}
        self.tasks: list[Task] = []
        self.places: list[_Place] = []
        self.rows: list[EdgeTasks] = []
        self.pending: dict[int, int] = {}  # node -> the last task that moved its value
        self.waited: dict[int, int] = {}  # task -> the first op that reads its result
        self.kernels = {
            i: self.task(f"op {node.of}", (node.of, _RUN))
            for i, node in enumerate(formulation.nodes)
            if node.kind == "op" and node.of not in self.views
        }
        self.first = self._first_reads()
        self.kernels |= {
            i: self.task(f"exchange of {node.of}", (self.first[i], _MOVE))
            for i, node in enumerate(formulation.nodes)
            if node.kind == "exchange"
        }
        self.gathered = self._gathered()

    def task(
        self,
        name: str,
        at: tuple[int, int],
        axes: tuple[str, ...] = (),
        of: int | None = None,
    ) -> int:
        """Add a task and return it; its place is at the earliest after the task it
        waits for."""
        place = (*at, len(self.tasks))
        if of is not None:
            place = max(place, (*self.places[of][:2], len(self.tasks)))
        self.tasks.append(Task(name, 0.0, axes, of))
        self.places.append(place)
        return len(self.tasks) - 1

    def _first_reads(self) -> list[int]:
        """Return for each node the first op to compute with its value: the op itself,
        or, for a view or a settled value, the first op that reads it."""
        nodes, edges = self.formulation.nodes, self.formulation.problem.edges
        readers: dict[int, list[int]] = defaultdict(list)
        for i, j, _ in edges:
            readers[i].append(j)
        first: dict[int, int] = {}

        def visit(i: int) -> int:
            node = nodes[i]
            if i not in first:
                if node.kind == "op" and node.of not in self.views:
                    first[i] = node.of
                elif node.kind == "output":
                    first[i] = self.end
                else:
                    first[i] = min((visit(j) for j in readers[i]), default=self.end)
            return first[i]

        # From the last on, so that recursion is not deep.
        values = {i for i, node in enumerate(nodes) if node.kind in ("value", "copy")}
        for i in sorted(range(len(nodes)), key=lambda i: (i in values, -i)):
            visit(i)
        return [first[i] for i in range(len(nodes))]

    def _gathered(self) -> dict[int, int]:
        """Return for each edge that brings an input to its readers the op where it
        starts: the first reader of the input before it. Matrices and vectors are
        counted separately."""
        nodes, backward = self.formulation.nodes, self.program.backward
        rows: dict[tuple[bool, bool], list[tuple[int, int]]] = defaultdict(list)
        for e, (i, j, table) in enumerate(self.formulation.problem.edges):
            if nodes[i].kind in ("input", "constant") and self.moves[table]:
                at = self.first[j]
                moved = self.edge_values[e]
                assert moved is not None, "of an input"
                large = len(self.program.values[moved.value].shape) > 1
                rows[at in backward, large].append((at, e))
        out = {}
        for row in rows.values():
            row.sort()
            for k, (_, e) in enumerate(row):
                out[e] = row[max(0, k - 1)][0]
        return out

    def edge(self, e: int) -> None:
        """Add the row of an edge, and the wait for the value it moved."""
        i, j, table = self.formulation.problem.edges[e]
        a, b = self.formulation.nodes[i], self.formulation.nodes[j]
        row, last = EdgeTasks(), self.pending.get(i)
        if a.kind == "exchange":
            row = EdgeTasks(copy=self.task(f"rows of {b.of}", (b.of, _MOVE)))
        elif self.moves[table]:
            if a.kind in ("input", "constant"):
                row, last = self._row(e, None, (self.gathered[e], _MOVE), last)
            elif a.kind in ("value", "copy"):
                row, last = self._row(e, None, (self._reader(j), _MOVE), last)
            else:
                before = None if b.kind == "value" else (self._reader(j), _MOVE)
                row, last = self._row(e, (a.of, _REDUCE), before, last)
        self.rows.append(row)
        if last is None:
            return
        if j in self.kernels:
            self.waited[last] = min(self.waited.get(last, self.end), b.of)
        else:
            self.pending[j] = last

    def _reader(self, j: int) -> int:
        node = self.formulation.nodes[j]
        if node.kind == "copy":
            return self.first[j]
        return node.of if node.kind == "op" else self.end

    def _row(
        self,
        e: int,
        after: tuple[int, int] | None,
        before: tuple[int, int] | None,
        last: int | None,
    ) -> tuple[EdgeTasks, int | None]:
        """Add the copies of an edge and its collectives, each after the one before it;
        return the row and the last of them."""
        start = after or before
        copy = None if start is None else self.task(f"copies of edge {e}", start)
        tasks = []
        for at in (after, before):
            row = []
            for _ in self.axes if at is not None else ():
                assert at is not None
                last = self.task(f"edge {e}", at, self.axes, last)
                row.append(last)
            tasks.append(tuple(row))
        return EdgeTasks(tasks[0], tasks[1], copy), last

    def layout(self) -> Layout:
        """Return all tasks in order, waits among them."""
        for task, op in self.waited.items():
            self.task("wait", (op, _WAIT), of=task)
        order = sorted(range(len(self.tasks)), key=self.places.__getitem__)
        index = {task: k for k, task in enumerate(order)}
        tasks = []
        for task in order:
            of = self.tasks[task].of
            tasks.append(
                replace(self.tasks[task], of=None if of is None else index[of])
            )
        rows = [
            EdgeTasks(
                tuple(index[task] for task in row.after),
                tuple(index[task] for task in row.before),
                None if row.copy is None else index[row.copy],
            )
            for row in self.rows
        ]
        kernels = {node: index[task] for node, task in self.kernels.items()}
        return Layout(tuple(tasks), kernels, tuple(rows), self.edge_values)


def _has_costs(table: np.ndarray) -> bool:
    """Return whether any allowed pair of strategies costs something."""
    return bool(((table > 0) & np.isfinite(table)).any())
