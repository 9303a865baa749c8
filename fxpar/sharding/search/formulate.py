"""From a Program to the pairwise problem that the solver solves, and back.

In: a Program, a Mesh with links, Hardware, seeds (hints) and a memory limit. Out:
``Formulation``: a ``solver.Problem`` with a node per op, per input, per output and per
value that is read more than once, and ``decode``, which reads a choice of the solver as
a strategy per op and a spec per value.

A value read once costs one reshard, from the spec its op makes to the one its reader
needs. A value read more often is a node of its own: it settles in one spec, which each
reader brings to what it needs, so that readers that need the same share one reshard. A
parameter at rest settles once for the forward and once for the backward, since it is
gathered again there.

Source: the pairwise form is Alpa's (OSDI 2022, section 4.2) without its restriction
that replicated heavy work is forbidden; partial results are specs like others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fxpar.errors import HintError
from fxpar.sharding.factors import Strategy
from fxpar.sharding.hardware import Hardware
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Output, Program, backward_ops
from fxpar.sharding.propagate import Seed
from fxpar.sharding.rest import derived, resting
from fxpar.sharding.search import space, transitions, work
from fxpar.sharding.search.memory import Entry, entries
from fxpar.sharding.solver import Edge, Live, Problem
from fxpar.sharding.spec import Spec


@dataclass(frozen=True)
class Node:
    """A variable. ``kind``: "op", "input", "constant", "output" or "value". ``of``:
    index of the op, input, output, or value. ``specs``: (K, tensors) number of the spec
    of each tensor of an op under each strategy; (K, 1) for the others."""

    kind: str
    of: int
    specs: np.ndarray
    strategies: tuple[Strategy, ...] = ()


@dataclass
class Formulation:
    """``pool``: the specs that numbers stand for. ``settling[v]``: nodes of value v, by
    phase (0 forward, 1 backward; both the same unless it is a parameter at rest)."""

    program: Program
    mesh: Mesh
    problem: Problem
    nodes: tuple[Node, ...]
    pool: tuple[Spec, ...]
    settling: Mapping[int, tuple[int, int]]
    entries: Sequence[Entry] = ()
    launches: float = 0.0  # seconds that no choice changes


@dataclass(frozen=True)
class Facts:
    """What holds whatever is chosen: seeds per value, where parameters may lie."""

    seeds: Mapping[int, Sequence[Seed]] = field(default_factory=dict)
    keep_gathered: bool = False


class _Pool:
    """Numbers for specs."""

    def __init__(self) -> None:
        self.specs: list[Spec] = []
        self._number: dict[Spec, int] = {}

    def number(self, spec: Spec) -> int:
        if spec not in self._number:
            self._number[spec] = len(self.specs)
            self.specs.append(spec)
        return self._number[spec]


@dataclass(frozen=True)
class _End:
    """One end of an edge: a node, and which column of its specs concerns the value."""

    node: int
    column: int


class _Builder:
    """Nodes first, then the edges between them; tables are shared by what they say."""

    def __init__(
        self, program: Program, mesh: Mesh, hardware: Hardware, facts: Facts
    ) -> None:
        self.program, self.mesh, self.hardware = program, mesh, hardware
        self.facts = facts
        self.backward = backward_ops(program)
        self.regions = work.Regions(program, self.backward)
        self.pool = _Pool()
        self.nodes: list[Node] = []
        self.costs: list[np.ndarray] = []
        self.edges: list[Edge] = []
        self.tables: list[np.ndarray] = []
        self.table_of: dict[Any, int] = {}
        self.columns: dict[Any, tuple[tuple[Strategy, ...], np.ndarray]] = {}
        self.matrices: dict[Any, np.ndarray] = {}
        self.prices: dict[Any, np.ndarray] = {}
        self.settling: dict[int, tuple[int, int]] = {}

    def node(
        self,
        kind: str,
        of: int,
        specs: np.ndarray,
        costs: np.ndarray | None = None,
        strategies: tuple[Strategy, ...] = (),
    ) -> int:
        self.nodes.append(Node(kind, of, specs, strategies))
        self.costs.append(np.zeros(len(specs)) if costs is None else costs)
        return len(self.nodes) - 1

    def numbers(self, specs: Iterable[Spec]) -> np.ndarray:
        return np.array([[self.pool.number(spec)] for spec in specs])

    def op_nodes(self) -> list[int]:
        out = []
        for op in self.program.ops:
            key = (op.rule,)
            if key not in self.columns:
                found = space.strategies(op.rule, self.mesh)
                rows = [
                    [self.pool.number(s) for s in space.specs(op.rule, strategy)]
                    for strategy in found
                ]
                self.columns[key] = found, np.array(rows).reshape(len(found), -1)
            found, numbers = self.columns[key]
            out.append(
                self.node("op", op.index, numbers, self._seconds(op.index), found)
            )
        return out

    def _seconds(self, index: int) -> np.ndarray:
        """Seconds of an op under each of its strategies; shared among equals."""
        op, mine = self.program.ops[index], self.regions.works[index]
        key = (op.rule, mine)
        if key not in self.prices:
            found = space.strategies(op.rule, self.mesh)
            self.prices[key] = np.array(
                [
                    work.seconds(op, mine, strategy, self.mesh, self.hardware)
                    for strategy in found
                ]
            )
        return self.prices[key]

    def specs_of_value(self, v: int) -> list[Spec]:
        """Every way a value may lie with nothing partial, in each order of axes."""
        shape = self.program.values[v].shape
        return lying(shape, self.mesh)

    def allowed(self, v: int, specs: Iterable[Spec] = ()) -> list[Spec]:
        """Those that keep to the hints on a value; if none does, any that do.

        Raises HintError if hints on the value contradict each other.
        """
        seeds = self.facts.seeds.get(v, ())
        found = [s for s in specs if all(keeps(seed, s, self.mesh) for seed in seeds)]
        if found or not seeds:
            return found
        also = [*self.specs_of_value(v), *_joined(seeds, self.mesh)]
        found = [s for s in also if all(keeps(seed, s, self.mesh) for seed in seeds)]
        if not found:
            raise HintError(
                f"{' and '.join(seed.origin for seed in seeds)} contradict each other "
                f"on {self.program.values[v].name}",
                fix="leave some of their dims open with '?'",
            )
        return found

    def edge(self, v: int, a: _End, b: _End) -> None:
        """Resharding ``v`` from what node ``a`` has to what ``b`` needs."""
        value = self.program.values[v]
        have = self.nodes[a.node].specs[:, a.column]
        need = self.nodes[b.node].specs[:, b.column]
        room = tuple(math.gcd(n, self.mesh.size) for n in value.shape)
        key = (have.tobytes(), need.tobytes(), room, value.nbytes)
        if key not in self.table_of:
            self.table_of[key] = len(self.tables)
            self.tables.append(self._table(v, have, need))
        self.edges.append(Edge(a.node, b.node, self.table_of[key]))

    def _table(self, v: int, have: np.ndarray, need: np.ndarray) -> np.ndarray:
        value, pool = self.program.values[v], self.pool.specs
        sources, i = np.unique(have, return_inverse=True)
        targets, j = np.unique(need, return_inverse=True)
        key = (sources.tobytes(), targets.tobytes(), value.shape, value.dtype.itemsize)
        if key not in self.matrices:
            self.matrices[key] = transitions.matrix(
                [pool[n] for n in sources],
                [pool[n] for n in targets],
                self.mesh,
                value.shape,
                value.dtype.itemsize,
            )
        return self.matrices[key][i][:, j]

    def same(self, a: _End, b: _End) -> None:
        """Both must have the same spec."""
        have = self.nodes[a.node].specs[:, a.column]
        need = self.nodes[b.node].specs[:, b.column]
        key = ("same", have.tobytes(), need.tobytes())
        if key not in self.table_of:
            self.table_of[key] = len(self.tables)
            equal = have[:, None] == need[None, :]
            self.tables.append(np.where(equal, 0.0, np.inf))
        self.edges.append(Edge(a.node, b.node, self.table_of[key]))


def formulate(
    program: Program,
    mesh: Mesh,
    hardware: Hardware,
    facts: Facts,
    limit: float | None = None,
) -> Formulation:
    """The problem of a program. ``mesh`` carries the hardware's links."""
    build = _Builder(program, mesh, hardware, facts)
    ops = build.op_nodes()
    makers: dict[int, _End] = {}
    for op in program.ops:
        for r, v in enumerate(op.results):
            makers[v] = _End(ops[op.index], len(op.operands) + r)
    _inputs(build, makers)
    readers: list[list[tuple[int, _End]]] = [[] for _ in program.values]
    for op in program.ops:
        phase = int(op.index in build.backward)
        for i, v in enumerate(op.operands):
            readers[v].append((phase, _End(ops[op.index], i)))
    _outputs(build, makers, readers)
    _constants(build, makers)
    _values(build, makers, readers)
    live = entries(program, mesh, build.regions, build.backward)
    memory = _memory(build, live, makers)
    launches = hardware.launch * sum(w.launches for w in build.regions.works)
    problem = Problem(
        tuple(build.costs),
        tuple(build.edges),
        tuple(build.tables),
        tuple(memory),
        limit,
        None,
    )
    return Formulation(
        program,
        mesh,
        problem,
        tuple(build.nodes),
        tuple(build.pool.specs),
        build.settling,
        live,
        launches,
    )


