"""Rewrites rows of several tensors taken in turn, in dims that no axes divide.

In: a functional ATen graph with global fake values. Out: the same graph, changed in
place, computing the same values. Tensors stacked after a dim, which is then merged with
the new one, give their rows in turn; a view as rows and parts must be whole where
shards are uneven. As one op (``fxpar::interleave``) ranks exchange the few rows that
change ranks; the gradient reads every n-th row of one tensor, which slices do. Where
the parts have different numbers of rows (an associative scan pads the last of them, and
cuts off the padding) the op takes them unpadded. Never: a dim changes that all axes
divide, whose shards are views as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.features.uneven.normalize_shifts import can_be_read_for
from fxpar.features.uneven.row_places import argument, padded_dim
from fxpar.graph.builder import Builder, is_zeros, shape_of
from fxpar.sharding.ops.slicing import is_summed

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class _Turns:
    """Holds the sizes of parts whose rows are taken in turn."""

    # Sizes before the dim.
    before: tuple[int, ...]
    # Rows of each part.
    rows: int
    # Number of parts.
    parts: int
    # Elements of a row.
    inner_size: int

    @property
    def dim(self) -> int:
        return len(self.before)

    @property
    def merged(self) -> tuple[int, ...]:
        """Return the sizes up to the dim that has the rows of all parts."""
        return (*self.before, self.rows * self.parts)


def take_rows_in_turn(
    graph: fx.Graph, rewriter: Builder, splits: Callable[[int], bool]
) -> None:
    """Replace rows in turn by ``fxpar::interleave``, and their gradients by slices.
    ``splits``: whether a dim of so many rows may be split unevenly."""
    turns_seen: set[_Turns] = set()
    for view in graph.find_nodes(op="call_function", target=aten.view.default):
        join = _source(view)
        turns = _turns(join, view)
        if turns is not None and splits(turns.rows):
            turns_seen.add(turns)
            _interleave(view, list(join.args[0]), turns, rewriter)
    selects = graph.find_nodes(op="call_function", target=aten.select.int)
    for node in selects if turns_seen else ():
        _slice(node, turns_seen, rewriter)


def _source(view: fx.Node) -> fx.Node:
    """Return the source of a chain of views."""
    node: Any = view
    while node.target in _VIEWS:
        node = node.args[0]
    return node


def _turns(join: fx.Node, view: fx.Node) -> _Turns | None:
    """Return the sizes of the parts whose rows a view of a join has in turn, if any."""
    if join.target is not aten.cat.default or join.kwargs:
        return None
    parts, shape = join.args[0], shape_of(join.args[0][0])
    dim = argument(join, 1, 0) % max(len(shape), 1) - 1
    sizes = (*shape, *shape_of(view))
    if dim < 0 or len(parts) < 2 or 0 in sizes:
        return None
    if not all(isinstance(n, int) for n in sizes):
        return None
    dtype = view.meta["val"].dtype
    if any(shape_of(x) != shape or x.meta["val"].dtype != dtype for x in parts):
        return None
    inner_size = math.prod(shape[dim + 1 :])
    turns = _Turns(tuple(shape[:dim]), shape[dim], len(parts), inner_size)
    return turns if shape_of(view)[: dim + 1] == turns.merged else None


def _interleave(
    view: fx.Node, parts: list[fx.Node], turns: _Turns, rewriter: Builder
) -> None:
    parts = _before_stack(parts, turns.dim + 1)
    for node in [*view.users]:
        full = turns.parts - _cut_off(node, turns)
        padded = parts[full:]
        if not padded or not all(_is_end_pad(x, turns.dim, 1) for x in padded):
            continue
        own = [*parts[:full], *(x.args[0] for x in padded)]
        with rewriter.before(node):
            rows = _in_turn(own, turns, shape_of(node), rewriter)
        if can_be_read_for(rows, node):
            rewriter.replace(node, rows)
    if view.users:
        with rewriter.before(view):
            rows = _in_turn(parts, turns, shape_of(view), rewriter)
        rewriter.replace_as_it_is(view, rows)


def _before_stack(parts: list[fx.Node], dim: int) -> list[fx.Node]:
    """Return parts without the new dim along which they are joined, if all have it."""
    for x in parts:
        is_new = x.target is aten.unsqueeze.default
        if not is_new or x.args[1] % len(shape_of(x)) != dim:
            return parts
    return [x.args[0] for x in parts]


def _in_turn(
    parts: list[fx.Node], turns: _Turns, shape: tuple[int, ...], rewriter: Builder
) -> fx.Node:
    """Return the rows of parts in turn, in this shape."""
    rows = rewriter.call(torch.ops.fxpar.interleave.default, parts, turns.dim)
    if shape_of(rows) != shape:
        rows = rewriter.call(aten.view.default, rows, shape)
    return rows


def _cut_off(node: fx.Node, turns: _Turns) -> int:
    """Return the number of rows that a slice leaves out at the end, if they are fewer
    than the parts (each the last row of its part), else 0."""
    if node.target is not aten.slice.Tensor or node.kwargs or turns.rows == 1:
        return 0
    rows = turns.merged[turns.dim]
    start, step = argument(node, 2, None) or 0, argument(node, 4, 1)
    left = shape_of(node)[turns.dim]
    is_end = argument(node, 1, 0) % len(shape_of(node)) == turns.dim
    fits = is_end and (start, step) == (0, 1) and rows - left < turns.parts
    return rows - left if fits else 0


def _is_end_pad(node: fx.Node, dim: int, rows: int) -> bool:
    """Return whether a node pads only the end of a dim, by so many rows."""
    if node.target is not aten.constant_pad_nd.default or padded_dim(node) != dim:
        return False
    at = 2 * (len(shape_of(node)) - 1 - dim)
    return list(node.args[1][at : at + 2]) == [0, rows]


def _slice(node: fx.Node, turns_seen: set[_Turns], rewriter: Builder) -> None:
    """Replace a ``select`` of one part from a view as rows and parts by a slice."""
    view, along, index = node.args
    if view.target not in _VIEWS or not isinstance(index, int):
        return
    shape, x = shape_of(view), _source(view)
    dim = along % len(shape) - 1
    if dim < 0 or not all(isinstance(n, int) for n in (*shape, *shape_of(x))):
        return
    inner_size = math.prod(shape[dim + 2 :])
    turns = _Turns(shape[:dim], shape[dim], shape[dim + 1], inner_size)
    if turns not in turns_seen or shape_of(x)[: dim + 1] != turns.merged:
        return
    if is_summed(turns.rows, turns.rows * turns.parts, turns.parts):
        return
    index %= turns.parts
    _slice_padded(node, x, turns, index, rewriter)
    if node.users:
        with rewriter.before(node):
            rows = _every(x, turns, index, shape_of(node), rewriter)
        rewriter.replace(node, rows)


def _every(
    x: fx.Node, turns: _Turns, first: int, shape: tuple[int, ...], rewriter: Builder
) -> fx.Node:
    """Return the rows of one part, in this shape except for their number."""
    rows = shape_of(x)[turns.dim]
    merged = (*turns.before, rows, *shape[turns.dim + 1 :])
    if shape_of(x) != merged:
        x = rewriter.call(aten.view.default, x, merged)
    return rewriter.call(aten.slice.Tensor, x, turns.dim, first, rows, turns.parts)


def _slice_padded(
    node: fx.Node, x: fx.Node, turns: _Turns, index: int, rewriter: Builder
) -> None:
    """Replace the rows of one part of a tensor padded by zeros, without the padding, by
    a slice of the unpadded tensor."""
    source = _before_zeros(x, turns)
    if source is None:
        return
    rows = len(range(index, shape_of(source)[turns.dim], turns.parts))
    readers = [node] if rows == turns.rows else []
    if rows == turns.rows - 1:
        readers = [user for user in node.users if _is_end_pad(user, turns.dim, -1)]
    for reader in readers:
        with rewriter.before(reader):
            own = _every(source, turns, index, shape_of(reader), rewriter)
            own = rewriter.with_strides_of(reader, own)
        if own.meta["val"].stride() == reader.meta["val"].stride():
            reader.replace_all_uses_with(own)


def _before_zeros(node: fx.Node, turns: _Turns) -> fx.Node | None:
    """Return the rows that a node pads by zeros at the end; None for other nodes."""
    if node.target is not aten.slice_scatter.default or node.kwargs:
        return None
    zeros, source = node.args[:2]
    start, step = argument(node, 3, None) or 0, argument(node, 5, 1)
    is_zero = is_zeros(zeros)
    is_dim = argument(node, 2, 0) % len(shape_of(node)) == turns.dim
    return source if is_zero and is_dim and (start, step) == (0, 1) else None
