"""Replaces ops that move rows by a constant number by ``fxpar::shift``.

In: a functional ATen graph with global fake values. Out: the same graph, changed in
place, computing the same values. A roll, a join of slices, a pad that is cut at the
other end, and lookups at positions that count up (from an iota, computed here once) all
make row ``i`` of a dim the row ``i + by`` of one tensor, cyclically or with a constant
beyond the end. As one op it may be split along that dim: each rank then needs a few
rows of its neighbour. So may a slice of a join that is one part of it, shifted, with
rows put in, as the operands of differences between neighbours (``torch.diff`` with
``prepend``): unlike the join, the part has a number of rows that axes divide. In the
backward, additions into zeros, of slices or at such
positions, are shifts back. Never: a value's strides change for a reader that would
notice.
"""

from __future__ import annotations

import itertools
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.symbols import expressions
from fxpar.features.uneven.row_places import (
    MOST_ROWS,
    MOVERS,
    RowPlaces,
    has_same_shape,
    is_known,
    is_open_dim,
    row_places,
    rows_of,
)
from fxpar.graph.builder import Builder, shape_of
from fxpar.sharding.op_facts import op_facts_of

aten = torch.ops.aten


def of_one_part(node: fx.Node, dim: int, rewriter: Builder) -> fx.Node | None:
    """Return the rows of a slice of a join along ``dim``, built before it; None if no
    part has as many rows, or the other rows are not all of one neighbouring part."""
    join: Any = node.args[0]
    if join.target is not aten.cat.default or join.kwargs or node.kwargs:
        return None
    bounds: tuple[Any, ...] = node.args[2:]
    defaults: tuple[Any, ...] = None, None, 1
    start, end, step = bounds + defaults[len(bounds) :]
    parts, along = (*join.args, 0)[:2]
    if any(not isinstance(n, int) for n in (start or 0, end or 0)) or step != 1:
        return None
    if along % len(shape_of(node)) != dim or not _has_one_kind([node, *parts], dim):
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


def _has_one_kind(nodes: list[fx.Node], dim: int) -> bool:
    """Return whether tensors have one dtype, one number of dims and known rows."""
    values = [node.meta["val"] for node in nodes]
    have_sizes = all(isinstance(x.shape[dim], int) for x in values if x.dim() > dim)
    return have_sizes and len({(x.dtype, x.dim()) for x in values}) == 1


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
    if not has_same_shape(rows.source, node) or like.dtype != value.dtype:
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
