"""Splits resampling of images: interpolation, adaptive averages, and lookups by grids.

Rows and columns are whole, except where interpolation weighs all rows that an output
row covers (``antialias=True``). There output row i is a weighted sum of rows around
``scale * (i + 1 / 2)``, as many as a filter covers, which grows with the scale. Where a
dim is split a rank reads the rows that its output rows cover (``Rule.windows``) and
sums them with the op's own weights, or adds the gradients of its output rows to them;
the other dim is resampled in the same way, as the op is wrong on the CPU for shards of
one column. ``summed`` and ``spread`` do the same for other ops that weigh rows along
one dim after the other.
In: calls of these ops. Out: their rules and local forms.
Never: splits rows of integers, or sizes that are open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Size
from fxpar.sharding.factors import Reach, RowWindow, Rule
from fxpar.sharding.op_table import Row, by_rank, make, names, rows, tensors_of, text
from fxpar.sharding.ops.local_call import LocalCall, added_at, rows_at, trailing
from fxpar.sharding.ops.reads import (
    add_halo_rows,
    exchange_of,
    is_split,
    rows_read,
    split_dims,
    with_halo_rows,
)

aten = torch.ops.aten

# Rows that the filter of each kind covers where the scale is at most 1.
COVERED = {"bilinear": 2, "bicubic": 4, "lanczos": 6}
# The largest denominator of a window's slope.
_FINEST = 1 << 12


def spatial(k: int, *args: Any, **kwargs: Any) -> str:
    """Return the rule: every tensor has the same leading dims; the last ``k`` are
    whole."""
    words = [*names(args[0].dim() - k), *["_"] * k]
    return text(*[words] * len(tensors_of((args, kwargs))), results=[words])


def _reach(count: int, scale: float, support: float) -> Reach:
    """Return windows that hold all rows that each of ``count`` output rows covers.
    ``scale``: rows from one to the next; ``support``: how far a filter reaches from an
    output row's middle."""
    slope = Fraction(scale).limit_denominator(_FINEST)
    step, of = slope.numerator, slope.denominator
    ends = []
    for i in range(count):
        middle, on_slope = scale * (i + 0.5), step * i // of
        low = math.floor(middle - support + 0.5)
        high = math.floor(middle + support + 0.5)
        ends.append((low - on_slope, high - on_slope))
    first = min(low for low, _ in ends)
    return Reach(step, of, first * of, max(high for _, high in ends) - first)


def _windows(
    kind: str,
    position: int,
    lead: int,
    rows: Sequence[int],
    counts: Sequence[int],
    align_corners: bool,
    *scales: float | None,
) -> list[RowWindow]:
    """Return the windows of rows and columns that change, of the tensor at
    ``position``, which has ``lead`` dims before them. ``scales``: output rows for each
    row, if given."""
    windows = []
    both = [*scales, None, None][:2]
    for d, (n, count, scale) in enumerate(zip(rows, counts, both, strict=True)):
        if align_corners:
            step = (n - 1) / (count - 1) if count > 1 else 0.0
        else:
            step = 1 / scale if scale is not None and scale > 0 else n / count
        if n != count or step != 1.0:
            reach = _reach(count, step, COVERED[kind] / 2 * max(step, 1.0))
            windows.append(RowWindow(position, lead + d, n, count, reach))
    return windows


def _rule(
    kind: str,
    is_backward: bool,
    x: torch.Tensor,
    counts: Sequence[int],
    *settings: Any,
) -> Rule | str:
    """Return the rule; integers are rounded between the two dims, and weights need
    known sizes."""
    lead = x.dim() - 2
    shape, *how = settings if is_backward else (x.shape, *settings)
    are_known = all(isinstance(n, int) for n in (*shape[-2:], *counts))
    if not are_known or not x.is_floating_point():
        return spatial(2, x)
    splits = [min(pair) > 1 for pair in zip(shape[-2:], counts, strict=True)]
    words = [*names(lead), *(f"o{d}" if cut else "_" for d, cut in enumerate(splits))]
    windows = _windows(kind, int(is_backward), lead, shape[-2:], counts, *how)
    windows = [window for window in windows if splits[window.dim - lead]]
    return replace(make([words], [words]), windows=tuple(windows))


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

# (call, tensor [1, 1, rows, columns], window) -> the op along its rows alone, as many
# as the window's result has.
Weigh = Callable[[LocalCall, fx.Node, RowWindow], fx.Node]


