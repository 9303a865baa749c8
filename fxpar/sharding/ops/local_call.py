"""Holds one op call while it is made local, the argument of every local form, and maps
an index into a split dim to the rows of this rank.

A rank holds rows ``[offset, offset + n)`` of the dim. A lookup reads its own rows and
gives zero elsewhere, so results are partial. An update that accumulates adds zero for
rows that other ranks hold; any other update writes those to a spare row, which is cut
off afterwards (``Part``).
In: a call with its rule, specs and global shapes. Out: shapes on this rank, and nodes
of the local graph.
Never: chooses a spec, or communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.graph.builder import Builder, Size
from fxpar.sharding import shard_sizes
from fxpar.sharding.factors import Rule
from fxpar.sharding.spec import Spec

aten = torch.ops.aten


@dataclass(frozen=True)
class LocalCall:
    """Holds one op call while it is made local."""

    # Adds nodes to the local graph.
    build: Builder
    # The call in the global graph.
    node: fx.Node
    # The op's rule, with sizes.
    rule: Rule
    # Specs of the operands, in order of the rule.
    operands: tuple[Spec, ...]
    # Specs of the results.
    results: tuple[Spec, ...]
    # Global shapes of the operands, then of the results.
    shapes: tuple[tuple[int, ...], ...]
    # The least number of rows of a dim that a rank is made to hold.
    least: int = 0

    def result_shape(self, i: int = 0) -> tuple[int, ...]:
        """Return the global shape of result ``i``."""
        return self.shapes[len(self.operands) + i]

    def local_shape(self, i: int = 0) -> tuple[Size, ...]:
        """Return the shape this rank holds of result ``i``."""
        return self._own(self.results[i], self.result_shape(i))

    def operand_shape(self, i: int) -> tuple[Size, ...]:
        """Return the shape this rank holds of operand ``i``."""
        return self._own(self.operands[i], self.shapes[i])

    def shape_at(self, position: int) -> tuple[Size, ...]:
        """Return the shape this rank holds of one of the tensors, operands then
        results."""
        late = position - len(self.operands)
        return self.operand_shape(position) if late < 0 else self.local_shape(late)

    def _own(self, spec: Spec, shape: tuple[int, ...]) -> tuple[Size, ...]:
        pairs = zip(shape, spec.dims, strict=True)
        own = tuple(self.build.own_size(size, axes) for size, axes in pairs)
        if not self.least:
            return own
        dims = self.empty_dims(spec, shape)
        most = partial(self.build.compute, max)
        return tuple(most(n, self.least) if d in dims else n for d, n in enumerate(own))

    def empty_dims(self, spec: Spec, shape: tuple[int, ...]) -> list[int]:
        """Return the dims of which some rank holds nothing."""
        return [d for d in range(len(shape)) if self.is_empty(spec, shape, d)]

    def is_empty(self, spec: Spec, shape: tuple[int, ...], dim: int) -> bool:
        """Return whether some rank holds no row of a dim that has rows."""
        axes = spec.dims[dim]
        least = shard_sizes.smallest(shape[dim], self.build.mesh, axes)
        return least == 0 < shape[dim]

    def same(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Return the op itself on these arguments."""
        return self.build.call(self.node.target, *args, **kwargs)

    def full(
        self, shape: Sequence[Size], value: bool | int | float, like: fx.Node
    ) -> fx.Node:
        """Return a tensor of one value, with the dtype and device of ``like``."""
        x = like.meta["val"]
        options = {"dtype": x.dtype, "device": x.device}
        return self.build.call(aten.full.default, list(shape), value, **options)

    def where(self, condition: fx.Node, x: fx.Node, other: bool | int | float) -> Any:
        """Return ``x`` where the condition holds, else the scalar ``other``."""
        return self.build.where(condition, x, other)


# (call, *local args, **local kwargs) -> node
Localizer = Callable[..., Any]


