"""traced -> normalized: rows that move by a constant number become ``fxpar::shift``.

In: a functional ATen graph with global fake values. Out: the same graph, changed in
place, computing the same values. A roll, a join of slices, a pad that is cut at the
other end, and lookups at positions that count up (of an iota, computed here once) all
give row ``i`` of a dim the row ``i + by`` of one tensor, around the end or with a
constant beyond it. As one op it may be split along that dim: each rank then needs a few
rows of its neighbour. So may a slice of a join that is one part of it, shifted, and
rows put in (``cut_joins``). What gathers rows so, the backward adds up so: additions
into zeros, of slices or at such positions, are shifts back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.passes.builder import Builder, shape_of
from fxpar.passes.normalize.cut_joins import of_one_part
from fxpar.sharding.constant_values import MOST as _MOST
from fxpar.sharding.constant_values import computed
from fxpar.sharding.rules.op_facts import op_facts_of

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True)
class _Rows:
    """What each row of a dim holds: a row of ``source``, or the constant ``fill``
    where ``places`` is -1. Without a source all rows are the constant."""

    source: fx.Node | None
    places: torch.Tensor
    fill: float | None = None

    def at(self, index: torch.Tensor) -> _Rows:
        return replace(self, places=self.places[index])


def find_shifts(graph: fx.Graph, rewriter: Builder) -> None:
    """Nodes that shift the rows of one dim of a tensor as ``fxpar::shift``; the last
    first, so that what several of them make is one."""
    for node in reversed(list(graph.nodes)):
        dim = _dim_of(node) if node.users else None
        if dim is None or not 1 < shape_of(node)[dim] <= _MOST:
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
        # What is not read is dropped with all that is dead.
        if shifted is not None and _can_be_read_for(shifted, node):
            rewriter.replace(node, shifted)


def _can_be_read_for(shifted: fx.Node, node: fx.Node) -> bool:
    """Whether nothing but the two themselves lies in memory otherwise with a shift in
    the place of a node. A slice of what was padded skips over memory, a shift does not;
    what is made of either point by point does not."""
    strides = node.meta["val"].stride()
    if shifted.meta["val"].stride() == strides:
        return True
    in_order = all(
        a >= b
        for like in (shifted, node)
        for a, b in pairwise(_torch.symbols.hint_shape(like.meta["val"].stride()))
    )
    return in_order and all(op_facts_of(u.target).pointwise for u in node.users)


def _shift_of(node: fx.Node, dim: int) -> tuple[_Rows, int] | None:
    """(rows, by how many) of a node that is a shift of one tensor of its shape."""
    rows = _rows(node, dim)
    if rows is None or rows.source in (None, node):
        return None
    like, value = rows.source.meta["val"], node.meta["val"]
    if shape_of(rows.source) != shape_of(node) or like.dtype != value.dtype:
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
    """The dim along which a node may be a shift."""
    candidate = _DIM.get(node.target) if node.op == "call_function" else None
    if candidate is None or not all(map(_is_known, (node, *node.all_input_nodes))):
        return None
    dim, shape = candidate(node), shape_of(node)
    if dim is None or not shape or not isinstance(shape[dim], int):
        return None
    return dim % len(shape)


def _is_known(node: Any) -> bool:
    """Whether a node is a tensor of a size that does not depend on data."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and not _torch.fake.depends_on_data(value)


def _rows(node: Any, dim: int) -> _Rows | None:
    """The rows of a node along a dim; its own where nothing else is known."""
    if not _is_known(node) or not shape_of(node):
        return None
    if not isinstance(shape_of(node)[dim], int):  # rows are told one by one
        return None
    reader = _READ.get(node.target)
    if reader is not None:
        rows = reader(node, dim)
        if rows is not None:
            return rows
    if not 0 < shape_of(node)[dim] <= _MOST:
        return None
    return _Rows(node, torch.arange(shape_of(node)[dim]))


def _argument(node: fx.Node, i: int, default: Any) -> Any:
    return node.args[i] if len(node.args) > i else default


def _slice(node: fx.Node, dim: int) -> _Rows | None:
    x, along = node.args[0], _argument(node, 1, 0)
    start, end, step = (
        _argument(node, i, d) for i, d in ((2, None), (3, None), (4, 1))
    )
    bounds = [b for b in (start, end, step) if b is not None]
    if along % len(shape_of(x)) != dim or not all(isinstance(b, int) for b in bounds):
        return None
    rows = _rows(x, dim)
    if rows is None:
        return None
    return replace(rows, places=rows.places[start:end][::step])


