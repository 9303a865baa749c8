"""Replaces ops that move rows by a constant number by ``fxpar::shift``.

In: a functional ATen graph with global fake values. Out: the same graph, changed in
place, computing the same values. A roll, a join of slices, a pad that is cut at the
other end, and lookups at positions that count up (from an iota, computed here once) all
make row ``i`` of a dim the row ``i + by`` of one tensor, cyclically or with a constant
beyond the end. As one op it may be split along that dim: each rank then needs a few
rows of its neighbour. So may a slice of a join that is one part of it, shifted, with
rows put in, as the operands of differences between neighbours (``torch.diff`` with
``prepend``): unlike the join, the part has a number of rows that axes divide. In the
backward, additions into zeros, of slices or at such positions, are shifts back. Never:
a value's strides change for a reader that would notice.

``RowPlaces`` holds for each row of a dim the row of one tensor that it equals, or a
constant; the result of an op that is not followed is its own source. Rows of a dim of
open size are given at its hint. Joins, pads and slices by constant numbers do the same
to any size that is so large that rows counted from one end never meet those counted
from the other (``RowPlaces.reach``).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.objects import argument
from fxpar._torch.symbols import expressions, hint_of
from fxpar.graph.builder import Builder, shape_of
from fxpar.sharding.near_rows import computed
from fxpar.sharding.op_facts import op_facts_of

aten = torch.ops.aten

_SLICE = ("dim", "start", "end", "step")  # what a slice, or a scatter to one, names


def of_one_part(node: fx.Node, dim: int, rewriter: Builder) -> fx.Node | None:
    """Return the rows of a slice of a join along ``dim``, built before it; None if no
    part has as many rows, or the other rows are not all of one neighbouring part."""
    join: Any = node.args[0]
    if join.target is not aten.cat.default or join.kwargs or node.kwargs:
        return None
    _, start, end, step = (argument(node, name) for name in _SLICE)
    parts, along = join.args[0], argument(join, "dim")
    if any(not isinstance(n, int) for n in (start or 0, end or 0)) or step != 1:
        return None
    values = [x.meta["val"] for x in (node, *parts)]
    is_one_kind = len({(x.dtype, x.dim()) for x in values}) == 1
    if along % len(shape_of(node)) != dim or not is_one_kind:
        return None
    if not all(isinstance(x.shape[dim], int) for x in values):
        return None
    rows = [shape_of(part)[dim] for part in parts]
    first, last, _ = slice(start, end).indices(sum(rows))
    begins = [*itertools.accumulate(rows, initial=0)]
    for i, part in enumerate(parts):
        by, count = first - begins[i], last - first
        neighbor = i + (1 if by > 0 else -1 if by < 0 else 0)
        if rows[i] != count or abs(by) >= count or not 0 <= neighbor < len(parts):
            continue
        if rows[neighbor] < abs(by):
            continue
        if not by:
            return part
        other, n = parts[neighbor], rows[neighbor]
        with rewriter.before(node):
            shifted = rewriter.call(torch.ops.fxpar.shift.default, part, dim, by, 0.0)
            ends = (0, by) if by > 0 else (n + by, n)
            few = rewriter.call(aten.slice.Tensor, other, dim, *ends)
            place = (count - by, count) if by > 0 else (0, -by)
            return rewriter.call(aten.slice_scatter.default, shifted, few, dim, *place)
    return None


def find_shifts(graph: fx.Graph, rewriter: Builder) -> None:
    """Replace nodes that shift the rows of one dim of a tensor by ``fxpar::shift``; the
    last first, so that several that make one shift become one."""
    for node in reversed(list(graph.nodes)):
        dim = _dim_of(node) if node.users else None
        if dim is None or not 1 < rows_of(node, dim) <= MOST_ROWS:
            continue
        with _torch.aot.as_compiled():
            shift = _shift_of(node, dim)
        shifted = None
        if shift is not None:
            rows, count = shift
            with rewriter.before(node):
                shifted = rewriter.call(
                    torch.ops.fxpar.shift.default, rows.source, dim, count, rows.fill
                )
        elif node.target is aten.slice.Tensor:
            shifted = of_one_part(node, dim, rewriter)
        # A shift that is not used here is removed as dead code.
        if shifted is not None and can_be_read_for(shifted, node):
            rewriter.replace(node, shifted)


def can_be_read_for(shifted: fx.Node, node: fx.Node) -> bool:
    """Return whether no reader's memory layout changes with a shift in the place of a
    node. A slice of a padded tensor has gaps in memory, a shift has none; the results
    of pointwise readers have none in either case."""
    if _steps(shifted) == _steps(node):
        return True
    in_order = all(
        a >= b
        for like in (shifted, node)
        for a, b in pairwise(_torch.symbols.hint_shape(like.meta["val"].stride()))
    )
    return in_order and all(op_facts_of(u.target).pointwise for u in node.users)


def _steps(node: fx.Node) -> tuple[Any, ...]:
    """Return the strides of dims of more than one row; only these matter."""
    value = node.meta["val"]
    pairs = zip(value.stride(), expressions(value.shape), strict=True)
    return expressions(stride for stride, rows in pairs if rows != 1)


def _shift_of(node: fx.Node, dim: int) -> tuple[RowPlaces, int] | None:
    """Return (rows, number of rows shifted by) if a node is a shift of one tensor of
    its shape, else None."""
    rows = row_places(node, dim)
    if rows is None or rows.source in (None, node):
        return None
    like, value = rows.source.meta["val"], node.meta["val"]
    if not _has_same_shape(rows.source, node) or like.dtype != value.dtype:
        return None
    if is_open_dim(node, dim) and not shape_of(node)[dim] > 2 * rows.reach + 1:
        return None
    n, places = len(rows.places), rows.places
    positions = torch.arange(n)
    inside = (places >= 0).nonzero()[:, 0]
    if not len(inside):
        return None
    by = int(places[inside[0]] - inside[0])
    sources = positions + by
    if not (places < 0).any():
        around = by - n if by > n // 2 else by + n if by < -(n // 2) else by
        return (rows, around) if torch.equal(places, sources % n) else None
    beyond = (sources < 0) | (sources >= n)
    fits = by and torch.equal(places, sources.masked_fill(beyond, -1))
    return (rows, by) if fits else None


def _dim_of(node: fx.Node) -> int | None:
    """Return the dim along which a node may be a shift; None if there is none."""
    mover = MOVERS.get(node.target) if node.op == "call_function" else None
    if mover is None or not all(map(is_known, (node, *node.all_input_nodes))):
        return None
    dim, shape = mover.dim(node), shape_of(node)
    if dim is None or not shape:
        return None
    is_counted = mover.by_ends or not is_open_dim(node, dim)
    return dim % len(shape) if is_counted else None


# The source of each row

# The most positions of a lookup, and rows of a dim, that are followed.
MOST_ROWS = 1 << 20


@dataclass(frozen=True)
class RowPlaces:
    """Holds the source of each row of a dim: a row of another tensor, or a constant."""

    # None: all rows are the constant.
    source: fx.Node | None
    # Integers [rows]: the row of the source, or -1 for the constant.
    places: torch.Tensor
    # The constant; None: no row is one.
    fill: float | None = None
    # Sum of the numbers by which rows were counted from either end.
    reach: int = 0

    def at(self, index: torch.Tensor) -> RowPlaces:
        return replace(self, places=self.places[index])


def rows_of(node: fx.Node, dim: int) -> int:
    """Return the rows of a dim, at the hint if its size is open."""
    return int(hint_of(shape_of(node)[dim]))


def is_open_dim(node: fx.Node, dim: int) -> bool:
    return not isinstance(shape_of(node)[dim], int)


def is_known(node: Any) -> bool:
    """Return whether a node is a tensor whose size does not depend on data."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and not _torch.fake.is_data_dependent(value)


