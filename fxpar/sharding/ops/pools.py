"""Splits pools and patches of images.

Leading dims are free. Dims over which windows slide are split as in a ``convolution``.

A rank pools the rows that its windows read, and gives positions of maxima in the whole
dim. Where windows at the ends count fewer rows than others, which a shard cannot know,
an average sums the rows that windows read, in a dtype that holds their sum, and divides
by the rows that each window counts, by its place in the whole dim.

An adaptive pool cuts a dim into parts of nearly equal size. Part i of ``few`` begins at
row ``i * many // few`` and ends, rounded up, at ``(i + 1) * many / few``, so neighbours
may share a row. A rank reads the rows of its own parts; where parts are of one length
the op pools them. Else averages are weighted sums of rows, as in ``resampling``; for
maxima parts are laid out one after the other, each with the rows of the longest and
filled after its end: so all have one length, and the op pools them. A backward adds the
gradients of such rows to the rows they came from.

In: calls of these ops. Out: their rules and local forms.
Never: pads a split dim by the op; cuts a dim of open size into parts that are split.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from fxpar.graph.builder import Size
from fxpar.sharding.factors import Reach, RowWindow, Rule
from fxpar.sharding.op_table import by_rank, each, make, names, rows, text
from fxpar.sharding.ops.convolution import spatial_dims, windows
from fxpar.sharding.ops.local_call import LocalCall, added_at, rows_at
from fxpar.sharding.ops.reads import (
    add_halo_rows,
    axes_of,
    exchange_of,
    halo_shaped,
    halos_of,
    rows_read,
    split_dims,
    unsplit_padding,
    window_shape,
    windows_of,
    with_halo_rows,
)
from fxpar.sharding.ops.reduction import least
from fxpar.sharding.ops.resampling import spatial, spread, summed

aten = torch.ops.aten

Numbers = int | Sequence[int]


# Windows


class _Maximum(NamedTuple):
    """Holds the settings of a maximum, as its ops take them."""

    kernel: Numbers
    stride: Numbers = ()
    padding: Numbers = 0
    dilation: Numbers = 1
    ceil: bool = False

    def may_be_halo(self, window: Reach) -> bool:
        """Return whether a dim may be split as halos: with ``ceil`` none whose windows
        end before its shard's rows do, as a window that begins after the padding would
        be dropped."""
        return not self.ceil or window.overhang >= 0


class _Average(NamedTuple):
    """Holds the settings of an average, as its ops take them."""

    kernel: Numbers
    stride: Numbers = ()
    padding: Numbers = 0
    ceil: bool = False
    count_padding: bool = True
    divisor: int | None = None

    def may_be_halo(self, window: Reach) -> bool:
        """Return whether a dim may be split as halos, as that of a maximum, and all its
        windows count equally many rows."""
        counts = self.divisor is not None or window.is_counting_all(self.count_padding)
        return counts and (not self.ceil or window.overhang >= 0)


_Pool = _Maximum | _Average


def _slid(pool: _Pool, k: int) -> list[Reach]:
    """Return the windows over the last ``k`` dims."""
    dilation = pool.dilation if isinstance(pool, _Maximum) else 1
    return windows(pool.kernel, pool.stride, pool.padding, dilation, k)


def _pool(
    kind: Callable[..., _Pool],
    results: int,
    reads: int,
    k: int,
    *args: Any,
    **kwargs: Any,
) -> Rule:
    """Return the rule of pools of ``k`` dims with ``results`` results; of their
    backwards, which read ``reads`` tensors that have windows, and the pooled one as the
    second operand."""
    x, *settings = args[1:] if reads else args
    if reads == 2:  # maxima have places
        *settings, _ = settings
    pool, many = kind(*settings, **kwargs), x.shape[-k:]
    slid = _slid(pool, k)
    few = args[0].shape[-k:]
    if not reads:
        pairs = zip(slid, many, strict=True)
        few = [window.count(int(n), pool.ceil) for window, n in pairs]
    spatial = spatial_dims(slid, many, few, pool.may_be_halo)
    words = [*names(x.dim() - k), *spatial.words]
    rule = make([words] * (reads + 1), [words] * results)
    position = reads + 1 if reads else 0  # of the tensor that has rows
    return replace(rule, windows=spatial.windows(position, x.dim() - k))


def _fractional_pool(x: torch.Tensor, *args: Any) -> str:
    """Return the rule; a sample per image and channel determines where windows
    begin."""
    samples, k = args[-1], args[-1].shape[-1]
    words = [*names(x.dim() - k), *["_"] * k]
    batch = ["_"] * (samples.dim() - 1 - (x.dim() - k)) + words[:-k] + ["_"]
    return text(words, batch, results=[words, words])


# Local forms


def _pooled(
    k: int, fill: int | float, call: LocalCall, x: fx.Node, pool: _Pool
) -> fx.Node:
    """Return the pool of a shard with the rows around it; ``fill`` replaces padding."""
    padding = unsplit_padding(pool.padding, split_dims(call, 0, k))
    pool = pool._replace(padding=padding)
    return call.same(with_halo_rows(call, x, 0, fill), *pool)


def _pool_backward(
    k: int, call: LocalCall, grad: fx.Node, x: fx.Node, pool: _Pool, *index: fx.Node
) -> fx.Node:
    """Return a pool's gradient; gradients of rows around the shard go to their
    owners."""
    position = len(call.operands)  # of the result, which has the halos
    padding = unsplit_padding(pool.padding, split_dims(call, 1, k))
    x, pool = halo_shaped(call, x, position), pool._replace(padding=padding)
    return add_halo_rows(call, call.same(grad, x, *pool, *index), position)


def _local_maximum(k: int, call: LocalCall, x: fx.Node, *settings: Any) -> fx.Node:
    """Return maxima, and where in its window each is."""
    fill = least(x.meta["val"].dtype)
    return _pooled(k, fill, call, x, _Maximum(*settings))


def _with_places(
    k: int, call: LocalCall, pooled: fx.Node, parts: Sequence[LaidOut] = ()
) -> Any:
    """Return the values of a pool, and positions of maxima in the whole dim."""
    if not any(split_dims(call, 0, k)):
        return pooled
    values, index = (call.build.call(operator.getitem, pooled, i) for i in range(2))
    dims = _shards(call, index, parts, (0, 0), k)
    return values, _reindexed(call, index, dims, inward=False)


def _local_offsets_to_indices(
    call: LocalCall,
    offsets: fx.Node,
    kernel: Sequence[int],
    size: Sequence[int],
    stride: Any,
    *settings: Any,
) -> fx.Node:
    """Return positions in the whole, as windows are counted from this rank's first."""
    index = call.same(offsets, kernel, size, stride, *settings)
    k = len(kernel)
    first = len(call.shapes[0]) - k
    for d, step in enumerate(each(stride, k)):
        axes, rows = call.operands[0].dims[first + d], call.shapes[0][first + d]
        if call.build.mesh.count(axes) > 1:
            times = step * math.prod(size[d + 1 :])
            start = call.build.own_start(rows, axes, times=times)
            index = call.build.call(aten.add.Tensor, index, start)
    return index


