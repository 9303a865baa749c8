"""Finds the kernels of a program: the bytes each op moves and when, and its seconds on
one rank.

In: a Program. Out: ``ProgramKernels``, the same under any plan. The graph is read as
the simulation reads a local one (``fused_kernels``), in global shapes and without
collectives: the forward, then the backward with the ops it computes again
(``recompute``). So it is known which values are written to memory at all, which op pays
for a value that a kernel reads for several of them, and when a kernel runs. Time counts
ops. Never: changes a graph.

``seconds`` gives the seconds of an op under a strategy: its part of a roofline per
kernel. A value that only its own kernel reads is never written: it costs nothing. A
kernel is launched once, by its first op, however its ops are split; so work that is not
split is never free for want of a floor (where the floor is per op, replicated work is).
A light op is any that multiplies no matrices. Views cost nothing.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxpar.sharding import shard_sizes, shift_messages
from fxpar.sharding.cost.collectives import along
from fxpar.sharding.cost.fused_kernels import Buffer, KernelReader, Launch, TensorView
from fxpar.sharding.cost.hardware_table import NO_DIMS, Hardware, ProductDims
from fxpar.sharding.cost.op import (
    dims_of,
    dims_of_factors,
    family_of,
    flops_of,
    hidden_flops_of,
    is_light,
    light_operations,
    nbytes_of,
    query_position,
)
from fxpar.sharding.cost.op import is_contraction as has_formula
from fxpar.sharding.cost.recompute import phases
from fxpar.sharding.cost.visible_pairs import has_causal_mask, unevenness
from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import (
    Op,
    Program,
    Value,
    is_contraction,
    is_view,
    tensors_at,
)
from fxpar.sharding.strategy import Strategy, specs


@dataclass(frozen=True)
class Work:
    """Is one op's work, of all ranks together."""

    # Flops of its contraction, twice those if the backward computes it again; 0 for a
    # light op.
    flops: float
    # (position among ``op.tensors``, bytes) that it reads or writes in memory; its
    # share of a value that its kernel reads for several ops. In the forward, and in
    # the backward too if that computes the op again.
    moved: tuple[tuple[int, float], ...]
    # Shape of each tensor; none for a view.
    shapes: tuple[tuple[int, ...], ...]
    # Number of kernels that start with it.
    launches: int
    # Dtype of the first floating-point tensor; of the last, if none is.
    dtype: torch.dtype
    # The family by which ``Hardware.peak`` finds the peak of a contraction.
    family: str = ""
    # Whether, for an attention with a causal mask, ranks may swap queries.
    balances: bool = False
    # Flops of the pairs that the causal mask of an attention hides.
    hidden_flops: float = 0.0
    # (class in ``Hardware.light``, operations on elements) of a light op; twice those
    # if the backward computes it again.
    light: tuple[str, float] = ("", 0.0)


def seconds(op: Op, work: Work, strategy: Strategy, mesh: Mesh, on: Hardware) -> float:
    """Return the seconds of this op on one rank, and of its messages, without its
    launch."""
    shards = {f: _shards(op.rule.size[f], mesh, axes) for f, axes in strategy.factors}

    def share(position: int) -> float:
        dims = op.rule.tensors[position]
        return 1 / math.prod(shards.get(f, 1) for dim in dims for f in dim)

    nbytes = sum(size * share(position) for position, size in work.moved)
    sends = op.rule.sends
    messages = shift_messages.seconds(op, strategy, mesh) if sends else 0.0
    if not work.flops:
        sizes = list(map(math.prod, work.shapes))
        points = max((n * share(i) for i, n in enumerate(sizes)), default=0.0)
        streamed, (kind, operations) = on.streaming(nbytes), work.light
        rate = dict(on.light).get(kind)
        if rate is not None:
            operations *= points / max((1, *sizes))
            return max(streamed, operations / rate) + messages
        # Registers are not free either: else values in a kernel would be left whole.
        return streamed + points / on.peak("float32").flops + messages
    pinned = dict(op.rule.pinned)  # ops inside a region count their own part
    parts = math.prod(n for f, n in shards.items() if f not in pinned)
    flops, hidden_flops = work.flops / parts, work.hidden_flops / parts
    dims = _dims(op, work, shards)

    def kernel(flops: float) -> float:
        of_product = dims, work.dtype, work.family, hidden_flops
        return on.kernel(nbytes, flops, *of_product)

    duration = kernel(flops * _unevenness(op, shards))
    swaps = swap_seconds(op, strategy, mesh, on) if work.balances else None
    if swaps is not None:
        duration = min(duration, kernel(flops) + swaps)
    return duration + messages


