"""Decides which values of a region are stored in slices between its collectives, by an
exact minimum cut.

``rows_of`` finds the dims of values that can only be sliced together: the rows of a
region. In: a local graph with steps, and axes. Out: ``Rows``, one for each set of
(value, dim) that ops tie together by a factor of their rules: if one value of the set
is sliced along its dim, so may every other be. Only values equal on all ranks of the
axes count; ops without a rule, and ops that read a value that differs between ranks,
tie nothing.

``cut``. In: the ``Rows`` of a local graph, and seconds for ops and collectives. Out:
the ops to run on slices and the all-reduces to split, so that the sum of seconds is
least. Each value is either sliced or whole; an op on slices takes its share of the
time, a collective along other axes that of a slice; an all-reduce whose result is
sliced is a reduce-scatter; a sliced value that anything reads whole is gathered once;
slicing a whole value is free; a sum over rows on slices is all-reduced. That is a
minimum cut between "sliced" and "whole":

    source -> op          op runs whole (its seconds)
    op -> sink            op runs on slices (its share, and what it must reduce)
    source -> v, v -> sink   v is all-reduced, or reduce-scattered
    v -> gathered(v)      v is sliced and somebody reads it whole (an all-gather)
    gathered(v) -> op     never: op reads v whole

It finds the reduce-scatters and all-gathers of Megatron's sequence parallelism
(Korthikanti et al., 2022), where they pay.

The cuts of all regions together then make schedules: those that pay by the sum of
seconds, sets of them that are compatible, and the lines of verbs for a set. Never
changes the graph.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import fx

from fxpar.errors import RuleError
from fxpar.fusion.schedule import Line, Schedule
from fxpar.fusion.varying_axes import varying
from fxpar.graph import collective_nodes
from fxpar.sharding.cost.collectives import along
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.op import bytes_of, kernel_seconds
from fxpar.sharding.factors import Dims, Rule
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import tensor_nodes
from fxpar.sharding.read_program import RuleReader
from fxpar.sharding.solver.min_cut import minimum_cut
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import is_expressible, project

Axes = tuple[str, ...]
Token = tuple[fx.Node, int]  # a value and one of its dims
Varies = Mapping[fx.Node, frozenset[str]]
# An edge of the network between "sliced", values, ops and "whole": tail, head, seconds.
Arc = tuple[Any, Any, float]


@dataclass
class Rows:
    """Holds values of a graph that could be sliced, each along one dim."""

    # Value -> the dim along which it would be sliced; None: never.
    dims: dict[fx.Node, int | None] = field(default_factory=dict)
    # Op -> the values among ``dims`` that it reads as slices.
    ops: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    # Ops that sum over the rows, so that their result must be reduced.
    sums: set[fx.Node] = field(default_factory=set)
    # Value -> the op that makes it.
    makers: dict[fx.Node, fx.Node] = field(default_factory=dict)
    # The all-reduces among the values.
    reduced: list[fx.Node] = field(default_factory=list)

    def put(self, value: fx.Node, dim: int) -> None:
        """Note a token; a value with two dims that are rows is never sliced."""
        if self.dims.setdefault(value, dim) != dim:
            self.dims[value] = None


@dataclass(frozen=True)
class _Tie:
    """Holds the tokens of an op's operands and results for one of its factors."""

    node: fx.Node  # the op that ties the tokens
    reads: tuple[Token, ...]  # tokens of operands
    makes: tuple[Token, ...]  # tokens of results

    @property
    def tokens(self) -> tuple[Token, ...]:
        return self.reads + self.makes


