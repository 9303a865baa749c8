"""Lowers the steps of reshards (``sharding.reshard``) to local ops and collectives.

``LOWERINGS`` has for each kind of step how it is lowered, its functional collectives,
how they are read back as steps, and their emulation. ``lower_graph`` lowers a graph.

In: a local graph with the steps of ``collective_nodes``. Out: the same graph with each
of them lowered in its place: ``_c10d_functional`` collectives and messages, each with
its wait, ``fxpar::permute``, and ATen data movement with static sizes. The graph stays
the same on every rank of a stage; where a rank's position matters it enters through
``Builder.offset`` and, where shards are uneven, ``own_size`` and ``own_start``. Never
merges or reorders collectives, or lets the padding of uneven shards reach a result.

Collectives join and split along dim 0, and the members of a group are in mesh order. A
step on another dim, or on axes in another order, is brought into that form by moving
data before or after it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import PlanError, ScheduleError
from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder, Size
from fxpar.graph.collective_nodes import OWN_SHAPE, Axes, Cut, is_step, local_shape
from fxpar.graph.custom_ops import group_name
from fxpar.passes import moved_rows
from fxpar.passes.simulate import emulate_collectives
from fxpar.sharding import row_moves, shard_sizes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.reshard.steps import MASKED
from fxpar.sharding.row_moves import Exchange
from fxpar.sharding.spec import Spec

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ours = torch.ops.fxpar

# bools are stored as 0 and 1 in a byte: sum and product would leave that range.
_BOOL = {"sum": "max", "product": "min"}


def _resized(shape: Sequence[Size], dim: int, size: Size) -> tuple[Size, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def restrided(build: Builder, x: fx.Node, like: torch.Tensor) -> fx.Node:
    """Return ``x`` with its dims in memory in the order of the dims of ``like``, with
    which views of it were traced."""
    strides = _torch.symbols.hint_shape(like.stride())
    order = sorted(range(like.dim()), key=lambda d: (-strides[d], d))
    if x.meta["val"].permute(order).is_contiguous():
        return x
    permuted = build.call(aten.permute.default, x, order)
    copy = build.copied(permuted)
    inverse = [order.index(d) for d in range(len(order))]
    return build.call(aten.permute.default, copy, inverse)


def _to_front(
    build: Builder, x: fx.Node, dim: int, axes: Sequence[str]
) -> tuple[fx.Node, tuple[Size, ...]]:
    """Return ``x`` as one block per member of the group, joined along dim 0, and the
    shape of a block; block i is the part of ``dim`` that member i is to get."""
    mesh, shape, m = build.mesh, local_shape(x), len(axes)
    order = mesh.ordered(axes)
    k = mesh.count(axes)
    block = _resized(shape, dim, build.compute(operator.floordiv, shape[dim], k))
    if dim == 0 and order == tuple(axes):
        return build.contiguous(x), block
    sizes = [mesh.axis_size(axis) for axis in axes]
    split = [*shape[:dim], *sizes, *block[dim:]]
    group_dims = [dim + axes.index(axis) for axis in order]
    other_dims = [*range(dim), *range(dim + m, len(split))]
    x = build.call(aten.view.default, x, split)
    x = build.contiguous(build.call(aten.permute.default, x, group_dims + other_dims))
    merged_shape = [build.product((block[0], k)), *block[1:]]
    return build.call(aten.view.default, x, merged_shape), block


def _from_front(
    build: Builder, x: fx.Node, block: Sequence[Size], dim: int, axes: Sequence[str]
) -> fx.Node:
    """Return the members' blocks joined along ``dim``; the inverse of ``_to_front``."""
    mesh, m = build.mesh, len(axes)
    order = mesh.ordered(axes)
    if dim == 0 and order == tuple(axes):
        return x
    sizes = [mesh.axis_size(axis) for axis in order]
    axis_dims = [order.index(axis) for axis in axes]
    dims = range(m, m + len(block))
    x = build.call(aten.view.default, x, [*sizes, *block])
    x = build.call(aten.permute.default, x, [*dims[:dim], *axis_dims, *dims[dim:]])
    rows = build.product((block[dim], mesh.count(axes)))
    shape = _resized(block, dim, rows)
    return build.call(aten.view.default, build.contiguous(x), list(shape))