def _shards(rows: int, mesh: Mesh, axes: Axes) -> float:
    """Return the factor by which the work of the rank that takes longest is less than
    all the work on the slowest rank."""
    if not rows:
        return mesh.count(axes)
    if shard_sizes.has_shares(mesh, axes):
        return rows / (_slowest_rows(rows, mesh, axes) or 1)
    return rows / shard_sizes.largest(rows, mesh, axes)


def _slowest_rows(rows: int, mesh: Mesh, axes: Axes) -> float:
    """Return how many rows the slowest rank would compute in the time of the rank that
    takes longest for its own."""
    if not axes:
        return rows
    speeds = mesh.speeds_of(axes[0])
    return max(
        _slowest_rows(shard_sizes.piece(rows, mesh, axes[0], i)[1], mesh, axes[1:])
        * min(speeds)
        / speed
        for i, speed in enumerate(speeds)
    )


def work_alone(op: Op, values: Sequence[Value]) -> Work:
    """Return the work of an op that is fused with nothing: it moves each of its
    tensors."""
    if is_view(op):
        return work_of(op, values, (), 0)
    moved = tuple((i, float(values[v].nbytes)) for i, v in enumerate(op.tensors))
    return work_of(op, values, moved, 1)


def work_of(
    op: Op,
    values: Sequence[Value],
    traffic: tuple[tuple[int, float], ...],
    launches: int,
    balances: bool = False,
) -> Work:
    """Return the work of an op that moves ``traffic`` and starts ``launches`` kernels.
    ``balances``: as in a program."""
    tensors = [values[v] for v in op.tensors]
    floating = [x.dtype for x in tensors if x.dtype.is_floating_point]
    dtype = floating[0] if floating else tensors[-1].dtype
    if not traffic and not launches and is_view(op):
        return Work(0.0, (), (), 0, dtype)
    shapes = tuple(x.shape for x in tensors)
    family = family_of(op.target)
    flops = flops_of_op(op)
    hidden_flops = hidden_flops_of(op.node)
    light = "", 0.0
    if is_light(op.target):
        facts, points = op_facts_of(op.target), max(map(math.prod, shapes))
        light = facts.work, float(light_operations(op.node, points, facts))
    return Work(
        flops, traffic, shapes, launches, dtype, family, balances, hidden_flops, light
    )


def _unevenness(op: Op, shards: Mapping[str, float]) -> float:
    """Return how many times the mean work the rank has that has most of a causal
    attention."""
    first = query_position(op.target)
    if first is None:
        return 1.0
    parts = [
        math.prod(shards.get(f, 1) for f in op.rule.tensors[first + i][-2])
        for i in range(2)
    ]
    return 1.0 if parts == [1, 1] else unevenness(op.node, *parts)


def _dims(op: Op, work: Work, shards: Mapping[str, float]) -> ProductDims:
    """Return the dims of the product that ``flops_of_op`` counts, on one rank."""
    rule = op.rule
    if has_formula(op.target):
        shapes = [  # of each tensor on one rank
            [
                n / math.prod(shards.get(f, 1) for f in dim)
                for n, dim in zip(shape, dims, strict=True)
            ]
            for shape, dims in zip(work.shapes, rule.tensors, strict=True)
        ]
        return dims_of(op.node, shapes)
    if len(rule.operands) != 2 or len(rule.results) != 1:
        return NO_DIMS
    left, right, result = ({f for dim in t for f in dim} for t in rule.tensors)
    size = {f: n / shards.get(f, 1) for f, n in rule.size.items()}
    return dims_of_factors(left, right, result, size)


def flops_of_op(op: Op) -> float:
    """Return the flops of the whole op; for a contraction that torch has no formula
    for, the product of its factors. 0 for light ops."""
    flops = flops_of(op.node)
    if not flops and is_contraction(op):
        flops = 2.0 * math.prod(op.rule.size[f] for f in op.rule.factors)
    return flops


def obstacle(queries: int, keys: int, ranks: int) -> str | None:
    """Return why ``queries`` of a rank, in order of all of them, cannot be balanced;
    None if they can."""
    if keys != queries * ranks or ranks < 2:
        return "does not read all keys, in order, and a part of the queries"
    if queries % 2:
        return f"has {queries} queries, which cannot be halved"
    return None


