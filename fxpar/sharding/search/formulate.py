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

Ops that may exchange rows in one message (``row_moves``) have a node for each group
of them, which says in which spec they share one exchange, and pays for it, or that they
do not. Ops in that spec pay nothing for their rows, others for their own. Gradients
share an exchange only if the ops that add them up have that spec too.

Source: the pairwise form is Alpa's (OSDI 2022, section 4.2) without its restriction
that replicated heavy work is forbidden; partial results are specs like others.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress

import numpy as np
import torch

from fxpar.errors import PlanError
from fxpar.sharding import row_moves, shift_messages
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.program_kernels import ProgramKernels
from fxpar.sharding.factors import RowMoves
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Op, Output, Program, is_view
from fxpar.sharding.row_moves import Exchange
from fxpar.sharding.search import search_space
from fxpar.sharding.search.batch_parts import PartProgram
from fxpar.sharding.search.memory_constraints import Entry, Places, entries, rows
from fxpar.sharding.search.problem_builder import FixedFacts, ProblemBuilder
from fxpar.sharding.search.search_space import EdgeEnd, Node
from fxpar.sharding.solver import Live, Problem, Solution, solve
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy

aten = torch.ops.aten

# In place of a spec's number: each op exchanges rows by itself.
_UNGROUPED = -1


@dataclass(frozen=True)
class ExchangeGroup:
    """Is a group of ops that may exchange rows at once."""

    ops: tuple[int, ...]  # indices of the ops
    value: int  # the value that slices read, or that gradients are added up to
    sums: tuple[int, ...] = ()  # ops in between that add up gradients


def groups_of(program: Program) -> Iterator[ExchangeGroup]:
    """Yield slices of one tensor, and gradients that are added up, of as many rows
    each."""
    slices: dict[tuple[int, RowMoves], list[int]] = defaultdict(list)
    for op in program.ops:
        moves = _only_moves(op)
        if moves is not None and row_moves.sliced_at(moves) is not None:
            slices[op.operands[0], row_moves.slice_at(moves, 0)].append(op.index)
    for (value, _), ops in slices.items():
        if len(ops) > 1:
            yield ExchangeGroup(tuple(ops), value)
    inner = {op.index for op in program.ops if _is_sum(op) and _sum_of(program, op)}
    for op in program.ops:
        if _is_sum(op) and op.index not in inner:
            yield from _gradients(program, op)


def _only_moves(op: Op) -> RowMoves | None:
    return op.rule.moves[0] if len(op.rule.moves) == 1 else None


def _is_sum(op: Op) -> bool:
    """Return whether an op adds two tensors of one shape."""
    if op.target is not aten.add.Tensor or op.node.kwargs:
        return False
    return len(op.operands) == 2 and len(set(op.rule.tensors)) == 1


def _sum_of(program: Program, op: Op) -> Op | None:
    """Return the sum that is the only reader of an op's result, None if there is
    none."""
    (v,) = op.results
    if len(program.uses[v]) != 1 or v in program.returned:
        return None
    reader = program.ops[program.uses[v][0][0]]
    return reader if _is_sum(reader) else None


def _gradients(program: Program, root: Op) -> Iterator[ExchangeGroup]:
    """Yield groups of ops that put rows into zeros and whose results one tree of sums
    adds up."""
    puts: dict[RowMoves, list[int]] = defaultdict(list)
    sums, todo = [root.index], [root]
    while todo:
        for v in todo.pop().operands:
            if v not in program.producers:
                continue
            op = program.ops[program.producers[v][0]]
            if len(op.results) != 1 or _sum_of(program, op) is None:
                continue
            if _is_sum(op):
                sums.append(op.index)
                todo.append(op)
            elif _is_put_into_zeros(op):
                puts[row_moves.put_from(op.rule.moves[0], 0)].append(op.index)
    for ops in puts.values():
        if len(ops) > 1:
            yield ExchangeGroup(tuple(ops), root.results[0], tuple(sums))


def _is_put_into_zeros(op: Op) -> bool:
    moves = _only_moves(op)
    if moves is None or row_moves.put_at(moves) is None:
        return False
    zeros = op.node.args[0]
    is_full = getattr(zeros, "target", None) is aten.full.default
    return bool(is_full and zeros.args[1] == 0)


def price_together(build: ProblemBuilder, nodes: Sequence[int]) -> None:
    """Let groups of ops pay for rows they exchange at once. ``nodes``: the node of each
    op."""
    for group in groups_of(build.program):
        paid = [_paid(build, index, nodes[index]) for index in group.ops]
        shared = _shared(build, group, paid)
        if shared:
            _add(build, group, paid, shared, nodes)