def _slice(build: Builder, x: fx.Node, dim: int, axes: Axes) -> fx.Node:
    size = x.meta["val"].shape[dim] // build.mesh.count(axes)
    start = build.offset(axes, size)
    end = build.offset(axes, size, size)
    return build.call(aten.slice.Tensor, x, dim, start, end)


def _mask(build: Builder, x: fx.Node, op: str, axes: Axes) -> fx.Node:
    if op not in MASKED:
        return x  # of equal values, the largest, smallest and mean are that value

    def scalar(value: fx.Node | int, dtype: torch.dtype) -> fx.Node:
        device = x.meta["val"].device
        return build.call(aten.full.default, [], value, dtype=dtype, device=device)

    index = scalar(build.offset(axes, 1), torch.int64)
    identity = scalar(int(op == "product"), x.meta["val"].dtype)
    first = build.call(aten.eq.Scalar, index, 0)
    return build.call(aten.where.self, first, x, identity)


def _reduction(x: fx.Node, op: str) -> str:
    if x.meta["val"].dtype == torch.bool:
        return _BOOL.get(op, op)
    # Not every backend knows avg; a division is fused with what follows.
    return "sum" if op == "avg" else op


def is_divided_first(x: fx.Node) -> bool:
    """Return whether the summands of a mean are divided and not their sum, which may
    overflow float16."""
    return x.meta["val"].dtype == torch.float16


def divided(build: Builder, x: fx.Node, count: int) -> fx.Node:
    """Return ``x`` divided by a number of ranks, in its dtype; integers are rounded
    towards zero."""
    dtype = x.meta["val"].dtype
    if dtype.is_floating_point or dtype.is_complex:
        return build.call(aten.div.Scalar, x, count)
    return build.call(aten.div.Scalar_mode, x, count, rounding_mode="trunc")


def _reduced(
    build: Builder, x: fx.Node, op: str, axes: Axes, target: Any, *args: Any
) -> fx.Node:
    """Return ``x`` reduced by the collective ``target``, which is called with the kind
    of reduction, ``args`` and the group."""
    kind, group = _reduction(x, op), group_name(build.mesh, axes)
    count, early = build.mesh.count(axes), is_divided_first(x)
    if op == "avg" and early:
        x = divided(build, x, count)
    x = build.wait(build.call(target, build.contiguous(x), kind, *args, group))
    return divided(build, x, count) if op == "avg" and not early else x


def _all_reduce(build: Builder, x: fx.Node, op: str, axes: Axes) -> fx.Node:
    return _reduced(build, x, op, axes, c10d.all_reduce.default)


def _reduce_scatter(
    build: Builder, x: fx.Node, dim: int, op: str, axes: Axes
) -> fx.Node:
    x, _ = _to_front(build, x, dim, axes)
    k = build.mesh.count(axes)
    return _reduced(build, x, op, axes, c10d.reduce_scatter_tensor.default, k)


def _all_gather(build: Builder, x: fx.Node, dim: int, axes: Axes) -> fx.Node:
    mesh, block = build.mesh, local_shape(x)
    k, group = mesh.count(axes), group_name(mesh, axes)
    x = build.contiguous(x)
    x = build.wait(build.call(c10d.all_gather_into_tensor.default, x, k, group))
    return _from_front(build, x, block, dim, axes)


