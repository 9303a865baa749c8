"""Local forms of embedding bags, where bags are split or the rows of the table.

A rank that has some of the bags counts them, and where they begin, from its first. Of a
table that is split it sums those rows of each bag that it has, so that results add up,
and of a gradient it keeps those. The further results of a forward go by indices and
bags alone, and so are had of a table of two rows: what counts, and what is left out.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Size
from fxpar.passes.local.local_call import LocalCall, Localizer
from fxpar.passes.local.local_indexing import (
    Part,
    part_of,
    rows_at,
    trailing,
    without_spares,
)
from fxpar.sharding.rules.embedding import MAX

aten = torch.ops.aten


def _first_bag(call: LocalCall, position: int, by: int = 1) -> Size:
    """Where this rank's bags begin, times a number; ``position``: of a tensor that has
    a row for each bag."""
    axes = (*call.operands, *call.results)[position].dims[0]
    start = call.build.own_start(call.shapes[position][0], axes)
    return 0 if start == 0 else call.build.compute(operator.mul, start, by)


def _begins(call: LocalCall, offsets: fx.Node, position: int) -> fx.Node:
    """Where bags begin among this rank's indices."""
    first = _first_bag(call, position, call.rule.size.get("l", 1))
    return _less(call, offsets, first)


def _less(call: LocalCall, x: fx.Node, first: Size) -> fx.Node:
    return x if first == 0 else call.build.call(aten.sub.Tensor, x, first)


