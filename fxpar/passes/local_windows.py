"""Local forms of ops whose windows slide over dims: convolutions and pools.

Where such a dim is split a rank reads the rows around its shard that its windows reach,
which stand for the padding too, and what a backward computes of such rows goes back to
those whose they are (``halos``). Elsewhere the op pads as it did. A convolution is told
the local count of its groups.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpar.passes.builder import Size, value_of
from fxpar.passes.halos import extended, given_back, halos_of, is_split
from fxpar.passes.local_call import LocalCall, Localizer
from fxpar.sharding.rules.window_dims import Window, each, windows

aten = torch.ops.aten


# Convolutions


def _groups(call: LocalCall, channels: Size, per_group: Size) -> Size:
    """Groups of a convolution, of its channels and those of one group."""
    return call.build.compute(operator.floordiv, channels, per_group)


def _split(call: LocalCall, position: int, k: int) -> list[bool]:
    """Of the last ``k`` dims of one of a call's tensors, which are split."""
    first = len(call.shapes[position]) - k
    return [is_split(call, position, first + d) for d in range(k)]


def _padding(padding: int | Sequence[int], split: Sequence[bool]) -> list[int]:
    """Padding where a dim is not split."""
    amounts = each(padding, len(split))
    return [0 if cut else n for n, cut in zip(amounts, split, strict=True)]


def _output_padding(
    extra: Sequence[int], slid: Sequence[Window], split: Sequence[bool]
) -> list[int]:
    """Rows that a transposed convolution adds behind; of a shard, those that no window
    reaches."""
    own = [max(0, -window.behind) for window in slid]
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
    split = _split(call, 0, k)
    if not any(split):
        rest = stride, padding, dilation, transposed, output_padding, groups
        return call.same(x, weight, bias, *rest)
    padding = _padding(padding, split)
    if not transposed:
        rest = stride, padding, dilation, transposed, output_padding, groups
        return call.same(extended(call, x, 0), weight, bias, *rest)
    slid = windows(call.shapes[1][2:], stride, call.node.args[4], dilation, k)
    output_padding = _output_padding(output_padding, slid, split)
    rest = stride, padding, dilation, transposed, output_padding, groups
    made = given_back(call, call.same(x, weight, None, *rest), len(call.operands))
    if bias is None:
        return made
    bias = call.build.call(aten.reshape.default, bias, [-1, *[1] * k])
    return call.build.call(aten.add.Tensor, made, bias)


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
    out = call.operand_shape(0)[1]
    if isinstance(groups, int) and groups > 1:
        channels = out if transposed else call.operand_shape(1)[1]
        groups = _groups(call, channels, call.operand_shape(2)[1])
    if bias_sizes is not None:
        bias_sizes = [out]
    k = len(call.shapes[0]) - 2
    split, own = _split(call, 0, k), grad
    if any(split):
        slid = windows(call.shapes[2][2:], stride, padding, dilation, k)
        padding = _padding(padding, split)
        if transposed:
            output_padding = _output_padding(output_padding, slid, split)
            grad = extended(call, grad, 0)
        else:
            x = extended(call, x, 1) if mask[1] else _widened(call, x, 3)
    rest = stride, padding, dilation, transposed, output_padding, groups
    if not any(split):
        return call.same(grad, x, weight, bias_sizes, *rest, mask)
    results: list[Any] = [None, None, None]
    if mask[0] or mask[1]:
        wanted = [mask[0], mask[1], False]
        made = call.same(grad, x, weight, None, *rest, wanted)
        for i in range(2):
            if mask[i]:
                results[i] = call.build.call(operator.getitem, made, i)
    if mask[0]:
        results[0] = given_back(call, results[0], 3)
    if mask[2]:
        over = [0, *range(2, k + 2)]
        results[2] = call.build.call(aten.sum.dim_IntList, own, over)
    return tuple(results)


def _widened(call: LocalCall, x: fx.Node, position: int) -> fx.Node:
    """A tensor of the shape of ``x`` with the rows of another one's halos; of those its
    values mean nothing."""
    amounts = [0] * (2 * len(call.shapes[position]))
    for halo in halos_of(call, position):
        at = 2 * (len(call.shapes[position]) - 1 - halo.dim)
        amounts[at : at + 2] = halo.before, halo.after
    return call.build.call(aten.constant_pad_nd.default, x, amounts)


LOCAL: dict[Any, Localizer] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
