"""Computes the messages that ranks send inside an op: rows beyond a shard of a dim that
the op reads, and collectives of a manual region.

Along a split dim ``fxpar::shift`` reads rows further on, and an op with halos reads the
rows around the shard, or adds to them (``Rule.halos``). ``pieces`` says how many shards
away rows are, and which rows of that shard they are; a rank's own need no message. Rows
beyond the end come from the other end of the dim: an op that needs a constant there
overwrites them.
In: an op, its strategy, a mesh. Out: for each permute its axes and bytes, seconds.
Never: changes a graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fxpar.sharding import row_moves, shard_sizes
from fxpar.sharding.cost.collectives import along
from fxpar.sharding.factors import Axes, Halo, RowMoves, RowPiece, RowWindow
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import COLLECTIVE, group_axes_of
from fxpar.sharding.op_table import tensors_of
from fxpar.sharding.program import Op, tensor_nodes
from fxpar.sharding.row_moves import Exchange
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy, operand_spec, result_spec

NAME = "fxpar.shift.default"


def moved_rows(op: Op) -> tuple[int, int] | None:
    """Return (dim, number of rows) of a shift; None of any other op."""
    if str(op.target) != NAME:
        return None
    _, dim, by = op.node.args[:3]
    return dim, by


def exchanged(op: Op) -> tuple[str, Axes] | None:
    """Return (kind, axes) of a collective of a manual region; None of any other op."""
    if str(op.target) != COLLECTIVE:
        return None
    return op.node.args[1], group_axes_of(op.node)


def messages_of(op: Op) -> tuple[Any, ...] | None:
    """Return the facts by which ops of one rule differ in their messages."""
    return moved_rows(op) or exchanged(op)


@dataclass(frozen=True)
class Piece:
    """Describes rows of one shard along the dim, the rank's own or another."""

    # How many shards further on, before this one if negative; 0: the rank's own.
    further: int
    # First row, counted from the begin of that shard.
    start: int
    # Position after the last row, counted from the begin of that shard.
    end: int


