"""Local forms of ops whose windows slide over dims: convolutions and pools.

Where such a dim is split a rank reads the rows around its shard that its windows reach,
which stand for the padding too, and what a backward computes of such rows goes back to
those whose they are (``halos``). Elsewhere the op pads as it did. A convolution is told
the local count of its groups.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Size
from fxpar.passes.local.halos import (
    add_halo_rows,
    axes_of,
    exchange_of,
    halos_of,
    is_split,
    windows_of,
    with_halo_rows,
)
from fxpar.passes.local.local_call import LocalCall, Localizer
from fxpar.sharding import shard_sizes
from fxpar.sharding.row_moves import Exchange
from fxpar.sharding.rules.window_dims import SlidingWindow, each, windows

aten = torch.ops.aten


# Convolutions


def _groups(call: LocalCall, channels: Size, per_group: Size) -> Size:
    """Groups of a convolution, of its channels and those of one group."""
    return call.build.compute(operator.floordiv, channels, per_group)


def split_dims(call: LocalCall, position: int, k: int) -> list[bool]:
    """Of the last ``k`` dims of one of a call's tensors, which are split."""
    first = len(call.shapes[position]) - k
    return [is_split(call, position, first + d) for d in range(k)]


def _padding(padding: int | Sequence[int], split: Sequence[bool]) -> list[int]:
    """Padding where a dim is not split."""
    amounts = each(padding, len(split))
    return [0 if cut else n for n, cut in zip(amounts, split, strict=True)]


def _output_padding(
    call: LocalCall,
    position: int,
    extra: Sequence[int],
    slid: Sequence[SlidingWindow],
    split: Sequence[bool],
) -> list[int]:
    """Rows that a transposed convolution adds behind. ``position``: of the tensor that
    has rows; of a shard they are those that no window reaches, of windows none."""
    read = {window.dim - 2 for window in windows_of(call, position)}
    own = [0 if d in read else max(0, -w.behind) for d, w in enumerate(slid)]
    return [
        n if cut else whole
        for n, whole, cut in zip(own, each(extra, len(split)), split, strict=True)
    ]


def _convolution(
    call: LocalCall,
    x: fx.Node,
    weight: fx.Node,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: Size,
) -> fx.Node:
    if isinstance(groups, int) and groups > 1:
        channels = (call.local_shape() if transposed else call.operand_shape(0))[1]
        groups = _groups(call, channels, call.operand_shape(1)[1])
    k = len(call.shapes[0]) - 2
    split = split_dims(call, 0, k)
    if not any(split):
        settings = stride, padding, dilation, transposed, output_padding, groups
        return call.same(x, weight, bias, *settings)
    padding = _padding(padding, split)
    if not transposed:
        settings = stride, padding, dilation, transposed, output_padding, groups
        return call.same(with_halo_rows(call, x, 0), weight, bias, *settings)
    slid = windows(call.shapes[1][2:], stride, call.node.args[4], dilation, k)
    end = len(call.operands)  # of the result, which has rows
    output_padding = _output_padding(call, end, output_padding, slid, split)
    settings = stride, padding, dilation, transposed, output_padding, groups
    result = add_halo_rows(call, call.same(x, weight, None, *settings), end)
    if bias is None:
        return result
    bias = call.build.call(aten.reshape.default, bias, [-1, *[1] * k])
    return call.build.call(aten.add.Tensor, result, bias)


def _convolution_backward(
    call: LocalCall,
    grad: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: Size,
    mask: Sequence[bool],
) -> Any:
    channels_out = call.operand_shape(0)[1]
    if isinstance(groups, int) and groups > 1:
        channels = channels_out if transposed else call.operand_shape(1)[1]
        groups = _groups(call, channels, call.operand_shape(2)[1])
    if bias_sizes is not None:
        bias_sizes = [channels_out]
    k = len(call.shapes[0]) - 2
    split, own = split_dims(call, 0, k), grad
    if any(split):
        slid = windows(call.shapes[2][2:], stride, padding, dilation, k)
        padding = _padding(padding, split)
        if transposed:
            output_padding = _output_padding(call, 0, output_padding, slid, split)
            grad = with_halo_rows(call, grad, 0)
        else:
            x = with_halo_rows(call, x, 1) if mask[1] else _halo_shaped(call, x, 3)
    settings = stride, padding, dilation, transposed, output_padding, groups
    if not any(split):
        return call.same(grad, x, weight, bias_sizes, *settings, mask)
    results: list[Any] = [None, None, None]
    if mask[0] or mask[1]:
        which = [mask[0], mask[1], False]
        gradients = call.same(grad, x, weight, None, *settings, which)
        for i in range(2):
            if mask[i]:
                results[i] = call.build.call(operator.getitem, gradients, i)
    if mask[0]:
        results[0] = add_halo_rows(call, results[0], 3)
    if mask[2]:
        over = [0, *range(2, k + 2)]
        results[2] = call.build.call(aten.sum.dim_IntList, own, over)
    return tuple(results)


