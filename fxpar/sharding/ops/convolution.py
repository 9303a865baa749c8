"""Splits convolutions, and gives words to dims over which windows slide.

Batch and channels are free. Input channels are contracted and groups are a compound of
their own; the bias is added once, so where input channels are split it is partial as
well.

A window starts at each step of ``stride`` rows, so a spatial dim of ``many`` rows and
one of ``few`` windows have matching shards where ``many = few * stride``: the first is
``(o s!)``, the second ``o``, and a shard needs rows around it, its halo. Where that
does not hold ranks read windows of rows (``RowWindow``), or the dim is whole.

Where such a dim is split a rank reads the rows around its shard that its windows reach,
which replace the padding too, and gradients of such rows go back to the ranks that own
them. Other dims are padded by the op. A call with groups gets the local number of
groups.

In: calls of these ops; sizes of a dim and its windows. Out: their rules and local
forms; words for a rule.
Never: pads a split dim by the op.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Size
from fxpar.sharding.factors import Passage, Reach, RowWindow, Rule, parse_rule
from fxpar.sharding.op_table import each, names, rows, text
from fxpar.sharding.ops.local_call import LocalCall
from fxpar.sharding.ops.reads import (
    add_halo_rows,
    halo_shaped,
    split_dims,
    unsplit_padding,
    windows_of,
    with_halo_rows,
)


@dataclass(frozen=True)
class SlidingWindow:
    """Describes how windows slide over one dim, in rows."""

    # Rows that each window reads.
    kernel: int
    # From one window to the next.
    stride: int = 1
    # At each end of the dim.
    padding: int = 0
    # From one row of a window to the next.
    dilation: int = 1

    @property
    def is_row(self) -> bool:
        """Return whether each window is the row at its place."""
        return (self.kernel, self.stride, self.padding) == (1, 1, 0)

    @property
    def overhang(self) -> int:
        """Return the rows that the last window of a shard reaches beyond the shard;
        negative where the last windows that start within the shard end before it
        does."""
        return self.dilation * (self.kernel - 1) - self.padding - (self.stride - 1)

    @property
    def reach(self) -> Reach:
        """Return the rows that each window reads."""
        span = self.dilation * (self.kernel - 1) + 1
        return Reach(self.stride, first=-self.padding, span=span)

    def count(self, rows: int, ceil: bool = False) -> int:
        """Return the number of windows of a dim of ``rows`` rows, padded at both ends;
        with ``ceil`` including one that ends after the padding, if it starts before
        that."""
        steps = rows + 2 * self.padding - self.dilation * (self.kernel - 1) - 1
        if not ceil:
            return steps // self.stride + 1
        more = -(-steps // self.stride)
        return more + (more * self.stride < rows + self.padding)

    def fits(self, many: int, few: int) -> bool:
        """Return whether shards of rows and shards of windows match."""
        return few * self.stride == many and -self.overhang < self.stride

    def is_counting_all(self, padding: bool) -> bool:
        """Return whether every window of a dim that it fits counts all its rows.
        ``padding``: whether rows of the padding are counted."""
        return self.overhang <= self.padding * padding and (padding or not self.padding)


def windows(
    kernel: int | Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    k: int,
) -> list[SlidingWindow]:
    """Return the windows of ``k`` dims; an empty stride is the kernel's size."""
    sizes = each(kernel, k)
    steps = each(stride, k) if stride or stride == 0 else sizes
    rest = each(padding, k), each(dilation, k)
    return [
        SlidingWindow(*numbers) for numbers in zip(sizes, steps, *rest, strict=True)
    ]


@dataclass(frozen=True)
class SpatialDims:
    """Holds the words of dims that windows slide over."""

    # One for each dim, of the tensor that has rows.
    many: list[str]
    # One for each dim, of the tensor that has windows.
    few: list[str]
    # (factor, size) of factors in compound words.
    sizes: tuple[tuple[str, int], ...]
    # The windows of each dim in which a shard needs more rows; the dims' numbers among
    # these dims.
    read: tuple[RowWindow, ...] = ()
    # Words of dims where each window is the row at its place.
    plain: frozenset[str] = frozenset()

    @property
    def free(self) -> frozenset[str]:
        """Return the factors that an axis may split, but only into equal shards."""
        read_words = {self.few[w.dim] for w in self.read if w.reach is not None}
        free = frozenset(word for word in self.few if not word.endswith("!"))
        return free - read_words - self.plain

    def windows(self, position: int, first: int) -> tuple[RowWindow, ...]:
        """Return the windows of a tensor that has rows, whose spatial dims start at
        ``first``."""
        return tuple(
            replace(window, position=position, dim=first + window.dim)
            for window in self.read
        )


def spatial_dims(
    slid: Sequence[SlidingWindow],
    many: Sequence[int],
    few: Sequence[int],
    may: Callable[[SlidingWindow], bool] = lambda window: True,
    *,
    sliding: bool = True,
) -> SpatialDims:
    """Return the words of dims of these sizes with windows ``slid`` over them. ``may``:
    whether a dim may be split as halos are; ``sliding``: whether dims whose shards do
    not match, or are unequal, may be split at all."""
    many_words, few_words, sizes, read = [], [], [], []
    for d, (window, n, count) in enumerate(zip(slid, many, few, strict=True)):
        word = f"o{d}"
        fits = window.fits(int(n), int(count)) and may(window)
        ends = window.padding, max(0, window.overhang)
        if sliding and _can_slide(window, n, count):
            many_words.append(word)
            few_words.append(word)
            halo = ends if fits else None
            read.append(RowWindow(0, d, n, count, window.reach, halo))
            continue
        many_words.append(word if fits else "_")
        few_words.append(word if fits else f"{word}!")
        if fits and window.stride > 1:
            many_words[-1] = f"({word} s{d}!)"
            sizes.append((f"s{d}", window.stride))
        if fits and any(ends):
            read.append(RowWindow(0, d, halo=ends))
    plain = frozenset(few_words[d] for d, w in enumerate(slid) if w.is_row)
    return SpatialDims(many_words, few_words, tuple(sizes), tuple(read), plain)