def _all_to_all(
    build: Builder, x: fx.Node, source_dim: int, target_dim: int, axes: Axes
) -> fx.Node:
    mesh = build.mesh
    x, block = _to_front(build, x, target_dim, axes)
    splits = [block[0]] * mesh.count(axes)
    group = group_name(mesh, axes)
    x = build.call(c10d.all_to_all_single.default, x, splits, splits, group)
    return _from_front(build, build.wait(x), block, source_dim, axes)


def _permute(
    build: Builder, x: fx.Node, sources: tuple[int, ...], axes: Axes
) -> fx.Node:
    group = group_name(build.mesh, axes)
    x = build.contiguous(x)
    return build.call(ours.permute.default, x, list(sources), group)


def _move_rows(build: Builder, x: fx.Node, text: str, axes: Axes) -> fx.Node:
    """Return the rows after an exchange: computed locally where no row changes ranks
    and all ranks do the same, else by ``fxpar::move_rows``."""
    exchange, mesh = Exchange.parse(text), build.mesh
    moves = exchange.moves
    if moved_rows.is_local(exchange, mesh):
        count = mesh.count(axes)
        return moved_rows.exchanged(build.call, [x] * count, exchange, mesh)[0]
    own = [
        build.own_size(n, exchange.axes) if split else n
        for n, split in zip(moves.targets, exchange.split_targets, strict=True)
    ]
    if moves.turns > 1:
        own = [build.compute(min, n, row_moves.turn_of(moves)) for n in own]
    if moves.reach is not None and not moves.adds:
        own = [build.window_rows(exchange)]
    rows = reduce(partial(build.compute, operator.add), own)
    group = group_name(mesh, axes)
    args = x, moves.dim, rows, text, str(mesh), group
    return build.call(ours.move_rows.default, *args)


def _emulate_moves(
    members: emulate_collectives.Ranks,
    dim: int,
    rows: int,
    text: str,
    mesh: str,
    *_: Any,
) -> emulate_collectives.Ranks:
    exchange = Exchange.parse(text)
    run, on = moved_rows.run_op, Mesh.parse(mesh)
    return moved_rows.exchanged(run, members, exchange, on)


def _send(build: Builder, x: fx.Node, peer: int, tag: int, axes: Axes) -> fx.Node:
    group = group_name(build.mesh, axes)
    x = build.contiguous(x)
    return build.wait(build.call(c10d.isend.default, x, peer, tag, group))


def _recv(build: Builder, x: fx.Node, peer: int, tag: int, axes: Axes) -> fx.Node:
    group = group_name(build.mesh, axes)
    return build.wait(build.call(c10d.irecv.default, x, peer, tag, group))


@dataclass(frozen=True)
class Lowering:
    """Holds how one kind of step is lowered, read back and emulated."""

    # (builder, x, the step's other arguments) -> the node of the result.
    lower: Callable[..., fx.Node]
    # The functional collectives it may become; ``lower`` makes the first.
    ops: tuple[Any, ...] = ()
    # The same for several tensors at once.
    coalesced: tuple[Any, ...] = ()
    # Node of ``ops[0]`` -> the arguments of the step between ``x`` and the axes.
    arguments: Callable[[fx.Node], tuple[Any, ...]] | None = None
    # (the members' operands, other arguments) -> the members' results.
    emulate: Callable[..., emulate_collectives.Ranks] | None = None

    def emulations(self) -> dict[Any, Callable[..., emulate_collectives.Ranks]]:
        """Return the emulation of each op, for ``lockstep``; messages have none."""
        if self.emulate is None:
            return {}
        several = emulate_collectives.coalesced(self.emulate)
        return dict.fromkeys(self.ops, self.emulate) | dict.fromkeys(
            self.coalesced, several
        )


def _check_even_splits(node: fx.Node) -> tuple[int, int]:
    give: Any = node.args[1]
    take: Any = node.args[2]
    if len({*give, *take}) != 1:
        raise ScheduleError(
            f"{node.name} exchanges pieces of unequal size",
            fix="exchange pieces of one size",
        )
    return 0, 0


