"""Builds variables and priced edges of the solver's problem, one by one.

In: a Program, a Mesh with links, Hardware and facts that no choice changes
(``FixedFacts``). Out: a ``Node`` per op or value, their costs, and tables of seconds on
edges; equal edges share a table. Never: decides which nodes and edges there are
(``formulate`` does).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fxpar.sharding.cost import program_kernels
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.program_kernels import NEVER, kernels_of
from fxpar.sharding.cost.recompute import tag
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Op, Program
from fxpar.sharding.propagate.at_rest import gathered_again
from fxpar.sharding.propagate.propagation import Seed
from fxpar.sharding.reshard import all_pairs
from fxpar.sharding.reshard.steps import ALONE, Alone
from fxpar.sharding.search import search_space
from fxpar.sharding.search.batch_parts import PartProgram
from fxpar.sharding.search.search_space import (
    EdgeEnd,
    Node,
    Pool,
    allowed,
    specs_of_shape,
)
from fxpar.sharding.shift_messages import messages_of
from fxpar.sharding.solver import Edge
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy


@dataclass(frozen=True)
class FixedFacts:
    """Holds facts that no choice changes."""

    # By value, the hints that its specs have to agree with.
    seeds: Mapping[int, Sequence[Seed]] = field(default_factory=dict)
    keep_gathered: bool = False  # whether the backward gathers no parameter again
    parts: PartProgram | None = None  # set if one part of a cut batch is priced


class ProblemBuilder:
    """Collects nodes, then the edges between them; equal edges share a table."""

    def __init__(
        self, program: Program, mesh: Mesh, hardware: Hardware, facts: FixedFacts
    ) -> None:
        self.program, self.mesh, self.hardware = program, mesh, hardware
        self.facts = facts
        self.backward = program.backward
        self.pool = Pool()
        self.nodes: list[Node] = []
        self.costs: list[np.ndarray] = []
        # By node of an op, the part of its costs for adding to sums over parts.
        self.adding: dict[int, np.ndarray] = {}
        self.edges: list[Edge] = []
        self.tables: list[np.ndarray] = []
        self.table_of: dict[Any, int] = {}
        self.columns: dict[Any, tuple[tuple[Strategy, ...], np.ndarray]] = {}
        self.matrices: dict[Any, np.ndarray] = {}
        self.prices: dict[Any, np.ndarray] = {}
        self._columns: dict[tuple[int, int], tuple[np.ndarray, bytes]] = {}
        self._specs_met: dict[tuple[bytes, ...], np.ndarray] = {}
        self._like: dict[Any, tuple[Any, ...]] = {}
        self.settling: dict[int, tuple[int, int]] = {}
        self.resting: dict[int, EdgeEnd] = {}  # gradients
        # Values that forward and backward each gather for themselves.
        self.gathered_twice: set[int] = set()
        if not facts.keep_gathered:
            self.gathered_twice = gathered_again(program)
        if facts.parts is None:
            self.kernels = kernels_of(program, self.gathered_twice)
        else:
            self.kernels = facts.parts.kernels(self.gathered_twice)

    def node(
        self,
        kind: str,
        of: int,
        specs: np.ndarray,
        costs: np.ndarray | None = None,
        strategies: tuple[Strategy, ...] = (),
        copies: np.ndarray | None = None,
    ) -> int:
        self.nodes.append(Node(kind, of, specs, strategies, copies))
        self.costs.append(np.zeros(len(specs)) if costs is None else costs)
        return len(self.nodes) - 1

    def op_nodes(self) -> list[int]:
        out = []
        for op in self.program.ops:
            key = (op.rule,)
            if key not in self.columns:
                by_specs = search_space.strategies_by_specs(op.rule, self.mesh)
                rows = [[self.pool.number(s) for s in specs] for specs in by_specs]
                numbers = np.array(rows).reshape(len(rows), -1)
                self.columns[key] = tuple(by_specs.values()), numbers
            options, numbers = self.columns[key]
            seconds = self._seconds(op.index)
            adding = self._adding(op, numbers)
            if adding is not None:
                seconds = seconds + adding
                self.adding[len(self.nodes)] = adding
            out.append(self.node("op", op.index, numbers, seconds, options))
        return out

    def _adding(self, op: Op, numbers: np.ndarray) -> np.ndarray | None:
        """Return the seconds of adding an op's results of one part to the sums over
        parts, under each of its strategies; None where nothing is added."""
        parts = self.facts.parts
        if parts is None or op.index not in parts.added:
            return None
        seconds = np.zeros(len(numbers))
        for position, nbytes in parts.added[op.index]:
            column = numbers[:, len(op.operands) + position]
            distinct, each = np.unique(column, return_inverse=True)
            axes = (self.pool.specs[n].sharded_axes for n in distinct)
            sizes = (nbytes / self.mesh.count(split) for split in axes)
            seconds += np.array([self.hardware.fused(n, {}) for n in sizes])[each]
        return seconds * parts.paid

    def _seconds(self, index: int) -> np.ndarray:
        """Return the seconds of an op under each of its strategies; equal ops share one
        array."""
        op, work = self.program.ops[index], self.kernels.works[index]
        part = self.op_share(index)
        target = op.target if work.flops else None  # says which dims its product has
        messages = messages_of(op) if op.rule.sends else None
        key = (target, op.rule, work, messages, part)
        if key not in self.prices:
            options = search_space.strategies(op.rule, self.mesh)
            self.prices[key] = np.array(
                [
                    part
                    * program_kernels.seconds(
                        op, work, strategy, self.mesh, self.hardware
                    )
                    for strategy in options
                ]
            )
        return self.prices[key]

    def specs_of_shape(self, v: int) -> list[Spec]:
        """Return every spec of a value with nothing partial, in each order of axes."""
        return specs_of_shape(self.program.values[v].shape, self.mesh)

    def allowed(self, v: int, specs: Iterable[Spec]) -> list[Spec]:
        """Return the specs that keep to the hints on a value; if none does, any that
        do. Raises HintError if hints on the value contradict each other."""
        seeds = self.facts.seeds.get(v, ())
        return allowed(self.program.values[v], seeds, specs, self.mesh)

    def like(self, v: int) -> tuple[Any, ...]:
        """Return a key of everything that prices of resharding a value depend on."""
        value = self.program.values[v]
        key = value.shape, value.dtype
        if key not in self._like:
            sizes = tuple(math.gcd(n, self.mesh.size) for n in value.shape)
            self._like[key] = sizes, value.nbytes
        return *self._like[key], self.share(v)

    def op_share(self, index: int) -> float:
        """Return how many times an op's seconds are paid."""
        return self.facts.parts.op_share(index) if self.facts.parts else 1.0

    def share(self, v: int) -> float:
        """Return how many times the seconds of resharding a value are paid."""
        return self.facts.parts.value_share(v) if self.facts.parts else 1.0

    def _column(self, end: EdgeEnd) -> tuple[np.ndarray, bytes]:
        """Return the numbers of the specs at an end of an edge, and their bytes; nodes
        that are equal have one array, and all keep theirs."""
        specs = self.nodes[end.node].specs
        key = id(specs), end.column
        if key not in self._columns:
            column = specs[:, end.column]
            self._columns[key] = column, column.tobytes()
        return self._columns[key]

    def met(self, v: int, ends: Sequence[EdgeEnd]) -> np.ndarray:
        """Return (K, 1): the specs that a value has at ends of edges, each once, as far
        as hints allow them; values that are equal have one array."""
        columns = [self._column(end) for end in ends]
        key = tuple(as_bytes for _, as_bytes in columns)
        if v in self.facts.seeds or key not in self._specs_met:
            numbers = dict.fromkeys(itertools.chain(*(column for column, _ in columns)))
            specs = self.allowed(v, (self.pool.specs[n] for n in numbers))
            if v in self.facts.seeds:
                return self.pool.numbers(specs)
            self._specs_met[key] = self.pool.numbers(specs)
        return self._specs_met[key]

    def edge(
        self, v: int, a: EdgeEnd, b: EdgeEnd, also: np.ndarray | None = None
    ) -> None:
        """Add an edge that reshards ``v`` from the specs of node ``a`` to those of
        ``b``. ``also``: specs in which the value is held too; if there is one only,
        resharding may start there."""
        (have, have_bytes), (need, need_bytes) = self._column(a), self._column(b)
        alone = self.alone(v, a, b)
        in_kernel = self.kernels.base[v] not in self.kernels.written
        there = None if also is None or len(also) > 1 else also.item()
        times = self.share(v) * self._times(v, b)
        key = (have_bytes, need_bytes, self.like(v), alone, in_kernel, there, times)

        def priced() -> np.ndarray:
            table = self.between(v, have, need, alone)
            if there is not None:
                at_once = self.between(v, np.array([there]), need, alone)
                table = np.minimum(table, at_once)
            if in_kernel:
                table = table + self.in_memory(v, have, need) * (table > 0)
            return table * times

        self.connect(a.node, b.node, key, priced)

    def connect(self, a: int, b: int, key: Any, make: Callable[[], np.ndarray]) -> None:
        """Add an edge with the table of a key, which is made once."""
        if key not in self.table_of:
            self.table_of[key] = len(self.tables)
            self.tables.append(make())
        self.edges.append(Edge(a, b, self.table_of[key]))

    def _times(self, v: int, reader: EdgeEnd) -> int:
        """Return how many times a value is resharded for a reader: twice if a
        checkpointed region is computed again. ``gathered_twice`` has parameters."""
        if v not in self.program.producers or v in self.gathered_twice:
            return 1
        node = self.nodes[reader.node]
        index = node.of if node.kind == "op" else self.program.producers[v][0]
        is_twice = NEVER not in self.kernels.runs[index]
        return 1 + (is_twice and tag(self.program.ops[index].node) is True)

    def alone(self, v: int, a: EdgeEnd, b: EdgeEnd) -> Alone:
        """Return whether copies of a value before and after its collectives are kernels
        of their own: no light op makes it, or reads it."""
        kernels, kind = self.kernels, self.nodes[b.node].kind
        light_maker = self.nodes[a.node].kind == "op" and kernels.is_made_by_light_op(v)
        read = kind in ("value", "copy") and kernels.read_by_light[v]
        if kind == "op":
            read = kernels.is_read_by_light(self.nodes[b.node].of)
        return not light_maker, not read

    def in_memory(self, v: int, have: np.ndarray, need: np.ndarray) -> np.ndarray:
        """Return the seconds that a collective adds by splitting the kernel around it:
        a value that one kernel would never write is written, and read again by
        another."""
        value, on = self.program.values[v], self.hardware
        before, after = (
            [value.nbytes / self.mesh.count(pool[n].sharded_axes) for n in numbers]
            for pool, numbers in ((self.pool.specs, have), (self.pool.specs, need))
        )
        return on.launch + on.streaming(np.add.outer(before, after))

    def between(
        self, v: int, have: np.ndarray, need: np.ndarray, alone: Alone = ALONE
    ) -> np.ndarray:
        """Return the seconds (K, L) from each of a value's specs ``have`` to each of
        ``need``."""
        value, pool = self.program.values[v], self.pool.specs
        sources, i = np.unique(have, return_inverse=True)
        targets, j = np.unique(need, return_inverse=True)
        key = (
            sources.tobytes(),
            targets.tobytes(),
            value.shape,
            value.dtype.itemsize,
            alone,
        )
        if key not in self.matrices:
            self.matrices[key] = all_pairs.matrix(
                [pool[n] for n in sources],
                [pool[n] for n in targets],
                self.mesh,
                value.shape,
                value.dtype.itemsize,
                alone,
            )
        return self.matrices[key][i][:, j]

    def same(self, a: EdgeEnd, b: EdgeEnd) -> None:
        """Add an edge that allows equal specs only."""
        have = self.nodes[a.node].specs[:, a.column]
        need = self.nodes[b.node].specs[:, b.column]
        differ = np.where(have[:, None] == need[None, :], 0.0, np.inf)
        key = ("same", have.tobytes(), need.tobytes())
        self.connect(a.node, b.node, key, lambda: differ)
