"""Rows of fxpar's own ops, by name: they are registered by passes and runtime. Those of
manual regions (``passes.regions``), and which nodes are inside; the one op by which a
graph writes to its inputs, and what keeps effects in order.

Inside a region a value is in the shape that is local along the region's axes, and other
axes split it as any other. So that nothing splits it over the region's axes once more,
each op inside has a factor for each of them, pinned to it: ``@tp``. No tensor inside
has that factor. At an edge it is the major part of each dim that the region splits:
what enters is ``(@tp d0) d1 -> d0 d1``, what leaves the reverse; a result that leaves
partial is summed over a factor that nothing has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.sharding.factors import (
    LINEAR,
    MONOTONE,
    MOVEMENT,
    GatheredRows,
    Passage,
    RowMoves,
    RowPiece,
    Rule,
)
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.rules.moved_dims import moved, resized
from fxpar.sharding.rules.order import scan
from fxpar.sharding.rules.pointwise import broadcast
from fxpar.sharding.rules.table import Row, at, make, names, row, whole, words_of
from fxpar.sharding.spec import Spec


def _dot(lhs: torch.Tensor, rhs: torch.Tensor, equation: str) -> str:
    return equation


def _random(*args: Any) -> Rule:
    """A scalar seed in; every dim of the result is free: it counts by global index."""
    return make([[]], [names(len(args[-1]))])


def _shift(x: torch.Tensor, dim: int, by: int, fill: float | None = None) -> Rule:
    """Every dim is free: ranks that split ``dim`` send rows to their neighbours."""
    reductions = ("avg", *MONOTONE) if fill else MOVEMENT
    n, passages = x.shape[dim], (Passage((0,), reductions),)
    if fill is None:
        start = by % n
        pieces = [RowPiece(0, 0, n - start, start), RowPiece(0, 0, start, at=n - start)]
    else:
        pieces = [RowPiece(0, 0, max(n - abs(by), 0), max(by, 0), at=max(-by, 0))]
    moves = RowMoves(dim, (n,), (n,), tuple(x for x in pieces if x.count), fill or 0)
    return replace(broadcast(x), passages=passages, moves=(moves,))


def _scan_back(x: torch.Tensor, dim: int, kind: str) -> Rule:
    """A sum from the last row on may be of partial values."""
    passages = (Passage((0,), LINEAR),) if kind == "cumsum" else ()
    return replace(scan(x, dim), passages=passages)


def _choice_back(grad: torch.Tensor, places: torch.Tensor, dim: int) -> Rule:
    """Ranks gather what the rows of a shard come to that were chosen before it, and
    where that was."""
    words = words_of(grad)
    rule = make([words, words], [words])
    marks = tuple(GatheredRows(i, at(dim, grad.ndim), 1) for i in range(2))
    return replace(rule, gathered=marks, empty="never")


def _sum_turns(x: torch.Tensor, dim: int, turns: int) -> Rule:
    """A rank sums those of its rows that are one; of the dim it has a part of all."""
    words = words_of(x)
    return make([words], [["_" if i == dim else w for i, w in enumerate(words)]])


def _interleave(parts: Sequence[torch.Tensor], dim: int) -> Rule | None:
    """Row ``i`` of the last of ``k`` parts is row ``i * k + k - 1`` of the result."""
    pieces = [
        RowPiece(i, 0, x.shape[dim], at=i, stride=len(parts))
        for i, x in enumerate(parts)
    ]
    whole = resized(parts[0], dim, sum(x.shape[dim] for x in parts))
    return moved(parts, [whole], {dim: pieces})


def _ctc_words(targets: torch.Tensor) -> tuple[list[list[str]], str]:
    """Words of what a CTC loss reads, and of its batch: free where each sequence has a
    row of targets; joined end to end, theirs begin where the lengths before say."""
    if targets.dim() == 2:
        return [["t!", "n", "c!"], ["n", "s!"], ["n"], ["n"]], "n"
    return [["t!", "n!", "c!"], ["s!"], ["n!"], ["n!"]], "n!"


def _ctc(log_probs: torch.Tensor, targets: torch.Tensor, *_: Any) -> Rule:
    operands, batch = _ctc_words(targets)
    return make(operands, [[batch]])


def _ctc_backward(
    grad: torch.Tensor, log_probs: torch.Tensor, targets: torch.Tensor, *_: Any
) -> Rule:
    operands, batch = _ctc_words(targets)
    return make([[batch], *operands], [operands[0]])


def _write(target: torch.Tensor, source: torch.Tensor) -> Rule:
    """An input is written where it rests, in whole."""
    ndim = target.dim()
    words = [f"{name}!" for name in names(ndim)]
    return make([words, words_of(source, range(source.dim()), "s")], [words])


def _in_order(token: torch.Tensor, op: Any, *args: Any, **kwargs: Any) -> Rule | None:
    """An op with an effect, such as a check that raises: all ranks do it alike, on
    whole operands. One with results could be split, for which there is no rule."""
    if _torch.objects.schema_of(op).returns:
        return None
    return whole(token, *args, **kwargs)


# By name: the ops are registered by ``passes``.
ENTER, LEAVE = "fxpar.enter_region.default", "fxpar.leave_region.default"
COLLECTIVE, INDEX = "fxpar.collective.default", "fxpar.axis_index.default"
REGION_OPS = frozenset((ENTER, LEAVE, COLLECTIVE, INDEX))

# Which dims a collective names, of its argument ``dims``, need to be whole.
_NAMED = ("all_gather", "reduce_scatter", "all_to_all")

Sizes = Mapping[str, int]


def factor(axis: str) -> str:
    """The factor that is pinned to an axis."""
    return f"@{axis}"


def pinned(rule: Rule, sizes: Sizes) -> Rule:
    """The rule of an op inside regions over these axes."""
    added = {axis: size for axis, size in sizes.items() if axis not in rule.pin}
    if not added:
        return rule
    return replace(
        rule,
        sizes=(*rule.sizes, *((factor(axis), size) for axis, size in added.items())),
        pinned=(*rule.pinned, *((factor(axis), (axis,)) for axis in added)),
    )


def _edge(x: torch.Tensor, lies: Spec, sizes: Sizes, *, leaves: bool) -> Rule:
    words = [f"d{d}" for d in range(x.dim())]
    outside = [
        (*map(factor, axes), word) for axes, word in zip(lies.dims, words, strict=True)
    ]
    factor_sizes = {factor(axis): size for axis, size in sizes.items()}
    for word, n, axes in zip(words, x.shape, lies.dims, strict=True):
        count = 1 if leaves else _count(axes, sizes)
        factor_sizes[word] = int(n) // count
    split = [f"~{factor(axis)}" for axis in lies.sharded_axes]
    rule = (
        make([words], [outside], factor_sizes)
        if leaves
        else make([outside], [[*words, *split]], factor_sizes)
    )
    return replace(
        rule,
        reductions=tuple((factor(axis), op) for axis, op in lies.partial),
        passages=(Passage((0,), MOVEMENT),),
        pinned=tuple((factor(axis), (axis,)) for axis in sizes),
        summed=frozenset(factor(axis) for axis in lies.partial_axes),
        even=True,
    )


def _count(axes: Sequence[str], sizes: Sizes) -> int:
    out = 1
    for axis in axes:
        out *= sizes[axis]
    return out


@lru_cache(maxsize=256)
def _sizes(mesh: str, axes: str) -> dict[str, int]:
    """Of the axes, joined by ``+``, those of more than one rank."""
    all_sizes = Mesh.parse(mesh).sizes
    return {axis: all_sizes[axis] for axis in axes.split("+") if all_sizes[axis] > 1}


def _lies(spec: str, sizes: Sizes) -> Spec:
    """A spec of an edge without axes of one rank."""
    lies = Spec.parse(spec)
    alone = [axis for axis in lies.axes if axis not in sizes]
    partial = [(axis, op) for axis, op in lies.partial if axis in sizes]
    return Spec.of(lies.without(alone).dims, partial)


def _enter(x: torch.Tensor, spec: str, mesh: str, axes: str, _: int) -> Rule:
    sizes = _sizes(mesh, axes)
    return _edge(x, _lies(spec, sizes), sizes, leaves=False)


def _leave(x: torch.Tensor, spec: str, mesh: str, axes: str, _: int) -> Rule:
    sizes = _sizes(mesh, axes)
    return _edge(x, _lies(spec, sizes), sizes, leaves=True)


def _collective(
    x: torch.Tensor, kind: str, dims: Sequence[int], op: str, *_: Any
) -> Rule:
    whole = {d % x.dim() for d in dims} if kind in _NAMED else set()
    words = ["_" if d in whole else f"d{d}" for d in range(x.dim())]
    linear = op in ("", "sum", "avg")
    passes: tuple[str, ...] = LINEAR if linear else ()
    if op in MONOTONE:
        passes = MONOTONE
    if kind in ("all_gather", "all_to_all", "permute"):
        passes = MOVEMENT
    passages = (Passage((0,), passes),) if passes else ()
    return replace(make([words], [words], passages=passages), even=True)


ROWS: dict[Any, Row] = {
    "higher_order::with_effects": row(_in_order),
    torch.ops.aten.copy_.default: row(_write),
    "fxpar::dot": row(_dot, linear="0|1"),
    "fxpar::seeds": row("-> n!"),
    "fxpar::random": row(_random),
    "fxpar::randint": row(_random),
    "fxpar::orthogonal": row("m! n! -> m! n!"),
    "fxpar::constrain": row(broadcast, movement="0"),
    "fxpar::mean_over_ranks": row(broadcast, movement="0"),
    "fxpar::with_gradient_of": row(broadcast),
    "fxpar::shift": row(_shift),
    "fxpar::scan_back": row(_scan_back),
    "fxpar::choice_back": row(_choice_back, linear="0"),
    "fxpar::sum_turns": row(_sum_turns, linear="0"),
    "fxpar::ctc": row(_ctc),
    "fxpar::ctc_backward": row(_ctc_backward, linear="0"),
    "fxpar::interleave": row(_interleave, movement="0"),
    "fxpar::enter_region": row(_enter),
    "fxpar::leave_region": row(_leave),
    "fxpar::collective": row(_collective),
    "fxpar::axis_index": row(lambda *_: make([], [[]])),
}


def manual_axes(graph: fx.Graph) -> dict[fx.Node, Sizes]:
    """The nodes inside manual regions and at their edges, with the axes of the regions
    and their sizes: what is computed from what entered, until it leaves."""
    if not any(str(node.target) in REGION_OPS for node in graph.nodes):
        return {}
    region_axes: dict[fx.Node, dict[str, int]] = {}
    axes_of: dict[fx.Node, Sizes] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        axes: dict[str, int] = {}
        for read in node.all_input_nodes:
            axes |= region_axes.get(read, {})
        op_axes = dict(sizes_of(node))
        if op_axes or axes:
            axes_of[node] = axes | op_axes
        left = op_axes if str(node.target) == LEAVE else {}
        region_axes[node] = {a: n for a, n in (axes | op_axes).items() if a not in left}
    return axes_of


def axes_inside(node: fx.Node, manual: Mapping[fx.Node, Sizes]) -> tuple[str, ...]:
    """The axes of the regions that a node's results lie in, by ``manual_axes``."""
    if node not in manual:
        return ()
    left = dict(sizes_of(node)) if str(node.target) == LEAVE else {}
    return tuple(axis for axis in manual[node] if axis not in left)


def sizes_of(node: fx.Node) -> Sizes:
    """The axes that an op of a region names itself, with their sizes; none for any
    other op."""
    kind, args = str(node.target), node.args
    if kind in (ENTER, LEAVE):
        return _sizes(args[2], args[3])
    if kind == INDEX:
        return _sizes(args[1], args[0])
    if kind == COLLECTIVE:
        return _sizes(node.args[-2], "+".join(group_axes_of(node)))
    return {}


def group_axes_of(node: fx.Node) -> tuple[str, ...]:
    """The axes along which a collective of a region goes."""
    return tuple(str(node.args[-1]).split("+"))
