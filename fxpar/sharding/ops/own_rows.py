"""An index into a dim that is split: which rows this rank has, and what it reads or
writes for those it has not.

A rank holds rows ``[offset, offset + n)`` of the dim. A lookup reads its own rows and
gives zero elsewhere, so results add up. An update that accumulates adds zero for rows
that other ranks hold; any other update writes those to a spare row, which is cut off
afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxpar.graph.builder import Size
from fxpar.sharding.ops.local_call import LocalCall

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True)
class Part:
    """An index into this rank's rows of a dim."""

    # The lookup or update.
    call: LocalCall
    # That is indexed; never negative.
    dim: int
    # Rows of the dim that this rank holds.
    n: Size
    # It counted from the first of them.
    place: fx.Node
    # Whether it falls on one of them.
    inside: fx.Node
    # Whether some rank has no rows.
    empty: bool

    def rows_of(self, x: fx.Node) -> fx.Node:
        """What is looked up, one row at least."""
        if not self.empty:
            return x
        least = self.call.build.compute(max, self.n, 1)
        padding = self.call.build.missing(least, self.n)
        pad = [0] * (2 * (x.meta["val"].dim() - self.dim) - 1) + [padding]
        return self.call.build.pad_ends(x, pad)

    def read(self) -> fx.Node:
        """The place, or a row that may be read."""
        return self.call.where(self.inside, self.place, 0)

    def fold(self) -> fx.Node:
        """The place, or a row to add zero to: any, lest all atomic adds of zero queue
        for the same one."""
        return self.call.build.call(aten.remainder.Scalar, self.place, self.n)

    def store(self) -> fx.Node:
        """The place, or the spare row past the end."""
        return self.call.where(self.inside, self.place, self.n)


def part_of(
    call: LocalCall,
    dim: int,
    index: fx.Node,
    *,
    operand: int = 0,
    signed: bool = False,
    result: bool = False,
) -> Part | None:
    """How ``index`` meets dim ``dim`` of an operand (or of the result); None if that
    dim is not split. ``signed``: an index may be negative and count from the end."""
    spec = call.results[0] if result else call.operands[operand]
    shape = call.result_shape() if result else call.shapes[operand]
    axes = spec.dims[dim]
    if not axes:
        return None
    build, n = call.build, call.build.own_size(shape[dim], axes)
    if signed:
        negative = build.call(aten.lt.Scalar, index, 0)
        from_end = build.call(aten.add.Tensor, index, shape[dim])
        index = build.call(aten.where.self, negative, from_end, index)
    start = build.own_start(shape[dim], axes)
    place = build.call(aten.sub.Tensor, index, start)
    inside = is_within(call, place, n)
    empty = call.is_empty(spec, shape, dim)
    return Part(call, dim % len(shape), n, place, inside, empty)


def is_within(call: LocalCall, place: fx.Node, n: Size) -> fx.Node:
    """Which places are among the first ``n``."""
    low = call.build.call(aten.ge.Scalar, place, 0)
    high = call.build.call(aten.lt.Scalar, place, n)
    return call.build.call(aten.bitwise_and.Tensor, low, high)


def trailing(call: LocalCall, x: fx.Node, dims: int) -> fx.Node:
    """``x`` with ``dims`` dims of size 1 appended."""
    for _ in range(dims):
        x = call.build.call(aten.unsqueeze.default, x, -1)
    return x


def rows_at(call: LocalCall, x: fx.Node, dim: int, places: fx.Node) -> fx.Node:
    """Rows of a dim at these places, as Inductor takes it: ``index_select`` is gone by
    then."""
    return call.build.call(aten.index.Tensor, x, [*[None] * dim, places])


def with_spares(call: LocalCall, x: fx.Node, dims: Sequence[int]) -> fx.Node:
    """``x`` with a spare row at the end of each dim."""
    ndim = x.meta["val"].dim()
    pad = [n for d in reversed(range(ndim)) for n in (0, int(d in dims))]
    return call.build.pad_ends(x, pad)


def without_spares(call: LocalCall, x: fx.Node, parts: Sequence[Part]) -> fx.Node:
    """``x`` without the spare row of each part."""
    for part in parts:
        x = call.build.call(aten.slice.Tensor, x, part.dim, 0, part.n)
    return x
