"""Local forms of average pools, where a dim that windows slide over is split.

A rank pools the rows that its windows read (``halos``). Where windows at the ends count
fewer rows than others, which a shard cannot know, it adds up what they read, in a dtype
that holds their sum, and divides by the rows that each of them counts, by where it lies
in the whole dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpar.passes.local.halos import axes_of, windows_of
from fxpar.passes.local.local_call import LocalCall, Localizer
from fxpar.passes.local.local_windows import by_rank, pool, pool_backward
from fxpar.sharding.rules.window_dims import SlidingWindow, windows

aten = torch.ops.aten


def _average(
    k: int,
    call: LocalCall,
    x: fx.Node,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil: bool = False,
    count_padding: bool = True,
    divisor: int | None = None,
) -> fx.Node:
    settings = (ceil, count_padding) if k == 1 else (ceil, count_padding, divisor)
    slid = windows(kernel, stride, padding, 1, k)
    if not _counts_by_place(call, 0, divisor, slid, ceil, count_padding):
        return pool(k, 0, call, x, kernel, stride, padding, *settings)
    dtype = x.meta["val"].dtype
    x = call.build.cast(x, torch.promote_types(dtype, torch.float32))
    total = pool(k, 0, call, x, kernel, stride, padding, ceil, count_padding, 1)
    mean = _divided(call, total, 0, len(call.operands), slid, count_padding)
    return call.build.cast(mean, dtype)


def _average_backward(
    k: int,
    call: LocalCall,
    grad: fx.Node,
    x: fx.Node,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil: bool,
    count_padding: bool,
    divisor: int | None,
) -> fx.Node:
    slid = windows(kernel, stride, padding, 1, k)
    if _counts_by_place(call, 2, divisor, slid, ceil, count_padding):
        grad, divisor = _divided(call, grad, 1, 0, slid, count_padding), 1
    settings = kernel, stride, padding, ceil, count_padding, divisor
    return pool_backward(k, call, grad, x, *settings)


def _counts_by_place(
    call: LocalCall,
    position: int,
    divisor: int | None,
    slid: Sequence[SlidingWindow],
    ceil: bool,
    count_padding: bool,
) -> bool:
    """Whether windows of a dim of which ranks read windows of rows, of the tensor at
    this position, may count fewer rows at its ends."""
    padded = not count_padding and any(window.padding for window in slid)
    return divisor is None and (ceil or padded) and bool(windows_of(call, position))


def _divided(
    call: LocalCall,
    x: fx.Node,
    many: int,
    few: int,
    slid: Sequence[SlidingWindow],
    count_padding: bool,
) -> fx.Node:
    """``x`` by the rows that each window counts. ``many``, ``few``: positions of the
    tensors that have rows, and windows."""
    value, k = x.meta["val"], len(slid)
    first = value.dim() - k
    for d, window in enumerate(slid, first):
        counted = _counted(call, window, (many, few), d, count_padding)
        counted = call.build.cast(counted, value.dtype)
        view = [-1, *[1] * (value.dim() - 1 - d)]
        counted = call.build.call(aten.reshape.default, counted, view)
        x = call.build.call(aten.div.Tensor, x, counted)
    return x


def _counted(
    call: LocalCall,
    window: SlidingWindow,
    positions: tuple[int, int],
    d: int,
    count_padding: bool,
) -> fx.Node:
    """How many rows each window of a rank counts, of dim ``d`` of the tensors at these
    positions, that has rows and that has windows."""
    build, (many, few) = call.build, positions
    rows, late = call.shapes[many][d], few - len(call.operands)
    shape = call.operand_shape(few) if late < 0 else call.local_shape(late)
    start = build.own_start(call.shapes[few][d], axes_of(call, few, d))
    place = build.iota(shape[d], call.node.meta["val"].device)
    place = build.call(aten.add.Tensor, place, start)
    place = build.call(aten.mul.Tensor, place, window.stride)
    first = build.call(aten.sub.Tensor, place, window.padding)
    end = build.call(aten.add.Tensor, first, window.kernel)
    ends = (-window.padding, rows + window.padding) if count_padding else (0, rows)
    first = build.call(aten.clamp_min.default, first, ends[0])
    end = build.call(aten.clamp_max.default, end, ends[1])
    return build.call(aten.sub.Tensor, end, first)


LOCAL: dict[Any, Localizer] = {
    **by_rank("avg_pool{}d", (1, 2, 3), _average),
    **by_rank("avg_pool{}d_backward", (2, 3), _average_backward),
}