def swap_seconds(op: Op, strategy: Strategy, mesh: Mesh, on: Hardware) -> float | None:
    """Return the seconds of swapping halves of all tensors with a row for each query,
    and of the copies around that; None where a strategy leaves nothing to balance."""
    first = query_position(op.target)
    if first is None or not has_causal_mask(op.node):
        return None
    (queries,), (keys,) = (op.rule.tensors[first + i][-2] for i in range(2))
    axes, size = strategy.axes_of.get(queries, ()), op.rule.size
    ranks = mesh.count(axes)
    if mesh.count(strategy.axes_of.get(keys, ())) > 1 or size[queries] % ranks:
        return None
    if obstacle(size[queries] // ranks, size[keys], ranks) is not None:
        return None
    total, permute = 0.0, along("permute", mesh, mesh.ordered(axes))
    tensors, tensor_specs = tensors_at(op.node), specs(op.rule, strategy)
    for i in op.rule.where[queries]:
        nbytes = nbytes_of(tensors[i]) / mesh.count(tensor_specs[i].sharded_axes)
        # A half is copied before it is sent; of a result both are joined.
        copied = nbytes + 2 * nbytes * (i >= len(op.operands))
        total += permute.seconds(nbytes / 2) + on.streaming(copied)
    return total


# The time of a kernel that does not run.
NEVER = -1


@dataclass(frozen=True, eq=False)
class ProgramKernels:
    """Says what the kernels of a program move, and when."""

    # The program, in global shapes.
    program: Program
    # For each value the one whose memory it shows: itself, unless it is a view.
    base: tuple[int, ...]
    # Bases of values that are in memory at all.
    written: frozenset[int]
    # Values of the forward that the backward computes anew.
    recomputed: frozenset[int]
    # Bases of values that the backward writes to memory, recomputed ones included.
    written_late: frozenset[int]
    # Work of each op.
    works: tuple[Work, ...]
    # When each op's kernel runs, in the forward and in the backward; NEVER if not.
    runs: tuple[tuple[int, int], ...]
    # Whether each value is read, and by light ops alone.
    read_by_light: tuple[bool, ...]

    def written_at(self, v: int) -> int:
        """Return when the kernel that writes a value first runs; 0 for inputs."""
        if v not in self.program.producers:
            return 0
        forward, backward = self.runs[self.program.producers[v][0]]
        return backward if forward == NEVER else forward

    def is_made_by_light_op(self, v: int) -> bool:
        """Return whether Inductor generates the op that makes a value, or the one it
        views."""
        maker = self.program.producers.get(self.base[v])
        return maker is not None and is_light(self.program.ops[maker[0]].target)

    def is_read_by_light(self, index: int) -> bool:
        """Return whether Inductor generates the op, or, if it is a view, all ops that
        read it."""
        op = self.program.ops[index]
        return self.read_by_light[op.results[0]] if is_view(op) else is_light(op.target)


def kernels_of(program: Program, gathered: Collection[int] = ()) -> ProgramKernels:
    """Return the kernels of a program. ``gathered``: values the backward makes again in
    any case, those computed from sharded parameters alone."""
    key = frozenset(gathered), program.balances
    if key not in program.kernel_cache:
        program.kernel_cache[key] = _read(program, gathered)
    return program.kernel_cache[key]


def _read(program: Program, gathered: Collection[int]) -> ProgramKernels:
    run = _Run(program, gathered)
    base = run.base()
    moved, launched = run.moved(base), Counter(run.leaders())
    runs = tuple(run.runs())
    works = _works(program, moved, launched, runs)
    return ProgramKernels(
        program,
        tuple(base),
        frozenset(v for buffer, v in run.value_of.items() if buffer.written),
        frozenset(v for v in run.recomputed if base[v] == v),
        frozenset(v for x in run.launches if x.backward for v in run.written_by(x)),
        tuple(works),
        runs,
        tuple(_read_by_light(program)),
    )


def _works(
    program: Program,
    moved: Mapping[int, list[tuple[int, float]]],
    launched: Mapping[int, int],
    runs: Sequence[tuple[int, int]],
) -> Iterator[Work]:
    """Yield the work of each op."""
    for i, op in enumerate(program.ops):
        traffic = tuple(moved.get(i, ()))
        work = work_of(op, program.values, traffic, launched[i], program.balances)
        if NEVER not in runs[i]:  # the backward computes it again
            kind, operations = work.light
            work = replace(
                work,
                flops=2 * work.flops,
                hidden_flops=2 * work.hidden_flops,
                light=(kind, 2 * operations),
            )
        yield work


class _Run:
    """Reads the graph of a program in the order it runs."""

    def __init__(self, program: Program, gathered: Collection[int]) -> None:
        self.program = program
        self.op_of = {op.node: op.index for op in program.ops}
        self.recomputed: set[int] = set()
        self.value_of: dict[Buffer, int] = {}
        self.launches: list[Launch] = []
        self.reader = KernelReader()
        # The op that runs at each place in the order; the last place is for constants
        # that are returned.
        self.times: list[int] = []
        # Number of nodes of the forward.
        self.early = 0
        if program.ops:
            self._read(program.ops[0].node.graph, gathered)

    def _read(self, graph: fx.Graph, gathered: Collection[int]) -> None:
        anew = {
            node
            for (node, place), v in self.program.value_of.items()
            if v in gathered
            and place == 0
            and node.op == "call_function"
            and isinstance(node.meta["val"], torch.Tensor)
        }
        first, second = phases(graph, anew)
        backward = self.program.backward
        phase_ops = [
            [self.op_of.get(node, NEVER) for node in part] for part in (first, second)
        ]
        self.recomputed.update(
            v
            for op in phase_ops[1]
            if op != NEVER and op not in backward
            for v in self.program.ops[op].results
        )
        self.early = len(first)
        end = len(self.program.ops)
        turn = min(backward, default=end)
        self.times = [
            *_times(phase_ops[0], range(turn), turn),
            *_times(phase_ops[1], backward, end),
            end,
        ]
        for node in graph.nodes:
            if node.op == "placeholder":
                self.reader.step(node, -1.0, False)
        for i, node in enumerate(itertools.chain(first, second)):
            self.reader.step(node, float(i), i >= self.early)
        last = float(len(self.times) - 1)
        self.reader.step(graph.output_node(), last, bool(second))
        run = self.reader.launches()
        self.launches = run.launches
        for buffer in run.inputs:
            self.value_of[buffer] = self.program.value_of[buffer.node, 0]
        for launch in self.launches:
            count = Counter[fx.Node]()
            for buffer in launch.makes:
                place = buffer.node, count[buffer.node]
                self.value_of[buffer] = self.program.value_of[place]
                count[buffer.node] += 1

    def written_by(self, launch: Launch) -> list[int]:
        """Return the values that a launch writes to memory."""
        return [self.value_of[buffer] for buffer in launch.writes]

    def base(self) -> list[int]:
        """Return for each value the one whose memory it shows."""
        out = list(range(len(self.program.values)))
        for op in self.program.ops:
            views = _flat(self.reader.values.get(op.node, []))
            for v, view in zip(op.results, views, strict=False):
                if view.buffer is not None:
                    out[v] = self.value_of.get(view.buffer, v)
                else:
                    out[v] = self.program.value_of[view.node, 0]
        return out

    def leaders(self) -> list[int]:
        """Return the op that each kernel starts with."""
        ops = (
            [self.op_of[n] for n in x.nodes if n in self.op_of] for x in self.launches
        )
        return [min(each) for each in ops if each]

    def moved(self, base: Sequence[int]) -> dict[int, list[tuple[int, float]]]:
        """Return for each op (position, bytes) of its results in memory, and its part
        of the bytes its kernel reads. These are read once: a reader that is split saves
        its part, not the whole, so ops pay in proportion to the bytes they read."""
        program = self.program
        out: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for launch in self.launches:
            sizes = {self.value_of[b]: n for b, n in launch.reads.items()}
            readers_of: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
            for op in (program.ops[self.op_of[n]] for n in launch.nodes):
                places: dict[int, tuple[int, int]] = {}
                for position, v in enumerate(op.operands):
                    if base[v] in sizes:
                        place = program.values[v].nbytes, -position
                        places[base[v]] = max(place, places.get(base[v], place))
                for b, (nbytes, position) in places.items():
                    readers_of[b].append((op.index, -position, nbytes))
            for b, readers in readers_of.items():
                rate = sizes[b] / max(sum(nbytes for *_, nbytes in readers), 1)
                for index, position, nbytes in readers:
                    out[index].append((position, nbytes * rate))
            for buffer in launch.writes:
                index, result = program.producers[self.value_of[buffer]]
                position = len(program.ops[index].operands) + result
                out[index].append((position, float(buffer.nbytes)))
        return out

    def runs(self) -> list[tuple[int, int]]:
        """Return for each op when its kernel runs: (in the forward, in the
        backward)."""
        out = [[NEVER, NEVER] for _ in self.program.ops]
        for launch in self.launches:
            at = self.times[math.ceil(launch.order)]
            for node in launch.nodes:
                out[self.op_of[node]][int(launch.backward)] = at
        return [(early, late) for early, late in out]


def _flat(views: Sequence[object]) -> list[TensorView]:
    """Return the tensors of a call's result, in order."""
    out: list[TensorView] = []
    for view in views:
        if isinstance(view, list):
            out += _flat(view)
        elif isinstance(view, TensorView):
            out.append(view)
    return out


def _times(ops: Sequence[int], own: Collection[int], end: int) -> list[int]:
    """Return for each place the op that runs there or, if that is not among ``own``,
    the next one that is."""
    out, now = [], end
    for op in reversed(ops):
        now = op if op in own else now
        out.append(now)
    return out[::-1]


def _read_by_light(program: Program) -> list[bool]:
    out = [v.index not in program.returned for v in program.values]
    read = {v for op in program.ops for v in op.operands}
    for op in reversed(program.ops):
        light = is_light(op.target)
        if is_view(op):
            light = op.results[0] in read and out[op.results[0]]
        for v in op.operands:
            out[v] &= light
    return [v in read and light for v, light in enumerate(out)]