def rows_of(graph: fx.Graph, mesh: Mesh, axes: Axes, varies: Varies) -> list[Rows]:
    """Return all rows with a result of an all-reduce along ``axes``."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    ties = list(_all_ties(graph, mesh, axes, varies))
    reduced = [
        (node, dim)
        for node in graph.nodes
        if node.target is collective_nodes.all_reduce
        and collective_nodes.axes_of(node) == axes
        for dim, size in enumerate(node.meta["val"].shape)
        if size and size % mesh.count(axes) == 0
    ]
    tokens = dict.fromkeys(chain(reduced, *(tie.tokens for tie in ties)))
    number = {token: i for i, token in enumerate(tokens)}
    pairs = [(number[tie.tokens[0]], number[t]) for tie in ties for t in tie.tokens]
    ends = np.array(pairs, int).reshape(-1, 2).T
    joins = coo_array((np.ones(len(pairs)), ends), shape=(len(number), len(number)))
    _, part_of = connected_components(joins, directed=False)
    groups: dict[int, Rows] = defaultdict(Rows)
    for node, dim in reduced:
        rows = groups[part_of[number[node, dim]]]
        rows.put(node, dim)
        rows.reduced += [node] if node not in rows.reduced[-1:] else []
    for tie in ties:
        group = groups.get(part_of[number[tie.tokens[0]]])
        if group is None:
            continue
        for value, dim in tie.tokens:
            group.put(value, dim)
        group.ops.setdefault(tie.node, set()).update(v for v, _ in tie.reads)
        group.makers.update((value, tie.node) for value, _ in tie.makes)
        if not tie.makes:
            group.sums.add(tie.node)
    return list(groups.values())


def _all_ties(
    graph: fx.Graph, mesh: Mesh, axes: Axes, varies: Varies
) -> Iterator[_Tie]:
    """Yield one tie for each op and factor that slices could cut."""
    rules = RuleReader()
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        read = (*tensor_nodes(node), node)
        if any(set(axes) & varies[n] for n in read):
            continue
        if collective_nodes.is_step(node):
            yield from _step_ties(node, axes)
            continue
        results = _results(node)
        if results is None:
            continue
        try:
            rule, has_rule = rules(node)
        except RuleError:
            continue
        if has_rule and not rule.accumulates:
            for factor in (f for f in rule.free if f not in rule.exchanged):
                tie = _tie(node, rule, factor, mesh, axes, results)
                if tie is not None:
                    yield tie


def _results(node: fx.Node) -> list[fx.Node | None] | None:
    """Return the nodes that stand for a node's results; None if it is read as a
    tuple."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [node]
    if not isinstance(value, (tuple, list)):
        return None
    items = {u.args[1]: u for u in node.users if u.target is operator.getitem}
    if len(items) != len(node.users):
        return None
    positions = [i for i, v in enumerate(value) if isinstance(v, torch.Tensor)]
    return [items.get(i) for i in positions]


def _tie(
    node: fx.Node,
    rule: Rule,
    factor: str,
    mesh: Mesh,
    axes: Axes,
    results: list[fx.Node | None],
) -> _Tie | None:
    """Return the tokens that slices along the factor cut; None if the op cannot run on
    them."""
    if not all(
        is_expressible(dims, {factor: axes}, rule.size, mesh) for dims in rule.tensors
    ):
        return None

    def tokens(nodes: Any, tensors: tuple[Dims, ...]) -> tuple[Token, ...]:
        return tuple(
            (n, d)
            for n, dims in zip(nodes, tensors, strict=True)
            if n is not None
            for d in _places(dims, factor, rule, mesh, axes)
        )

    reads = tokens(tensor_nodes(node), rule.operands)
    makes = tokens(results, rule.results)
    lacks = [factor in contracted for contracted in rule.contracted_by]
    one = isinstance(node.meta["val"], torch.Tensor)
    sums = one and lacks[0] and reads and not makes
    return _Tie(node, reads, makes) if sums or (makes and not any(lacks)) else None


def _places(
    dims: Dims, factor: str, rule: Rule, mesh: Mesh, axes: Axes
) -> Iterator[int]:
    """Yield the dims of a tensor that are cut by slices along a factor."""
    for d, dim in enumerate(dims):
        if factor in dim:
            spec = Spec.of([axes if i == d else () for i in range(len(dims))])
            if project(dims, spec, rule.size, mesh) == {factor: axes}:
                yield d


def _step_ties(node: fx.Node, axes: Axes) -> Iterator[_Tie]:
    """Yield the ties of a step over other axes: the dims that it leaves as they are."""
    source: Any = node.args[0]
    if not set(collective_nodes.axes_of(node)) & set(axes):
        step_dims = collective_nodes.changed_dims(node)
        for dim in range(node.meta["val"].dim()):
            if dim not in step_dims:
                yield _Tie(node, ((source, dim),), ((node, dim),))


