"""Local forms of cuts, and of what is put in their place, where the dim is split.

A cut gives the rows that this rank has and zero elsewhere, so results add up. Of what
is put in, whole on every rank, each takes what falls into its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar._torch.symbols import Inexpressible
from fxpar.passes.local.halos import (
    add_halo_rows,
    axes_of,
    exchange_of,
    windows_of,
    with_halo_rows,
)
from fxpar.passes.local.local_call import LocalCall, Localizer
from fxpar.passes.local.local_indexing import part_of, rows_at, trailing
from fxpar.sharding.factors import RowWindow

aten = torch.ops.aten


def _is_split(call: LocalCall, dim: int) -> bool:
    return bool(call.operands[0].dims and call.operands[0].dims[dim])


def _positions(call: LocalCall, dim: int, *cut: Any) -> range:
    """The rows of a dim of the first operand that a slice names."""
    rows = call.shapes[0][dim]
    if not all(n is None or isinstance(n, int) for n in (rows, *cut)):
        raise Inexpressible("rows are cut out of a dim whose size is left open")
    return range(rows)[slice(*cut)]


def _own_rows(call: LocalCall, x: fx.Node, dim: int, positions: range) -> fx.Node:
    """Of the rows at these positions those that this rank has, else zero."""
    build, device = call.build, x.meta["val"].device
    index = build.iota(len(positions), device, positions.step)
    index = build.call(aten.add.Tensor, index, positions.start)
    part = part_of(call, dim, index)
    assert part is not None
    rows = rows_at(call, part.rows_of(x), dim, part.read())
    ndim = x.meta["val"].dim()
    return call.where(trailing(call, part.inside, ndim - 1 - dim), rows, 0)


def _slice(
    call: LocalCall,
    x: fx.Node,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> fx.Node:
    dim %= max(len(call.shapes[0]), 1)
    if not _is_split(call, dim) or call.results[0].dims[dim]:  # not at all, or no cut
        return call.same(x, dim, start, end, step)
    return _own_rows(call, x, dim, _positions(call, dim, start, end, step))


def _select(call: LocalCall, x: fx.Node, dim: int, index: int) -> fx.Node:
    dim %= len(call.shapes[0])
    if not _is_split(call, dim):
        return call.same(x, dim, index)
    row = _own_rows(call, x, dim, _positions(call, dim, index, index + 1 or None))
    return call.build.call(aten.squeeze.dim, row, dim)


def _unbind(call: LocalCall, x: fx.Node, *dims: int) -> fx.Node:
    dim = sum(dims) % len(call.shapes[0])
    if not _is_split(call, dim):
        return call.same(x, *dims)
    rows = _own_rows(call, x, dim, _positions(call, dim, None))
    return call.same(rows, dim)


def _put(
    call: LocalCall, x: fx.Node, source: fx.Node, dim: int, positions: range
) -> fx.Node:
    """``x`` with the rows of ``source`` that fall into this rank's."""
    build, device = call.build, x.meta["val"].device
    shape, axes = call.shapes[0], call.operands[0].dims[dim]
    index = build.iota(build.own_size(shape[dim], axes), device)
    first = build.own_start(shape[dim], axes, -positions.start)
    place = build.call(aten.add.Tensor, index, first)
    low = build.call(aten.ge.Scalar, place, 0)
    high = build.call(aten.lt.Scalar, place, len(positions))
    inside = build.call(aten.bitwise_and.Tensor, low, high)
    place = call.where(inside, place, 0)
    source_rows = rows_at(call, source, dim, place)
    inside = trailing(call, inside, len(shape) - 1 - dim)
    return build.call(aten.where.self, inside, source_rows, x)


