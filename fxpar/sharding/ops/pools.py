"""Splits pools and patches of images.

Leading dims are free. Dims over which windows slide are split as in a ``convolution``.

A rank pools the rows that its windows read, and gives positions of maxima in the whole
dim. Where windows at the ends count fewer rows than others, which a shard cannot know,
an average sums the rows that windows read, in a dtype that holds their sum, and divides
by the rows that each window counts, by its place in the whole dim.

An adaptive pool cuts a dim into parts of nearly equal size. Part i of ``few`` begins at
row ``i * many // few`` and ends, rounded up, at ``(i + 1) * many / few``, so neighbours
may share a row. A rank reads the rows of its own parts; where parts are of one length,
and ranks have equally many, these are its own rows, and the op pools them. Else parts
are laid out one after the other, each with the rows of the longest and filled after its
end: so all have one length, and the op pools them. A backward adds the gradients of
such rows to the rows they came from.

In: calls of these ops. Out: their rules and local forms.
Never: pads a split dim by the op; cuts a dim of open size into parts that are split.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Size
from fxpar.sharding import shard_sizes
from fxpar.sharding.factors import Reach, RowWindow, Rule, parse_rule
from fxpar.sharding.op_table import by_rank, each, names, rows, tensors_of, text
from fxpar.sharding.ops.convolution import (
    SlidingWindow,
    sliding_rule,
    spatial_dims,
    windows,
)
from fxpar.sharding.ops.local_call import LocalCall, added_at, rows_at
from fxpar.sharding.ops.reads import (
    add_halo_rows,
    axes_of,
    exchange_of,
    halo_shaped,
    halos_of,
    split_dims,
    unsplit_padding,
    window_shape,
    windows_of,
    with_halo_rows,
)
from fxpar.sharding.ops.reduction import least

aten = torch.ops.aten

Numbers = int | Sequence[int]
MaySplit = Callable[[SlidingWindow], bool]


# Windows


def spatial(k: int, *args: Any, **kwargs: Any) -> str:
    """Return the rule: every tensor has the same leading dims; the last ``k`` are
    whole."""
    words = [*names(args[0].dim() - k), *["_"] * k]
    return text(*[words] * len(tensors_of((args, kwargs))), results=[words])


def _counts(x: torch.Tensor, slid: Sequence[SlidingWindow], ceil: bool) -> list[int]:
    """Return the number of windows of each of the last dims."""
    rows = x.shape[-len(slid) :]
    return [w.count(int(n), ceil) for w, n in zip(slid, rows, strict=True)]


def _even(ceil: bool) -> MaySplit:
    """Return which windows may be split as halos: with ``ceil`` none that ends before
    its shard's rows do, as a window that begins after the padding would be dropped."""
    return lambda window: not ceil or window.overhang >= 0


# From the arguments of a pool after its tensors: windows over the last ``k`` dims,
# whether their number is rounded up, and which may be split as halos.
_Windows = tuple[list[SlidingWindow], bool, MaySplit]


def _max_windows(
    k: int,
    kernel: Numbers,
    stride: Numbers = (),
    padding: Numbers = 0,
    dilation: Numbers = 1,
    ceil: bool = False,
    *_: Any,
) -> _Windows:
    return windows(kernel, stride, padding, dilation, k), ceil, _even(ceil)


def _average_windows(
    k: int,
    kernel: Numbers,
    stride: Numbers = (),
    padding: Numbers = 0,
    ceil: bool = False,
    count_padding: bool = True,
    divisor: int | None = None,
) -> _Windows:
    """Return the windows; all windows of a dim must count equally many rows, if it is
    split as halos."""
    even = _even(ceil)
    return (
        windows(kernel, stride, padding, 1, k),
        ceil,
        lambda w: even(w) and (divisor is not None or w.is_counting_all(count_padding)),
    )


