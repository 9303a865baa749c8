"""Gives a rank the rows of other ranks that its shard of a result needs.

One of three transports brings them, as ``shift_messages`` prices them: permutes, for
rows around equal shards, from as many shards away as necessary, the same on all ranks;
an exchange (``Exchange``), for any other rows, of which each rank sends exactly those
that another needs; a gather of a summary of each shard. Rows beyond the ends of a dim
are a constant, or dropped. Where several dims are split the corners come with the rows
of the later dims.
In: a local call and its tensors. Out: a tensor with the rows of its halos or windows
(``with_halo_rows``), or with summands for such rows added to the rows of their owners
(``add_halo_rows``), the transpose of the former; the results of an op that moves rows
(``moved``); the rows of all shards (``gathered``).
Never: sends rows of a dim that is not split.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpar._torch.symbols import Inexpressible
from fxpar.graph import collective_nodes, size_nodes
from fxpar.graph.builder import Builder, Size
from fxpar.sharding import shard_sizes
from fxpar.sharding.factors import Axes, RowMoves, RowWindow
from fxpar.sharding.op_table import each
from fxpar.sharding.ops.local_call import LocalCall
from fxpar.sharding.row_moves import Exchange, turn_of
from fxpar.sharding.shift_messages import exchange_of as exchange_of_moves
from fxpar.sharding.shift_messages import (
    exchange_of_window,
    halo_of,
    is_by_permutes,
    pieces,
)

aten = torch.ops.aten

# In the meta of a node that fills rows beyond the ends: (axes, shards on, constant).
_FILLED = "fxpar_filled"


def axes_of(call: LocalCall, position: int, dim: int) -> Axes:
    """Return the axes that split a dim of one of a call's tensors, operands then
    results."""
    return (*call.operands, *call.results)[position].dims[dim]


def is_split(call: LocalCall, position: int, dim: int) -> bool:
    """Return whether ranks hold different rows of a dim."""
    return call.build.mesh.count(axes_of(call, position, dim)) > 1


def halos_of(call: LocalCall, position: int) -> list[tuple[int, int, int]]:
    """Return (dim, rows before a shard, rows after it) of the halos of one of a call's
    tensors, of dims that are split."""
    read = _read(call, position)
    return [(w.dim, *halo) for w, halo in read if halo is not None and any(halo)]


def windows_of(call: LocalCall, position: int) -> list[RowWindow]:
    """Return the windows of one of a call's tensors, of dims that are split, except
    those that are halos."""
    return [window for window, halo in _read(call, position) if halo is None]


def _read(
    call: LocalCall, position: int
) -> list[tuple[RowWindow, tuple[int, int] | None]]:
    """Return the windows of one of a call's tensors, of dims that are split, with their
    halos."""
    mesh = call.build.mesh
    return [
        (window, halo_of(window, axes_of(call, position, window.dim), mesh))
        for window in call.rule.windows
        if window.position == position and is_split(call, position, window.dim)
    ]


def exchange_of(
    call: LocalCall, window: RowWindow, fill: bool | int | float = 0
) -> Exchange:
    """Return how ranks exchange the rows of a window; rows of a result are added."""
    adds = window.position >= len(call.operands)
    axes = axes_of(call, window.position, window.dim)
    return exchange_of_window(window, axes, adds=adds, fill=fill)


def is_exchange(call: LocalCall) -> bool:
    """Return whether an op moves rows between ranks by exchanges, not by permutes."""
    exchanges = (_exchange_of_moves(call, moves) for moves in call.rule.moves)
    target, mesh = call.node.target, call.build.mesh
    return any(x.axes and not is_by_permutes(target, x, mesh) for x in exchanges)


def _exchange_of_moves(call: LocalCall, moves: RowMoves) -> Exchange:
    return exchange_of_moves(moves, call.operands, call.results, call.build.mesh)


def moved(call: LocalCall, operands: Sequence[fx.Node]) -> Any:
    """Return the results of a call that moves rows, a tuple if there are several:
    operands are joined, ranks exchange rows, and the received rows are split into the
    results, each contiguous; several dims are done one after the other. Raises
    Inexpressible for rows of a dim of open size."""
    values = list(operands)
    for moves in call.rule.moves:
        if not all(isinstance(s[moves.dim], int) for s in call.shapes):
            raise Inexpressible("rows are moved along a dim whose size is dynamic")
        values = _moved(call, values, _exchange_of_moves(call, moves))
    several = not isinstance(call.node.meta["val"], torch.Tensor)
    return tuple(values) if several else values[0]


def _moved(
    call: LocalCall, operands: Sequence[fx.Node], exchange: Exchange
) -> list[fx.Node]:
    build, moves, dim = call.build, exchange.moves, exchange.moves.dim
    x = operands[0]
    if len(operands) > 1:
        x = build.call(aten.cat.default, list(operands), dim)
    moved = collective_nodes.exchange_step(build, x, exchange)
    if moves.turns > 1:
        return [_repeated(call, moved, exchange)]
    if len(moves.targets) == 1:
        return [moved]
    out, start = [], 0
    for n, split in zip(moves.targets, exchange.split_targets, strict=True):
        rows = build.own_size(n, exchange.axes) if split else n
        end = build.compute(operator.add, start, rows)
        out.append(copied_rows(build, moved, dim, start, end))
        start = end
    return out


def copied_rows(
    build: Builder, x: fx.Node, dim: int, start: Size, end: Size
) -> fx.Node:
    """Return a contiguous copy of rows ``[start, end)`` of a local tensor."""
    return build.copied(build.call(aten.slice.Tensor, x, dim, start, end))


def _repeated(call: LocalCall, x: fx.Node, exchange: Exchange) -> fx.Node:
    """Return this rank's rows of a result that repeats, from its first turn ``x``."""
    build, dim, (n,) = call.build, exchange.moves.dim, exchange.moves.targets
    (split,) = exchange.split_targets
    axes = exchange.axes if split else ()
    turns = -(-shard_sizes.largest(n, build.mesh, axes) // turn_of(exchange.moves))
    if turns == 1:
        return x
    repeats = [turns if d == dim else 1 for d in range(x.meta["val"].dim())]
    x = build.call(aten.repeat.default, x, repeats)
    return copied_rows(build, x, dim, 0, build.own_size(n, axes))


def gathered(call: LocalCall, x: fx.Node, dim: int, axes: Axes) -> fx.Node:
    """Return the rows of all shards, in order, given this rank's; equally many of each
    shard."""
    split, shape = list(call.operands[0].dims), list(call.shapes[0])
    shape[dim] = call.build.mesh.count(axes) * x.meta["val"].shape[dim]
    before = tuple(split)
    split[dim] = ()
    cut = collective_nodes.Cut(tuple(shape), before, tuple(split), (dim,))
    step = collective_nodes.all_gather
    return collective_nodes.step(call.build, step, x, dim, axes, cut=cut)


def with_halo_rows(
    call: LocalCall, x: fx.Node, position: int, fill: bool | int | float = 0
) -> fx.Node:
    """Return ``x``, a shard of the tensor at ``position``, with the rows of its halos;
    a window of rows replaces the shard's rows."""
    for dim, before, after in halos_of(call, position):
        axes, end = axes_of(call, position, dim), _size(x, dim) + after
        x = rows(call, x, axes, dim, -before, end, fill)
    for window in windows_of(call, position):
        x = _exchanged(call, x, exchange_of(call, window, fill))
    return x


def window_shape(call: LocalCall, shape: Sequence[Size], position: int) -> list[Size]:
    """Return a shape with the rows of the windows of the tensor at ``position``."""
    out = list(shape)
    for window in windows_of(call, position):
        out[window.dim] = call.build.window_rows(exchange_of(call, window))
    return out


def rows_read(
    call: LocalCall, window: RowWindow, own: Size
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Return (numbers of this rank's ``own`` rows of the tensor that reads a window's
    rows, the rows of the whole dim that each reads, their places among those that the
    rank has), the latter two [own, span]. A row beyond the dim has the place of the
    last one before it; a spare row of a rank without rows may have any place."""
    build, reach = call.build, window.reach
    device = call.node.all_input_nodes[0].meta["val"].device
    axes = axes_of(call, window.position, window.dim)
    i = build.iota(own, device, start=build.own_start(window.count, axes))
    i = build.call(aten.clamp_max.default, i, window.count - 1)
    first = build.call(aten.mul.Tensor, i, reach.step)
    first = build.call(aten.add.Tensor, first, reach.first)
    first = build.call(aten.div.Tensor_mode, first, reach.of, rounding_mode="floor")
    first = build.call(aten.unsqueeze.default, first, 1)
    rows = build.call(aten.add.Tensor, first, build.iota(reach.span, device))
    places = build.call(aten.clamp.default, rows, 0, window.rows - 1)
    if is_split(call, window.position, window.dim):
        exchange = exchange_of(call, window)
        last = build.compute(operator.sub, build.window_rows(exchange), 1)
        places = build.call(aten.sub.Tensor, places, build.window_start(exchange))
        places = build.call(aten.clamp.default, places, 0, last)
    return i, rows, places


def _exchanged(call: LocalCall, x: fx.Node, exchange: Exchange) -> fx.Node:
    args = exchange.text, exchange.axes
    present = _present_call(x, collective_nodes.move_rows, x, *args)
    return present or collective_nodes.exchange_step(call.build, x, exchange)


def add_halo_rows(call: LocalCall, x: fx.Node, position: int) -> fx.Node:
    """Return the shard of the tensor at ``position``, given summands ``x`` for the
    shard with the rows of its halos, or for its window."""
    for window in reversed(windows_of(call, position)):
        x = _exchanged(call, x, exchange_of(call, window))
    for halo in reversed(halos_of(call, position)):
        x = _add_halo(call, x, axes_of(call, position, halo[0]), *halo)
    return x


def rows(
    call: LocalCall,
    x: fx.Node,
    axes: Axes,
    dim: int,
    start: int,
    end: int,
    fill: bool | int | float | None,
) -> fx.Node:
    """Return rows ``[start, end)`` of a dim, counted from the begin of this rank's
    shard ``x``: beyond the ends the rows of the other end, or the constant ``fill``."""
    read = list(pieces(_size(x, dim), start, end))
    cuts = [cut(call, x, dim, piece.start, piece.end) for piece in read]
    parts = _all_sent(call, cuts, axes, [piece.further for piece in read])
    if fill is not None:
        parts = [
            _fill_beyond(call, part, axes, piece.further, fill)
            if piece.further
            else part
            for part, piece in zip(parts, read, strict=True)
        ]
    return (
        parts[0] if len(parts) == 1 else call.build.call(aten.cat.default, parts, dim)
    )


def _all_sent(
    call: LocalCall, parts: Sequence[fx.Node], axes: Axes, further: Sequence[int]
) -> list[fx.Node]:
    """Return for each part the same part of the rank whose shard is ``further`` shards
    on. All permutes start before the result of one is read, so that none waits for
    another."""
    shards = call.build.mesh.count(axes)
    return [
        _rows_of_rank(call, part, axes, by) if by % shards else part
        for part, by in zip(parts, further, strict=True)
    ]


def cut(call: LocalCall, x: fx.Node, dim: int, start: int, end: int) -> fx.Node:
    """Return rows of a local tensor; the tensor itself if these are all."""
    if start == 0 and end == _size(x, dim):
        return x
    args = size_nodes.as_nodes(x.graph, (x, dim, start, end))
    present = _present_call(x, aten.slice.Tensor, *args)
    return present or call.build.call(aten.slice.Tensor, *args)


def _present_call(x: fx.Node, *call: Any) -> fx.Node | None:
    """Return the node of a call on ``x`` if it exists: a backward reads the rows around
    a shard that the forward received."""
    return next((user for user in x.users if (user.target, *user.args) == call), None)


def _add_halo(
    call: LocalCall, x: fx.Node, axes: Axes, dim: int, before: int, after: int
) -> fx.Node:
    build, size = call.build, _size(x, dim) - before - after
    own = cut(call, x, dim, before, before + size)
    around, cuts, first = [], [], 0
    for piece in pieces(size, -before, size + after):
        end = first + piece.end - piece.start
        if piece.further:
            around.append(piece)
            cuts.append(cut(call, x, dim, first, end))
        first = end
    parts = _all_sent(call, cuts, axes, [-piece.further for piece in around])
    for piece, part in zip(around, parts, strict=True):
        part = _fill_beyond(call, part, axes, -piece.further, 0)
        # Padded with zeros and added: writing rows into the shard would make a kernel
        # in which each piece recomputes the pieces before it.
        part = build.pad_dim(part, dim, piece.start, size - piece.end)
        own = build.call(aten.add.Tensor, own, part)
    return own


def _rows_of_rank(call: LocalCall, x: fx.Node, axes: Axes, further: int) -> fx.Node:
    """Return ``x`` of the rank whose shard is ``further`` shards on."""
    mesh = call.build.mesh
    args = _sources(call, axes, further), mesh.ordered(axes)
    present = _present_call(x, collective_nodes.permute, x, *args)
    return present or collective_nodes.step(
        call.build, collective_nodes.permute, x, *args
    )


def _sources(call: LocalCall, axes: Sequence[str], further: int) -> tuple[int, ...]:
    """Return for each member of a group, in mesh order, the member whose shard is
    ``further`` shards on."""
    mesh = call.build.mesh
    shard = [mesh.index(rank, axes) for rank in mesh.group(0, axes)]
    holder = {s: i for i, s in enumerate(shard)}
    return tuple(holder[(s + further) % len(shard)] for s in shard)


def _fill_beyond(
    call: LocalCall, x: fx.Node, axes: Axes, further: int, fill: Any
) -> Any:
    """Return ``x`` where there is a shard ``further`` shards on, else the constant: the
    node of an earlier call, if a backward reads rows that the forward joined."""
    key, build, shards = (axes, further, fill), call.build, call.build.mesh.count(axes)
    for user in x.users:
        if user.target is aten.where.self and user.meta.get(_FILLED) == key:
            return user
    before = further < 0
    test = aten.ge.Scalar if before else aten.lt.Scalar
    bound = -further if before else shards - further
    index = build.call(
        aten.full.default,
        [],
        build.offset(axes, 1),
        dtype=torch.int64,
        device=x.meta["val"].device,
    )
    filled = call.where(build.call(test, index, bound), x, fill)
    filled.meta[_FILLED] = key
    return filled


def _size(x: fx.Node, dim: int) -> int:
    """Return the rows of a local tensor; the symbol of a size that is open."""
    return x.meta["val"].shape[dim]


def split_dims(call: LocalCall, position: int, k: int) -> list[bool]:
    """Return for each of the last ``k`` dims of one of a call's tensors whether it is
    split."""
    first = len(call.shapes[position]) - k
    return [is_split(call, position, first + d) for d in range(k)]


def unsplit_padding(padding: int | Sequence[int], split: Sequence[bool]) -> list[int]:
    """Return the padding of dims that are not split, and 0 for split dims."""
    amounts = each(padding, len(split))
    return [0 if cut else n for n, cut in zip(amounts, split, strict=True)]


def halo_shaped(call: LocalCall, x: fx.Node, position: int) -> fx.Node:
    """Return a tensor of the shape of ``x`` with the rows of another tensor's halos;
    the values of the added rows are not used."""
    halos = halos_of(call, position)
    if windows_of(call, position):
        shape = window_shape(call, call.operand_shape(1), position)
        for dim, *around in halos:
            shape[dim] = call.build.compute(operator.add, shape[dim], sum(around))
        return call.full(shape, 0, x)
    amounts = [0] * (2 * len(call.shapes[position]))
    for dim, *around in halos:
        at = len(amounts) - 2 * (dim + 1)
        amounts[at : at + 2] = around
    return call.build.pad_ends(x, amounts)