def row_places(node: Any, dim: int) -> RowPlaces | None:
    """Return the rows of a node along a dim, its own if no other source is known; None
    if its size depends on data or is too large."""
    if not is_known(node) or not shape_of(node):
        return None
    mover = MOVERS.get(node.target)
    if mover is not None and (mover.by_ends or not is_open_dim(node, dim)):
        rows = mover.rows(node, dim)
        if rows is not None:
            return rows
    n = rows_of(node, dim)
    return RowPlaces(node, torch.arange(n)) if 0 < n <= MOST_ROWS else None


def _slice(node: fx.Node, dim: int) -> RowPlaces | None:
    x = node.args[0]
    along, start, end, step = (argument(node, name) for name in _SLICE)
    bounds = [b for b in (start, end, step) if b is not None]
    if along % len(shape_of(x)) != dim or not all(isinstance(b, int) for b in bounds):
        return None
    rows = row_places(x, dim)
    if rows is None or step != 1 and is_open_dim(x, dim):
        return None
    places = rows.places[start:end][::step]
    return replace(rows, places=places, reach=rows.reach + _counted(start, end))


def _counted(*bounds: int | None) -> int:
    """Return the number of rows by which bounds are counted from either end."""
    return sum(abs(n) for n in bounds if n is not None and n != sys.maxsize)


