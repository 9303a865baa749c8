"""Turns a Program into the pairwise problem that the solver solves, and its choice
back.

In: a Program, a Mesh with links, Hardware, seeds (hints) and a memory limit. Out:
``Formulation``: a ``solver.Problem`` with a node per op, per input, per output and per
value that is read more than once. A choice of the solver is read as a strategy per op
and the spec each value settles in; given strategies of all ops, e.g. an expert's, are
connected in the cheapest way, so that all plans are compared at the same prices. Never:
changes the Program.

A value read once costs one reshard, from the spec its op makes to the one its reader
needs. A value read more often is a node of its own: it settles in one spec, which each
reader reshards to what it needs, so that readers that need the same share one reshard.
A parameter at rest settles once for the forward and once for the backward, since it is
gathered again there.

Source: the pairwise form is Alpa's (OSDI 2022, section 4.2) without its restriction
that replicated heavy work is forbidden; partial results are specs like others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np

from fxpar.errors import PlanError
from fxpar.sharding.cost import program_kernels
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.program_kernels import NEVER, ProgramKernels, kernels_of
from fxpar.sharding.cost.recompute import tag
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Op, Output, Program, is_view
from fxpar.sharding.propagate.propagation import Seed
from fxpar.sharding.reshard import all_pairs
from fxpar.sharding.reshard.steps import ALONE, Alone
from fxpar.sharding.search import search_space
from fxpar.sharding.search.batch_parts import PartProgram
from fxpar.sharding.search.memory_constraints import Entry, entries
from fxpar.sharding.search.search_space import (
    EdgeEnd,
    Node,
    Pool,
    allowed,
    specs_of_shape,
)
from fxpar.sharding.shift_messages import messages_of
from fxpar.sharding.solver import Edge, Live, Problem, Solution, solve
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy, specs


@dataclass
class Formulation:
    """Holds the solver's problem for a Program, and the meaning of its numbers."""

    program: Program  # the program of the problem: of one part, if the batch is cut
    mesh: Mesh
    problem: Problem
    nodes: tuple[Node, ...]  # the op, input, output or value that each decides
    pool: tuple[Spec, ...]  # the specs that numbers stand for
    # Value -> its nodes by phase (0 forward, 1 backward; both the same unless it is a
    # parameter at rest).
    settling: Mapping[int, tuple[int, int]]
    kernels: ProgramKernels  # bytes and flops of ops, and when they run
    hardware: Hardware
    memory_entries: tuple[Entry, ...] = ()  # of each row of the problem's memory
    parts: PartProgram | None = None  # set if the program is one part of a batch
    # By node of an op, seconds by strategy of adding to sums over parts; its costs
    # include them.
    adding: Mapping[int, np.ndarray] = field(default_factory=dict)

    def launches_of(self, index: int) -> float:
        """Return the seconds that an op's kernels take to start, which no choice
        changes."""
        share = 1.0 if self.parts is None else self.parts.op_share(index)
        return self.hardware.launch * self.kernels.works[index].launches * share

    @cached_property
    def launches(self) -> float:
        """Return the seconds that all kernels take to start."""
        return sum(map(self.launches_of, range(len(self.kernels.works))))

    @cached_property
    def hidden(self) -> tuple[bool, ...]:
        """Return for each edge whether compute may hide what it costs: no op waits for
        an input that is gathered ahead, or a gradient that no op computes with."""
        kinds = [node.kind for node in self.nodes]
        waiting = [
            i
            for i, node in enumerate(self.nodes)
            if node.kind == "op" and not is_view(self.program.ops[node.of])
        ]
        makers: dict[int, list[int]] = {}
        for i, j, _ in self.problem.edges:
            makers.setdefault(j, []).append(i)
        awaited = set(waiting)  # nodes whose values ops compute with
        while waiting:
            read = {i for i in makers.get(waiting.pop(), ()) if kinds[i] != "output"}
            waiting += read - awaited
            awaited |= read
        edges = self.problem.edges
        return tuple(kinds[i] == "input" or j not in awaited for i, j, _ in edges)