def _slice_scatter(
    call: LocalCall,
    x: fx.Node,
    source: fx.Node,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> fx.Node:
    dim %= max(len(call.shapes[0]), 1)
    if not _is_split(call, dim) or call.operands[1].dims[dim]:
        return call.same(x, source, dim, start, end, step)
    positions = _positions(call, dim, start, end, step)
    return _put(call, x, source, dim, positions) if positions else x


def _select_scatter(
    call: LocalCall, x: fx.Node, source: fx.Node, dim: int, index: int
) -> fx.Node:
    dim %= len(call.shapes[0])
    if not _is_split(call, dim):
        return call.same(x, source, dim, index)
    row = call.build.call(aten.unsqueeze.default, source, dim)
    positions = _positions(call, dim, index, index + 1 or None)
    return _put(call, x, row, dim, positions)


def _unfold(call: LocalCall, x: fx.Node, *settings: int) -> fx.Node:
    return call.same(with_halo_rows(call, x, 0), *settings)


def _unfold_backward(
    call: LocalCall, grad: fx.Node, shape: Any, dim: int, size: int, step: int
) -> fx.Node:
    own = list(call.local_shape())
    for window in windows_of(call, 1):
        own[window.dim] = call.build.window_rows(exchange_of(call, window))
    return add_halo_rows(call, call.same(grad, own, dim, size, step), 1)


def _pad_backward(
    turns: bool, call: LocalCall, grad: fx.Node, x: fx.Node, pad: Sequence[int]
) -> fx.Node:
    """Of the backward of a pad: rows are added up in the window of rows that a rank's
    own were made of. ``turns``: they were turned round, not repeated."""
    windows = windows_of(call, 2)
    if not windows:
        return call.same(grad, x, pad)
    build, rest = call.build, list(pad)
    shape = list(call.local_shape())
    for window in windows:
        at = 2 * (len(shape) - 1 - window.dim)
        rest[at : at + 2] = 0, 0
        shape[window.dim] = call.operand_shape(0)[window.dim]
    like = x.meta["val"]
    options = {"dtype": like.dtype, "device": like.device}
    if any(rest):
        resized = build.call(aten.full.default, shape, 0, **options)
        grad = call.same(grad, resized, rest)
    for window in windows:
        before = pad[2 * (len(shape) - 1 - window.dim)]
        places = _padded_from(call, window, before, turns)
        shape[window.dim] = build.window_rows(exchange_of(call, window))
        zeros = build.call(aten.full.default, shape, 0, **options)
        indices = [*[None] * window.dim, places]
        grad = build.call(aten.index_put.default, zeros, indices, grad, True)
    return add_halo_rows(call, grad, 2)


def _padded_from(
    call: LocalCall, window: RowWindow, before: int, turns: bool
) -> fx.Node:
    """Of which rows of its window each row of a rank was made, by a pad with so many
    rows before."""
    build, last = call.build, window.rows - 1
    axes, device = axes_of(call, 0, window.dim), call.node.meta["val"].device
    place = build.iota(build.own_size(window.count, axes), device)
    start = build.own_start(window.count, axes, -before)
    place = build.call(aten.add.Tensor, place, start)
    if turns:
        place = build.call(aten.abs.default, place)
        place = build.call(aten.rsub.Scalar, place, last)
        place = build.call(aten.abs.default, place)
        place = build.call(aten.rsub.Scalar, place, last)
    else:
        place = build.call(aten.clamp.default, place, 0, last)
    first = build.window_start(exchange_of(call, window))
    return build.call(aten.sub.Tensor, place, first)


LOCAL: dict[Any, Localizer] = {
    aten.slice.Tensor: _slice,
    aten.slice_copy.Tensor: _slice,
    aten.select.int: _select,
    aten.select_copy.int: _select,
    aten.unbind.int: _unbind,
    aten.unbind_copy.int: _unbind,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.unfold.default: _unfold,
    aten.unfold_copy.default: _unfold,
    aten.unfold_backward.default: _unfold_backward,
    **{
        getattr(aten, f"{kind}_pad{k}d_backward").default: partial(_pad_backward, turns)
        for kind, turns in (("reflection", True), ("replication", False))
        for k in (1, 2, 3)
    },
}