def _can_slide(window: SlidingWindow, rows: int, count: int) -> bool:
    """Return whether ranks may read windows of a dim of ``rows`` rows."""
    is_known = isinstance(rows, int) and isinstance(count, int)
    return is_known and count > 1 and not window.is_row


def sliding_rule(
    rule: str,
    spatial: SpatialDims,
    windows: tuple[RowWindow, ...],
    groups: int = 1,
) -> Rule:
    """Return the rule with the sizes and windows of its spatial dims."""
    sizes = (("g", groups),) if groups > 1 else ()
    return replace(
        parse_rule(rule),
        sizes=(*sizes, *spatial.sizes),
        evenly=spatial.free,
        windows=windows,
    )


aten = torch.ops.aten


def _channels(transposed: bool, groups: int, k: int) -> tuple[str, str, list[str]]:
    """Return words of the channel dim of input and of output, and of the weight's
    dims."""
    inside = [f"{word}!" for word in names(k, "k")]
    first, second = ("ci", "co") if transposed else ("co", "ci")
    if groups == 1:
        return "ci", "co", [first, second, *inside]
    return "(g ci)", "(g co)", [f"(g {first})", second, *inside]


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Rule | None:
    if x.dim() != weight.dim():
        return None
    k = x.dim() - 2
    ci, co, kernel = _channels(transposed, groups, k)
    slid = windows(weight.shape[2:], stride, padding, dilation, k)
    rows = [int(n) for n in x.shape[2:]]
    if transposed:
        more = zip(rows, slid, each(output_padding, k), strict=True)
        result_rows = [
            (n - 1) * w.stride - 2 * w.padding + w.dilation * (w.kernel - 1) + 1 + extra
            for n, w, extra in more
        ]
        spatial = spatial_dims(slid, result_rows, rows)
        operand_dims, result_dims = spatial.few, spatial.many
    else:
        result_rows = [w.count(n) for n, w in zip(rows, slid, strict=True)]
        spatial = spatial_dims(slid, rows, result_rows)
        operand_dims, result_dims = spatial.many, spatial.few
    operands = [
        ["n", ci, *operand_dims],
        kernel,
        *([["+", co]] if bias is not None else []),
    ]
    position = len(operands) if transposed else 0
    words = text(*operands, results=[["n", co, *result_dims]])
    rule = sliding_rule(words, spatial, spatial.windows(position, 2), groups)
    summed = (2,) if bias is not None else ()
    return replace(rule, passages=(Passage((0, *summed)), Passage((1, *summed))))


def _convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> Rule | None:
    """Return the rule. A convolution reads rows around a shard for the weight's
    gradient, and returns gradients of such rows; a transposed one reads such rows of
    ``grad``."""
    if x.dim() != weight.dim():
        return None
    k = x.dim() - 2
    ci, co, kernel = _channels(transposed, groups, k)
    slid = windows(weight.shape[2:], stride, padding, dilation, k)
    many, few = (grad, x) if transposed else (x, grad)
    sizes = many.shape[2:], few.shape[2:]
    spatial = spatial_dims(slid, *sizes, sliding=mask[0] or mask[1])
    at_grad, at_x = spatial.few, spatial.many
    read = spatial.windows(1, 2) * mask[1] + spatial.windows(3, 2) * mask[0]
    if transposed:
        at_grad, at_x = spatial.many, spatial.few
        read = spatial.windows(0, 2) * (mask[0] or mask[1])
    operand = ["n", ci, *at_x]
    # The bias is not in the product, so a split of input channels leaves it complete.
    gradients = zip([operand, kernel, [co, "~ci"]], mask, strict=True)
    results = [dims for dims, is_asked in gradients if is_asked]
    words = text(["n", co, *at_grad], operand, kernel, results=results)
    return sliding_rule(words, spatial, read, groups)


# Local forms


def _groups(call: LocalCall, channels: Size, per_group: Size) -> Size:
    """Return the groups of a convolution, from its channels and the channels of one
    group."""
    return call.build.compute(operator.floordiv, channels, per_group)


def _output_padding(
    call: LocalCall,
    position: int,
    extra: Sequence[int],
    slid: Sequence[SlidingWindow],
    split: Sequence[bool],
) -> list[int]:
    """Return the rows that a transposed convolution adds at the end. ``position``: of
    the tensor that has rows. For a shard they are the rows that no window reaches, with
    windows none."""
    read = {window.dim - 2 for window in windows_of(call, position)}
    own = [0 if d in read else max(0, -w.overhang) for d, w in enumerate(slid)]
    return [
        n if cut else whole
        for n, whole, cut in zip(own, each(extra, len(split)), split, strict=True)
    ]


def _local_convolution(
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
    padding = unsplit_padding(padding, split)
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


def _local_convolution_backward(
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
        padding = unsplit_padding(padding, split)
        if transposed:
            output_padding = _output_padding(call, 0, output_padding, slid, split)
            grad = with_halo_rows(call, grad, 0)
        else:
            x = with_halo_rows(call, x, 1) if mask[1] else halo_shaped(call, x, 3)
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
