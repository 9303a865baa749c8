"""Interpolation that weighs all rows an output row covers (``antialias=True``).

Output row i is a weighted sum of rows around ``scale * (i + 1 / 2)``, as many as a
filter reaches, which grows with the scale. Where a dim is split a rank reads the rows
that its output rows cover (``Rule.windows``) and sums them with the op's own weights,
or adds the gradients of its output rows to them; the other dim is resampled so too, as
the op is wrong on the CPU for shards of one column.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Builder, Size
from fxpar.sharding.factors import Reach, RowWindow, Rule, parse_rule
from fxpar.sharding.op_table import Row, names, rows, text
from fxpar.sharding.ops.halos import (
    add_halo_rows,
    axes_of,
    exchange_of,
    split_dims,
    windows_of,
    with_halo_rows,
)
from fxpar.sharding.ops.local_call import LocalCall
from fxpar.sharding.ops.own_rows import trailing

aten = torch.ops.aten

# How many rows the filter of each kind covers where nothing is made smaller.
COVERED = {"bilinear": 2, "bicubic": 4, "lanczos": 6}
# Slopes of windows are fractions of this at most.
_FINEST = 1 << 12


@dataclass(frozen=True)
class Resampled:
    """How one dim is resampled."""

    # Of the dim.
    rows: int
    # Of what is made of it.
    count: int
    # Rows of the dim from one output row to the next.
    scale: float
    # How far a filter reaches from an output row's middle.
    support: float

    @property
    def stays(self) -> bool:
        """Whether each row is what it was."""
        return self.rows == self.count and self.scale == 1.0

    @property
    def reach(self) -> Reach:
        """The rows that each output row covers, and no fewer."""
        slope = Fraction(self.scale).limit_denominator(_FINEST)
        step, of = slope.numerator, slope.denominator
        ends = []
        for i in range(self.count):
            middle, on_slope = self.scale * (i + 0.5), step * i // of
            low = math.floor(middle - self.support + 0.5)
            high = math.floor(middle + self.support + 0.5)
            ends.append((low - on_slope, high - on_slope))
        first = min(low for low, _ in ends)
        return Reach(step, of, first * of, max(high for _, high in ends) - first)


def resampled(
    kind: str, rows: int, count: int, align_corners: bool, scale: float | None
) -> Resampled:
    """How a dim of so many rows becomes one of ``count``; ``scale``: how many times as
    many, if it was given."""
    if align_corners:
        step = (rows - 1) / (count - 1) if count > 1 else 0.0
    else:
        step = 1 / scale if scale is not None and scale > 0 else rows / count
    return Resampled(rows, count, step, COVERED[kind] / 2 * max(step, 1.0))


def both_dims(
    kind: str,
    rows: Sequence[int],
    counts: Sequence[int],
    align_corners: bool,
    *scales: float | None,
) -> list[Resampled]:
    """How rows and columns are resampled."""
    both = [*scales, None, None]
    return [
        resampled(kind, n, count, align_corners, scale)
        for n, count, scale in zip(rows, counts, both[:2], strict=True)
    ]


def _rule(dims: Sequence[Resampled], lead: int, x: int, other: int) -> Rule:
    """``x`` and ``other``: which tensor has the rows, and which is made of them, or, of
    a backward, makes them."""
    words: dict[int, list[str]] = {x: names(lead), other: names(lead)}
    windows = []
    for d, dim in enumerate(dims):
        splits = min(dim.rows, dim.count) > 1
        for position in (x, other):
            words[position].append(f"o{d}" if splits else "_")
        if splits and not dim.stays:
            ends = dim.rows, dim.count, dim.reach
            windows.append(RowWindow(x, lead + d, other, *ends))
    rule = parse_rule(text(words[0], results=[words[1]]))
    return replace(rule, windows=tuple(windows))


def _may_split(x: torch.Tensor, sizes: Sequence[int]) -> bool:
    """Whole numbers are rounded in between; weights go by sizes that are known."""
    return x.is_floating_point() and all(isinstance(n, int) for n in sizes)


def _forward(kind: str, x: torch.Tensor, size: Sequence[int], *how: Any) -> Rule | str:
    rows = x.shape[-2:]
    if not _may_split(x, [*rows, *size]):
        return _whole(kind, x)
    return _rule(both_dims(kind, rows, size, *how), x.dim() - 2, 0, 1)


def _backward(
    kind: str, grad: torch.Tensor, size: Sequence[int], shape: Sequence[int], *how: Any
) -> Rule | str:
    rows = shape[-2:]
    if not _may_split(grad, [*rows, *size]):
        return _whole(kind, grad)
    return _rule(both_dims(kind, rows, size, *how), grad.dim() - 2, 1, 0)


def _whole(kind: str, x: torch.Tensor, *_: Any) -> str:
    """In its rows and columns; so of sizes that are told by factors, too, which is no
    op of a traced graph."""
    words = [*names(x.dim() - 2), "_", "_"]
    return text(words, results=[words])


# Local forms

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


def _local_resampled(
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


def _local_resampled_backward(
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
    for dim in _dims(kind, call, 1, own, size, *how):
        places, weights = _weights(kind, call, dim)
        weights = _spread(call, weights, x, dim.dim)
        rows = build.call(aten.unsqueeze.default, x, dim.dim + 1)
        rows = build.call(aten.mul.Tensor, rows, weights)
        full[dim.dim] = dim.how.rows
        if dim.window is not None:
            full[dim.dim] = build.window_rows(exchange_of(call, dim.window))
        zeros = call.full(full, 0, x)
        index = [*[None] * dim.dim, places]
        x = build.call(aten.index_put.default, zeros, index, rows, True)
    return build.cast(add_halo_rows(call, x, 1), dtype)


ROWS: dict[Any, Row] = {}
for _kind in COVERED:
    _op, _form = f"_upsample_{_kind}2d_aa", partial(_local_resampled, _kind)
    ROWS |= rows(_op, partial(_forward, _kind), linear="0", local=_form)
    ROWS |= rows(f"{_op}.vec", partial(_whole, _kind), linear="0")
    _form = partial(_local_resampled_backward, _kind)
    ROWS |= rows(f"{_op}_backward", partial(_backward, _kind), linear="0", local=_form)