@dataclass(frozen=True)
class _Paid:
    """Holds the price of rows that an op exchanges by itself, by strategy."""

    seconds: np.ndarray  # (K,) seconds
    specs: np.ndarray  # (K,) number of the spec of what it slices or puts rows into
    # (exchange, bytes of a row) where one is needed that may be shared, else None.
    exchanges: tuple[tuple[Exchange, float] | None, ...]


def _paid(build: ProblemBuilder, index: int, node: int) -> _Paid:
    op, options = build.program.ops[index], build.nodes[node]
    seconds = np.zeros(len(options.specs))
    exchanges: list[tuple[Exchange, float] | None] = [None] * len(seconds)
    for k, strategy in enumerate(options.strategies):
        for pair in shift_messages.exchanges(op, strategy, build.mesh):
            seconds[k] = row_moves.seconds(pair[0], build.mesh, pair[1])
            if seconds[k] and row_moves.sharing_key(pair[0]) is not None:
                exchanges[k] = pair
    share = build.op_share(index)
    return _Paid(seconds * share, options.specs[:, 0], tuple(exchanges))


def _shared(
    build: ProblemBuilder, group: ExchangeGroup, paid: Sequence[_Paid]
) -> dict[int, float]:
    """Return spec -> seconds of one exchange for all, where that takes less."""
    pairs_of: dict[int, list[tuple[Exchange, float]]] = defaultdict(list)
    for op in paid:
        for spec, pair in zip(op.specs.tolist(), op.exchanges, strict=True):
            if pair is not None:
                pairs_of[spec].append(pair)
    shared = {}
    for spec, pairs in pairs_of.items():
        exchanges, row = [exchange for exchange, _ in pairs], pairs[0][1]
        if (
            len(pairs) > len(group.ops)
            or len(set(map(row_moves.sharing_key, exchanges))) > 1
        ):
            continue  # strategies that differ elsewhere
        window = row_moves.window_of(exchanges)
        if len(pairs) > 1 and row_moves.is_faster(window, exchanges, build.mesh, row):
            seconds = row_moves.seconds(window, build.mesh, row)
            shared[spec] = seconds * build.op_share(group.ops[0])
    return shared


def _add(
    build: ProblemBuilder,
    group: ExchangeGroup,
    paid: Sequence[_Paid],
    shared: Mapping[int, float],
    nodes: Sequence[int],
) -> None:
    specs = np.array([_UNGROUPED, *shared])
    costs = np.array([0.0, *shared.values()])
    together = build.node("exchange", group.value, specs[:, None], costs)

    def edge(a: int, b: int, table: np.ndarray) -> None:
        key = ("exchange", table.shape, table.tobytes())
        build.connect(a, b, key, lambda: table)

    for index, op in zip(group.ops, paid, strict=True):
        node, may = nodes[index], np.isin(op.specs, specs)
        build.costs[node] = np.maximum(build.costs[node] - op.seconds * may, 0.0)
        pays = (specs[:, None] != op.specs[None, :]) & may
        edge(together, node, np.where(pays, op.seconds, 0.0))
    for index in group.sums:
        own = build.nodes[nodes[index]].specs
        same = (own[None, :, :] == specs[:, None, None]).all(axis=2)
        may = same | (specs == _UNGROUPED)[:, None]
        edge(together, nodes[index], np.where(may, 0.0, np.inf))


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
    entries: Sequence[Entry] = ()  # values that occupy memory, and when
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


def formulate(
    program: Program,
    mesh: Mesh,
    hardware: Hardware,
    facts: FixedFacts,
    limit: float | None = None,
) -> Formulation:
    """Return the problem of a program, or of one part of its batch if that is cut.
    ``mesh`` carries the hardware's links; ``limit``: bytes of a rank."""
    program = facts.parts.program if facts.parts is not None else program
    build = ProblemBuilder(program, mesh, hardware, facts)
    ops = build.op_nodes()
    price_together(build, ops)
    makers: dict[int, EdgeEnd] = {}
    for op in program.ops:
        for r, v in enumerate(op.results):
            makers[v] = EdgeEnd(ops[op.index], len(op.operands) + r)
    _inputs(build, makers)
    readers: list[list[tuple[int, EdgeEnd]]] = [[] for _ in program.values]
    for op in program.ops:
        phase = int(op.index in build.backward)
        for i, v in enumerate(op.operands):
            readers[v].append((phase, EdgeEnd(ops[op.index], i)))
    _outputs(build, makers, readers)
    _constants(build, makers)
    _values(build, makers, readers)
    live = entries(program, build.kernels, build.backward, build.gathered_twice)
    if facts.parts is not None:
        live = facts.parts.held(live)
    memory = _memory(build, live, makers, readers)
    problem = Problem(
        tuple(build.costs),
        tuple(build.edges),
        tuple(build.tables),
        tuple(row for _, row in memory),
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
        build.kernels,
        hardware,
        live,
        tuple(entry for entry, _ in memory),
        facts.parts,
        build.adding,
    )