def _pool_of(
    read: Callable[..., _Windows], results: int = 1, reads: int = 0
) -> Callable[..., Rule]:
    """Return the rule function of pools with ``results`` results; of their backwards,
    which read ``reads`` tensors that have windows, and the pooled one as the second
    operand."""

    def rule(k: int, *args: Any, **kwargs: Any) -> Rule:
        x, *settings = args[1:] if reads else args
        slid, ceil, may = read(k, *settings, **kwargs)
        few = args[0].shape[-k:] if reads else _counts(x, slid, ceil)
        spatial = spatial_dims(slid, x.shape[-k:], few, may)
        lead = names(x.dim() - k)
        rows, slid_rows = [*lead, *spatial.many], [*lead, *spatial.few]
        if reads:
            words = text(slid_rows, rows, *[slid_rows] * (reads - 1), results=[rows])
        else:
            words = text(rows, results=[slid_rows] * results)
        position = reads + 1 if reads else 0  # of the tensor that has rows
        return sliding_rule(words, spatial, spatial.windows(position, len(lead)))

    return rule


def _low_memory_pool(x: torch.Tensor, kernel: Sequence[int], *rest: Any) -> Rule:
    return _pool_of(_max_windows, 2)(len(kernel), x, kernel, *rest)


def _low_memory_indices(x: torch.Tensor, kernel: Sequence[int], *_: Any) -> Rule:
    """Return the rule; positions are given by the window, and the offset in it."""
    words = names(x.dim())
    return parse_rule(text(words, results=[words]))


def _fractional_pool(x: torch.Tensor, *args: Any) -> str:
    """Return the rule; a sample per image and channel determines where windows
    begin."""
    samples, k = args[-1], args[-1].shape[-1]
    words = [*names(x.dim() - k), *["_"] * k]
    batch = ["_"] * (samples.dim() - 1 - (x.dim() - k)) + words[:-k] + ["_"]
    return text(words, batch, results=[words, words])


def _fractional_pool_backward(grad: torch.Tensor, x: torch.Tensor, *args: Any) -> str:
    return spatial(len(args[0]), grad, x, args[-1])


# Local forms


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
    """Return the pool of a shard with the rows around it; ``fill`` replaces padding."""
    padding = unsplit_padding(padding, split_dims(call, 0, k))
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
    """Return a pool's gradient; gradients of rows around the shard go to their
    owners."""
    position = len(call.operands)  # of the result, which has the halos
    padding = unsplit_padding(padding, split_dims(call, 1, k))
    x = halo_shaped(call, x, position)
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
    """Return maxima, and where in its window each is."""
    return pool(
        k, least(x.meta["val"].dtype), call, x, kernel, stride, padding, dilation, ceil
    )


def _local_max_pool_with_indices(
    k: int, call: LocalCall, x: fx.Node, *args: Any
) -> Any:
    return _with_places(k, call, _max_pool(k, call, x, *args))


def _with_places(
    k: int, call: LocalCall, pooled: fx.Node, parts: Sequence[UnevenParts] = ()
) -> Any:
    """Return the values of a pool, and positions of maxima in the whole dim."""
    if not any(split_dims(call, 0, k)):
        return pooled
    values, index = (call.build.call(operator.getitem, pooled, i) for i in range(2))
    dims = _shards(call, index, parts, (0, 0), k)
    return values, reindexed(call, index, dims, inward=False)


def _local_offsets_to_indices(
    call: LocalCall,
    offsets: fx.Node,
    kernel: Sequence[int],
    size: Sequence[int],
    stride: Any,
    padding: Any,
    dilation: Any,
) -> fx.Node:
    """Return positions in the whole, as windows are counted from this rank's first."""
    index = call.same(offsets, kernel, size, stride, padding, dilation)
    k = len(kernel)
    first = len(call.shapes[0]) - k
    for d, step in enumerate(each(stride, k)):
        axes, rows = call.operands[0].dims[first + d], call.shapes[0][first + d]
        if call.build.mesh.count(axes) > 1:
            start = _times(call, rows, axes, 0, step * math.prod(size[d + 1 :]))
            index = call.build.call(aten.add.Tensor, index, start)
    return index


