"""Computes the messages that ranks send inside an op: rows beyond a shard of a dim that
the op reads, and collectives of a manual region.

Along a split dim ``fxpar::shift`` reads rows further on, and an op with halos reads the
rows around the shard, or adds to them (``Rule.windows``). ``pieces`` says how many
shards away rows are, and which rows of that shard they are; a rank's own need no
message. Rows beyond the end come from the other end of the dim: an op that needs a
constant there overwrites them.
In: an op, its strategy, a mesh. Out: for each permute its axes and bytes, seconds.
Never: changes a graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from fxpar.sharding import row_moves, shard_sizes
from fxpar.sharding.cost.collectives import along
from fxpar.sharding.factors import Axes, RowMoves, RowPiece, RowWindow
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import COLLECTIVE, group_axes_of
from fxpar.sharding.program import Op, tensors_at
from fxpar.sharding.row_moves import Exchange
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy, specs

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


def sent(op: Op, strategy: Strategy, mesh: Mesh) -> list[tuple[Axes, int]]:
    """Return (axes, bytes on one rank) of each permute in an op; none if it sends no
    rows, or the dims are not split."""
    shifted = moved_rows(op)
    if shifted is not None:
        dim, by = shifted
        spec = specs(op.rule, strategy)[0]
        exchange = exchange_of(op.rule.moves[0], [spec], [spec], mesh)
        if not is_by_permutes(op.target, exchange, mesh):
            return []
        return _permutes(_shard(op, strategy, mesh, 0), dim, by, by, mesh)
    out, shard_of = [], cache(partial(_shard, op, strategy, mesh))
    for window in op.rule.windows:
        shard, dim = shard_of(window.position), window.dim
        halo = halo_of(window, shard.spec.dims[dim], mesh)
        if halo is not None:
            out += _permutes(shard, dim, -halo[0], halo[1], mesh)
    return out


@dataclass
class _Shard:
    """Is the shard of one of an op's tensors."""

    # The spec of the whole.
    spec: Spec
    # Rows of each dim; those that come from other ranks are added.
    shape: list[int]
    # Bytes of an element.
    itemsize: int

    def bytes_of(self, dim: int, rows: int) -> int:
        """Return the bytes of rows of a dim."""
        others = self.shape[:dim] + self.shape[dim + 1 :]
        return math.prod(others) * rows * self.itemsize


def _shard(op: Op, strategy: Strategy, mesh: Mesh, position: int) -> _Shard:
    """Return the shard of one of an op's tensors, operands then results."""
    spec = specs(op.rule, strategy)[position]
    value = tensors_at(op.node)[position]
    shape = spec.local_shape(mesh, [int(k) for k in value.shape])
    return _Shard(spec, list(shape), value.dtype.itemsize)


def _permutes(
    shard: _Shard, dim: int, start: int, end: int, mesh: Mesh
) -> list[tuple[Axes, int]]:
    """Return the permutes of rows from ``start``, counted from the shard's first row,
    to ``end``, counted from its last, and enter the rows into the shard: permutes along
    further dims include them."""
    axes, size = shard.spec.dims[dim], shard.shape[dim]
    shards = mesh.count(axes)
    if shards == 1 or not size:
        return []
    out = [
        (mesh.ordered(axes), shard.bytes_of(dim, piece.end - piece.start))
        for piece in pieces(size, start, size + end)
        if piece.further % shards
    ]
    shard.shape[dim] = size + end - start
    return out


def exchange_of(
    moves: RowMoves, operands: Sequence[Spec], results: Sequence[Spec], mesh: Mesh
) -> Exchange:
    """Return the exchange of rows that an op moves, for operands and results with these
    specs."""
    split = [
        [mesh.count(spec.dims[moves.dim]) > 1 for spec in specs]
        for specs in (operands, results)
    ]
    layouts = (spec.dims[moves.dim] for spec in (*operands, *results))
    axes = next((axes for axes in layouts if mesh.count(axes) > 1), ())
    return Exchange(moves, axes, *map(tuple, split))


