"""Rewrites rows repeated one by one, in a dim that no axes divide.

In: a functional ATen graph with global fake values. Out: the same graph, changed in
place, computing the same values. ``repeat_interleave`` and its gradient view a dim as
rows and their copies, and a view as several dims must be whole where shards are uneven.
Instead rows are looked up by index, and the gradient sums windows of rows: for both a
rank reads only rows near its own. Never: a dim changes that axes divide, or one of few
rows, such as heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Builder, shape_of

aten = torch.ops.aten

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
        if looked_up.meta["val"].stride() == view.meta["val"].stride():
            rewriter.replace(view, looked_up)
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
    if total.meta["val"].stride() == node.meta["val"].stride():
        rewriter.replace(node, total)