def _inputs(build: ProblemBuilder, makers: dict[int, EdgeEnd]) -> None:
    """Add a node per input: its spec at rest, or any its hint allows. Tangents are left
    to ``_outputs``."""
    program = build.program
    tangents = {
        i for i, k in program.signature.tangents if program.outputs[k] is not None
    }
    for k, (declared, v) in enumerate(
        zip(program.signature.inputs, program.inputs, strict=True)
    ):
        if v is None or k in tangents:
            continue
        if declared.at_rest is not None:
            specs = [declared.at_rest]
        else:
            specs = build.allowed(v, build.specs_of_shape(v))
            if declared.splits:
                specs = _most_split(specs, program.values[v].shape, build.mesh)
        makers[v] = EdgeEnd(build.node("input", k, build.pool.numbers(specs)), 0)


def _most_split(specs: Sequence[Spec], shape: Sequence[int], mesh: Mesh) -> list[Spec]:
    """Return the specs by which a rank holds least; all of them for a vector, and for a
    shape that no axes divide."""
    even = [spec for spec in specs if spec.is_even(mesh, shape)]
    if len(shape) < 2 or not even:
        return list(specs)
    sizes = [math.prod(spec.local_shape(mesh, shape)) for spec in even]
    return list(compress(even, [size == min(sizes) for size in sizes]))


def _outputs(
    build: ProblemBuilder,
    makers: dict[int, EdgeEnd],
    readers: list[list[tuple[int, EdgeEnd]]],
) -> None:
    """Add a node per output: the specs it may have. Gradients follow parameters of open
    layout, tangents their outputs."""
    program = build.program
    end_of: dict[int, EdgeEnd] = {}
    for k, (out, v) in enumerate(
        zip(program.signature.outputs, program.outputs, strict=True)
    ):
        if v is None:
            continue
        leader = _leader(program, out, v)
        if leader is None:
            numbers = build.pool.numbers(_rest_specs(build, out, v))
        else:
            numbers = build.nodes[makers[leader].node].specs
        end_of[k] = EdgeEnd(build.node("output", k, numbers), 0)
        if out.kind == "gradient":
            build.resting[v] = end_of[k]
        readers[v].append((int(out.kind == "gradient"), end_of[k]))
        if leader is not None:
            build.same(makers[leader], end_of[k])
    for i, k in program.signature.tangents:
        tangent = program.inputs[i]
        if tangent is not None and k in end_of:
            numbers = build.nodes[end_of[k].node].specs
            makers[tangent] = EdgeEnd(build.node("input", i, numbers), 0)
            build.same(end_of[k], makers[tangent])


def _leader(program: Program, out: Output, v: int) -> int | None:
    """Return the input whose layout an output takes, for gradients and mutations of
    open layout; else None."""
    if out.of is None or out.at_rest is not None or out.layout != "open":
        return None
    source = program.inputs[out.of]
    return source if source != v else None


def _rest_specs(build: ProblemBuilder, out: Output, v: int) -> list[Spec]:
    whole = Spec.whole(len(build.program.values[v].shape))
    if out.at_rest is not None:
        return [out.at_rest]
    if out.layout == "open":
        return build.specs_of_shape(v)
    if out.layout == "even":
        shape = build.program.values[v].shape
        return [s for s in build.specs_of_shape(v) if s.is_even(build.mesh, shape)]
    return [whole]


def _constants(build: ProblemBuilder, makers: dict[int, EdgeEnd]) -> None:
    """Add a node per tensor of the graph itself, whole everywhere."""
    for value in build.program.values:
        if value.index not in makers:
            whole = [Spec.whole(len(value.shape))]
            node = build.node("constant", value.index, build.pool.numbers(whole))
            makers[value.index] = EdgeEnd(node, 0)