def _local_maximum_backward(
    k: int, call: LocalCall, grad: fx.Node, x: fx.Node, *args: Any
) -> fx.Node:
    """Return the gradient. ``args``: settings of the windows, then positions of
    maxima."""
    *settings, index = args
    dims = _shards(call, index, (), (1, 3), k)
    if any(split_dims(call, 1, k)):
        index = _reindexed(call, index, dims, inward=True)
    if k == 2 and not torch.are_deterministic_algorithms_enabled():
        total = _added_at(call, grad, index, [dim.width for dim in dims])
        return add_halo_rows(call, total, 3)
    return _pool_backward(k, call, grad, x, _Maximum(*settings), index)


def _added_at(
    call: LocalCall, grad: fx.Node, index: fx.Node, rows: Sequence[Size]
) -> fx.Node:
    """Return images of these rows and columns, in which gradients of windows are added
    at the maxima: as torch decomposes the op, so that nothing of the pooled images is
    kept for it."""
    build, dtype = call.build, grad.meta["val"].dtype
    *planes, height, width = call.operand_shape(0)
    few, many = ([*planes, build.product(n)] for n in ((height, width), rows))
    grad = build.cast(grad, torch.promote_types(dtype, torch.float32))
    grad, index = (build.call(aten.reshape.default, t, few) for t in (grad, index))
    zeros = call.full(many, 0, grad)
    total = build.call(aten.scatter_add.default, zeros, len(planes), index, grad)
    images = build.call(aten.reshape.default, total, [*planes, *rows])
    return build.cast(images, dtype)


class OwnRows(NamedTuple):
    """Describes one dim of a shard with the rows around it."""

    # Rows of the whole dim.
    whole: int
    # Rows of the shard with those around it.
    width: Size
    # The position where these begin in the dim, or one for each element.
    start: Size