# Kind in ``collective_nodes.NODES`` -> its lowering.
LOWERINGS: dict[str, Lowering] = {
    "slice": Lowering(_slice),
    "mask": Lowering(_mask),
    "all_reduce": Lowering(
        _all_reduce,
        (c10d.all_reduce.default,),
        (c10d.all_reduce_coalesced.default,),
        lambda node: (node.args[1],),
        emulate_collectives.all_reduce,
    ),
    "reduce_scatter": Lowering(
        _reduce_scatter,
        (c10d.reduce_scatter_tensor.default,),
        (c10d.reduce_scatter_tensor_coalesced.default,),
        lambda node: (0, node.args[1]),
        emulate_collectives.reduce_scatter,
    ),
    "all_gather": Lowering(
        _all_gather,
        (c10d.all_gather_into_tensor.default, ours.all_gather_into_tensor.default),
        (c10d.all_gather_into_tensor_coalesced.default,),
        lambda node: (0,),
        emulate_collectives.all_gather,
    ),
    "all_to_all": Lowering(
        _all_to_all,
        (c10d.all_to_all_single.default,),
        (),
        _check_even_splits,
        emulate_collectives.all_to_all,
    ),
    "permute": Lowering(
        _permute,
        (ours.permute.default,),
        (),
        lambda node: (tuple(node.args[1]),),
        emulate_collectives.permute,
    ),
    "move_rows": Lowering(
        _move_rows,
        (ours.move_rows.default,),
        (),
        lambda node: (node.args[3],),
        _emulate_moves,
    ),
    "send": Lowering(
        _send, (c10d.isend.default,), (), lambda node: tuple(node.args[1:3])
    ),
    "recv": Lowering(
        _recv, (c10d.irecv.default,), (), lambda node: tuple(node.args[1:3])
    ),
}


def lower_graph(graph: fx.Graph, mesh: Mesh, fake_mode: Any) -> fx.Graph:
    """Lower all steps of a graph, in place. A result that anything but one step reads
    is contiguous, so that every view the one-device graph takes of it is legal."""
    build, uneven = Builder(graph, fake_mode, mesh), False
    for node in filter(is_step, list(graph.nodes)):
        lower = LOWERINGS[collective_nodes.kind_of(node)].lower
        cut = collective_nodes.cut_of(node)
        if cut is not None:
            lower, uneven = partial(lower_uneven, lower, node, cut), True
        with build.before(node):
            value = lower(build, *node.args)
            if len(node.users) != 1 or not is_step(next(iter(node.users))):
                value = build.contiguous(value)
        build.replace(node, value)
    if uneven:
        graph.eliminate_dead_code()  # of sizes that nothing needs
    graph.lint()
    return graph


