"""Splits resampling of images: interpolation, and lookups by grids.

Rows and columns are whole, except where interpolation weighs all rows that an output
row covers (``antialias=True``). There output row i is a weighted sum of rows around
``scale * (i + 1 / 2)``, as many as a filter covers, which grows with the scale. Where a
dim is split a rank reads the rows that its output rows cover (``Rule.windows``) and
sums them with the op's own weights, or adds the gradients of its output rows to them;
the other dim is resampled in the same way, as the op is wrong on the CPU for shards of
one column.
In: calls of these ops. Out: their rules and local forms.
Never: splits rows of integers, or sizes that are open.
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
from fxpar.sharding.op_table import Row, by_rank, names, rows, text
from fxpar.sharding.ops.local_call import LocalCall, added_at, rows_at, trailing
from fxpar.sharding.ops.pools import spatial
from fxpar.sharding.ops.reads import (
    add_halo_rows,
    axes_of,
    exchange_of,
    split_dims,
    windows_of,
    with_halo_rows,
)

aten = torch.ops.aten

# Rows that the filter of each kind covers where the scale is at most 1.
COVERED = {"bilinear": 2, "bicubic": 4, "lanczos": 6}
# The largest denominator of a window's slope.
_FINEST = 1 << 12


@dataclass(frozen=True)
class Resampled:
    """Describes how one dim is resampled."""

    # Rows of the dim.
    rows: int
    # Rows of the result's dim.
    count: int
    # Rows of the dim from one output row to the next.
    scale: float
    # How far a filter reaches from an output row's middle.
    support: float

    @property
    def is_unchanged(self) -> bool:
        """Return whether the dim stays unchanged."""
        return self.rows == self.count and self.scale == 1.0

    @property
    def reach(self) -> Reach:
        """Return windows that hold all rows that each output row covers."""
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
    """Return how a dim of ``rows`` becomes one of ``count``. ``scale``: output rows for
    each row, if given."""
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
    """Return how rows and columns are resampled."""
    both = [*scales, None, None]
    return [
        resampled(kind, n, count, align_corners, scale)
        for n, count, scale in zip(rows, counts, both[:2], strict=True)
    ]


def _rule(dims: Sequence[Resampled], lead: int, x: int, other: int) -> Rule:
    """Return the rule. ``x``: position of the tensor that has the rows; ``other``: of
    the result, or in a backward of its gradient."""
    words: dict[int, list[str]] = {x: names(lead), other: names(lead)}
    windows = []
    for d, dim in enumerate(dims):
        splits = min(dim.rows, dim.count) > 1
        for position in (x, other):
            words[position].append(f"o{d}" if splits else "_")
        if splits and not dim.is_unchanged:
            ends = dim.rows, dim.count, dim.reach
            windows.append(RowWindow(x, lead + d, *ends))
    rule = parse_rule(text(words[0], results=[words[1]]))
    return replace(rule, windows=tuple(windows))


def _can_split(x: torch.Tensor, sizes: Sequence[int]) -> bool:
    """Return whether rows may be split: integers are rounded between the two dims, and
    weights need known sizes."""
    return x.is_floating_point() and all(isinstance(n, int) for n in sizes)


def _forward(kind: str, x: torch.Tensor, size: Sequence[int], *how: Any) -> Rule | str:
    rows = x.shape[-2:]
    if not _can_split(x, [*rows, *size]):
        return _whole(x)
    return _rule(both_dims(kind, rows, size, *how), x.dim() - 2, 0, 1)


def _backward(
    kind: str, grad: torch.Tensor, size: Sequence[int], shape: Sequence[int], *how: Any
) -> Rule | str:
    rows = shape[-2:]
    if not _can_split(grad, [*rows, *size]):
        return _whole(grad)
    return _rule(both_dims(kind, rows, size, *how), grad.dim() - 2, 1, 0)


def _whole(x: torch.Tensor) -> str:
    """Return the rule that keeps rows and columns whole."""
    words = [*names(x.dim() - 2), "_", "_"]
    return text(words, results=[words])


def _grid_sampler(x: torch.Tensor, grid: torch.Tensor, *_: Any) -> str:
    k = x.dim() - 2
    places = names(k)
    return text(
        ["n", "c", *["_"] * k], ["n", *places, "_"], results=[["n", "c", *places]]
    )


def _grid_sampler_backward(
    grad: torch.Tensor, x: torch.Tensor, grid: torch.Tensor, *args: Any
) -> str:
    k = x.dim() - 2
    places = names(k)
    image, at = ["n", "c", *["_"] * k], ["n", *places, "_"]
    # The gradient of the grid is always computed.
    results = [image, at] if args[3][0] else [at]
    return text(["n", "c", *places], image, at, results=results)


# Local forms

# Weights of a filter at distances from an output row's middle, in rows of the coarser
# side.
Filter = Callable[[Builder, fx.Node], fx.Node]

# Parameter of a smoothing cubic filter, unlike that of plain bicubic interpolation.
_SHARPNESS = -0.5


def _triangle(build: Builder, at: fx.Node) -> fx.Node:
    away = build.call(aten.abs.default, at)
    return build.call(aten.clamp.default, build.call(aten.rsub.Scalar, away, 1.0), 0.0)


def _polynomial(build: Builder, x: fx.Node, *coefficients: float) -> fx.Node:
    """Return the polynomial's value; the coefficient of the highest power comes
    first."""
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
    is_inner = build.call(aten.lt.Scalar, away, 1.0)
    return build.call(aten.where.self, is_inner, inner, outer)


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
    """Describes a dim that is resampled, where some dim of the op is split."""

    # Number of the dim in ``x``.
    dim: int
    # How it is resampled.
    how: Resampled
    # The rows that a rank reads of it; None: it is not split.
    window: RowWindow | None
    # Rows of this rank on the resampled side.
    own: Size


def _dims(
    kind: str, call: LocalCall, position: int, own: Sequence[Size], *how: Any
) -> list[_Covered]:
    """Return the dims of an op that are resampled. ``position``: of the tensor whose
    rows are covered by ``own`` rows of the other tensor."""
    size, *settings = how
    shape, lead = call.shapes[position], len(own) - 2
    window_of = {window.dim: window for window in windows_of(call, position)}
    return [
        _Covered(lead + d, dim, window_of.get(lead + d), own[lead + d])
        for d, dim in enumerate(both_dims(kind, shape[lead:], size, *settings))
        if not dim.is_unchanged
    ]


def _weights(kind: str, call: LocalCall, dim: _Covered) -> tuple[fx.Node, fx.Node]:
    """Return (positions among the rows that a rank has, weights), both [own rows,
    covered rows]."""
    build, how, window = call.build, dim.how, dim.window
    device, reach = call.node.meta["val"].device, how.reach
    i = build.iota(dim.own, device)
    if window is not None:
        axes = axes_of(call, window.position, window.dim)
        i = build.call(aten.add.Tensor, i, build.own_start(how.count, axes))
        # A spare row is computed as the last one.
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


def _per_row(call: LocalCall, weights: fx.Node, x: fx.Node, dim: int) -> fx.Node:
    """Return the weights in a shape for a sum over rows along a dim of ``x``."""
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
        weights = _per_row(call, weights, x, dim.dim)
        rows = rows_at(call, x, dim.dim, places)
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
        weights = _per_row(call, weights, x, dim.dim)
        rows = build.call(aten.unsqueeze.default, x, dim.dim + 1)
        rows = build.call(aten.mul.Tensor, rows, weights)
        full[dim.dim] = dim.how.rows
        if dim.window is not None:
            full[dim.dim] = build.window_rows(exchange_of(call, dim.window))
        x = added_at(call, rows, full, dim.dim, places)
    return build.cast(add_halo_rows(call, x, 1), dtype)


ROWS: dict[Any, Row] = {
    **rows("grid_sampler_3d", _grid_sampler, linear="0"),
    **rows(
        "grid_sampler_2d_backward grid_sampler_3d_backward",
        _grid_sampler_backward,
        linear="0",
    ),
}
for _pattern, _rank in (
    ("upsample_bilinear{}d", 2),
    ("upsample_bicubic{}d", 2),
    ("upsample_trilinear{}d", 3),
):
    ROWS |= by_rank(_pattern, [_rank], spatial, linear="0")
    ROWS |= by_rank(_pattern + "_backward", [_rank], spatial, linear="0", shape=2)
for _kind in COVERED:
    _op, _form = f"_upsample_{_kind}2d_aa", partial(_local_resampled, _kind)
    ROWS |= rows(_op, partial(_forward, _kind), linear="0", local=_form)
    _form = partial(_local_resampled_backward, _kind)
    ROWS |= rows(f"{_op}_backward", partial(_backward, _kind), linear="0", local=_form)
