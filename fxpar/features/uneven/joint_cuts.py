"""Cuts few rows that are cut one by one out of a dim out of one slice instead.

In: a functional ATen graph with global fake values. Out: the same graph, changed in
place, computing the same values. In a split dim each cut (``select``, a short slice) is
a sum over ranks by itself. Where cuts of one tensor are near each other, or evenly
spaced, one slice holds the rows of all of them and is summed once; on one device that
is one more view. Never: the slice has more than twice as many rows as are cut out, or
more than would be summed rather than exchanged.
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
    """Replace several cuts of few rows of one dim by cuts of one slice."""
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
            rewriter.replace_as_it_is(node, cut)


def _dim_of(node: fx.Node) -> int | None:
    """Return the dim of a cut; None for other nodes, and for bools, which ranks do not
    sum."""
    if node.target not in (aten.select.int, aten.slice.Tensor) or node.kwargs:
        return None
    x, dim = (*node.args, 0)[:2]
    if x.meta["val"].dtype is torch.bool or not shape_of(x):
        return None
    return int(dim) % len(shape_of(x))


def _rows_of(node: fx.Node, dim: int) -> range | None:
    """Return the consecutive rows of a cut; None if they are many, or unknown."""
    n, bounds = shape_of(node.args[0])[dim], node.args[2:]
    if not all(isinstance(k, int | None) for k in (n, *bounds)):
        return None
    if node.target is aten.select.int:
        rows = range(n)[bounds[0] : bounds[0] + 1 or None]
    else:
        rows = range(n)[slice(*bounds)] if bounds else range(n)
    return rows if rows and rows.step == 1 and is_few(len(rows), n) else None


def _shared(cuts: list[range], n: int) -> range | None:
    """Return the rows of one slice that holds several cuts; None if it would not pay.
    ``n``: rows of the dim."""
    cut_out = sorted({row for rows in cuts for row in rows})
    if len({*cuts}) < 2:
        return None
    step = math.gcd(*(row - cut_out[0] for row in cut_out))
    if any(len(rows) > 1 for rows in cuts):
        step = 1
    shared = range(cut_out[0], cut_out[-1] + 1, max(1, step))
    is_dense = len(shared) <= 2 * len(cut_out)
    return shared if is_dense and is_few(len(shared), n) else None
