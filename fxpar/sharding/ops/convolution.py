"""Splits convolutions, and gives words to dims over which windows slide.

Batch and channels are free. Input channels are contracted and groups are a compound of
their own; the bias is added once, so where input channels are split it is partial as
well.

A window starts at each step of ``stride`` rows. A spatial dim of ``many`` rows and one
of ``few`` windows have one factor (``RowWindow``); equal shards of them match where
``many = few * stride``, and a shard then needs rows around it, its halo. Where such a
dim is split a rank reads the rows that its windows reach, which replace the padding
too, and gradients of such rows go back to the ranks that own them. Other dims are
padded by the op. A call with groups gets the local number of groups.

In: calls of these ops; sizes of a dim and its windows. Out: their rules and local
forms; words for a rule.
Never: pads a split dim by the op.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from fxpar.sharding.factors import Passage, Reach, RowWindow, Rule
from fxpar.sharding.op_table import each, names, parse_rule, rows, text
from fxpar.sharding.ops.local_call import LocalCall
from fxpar.sharding.ops.reads import (
    add_halo_rows,
    halo_shaped,
    split_dims,
    unsplit_padding,
    windows_of,
    with_halo_rows,
)


def windows(
    kernel: int | Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    k: int,
) -> list[Reach]:
    """Return the windows of ``k`` dims; an empty stride is the kernel's size."""
    sizes = each(kernel, k)
    steps = each(stride, k) if stride or stride == 0 else sizes
    rest = each(padding, k), each(dilation, k)
    return [
        Reach(step, first=-padded, span=dilation * (size - 1) + 1)
        for size, step, padded, dilation in zip(sizes, steps, *rest, strict=True)
    ]


class SpatialDims(NamedTuple):
    """Holds how dims that windows slide over may be split."""

    # The word of each dim, of the tensor that has rows and of the one that has windows.
    words: list[str]
    # The windows of each dim in which a shard needs more rows; the dims' numbers among
    # these dims.
    read: list[RowWindow]

    def windows(self, position: int, first: int) -> tuple[RowWindow, ...]:
        """Return the windows of a tensor that has rows, whose spatial dims start at
        ``first``."""
        return tuple(
            replace(window, position=position, dim=first + window.dim)
            for window in self.read
        )


def spatial_dims(
    slid: Sequence[Reach],
    many: Sequence[int],
    few: Sequence[int],
    may: Callable[[Reach], bool] = lambda window: True,
) -> SpatialDims:
    """Return how dims of these sizes, with windows ``slid`` over them, may be split; a
    dim with one window is whole. ``may``: whether a dim may be split as halos are."""
    dims = SpatialDims([], [])
    for d, (window, n, count) in enumerate(zip(slid, many, few, strict=True)):
        n, count = int(n), int(count)
        is_row = window == Reach(1)
        dims.words.append(f"o{d}" if is_row or count > 1 else "_")
        if count > 1 and not is_row:
            halo = -window.first, max(0, window.overhang)
            fits = window.fits(n, count) and may(window)
            dims.read.append(RowWindow(0, d, n, count, window, halo if fits else None))
    return dims


aten = torch.ops.aten


class _Settings(NamedTuple):
    """Holds the settings of a convolution, as its ops take them."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: Any

    def windows(self, weight: Sequence[int]) -> list[Reach]:
        """Return the windows of a weight of this shape."""
        k = len(weight) - 2
        return windows(weight[2:], self.stride, self.padding, self.dilation, k)

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Return (factor, size) of the groups."""
        return (("g", self.groups),) if self.groups > 1 else ()

    def channels(self, k: int) -> tuple[str, str, list[str]]:
        """Return words of the channel dim of input and of output, and of the weight's
        dims."""
        inside = [f"{word}!" for word in names(k, "k")]
        first, second = ("ci", "co") if self.transposed else ("co", "ci")
        if self.groups == 1:
            return "ci", "co", [first, second, *inside]
        return "(g ci)", "(g co)", [f"(g {first})", second, *inside]


def _convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *settings: Any
) -> Rule | None:
    if x.dim() != weight.dim():
        return None
    s, k = _Settings(*settings), x.dim() - 2
    ci, co, kernel = s.channels(k)
    slid = s.windows(weight.shape)
    rows = [int(n) for n in x.shape[2:]]
    if s.transposed:
        more = zip(rows, slid, each(s.output_padding, k), strict=True)
        many = [(n - 1) * w.step + 2 * w.first + w.span + extra for n, w, extra in more]
        spatial = spatial_dims(slid, many, rows)
    else:
        few = [w.count(n) for n, w in zip(rows, slid, strict=True)]
        spatial = spatial_dims(slid, rows, few)
    biases = [["+", co]] if bias is not None else []
    operands = [["n", ci, *spatial.words], kernel, *biases]
    words = text(*operands, results=[["n", co, *spatial.words]])
    summed = (2,) * len(biases)
    return replace(
        parse_rule(words),
        sizes=s.sizes,
        passages=(Passage((0, *summed)), Passage((1, *summed))),
        windows=spatial.windows(len(operands) if s.transposed else 0, 2),
    )