class ProblemBuilder:
    """Collects nodes, the variables of the problem, then the edges between them, tables
    of seconds; equal edges share a table."""

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        hardware: Hardware,
        seeds: Mapping[int, Sequence[Seed]],
        parts: PartProgram | None,
    ) -> None:
        self.program, self.mesh, self.hardware = program, mesh, hardware
        self.seeds, self.parts = seeds, parts
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
        # By value, what makes it; its readers, each with its phase; its nodes.
        self.makers: dict[int, EdgeEnd] = {}
        self.readers: list[list[tuple[int, EdgeEnd]]] = [[] for _ in program.values]
        self.settling: dict[int, tuple[int, int]] = {}
        self.resting: dict[int, EdgeEnd] = {}  # gradients
        self.kernels = kernels_of(program) if parts is None else parts.kernels
        self._ops()
        self._inputs()
        self._outputs()
        self._constants()
        self._values()

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

    def _ops(self) -> None:
        """Add a node per op: its strategies."""
        for op in self.program.ops:
            key = (op.rule,)
            if key not in self.columns:
                by_specs = search_space.strategies(op.rule, self.mesh)
                rows = [[self.pool.number(s) for s in specs] for specs in by_specs]
                numbers = np.array(rows).reshape(len(rows), -1)
                self.columns[key] = tuple(by_specs.values()), numbers
            options, numbers = self.columns[key]
            seconds = self._seconds(op.index)
            adding = self._adding(op, numbers)
            if adding is not None:
                seconds = seconds + adding
                self.adding[len(self.nodes)] = adding
            node = self.node("op", op.index, numbers, seconds, options)
            phase, ends = int(op.index in self.program.backward), len(op.operands)
            for i, v in enumerate(op.operands):
                self.readers[v].append((phase, EdgeEnd(node, i)))
            for r, v in enumerate(op.results):
                self.makers[v] = EdgeEnd(node, ends + r)

    def _adding(self, op: Op, numbers: np.ndarray) -> np.ndarray | None:
        """Return the seconds of adding an op's results of one part to the sums over
        parts, under each of its strategies; None where nothing is added."""
        parts = self.parts
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
            on = self.mesh, self.hardware
            options = search_space.strategies(op.rule, self.mesh).values()
            seconds = [program_kernels.seconds(op, work, x, *on) for x in options]
            self.prices[key] = part * np.array(seconds)
        return self.prices[key]

    def specs_of_shape(self, v: int) -> list[Spec]:
        """Return every spec of a value with nothing partial, in each order of axes."""
        return specs_of_shape(self.program.values[v].shape, self.mesh)

    def allowed(self, v: int, specs: Iterable[Spec]) -> list[Spec]:
        """Return the specs that keep to the hints on a value; if none does, any that
        do. Raises HintError if hints on the value contradict each other."""
        seeds = self.seeds.get(v, ())
        return allowed(self.program.values[v], seeds, specs, self.mesh)

    def like(self, v: int) -> tuple[Any, ...]:
        """Return a key of everything that prices of resharding a value depend on."""
        value = self.program.values[v]
        sizes = tuple(math.gcd(n, self.mesh.size) for n in value.shape)
        return sizes, value.nbytes, self.share(v)

    def op_share(self, index: int) -> float:
        """Return how many times an op's seconds are paid."""
        return self.parts.op_share(index) if self.parts else 1.0

    def share(self, v: int) -> float:
        """Return how many times the seconds of resharding a value are paid."""
        return self.parts.value_share(v) if self.parts else 1.0

    def _column(self, end: EdgeEnd) -> np.ndarray:
        """Return the numbers of the specs at an end of an edge."""
        return self.nodes[end.node].specs[:, end.column]

    def met(self, v: int, ends: Sequence[EdgeEnd]) -> np.ndarray:
        """Return (K, 1): the specs that a value has at ends of edges, each once, as far
        as hints allow them."""
        numbers = dict.fromkeys(itertools.chain(*map(self._column, ends)))
        return self.pool.numbers(self.allowed(v, (self.pool.specs[n] for n in numbers)))

    def edge(
        self, v: int, a: EdgeEnd, b: EdgeEnd, also: np.ndarray | None = None
    ) -> None:
        """Add an edge that reshards ``v`` from the specs of node ``a`` to those of
        ``b``. ``also``: specs in which the value is held too; if there is one only,
        resharding may start there."""
        have, need = self._column(a), self._column(b)
        alone = self.alone(v, a, b)
        in_kernel = self.kernels.base[v] not in self.kernels.written
        there = None if also is None or len(also) > 1 else also.item()
        times = self.share(v) * self._times(v, b)
        ends = have.tobytes(), need.tobytes()
        key = (*ends, self.like(v), alone, in_kernel, there, times)

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
        if v not in self.program.producers or v in self.program.gathered_twice:
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
        how = value.shape, value.dtype.itemsize, alone
        key = sources.tobytes(), targets.tobytes(), *how
        if key not in self.matrices:
            a, b = ([pool[n] for n in numbers] for numbers in (sources, targets))
            self.matrices[key] = all_pairs.matrix(a, b, self.mesh, *how)
        return self.matrices[key][i][:, j]

    def same(self, a: EdgeEnd, b: EdgeEnd) -> None:
        """Add an edge that allows equal specs only."""
        have = self._column(a)
        need = self._column(b)
        differ = np.where(have[:, None] == need[None, :], 0.0, np.inf)
        key = ("same", have.tobytes(), need.tobytes())
        self.connect(a.node, b.node, key, lambda: differ)

    def _inputs(self) -> None:
        """Add a node per input: its spec at rest, or any its hint allows. Tangents are
        left to ``_outputs``."""
        program = self.program
        tangents = {
            i for i, k in program.signature.tangents if program.outputs[k] is not None
        }
        pairs = zip(program.signature.inputs, program.inputs, strict=True)
        for k, (declared, v) in enumerate(pairs):
            if v is None or k in tangents:
                continue
            if declared.at_rest is not None:
                specs = [declared.at_rest]
            else:
                specs = self.allowed(v, self.specs_of_shape(v))
                if declared.splits:
                    specs = _most_split(specs, program.values[v].shape, self.mesh)
            self.makers[v] = EdgeEnd(self.node("input", k, self.pool.numbers(specs)), 0)

    def _outputs(self) -> None:
        """Add a node per output: the specs it may have. Gradients follow parameters of
        open layout, tangents their outputs."""
        program = self.program
        end_of: dict[int, EdgeEnd] = {}
        pairs = zip(program.signature.outputs, program.outputs, strict=True)
        for k, (out, v) in enumerate(pairs):
            if v is None:
                continue
            leader = _leader(program, out, v)
            if leader is None:
                numbers = self.pool.numbers(self._rest_specs(out, v))
            else:
                numbers = self.nodes[self.makers[leader].node].specs
            end_of[k] = EdgeEnd(self.node("output", k, numbers), 0)
            if out.kind == "gradient":
                self.resting[v] = end_of[k]
            self.readers[v].append((int(out.kind == "gradient"), end_of[k]))
            if leader is not None:
                self.same(self.makers[leader], end_of[k])
        for i, k in program.signature.tangents:
            tangent = program.inputs[i]
            if tangent is not None and k in end_of:
                numbers = self.nodes[end_of[k].node].specs
                self.makers[tangent] = EdgeEnd(self.node("input", i, numbers), 0)
                self.same(end_of[k], self.makers[tangent])

    def _rest_specs(self, out: Output, v: int) -> list[Spec]:
        shape = self.program.values[v].shape
        if out.at_rest is not None:
            return [out.at_rest]
        if out.layout == "whole":
            return [Spec.whole(len(shape))]
        specs, is_open = self.specs_of_shape(v), out.layout == "open"
        return [s for s in specs if is_open or s.is_even(self.mesh, shape)]

    def _constants(self) -> None:
        """Add a node per tensor of the graph itself, whole everywhere."""
        for value in self.program.values:
            if value.index not in self.makers:
                whole = [Spec.whole(len(value.shape))]
                node = self.node("constant", value.index, self.pool.numbers(whole))
                self.makers[value.index] = EdgeEnd(node, 0)

    def _values(self) -> None:
        """Add edges from maker to reader, by way of a node where there are several
        readers or a hint to keep."""
        for v, readers in enumerate(self.readers):
            maker = self.makers[v]
            node = self.nodes[maker.node]
            free = node.kind == "input" and len(node.specs) > 1
            hinted = v in self.seeds and not free
            if len(readers) == 1 and not hinted:
                self.edge(v, maker, readers[0][1])
                continue
            if not readers:
                continue
            phases = ([0], [1]) if v in self.program.gathered_twice else ([0, 1],)
            settled: dict[int, int] = {}
            for phase in phases:
                ends = [end for p, end in readers if p in phase]
                if ends:
                    settled |= dict.fromkeys(phase, self._settle(v, maker, ends))
            forward = settled.get(0, settled.get(1, -1))
            self.settling[v] = forward, settled.get(1, forward)

    def _settle(self, v: int, maker: EdgeEnd, ends: Sequence[EdgeEnd]) -> int:
        have = self._column(maker)
        specs = self.met(v, (maker, *ends))
        inputs, source = self.program.signature.inputs, self.nodes[maker.node]
        is_input = len(have) > 1 and source.kind == "input"
        if is_input and inputs[source.of].kind == "parameter":
            node = self._settle_or_copy(v, maker, specs)
        else:
            copies = specs[:, 0] != have[0] if len(have) == 1 else None
            node = self.node("value", v, specs, copies=copies)
            self.edge(v, maker, EdgeEnd(node, 0))
        if v in self.seeds and len(ends) > 1:
            self._copied(v, node, ends)
            return node
        for end in ends:
            self.edge(v, EdgeEnd(node, 0), end)
        return node

    def _copied(self, v: int, settled: int, ends: Sequence[EdgeEnd]) -> None:
        """Send a value that a hint lays out once to all that read it in other specs:
        add a node for the spec of the copy, next to the node of the spec it settles
        in."""
        need = (self._column(end) for end in ends)
        have = self.nodes[settled].specs[:, 0]
        specs = np.array(list(dict.fromkeys(itertools.chain(have, *need))))[:, None]
        copy = self.node("copy", v, specs)
        self.edge(v, EdgeEnd(settled, 0), EdgeEnd(copy, 0))
        for end in ends:
            self.edge(v, EdgeEnd(copy, 0), end, also=have)

    def _settle_or_copy(self, v: int, maker: EdgeEnd, specs: np.ndarray) -> int:
        """Add the node of a parameter whose layout the plan chooses: it has each spec
        twice, as the layout, and as a copy of another layout, which takes memory of its
        own."""
        have = self._column(maker)
        resting = specs[np.isin(specs[:, 0], have)]
        copies = np.arange(len(resting) + len(specs)) >= len(resting)
        node = self.node("value", v, np.concatenate([resting, specs]), copies=copies)
        need = self.nodes[node].specs[:, 0]
        key = ("copy", have.tobytes(), need.tobytes(), self.like(v))

        def priced() -> np.ndarray:
            table = self.between(v, have, need) * self.share(v)
            return np.where((have[:, None] == need[None, :]) == copies, np.inf, table)

        self.connect(maker.node, node, key, priced)
        return node

    def memory(self) -> list[tuple[Entry, Live]]:
        """Return rows of memory, one per entry and the node that decides its spec,
        without those that are zero under all strategies."""
        live = entries(self.program, self.kernels)
        if self.parts is not None:
            live = self.parts.held(live)
        pool, out = self.pool.specs, []
        share = np.array([self.mesh.largest_share(s.sharded_axes) for s in pool])
        partial = np.array([bool(spec.partial) for spec in pool])
        for entry in live:
            for end, counts in self._deciding(entry, partial):
                column = self._column(end)
                usage = entry.nbytes * share[column]
                if counts is not None:
                    usage = np.where(counts, usage, 0.0)
                if usage.any():
                    row = Live(end.node, entry.begin, entry.end, usage)
                    out.append((entry, row))
        return out

    def _deciding(
        self, entry: Entry, partial: np.ndarray
    ) -> Iterator[tuple[EdgeEnd, np.ndarray | None]]:
        """Yield the node that decides an entry's spec; which of its strategies count,
        None for all. ``partial``: whether each spec of the pool is partial."""
        v, nodes = entry.value, self.nodes
        maker, settled = self.makers[v], self.settling.get(v)
        if entry.kind == "made":
            if settled is not None:
                yield maker, partial[nodes[maker.node].specs[:, maker.column]]
        elif entry.kind == "accumulated":
            yield maker, None
        elif entry.kind == "gradient":
            if v in self.resting:
                yield self.resting[v], None
        elif entry.kind == "gathered" and nodes[maker.node].kind == "input":
            yield from self._copy(entry)
        elif settled is not None and nodes[maker.node].kind != "input":
            yield EdgeEnd(settled[entry.phase], 0), None
        elif entry.kind != "gathered":
            yield maker, None

    def _copy(self, entry: Entry) -> Iterator[tuple[EdgeEnd, np.ndarray | None]]:
        """Yield, for a copy of an input, where it settles or is read in another spec
        than at rest."""
        v, nodes = entry.value, self.nodes
        if v in self.settling:
            node = self.settling[v][entry.phase]
            yield EdgeEnd(node, 0), nodes[node].copies
        elif len(self.readers[v]) == 1:
            specs = nodes[self.makers[v].node].specs[:, 0]
            ((_, reader),) = self.readers[v]
            if len(specs) == 1:
                yield reader, nodes[reader.node].specs[:, reader.column] != specs[0]