def _constant(node: fx.Node, dim: int) -> _Rows | None:
    value = 0 if node.target is aten.zeros.default else node.args[1]
    if not isinstance(value, int | float) or float(value) != value:
        return None
    return _Rows(None, torch.full([shape_of(node)[dim]], -1), float(value))


def _joined(parts: Sequence[_Rows | None]) -> _Rows | None:
    """Rows of one tensor and one constant, one part after the other."""
    present = [rows for rows in parts if rows is not None]
    sources = dict.fromkeys(r.source for r in present if r.source is not None)
    fills = {r.fill for r in present if r.fill is not None}
    if len(present) < len(parts) or len(sources) > 1 or len(fills) > 1:
        return None
    places = torch.cat([rows.places for rows in present])
    return _Rows(next(iter(sources), None), places, next(iter(fills), None))


def _cat(node: fx.Node, dim: int) -> _Rows | None:
    if _argument(node, 1, 0) % len(shape_of(node)) != dim:
        return None
    parts = node.args[0]
    if len({(len(shape_of(x)), x.meta["val"].dtype) for x in parts}) > 1:
        return None
    return _joined([_rows(x, dim) for x in parts])


def _pad(node: fx.Node, dim: int) -> _Rows | None:
    x, amounts, value = node.args[0], node.args[1], _argument(node, 2, 0)
    padded = _padded_dim(node)
    if padded != dim or not isinstance(value, int | float) or float(value) != value:
        return None
    rows = _rows(x, dim)
    if rows is None:
        return None
    at = 2 * (len(shape_of(x)) - 1 - dim)
    before, after = amounts[at : at + 2]
    rows = rows.at(torch.arange(max(-before, 0), len(rows.places) + min(after, 0)))
    ends = [
        _Rows(None, torch.full([max(n, 0)], -1), float(value) if n > 0 else None)
        for n in (before, after)
    ]
    return _joined([ends[0], rows, ends[1]])


