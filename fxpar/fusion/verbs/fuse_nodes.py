"""Applies verbs ``fuse`` and ``bucket``: several nodes become one region, or one
collective.

In: an Edit and nodes. Out: the region or the collective.

``fuse([nodes]) -> region``: the nodes, compute and at most one reduction and the
gathers or sends after it, are one call of a subgraph. In the graph that runs they are
nodes again, marked with their region (``node_legality.inline``);
``kernels.fuse_regions`` makes one op of each region. A region must be convex, no path
leaves it and enters it again, or else it would wait for itself (CoCoNeT, section 3.3).

``bucket([rs, rs_1]) -> rs``: collectives of one kind that do not wait for each other;
their operands are joined in one flat tensor, which one collective moves, and its result
is cut up again. Reductions join with equal op and dtype, gathers with equal dtype; all
along the same axes. Never joins nodes that wait for each other.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fxpar.fusion.node_legality import (
    CallableRegion,
    arrange,
    is_message,
    outlined,
)
from fxpar.fusion.schedule_edit import Edit, refuse
from fxpar.fusion.verbs.overlap import between
from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder

aten = torch.ops.aten

_REDUCING = {collective_nodes.all_reduce, collective_nodes.reduce_scatter}


def fuse(edit: Edit, nodes: tuple[fx.Node, ...]) -> list[fx.Node]:
    """Apply ``fuse``. Return the region."""
    members = sorted(set(nodes))
    for node in members:
        if node.op != "call_function":
            raise refuse("fuse", node, "is no op")
        if any(
            isinstance(n.target, CallableRegion) for n in (node, *node.all_input_nodes)
        ):
            raise refuse("fuse", node, "is of a region that was made before")
    outside = between(members, members)
    if outside:
        raise refuse(
            "fuse", outside[-1], "is between nodes of the region, and not in it"
        )
    reductions = [n for n in members if n.target in _REDUCING]
    if len(reductions) > 1:
        raise refuse("fuse", reductions[1], "is a second reduction in one region")
    over = {
        collective_nodes.axes_of(n)
        for n in members
        if n.target in collective_nodes.COLLECTIVE
    }
    if len(over) > 1:
        raise refuse("fuse", members[0], f"would communicate along {sorted(over)}")
    messages = [node for node in members if is_message(node)]
    if len({node.target for node in messages}) > 1:
        # It could wait for a value computed from what it sends, by another stage.
        raise refuse("fuse", messages[-1], "is received and sent in one region")
    results = [m for m in members if any(u not in members for u in m.users)]
    region, _ = outlined(edit.graph, members, results, CallableRegion)
    arrange(edit.graph)
    return [region]


def bucket(edit: Edit, nodes: tuple[fx.Node, ...]) -> list[fx.Node]:
    """Apply ``bucket``. Return the one collective. It moves rows: a reduce-scatter
    takes one for each rank and gives one, a gather the reverse, an all-reduce one."""
    nodes = tuple(sorted(set(nodes)))
    (first, *others), together = nodes, set(nodes)
    target, args = first.target, first.args[1:]
    if target not in _JOINED:
        raise refuse("bucket", first, "is no all-reduce, reduce-scatter or all-gather")
    kind = _kind(first)
    for node in others:
        if _kind(node) != kind:
            raise refuse("bucket", node, f"is not of the kind of {first.name}")
        if not together.isdisjoint(node.all_input_nodes):
            raise refuse("bucket", node, "is computed from another of them")
    outside = between(nodes, nodes)
    if outside:
        raise refuse("bucket", outside[-1], "waits for one of them, another for it")
    if target is not collective_nodes.all_reduce:
        args = (0, *args[1:])
    count, pieces, at = edit.mesh.count(collective_nodes.axes_of(first)), [], 0
    with edit.before(nodes[-1]) as build:
        rows = build.call(
            aten.cat.default, [_operand_rows(build, n, count) for n in nodes], 1
        )
        whole = collective_nodes.step(build, target, rows, *args)
        each = whole.meta["val"].shape[0]
        for node in nodes:
            size = node.meta["val"].numel() // each
            piece = build.call(aten.slice.Tensor, whole, 1, at, at + size)
            pieces.append(_result(build, node, piece, count))
            at += size
    for node, piece in zip(nodes, pieces, strict=True):
        edit.swap(node, piece)
    arrange(edit.graph)
    return [whole]


_JOINED = {*_REDUCING, collective_nodes.all_gather}


def _kind(node: fx.Node) -> tuple[Any, ...]:
    """Return what must be equal: op of a reduction, axes, dtype and device."""
    value = node.meta["val"]
    op = [a for a in node.args[1:-1] if isinstance(a, str)]
    return node.target, *op, node.args[-1], value.dtype, value.device


def _operand_rows(build: Builder, node: fx.Node, count: int) -> fx.Node:
    """Return the operand of a collective as one row, or as one for each rank: the part
    that the rank receives of a reduce-scatter."""
    x: Any = node.args[0]
    if node.target is not collective_nodes.reduce_scatter:
        return build.call(aten.reshape.default, x, [1, x.meta["val"].numel()])
    dim, shape = _dim(node), list(x.meta["val"].shape)
    cut_up = [*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]]
    rows = build.call(aten.reshape.default, x, cut_up)
    rows = build.call(aten.movedim.int, rows, dim, 0)
    return build.call(aten.reshape.default, rows, [count, math.prod(shape) // count])


def _result(build: Builder, node: fx.Node, piece: fx.Node, count: int) -> fx.Node:
    """Return the result of a collective, given its part of the joined one's rows."""
    shape = list(node.meta["val"].shape)
    if node.target is not collective_nodes.all_gather:
        return build.call(aten.reshape.default, piece, shape)
    x: Any = node.args[0]
    piece = build.call(aten.reshape.default, piece, [count, *x.meta["val"].shape])
    piece = build.call(aten.movedim.int, piece, 0, _dim(node))
    return build.contiguous(build.call(aten.reshape.default, piece, shape))


def _dim(node: fx.Node) -> int:
    dim: Any = node.args[1]
    return dim