def _inputs(build: _Builder, makers: dict[int, _End]) -> None:
    """A node per input: the spec it rests in, or any its hint allows. Tangents of
    outputs wait for these."""
    program = build.program
    tangents = {
        i for i, k in program.signature.tangents if program.outputs[k] is not None
    }
    for k, (declared, v) in enumerate(
        zip(program.signature.inputs, program.inputs, strict=True)
    ):
        if v is None or k in tangents:
            continue
        if declared.rest is not None:
            specs = [declared.rest]
        else:
            specs = build.allowed(v, build.specs_of_value(v))
        makers[v] = _End(build.node("input", k, build.numbers(specs)), 0)


def _outputs(
    build: _Builder, makers: dict[int, _End], readers: list[list[tuple[int, _End]]]
) -> None:
    """A node per output: where it may rest. Gradients follow parameters whose place is
    open, tangents their outputs."""
    program = build.program
    made: dict[int, _End] = {}
    for k, (out, v) in enumerate(
        zip(program.signature.outputs, program.outputs, strict=True)
    ):
        if v is None:
            continue
        leader = _leader(program, out, v)
        if leader is None:
            numbers = build.numbers(_may_rest(build, out, v))
        else:
            numbers = build.nodes[makers[leader].node].specs
        made[k] = _End(build.node("output", k, numbers), 0)
        readers[v].append((int(out.kind == "gradient"), made[k]))
        if leader is not None:
            build.same(makers[leader], made[k])
    for i, k in program.signature.tangents:
        tangent = program.inputs[i]
        if tangent is not None and k in made:
            numbers = build.nodes[made[k].node].specs
            makers[tangent] = _End(build.node("input", i, numbers), 0)
            build.same(made[k], makers[tangent])