def _values(
    build: ProblemBuilder,
    makers: dict[int, EdgeEnd],
    readers: Sequence[Sequence[tuple[int, EdgeEnd]]],
) -> None:
    """Add edges from maker to reader, by way of a node where there are several readers
    or a hint to keep."""
    program = build.program
    for value in program.values:
        v, value_readers, maker = value.index, readers[value.index], makers[value.index]
        free = build.nodes[maker.node].kind == "input" and not is_fixed(build, maker)
        hinted = v in build.facts.seeds and not free
        if len(value_readers) == 1 and not hinted:
            build.edge(v, maker, value_readers[0][1])
            continue
        if not value_readers:
            continue
        phases = ([0], [1]) if v in build.gathered_twice else ([0, 1],)
        settled: dict[int, int] = {}
        for phase in phases:
            phase_readers = [end for p, end in value_readers if p in phase]
            if phase_readers:
                settled |= dict.fromkeys(phase, _settle(build, v, maker, phase_readers))
        forward = settled.get(0, settled.get(1, -1))
        build.settling[v] = forward, settled.get(1, forward)


def is_fixed(build: ProblemBuilder, end: EdgeEnd) -> bool:
    """Return whether a node has one spec only."""
    return len(build.nodes[end.node].specs) == 1


def _is_parameter(build: ProblemBuilder, end: EdgeEnd) -> bool:
    node = build.nodes[end.node]
    inputs = build.program.signature.inputs
    return node.kind == "input" and inputs[node.of].kind == "parameter"


def _settle(
    build: ProblemBuilder, v: int, maker: EdgeEnd, ends: Sequence[EdgeEnd]
) -> int:
    have = build.nodes[maker.node].specs[:, maker.column]
    specs = build.met(v, (maker, *ends))
    if len(have) > 1 and _is_parameter(build, maker):
        node = _settle_or_copy(build, v, maker, specs)
    else:
        copies = specs[:, 0] != have[0] if len(have) == 1 else None
        node = build.node("value", v, specs, copies=copies)
        build.edge(v, maker, EdgeEnd(node, 0))
    if v in build.facts.seeds and len(ends) > 1:
        _copied(build, v, node, ends)
        return node
    for end in ends:
        build.edge(v, EdgeEnd(node, 0), end)
    return node


def _copied(
    build: ProblemBuilder, v: int, settled: int, ends: Sequence[EdgeEnd]
) -> None:
    """Send a value that a hint lays out once to all that read it in other specs: add a
    node for the spec of the copy, next to the node of the spec it settles in."""
    need = (build.nodes[end.node].specs[:, end.column] for end in ends)
    have = build.nodes[settled].specs[:, 0]
    specs = np.array(list(dict.fromkeys(itertools.chain(have, *need))))[:, None]
    copy = build.node("copy", v, specs)
    build.edge(v, EdgeEnd(settled, 0), EdgeEnd(copy, 0))
    for end in ends:
        build.edge(v, EdgeEnd(copy, 0), end, also=have)


def _settle_or_copy(
    build: ProblemBuilder, v: int, maker: EdgeEnd, specs: np.ndarray
) -> int:
    """Add the node of a parameter whose layout the plan chooses: it has each spec
    twice, as the layout, and as a copy of another layout, which takes memory of its
    own."""
    have = build.nodes[maker.node].specs[:, maker.column]
    resting = specs[np.isin(specs[:, 0], have)]
    copies = np.arange(len(resting) + len(specs)) >= len(resting)
    node = build.node("value", v, np.concatenate([resting, specs]), copies=copies)
    need = build.nodes[node].specs[:, 0]
    key = ("copy", have.tobytes(), need.tobytes(), build.like(v))

    def priced() -> np.ndarray:
        table = build.between(v, have, need) * build.share(v)
        return np.where((have[:, None] == need[None, :]) == copies, np.inf, table)

    build.connect(maker.node, node, key, priced)
    return node


def _memory(
    build: ProblemBuilder,
    live: Sequence[Entry],
    makers: dict[int, EdgeEnd],
    readers: Sequence[Sequence[tuple[int, EdgeEnd]]],
) -> list[tuple[Entry, Live]]:
    """Return rows of memory, one per entry and the node that decides its spec."""
    lone = {
        v: uses[0][1]
        for v, uses in enumerate(readers)
        if len(uses) == 1 and v not in build.settling
    }
    places = Places(build.nodes, makers, build.settling, lone, build.resting)
    return rows(live, places, build.pool.specs, build.mesh)


def decode(
    formulation: Formulation, choice: Sequence[int]
) -> tuple[list[Strategy], list[Spec]]:
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
    return strategies, final


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
        spec_row = search_space.specs(op.rule, strategies[node.of])
        numbers = [number_of.get(spec, -1) for spec in spec_row]
        rows = np.flatnonzero((node.specs == numbers).all(axis=1))
        if not rows.size:
            raise PlanError(
                f"{op.name} takes {strategies[node.of]}, which is not searched"
            )
        pins[i] = int(rows[0])
    return solve(formulation.problem, seconds, fixed=pins)