def _shards(
    call: LocalCall,
    index: fx.Node,
    parts: Sequence[LaidOut],
    positions: tuple[int, int],
    k: int,
) -> list[OwnRows]:
    """Return the last ``k`` dims of the pooled tensor as a rank has them. ``index``:
    maxima; ``positions``: of that tensor, and of the tensor with halos and windows."""
    build, (at, reader) = call.build, positions
    ends = {dim: rows for dim, *rows in halos_of(call, reader)}
    read = {window.dim: window for window in windows_of(call, reader)}
    laid_out = {one.window.dim: one for one in parts}
    out: list[OwnRows] = []
    for d in range(len(call.shapes[at]) - k, len(call.shapes[at])):
        axes, whole = axes_of(call, at, d), call.shapes[at][d]
        if d in laid_out:
            out.append(laid_out[d].as_rows(index))
        elif d in read:
            exchange = exchange_of(call, read[d])
            width, start = build.window_rows(exchange), build.window_start(exchange)
            out.append(OwnRows(whole, width, start))
        else:
            size, (before, after) = build.own_size(whole, axes), ends.get(d, (0, 0))
            width = build.compute(operator.add, size, before + after)
            out.append(OwnRows(whole, width, build.own_start(whole, axes, -before)))
    return out


def _reindexed(
    call: LocalCall, index: fx.Node, dims: Sequence[OwnRows], inward: bool
) -> fx.Node:
    """Return positions in the whole for positions in the shard with the rows around it;
    ``inward``: the reverse."""
    build, total = call.build, None
    local = [dim.width for dim in dims]
    sizes = [[dim.whole for dim in dims], local][:: 1 if inward else -1]
    shifted = aten.sub.Tensor if inward else aten.add.Tensor
    for d, dim in enumerate(dims):
        below, above = (build.product(n[d + 1 :]) for n in sizes)
        place = build.call(aten.div.Tensor_mode, index, below, rounding_mode="floor")
        if d:
            place = build.call(aten.remainder.Scalar, place, sizes[0][d])
        if dim.start != 0:
            place = build.call(shifted, place, dim.start)
        place = build.call(aten.mul.Tensor, place, above)
        total = place if total is None else build.call(aten.add.Tensor, total, place)
    assert total is not None
    return total


def _local_average(k: int, call: LocalCall, x: fx.Node, *settings: Any) -> fx.Node:
    pool, end, dtype = _Average(*settings), len(call.operands), x.meta["val"].dtype
    if not _can_count_by_place(call, 0, pool, k):
        return _pooled(k, 0, call, x, pool)
    x = call.build.cast(x, torch.promote_types(dtype, torch.float32))
    total = _pooled(k, 0, call, x, pool._replace(divisor=1))
    return call.build.cast(_divided(call, total, 0, end, pool, k), dtype)


def _local_average_backward(
    k: int, call: LocalCall, grad: fx.Node, x: fx.Node, *settings: Any
) -> fx.Node:
    pool = _Average(*settings)
    if _can_count_by_place(call, 2, pool, k):
        grad, pool = _divided(call, grad, 1, 0, pool, k), pool._replace(divisor=1)
    return _pool_backward(k, call, grad, x, pool)


def _can_count_by_place(call: LocalCall, position: int, pool: _Average, k: int) -> bool:
    """Return whether windows may count fewer rows at the ends of a dim, of the tensor
    at ``position``, of which ranks read windows of rows."""
    padded = not pool.count_padding and any(each(pool.padding, k))
    may_be_fewer = pool.divisor is None and (pool.ceil or padded)
    return may_be_fewer and bool(windows_of(call, position))


def _divided(
    call: LocalCall, x: fx.Node, many: int, few: int, pool: _Average, k: int
) -> fx.Node:
    """Return ``x`` divided by the rows that each window counts. ``many``, ``few``:
    positions of the tensors that have rows, and windows."""
    build, value = call.build, x.meta["val"]
    for d, window in enumerate(_slid(pool, k), value.dim() - k):
        rows, axes = call.shapes[many][d], axes_of(call, few, d)
        before = window.first * pool.count_padding
        start = build.own_start(call.shapes[few][d], axes, window.first, window.step)
        first = build.iota(call.shape_at(few)[d], value.device, window.step, start)
        end = build.call(aten.add.Tensor, first, window.span)
        first = build.call(aten.clamp_min.default, first, before)
        end = build.call(aten.clamp_max.default, end, rows - before)
        counted = build.call(aten.sub.Tensor, end, first)
        counted = _along(call, build.cast(counted, value.dtype), x, d)
        x = build.call(aten.div.Tensor, x, counted)
    return x


def _along(call: LocalCall, numbers: fx.Node, x: fx.Node, dim: int) -> fx.Node:
    """Return numbers for the rows of a dim of ``x``, in a shape that broadcasts."""
    view = [-1, *[1] * (x.meta["val"].dim() - 1 - dim)]
    return call.build.call(aten.reshape.default, numbers, view)