def _constant(node: fx.Node, dim: int) -> RowPlaces | None:
    value = node.args[1]
    if not isinstance(value, int | float) or float(value) != value:
        return None
    return RowPlaces(None, torch.full([rows_of(node, dim)], -1), float(value))


def _joined(parts: Sequence[RowPlaces | None]) -> RowPlaces | None:
    """Return the rows of a join of parts; None unless they have one source and one
    constant at most."""
    present = [rows for rows in parts if rows is not None]
    sources = dict.fromkeys(r.source for r in present if r.source is not None)
    fills = {r.fill for r in present if r.fill is not None}
    if len(present) < len(parts) or len(sources) > 1 or len(fills) > 1:
        return None
    places = torch.cat([rows.places for rows in present])
    reach = sum(rows.reach for rows in present)
    return RowPlaces(next(iter(sources), None), places, next(iter(fills), None), reach)


def _cat(node: fx.Node, dim: int) -> RowPlaces | None:
    if argument(node, "dim") % len(shape_of(node)) != dim:
        return None
    parts = node.args[0]
    if len({(len(shape_of(x)), x.meta["val"].dtype) for x in parts}) > 1:
        return None
    few = [x for x in parts if not is_open_dim(x, dim)]
    if len(parts) - len(few) > 1:
        return None
    rows = _joined([row_places(x, dim) for x in parts])
    if rows is None or len(few) == len(parts):
        return rows
    return replace(rows, reach=rows.reach + sum(rows_of(x, dim) for x in few))


def _pad(node: fx.Node, dim: int) -> RowPlaces | None:
    x, amounts, value = node.args[0], node.args[1], argument(node, "value")
    padded = padded_dim(node)
    if not all(isinstance(n, int) for n in amounts):
        return None
    if padded != dim or not isinstance(value, int | float) or float(value) != value:
        return None
    rows = row_places(x, dim)
    if rows is None:
        return None
    at = 2 * (len(shape_of(x)) - 1 - dim)
    before, after = amounts[at : at + 2]
    rows = rows.at(torch.arange(max(-before, 0), len(rows.places) + min(after, 0)))
    ends = [
        RowPlaces(
            None, torch.full([max(n, 0)], -1), float(value) if n > 0 else None, abs(n)
        )
        for n in (before, after)
    ]
    return _joined([ends[0], rows, ends[1]])