def _leader(program: Program, out: Output, v: int) -> int | None:
    """The input where an output rests: of gradients and mutations that may choose."""
    if out.of is None or out.rest is not None or out.lie != "open":
        return None
    given = program.inputs[out.of]
    return given if given != v else None


def _may_rest(build: _Builder, out: Output, v: int) -> list[Spec]:
    whole = Spec.whole(len(build.program.values[v].shape))
    if out.rest is not None:
        return [out.rest]
    if out.lie == "open":
        return build.specs_of_value(v)
    if out.lie == "batch" and whole.dims:
        split = Spec.of([build.program.signature.batch, *whole.dims[1:]])
        return list(dict.fromkeys((split, whole)))
    return [whole]


def _constants(build: _Builder, makers: dict[int, _End]) -> None:
    """A node per tensor of the graph itself, whole everywhere."""
    for value in build.program.values:
        if value.index not in makers:
            whole = [Spec.whole(len(value.shape))]
            node = build.node("constant", value.index, build.numbers(whole))
            makers[value.index] = _End(node, 0)


def _values(
    build: _Builder,
    makers: dict[int, _End],
    readers: Sequence[Sequence[tuple[int, _End]]],
) -> None:
    """Edges from maker to reader, by way of a node where there are several readers or a
    hint to keep."""
    program = build.program
    again: set[int] = set()
    if not build.facts.keep_gathered:
        again = derived(program, resting(program))
    for value in program.values:
        v, found, maker = value.index, readers[value.index], makers[value.index]
        free = build.nodes[maker.node].kind == "input" and not is_fixed(build, maker)
        hinted = v in build.facts.seeds and not free
        if len(found) == 1 and not hinted:
            build.edge(v, maker, found[0][1])
            continue
        if not found:
            continue
        phases = ([0], [1]) if v in again else ([0, 1],)
        settled: dict[int, int] = {}
        for phase in phases:
            mine = [end for p, end in found if p in phase]
            if mine:
                settled |= dict.fromkeys(phase, _settle(build, v, maker, mine))
        forward = settled.get(0, settled.get(1, -1))
        build.settling[v] = forward, settled.get(1, forward)


def is_fixed(build: _Builder, end: _End) -> bool:
    """Whether a node has one spec only."""
    return len(build.nodes[end.node].specs) == 1