def _bag(
    call: LocalCall,
    weight: fx.Node,
    indices: fx.Node,
    offsets: fx.Node,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: fx.Node | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    build, begins, padding = call.build, _begins(call, offsets, 2), padding_idx
    scales, first = per_sample_weights, _first_bag(call, len(call.operands))
    rest = scale_grad_by_freq, mode, sparse, scales, include_last_offset
    is_split = bool(call.operands[0].dims[0])
    if is_split:
        counted = build.call(aten.ne.Scalar, indices, padding)
        like = weight.meta["val"]
        options = {"dtype": like.dtype, "device": like.device}
        table = build.call(aten.full.default, [2, 1], 0, **options)
        read = build.cast(counted, indices.meta["val"].dtype)
        left_out = 0 if padding >= 0 else -1
        results = call.same(table, read, begins, *rest, left_out)
        total = _summed(call, weight, indices, begins, mode, scales, counted)
    else:
        results = call.same(weight, indices, begins, *rest, padding)
    total_or_none, bag_of, *others = (
        build.call(operator.getitem, results, i) for i in range(4)
    )
    if first != 0:
        bag_of = build.call(aten.add.Tensor, bag_of, first)
    return (total if is_split else total_or_none, bag_of, *others)


def _summed(
    call: LocalCall,
    weight: fx.Node,
    indices: fx.Node,
    begins: fx.Node,
    mode: int,
    scales: fx.Node | None,
    counted: fx.Node,
) -> fx.Node:
    """Of each bag the sum of the rows that this rank has, or its share of the mean."""
    build, like = call.build, weight.meta["val"]
    part = part_of(call, 0, indices)
    assert part is not None
    dtype = torch.float32 if like.dtype.itemsize < 4 else like.dtype
    bags, columns = call.local_shape()
    rows = build.cast(rows_at(call, part.rows_of(weight), 0, part.read()), dtype)
    read = build.call(aten.bitwise_and.Tensor, counted, part.inside)
    rows = call.where(trailing(call, read, 1), rows, 0)
    if scales is not None:
        scale = trailing(call, build.cast(scales, dtype), 1)
        rows = build.call(aten.mul.Tensor, rows, scale)
    bag = build.iota(call.operand_shape(1)[0], like.device)
    begins = build.cast(begins, torch.int64)
    bag = build.call(aten.searchsorted.Tensor, begins, bag, right=True)
    bag = build.call(aten.sub.Tensor, bag, 1)
    # Of offsets that say where the last bag ends there is one more.
    bag = build.call(aten.clamp.default, bag, 0, _before(call, bags))
    options = {"dtype": dtype, "device": like.device}
    zeros = build.call(aten.full.default, [bags, columns], 0, **options)
    total = build.call(aten.index_put.default, zeros, [bag], rows, True)
    if mode:
        empty = build.call(aten.full.default, [bags, 1], 0, **options)
        ones = trailing(call, build.cast(counted, dtype), 1)
        count = build.call(aten.index_put.default, empty, [bag], ones, True)
        count = build.call(aten.clamp.default, count, 1)
        total = build.call(aten.div.Tensor, total, count)
    return build.cast(total, like.dtype)


def _before(call: LocalCall, n: Size) -> Size:
    return call.build.compute(operator.sub, n, 1)


def _backward(
    call: LocalCall,
    grad: fx.Node,
    indices: fx.Node,
    offsets: fx.Node,
    bag_of: fx.Node,
    sizes: fx.Node,
    where: fx.Node,
    rows: Any,
    by_count: bool,
    mode: int,
    sparse: bool,
    scales: fx.Node | None,
    padding: int = -1,
) -> fx.Node:
    begins = _begins(call, offsets, 2)
    bag_of = _less(call, bag_of, _first_bag(call, 0))
    rest = by_count, mode, sparse, scales
    part = part_of(call, 0, indices, result=True)
    if part is None:
        args = grad, indices, begins, bag_of, sizes, where, rows
        return call.same(*args, *rest, padding)
    places = _own_places(call, indices, padding)
    if mode == MAX:
        where = _own_places(call, where, padding)
    more = call.build.compute(operator.add, part.n, 1)
    args = grad, places, begins, bag_of, sizes, where, more
    return without_spares(call, call.same(*args, *rest, part.n), [part])


def _own_places(call: LocalCall, x: fx.Node, padding: int) -> fx.Node:
    """Rows among those that this rank makes; others, and what counts for none, are the
    spare row behind them."""
    part = part_of(call, 0, x, result=True)
    assert part is not None
    own = call.build.call(aten.ne.Scalar, x, padding)
    own = call.build.call(aten.bitwise_and.Tensor, own, part.inside)
    return call.where(own, part.place, part.n)


def _dense_backward(
    call: LocalCall,
    grad: fx.Node,
    indices: fx.Node,
    bag_of: fx.Node,
    sizes: fx.Node,
    where: fx.Node,
    rows: Any,
    by_count: bool,
    mode: int,
    scales: fx.Node | None,
    padding: int = -1,
) -> fx.Node:
    part = part_of(call, 0, indices, result=True)
    if part is None:
        args = grad, indices, bag_of, sizes, where, rows
        return call.same(*args, by_count, mode, scales, padding)
    places = _own_places(call, indices, padding)
    if mode == MAX:
        where = _own_places(call, where, padding)
    more = call.build.compute(operator.add, part.n, 1)
    args = grad, places, bag_of, sizes, where, more
    return without_spares(
        call, call.same(*args, by_count, mode, scales, part.n), [part]
    )


def _scales_backward(
    call: LocalCall,
    grad: fx.Node,
    weight: fx.Node,
    indices: fx.Node,
    offsets: fx.Node,
    bag_of: fx.Node,
    mode: int,
    padding: int = -1,
) -> fx.Node:
    begins = _begins(call, offsets, 3)
    bag_of = _less(call, bag_of, _first_bag(call, 0))
    build, axes = call.build, call.operands[1].dims[0]
    if not axes:
        return call.same(grad, weight, indices, begins, bag_of, mode, padding)
    rows = call.shapes[1][0]
    place = build.call(aten.sub.Tensor, indices, build.own_start(rows, axes))
    n = build.own_size(rows, axes)
    low = build.call(aten.ge.Scalar, place, 0)
    high = build.call(aten.lt.Scalar, place, n)
    own = build.call(aten.bitwise_and.Tensor, low, high)
    counted = build.call(aten.ne.Scalar, indices, padding)
    own = build.call(aten.bitwise_and.Tensor, own, counted)
    empty = call.is_empty(call.operands[1], call.shapes[1], 0)
    part = Part(call, 0, n, place, own, empty)
    rest = begins, bag_of, mode, -1
    products = call.same(grad, part.rows_of(weight), part.read(), *rest)
    return call.where(own, products, 0)


def _by_rows(local: Localizer, call: LocalCall, *args: Any, **kwargs: Any) -> Any:
    """The local form where bags or rows of a table are split; else the op itself."""
    specs = *call.operands, *call.results
    is_split = any(spec.dims and spec.dims[0] for spec in specs)
    return (local if is_split else LocalCall.same)(call, *args, **kwargs)


LOCAL: dict[Any, Localizer] = {
    op: partial(_by_rows, local)
    for op, local in (
        (aten._embedding_bag.default, _bag),
        (aten._embedding_bag_forward_only.default, _bag),
        (aten._embedding_bag_backward.default, _backward),
        (aten._embedding_bag_dense_backward.default, _dense_backward),
        (aten._embedding_bag_per_sample_weights_backward.default, _scales_backward),
    )
}