def pieces(size: int, start: int, end: int) -> tuple[Piece, ...]:
    """Return the pieces of which rows ``[start, end)`` consist, in order; rows are
    counted from the begin of a rank's shard, and all shards have ``size`` rows."""
    out = []
    while start < end:
        # A plain int, also where the size is open.
        further, first = int(start // size), start % size
        last = min(size, first + end - start)
        out.append(Piece(further, first, last))
        start += last - first
    return tuple(out)


def sent(op: Op, strategy: Strategy, mesh: Mesh) -> tuple[tuple[Axes, int], ...]:
    """Return (axes, bytes on one rank) of each permute in an op; none if it sends no
    rows, or the dims are not split."""
    shifted = moved_rows(op)
    if shifted is not None:
        dim, by = shifted
        spec = operand_spec(op.rule, strategy, 0)
        exchange = exchange_of(op.rule.moves[0], [spec], [spec], mesh)
        if not by_permutes(op.target, exchange, mesh):
            return ()
        return _messages(op, 0, [(dim, by, by)], strategy, mesh)
    around: dict[int, list[tuple[int, int, int]]] = {}
    for halo in (*op.rule.halos, *_fitting(op, strategy, mesh)):
        rows = halo.dim, -halo.before, halo.after
        around.setdefault(halo.position, []).append(rows)
    return tuple(
        message
        for position, rows in around.items()
        for message in _messages(op, position, rows, strategy, mesh)
    )


def _fitting(op: Op, strategy: Strategy, mesh: Mesh) -> list[Halo]:
    """Return the windows of an op that are halos."""
    halos = []
    for window in op.rule.windows:
        axes = _spec(op, strategy, window.position).dims[window.dim]
        halo = as_halo(window, axes, mesh)
        if halo is not None:
            halos.append(halo)
    return halos


def _spec(op: Op, strategy: Strategy, position: int) -> Spec:
    """Return the spec of one of an op's tensors, operands then results."""
    late = position - len(op.operands)
    if late < 0:
        return operand_spec(op.rule, strategy, position)
    return result_spec(op.rule, strategy, late)


def _messages(
    op: Op,
    position: int,
    rows: list[tuple[int, int, int]],
    strategy: Strategy,
    mesh: Mesh,
) -> tuple[tuple[Axes, int], ...]:
    """Return the messages for rows of one tensor. ``rows``: (dim, position of the first
    row from the shard's first row, position of the last from the shard's last).
    Messages along one dim include the rows that came along the dims before it."""
    n = len(op.operands)
    spec = _spec(op, strategy, position)
    value = (
        tensors_of(op.node.meta["val"])[position - n]
        if position >= n
        else tensor_nodes(op.node)[position].meta["val"]
    )
    shape = list(spec.local_shape(mesh, [int(k) for k in value.shape]))
    out = []
    for dim, start, end in rows:
        axes, size = spec.dims[dim], shape[dim]
        shards = mesh.count(axes)
        if shards == 1 or not size:
            continue
        row = math.prod(shape) // size * value.dtype.itemsize
        out += [
            (mesh.ordered(axes), row * (piece.end - piece.start))
            for piece in pieces(size, start, size + end)
            if piece.further % shards
        ]
        shape[dim] = size + end - start
    return tuple(out)


def exchange_of(
    moves: RowMoves, operands: Sequence[Spec], results: Sequence[Spec], mesh: Mesh
) -> Exchange:
    """Return the exchange of rows that an op moves, for operands and results with these
    specs."""
    split = [
        [mesh.count(spec.dims[moves.dim]) > 1 for spec in specs]
        for specs in (operands, results)
    ]
    lie = (spec.dims[moves.dim] for spec in (*operands, *results))
    axes = next((axes for axes in lie if mesh.count(axes) > 1), ())
    return Exchange(moves, axes, *map(tuple, split))


def as_halo(window: RowWindow, axes: Axes, mesh: Mesh) -> Halo | None:
    """Return a window as the rows around a shard, which permutes send, where all shards
    are equal; None of other windows."""
    ends = window.count, window.rows  # with shares only one of them may be even
    if window.halo is None or not all(shard_sizes.is_even(n, mesh, axes) for n in ends):
        return None
    return Halo(window.position, window.dim, *window.halo)


def exchange_of_window(
    window: RowWindow, axes: Axes, *, adds: bool, fill: bool | int | float = 0
) -> Exchange:
    """Return the exchange of the rows of a window along a dim that axes split."""
    ends = (window.rows,), (window.count,)
    rows = (RowPiece(0, 0, window.rows),)
    moves = RowMoves(
        window.dim, *(ends[::-1] if adds else ends), rows, fill, window.reach, adds
    )
    return Exchange(moves, axes, (True,), (True,))


def by_permutes(target: Any, exchange: Exchange, mesh: Mesh) -> bool:
    """Return whether ranks exchange rows by permutes of pieces (``sent``), as for a
    shift of equal shards."""
    (rows, *_), axes = exchange.moves.sources, exchange.axes
    return str(target) == NAME and shard_sizes.is_even(rows, mesh, axes)


def exchanges(
    op: Op, strategy: Strategy, mesh: Mesh
) -> tuple[tuple[Exchange, float], ...]:
    """Return the exchanges of rows (``Rule.moves``) of an op, one dim after the other,
    each with the bytes of a row."""
    if not op.rule.moves:
        return ()
    n, out = len(op.operands), []
    operands = [operand_spec(op.rule, strategy, i) for i in range(n)]
    results = [result_spec(op.rule, strategy, i) for i in range(len(op.results))]
    first, before = tensor_nodes(op.node)[0].meta["val"], operands[0]
    shape = list(before.local_shape(mesh, [int(k) for k in first.shape]))
    for moves in op.rule.moves:
        dim, shape[moves.dim] = moves.dim, 1
        exchange = exchange_of(moves, operands, results, mesh)
        row = float(math.prod(shape) * first.dtype.itemsize)
        if exchange.axes and not by_permutes(op.target, exchange, mesh):
            out.append((exchange, row))
        shape[dim] = shard_sizes.largest(moves.targets[0], mesh, results[0].dims[dim])
    return tuple(out)


def _read(op: Op, strategy: Strategy, mesh: Mesh) -> float:
    """Return seconds of the exchanges of windows (``Rule.windows``), one after the
    other."""
    n, total = len(op.operands), 0.0
    shapes: dict[int, list[int]] = {}
    for window in op.rule.windows:
        i, late = window.position, window.position >= n
        spec = _spec(op, strategy, i)
        axes = spec.dims[window.dim]
        if mesh.count(axes) == 1 or as_halo(window, axes, mesh) is not None:
            continue
        value = (
            tensors_of(op.node.meta["val"])[i - n]
            if late
            else tensor_nodes(op.node)[i].meta["val"]
        )
        whole = [int(k) for k in value.shape]
        shape = shapes.setdefault(i, list(spec.local_shape(mesh, whole)))
        exchange = exchange_of_window(window, axes, adds=late)
        shape[window.dim] = 1
        row = math.prod(shape) * value.dtype.itemsize
        total += row_moves.seconds(exchange, mesh, row)
        shape[window.dim] = row_moves.most_rows(exchange, mesh)
    return total


def _gathered(op: Op, strategy: Strategy, mesh: Mesh) -> tuple[tuple[Axes, int], ...]:
    """Return (axes, bytes on one rank) of each gather of rows (``Rule.gathered``)."""
    out = []
    for mark in op.rule.gathered:
        spec = operand_spec(op.rule, strategy, mark.position)
        axes = spec.dims[mark.dim]
        if mesh.count(axes) == 1:
            continue
        value = tensor_nodes(op.node)[mark.position].meta["val"]
        shape = list(spec.local_shape(mesh, [int(k) for k in value.shape]))
        shape[mark.dim] = min(shape[mark.dim], mark.rows)
        itemsize = mark.itemsize or value.dtype.itemsize
        out.append((mesh.ordered(axes), math.prod(shape) * itemsize))
    return tuple(out)


def _weights(op: Op, strategy: Strategy, mesh: Mesh) -> tuple[tuple[Axes, int], ...]:
    """Return (axes, bytes on one rank) of each gather of weights (``Rule.merges``)."""
    out = []
    for merge in op.rule.merges:
        axes = strategy.axes_of.get(merge.factor, ())
        if mesh.count(axes) == 1:
            continue
        i = merge.position - len(op.operands)
        value = tensors_of(op.node.meta["val"])[i]
        spec = result_spec(op.rule, strategy, i)
        shape = spec.local_shape(mesh, [int(k) for k in value.shape])
        out.append((mesh.ordered(axes), math.prod(shape) * value.dtype.itemsize))
    return tuple(out)


def seconds(op: Op, strategy: Strategy, mesh: Mesh) -> float:
    """Return the seconds of these messages, or of the collective that an op is."""
    collective = exchanged(op)
    if collective is not None:
        value, spec = op.node.args[0].meta["val"], operand_spec(op.rule, strategy, 0)
        shape = spec.local_shape(mesh, [int(n) for n in value.shape])
        nbytes = float(math.prod(shape) * value.dtype.itemsize)
        return along(collective[0], mesh, mesh.ordered(collective[1])).seconds(nbytes)
    permutes = sum(
        along("permute", mesh, axes).seconds(float(nbytes))
        for axes, nbytes in sent(op, strategy, mesh)
    )
    gathers = sum(
        along("all_gather", mesh, axes).seconds(float(nbytes))
        for axes, nbytes in (
            *_weights(op, strategy, mesh),
            *_gathered(op, strategy, mesh),
        )
    )
    moves = sum(
        row_moves.seconds(exchange, mesh, row)
        for exchange, row in exchanges(op, strategy, mesh)
    )
    return permutes + gathers + moves + _read(op, strategy, mesh)
