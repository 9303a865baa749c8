"""Computes a slice of a join from one part: that part shifted, with a few rows put in.

In: a slice with as many rows as one of the joined parts, such as the operands of
differences between neighbours (``torch.diff`` with ``prepend``). Out: nodes that
compute the same and, unlike the join, have as many rows as the part: an axis that
divides the part divides them. Never replaces the slice.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Builder, shape_of

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
    if along % len(shape_of(node)) != dim or not _are_alike([node, *parts], dim):
        return None
    rows = [shape_of(part)[dim] for part in parts]
    first, last, _ = slice(start, end).indices(sum(rows))
    begins = [*itertools.accumulate(rows, initial=0)]
    for i, part in enumerate(parts):
        by, count = first - begins[i], last - first
        beside = i + (1 if by > 0 else -1 if by < 0 else 0)
        if rows[i] != count or abs(by) >= count or not 0 <= beside < len(parts):
            continue
        if rows[beside] < abs(by):
            continue
        if not by:
            return part
        other, n = parts[beside], rows[beside]
        with rewriter.before(node):
            shifted = rewriter.call(torch.ops.fxpar.shift.default, part, dim, by, 0.0)
            ends = (0, by) if by > 0 else (n + by, n)
            few = rewriter.call(aten.slice.Tensor, other, dim, *ends)
            place = (count - by, count) if by > 0 else (0, -by)
            return rewriter.call(aten.slice_scatter.default, shifted, few, dim, *place)
    return None


def _are_alike(nodes: list[fx.Node], dim: int) -> bool:
    """Return whether tensors have one dtype, one number of dims and known rows."""
    values = [node.meta["val"] for node in nodes]
    have_sizes = all(isinstance(x.shape[dim], int) for x in values if x.dim() > dim)
    return have_sizes and len({(x.dtype, x.dim()) for x in values}) == 1
