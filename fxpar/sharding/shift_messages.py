"""What ranks send one another inside an op: for ``fxpar::shift`` along a dim that is
split, and for a collective of a manual region.

In: an op, its strategy, a mesh. Out: ``Sent``: for each permute the axes, how many
shards on the rows come from, and which rows of a shard. One rank's rows come from one
shard or two; those of its own need no message.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fxpar.sharding.cost.collectives import along
from fxpar.sharding.factors import Axes, Strategy, operand_spec
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Op
from fxpar.sharding.rules.manual import COLLECTIVE, group_axes_of

NAME = "fxpar.shift.default"


def moved_rows(op: Op) -> tuple[int, int] | None:
    """(dim, by how many rows) of a shift; None of any other op."""
    if str(op.target) != NAME:
        return None
    _, dim, by = op.node.args[:3]
    return dim, by


def exchanged(op: Op) -> tuple[str, Axes] | None:
    """(kind, axes) of a collective of a manual region; None of any other op."""
    if str(op.target) != COLLECTIVE:
        return None
    return op.node.args[1], group_axes_of(op.node)


def messages_of(op: Op) -> tuple[Any, ...] | None:
    """What tells ops of one rule apart that send each other something else."""
    return moved_rows(op) or exchanged(op)


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
    """How long these permutes take, or the collective that an op is."""
    found = exchanged(op)
    if found is not None:
        value, spec = op.node.args[0].meta["val"], operand_spec(op.rule, strategy, 0)
        shape = spec.local_shape(mesh, [int(n) for n in value.shape])
        nbytes = float(math.prod(shape) * value.dtype.itemsize)
        return along(found[0], mesh, mesh.ordered(found[1])).seconds(nbytes)
    return sum(
        along("permute", mesh, axes).seconds(float(nbytes))
        for axes, nbytes in sent(op, strategy, mesh)
    )
