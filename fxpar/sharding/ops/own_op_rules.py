"""Gives rules to fxpar's own ops, by name, as passes and runtime register them: ops of
manual regions (``features.regions``), the op by which a graph writes to its inputs, the
op that keeps effects in order, and others.

Inside a region a value has the shape that is local along the region's axes, and other
axes split it like any other value. So that nothing splits it over the region's axes
again, each op inside has a factor for each of these axes, pinned to it: ``@tp``. No
tensor inside has that factor. At an edge it is the major part of each dim that the
region splits: an op that enters has ``(@tp d0) d1 -> d0 d1``, one that leaves the
reverse; a result that leaves partial is summed over a factor that no tensor has.

A contraction (``fxpar::dot``) is views around one mm or bmm. Factors of its equation
fall into four classes: in both operands and the result (batch), in the left one (m), in
the right one (n), in both operands only (k). Runs of one class are merged by views
where they are adjacent, so that no data moves that the program before normalizing did
not move. Rows of a shift are cut, sent on along a split dim, and joined.

In: calls of these ops. Out: their rules, local forms, and the axes of the regions that
a node is in.
Never: registers an op.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import PlanError
from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder, Size, value_of
from fxpar.sharding import rank_ints, shard_sizes
from fxpar.sharding.factors import (
    LINEAR,
    MONOTONE,
    MOVEMENT,
    Passage,
    RowMoves,
    RowPiece,
    Rule,
    sides,
)
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import COLLECTIVE, group_axes_of
from fxpar.sharding.op_table import make, names, rows, whole, words_of
from fxpar.sharding.ops import reads
from fxpar.sharding.ops.local_call import LocalCall
from fxpar.sharding.ops.pointwise import broadcast
from fxpar.sharding.ops.slicing import moved, resized
from fxpar.sharding.spec import Spec

aten = torch.ops.aten


def _random(*args: Any) -> Rule:
    """Return the rule of a scalar seed and a result whose dims are all free: it counts
    by global index."""
    return make([[]], [names(len(args[-1]))])


def _shift(x: torch.Tensor, dim: int, by: int, fill: float | None = None) -> Rule:
    """Return the rule with every dim free: ranks that split ``dim`` send rows to
    neighbours."""
    reductions = ("avg", *MONOTONE) if fill else MOVEMENT
    n, passages = x.shape[dim], (Passage((0,), reductions),)
    if fill is None:
        start = by % n
        pieces = [RowPiece(0, 0, n - start, start), RowPiece(0, 0, start, at=n - start)]
    else:
        pieces = [RowPiece(0, 0, max(n - abs(by), 0), max(by, 0), at=max(-by, 0))]
    moves = RowMoves(dim, (n,), (n,), tuple(x for x in pieces if x.count), fill or 0)
    return replace(broadcast(x), passages=passages, moves=(moves,))


def _interleave(parts: Sequence[torch.Tensor], dim: int) -> Rule | None:
    """Return the rule of row ``i`` of part ``j`` of ``k`` becoming row ``i * k +
    j``."""
    pieces = [
        RowPiece(i, 0, x.shape[dim], at=i, stride=len(parts))
        for i, x in enumerate(parts)
    ]
    whole = resized(parts[0], dim, sum(x.shape[dim] for x in parts))
    return moved(parts, [whole], {dim: pieces})


def _ctc(is_backward: bool, *args: Any) -> Rule:
    """Return the rule of a CTC loss, or of its backward. The batch is free where each
    sequence has a row of targets; in targets joined end to end a sequence begins where
    the lengths before it end."""
    is_by_row = args[1 + is_backward].dim() == 2
    batch, targets = ("n", ["n", "s!"]) if is_by_row else ("n!", ["s!"])
    operands = [["t!", batch, "c!"], targets, [batch], [batch]]
    if is_backward:
        return make([[batch], *operands], [operands[0]])
    return make(operands, [[batch]])


def _write(target: torch.Tensor, source: torch.Tensor) -> Rule:
    """Return the rule of a write to an input, whole."""
    ndim = target.dim()
    words = [f"{name}!" for name in names(ndim)]
    return make([words, words_of(source, range(source.dim()), "s")], [words])


def _in_order(token: torch.Tensor, op: Any, *args: Any, **kwargs: Any) -> Rule | None:
    """Return the rule of an op with an effect, such as a check that raises: all ranks
    run it, on whole operands. None for an op with results."""
    if _torch.objects.schema_of(op).returns:
        return None
    return whole(token, *args, **kwargs)


# By name: the ops are registered by ``passes``.
ENTER, LEAVE = "fxpar.enter_region.default", "fxpar.leave_region.default"
INDEX = "fxpar.axis_index.default"
REGION_OPS = frozenset((ENTER, LEAVE, COLLECTIVE, INDEX))

# Collectives that need the dims in their argument ``dims`` whole.
_NAMED = ("all_gather", "reduce_scatter", "all_to_all")

Sizes = Mapping[str, int]


def factor(axis: str) -> str:
    """Return the name of the factor that is pinned to an axis."""
    return f"@{axis}"


def pinned(rule: Rule, sizes: Sizes) -> Rule:
    """Return the rule of an op inside regions over these axes."""
    added = {axis: size for axis, size in sizes.items() if axis not in rule.pin}
    if not added:
        return rule
    return replace(
        rule,
        sizes=(*rule.sizes, *((factor(axis), size) for axis, size in added.items())),
        pinned=(*rule.pinned, *((factor(axis), (axis,)) for axis in added)),
    )


def _edge(
    leaves: bool, x: torch.Tensor, spec: str, mesh: str, axes: str, _: int
) -> Rule:
    """Return the rule of a value that enters a region, or leaves it."""
    sizes = _sizes(mesh, axes)
    layout = Spec.parse(spec)
    layout = layout.clear_of([axis for axis in layout.axes if axis not in sizes])
    words = [f"d{d}" for d in range(x.dim())]
    dims = zip(layout.dims, words, strict=True)
    outside = [(*map(factor, split_by), word) for split_by, word in dims]
    factor_sizes = {factor(axis): size for axis, size in sizes.items()}
    for word, n, split_by in zip(words, x.shape, layout.dims, strict=True):
        count = 1 if leaves else math.prod(sizes[axis] for axis in split_by)
        factor_sizes[word] = int(n) // count
    split = [f"~{factor(axis)}" for axis in layout.sharded_axes]
    rule = (
        make([words], [outside], factor_sizes)
        if leaves
        else make([outside], [[*words, *split]], factor_sizes)
    )
    return replace(
        rule,
        reductions=tuple((factor(axis), op) for axis, op in layout.partial),
        passages=(Passage((0,), MOVEMENT),),
        pinned=tuple((factor(axis), (axis,)) for axis in sizes),
        summed=frozenset(factor(axis) for axis in layout.partial_axes),
        evenly=frozenset(rule.factors),
    )


@lru_cache(maxsize=256)
def _sizes(mesh: str, axes: str) -> dict[str, int]:
    """Return the sizes of those axes, joined by ``+``, that have more than one rank."""
    all_sizes = Mesh.parse(mesh).sizes
    return {axis: all_sizes[axis] for axis in axes.split("+") if all_sizes[axis] > 1}


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
    rule = make([words], [words], passages=passages)
    return replace(rule, evenly=frozenset(rule.factors))


def manual_axes(graph: fx.Graph) -> dict[fx.Node, Sizes]:
    """Return nodes inside manual regions and at their edges -> the axes of the regions
    with their sizes. A node is inside if it is computed from a value that entered,
    until it leaves."""
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
    """Return the axes of the regions that a node's results are in, by
    ``manual_axes``."""
    if node not in manual:
        return ()
    left = dict(sizes_of(node)) if str(node.target) == LEAVE else {}
    return tuple(axis for axis in manual[node] if axis not in left)


def sizes_of(node: fx.Node) -> Sizes:
    """Return the axes that an op of a region names itself, with their sizes; none for
    any other op."""
    kind, args = str(node.target), node.args
    if kind in (ENTER, LEAVE):
        return _sizes(args[2], args[3])
    if kind == INDEX:
        return _sizes(args[1], args[0])
    if kind == COLLECTIVE:
        return _sizes(node.args[-2], "+".join(group_axes_of(node)))
    return {}


# Local forms


def emit_dot(
    build: Builder,
    lhs: fx.Node,
    rhs: fx.Node,
    equation: str,
    shapes: Sequence[Sequence[Size]] | None = None,
) -> fx.Node:
    """Append the views and the product; return the result in the equation's order.
    ``shapes``: of the operands, where their fake values do not have them."""
    left, right, out = sides(equation)
    of_left, of_right = shapes or (lhs.meta["val"].shape, rhs.meta["val"].shape)
    size: dict[str, Size] = dict(zip(left, of_left, strict=True))
    size.update(zip(right, of_right, strict=True))
    batch = [f for f in left if f in right and f in out]
    k = [f for f in left if f in right and f not in out]
    m = [f for f in left if f not in right]
    n = [f for f in right if f not in left]
    a = _merge(build, lhs, left, [batch, m, k] if batch else [m, k], size)
    b = _merge(build, rhs, right, [batch, k, n] if batch else [k, n], size)
    target = aten.bmm.default if batch else aten.mm.default
    product = build.call(target, a, b)
    product_factors = [*batch, *m, *n]
    return reorder(build, product, product_factors, out, size)


def reorder(
    build: Builder,
    node: fx.Node,
    factors: Sequence[str],
    target_factors: Sequence[str],
    size: Mapping[str, Size],
) -> fx.Node:
    """Return a product viewed as its factors, permuted to ``target_factors``."""
    shape = [size[f] for f in factors]
    if list(node.meta["val"].shape) != value_of(shape):
        node = build.reshape(node, shape)
    if list(factors) != list(target_factors):
        node = build.call(
            aten.permute.default, node, [factors.index(f) for f in target_factors]
        )
    return node


def _merge(
    build: Builder,
    node: fx.Node,
    words: list[str],
    groups: list[list[str]],
    size: Mapping[str, Size],
) -> fx.Node:
    """Return ``node`` with dims ``words`` as one dim per group, groups in the given
    order."""
    place = {f: i for i, group in enumerate(groups) for f in group}
    runs = [list(run) for _, run in itertools.groupby(words, key=lambda f: place[f])]
    filled = [group for group in groups if group]
    if sorted(runs) != sorted(filled):
        order = [words.index(f) for group in groups for f in group]
        if order != list(range(len(order))):
            node = build.call(aten.permute.default, node, order)
        runs = filled
    shape = [build.product(size[f] for f in run) for run in runs]
    if list(node.meta["val"].shape) != value_of(shape):
        node = build.reshape(node, shape)
    order = [runs.index(group) for group in filled]
    if order != list(range(len(order))):
        node = build.call(aten.permute.default, node, order)
    if len(filled) < len(groups):
        full = [build.product(size[f] for f in group) for group in groups]
        node = build.reshape(node, full)
    return node


def _local_shift(
    call: LocalCall, x: fx.Node, dim: int, by: int, fill: float | None = None
) -> fx.Node:
    axes, size = call.operands[0].dims[dim], x.meta["val"].shape[dim]
    shifted = reads.rows(call, x, axes, dim, by, by + size, fill)
    if shifted is x:
        return call.build.copied(x)
    return shifted


def _local_sum_turns(call: LocalCall, x: fx.Node, dim: int, turns: int) -> fx.Node:
    """Return the sum over as many turns as a shard may reach into, with the shard's
    rows padded to their places in these turns."""
    build, axes = call.build, call.operands[0].dims[dim]
    shape, (all_rows, n) = (
        list(call.operand_shape(0)),
        (s[dim] for s in (call.shapes[0], call.result_shape())),
    )
    if build.mesh.count(axes) > 1:
        most = x.meta["val"].shape[dim]
        even = shard_sizes.is_even(all_rows, build.mesh, axes) and most % n == 0
        turns = most // n if even else min(turns, -(-most // n) + 1)
        if not even:
            start = build.own_start(all_rows, axes)
            before = build.compute(operator.mod, start, n)
            after = build.compute(operator.add, before, shape[dim])
            after = build.compute(operator.sub, turns * n, after)
            x = build.pad_dim(x, dim, before, after)
    shape[dim : dim + 1] = [turns, n]
    parts = build.call(aten.reshape.default, x, shape)
    return build.call(aten.sum.dim_IntList, parts, [dim])


def _local_interleave(call: LocalCall, parts: Sequence[fx.Node], dim: int) -> fx.Node:
    """Return the interleaved rows of a dim that all ranks have whole: the parts are
    stacked next to one another, viewed as one dim, and rows that the last parts lack
    are cut off."""
    build, shape = call.build, list(call.local_shape())
    rows, missing = [], 0
    for i, x in enumerate(parts):
        if call.operand_shape(i)[dim] != call.operand_shape(0)[dim]:
            missing += 1
            x = build.pad_dim(x, dim, 0, 1)
        rows.append(build.call(aten.unsqueeze.default, x, dim + 1))
    stacked = build.call(aten.cat.default, rows, dim + 1)
    shape[dim] += missing
    whole = build.call(aten.reshape.default, stacked, shape)
    if not missing:
        return whole
    cut = build.call(aten.slice.Tensor, whole, dim, 0, shape[dim] - missing)
    return call.build.contiguous(cut)


def _local_random(call: LocalCall, *args: Any) -> fx.Node:
    """Return random numbers for the shard, by global index: equal to one device's
    numbers."""
    *head, size, starts = args
    axes = call.results[0].dims
    local = list(call.local_shape())
    offsets = [
        _slice_start(call, start, a, n) if a else start
        for start, a, n in zip(starts, axes, call.result_shape(), strict=True)
    ]
    if head and isinstance(head[0], (list, tuple)):  # fxpar::random: size comes first
        head = [local, *head[1:]]
    else:  # fxpar::randint: low, high, size, seed
        head = [*head[:2], local, *head[3:]]
    return call.build.call(call.node.target, *head, size, offsets)


def _slice_start(call: LocalCall, start: Any, axes: Sequence[str], rows: int) -> Any:
    """Return where the slices over ``axes`` begin, of a dim of ``rows`` that begins at
    ``start``: a number, or the offset of a dim that other axes split already."""
    build = call.build
    if not isinstance(start, fx.Node):
        return build.own_start(rows, axes, start)
    if start.target is not rank_ints.offset or rows % build.mesh.count(axes):
        raise PlanError(f"{call.node.name} is cut into unequal shards")
    _, before, stride, base = value_of(start.args)
    if stride != rows:
        raise PlanError(f"{call.node.name} is cut across shards of {stride}")
    return build.offset((*before, *axes), rows // build.mesh.count(axes), base)


def _local_collective(
    call: LocalCall,
    x: fx.Node,
    kind: str,
    dims: Sequence[int],
    op: str,
    _: str,
    axes: str,
) -> fx.Node:
    step_args = (tuple(dims),) if kind == "permute" else dims
    args = (*step_args, op) if op else step_args
    node = collective_nodes.NODES[kind]
    return collective_nodes.step(call.build, node, x, *args, tuple(axes.split("+")))


def _local_axis_index(call: LocalCall, axis: str, _: str) -> fx.Node:
    place = call.build.offset((axis,), 1)
    return call.build.call(aten.full.default, [], place, dtype=torch.int64)


_EDGE: dict[str, Any] = {
    "local": lambda call, x, *_: call.build.contiguous(x),
    "facts": "replaced",
}

ROWS = {
    # Made by passes after planning.
    **rows("fxpar::accumulate", None, facts="alone over_first"),
    **rows(
        "fxpar::accumulate_product",
        None,
        product=1,
        equation="m k, k n -> m n",
        facts="over_first",
    ),
    **rows("fxpar::grouped_mm fxpar::grouped_outer", None, product=0),
    **rows("higher_order::with_effects", _in_order),
    **rows("copy_", _write),
    **rows(
        "fxpar::dot",
        lambda lhs, rhs, equation: equation,
        linear="0|1",
        local=lambda call, lhs, rhs, equation: emit_dot(
            call.build, lhs, rhs, equation, [call.operand_shape(i) for i in range(2)]
        ),
        facts="replaced",
    ),
    **rows("fxpar::seeds", "-> n!"),
    **rows(
        "fxpar::random fxpar::randint",
        _random,
        local=_local_random,
        work="draw",
        facts="random",
    ),
    **rows("fxpar::orthogonal", "m! n! -> m! n!"),
    **rows(
        "fxpar::constrain fxpar::mean_over_ranks",
        broadcast,
        movement="0",
        local=lambda call, x, _: x,
        facts="replaced",
    ),
    **rows(
        "fxpar::with_gradient_of",
        broadcast,
        local=lambda call, x, _: x,
        facts="replaced",
    ),
    **rows("fxpar::shift", _shift, local=_local_shift, facts="replaced"),
    **rows(
        "fxpar::sum_turns",
        # Each rank sums its own rows, so the result is partial over the dim's axes.
        lambda x, dim, _: make([w := words_of(x)], [[*w[:dim], "_", *w[dim + 1 :]]]),
        linear="0",
        local=_local_sum_turns,
        facts="replaced",
    ),
    **rows("fxpar::ctc", partial(_ctc, False)),
    **rows("fxpar::ctc_backward", partial(_ctc, True), linear="0"),
    **rows(
        "fxpar::interleave",
        _interleave,
        movement="0",
        local=_local_interleave,
        facts="replaced copies moves",
    ),
    **rows("fxpar::enter_region", partial(_edge, False), **_EDGE),
    **rows("fxpar::leave_region", partial(_edge, True), **_EDGE),
    **rows("fxpar::collective", _collective, local=_local_collective, facts="replaced"),
    **rows("fxpar::axis_index", "->", local=_local_axis_index, facts="replaced"),
}
