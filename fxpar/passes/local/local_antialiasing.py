"""Local forms of interpolation that weighs all rows an output row covers.

Where a dim is split a rank reads the rows that its output rows cover and sums them with
the op's own weights, or adds the gradients of its output rows to them (``halos``); the
other dim is resampled so too, as the op is wrong on the CPU for shards of one column.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Builder, Size
from fxpar.passes.local.halos import (
    add_halo_rows,
    axes_of,
    exchange_of,
    windows_of,
    with_halo_rows,
)
from fxpar.passes.local.local_call import LocalCall, Localizer
from fxpar.passes.local.local_indexing import trailing
from fxpar.passes.local.local_windows import split_dims
from fxpar.sharding.factors import RowWindow
from fxpar.sharding.rules.antialiasing import Resampled, both_dims
from fxpar.sharding.rules.table import keys

aten = torch.ops.aten

# Of a filter, at distances from an output row's middle in rows of the coarser side.
Filter = Callable[[Builder, fx.Node], fx.Node]

# Of a cubic filter that smooths, unlike that of plain bicubic interpolation.
_SHARPNESS = -0.5


def _triangle(build: Builder, at: fx.Node) -> fx.Node:
    away = build.call(aten.abs.default, at)
    return build.call(aten.clamp.default, build.call(aten.rsub.Scalar, away, 1.0), 0.0)


def _polynomial(build: Builder, x: fx.Node, *coefficients: float) -> fx.Node:
    """Of the highest power first."""
    total = build.call(aten.mul.Tensor, x, coefficients[0])
    for c in coefficients[1:-1]:
        total = build.call(aten.add.Tensor, total, c)
        total = build.call(aten.mul.Tensor, total, x)
    return build.call(aten.add.Tensor, total, coefficients[-1])


def _cubic(build: Builder, at: fx.Node) -> fx.Node:
    a, away = _SHARPNESS, build.call(aten.abs.default, at)
    inner = _polynomial(build, away, a + 2, -(a + 3), 0.0, 1.0)
    outer = _polynomial(build, away, a, -5 * a, 8 * a, -4 * a)
    reached = build.call(aten.lt.Scalar, away, 2.0)
    outer = build.where(reached, outer, 0)
    near = build.call(aten.lt.Scalar, away, 1.0)
    return build.call(aten.where.self, near, inner, outer)


def _windowed_sinc(build: Builder, at: fx.Node) -> fx.Node:
    wide = build.call(aten.sinc.default, build.call(aten.mul.Tensor, at, 1 / 3))
    value = build.call(aten.mul.Tensor, build.call(aten.sinc.default, at), wide)
    away = build.call(aten.abs.default, at)
    return build.where(build.call(aten.lt.Scalar, away, 3.0), value, 0)


_FILTERS: dict[str, Filter] = {
    "bilinear": _triangle,
    "bicubic": _cubic,
    "lanczos": _windowed_sinc,
}


@dataclass(frozen=True)
class _Covered:
    """A dim that is resampled, where some dim of the op is split."""

    # Of ``x``, of which it is a dim.
    dim: int
    # How it is resampled.
    how: Resampled
    # The rows that a rank reads of it; None: it is not split.
    window: RowWindow | None
    # How many rows this rank makes of it, or has made.
    own: Size


def _dims(
    kind: str, call: LocalCall, position: int, own: Sequence[Size], *how: Any
) -> list[_Covered]:
    """The dims of an op that do not stay as they are; ``position``: of the tensor whose
    rows are covered, by ``own`` rows of the other."""
    size, *settings = how
    shape, lead = call.shapes[position], len(own) - 2
    near = {window.dim: window for window in windows_of(call, position)}
    return [
        _Covered(lead + d, dim, near.get(lead + d), own[lead + d])
        for d, dim in enumerate(both_dims(kind, shape[lead:], size, *settings))
        if not dim.stays
    ]


def _weights(kind: str, call: LocalCall, dim: _Covered) -> tuple[fx.Node, fx.Node]:
    """(places among the rows that a rank has, weights) of the rows that each row which
    is made covers."""
    build, how, window = call.build, dim.how, dim.window
    device, reach = call.node.meta["val"].device, how.reach
    i = build.iota(dim.own, device)
    if window is not None:
        axes = axes_of(call, window.position, window.dim)
        i = build.call(aten.add.Tensor, i, build.own_start(how.count, axes))
        # A row that stands for none is as the last.
        i = build.call(aten.clamp.default, i, 0, how.count - 1)
    first = build.call(aten.mul.Tensor, i, reach.step)
    first = build.call(aten.add.Tensor, first, reach.first)
    first = build.call(aten.div.Tensor_mode, first, reach.of, rounding_mode="floor")
    span = build.iota(reach.span, device)
    row = build.call(aten.add.Tensor, trailing(call, first, 1), span)
    middle = build.call(aten.add.Tensor, build.cast(i, torch.float64), 0.5)
    middle = build.call(aten.mul.Tensor, middle, how.scale)
    away = build.cast(row, torch.float64)
    away = build.call(aten.sub.Tensor, away, trailing(call, middle, 1))
    away = build.call(aten.add.Tensor, away, 0.5)
    away = build.call(aten.mul.Tensor, away, 1 / max(how.scale, 1.0))
    low = build.call(aten.ge.Scalar, row, 0)
    high = build.call(aten.lt.Scalar, row, how.rows)
    inside = build.call(aten.bitwise_and.Tensor, low, high)
    weights = build.where(inside, _FILTERS[kind](build, away), 0)
    total = build.call(aten.sum.dim_IntList, weights, [1], True)
    weights = build.call(aten.div.Tensor, weights, total)
    last: Size = how.rows - 1
    if window is not None:
        exchange = exchange_of(call, window)
        row = build.call(aten.sub.Tensor, row, build.window_start(exchange))
        last = build.compute(operator.sub, build.window_rows(exchange), 1)
    return build.call(aten.clamp.default, row, 0, last), weights


def _spread(call: LocalCall, weights: fx.Node, x: fx.Node, dim: int) -> fx.Node:
    """The weights of a sum over rows along a dim of ``x``."""
    value = x.meta["val"]
    return trailing(call, call.build.cast(weights, value.dtype), value.dim() - 1 - dim)


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


def _resampled(
    kind: str, call: LocalCall, x: fx.Node, size: Sequence[int], *how: Any
) -> fx.Node:
    if not any(split_dims(call, 0, 2)):
        return call.same(x, size, *how)
    build, dtype = call.build, x.meta["val"].dtype
    x = build.cast(with_halo_rows(call, x, 0), _summed_in(dtype))
    for dim in _dims(kind, call, 0, call.local_shape(), size, *how):
        places, weights = _weights(kind, call, dim)
        weights = _spread(call, weights, x, dim.dim)
        rows = build.call(aten.index.Tensor, x, [*[None] * dim.dim, places])
        rows = build.call(aten.mul.Tensor, rows, weights)
        x = build.call(aten.sum.dim_IntList, rows, [dim.dim + 1])
    return build.cast(x, dtype)


def _resampled_backward(
    kind: str,
    call: LocalCall,
    grad: fx.Node,
    size: Sequence[int],
    shape: Sequence[int],
    *how: Any,
) -> fx.Node:
    if not any(split_dims(call, 1, 2)):
        return call.same(grad, size, list(call.local_shape()), *how)
    build, dtype, own = call.build, grad.meta["val"].dtype, call.operand_shape(0)
    x, full = build.cast(grad, _summed_in(dtype)), list(own)
    options = {"dtype": x.meta["val"].dtype, "device": x.meta["val"].device}
    for dim in _dims(kind, call, 1, own, size, *how):
        places, weights = _weights(kind, call, dim)
        weights = _spread(call, weights, x, dim.dim)
        rows = build.call(aten.unsqueeze.default, x, dim.dim + 1)
        rows = build.call(aten.mul.Tensor, rows, weights)
        full[dim.dim] = dim.how.rows
        if dim.window is not None:
            full[dim.dim] = build.window_rows(exchange_of(call, dim.window))
        zeros = build.call(aten.full.default, full, 0, **options)
        index = [*[None] * dim.dim, places]
        x = build.call(aten.index_put.default, zeros, index, rows, True)
    return build.cast(add_halo_rows(call, x, 1), dtype)


LOCAL: dict[Any, Localizer] = {
    key: partial(local, kind)
    for kind in _FILTERS
    for name, local in (("", _resampled), ("_backward", _resampled_backward))
    for key in keys(f"_upsample_{kind}2d_aa{name}")
}