# Pools that cut a dim into a number of parts


def _adaptive_rule(
    k: int, many: Sequence[int], few: Sequence[int], position: int, tensors: int
) -> Rule:
    """Return the rule of dims of sizes ``many``, the last ``k`` of which are cut into
    ``few`` parts. ``position``: of the tensor that has rows; ``tensors``: number of
    operands."""
    first, windows = len(many) - k, []
    words = [*names(first), *["_"] * k]
    for d, (n, count) in enumerate(zip(many[first:], few, strict=True), first):
        are_known = isinstance(n, int) and isinstance(count, int)
        if are_known and min(n, count) > 1:
            words[d] = f"o{d}"
            parts = [(i * n // count, -(-(i + 1) * n // count)) for i in range(count)]
            reach = Reach(n, count, span=max(end - begin for begin, end in parts))
            halo = None if n % count else (0, 0)
            windows.append(RowWindow(position, d, n, count, reach, halo))
    rule = make([words] * tensors, [words])
    return replace(rule, windows=tuple(windows))


def _adaptive_pool(
    k: int, x: torch.Tensor, few: int | Sequence[int], results: int = 1
) -> Rule:
    rule = _adaptive_rule(k, x.shape, each(few, k), 0, 1)
    return replace(rule, results=rule.results * results)


def _adaptive_pool_backward(
    k: int, grad: torch.Tensor, x: torch.Tensor, *index: Any
) -> Rule:
    """Return the rule of a backward; ``index``: positions of maxima, if given."""
    n = 2 + len(index)
    return _adaptive_rule(k, x.shape, grad.shape[-k:], n, n)


def _uneven(call: LocalCall, position: int) -> list[RowWindow]:
    """Return the windows of dims whose parts have unequal lengths, of the tensor at
    ``position``, which has rows."""
    return [w for w in windows_of(call, position) if w.rows % w.count]


def _averaged_parts(call: LocalCall, x: fx.Node, window: RowWindow) -> fx.Node:
    """Return averages of parts of rows, as ``summed`` takes weights from."""
    size = [window.count, window.reach.span]
    return call.build.call(aten._adaptive_avg_pool2d.default, x, size)


def _local_adaptive_average(k: int, call: LocalCall, x: fx.Node, few: Any) -> fx.Node:
    own = call.local_shape()
    x = with_halo_rows(call, x, 0)
    x = summed(call, x, _uneven(call, 0), own, _averaged_parts)
    return call.same(x, list(own[-k:]))


def _local_adaptive_average_backward(
    k: int, call: LocalCall, grad: fx.Node, x: fx.Node
) -> fx.Node:
    uneven, own = _uneven(call, 2), call.operand_shape(0)
    shape = window_shape(call, call.operand_shape(1), 2)
    for window in uneven:
        shape[window.dim] = own[window.dim]
    grad = call.same(grad, _pooled_like(call, x, shape, 2))
    return spread(call, grad, 2, uneven, shape, _averaged_parts)


def _pooled_like(
    call: LocalCall, x: fx.Node, shape: Sequence[Size], position: int
) -> fx.Node:
    """Return a tensor of the shape of the pooled one on a rank; its values are not
    used."""
    return call.full(shape, 0, x) if windows_of(call, position) else x


@dataclass(frozen=True)
class LaidOut:
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
    # For each part its begin in the whole dim, minus its begin as laid out.
    shifts: fx.Node
    # Number of laid out rows.
    rows: Size

    def arranged(self, x: fx.Node, fill: int | float) -> fx.Node:
        """Return the rows of ``x``, laid out part after part."""
        dim = self.window.dim
        x = rows_at(self.call, x, dim, self.places)
        return self.call.where(_along(self.call, self.inside, x, dim), x, fill)

    def added(self, x: fx.Node, shape: Sequence[Size]) -> fx.Node:
        """Return a tensor of this shape, to whose rows the values of laid out rows are
        added."""
        dim = self.window.dim
        x = self.call.where(_along(self.call, self.inside, x, dim), x, 0)
        return added_at(self.call, x, shape, dim, self.places)

    def as_rows(self, index: fx.Node) -> OwnRows:
        """Return the dim as maxima count its rows. ``index``: maxima of each part."""
        shifts = _along(self.call, self.shifts, index, self.window.dim)
        return OwnRows(self.window.rows, self.rows, shifts)


def _laid_out(call: LocalCall, position: int, few: int) -> list[LaidOut]:
    """Return the laid out parts of dims whose parts have unequal lengths. ``position``,
    ``few``: of the tensors that have rows, and parts."""
    build, out = call.build, []
    for window in _uneven(call, position):
        count, span = call.shape_at(few)[window.dim], window.reach.span
        part, rows, places = rows_read(call, window, count)
        end = build.call(aten.add.Tensor, part, 1)
        end = build.call(aten.mul.Tensor, end, window.rows)
        end = build.call(aten.add.Tensor, end, window.count - 1)
        end = build.call(aten.div.Tensor_mode, end, window.count, rounding_mode="floor")
        end = build.call(aten.unsqueeze.default, end, 1)
        inside = build.call(aten.lt.Tensor, rows, end)
        laid = build.iota(count, rows.meta["val"].device, span)
        begin = build.call(aten.select.int, rows, 1, 0)
        places, inside = (
            build.call(aten.reshape.default, x, [-1]) for x in (places, inside)
        )
        shifts = build.call(aten.sub.Tensor, begin, laid)
        all_rows = build.compute(operator.mul, count, span)
        out.append(LaidOut(call, window, places, inside, shifts, all_rows))
    return out


def _local_adaptive_maximum(k: int, call: LocalCall, x: fx.Node, few: Any) -> Any:
    fill, parts = least(x.meta["val"].dtype), _laid_out(call, 0, len(call.operands))
    x = with_halo_rows(call, x, 0, fill)
    for one in parts:
        x = one.arranged(x, fill)
    pooled = call.same(x, list(call.local_shape()[-k:]))
    return _with_places(k, call, pooled, parts)


def _local_adaptive_maximum_backward(
    k: int, call: LocalCall, grad: fx.Node, x: fx.Node, index: fx.Node
) -> fx.Node:
    parts, shape = _laid_out(call, 3, 0), window_shape(call, call.operand_shape(1), 3)
    if any(split_dims(call, 1, k)):
        dims = _shards(call, index, parts, (1, 3), k)
        index = _reindexed(call, index, dims, inward=True)
        # A spare part's gradient is 0, which may be added anywhere.
        index = call.build.call(aten.clamp_min.default, index, 0)
    own = list(shape)
    for one in parts:
        own[one.window.dim] = one.rows
    gradient = call.same(grad, _pooled_like(call, x, own, 3), index)
    for one in parts:
        own[one.window.dim] = shape[one.window.dim]
        gradient = one.added(gradient, own)
    return add_halo_rows(call, gradient, 3)


# The rule function of maxima with their places.
_MAXIMA = partial(_pool, _Maximum, 2, 0)

# Kind of work, and position of the argument with the window's size.
_POOL: dict[str, Any] = {"work": "pool", "window": 1}
_POOL_BACKWARD: dict[str, Any] = {"work": "pool", "window": 2}

ROWS = {
    **rows(
        "prims::_low_memory_max_pool_with_offsets",
        lambda x, kernel, *rest: _MAXIMA(len(kernel), x, kernel, *rest),
        local=lambda call, x, kernel, *rest: _local_maximum(
            len(kernel), call, x, kernel, *rest
        ),
        **_POOL,
    ),
    **rows(
        "prims::_low_memory_max_pool_offsets_to_indices",
        lambda x, *_: spatial(0, x),  # of windows, and places in them
        local=_local_offsets_to_indices,
    ),
    **rows("fractional_max_pool2d fractional_max_pool3d", _fractional_pool),
    **rows(
        "fractional_max_pool2d_backward fractional_max_pool3d_backward",
        lambda grad, x, size, *rest: spatial(len(size), grad, x, rest[-1]),
        linear="0",
    ),
    **by_rank(
        "max_pool{}d_with_indices",
        (2, 3),
        _MAXIMA,
        lambda k, call, *args: _with_places(k, call, _local_maximum(k, call, *args)),
        **_POOL,
    ),
    **rows(
        "max_pool2d_with_indices_backward",
        partial(_pool, _Maximum, 1, 2, 2),
        local=partial(_local_maximum_backward, 2),
        linear="0",
        facts="replaced",
    ),
    **rows(
        "max_pool3d_with_indices_backward",
        partial(_pool, _Maximum, 1, 2, 3),
        local=partial(_local_maximum_backward, 3),
        linear="0",
        **_POOL_BACKWARD,
    ),
    **by_rank(
        "avg_pool{}d",
        (2, 3),
        partial(_pool, _Average, 1, 0),
        _local_average,
        linear="0",
        **_POOL,
    ),
    **by_rank(
        "avg_pool{}d_backward",
        (2, 3),
        partial(_pool, _Average, 1, 1),
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