def _halo_shaped(call: LocalCall, x: fx.Node, position: int) -> fx.Node:
    """A tensor of the shape of ``x`` with the rows of another one's halos; of those its
    values mean nothing."""
    windows = windows_of(call, position)
    if windows:
        shape: list[Size] = list(call.operand_shape(1))
        for halo in halos_of(call, position):
            shape[halo.dim] = call.build.compute(
                operator.add, shape[halo.dim], halo.before + halo.after
            )
        for window in windows:
            rows = call.build.window_rows(exchange_of(call, window))
            shape[window.dim] = rows
        like = x.meta["val"]
        options = {"dtype": like.dtype, "device": like.device}
        return call.build.call(aten.full.default, shape, 0, **options)
    if not halos_of(call, position):
        return x
    amounts = [0] * (2 * len(call.shapes[position]))
    for halo in halos_of(call, position):
        at = 2 * (len(call.shapes[position]) - 1 - halo.dim)
        amounts[at : at + 2] = halo.before, halo.after
    return call.build.pad_ends(x, amounts)


# Pools


def least(x: fx.Node) -> int | float:
    """What no maximum is smaller than."""
    dtype = x.meta["val"].dtype
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def pool(
    k: int,
    fill: int | float,
    call: LocalCall,
    x: fx.Node,
    kernel: Any,
    stride: Any,
    padding: Any,
    *settings: Any,
) -> fx.Node:
    """A pool of a shard with the rows around it; ``fill`` stands for padding."""
    padding = _padding(padding, split_dims(call, 0, k))
    return call.same(
        with_halo_rows(call, x, 0, fill), kernel, stride, padding, *settings
    )


def pool_backward(
    k: int,
    call: LocalCall,
    grad: fx.Node,
    x: fx.Node,
    kernel: Any,
    stride: Any,
    padding: Any,
    *settings: Any,
) -> fx.Node:
    """Its gradient; that of the rows around the shard goes where they are."""
    position = len(call.operands)  # of the result, which has the halos
    padding = _padding(padding, split_dims(call, 1, k))
    x = _halo_shaped(call, x, position)
    return add_halo_rows(
        call, call.same(grad, x, kernel, stride, padding, *settings), position
    )


def _max_pool(
    k: int,
    call: LocalCall,
    x: fx.Node,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil: bool = False,
) -> Any:
    """The result says where in its window a maximum lies."""
    return pool(k, least(x), call, x, kernel, stride, padding, dilation, ceil)


def _max_pool_with_indices(k: int, call: LocalCall, x: fx.Node, *args: Any) -> Any:
    pooled = _max_pool(k, call, x, *args)
    if not any(split_dims(call, 0, k)):
        return pooled
    values, index = (call.build.call(operator.getitem, pooled, i) for i in range(2))
    return values, reindexed(
        call, index, shards_with_halos(call, 0, 0, k), inward=False
    )


def _offsets_to_indices(
    call: LocalCall,
    offsets: fx.Node,
    kernel: Sequence[int],
    size: Sequence[int],
    stride: Any,
    padding: Any,
    dilation: Any,
) -> fx.Node:
    """Windows are counted from where this rank's begin."""
    index = call.same(offsets, kernel, size, stride, padding, dilation)
    k = len(kernel)
    first = len(call.shapes[0]) - k
    for d, step in enumerate(each(stride, k)):
        axes, rows = call.operands[0].dims[first + d], call.shapes[0][first + d]
        if call.build.mesh.count(axes) > 1:
            start = _times(call, rows, axes, step * math.prod(size[d + 1 :]))
            index = call.build.call(aten.add.Tensor, index, start)
    return index


