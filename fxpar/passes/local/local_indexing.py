"""Local forms of lookups and updates by index, where the indexed dim is split.

A rank holds rows ``[offset, offset + n)`` of the dim. A lookup reads its own rows and
gives zero elsewhere, so results add up. An update that accumulates adds zero for rows
that lie elsewhere; any other update writes those to a spare row, cut off afterwards.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Size
from fxpar.passes.local.local_call import LocalCall, Localizer

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
    signed: bool = False,
    result: bool = False,
) -> Part | None:
    """How ``index`` meets dim ``dim`` of operand 0 (or of the result); None if that dim
    is not split. ``signed``: an index may be negative and count from the end."""
    spec = (call.results if result else call.operands)[0]
    shape = call.result_shape() if result else call.shapes[0]
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
    low = build.call(aten.ge.Scalar, place, 0)
    high = build.call(aten.lt.Scalar, place, n)
    inside = build.call(aten.bitwise_and.Tensor, low, high)
    empty = call.is_empty(spec, shape, dim)
    return Part(call, dim % len(shape), n, place, inside, empty)


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


# One index along one dim


def _embedding(
    call: LocalCall, weight: fx.Node, index: fx.Node, *settings: Any
) -> fx.Node:
    part = part_of(call, 0, index)
    if part is None:
        return call.same(weight, index, *settings)
    rows = call.same(part.rows_of(weight), part.read(), *settings)
    return call.where(trailing(call, part.inside, 1), rows, 0)


def _embedding_backward(
    call: LocalCall,
    grad: fx.Node,
    index: fx.Node,
    rows: int,
    padding: int,
    by_count: bool,
) -> fx.Node:
    part = part_of(call, 0, index, result=True)
    if part is None:
        return call.same(grad, index, rows, padding, by_count)
    # The spare row takes the padding as well, so that no local row is taken for it.
    n, own = part.n, call.build.call(aten.ne.Scalar, index, padding)
    own = call.build.call(aten.bitwise_and.Tensor, own, part.inside)
    places = call.where(own, part.place, n)
    rows_and_spare = call.build.compute(operator.add, n, 1)
    return without_spares(
        call, call.same(grad, places, rows_and_spare, n, by_count), [part]
    )


def _gather(
    call: LocalCall, x: fx.Node, dim: int, index: fx.Node, **settings: Any
) -> fx.Node:
    part = part_of(call, dim, index)
    if part is None:
        return call.same(x, dim, index, **settings)
    elements = call.same(part.rows_of(x), dim, part.read(), **settings)
    return call.where(part.inside, elements, 0)


def _index_select(call: LocalCall, x: fx.Node, dim: int, index: fx.Node) -> fx.Node:
    part = part_of(call, dim, index)
    if part is None:
        return call.same(x, dim, index)
    ndim = x.meta["val"].dim()
    inside = trailing(call, part.inside, ndim - 1 - dim % ndim)
    return call.where(inside, call.same(part.rows_of(x), dim, part.read()), 0)


def _one_per_row(
    call: LocalCall, x: fx.Node, dim: int, index: fx.Node, src: Any
) -> bool:
    """Whether each row of ``x`` along ``dim`` gets exactly one update."""
    want = list(x.meta["val"].shape)
    want[dim] = 1
    shapes = [list(t.meta["val"].shape) for t in (index, src) if isinstance(t, fx.Node)]
    return all(shape == want for shape in shapes)


def _index_mask(call: LocalCall, x: fx.Node, dim: int, index: fx.Node) -> fx.Node:
    """Where ``x`` is hit by an index of size 1 along ``dim``: pointwise, unlike a
    scatter, so it fuses with what comes before and after."""
    like, build = index.meta["val"], call.build
    rows, axes = call.shapes[0][dim], call.operands[0].dims[dim]
    iota = build.call(
        prims.iota.default,
        build.own_size(rows, axes),
        start=build.own_start(rows, axes),
        step=1,
        dtype=like.dtype,
        device=like.device,
        requires_grad=False,
    )
    rows = trailing(call, iota, x.meta["val"].dim() - 1 - dim % x.meta["val"].dim())
    return build.call(aten.eq.Tensor, rows, index)


def _scatter(
    call: LocalCall,
    x: fx.Node,
    dim: int,
    index: fx.Node,
    src: Any,
    *settings: Any,
    **options: Any,
) -> fx.Node:
    if not call.operands[0].dims[dim]:
        return call.same(x, dim, index, src, *settings, **options)
    if not settings and not options and _one_per_row(call, x, dim, index, src):
        hit = _index_mask(call, x, dim, index)
        if not isinstance(src, fx.Node):
            like = x.meta["val"]
            src = call.build.call(
                aten.full.default, [], src, dtype=like.dtype, device=like.device
            )
        return call.build.call(aten.where.self, hit, src, x)
    part = part_of(call, dim, index)
    assert part is not None
    spare = with_spares(call, x, [dim % x.meta["val"].dim()])
    put = call.same(spare, dim, part.store(), src, *settings, **options)
    return without_spares(call, put, [part])


def _scatter_add(
    call: LocalCall, x: fx.Node, dim: int, index: fx.Node, src: fx.Node
) -> fx.Node:
    if not call.operands[0].dims[dim]:
        return call.same(x, dim, index, src)
    if _one_per_row(call, x, dim, index, src):
        update = call.where(_index_mask(call, x, dim, index), src, 0)
        return call.build.call(aten.add.Tensor, x, update)
    part = part_of(call, dim, index)
    assert part is not None
    if index.meta["val"].shape != src.meta["val"].shape or part.empty:
        return _scatter(call, x, dim, index, src)
    return call.same(x, dim, part.fold(), call.where(part.inside, src, 0))


def _index_add(
    call: LocalCall,
    x: fx.Node,
    dim: int,
    index: fx.Node,
    source: fx.Node,
    **settings: Any,
) -> fx.Node:
    part = part_of(call, dim, index)
    if part is None:
        return call.same(x, dim, index, source, **settings)
    ndim = source.meta["val"].dim()
    inside = part.inside
    if part.empty:
        spare = with_spares(call, x, [part.dim])
        return without_spares(
            call, call.same(spare, dim, part.store(), source, **settings), [part]
        )
    if ndim:
        inside = trailing(call, inside, ndim - 1 - dim % ndim)
    source = call.where(inside, source, 0)
    return call.same(x, dim, part.fold(), source, **settings)


def _index_store(
    call: LocalCall,
    x: fx.Node,
    dim: int,
    index: fx.Node,
    *settings: Any,
    **options: Any,
) -> fx.Node:
    part = part_of(call, dim, index, signed=True)
    if part is None:
        return call.same(x, dim, index, *settings, **options)
    spare = with_spares(call, x, [dim % x.meta["val"].dim()])
    return without_spares(
        call, call.same(spare, dim, part.store(), *settings, **options), [part]
    )


def _masked_scatter_backward(
    call: LocalCall, grad: fx.Node, mask: fx.Node, shape: Sequence[int]
) -> fx.Node:
    """The mask counts as a whole; this rank's elements go to their places, others to a
    spare one past the end."""
    spec, build = call.operands[0], call.build
    if not spec.sharded_axes:
        return call.same(grad, mask, shape)
    n, whole = math.prod(shape), list(call.shapes[0])
    flat = build.call(aten.expand.default, mask, whole)
    flat = build.call(aten.reshape.default, flat, [-1])
    place = build.call(aten.cumsum.default, flat, 0)
    place = build.call(aten.sub.Tensor, place, 1)
    low = build.call(aten.lt.Scalar, place, n)
    selected = build.call(aten.bitwise_and.Tensor, flat, low)
    place = build.call(aten.reshape.default, call.where(selected, place, n), whole)
    for dim, axes in enumerate(spec.dims):
        if axes:
            start = build.own_start(whole[dim], axes)
            end = build.own_end(whole[dim], axes)
            place = build.call(aten.slice.Tensor, place, dim, start, end)
    like = grad.meta["val"]
    zeros = build.call(
        aten.full.default, [n + 1], 0, dtype=like.dtype, device=like.device
    )
    scattered = build.call(aten.index_put.default, zeros, [place], grad)
    scattered = build.call(aten.slice.Tensor, scattered, 0, 0, n)
    return build.call(aten.reshape.default, scattered, list(shape))


LOCAL: dict[Any, Localizer] = {
    aten.masked_scatter_backward.default: _masked_scatter_backward,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.gather.default: _gather,
    aten.index_select.default: _index_select,
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
    aten.scatter.reduce: _scatter,
    aten.scatter.value_reduce: _scatter,
    aten.scatter_reduce.two: _scatter,
    aten.scatter_add.default: _scatter_add,
    aten.index_add.default: _index_add,
    aten.index_copy.default: _index_store,
    aten.index_fill.int_Scalar: _index_store,
    aten.index_fill.int_Tensor: _index_store,
    aten.index_reduce.default: _index_store,
}