@dataclass(frozen=True)
class SliceCut:
    """Holds ops of a graph that could run on slices, and what that saves."""

    # Ops that run on slices.
    sliced: tuple[fx.Node, ...]
    # All-reduces that are split -> along which dim.
    split: dict[fx.Node, int]
    # All-reduces that stay, of which ops on slices read slices -> along which dim.
    unsplit: dict[fx.Node, int]
    # Seconds.
    saved: float

    @property
    def starts(self) -> dict[fx.Node, int]:
        """Return the all-reduces at which slices begin, with their dims."""
        return {**self.split, **self.unsplit}


@dataclass(frozen=True)
class Prices:
    """Holds seconds of ops and collectives on whole values and on slices."""

    # (op, share) -> seconds of a share of an op, 1 or ``share``.
    work: Callable[[fx.Node, float], float]
    # (kind, value) -> seconds of a collective on a whole value.
    collective: Callable[[str, fx.Node], float]
    # The share that one slice is of a value.
    share: float


def cut(rows: Rows, prices: Prices, *, split: bool = False) -> SliceCut:
    """Return the best cut for one region. ``split``: only among those that split every
    all-reduce. Of cuts of equal cost it is the one with most in slices, which takes
    least memory."""
    arcs: list[Arc] = []
    before = 0.0
    for op in rows.ops:
        work = prices.work(op, 1.0)
        reduces = prices.collective("all_reduce", op) if op in rows.sums else 0.0
        arcs.append(("sliced", op, work))
        arcs.append((op, "whole", prices.work(op, prices.share) + reduces))
        before += work
    for value in rows.reduced:
        whole = prices.collective("all_reduce", value)
        may = rows.dims[value] is None or not split
        arcs.append(("sliced", value, whole if may else math.inf))
        arcs.append((value, "whole", prices.collective("reduce_scatter", value)))
        before += whole
    for value, dim in rows.dims.items():
        arcs += _arcs_of(rows, value, dim, prices)
    least = minimum_cut(arcs, "sliced", "whole")
    if least is None:  # what must be sliced must be whole
        return SliceCut((), {}, {}, -math.inf)
    sliced = tuple(op for op in rows.ops if op not in least.late)
    read = {value for op in sliced for value in rows.ops[op]}
    dims = {value: rows.dims[value] for value in rows.reduced}
    dim_of = {value: dim for value, dim in dims.items() if dim is not None}
    return SliceCut(
        sliced,
        {value: dim for value, dim in dim_of.items() if value not in least.late},
        {value: dim for value, dim in dim_of.items() if value in read & least.late},
        before - least.capacity,
    )


def _arcs_of(
    rows: Rows, value: fx.Node, dim: int | None, prices: Prices
) -> Iterator[Arc]:
    """Yield the arcs of a value: it is sliced if its op is; whoever reads it whole
    reads it gathered."""
    maker = rows.makers.get(value)
    if dim is None or (maker is None and value not in rows.reduced):
        # It is whole; an op on slices takes its part of it for free.
        yield maker or value, "whole", math.inf
        return
    if maker not in (None, value):
        yield maker, value, math.inf
        yield value, maker, math.inf
    yield value, ("gathered", value), prices.collective("all_gather", value)
    for user in value.users:
        if user.target is operator.getitem and user in rows.dims:
            continue
        slices = value in rows.ops.get(user, ())
        yield ("gathered", value), user if slices else "whole", math.inf


def at_most(rows: Rows, prices: Prices) -> tuple[float, float]:
    """Return (the most seconds of ops that slices can save, the least seconds that
    collectives then take longer): all ops on slices, and gathers where something reads
    whole."""
    work = sum(prices.work(op, 1.0) - prices.work(op, prices.share) for op in rows.ops)
    longer = 0.0
    for value in rows.reduced:
        longer += prices.collective("reduce_scatter", value)
        longer -= prices.collective("all_reduce", value)
    for value, dim in rows.dims.items():
        computed = value in rows.reduced or value in rows.makers
        whole = any(value not in rows.ops.get(user, ()) for user in value.users)
        if computed and whole and dim is not None:
            longer += prices.collective("all_gather", value)
    return work, longer


# A region is a near miss if it saves more than this share of its cost.
_NEAR_MISS = 0.5