def _convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    *settings: Any,
) -> Rule | None:
    """Return the rule. A convolution reads rows around a shard for the weight's
    gradient, and returns gradients of such rows; a transposed one reads such rows of
    ``grad``."""
    if x.dim() != weight.dim():
        return None
    *own, mask = settings
    s = _Settings(*own)
    ci, co, kernel = s.channels(x.dim() - 2)
    many, few = (grad, x) if s.transposed else (x, grad)
    slid = s.windows(weight.shape)
    spatial = spatial_dims(slid, many.shape[2:], few.shape[2:])
    # Of the bias alone nothing is sent, but rows and windows have one factor.
    read = spatial.windows(1, 2) * (mask[1] or not mask[0])
    read += spatial.windows(3, 2) * mask[0]
    operand = ["n", ci, *spatial.words]
    # The bias is not in the product, so a split of input channels leaves it complete.
    gradients = zip([operand, kernel, [co, "~ci"]], mask, strict=True)
    results = [dims for dims, is_asked in gradients if is_asked]
    words = text(["n", co, *spatial.words], operand, kernel, results=results)
    windows = spatial.windows(0, 2) if s.transposed else read
    return replace(parse_rule(words), sizes=s.sizes, windows=windows)


# Local forms


def _own_settings(
    call: LocalCall, s: _Settings, many: int, weight: int, channels: int
) -> _Settings:
    """Return the settings on a rank: its groups, from the channels of one group;
    padding of dims that are not split; of a transposed convolution, the rows that it
    adds at the end: for a shard those that no window reaches, with windows none.
    ``many``, ``weight``, ``channels``: positions of the tensors that have rows, the
    weight, and the channels of which a weight has those of one group."""
    if s.groups > 1:
        own, of_group = call.shape_at(channels)[1], call.operand_shape(weight)[1]
        s = s._replace(groups=call.build.compute(operator.floordiv, own, of_group))
    k = len(call.shapes[weight]) - 2
    split = split_dims(call, 0, k)
    if not any(split):
        return s
    read = {window.dim - 2 for window in windows_of(call, many)}
    slid = enumerate(s.windows(call.shapes[weight]))
    extra = [0 if d in read else max(0, -w.overhang) for d, w in slid]
    whole = each(s.output_padding, k)
    return s._replace(
        padding=unsplit_padding(s.padding, split),
        output_padding=[
            (n if cut else m) * s.transposed
            for n, m, cut in zip(extra, whole, split, strict=True)
        ],
    )


def _local_convolution(
    call: LocalCall, x: fx.Node, weight: fx.Node, bias: Any, *settings: Any
) -> fx.Node:
    s, end = _Settings(*settings), len(call.operands)  # of the result
    own = _own_settings(call, s, end, 1, end if s.transposed else 0)
    k = len(call.shapes[0]) - 2
    if not any(split_dims(call, 0, k)):
        return call.same(x, weight, bias, *own)
    if not s.transposed:
        return call.same(with_halo_rows(call, x, 0), weight, bias, *own)
    result = add_halo_rows(call, call.same(x, weight, None, *own), end)
    if bias is None:
        return result
    bias = call.build.call(aten.reshape.default, bias, [-1, *[1] * k])
    return call.build.call(aten.add.Tensor, result, bias)


def _local_convolution_backward(
    call: LocalCall,
    grad: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias_sizes: Any,
    *settings: Any,
) -> Any:
    *rest, mask = settings
    s = _Settings(*rest)
    own = _own_settings(call, s, 0, 2, 0 if s.transposed else 1)
    if bias_sizes is not None:
        bias_sizes = [call.operand_shape(0)[1]]
    k = len(call.shapes[0]) - 2
    if not any(split_dims(call, 0, k)):
        return call.same(grad, x, weight, bias_sizes, *own, mask)
    results: list[Any] = [None, None, None]
    if mask[2]:
        over = [0, *range(2, k + 2)]
        results[2] = call.build.call(aten.sum.dim_IntList, grad, over)
    if mask[0] or mask[1]:
        if s.transposed:
            grad = with_halo_rows(call, grad, 0)
        else:
            x = with_halo_rows(call, x, 1) if mask[1] else halo_shaped(call, x, 3)
        which = [mask[0], mask[1], False]
        gradients = call.same(grad, x, weight, None, *own, which)
        for i in range(2):
            if mask[i]:
                results[i] = call.build.call(operator.getitem, gradients, i)
    if mask[0]:
        results[0] = add_halo_rows(call, results[0], 3)
    return tuple(results)


ROWS = {
    **rows(
        "convolution", _convolution, local=_local_convolution, facts="chosen_strides"
    ),
    **rows(
        "convolution_backward",
        _convolution_backward,
        linear="0",
        local=_local_convolution_backward,
        facts="chosen_strides",
    ),
}