def padded_dim(node: fx.Node) -> int | None:
    """Return the one dim that a pad changes; None if it changes several or none."""
    amounts = node.args[1]
    dims = {i // 2 for i, n in enumerate(amounts) if n}
    return len(shape_of(node)) - 1 - dims.pop() if len(dims) == 1 else None


def _slice_scatter(node: fx.Node, dim: int) -> RowPlaces | None:
    base, source = node.args[:2]
    along, start, end, step = (argument(node, name) for name in _SLICE)
    if along % len(shape_of(node)) != dim or step != 1:
        return None
    if not all(isinstance(n, int | None) for n in (start, end)):
        return None
    under, over = row_places(base, dim), row_places(source, dim)
    if under is None or over is None or under.source is not None:
        return None
    positions = torch.arange(*slice(start, end).indices(rows_of(node, dim)))
    rows = _put(under, over, positions)
    return rows and replace(rows, reach=rows.reach + _counted(start, end))


def _put(
    under: RowPlaces, over: RowPlaces, positions: torch.Tensor
) -> RowPlaces | None:
    """Return ``over`` written into constant rows at distinct positions, else None."""
    if under.source is not None or len(positions) != len(over.places):
        return None
    if over.fill is not None and over.fill != under.fill:
        return None
    places = under.places.clone()
    places[positions] = over.places
    fill = under.fill if (places < 0).any() else None
    return RowPlaces(over.source, places, fill, under.reach + over.reach)


def _add(node: fx.Node, dim: int) -> RowPlaces | None:
    """Return the rows of a sum whose operands are zero where the other is not."""
    if node.kwargs or not all(isinstance(x, fx.Node) for x in node.args):
        return None
    if not all(_has_same_shape(x, node) for x in node.args):
        return None
    a, b = (row_places(x, dim) for x in node.args)
    if a is None or b is None or {a.fill, b.fill} != {0.0}:
        return None
    if a.source is not b.source or ((a.places >= 0) & (b.places >= 0)).any():
        return None
    places = torch.maximum(a.places, b.places)
    fill = 0.0 if (places < 0).any() else None
    return RowPlaces(a.source, places, fill, a.reach + b.reach)


def _lookup(node: fx.Node, dim: int) -> RowPlaces | None:
    positions = _positions_along(node, dim)
    rows = None if positions is None else row_places(node.args[0], dim)
    return None if rows is None or positions is None else rows.at(positions)


def indexed(node: fx.Node) -> tuple[int, fx.Node] | None:
    """Return (dim, positions) of a lookup or update along one dim, else None."""
    indices = [(d, i) for d, i in enumerate(node.args[1]) if i is not None]
    if len(indices) != 1 or len(shape_of(indices[0][1])) != 1:
        return None
    return None if indices[0][1].meta["val"].dtype is torch.bool else indices[0]


def _update(node: fx.Node, dim: int) -> RowPlaces | None:
    """Return the rows of an addition to zeros at distinct positions, else None."""
    base, values = node.args[0], node.args[3 if node.target in _ALONG else 2]
    if shape_of(values) != shape_of(node):
        return None
    positions, under = _positions_along(node, dim), row_places(base, dim)
    if (
        positions is None
        or under is None
        or under.fill != 0
        or len(positions.unique()) < len(positions)
    ):
        return None
    over = row_places(values, dim)
    return None if over is None else _put(under, over, positions)


def _positions_along(node: fx.Node, dim: int) -> torch.Tensor | None:
    """Return the positions of a lookup or update, if it is along this dim alone."""
    x = node.args[0]
    if node.target in _ALONG:
        along, index = node.args[1:3]
        is_along = along % len(shape_of(node)) == dim
        lookup = (dim, index) if is_along and shape_of(index) == shape_of(x) else None
    else:
        lookup = indexed(node)
    if lookup is None or lookup[0] != dim:
        return None
    return _positions(lookup[1], shape_of(x)[dim], dim)


def _positions(index: fx.Node, n: int, dim: int) -> torch.Tensor | None:
    """Return the positions in an index that depends on no input, if all are in
    ``[0, n)``; for several dims those along ``dim``, if equal for all others."""
    if not 0 < math.prod(shape_of(index)) <= MOST_ROWS:
        return None
    positions = computed(index, {})
    if positions is None or positions.dtype is torch.bool:
        return None
    if positions.dim() > 1:
        rows = positions.movedim(dim, 0).flatten(1)
        if not (rows == rows[:, :1]).all():
            return None
        positions = rows[:, 0]
    positions = torch.where(positions < 0, positions + n, positions).long()
    return positions if bool(((positions >= 0) & (positions < n)).all()) else None


def _has_same_shape(one: fx.Node, other: fx.Node) -> bool:
    return expressions(shape_of(one)) == expressions(shape_of(other))


def _dim_argument(node: fx.Node) -> int | None:
    return argument(node, "dim")


def _index_dim(node: fx.Node) -> int | None:
    lookup = indexed(node)
    return None if lookup is None else lookup[0]


def _scatter_dim(node: fx.Node) -> int | None:
    """Return the dim of the ``slice_scatter`` among a node's operands, if any."""
    for x in node.args:
        if isinstance(x, fx.Node) and x.target is aten.slice_scatter.default:
            return _dim_argument(x)
    return None


def _cut_dim(node: fx.Node) -> int | None:
    """Return the dim of a slice of a pad or a join; None for other slices."""
    longer = aten.constant_pad_nd.default, aten.cat.default
    return _dim_argument(node) if node.args[0].target in longer else None


@dataclass(frozen=True)
class Mover:
    """Describes how an op moves rows."""

    # Finds the rows of a node along a dim.
    rows: Callable[[fx.Node, int], RowPlaces | None]
    # Returns the dim along which a node may be a shift; None if there is none.
    dim: Callable[[fx.Node], int | None] = lambda node: None
    # Whether its rows are given by constant numbers of rows from the ends of its
    # operands, at any size; else they are found one by one.
    by_ends: bool = False


MOVERS: dict[Any, Mover] = {
    aten.slice.Tensor: Mover(_slice, _cut_dim, True),
    aten.full.default: Mover(_constant, by_ends=True),
    aten.cat.default: Mover(_cat, _dim_argument, True),
    aten.constant_pad_nd.default: Mover(_pad, padded_dim, True),
    aten.slice_scatter.default: Mover(_slice_scatter, _dim_argument, True),
    aten.add.Tensor: Mover(_add, _scatter_dim, True),
    aten.index.Tensor: Mover(_lookup, _index_dim),
    aten._unsafe_index.Tensor: Mover(_lookup, _index_dim),
    aten.index_put.default: Mover(_update, _index_dim),
    aten._unsafe_index_put.default: Mover(_update, _index_dim),
    aten.gather.default: Mover(_lookup, _dim_argument),
    aten.scatter_add.default: Mover(_update, _dim_argument),
}
# Those with the dim as an argument, and an index of the operand's shape.
_ALONG = (aten.gather.default, aten.scatter_add.default)
