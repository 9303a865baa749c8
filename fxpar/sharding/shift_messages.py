"""What ranks send one another for ``fxpar::shift`` along a dim that is split.

In: an op, its strategy, a mesh. Out: ``Sent``: for each permute the axes, how many
shards on the rows come from, and which rows of a shard. One rank's rows come from one
shard or two; those of its own need no message.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxpar.sharding.cost.collectives import along
from fxpar.sharding.factors import Axes, Strategy, operand_spec
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Op

NAME = "fxpar.shift.default"


def moved_rows(op: Op) -> tuple[int, int] | None:
    """(dim, by how many rows) of a shift; None of any other op."""
    if str(op.target) != NAME:
        return None
    _, dim, by = op.node.args[:3]
    return dim, by


@dataclass(frozen=True)
class Piece:
    """Rows ``[start, end)`` of the shard that is so many ``further`` on, around the
    end; 0 is the rank's own."""

    further: int
    start: int
    end: int


def pieces(rows: int, shards: int, by: int) -> tuple[Piece, ...]:
    """What a rank's rows consist of, in order, where a dim of so many rows is cut into
    equal shards and shifted."""
    size = rows // shards
    on, start = divmod(by, size)
    found = (Piece(on % shards, start, size), Piece((on + 1) % shards, 0, start))
    return tuple(piece for piece in found if piece.end > piece.start)


def sent(op: Op, strategy: Strategy, mesh: Mesh) -> tuple[tuple[Axes, int], ...]:
    """(axes, bytes on one rank) of each permute that an op takes; none if it is no
    shift, or its dim is not split."""
    found = moved_rows(op)
    if found is None:
        return ()
    dim, by = found
    shape = [int(n) for n in op.node.meta["val"].shape]
    spec = operand_spec(op.rule, strategy, 0)
    axes = spec.dims[dim]
    shards = mesh.count(axes)
    if shards == 1:
        return ()
    itemsize = op.node.meta["val"].dtype.itemsize
    row = math.prod(spec.local_shape(mesh, shape)) * itemsize * shards // shape[dim]
    return tuple(
        (mesh.ordered(axes), row * (piece.end - piece.start))
        for piece in pieces(shape[dim], shards, by)
        if piece.further
    )


def seconds(op: Op, strategy: Strategy, mesh: Mesh) -> float:
    """How long these permutes take."""
    return sum(
        along("permute", mesh, axes).seconds(float(nbytes))
        for axes, nbytes in sent(op, strategy, mesh)
    )