def form_of_feature(call: LocalCall, *_: Any, **__: Any) -> Any:
    """Raise PlanError: the local form of the op is one that a feature adds to the
    table, and without it numbers would be wrong."""
    raise PlanError(
        f"{call.node.target} has no local form yet: a feature of fxpar adds it",
        fix="import fxpar.features before making a graph local",
    )


prims = torch.ops.prims


@dataclass(frozen=True)
class Part:
    """Is an index into this rank's rows of a dim."""

    # The lookup or update.
    call: LocalCall
    # The dim that is indexed; never negative.
    dim: int
    # Rows of the dim that this rank holds.
    n: Size
    # The index, counted from the rank's first row.
    place: fx.Node
    # Whether the index is one of the rank's rows.
    inside: fx.Node
    # Whether some rank has no rows.
    empty: bool

    def rows_of(self, x: fx.Node) -> fx.Node:
        """Return the rows that are looked up, at least one."""
        if not self.empty:
            return x
        least = self.call.build.compute(max, self.n, 1)
        missing = self.call.build.missing(least, self.n)
        return self.call.build.pad_dim(x, self.dim, 0, missing)

    def read(self) -> fx.Node:
        """Return the place, or for other ranks' rows one that may be read."""
        return self.call.where(self.inside, self.place, 0)

    def fold(self) -> fx.Node:
        """Return the place, or for other ranks' rows one to add zero to: different
        ones, so that atomic adds of zero do not all queue for the same row."""
        return self.call.build.call(aten.remainder.Scalar, self.place, self.n)

    def store(self) -> fx.Node:
        """Return the place, or for other ranks' rows the spare row past the end."""
        return self.call.where(self.inside, self.place, self.n)

    def put(self, x: fx.Node, dim: int, *args: Any, **options: Any) -> fx.Node:
        """Return the result of the update ``(x, dim, index, *args)``; the spare row
        takes other ranks' rows."""
        spare = with_spares(self.call, x, [self.dim])
        result = self.call.same(spare, dim, self.store(), *args, **options)
        return self.call.build.first_rows(result, [(self.dim, self.n)])


def part_of(
    call: LocalCall,
    dim: int,
    index: fx.Node,
    *,
    operand: int = 0,
    signed: bool = False,
    result: bool = False,
) -> Part | None:
    """Return the part of dim ``dim`` of an operand (or of the result) that ``index``
    meets; None if that dim is not split. ``signed``: an index may be negative and count
    from the end."""
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
    """Return which places are among the first ``n``."""
    low = call.build.call(aten.ge.Scalar, place, 0)
    high = call.build.call(aten.lt.Scalar, place, n)
    return call.build.call(aten.bitwise_and.Tensor, low, high)


def trailing(call: LocalCall, x: fx.Node, dims: int) -> fx.Node:
    """Return ``x`` with ``dims`` dims of size 1 appended."""
    for _ in range(dims):
        x = call.build.call(aten.unsqueeze.default, x, -1)
    return x


def rows_at(call: LocalCall, x: fx.Node, dim: int, places: fx.Node) -> fx.Node:
    """Return rows of a dim at these places by ``index``, which Inductor takes:
    ``index_select`` is decomposed before."""
    return call.build.call(aten.index.Tensor, x, [*[None] * dim, places])


def added_at(
    call: LocalCall, rows: fx.Node, shape: Sequence[Size], dim: int, places: fx.Node
) -> fx.Node:
    """Return zeros of this shape with the rows added at these places of a dim."""
    zeros, indices = call.full(shape, 0, rows), [*[None] * dim, places]
    return call.build.call(aten.index_put.default, zeros, indices, rows, True)


def with_spares(call: LocalCall, x: fx.Node, dims: Sequence[int]) -> fx.Node:
    """Return ``x`` with a spare row at the end of each dim."""
    ndim = x.meta["val"].dim()
    pad = [n for d in reversed(range(ndim)) for n in (0, int(d in dims))]
    return call.build.pad_ends(x, pad)
