"""Rewrites repeats, and their gradients, so that the repeated dim may be split.

In: a functional ATen graph with global fake values. Out: the same graph, changed in
place, computing the same values. Rows of a split dim may be repeated
(``slicing.repeat``), but not together with copies of one row, or along a new dim: such
a repeat becomes one of rows, then one of copies. The gradient views a dim as turns and
sums them, and a view as turns is no shard of the dim. As one op (``fxpar::sum_turns``)
each rank sums its own rows, and ranks sum the results. Never: a repeat with open or
empty sizes changes.
"""

from __future__ import annotations

import math
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
    if x.meta["val"].stride() == node.meta["val"].stride():
        rewriter.replace(node, x)
