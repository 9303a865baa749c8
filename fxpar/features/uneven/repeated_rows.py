"""Rewrites repeats, and their gradients, so that the repeated dim may be split.

In: a functional ATen graph with global fake values. Out: the same graph, changed in
place, computing the same values. Rows of a split dim may be repeated
(``slicing.repeat``), but not together with copies of one row, or along a new dim: such
a repeat becomes one of rows, then one of copies. The gradient views a dim as turns and
sums them, and a view as turns is no shard of the dim. As one op (``fxpar::sum_turns``)
each rank sums its own rows, and ranks sum the results.

``repeat_interleave`` and its gradient view a dim as rows and their copies, and a view
as several dims must be whole where shards are uneven. Instead rows are looked up by
index, and the gradient sums windows of rows: for both a rank reads only rows near its
own. Never: a repeat with open or empty sizes changes; rows are looked up in a dim that
axes divide, or in one of few rows, such as heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Builder, shape_of

aten = torch.ops.aten


def part_repeats(graph: fx.Graph, rewriter: Builder) -> None:
    """Split repeats into those of rows and of copies, and replace sums of turns of
    repeated rows by ``fxpar::sum_turns``."""
    repeats = graph.find_nodes(op="call_function", target=aten.repeat.default)
    turns_seen = {_turns(node) for node in repeats if _is_known(node)} - {None}
    for node in repeats:
        if _is_known(node):
            _part(node, rewriter)
    sums = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    for node in sums if turns_seen else ():
        _sum_turns(node, turns_seen, rewriter)


def _is_known(node: fx.Node) -> bool:
    """Return whether all sizes are numbers, and none is 0."""
    sizes = (*shape_of(node.args[0]), *node.args[1])
    return all(isinstance(n, int) for n in sizes) and 0 not in sizes


def _rows_repeated(node: fx.Node) -> dict[int, int]:
    """Return {dim of the operand with several rows: number of repeats}, if repeated."""
    shape, repeats = shape_of(node.args[0]), node.args[1]
    pairs = enumerate(zip(shape, repeats[len(repeats) - len(shape) :], strict=True))
    return {d: times for d, (n, times) in pairs if n > 1 < times}


def _turns(node: fx.Node) -> Any:
    """Return (shape of the operand, (dim, number of repeats) of its repeated dims)."""
    return shape_of(node.args[0]), tuple(_rows_repeated(node).items())


def _part(node: fx.Node, rewriter: Builder) -> None:
    """Replace a repeat by one of rows, then one of copies."""
    x, repeats = node.args
    new, rows = len(repeats) - len(shape_of(x)), _rows_repeated(node)
    copies = [1 if d - new in rows else times for d, times in enumerate(repeats)]
    if not rows or math.prod(copies) == 1:
        return
    with rewriter.before(node):
        turns = [rows.get(d, 1) for d in range(len(shape_of(x)))]
        repeated = rewriter.call(aten.repeat.default, x, turns)
        copied = rewriter.call(aten.repeat.default, repeated, copies)
    rewriter.replace(node, copied)


def _sum_turns(node: fx.Node, turns_seen: set[Any], rewriter: Builder) -> None:
    """Replace the sum of a view that has the turns of a repeat as a dim."""
    view, dims = node.args[0], node.args[1]
    if node.args[2:] or node.kwargs or view.target is not aten.view.default:
        return
    shape, dims = shape_of(node), sorted(d % len(shape_of(view)) for d in dims)
    # The dim of turns is right before the dim that was repeated.
    turns = [(d - i, shape_of(view)[d]) for i, d in enumerate(dims)]
    whole = list(shape)
    for d, times in turns:
        if d < len(whole):
            whole[d] *= times
    x = view.args[0]
    if (shape, tuple(turns)) not in turns_seen or shape_of(x) != tuple(whole):
        return
    if x.meta["val"].dtype != node.meta["val"].dtype:
        return  # narrow integers are summed in a wider dtype
    with rewriter.before(node):
        for d, times in turns:
            x = rewriter.call(torch.ops.fxpar.sum_turns.default, x, d, times)
    rewriter.replace_as_it_is(node, x)


# (shape before, dim, how often its rows are repeated)
_Interleaved = tuple[tuple[Any, ...], int, int]


def interleave_rows(
    graph: fx.Graph, rewriter: Builder, splits: Callable[[int], bool]
) -> None:
    """Replace repeats of single rows by lookups, and their gradients by sums of
    windows. ``splits``: whether a dim of so many rows may be split unevenly."""
    repeats_seen: set[_Interleaved] = set()
    for view in graph.find_nodes(op="call_function", target=aten.view.default):
        interleaved = _interleaved(view)
        if interleaved is None:
            continue
        x, (shape, dim, times) = interleaved
        if not splits(shape[dim]):
            continue
        repeats_seen.add((shape, dim, times))
        with rewriter.before(view):
            rows = shape[dim] * times
            place = rewriter.iota(rows, x.meta["val"].device)
            place = rewriter.call(aten.floor_divide.default, place, times)
            indices = [*[None] * dim, place]
            looked_up = rewriter.call(aten.index.Tensor, x, indices)
        rewriter.replace_as_it_is(view, looked_up)
    sums = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    for node in sums if repeats_seen else ():
        _sum_windows(node, repeats_seen, rewriter)


def _interleaved(view: fx.Node) -> tuple[fx.Node, _Interleaved] | None:
    """Return (x, its shape, dim and number of copies) if a view repeats each row of
    ``x`` in place, else None."""
    copies: Any = view.args[0]
    if copies.target is aten.clone.default:
        copies = copies.args[0]
    if copies.target is not aten.expand.default:
        return None
    one: Any = copies.args[0]
    if one.target is not aten.unsqueeze.default:
        return None
    x, shape, expanded = one.args[0], shape_of(one.args[0]), shape_of(copies)
    dim = one.args[1] % len(expanded) - 1
    if dim < 0 or not all(isinstance(n, int) for n in expanded):
        return None
    times = expanded[dim + 1]
    merged = list(shape)
    merged[dim] *= times
    is_one = (*shape[: dim + 1], times, *shape[dim + 1 :]) == expanded
    if not is_one or times < 2 or tuple(merged) != shape_of(view):
        return None
    return x, (tuple(shape), dim, times)


def _sum_windows(
    node: fx.Node, repeats_seen: set[_Interleaved], rewriter: Builder
) -> None:
    """Replace a sum over the copies of each row by a sum of windows."""
    view, dims, keep = (*node.args, False)[:3]
    if view.target is not aten.view.default or node.kwargs or len(dims) != 1:
        return
    g, parts = view.args[0], shape_of(view)
    dim = dims[0] % len(parts) - 1
    shape = (*parts[: dim + 1], *parts[dim + 2 :])
    if dim < 0 or (shape, dim, parts[dim + 1]) not in repeats_seen:
        return
    merged = list(shape)
    merged[dim] *= parts[dim + 1]
    if tuple(merged) != shape_of(g) or g.meta["val"].dtype != node.meta["val"].dtype:
        return
    with rewriter.before(node):
        windows = rewriter.call(aten.unfold.default, g, dim, *[parts[dim + 1]] * 2)
        total = rewriter.call(aten.sum.dim_IntList, windows, [-1])
        if keep:
            total = rewriter.call(aten.unsqueeze.default, total, dim + 1)
    rewriter.replace_as_it_is(node, total)