def _weights(
    call: LocalCall, window: RowWindow, own: Size, dtype: torch.dtype, weigh: Weigh
) -> tuple[fx.Node, fx.Node]:
    """Return (places among the rows that a rank has, weights), both [own rows, span].
    The op itself gives the weights: of rows of which each has a one in the column of
    its number modulo the span, a window has one for each column."""
    build, span, n = call.build, window.reach.span, window.rows
    i, rows, places = rows_read(call, window, own)
    device = i.meta["val"].device
    column = build.call(aten.remainder.Scalar, build.iota(n, device), span)
    ones = build.call(
        aten.eq.Tensor, trailing(call, column, 1), build.iota(span, device)
    )
    ones = build.call(aten.reshape.default, build.cast(ones, dtype), [1, 1, n, span])
    weights = weigh(call, ones, window)
    weights = build.call(aten.reshape.default, weights, [window.count, span])
    column = build.call(aten.remainder.Scalar, rows, span)
    weights = rows_at(call, weights, 0, i)
    return places, build.call(aten.gather.default, weights, 1, column)


def summed(
    call: LocalCall,
    x: fx.Node,
    windows: Sequence[RowWindow],
    own: Sequence[Size],
    weigh: Weigh,
) -> fx.Node:
    """Return weighted sums of the rows of these windows, one dim after the other.
    ``own``: the shape that the rank holds of the result."""
    build, dtype = call.build, x.meta["val"].dtype
    x = build.cast(x, torch.promote_types(dtype, torch.float32))
    for window in windows:
        dim, value = window.dim, x.meta["val"]
        places, weights = _weights(call, window, own[dim], value.dtype, weigh)
        rows = rows_at(call, x, dim, places)
        weights = trailing(call, weights, value.dim() - 1 - dim)
        rows = build.call(aten.mul.Tensor, rows, weights)
        x = build.call(aten.sum.dim_IntList, rows, [dim + 1])
    return build.cast(x, dtype)


def spread(
    call: LocalCall,
    grad: fx.Node,
    position: int,
    windows: Sequence[RowWindow],
    own: Sequence[Size],
    weigh: Weigh,
) -> fx.Node:
    """Return the adjoint of ``summed``, for the tensor at ``position``: weighted rows
    added to the rows of windows, which are sent to their owners. ``own``: the shape
    that the rank holds of ``grad``."""
    build, dtype, shape = call.build, grad.meta["val"].dtype, list(own)
    x = build.cast(grad, torch.promote_types(dtype, torch.float32))
    for window in windows:
        dim, value = window.dim, x.meta["val"]
        places, weights = _weights(call, window, own[dim], value.dtype, weigh)
        rows = build.call(aten.unsqueeze.default, x, dim + 1)
        weights = trailing(call, weights, value.dim() - 1 - dim)
        rows = build.call(aten.mul.Tensor, rows, weights)
        shape[dim] = window.rows
        if is_split(call, position, dim):
            shape[dim] = build.window_rows(exchange_of(call, window))
        x = added_at(call, rows, shape, dim, places)
    return build.cast(add_halo_rows(call, x, position), dtype)


def _weigh(kind: str, lead: int, align_corners: bool, *scales: float | None) -> Weigh:
    """Return the interpolation of rows alone."""
    target = getattr(aten, f"_upsample_{kind}2d_aa").default

    def weigh(call: LocalCall, x: fx.Node, window: RowWindow) -> fx.Node:
        size = [window.count, x.meta["val"].shape[-1]]
        scale = [*scales, None, None][window.dim - lead]
        return call.build.call(target, x, size, align_corners, scale, None)

    return weigh


def _local_resampled(
    kind: str, call: LocalCall, x: fx.Node, size: Sequence[int], *how: Any
) -> fx.Node:
    if not any(split_dims(call, 0, 2)):
        return call.same(x, size, *how)
    lead, shape = len(call.shapes[0]) - 2, call.shapes[0]
    windows = _windows(kind, 0, lead, shape[-2:], size, *how)
    x, weigh = with_halo_rows(call, x, 0), _weigh(kind, lead, *how)
    return summed(call, x, windows, call.local_shape(), weigh)


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
    lead = len(shape) - 2
    windows = _windows(kind, 1, lead, call.shapes[1][-2:], size, *how)
    own, weigh = call.operand_shape(0), _weigh(kind, lead, *how)
    return spread(call, grad, 1, windows, own, weigh)


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
    ROWS |= rows(_op, partial(_rule, _kind, False), linear="0", local=_form)
    _form = partial(_local_resampled_backward, _kind)
    ROWS |= rows(
        f"{_op}_backward", partial(_rule, _kind, True), linear="0", local=_form
    )