def lower_uneven(
    lower: Callable[..., fx.Node],
    node: fx.Node,
    cut: Cut,
    build: Builder,
    x: fx.Node,
    *args: Any,
) -> fx.Node:
    """Return the result of a step on uneven shards: the dims that it gathers or splits
    are padded to equal shards, and the result is sliced to this rank's rows. Unless an
    axis has shares, only the last shards are short, so all valid rows come first in a
    gathered dim; with shares, each part is sliced out by itself."""
    before, after = (
        [_own_size(build, cut, d, axes) for d, axes in enumerate(dims)]
        for dims in (cut.before, cut.after)
    )
    kind = collective_nodes.kind_of(node)
    ends = enumerate(zip(cut.before, cut.after, strict=True))
    changed = [d for d, (axes, axes_after) in ends if axes != axes_after]
    if kind == "slice":
        return _own_slice(build, x, cut, changed)
    uneven = [d for d in changed if not cut.is_even_in(build.mesh, d)]
    if uneven and (kind == "permute" or any(_is_far(cut, d) for d in uneven)):
        raise PlanError(
            f"{node.name} ({kind}) of {list(cut.shape)} from {Spec.of(cut.before)} to "
            f"{Spec.of(cut.after)} would move parts of shards"
        )
    padded, short = list(before), {}
    joined_dims: dict[int, tuple[Size, list[Size]]] = {}
    for d in uneven:
        axes = collective_nodes.axes_of(node)
        count = build.mesh.count(axes)
        fewer = min(cut.before[d], cut.after[d], key=len)
        gathers = fewer == cut.after[d]
        if shard_sizes.has_shares(build.mesh, axes):
            parts = build.part_sizes(cut.shape[d], fewer, axes[0])
            room = reduce(partial(build.compute, max), parts)
            if gathers:
                joined_dims[d] = room, parts
            else:
                x = _pad_parts(build, x, d, room, parts)
                before[d] = build.product((room, count))
        else:
            # The rows of the largest of ``count`` chunks.
            rows = build.own_size(cut.shape[d], fewer)
            rows = build.compute(operator.add, rows, count - 1)
            room = build.compute(operator.floordiv, rows, count)
        whole = build.product((room, count))
        padded[d], result_rows = (room, whole) if gathers else (whole, room)
        if result_rows != after[d] and d not in joined_dims:
            short[d] = after[d]
    padding = [build.missing(*sizes) for sizes in zip(padded, before, strict=True)]
    x = build.pad(x, padding)
    own_shape, x.meta[OWN_SHAPE] = x.meta.get(OWN_SHAPE), padded
    result = lower(build, x, *args)
    x.meta[OWN_SHAPE] = own_shape
    for d, (room, parts) in joined_dims.items():
        result = _join_parts(build, result, d, room, parts)
    if short:
        # A slice of all rows is contiguous, as on some ranks; on others it is not.
        result = build.copied(build.first_rows(result, short.items()))
    return result


def _own_size(build: Builder, cut: Cut, d: int, axes: Axes) -> Size:
    """Return this rank's number of rows of a dim that is split over axes."""
    if d in cut.even_dims:
        return cut.shape[d] // build.mesh.count(axes)
    return build.own_size(cut.shape[d], axes)


def _is_far(cut: Cut, d: int) -> bool:
    """Return whether a dim changes by anything but one axis at its minor end."""
    shorter, longer = sorted((cut.before[d], cut.after[d]), key=len)
    return longer[:-1] != shorter


def _pad_parts(
    build: Builder, x: fx.Node, d: int, room: Size, parts: Sequence[Size]
) -> fx.Node:
    """Return ``x`` with each part of dim ``d`` padded to ``room`` rows."""
    blocks, start = [], 0
    for size in parts:
        end = build.compute(operator.add, start, size)
        block = build.call(aten.slice.Tensor, x, d, start, end)
        blocks.append(build.pad_dim(block, d, 0, build.missing(room, size)))
        start = end
    return build.call(aten.cat.default, blocks, d)


def _join_parts(
    build: Builder, x: fx.Node, d: int, room: Size, parts: Sequence[Size]
) -> fx.Node:
    """Return ``x`` without the padding of ``_pad_parts``."""
    blocks = []
    for i, size in enumerate(parts):
        start = build.product((room, i)) if i else 0
        end = build.compute(operator.add, start, size)
        blocks.append(build.call(aten.slice.Tensor, x, d, start, end))
    return build.call(aten.cat.default, blocks, d)


def _own_slice(build: Builder, x: fx.Node, cut: Cut, dims: Sequence[int]) -> fx.Node:
    """Return this rank's rows after a slice step, taken from its rows before it."""
    for d in dims:
        rows, sub = cut.shape[d], operator.sub
        first = build.own_start(rows, cut.before[d])
        start = build.compute(sub, build.own_start(rows, cut.after[d]), first)
        end = build.compute(sub, build.own_end(rows, cut.after[d]), first)
        x = build.call(aten.slice.Tensor, x, d, start, end)
    return build.copied(x)