def _padded_dim(node: fx.Node) -> int | None:
    """The one dim that a pad changes."""
    amounts = node.args[1]
    dims = {i // 2 for i, n in enumerate(amounts) if n}
    return len(shape_of(node)) - 1 - dims.pop() if len(dims) == 1 else None


def _slice_scatter(node: fx.Node, dim: int) -> _Rows | None:
    base, source = node.args[:2]
    along: int = _argument(node, 2, 0)
    start, end, step = (
        _argument(node, i, d) for i, d in ((3, None), (4, None), (5, 1))
    )
    if along % len(shape_of(node)) != dim or step != 1:
        return None
    under, over = _rows(base, dim), _rows(source, dim)
    if under is None or over is None or under.source is not None:
        return None
    bounds = slice(start, end).indices(shape_of(node)[dim])
    positions = torch.arange(*bounds)
    return _put(under, over, positions)


def _put(under: _Rows, over: _Rows, positions: torch.Tensor) -> _Rows | None:
    """``over`` written into constant rows, at other places each."""
    if under.source is not None or len(positions) != len(over.places):
        return None
    if over.fill is not None and over.fill != under.fill:
        return None
    places = under.places.clone()
    places[positions] = over.places
    fill = under.fill if (places < 0).any() else None
    return _Rows(over.source, places, fill)


def _add(node: fx.Node, dim: int) -> _Rows | None:
    """Rows added to zeros."""
    if node.kwargs or not all(isinstance(x, fx.Node) for x in node.args):
        return None
    if any(shape_of(x) != shape_of(node) for x in node.args):
        return None
    a, b = (_rows(x, dim) for x in node.args)
    if a is None or b is None or {a.fill, b.fill} != {0.0}:
        return None
    if a.source is not b.source or ((a.places >= 0) & (b.places >= 0)).any():
        return None
    places = torch.maximum(a.places, b.places)
    return _Rows(a.source, places, 0.0 if (places < 0).any() else None)


def _index(node: fx.Node, dim: int) -> _Rows | None:
    lookup = _indexed(node)
    if lookup is None or lookup[0] != dim:
        return None
    positions, rows = _positions(lookup[1], shape_of(node.args[0])[dim]), None
    if positions is not None:
        rows = _rows(node.args[0], dim)
    return None if rows is None or positions is None else rows.at(positions)


def _indexed(node: fx.Node) -> tuple[int, fx.Node] | None:
    """(dim, positions) of a lookup or update along one dim."""
    if node.target is aten.index_select.default:
        index = node.args[2]
        return (node.args[1] % len(shape_of(node)), index) if shape_of(index) else None
    indices = [(d, i) for d, i in enumerate(node.args[1]) if i is not None]
    if len(indices) != 1 or len(shape_of(indices[0][1])) != 1:
        return None
    return None if indices[0][1].meta["val"].dtype is torch.bool else indices[0]


def _index_put(node: fx.Node, dim: int) -> _Rows | None:
    lookup = _indexed(node)
    base, values = node.args[0], node.args[2]
    if lookup is None or lookup[0] != dim:
        return None
    return _updated(node, dim, base, lookup[1], values)


def _updated(
    node: fx.Node, dim: int, base: fx.Node, index: fx.Node, values: fx.Node
) -> _Rows | None:
    """Rows added to zeros at positions of which none comes twice."""
    if shape_of(values) != shape_of(node):
        return None
    positions, under = _positions(index, shape_of(node)[dim], dim), _rows(base, dim)
    if (
        positions is None
        or under is None
        or under.fill != 0
        or len(positions.unique()) < len(positions)
    ):
        return None
    over = _rows(values, dim)
    return None if over is None else _put(under, over, positions)


def _gather(node: fx.Node, dim: int) -> _Rows | None:
    x, along, index = node.args[:3]
    if along % len(shape_of(node)) != dim or shape_of(index) != shape_of(x):
        return None
    positions, rows = _positions(index, shape_of(x)[dim], dim), None
    if positions is not None:
        rows = _rows(x, dim)
    return None if rows is None or positions is None else rows.at(positions)


def _scatter_add(node: fx.Node, dim: int) -> _Rows | None:
    base, along, index, values = node.args[:4]
    if along % len(shape_of(node)) != dim or shape_of(index) != shape_of(node):
        return None
    return _updated(node, dim, base, index, values)


def _positions(index: fx.Node, n: int, dim: int = 0) -> torch.Tensor | None:
    """Positions that no input has a part in, in ``[0, n)``; of an index of several
    dims those along ``dim``, if they are the same for all others."""
    if not 0 < math.prod(shape_of(index)) <= _MOST:
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


def _dim_argument(node: fx.Node) -> int | None:
    return _argument(node, 1, 0)


def _index_dim(node: fx.Node) -> int | None:
    lookup = _indexed(node)
    return None if lookup is None else lookup[0]


def _scatter_dim(node: fx.Node) -> int | None:
    """The dim along which two additions to zeros were made."""
    if not any(
        isinstance(x, fx.Node) and x.target is aten.slice_scatter.default
        for x in node.args
    ):
        return None
    first = next(x for x in node.args if x.target is aten.slice_scatter.default)
    return _argument(first, 2, 0)


def _cut_dim(node: fx.Node) -> int | None:
    """The dim of a slice of what was padded, or joined."""
    longer = aten.constant_pad_nd.default, aten.cat.default
    return _dim_argument(node) if node.args[0].target in longer else None


# Along which dim a node may be a shift, and how the rows of a node are read.
_DIM: dict[Any, Callable[[fx.Node], int | None]] = {
    aten.cat.default: _dim_argument,
    aten.slice.Tensor: _cut_dim,
    aten.constant_pad_nd.default: _padded_dim,
    aten.slice_scatter.default: lambda node: _argument(node, 2, 0),
    aten.add.Tensor: _scatter_dim,
    aten.index.Tensor: _index_dim,
    aten._unsafe_index.Tensor: _index_dim,
    aten.index_select.default: _index_dim,
    aten.index_put.default: _index_dim,
    aten._unsafe_index_put.default: _index_dim,
    aten.gather.default: _dim_argument,
    aten.scatter_add.default: _dim_argument,
}
_READ: dict[Any, Callable[[fx.Node, int], _Rows | None]] = {
    aten.slice.Tensor: _slice,
    aten.full.default: _constant,
    aten.zeros.default: _constant,
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _pad,
    aten.slice_scatter.default: _slice_scatter,
    aten.add.Tensor: _add,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.index_select.default: _index,
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten.gather.default: _gather,
    aten.scatter_add.default: _scatter_add,
}