def alternatives(cuts: Sequence[SliceCut]) -> list[tuple[SliceCut, ...]]:
    """Return sets of regions that share no reduction. For each dim, regions that split
    along it, or cut reduced values along it, come first, then all others that are
    compatible with them; and the first region of each set alone."""

    def leads(one: SliceCut) -> set[tuple[int, bool]]:
        return {(dim, bool(one.unsplit)) for dim in one.starts.values()}

    firsts = dict.fromkeys(first for one in cuts for first in sorted(leads(one)))
    sets = []
    for first in firsts:
        order = sorted(cuts, key=lambda one: first not in leads(one))
        starts: set[fx.Node] = set()
        chosen = []
        for one in order:
            if starts.isdisjoint(one.starts):
                chosen.append(one)
                starts.update(one.starts)
        sets.append(tuple(chosen))
        if len(chosen) > 1:
            sets.append(tuple(chosen[:1]))
    return sets


def candidates(
    graph: fx.Graph, mesh: Mesh, axes: tuple[str, ...], hardware: Hardware
) -> tuple[list[SliceCut], list[str]]:
    """Return (cuts that pay by the sum of seconds, best first; why other regions do
    not). Cuts along different dims may share reductions."""
    prices = _prices(mesh, axes, hardware)
    regions = rows_of(graph, mesh, axes, varying(graph))
    cuts = [(cut(rows, prices), rows) for rows in regions]
    cuts.sort(key=lambda pair: -pair[0].saved)
    paying = [one for one, _ in cuts if one.starts and one.sliced]
    # A cut that splits every all-reduce may be slower by the sum of seconds and faster
    # in a step: more can overlap with its gathers.
    every = [cut(rows, prices, split=True) for one, rows in cuts if one.unsplit]
    paying += [one for one in every if one.sliced]
    starts = {node for one in paying for node in one.starts}
    near_misses = []
    for one, rows in cuts:
        work, longer = at_most(rows, prices)
        if (
            one not in paying
            and starts.isdisjoint(rows.reduced)
            and work > _NEAR_MISS * longer
        ):
            near_misses.append(
                f"{'+'.join(axes)}: {len(rows.reduced)} all-reduces could be split "
                f"and {len(rows.ops)} ops run on slices, which saves "
                f"{work * 1e6:.4g} us of them and takes {longer * 1e6:.4g} us more of "
                f"communication"
            )
    return paying, near_misses


def _prices(mesh: Mesh, axes: tuple[str, ...], hardware: Hardware) -> Prices:
    count = mesh.count(axes)

    def work(op: fx.Node, share: float) -> float:
        if collective_nodes.is_step(op):
            return collective_nodes.step_seconds(op, mesh, share)
        return kernel_seconds(op, hardware, share)

    def collective(kind: str, value: fx.Node) -> float:
        size = bytes_of(value)
        before = size / count if kind == "all_gather" else size
        return float(along(kind, mesh, axes).seconds(before))

    return Prices(work, collective, 1 / count)


def lines_of(cuts: Sequence[SliceCut], start: int) -> Schedule:
    """Return cuts as lines: each all-reduce is split, or cut where it is kept, then all
    ops cross the gathers; readers of a whole value that was cut read it as before."""
    lines: list[Line] = []
    for one in cuts:
        gathers, cut_gathers = [], []
        for node, dim in one.starts.items():
            number = start + len(lines)
            gathers.append(f"gather_{number}")
            gives = f"scatter_{number}", gathers[-1]
            where = ("dim", dim)
            if node in one.split:
                lines.append(Line("split", (node.name,), (where,), gives))
                continue
            axes = ("axes", "_and_".join(collective_nodes.axes_of(node)))
            lines.append(Line("cut", (node.name,), (axes, where), gives))
            cut_gathers.append(gathers[-1])
        names = tuple(op.name for op in one.sliced)
        lines.append(Line("reorder", (names, *gathers)))
        lines += [Line("drop", (gather,)) for gather in cut_gathers]
    return Schedule(tuple(lines))


def described(axes: tuple[str, ...], cuts: Sequence[SliceCut]) -> str:
    """Describe cuts for the notes on near misses."""
    split = sum(len(one.split) for one in cuts)
    cut_only = sum(len(one.unsplit) for one in cuts)
    sliced = sum(len(one.sliced) for one in cuts)
    also = f", taking slices of {cut_only} others" if cut_only else ""
    return (
        f"{'+'.join(axes)}: splitting {split} all-reduces{also} and running {sliced} "
        "ops on slices"
    )