def _most_split(specs: Sequence[Spec], shape: Sequence[int], mesh: Mesh) -> list[Spec]:
    """Return the specs by which a rank holds least; all of them for a vector, and for a
    shape that no axes divide."""
    even = [spec for spec in specs if spec.is_even(mesh, shape)]
    if len(shape) < 2 or not even:
        return list(specs)
    sizes = [math.prod(spec.local_shape(mesh, shape)) for spec in even]
    return list(compress(even, [size == min(sizes) for size in sizes]))


def _leader(program: Program, out: Output, v: int) -> int | None:
    """Return the input whose layout an output takes, for gradients and mutations of
    open layout; else None."""
    if out.of is None or out.at_rest is not None or out.layout != "open":
        return None
    source = program.inputs[out.of]
    return source if source != v else None


def formulate(
    program: Program,
    mesh: Mesh,
    hardware: Hardware,
    limit: float | None = None,
    *,
    seeds: Mapping[int, Sequence[Seed]] | None = None,
    parts: PartProgram | None = None,
) -> Formulation:
    """Return the problem of a program, or of one part of its batch if that is cut.

    ``mesh`` carries the hardware's links. ``limit``: bytes of a rank. ``seeds``: by
    value, the hints that its specs have to agree with.
    """
    program = program if parts is None else parts.program
    build = ProblemBuilder(program, mesh, hardware, seeds or {}, parts)
    memory = build.memory()
    problem = Problem(
        tuple(build.costs),
        tuple(build.edges),
        tuple(build.tables),
        tuple(row for _, row in memory),
        limit,
    )
    return Formulation(
        program,
        mesh,
        problem,
        tuple(build.nodes),
        tuple(build.pool.specs),
        build.settling,
        build.kernels,
        hardware,
        tuple(entry for entry, _ in memory),
        parts,
        build.adding,
    )


