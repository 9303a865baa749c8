"""traced -> normalized: few rows cut one by one out of a dim are cut out of one slice.

In: a functional ATen graph with global fake values. Out: the same graph, changed in
place, computing the same values. Of a dim that is split each cut (``select``, a short
slice) is a sum over ranks by itself. Where cuts of one tensor lie together, or evenly
apart, the rows that all of them are of are one slice, summed once; on one device that
is a view more. What it never does: slice twice as many rows as are cut out, or more
than would be summed rather than exchanged.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import fx

from fxpar.graph.builder import Builder, shape_of
from fxpar.sharding.ops.slicing import is_few

aten = torch.ops.aten


def join_cuts(graph: fx.Graph, rewriter: Builder) -> None:
    """Cut few rows of one dim out of one slice."""
    cuts: dict[tuple[fx.Node, int], dict[fx.Node, range]] = defaultdict(dict)
    for node in graph.nodes:
        dim = _dim_of(node)
        rows = None if dim is None else _rows_of(node, dim)
        if dim is not None and rows is not None:
            cuts[node.args[0], dim][node] = rows
    for (x, dim), rows_of in cuts.items():
        shared = _shared(list(rows_of.values()), shape_of(x)[dim])
        if shared is None:
            continue
        with rewriter.before(next(iter(rows_of))):
            few = rewriter.call(
                aten.slice.Tensor, x, dim, shared.start, shared.stop, shared.step
            )
        for node, rows in rows_of.items():
            first = shared.index(rows[0])
            with rewriter.before(node):
                if node.target is aten.select.int:
                    cut = rewriter.call(aten.select.int, few, dim, first)
                else:
                    ends = first, first + len(rows)
                    cut = rewriter.call(aten.slice.Tensor, few, dim, *ends)
            if cut.meta["val"].stride() == node.meta["val"].stride():
                rewriter.replace(node, cut)


def _dim_of(node: fx.Node) -> int | None:
    """The dim that a cut is along; None of other nodes, and of truths, which no ranks
    sum."""
    if node.target not in (aten.select.int, aten.slice.Tensor) or node.kwargs:
        return None
    x, dim = (*node.args, 0)[:2]
    if x.meta["val"].dtype is torch.bool or not shape_of(x):
        return None
    return int(dim) % len(shape_of(x))


def _rows_of(node: fx.Node, dim: int) -> range | None:
    """The rows of a cut, one after the other; None if they are many, or not known."""
    n, bounds = shape_of(node.args[0])[dim], node.args[2:]
    if not all(isinstance(k, int | None) for k in (n, *bounds)):
        return None
    if node.target is aten.select.int:
        rows = range(n)[bounds[0] : bounds[0] + 1 or None]
    else:
        rows = range(n)[slice(*bounds)] if bounds else range(n)
    return rows if rows and rows.step == 1 and is_few(len(rows), n) else None


def _shared(cuts: list[range], n: int) -> range | None:
    """The rows of one slice that several cuts are of."""
    cut_out = sorted({row for rows in cuts for row in rows})
    if len({*cuts}) < 2:
        return None
    step = math.gcd(*(row - cut_out[0] for row in cut_out))
    if any(len(rows) > 1 for rows in cuts):
        step = 1
    shared = range(cut_out[0], cut_out[-1] + 1, max(1, step))
    is_dense = len(shared) <= 2 * len(cut_out)
    return shared if is_dense and is_few(len(shared), n) else None