def _times(
    call: LocalCall, rows: int, axes: Sequence[str], by: int, base: int = 0
) -> Size:
    """``base`` + a number times the first row that a rank holds."""
    build = call.build
    if shard_sizes.is_even(rows, build.mesh, axes):
        return build.offset(axes, rows // build.mesh.count(axes) * by, base)
    start = build.compute(operator.mul, build.own_start(rows, axes), by)
    return build.compute(operator.add, start, base)


def _max_pool_backward(
    k: int, call: LocalCall, grad: fx.Node, x: fx.Node, *args: Any
) -> fx.Node:
    """``args``: what says how windows slide, and where in them maxima lie."""
    *settings, index = args
    if any(split_dims(call, 1, k)):
        index = reindexed(call, index, shards_with_halos(call, 1, 3, k), inward=True)
    return pool_backward(k, call, grad, x, *settings, index)


@dataclass(frozen=True)
class ShardWithHalo:
    """One dim of a shard with the rows around it."""

    # That split the dim.
    axes: tuple[str, ...]
    # Rows of the dim.
    whole: int
    # Rows of the shard with those around it.
    width: Size
    # Number -> where these begin in the dim, times the number.
    start: Callable[[int], Size]


def shards_with_halos(
    call: LocalCall, at: int, halos: int, k: int
) -> list[ShardWithHalo]:
    """The last ``k`` dims of the tensor at a position, with another one's halos."""
    first, shards = len(call.shapes[at]) - k, []
    ends = {halo.dim: (halo.before, halo.after) for halo in halos_of(call, halos)}
    read = {window.dim: window for window in windows_of(call, halos)}
    for d in range(first, first + k):
        axes, whole = axes_of(call, at, d), call.shapes[at][d]
        if d in read:
            shards.append(_window(call, whole, exchange_of(call, read[d])))
            continue
        size, (before, after) = call.build.own_size(whole, axes), ends.get(d, (0, 0))
        width = call.build.compute(operator.add, size, before + after)
        start = partial(_shard_start, call, whole, axes, before)
        shards.append(ShardWithHalo(axes, whole, width, start))
    return shards


def _shard_start(
    call: LocalCall, rows: int, axes: Sequence[str], before: int, by: int
) -> Size:
    return _times(call, rows, axes, by, -by * before)


def _window(call: LocalCall, whole: int, exchange: Exchange) -> ShardWithHalo:
    """A dim of which a rank reads a window."""
    build = call.build
    start = build.window_start(exchange)
    width = build.window_rows(exchange)
    return ShardWithHalo(
        exchange.axes, whole, width, partial(build.compute, operator.mul, start)
    )


def reindexed(
    call: LocalCall, index: fx.Node, dims: Sequence[ShardWithHalo], inward: bool
) -> fx.Node:
    """Positions in the shard with the rows around it as those in the whole; ``inward``:
    the other way."""
    build, total = call.build, None
    local = [dim.width for dim in dims]
    sizes = [[dim.whole for dim in dims], local][:: 1 if inward else -1]
    for d, dim in enumerate(dims):
        below, above = (build.product(n[d + 1 :]) for n in sizes)
        place = build.call(aten.div.Tensor_mode, index, below, rounding_mode="floor")
        if d:
            place = build.call(aten.remainder.Scalar, place, sizes[0][d])
        start = dim.start(-1 if inward else 1)
        if start != 0:
            place = build.call(aten.add.Tensor, place, start)
        place = build.call(aten.mul.Tensor, place, above)
        total = place if total is None else build.call(aten.add.Tensor, total, place)
    assert total is not None
    return total


def _low_memory_pool(call: LocalCall, x: fx.Node, kernel: Any, *settings: Any) -> Any:
    return _max_pool(len(kernel), call, x, kernel, *settings)


def by_rank(pattern: str, ranks: Sequence[int], local: Callable[..., Any]) -> dict:
    """The local form of ``pattern`` with each number of spatial dims put in."""
    ops = {k: getattr(aten, pattern.format(k)).default for k in ranks}
    return {op: partial(local, k) for k, op in ops.items()}


LOCAL: dict[Any, Localizer] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    "prims::_low_memory_max_pool_with_offsets": _low_memory_pool,
    "prims::_low_memory_max_pool_offsets_to_indices": _offsets_to_indices,
    **by_rank("max_pool{}d_with_indices", (2, 3), _max_pool_with_indices),
    **by_rank("max_pool{}d_with_indices_backward", (2, 3), _max_pool_backward),
}