def _times(
    call: LocalCall, rows: int, axes: Sequence[str], before: int, by: int
) -> Size:
    """Return ``by`` times the position of the row that is ``before`` rows before the
    first that a rank holds."""
    build, base = call.build, -by * before
    if shard_sizes.is_even(rows, build.mesh, axes):
        return build.offset(axes, rows // build.mesh.count(axes) * by, base)
    start = build.compute(operator.mul, build.own_start(rows, axes), by)
    return build.compute(operator.add, start, base)


def _local_max_pool_backward(
    k: int, call: LocalCall, grad: fx.Node, x: fx.Node, *args: Any
) -> fx.Node:
    """Return the gradient. ``args``: settings of the windows, then positions of
    maxima."""
    *settings, index = args
    if any(split_dims(call, 1, k)):
        index = reindexed(call, index, shards_with_halos(call, 1, 3, k), inward=True)
    return pool_backward(k, call, grad, x, *settings, index)


@dataclass(frozen=True)
class ShardWithHalo:
    """Describes one dim of a shard with the rows around it."""

    # Rows of the whole dim.
    whole: int
    # Rows of the shard with those around it.
    width: Size
    # Number -> the position where these begin in the dim, times the number.
    start: Callable[[int], Size]


def shards_with_halos(
    call: LocalCall, at: int, halos: int, k: int
) -> list[ShardWithHalo]:
    """Return the last ``k`` dims of the tensor at ``at``, with the halos of the one at
    ``halos``."""
    build, first = call.build, len(call.shapes[at]) - k
    shards: list[ShardWithHalo] = []
    ends = {dim: rows for dim, *rows in halos_of(call, halos)}
    read = {window.dim: window for window in windows_of(call, halos)}
    for d in range(first, first + k):
        axes, whole = axes_of(call, at, d), call.shapes[at][d]
        if d in read:
            exchange = exchange_of(call, read[d])
            start = partial(build.compute, operator.mul, build.window_start(exchange))
            width = build.window_rows(exchange)
            shards.append(ShardWithHalo(whole, width, start))
            continue
        size, (before, after) = build.own_size(whole, axes), ends.get(d, (0, 0))
        width = build.compute(operator.add, size, before + after)
        start = partial(_times, call, whole, axes, before)
        shards.append(ShardWithHalo(whole, width, start))
    return shards


def reindexed(
    call: LocalCall, index: fx.Node, dims: Sequence[ShardWithHalo], inward: bool
) -> fx.Node:
    """Return positions in the whole for positions in the shard with the rows around it;
    ``inward``: the reverse."""
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


def _local_low_memory_pool(
    call: LocalCall, x: fx.Node, kernel: Any, *settings: Any
) -> Any:
    return _max_pool(len(kernel), call, x, kernel, *settings)


def _local_average(
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
    slid = windows(kernel, stride, padding, 1, k)
    if not _can_count_by_place(call, 0, divisor, slid, ceil, count_padding):
        return pool(
            k, 0, call, x, kernel, stride, padding, ceil, count_padding, divisor
        )
    dtype = x.meta["val"].dtype
    x = call.build.cast(x, torch.promote_types(dtype, torch.float32))
    total = pool(k, 0, call, x, kernel, stride, padding, ceil, count_padding, 1)
    mean = _divided(call, total, 0, len(call.operands), slid, count_padding)
    return call.build.cast(mean, dtype)


def _local_average_backward(
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
    if _can_count_by_place(call, 2, divisor, slid, ceil, count_padding):
        grad, divisor = _divided(call, grad, 1, 0, slid, count_padding), 1
    settings = kernel, stride, padding, ceil, count_padding, divisor
    return pool_backward(k, call, grad, x, *settings)


def _can_count_by_place(
    call: LocalCall,
    position: int,
    divisor: int | None,
    slid: Sequence[SlidingWindow],
    ceil: bool,
    count_padding: bool,
) -> bool:
    """Return whether windows may count fewer rows at the ends of a dim, of the tensor
    at ``position``, of which ranks read windows of rows."""
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
    """Return ``x`` divided by the rows that each window counts. ``many``, ``few``:
    positions of the tensors that have rows, and windows."""
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
    """Return how many rows each window of a rank counts, of dim ``d`` of the tensors at
    ``positions``, the one with rows and the one with windows."""
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


# Pools that cut a dim into a number of parts


def _reach_of_parts(many: int, few: int) -> Reach:
    """Return the rows of each of ``few`` parts, as many as the longest has."""
    ends = range(1, few + 1)
    span = max(-(-i * many // few) - (i - 1) * many // few for i in ends)
    return Reach(many, few, span=span)


def _parts(
    many: Sequence[int], few: Sequence[int], first: int, position: int
) -> tuple[list[str], list[str], tuple[RowWindow, ...]]:
    """Return (words of dims that are cut, words of their parts, windows). ``first``:
    the first of these dims; ``position``: of the tensor that has them."""
    rows, parts, windows = [], [], []
    for d, (n, count) in enumerate(zip(many, few, strict=True)):
        are_known = isinstance(n, int) and isinstance(count, int)
        if not are_known or min(n, count) <= 1:
            rows.append("_")
            parts.append("_")
            continue
        rows.append(f"o{d}")
        parts.append(f"o{d}")
        halo = None if n % count else (0, 0)
        reach = _reach_of_parts(n, count)
        windows.append(RowWindow(position, first + d, n, count, reach, halo))
    return rows, parts, tuple(windows)


def _adaptive_pool(
    k: int, x: torch.Tensor, few: int | Sequence[int], results: int = 1
) -> Rule:
    first = x.dim() - k
    rows, parts, windows = _parts(x.shape[first:], each(few, k), first, 0)
    lead = names(first)
    words = text([*lead, *rows], results=[[*lead, *parts]] * results)
    return replace(parse_rule(words), windows=windows)


def _adaptive_pool_backward(
    k: int, grad: torch.Tensor, x: torch.Tensor, *index: Any
) -> Rule:
    """Return the rule of a backward; ``index``: positions of maxima, if given."""
    first, end = x.dim() - k, 2 + len(index)
    rows, parts, windows = _parts(x.shape[first:], grad.shape[first:], first, end)
    lead = names(first)
    read = [[*lead, *parts], [*lead, *rows], *[[*lead, *parts]] * len(index)]
    words = text(*read, results=[[*lead, *rows]])
    return replace(parse_rule(words), windows=windows)


@dataclass(frozen=True)
class UnevenParts:
    """Holds parts of unequal lengths of a dim, laid out one after the other on a
    rank."""

    # The pool, or its backward.
    call: LocalCall
    # The rows that ranks read of the dim.
    window: RowWindow
    # For each laid out row its position among the rows that this rank has.
    places: fx.Node
    # For each laid out row whether it is within its part, not after the part's end.
    inside: fx.Node
    # For each part its number of rows.
    lengths: fx.Node
    # For each part its begin in the whole dim, minus its begin as laid out.
    shifts: fx.Node
    # Number of laid out rows.
    rows: Size

    @property
    def dim(self) -> int:
        return self.window.dim

    def arranged(self, x: fx.Node, fill: int | float) -> fx.Node:
        """Return the rows of ``x``, laid out part after part."""
        x = rows_at(self.call, x, self.dim, self.places)
        return self.call.where(self._along(x, self.inside), x, fill)

    def added(self, x: fx.Node, shape: Sequence[Size]) -> fx.Node:
        """Return a tensor of this shape, to whose rows the values of laid out rows are
        added."""
        x = self.call.where(self._along(x, self.inside), x, 0)
        return added_at(self.call, x, shape, self.dim, self.places)

    def averaged(self, x: fx.Node) -> fx.Node:
        """Return averages over the rows of each part, from averages over the longest
        length."""
        build = self.call.build
        assert self.window.reach is not None
        lengths = build.cast(self.lengths, x.meta["val"].dtype)
        x = build.call(aten.mul.Tensor, x, self.window.reach.span)
        return build.call(aten.div.Tensor, x, self._along(x, lengths))

    def as_shard(self, index: fx.Node) -> ShardWithHalo:
        """Return the shard as maxima count its rows. ``index``: maxima of each part."""

        def start(sign: int) -> fx.Node:
            shifts = self._along(index, self.shifts)
            return self.call.build.call(aten.mul.Tensor, shifts, sign)

        return ShardWithHalo(self.window.rows, self.rows, start)

    def _along(self, x: fx.Node, numbers: fx.Node) -> fx.Node:
        """Return numbers for the rows of the dim, in a shape that broadcasts."""
        view = [-1, *[1] * (x.meta["val"].dim() - 1 - self.dim)]
        return self.call.build.call(aten.reshape.default, numbers, view)


def _uneven_parts(call: LocalCall, position: int, few: int) -> list[UnevenParts]:
    """Return the laid out parts of dims of which ranks read windows, where parts have
    unequal lengths. ``position``, ``few``: of the tensors that have rows, and parts."""
    uneven = (w for w in windows_of(call, position) if w.rows % w.count)
    return [_parts_of(call, window, few) for window in uneven]


def _parts_of(call: LocalCall, window: RowWindow, few: int) -> UnevenParts:
    build, late = call.build, few - len(call.operands)
    assert window.reach is not None
    device = call.node.all_input_nodes[0].meta["val"].device
    shape = call.operand_shape(few) if late < 0 else call.local_shape(late)
    count, span = shape[window.dim], window.reach.span
    exchange, call_op = exchange_of(call, window), build.call
    own = build.iota(count, device)
    part = call_op(aten.add.Tensor, own, build.own_start(window.count, exchange.axes))
    part = call_op(aten.clamp_max.default, part, window.count - 1)  # for a spare row
    begin = call_op(aten.mul.Tensor, part, window.rows)
    end = call_op(aten.add.Tensor, begin, window.rows + window.count - 1)
    floor = {"rounding_mode": "floor"}
    begin = call_op(aten.div.Tensor_mode, begin, window.count, **floor)
    end = call_op(aten.div.Tensor_mode, end, window.count, **floor)
    column = [-1, 1]
    rows = call_op(
        aten.add.Tensor,
        call_op(aten.reshape.default, begin, column),
        build.iota(span, device),
    )
    inside = call_op(aten.lt.Tensor, rows, call_op(aten.reshape.default, end, column))
    places = call_op(aten.sub.Tensor, rows, build.window_start(exchange))
    last = build.compute(operator.sub, build.window_rows(exchange), 1)
    places = call_op(aten.clamp.default, places, 0, last)
    return UnevenParts(
        call,
        window,
        call_op(aten.reshape.default, places, [-1]),
        call_op(aten.reshape.default, inside, [-1]),
        call_op(aten.sub.Tensor, end, begin),
        call_op(aten.sub.Tensor, begin, call_op(aten.mul.Tensor, own, span)),
        build.compute(operator.mul, count, span),
    )


def _pooled(
    k: int, call: LocalCall, x: fx.Node, fill: int | float
) -> tuple[Any, list[UnevenParts]]:
    """Return the op's result for a rank's parts, and the parts that were laid out."""
    parts = _uneven_parts(call, 0, len(call.operands))
    x = with_halo_rows(call, x, 0, fill)
    for one in parts:
        x = one.arranged(x, fill)
    return call.same(x, list(call.local_shape()[-k:])), parts


def _local_adaptive_average(k: int, call: LocalCall, x: fx.Node, few: Any) -> fx.Node:
    pooled, parts = _pooled(k, call, x, 0)
    for one in parts:
        pooled = one.averaged(pooled)
    return pooled


def _local_adaptive_maximum(k: int, call: LocalCall, x: fx.Node, few: Any) -> Any:
    pooled, parts = _pooled(k, call, x, least(x.meta["val"].dtype))
    return _with_places(k, call, pooled, parts)


def _shards(
    call: LocalCall,
    index: fx.Node,
    parts: Sequence[UnevenParts],
    positions: tuple[int, int],
    k: int,
) -> list[ShardWithHalo]:
    """Return the last ``k`` dims of the pooled tensor as shards. ``positions``: of that
    tensor, and of the tensor that has windows."""
    dims = shards_with_halos(call, *positions, k)
    first = len(call.shapes[positions[0]]) - k
    for one in parts:
        dims[one.dim - first] = one.as_shard(index)
    return dims


def _local_adaptive_average_backward(
    k: int, call: LocalCall, grad: fx.Node, x: fx.Node
) -> fx.Node:
    parts = _uneven_parts(call, 2, 0)
    for one in parts:
        grad = one.averaged(grad)
    return _added(call, parts, 2, call.same(grad, _of_pooled_shape(call, x, parts, 2)))


def _local_adaptive_maximum_backward(
    k: int, call: LocalCall, grad: fx.Node, x: fx.Node, index: fx.Node
) -> fx.Node:
    parts = _uneven_parts(call, 3, 0)
    if any(split_dims(call, 1, k)):
        dims = _shards(call, index, parts, (1, 3), k)
        index = reindexed(call, index, dims, inward=True)
        # A spare part's gradient is 0, which may be added anywhere.
        index = call.build.call(aten.clamp_min.default, index, 0)
    gradient = call.same(grad, _of_pooled_shape(call, x, parts, 3), index)
    return _added(call, parts, 3, gradient)


def _of_pooled_shape(
    call: LocalCall, x: fx.Node, parts: Sequence[UnevenParts], position: int
) -> fx.Node:
    """Return a tensor with the pooled tensor's shape on a rank; its values are not
    used."""
    if not windows_of(call, position):
        return x
    shape = window_shape(call, call.operand_shape(1), position)
    for one in parts:
        shape[one.dim] = one.rows
    return call.full(shape, 0, x)


def _added(
    call: LocalCall, parts: Sequence[UnevenParts], position: int, gradient: fx.Node
) -> fx.Node:
    """Return the gradient of a rank's rows from gradients of laid out rows."""
    shape = window_shape(call, call.operand_shape(1), position)
    for i, one in enumerate(parts):
        own = list(shape)
        for other in parts[i + 1 :]:
            own[other.dim] = other.rows
        gradient = one.added(gradient, own)
    return add_halo_rows(call, gradient, position)


# Kind of work, and position of the argument with the window's size.
_POOL: dict[str, Any] = {"work": "pool", "window": 1}
_POOL_BACKWARD: dict[str, Any] = {"work": "pool", "window": 2}

ROWS = {
    **rows(
        "prims::_low_memory_max_pool_with_offsets",
        _low_memory_pool,
        local=_local_low_memory_pool,
        **_POOL,
    ),
    **rows(
        "prims::_low_memory_max_pool_offsets_to_indices",
        _low_memory_indices,
        local=_local_offsets_to_indices,
    ),
    **rows("fractional_max_pool2d fractional_max_pool3d", _fractional_pool),
    **rows(
        "fractional_max_pool2d_backward fractional_max_pool3d_backward",
        _fractional_pool_backward,
        linear="0",
    ),
    **by_rank(
        "max_pool{}d_with_indices",
        (2, 3),
        _pool_of(_max_windows, 2),
        _local_max_pool_with_indices,
        **_POOL,
    ),
    **by_rank(
        "max_pool{}d_with_indices_backward",
        (2, 3),
        _pool_of(_max_windows, reads=2),
        _local_max_pool_backward,
        linear="0",
        **_POOL_BACKWARD,
    ),
    **by_rank(
        "avg_pool{}d",
        (2, 3),
        _pool_of(_average_windows),
        _local_average,
        linear="0",
        **_POOL,
    ),
    **by_rank(
        "avg_pool{}d_backward",
        (2, 3),
        _pool_of(_average_windows, reads=1),
        _local_average_backward,
        linear="0",
        **_POOL_BACKWARD,
    ),
    **by_rank(
        "_adaptive_avg_pool{}d",
        (2, 3),
        _adaptive_pool,
        _local_adaptive_average,
        linear="0",
    ),
    **by_rank(
        "_adaptive_avg_pool{}d_backward",
        (2, 3),
        _adaptive_pool_backward,
        _local_adaptive_average_backward,
        linear="0",
    ),
    **by_rank(
        "adaptive_max_pool{}d",
        (2, 3),
        partial(_adaptive_pool, results=2),
        _local_adaptive_maximum,
    ),
    **by_rank(
        "adaptive_max_pool{}d_backward",
        (2, 3),
        _adaptive_pool_backward,
        _local_adaptive_maximum_backward,
        linear="0",
    ),
}
