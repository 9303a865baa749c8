"""Splits pools that cut a dim into a number of parts of nearly equal size.

Part i of ``few`` begins at row ``i * many // few`` and ends, rounded up, at ``(i + 1) *
many / few``, so neighbours may share a row. A rank reads the rows of its own parts
(``Rule.windows``); where parts are of one length, and ranks have equally many, these
are its own rows, and the op pools them. Else parts are laid out one after the other,
each with the rows of the longest and filled after its end: so all have one length, and
the op pools them. A backward adds the gradients of such rows to the rows they came
from.
In: calls of these ops. Out: their rules and local forms.
Never: splits a dim whose size is open.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Size
from fxpar.sharding.factors import Reach, RowWindow, Rule, parse_rule
from fxpar.sharding.op_table import by_rank, names, text
from fxpar.sharding.ops.local_call import LocalCall
from fxpar.sharding.ops.own_rows import added_at, rows_at
from fxpar.sharding.ops.pools import ShardWithHalo, reindexed, shards_with_halos
from fxpar.sharding.ops.reads import (
    add_halo_rows,
    exchange_of,
    split_dims,
    window_shape,
    windows_of,
    with_halo_rows,
)
from fxpar.sharding.ops.reduction import least
from fxpar.sharding.ops.window_dims import each

aten = torch.ops.aten


def _reach(many: int, few: int) -> Reach:
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
        reach = _reach(n, count)
        windows.append(RowWindow(position, first + d, n, count, reach, halo))
    return rows, parts, tuple(windows)


def _forward(
    k: int, x: torch.Tensor, few: int | Sequence[int], results: int = 1
) -> Rule:
    first = x.dim() - k
    rows, parts, windows = _parts(x.shape[first:], each(few, k), first, 0)
    lead = names(first)
    words = text([*lead, *rows], results=[[*lead, *parts]] * results)
    return replace(parse_rule(words), windows=windows)


def _backward(k: int, grad: torch.Tensor, x: torch.Tensor, *index: Any) -> Rule:
    """Return the rule of a backward; ``index``: positions of maxima, if given."""
    first, end = x.dim() - k, 2 + len(index)
    rows, parts, windows = _parts(x.shape[first:], grad.shape[first:], first, end)
    lead = names(first)
    read = [[*lead, *parts], [*lead, *rows], *[[*lead, *parts]] * len(index)]
    words = text(*read, results=[[*lead, *rows]])
    return replace(parse_rule(words), windows=windows)


# Local forms


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


def _local_average(k: int, call: LocalCall, x: fx.Node, few: Any) -> fx.Node:
    pooled, parts = _pooled(k, call, x, 0)
    for one in parts:
        pooled = one.averaged(pooled)
    return pooled


def _local_maximum(k: int, call: LocalCall, x: fx.Node, few: Any) -> Any:
    """Return values, and positions of maxima in the whole dim."""
    pooled, parts = _pooled(k, call, x, least(x.meta["val"].dtype))
    if not any(split_dims(call, 0, k)):
        return pooled
    values, index = (call.build.call(operator.getitem, pooled, i) for i in range(2))
    dims = _shards(call, index, parts, (0, 0), k)
    return values, reindexed(call, index, dims, inward=False)


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


def _local_average_backward(
    k: int, call: LocalCall, grad: fx.Node, x: fx.Node
) -> fx.Node:
    parts = _uneven_parts(call, 2, 0)
    for one in parts:
        grad = one.averaged(grad)
    return _added(call, parts, 2, call.same(grad, _of_pooled_shape(call, x, parts, 2)))


def _local_maximum_backward(
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


ROWS = {
    **by_rank("adaptive_avg_pool{}d", (1, 2, 3), _forward, _local_average, linear="0"),
    **by_rank("_adaptive_avg_pool{}d", (2, 3), _forward, _local_average, linear="0"),
    **by_rank(
        "_adaptive_avg_pool{}d_backward",
        (2, 3),
        _backward,
        _local_average_backward,
        linear="0",
    ),
    **by_rank(
        "adaptive_max_pool{}d", (2, 3), partial(_forward, results=2), _local_maximum
    ),
    **by_rank(
        "adaptive_max_pool{}d_backward",
        (2, 3),
        _backward,
        _local_maximum_backward,
        linear="0",
    ),
}