def decode(
    formulation: Formulation, choice: Sequence[int]
) -> tuple[tuple[Strategy, ...], tuple[Spec, ...]]:
    """Return the strategy per op, and the spec each value settles in, of a choice."""
    program, nodes = formulation.program, formulation.nodes
    strategies = [Strategy(op.rule.pinned) for op in program.ops]
    settled: list[Spec | None] = [None] * len(program.values)
    spec_of: dict[int, Spec] = {}
    need: dict[int, Spec] = {}
    for node, k in zip(nodes, choice, strict=True):
        specs = [formulation.pool[n] for n in node.specs[k]]
        if node.kind == "op":
            op = program.ops[node.of]
            strategies[node.of] = node.strategies[k]
            for v, spec in zip(op.tensors, specs, strict=True):
                if v in op.results:
                    spec_of[v] = spec
            for v, spec in zip(op.operands, specs, strict=False):
                need.setdefault(v, spec)
        elif node.kind == "input" and (resting := program.inputs[node.of]) is not None:
            settled[resting] = specs[0]
        elif node.kind == "output" and (out := program.outputs[node.of]) is not None:
            need.setdefault(out, specs[0])
    for v, (forward, _) in formulation.settling.items():
        if settled[v] is None:
            (number,) = nodes[forward].specs[choice[forward]]
            settled[v] = formulation.pool[number]
    final = []
    for value in program.values:
        spec = settled[value.index]
        if spec is None:
            spec = spec_of.get(value.index, Spec.whole(len(value.shape)))
            if spec.partial:
                spec = need.get(value.index, spec)
        final.append(spec)
    return tuple(strategies), tuple(final)


def cost_of(
    formulation: Formulation, strategies: Sequence[Strategy], seconds: float = 5.0
) -> Solution:
    """Return the solution with every op pinned to its strategy; where values settle is
    free.

    Raises PlanError if a strategy is not in the space (axes split a dim in another
    order, or an op passes on a partial value that is no sum).
    """
    pins: dict[int, int] = {}
    number_of = {spec: n for n, spec in enumerate(formulation.pool)}
    for i, node in enumerate(formulation.nodes):
        if node.kind != "op":
            continue
        op = formulation.program.ops[node.of]
        spec_row = specs(op.rule, strategies[node.of])
        numbers = [number_of.get(spec, -1) for spec in spec_row]
        rows = np.flatnonzero((node.specs == numbers).all(axis=1))
        if not rows.size:
            raise PlanError(
                f"{op.name} takes {strategies[node.of]}, which is not searched"
            )
        pins[i] = int(rows[0])
    return solve(formulation.problem, seconds, fixed=pins)