def _settle(build: _Builder, v: int, maker: _End, ends: Sequence[_End]) -> int:
    pool = build.pool.specs
    numbers = dict.fromkeys(
        itertools.chain(
            build.nodes[maker.node].specs[:, maker.column],
            *(build.nodes[end.node].specs[:, end.column] for end in ends),
        )
    )
    specs = build.allowed(v, (pool[n] for n in numbers))
    node = build.node("value", v, build.numbers(specs))
    build.edge(v, maker, _End(node, 0))
    for end in ends:
        build.edge(v, _End(node, 0), end)
    return node


def _memory(
    build: _Builder, live: Sequence[Entry], makers: Mapping[int, _End]
) -> list[Live]:
    """Bytes of each entry under each strategy of the node that decides them."""
    out, pool = [], build.pool.specs
    share: dict[int, float] = {}
    for entry in live:
        settled = build.settling.get(entry.value)
        end = makers[entry.value]
        if settled is not None and build.nodes[end.node].kind != "input":
            end = _End(settled[0], 0)
        numbers = build.nodes[end.node].specs[:, end.column]
        for n in numbers:
            if n not in share:
                share[n] = 1 / build.mesh.count(pool[n].sharded_axes)
        usage = entry.nbytes * np.array([share[n] for n in numbers])
        out.append(Live(end.node, entry.begin, entry.end, usage))
    return out


def lying(shape: Sequence[int], mesh: Mesh) -> list[Spec]:
    """Every spec without partial axes that divides ``shape`` evenly, whole first."""
    axes = [axis for axis in mesh.names if mesh.sizes[axis] > 1]
    found: dict[Spec, None] = {}
    for places in itertools.product([None, *range(len(shape))], repeat=len(axes)):
        where = dict(zip(axes, places, strict=True))
        for order in space.orders(mesh):
            dims = [
                tuple(axis for axis in order if where.get(axis) == d)
                for d in range(len(shape))
            ]
            if all(
                n % mesh.count(split) == 0 for n, split in zip(shape, dims, strict=True)
            ):
                found[Spec.of(dims)] = None
    return list(found)


def keeps(seed: Seed, spec: Spec, mesh: Mesh) -> bool:
    """Whether a spec is what a hint asks: closed dims exactly, open ones at least."""
    asked = stripped(Spec.of(seed.dims), mesh)
    return not spec.partial and all(
        have == want if shut else have[: len(want)] == want
        for have, want, shut in zip(spec.dims, asked.dims, seed.closed, strict=True)
    )


def _joined(seeds: Sequence[Seed], mesh: Mesh) -> list[Spec]:
    """The spec that has what all hints ask for, in their order of axes."""
    parts = zip(*(seed.dims for seed in seeds), strict=True)
    dims = [max(part, key=len) for part in parts]
    used = [axis for dim in dims for axis in dim]
    if len(set(used)) < len(used):
        return []
    return [stripped(Spec.of(dims), mesh)]


def stripped(spec: Spec, mesh: Mesh) -> Spec:
    """A spec without axes of one rank, of which the space has none."""
    return spec.without({axis for axis in mesh.names if mesh.sizes[axis] == 1})


def decode(
    found: Formulation, choice: Sequence[int]
) -> tuple[list[Strategy], list[Spec]]:
    """(strategy per op, spec each value settles in) of a choice."""
    program, nodes = found.program, found.nodes
    strategies = [Strategy() for _ in program.ops]
    settled: list[Spec | None] = [None] * len(program.values)
    made: dict[int, Spec] = {}
    need: dict[int, Spec] = {}
    for node, k in zip(nodes, choice, strict=True):
        specs = [found.pool[n] for n in node.specs[k]]
        if node.kind == "op":
            op = program.ops[node.of]
            strategies[node.of] = node.strategies[k]
            for v, spec in zip(op.tensors, specs, strict=True):
                if v in op.results:
                    made[v] = spec
            for v, spec in zip(op.operands, specs, strict=False):
                need.setdefault(v, spec)
        elif node.kind == "input" and (given := program.inputs[node.of]) is not None:
            settled[given] = specs[0]
        elif node.kind == "output" and (out := program.outputs[node.of]) is not None:
            need.setdefault(out, specs[0])
    for v, (forward, _) in found.settling.items():
        if settled[v] is None:
            (number,) = nodes[forward].specs[choice[forward]]
            settled[v] = found.pool[number]
    lie = []
    for value in program.values:
        spec = settled[value.index]
        if spec is None:
            spec = made.get(value.index, Spec.whole(len(value.shape)))
            if spec.partial:
                spec = need.get(value.index, spec)
        lie.append(spec)
    return strategies, lie