def halo_of(window: RowWindow, axes: Axes, mesh: Mesh) -> tuple[int, int] | None:
    """Return the rows (before, after) a shard that its windows reach, which permutes
    send, where all shards are equal; None of other windows."""
    ends = window.count, window.rows  # with shares only one of them may be even
    is_even = all(shard_sizes.is_even(n, mesh, axes) for n in ends)
    return window.halo if is_even else None


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


def is_by_permutes(target: Any, exchange: Exchange, mesh: Mesh) -> bool:
    """Return whether ranks exchange rows by permutes of pieces (``sent``), as for a
    shift of equal shards."""
    (rows, *_), axes = exchange.moves.sources, exchange.axes
    return str(target) == NAME and shard_sizes.is_even(rows, mesh, axes)


def exchanges(op: Op, strategy: Strategy, mesh: Mesh) -> list[tuple[Exchange, float]]:
    """Return the exchanges of rows of an op, one dim after the other, each with the
    bytes of a row."""
    out: list[tuple[Exchange, float]] = []
    if not (op.rule.moves or op.rule.windows):
        return out
    n, shard_of = len(op.operands), cache(partial(_shard, op, strategy, mesh))
    tensor_specs = specs(op.rule, strategy)
    operands, results = tensor_specs[:n], tensor_specs[n:]
    for moves in op.rule.moves:
        shard, dim = shard_of(0), moves.dim
        exchange = exchange_of(moves, operands, results, mesh)
        if exchange.axes and not is_by_permutes(op.target, exchange, mesh):
            out.append((exchange, float(shard.bytes_of(dim, 1))))
        axes = results[0].dims[dim]
        shard.shape[dim] = shard_sizes.largest(moves.targets[0], mesh, axes)
    for window in op.rule.windows:
        shard, dim = shard_of(window.position), window.dim
        axes = shard.spec.dims[dim]
        if mesh.count(axes) > 1 and halo_of(window, axes, mesh) is None:
            exchange = exchange_of_window(window, axes, adds=window.position >= n)
            out.append((exchange, float(shard.bytes_of(dim, 1))))
            shard.shape[dim] = row_moves.most_rows(exchange, mesh)
    return out


def gathers(op: Op, strategy: Strategy, mesh: Mesh) -> Iterator[tuple[Axes, int]]:
    """Yield (axes, bytes on one rank) of each gather in an op."""
    for mark in op.rule.gathered:
        axes = strategy.axes_of.get(mark.factor, ())
        if mesh.count(axes) == 1:
            continue
        shard = _shard(op, strategy, mesh, mark.position)
        dims = op.rule.tensors[mark.position]
        shape = [
            min(rows, mark.rows) if mark.factor in dim else rows
            for rows, dim in zip(shard.shape, dims, strict=True)
        ]
        itemsize = mark.itemsize or shard.itemsize
        yield mesh.ordered(axes), math.prod(shape) * itemsize


def messages(
    op: Op, strategy: Strategy, mesh: Mesh
) -> Iterator[tuple[str, Axes, float]]:
    """Yield (kind, axes, bytes on one rank before it) of each message in an op, or of
    the collective that it is."""
    collective = exchanged(op)
    if collective is not None:
        kind, axes = collective
        shard = _shard(op, strategy, mesh, 0)
        yield kind, mesh.ordered(axes), math.prod(shard.shape) * shard.itemsize
        return
    for axes, nbytes in sent(op, strategy, mesh):
        yield "permute", axes, nbytes
    for axes, nbytes in gathers(op, strategy, mesh):
        yield "all_gather", axes, nbytes
    for exchange, row in exchanges(op, strategy, mesh):
        kind, rows = row_moves.message(exchange, mesh, row)
        if rows:
            yield kind, mesh.ordered(exchange.axes), rows


def seconds(op: Op, strategy: Strategy, mesh: Mesh) -> float:
    """Return the seconds of these messages."""
    return sum(
        along(kind, mesh, axes).seconds(float(nbytes))
        for kind, axes, nbytes in messages(op, strategy, mesh)
    )
