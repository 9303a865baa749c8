"""Applies verbs ``fuse`` and ``bucket``: several nodes become one region, or one
collective.

In: an Edit and nodes. Out: the region or the collective.

``fuse([nodes]) -> region``: the nodes, compute and at most one reduction and the
gathers or sends after it, are one call of a subgraph. In the graph that runs they are
nodes again, marked with their region (``builder.REGION``);
``kernels.fuse_regions`` makes one op of each region. A region must be convex, no path
leaves it and enters it again, or else it would wait for itself (CoCoNeT, section 3.3).

``bucket([rs, rs_1]) -> rs``: collectives of one kind that do not wait for each other;
their operands are joined in one flat tensor, which one collective moves, and its result
is cut up again. Reductions join with equal op and dtype, gathers with equal dtype; all
along the same axes. Never joins nodes that wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.fusion.node_legality import (
    CallableRegion,
    UnevenOp,
    arrange,
    is_message,
    outlined,
)
from fxpar.fusion.schedule_edit import Edit, refuse
from fxpar.graph import collective_nodes
from fxpar.graph.builder import REGION, Builder

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
    between = path_outside(members)
    if between is not None:
        raise refuse("fuse", between, "is between nodes of the region, and not in it")
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


def inline(graph: fx.Graph) -> None:
    """Put the nodes of every region back, in place, marked with their region."""
    regions = [n for n in graph.nodes if isinstance(n.target, CallableRegion)]
    for region in regions:
        part = region.target.graph
        inputs = part.find_nodes(op="placeholder")
        copies = dict(zip(inputs, region.args, strict=True))
        with graph.inserting_before(region):
            for node in part.nodes:
                if node.op == "call_function":
                    copies[node] = graph.node_copy(node, copies.__getitem__)
                    copies[node].meta = node.meta | _said(node, region)
        results: Any = part.output_node().args[0]
        for item in list(region.users):
            item.replace_all_uses_with(copies[results[item.args[1]]])
            graph.erase_node(item)
        graph.erase_node(region)
    if regions:
        graph.lint()


def _said(node: fx.Node, region: fx.Node) -> dict[str, Any]:
    """Return the ``meta`` that marks a node with the region it was in."""
    if isinstance(region.target, UnevenOp):
        return {}
    return {"custom": (node.meta.get("custom") or {}) | {REGION: region.name}}


def path_outside(nodes: Collection[fx.Node]) -> fx.Node | None:
    """Return a node outside on a path from one of ``nodes`` to another; None if they
    are convex. For nodes that do not read each other: whether one waits for another."""
    inside = set(nodes)
    last = max(inside)
    reached: set[fx.Node] = set()  # outside, and after one of them
    at: Any = min(inside)
    while True:
        read = at.all_input_nodes
        if at in inside:
            for node in read:
                if node in reached:
                    return node
        elif any(n in inside or n in reached for n in read):
            reached.add(at)
        if at is last:
            return None
        at = at.next


aten = torch.ops.aten
Nodes = tuple[fx.Node, ...]


def bucket(edit: Edit, nodes: tuple[fx.Node, ...]) -> list[fx.Node]:
    """Apply ``bucket``. Return the one collective."""
    nodes = tuple(sorted(set(nodes)))
    (first, *others), together = nodes, set(nodes)
    if first.target not in _JOIN:
        raise refuse("bucket", first, "is no all-reduce, reduce-scatter or all-gather")
    kind = _kind(first)
    for node in others:
        if _kind(node) != kind:
            raise refuse("bucket", node, f"is not of the kind of {first.name}")
        if not together.isdisjoint(node.all_input_nodes):
            raise refuse("bucket", node, "is computed from another of them")
    between = path_outside([first, *others])
    if between is not None:
        raise refuse("bucket", between, "waits for one of them, another for it")
    last = max(nodes)
    with edit.before(last) as build:
        whole, cut = _JOIN[first.target](build, nodes)
        pieces = [cut(node) for node in nodes]
    for node, piece in zip(nodes, pieces, strict=True):
        edit.swap(node, piece)
    arrange(edit.graph)
    return [whole]


def _kind(node: fx.Node) -> tuple[Any, ...]:
    """Return what must be equal: op of a reduction, axes, dtype and device."""
    value = node.meta["val"]
    op = [a for a in node.args[1:-1] if isinstance(a, str)]
    return node.target, *op, node.args[-1], value.dtype, value.device


def _reduced(build: Builder, nodes: Nodes) -> Any:
    """Join all-reduces: operands flat, one after the other."""
    flat = [build.call(aten.reshape.default, n.args[0], [-1]) for n in nodes]
    row = build.call(aten.cat.default, flat)
    whole = collective_nodes.step(
        build, collective_nodes.all_reduce, row, *nodes[0].args[1:]
    )
    starts = _starts(nodes, nodes)
    return whole, _cutting(build, whole, 0, starts)


def _scattered(build: Builder, nodes: Nodes) -> Any:
    """Join reduce-scatters: one row per rank, of the parts that the rank receives."""
    count = build.mesh.count(collective_nodes.axes_of(nodes[0]))
    flat = []
    for node in nodes:
        x: Any = node.args[0]
        dim, shape = _dim(node), list(x.meta["val"].shape)
        cut_up = [*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]]
        rows = build.call(aten.reshape.default, x, cut_up)
        rows = build.call(aten.movedim.int, rows, dim, 0)
        size = x.meta["val"].numel() // count
        flat.append(build.call(aten.reshape.default, rows, [count, size]))
    whole_row = build.call(aten.cat.default, flat, 1)
    args: Any = (0, *nodes[0].args[2:])
    whole = collective_nodes.step(
        build, collective_nodes.reduce_scatter, whole_row, *args
    )
    starts = _starts(nodes, nodes)
    return whole, _cutting(build, whole, 1, starts)


def _collected(build: Builder, nodes: Nodes) -> Any:
    """Join all-gathers: one row per rank, of the rank's own operands."""
    count = build.mesh.count(collective_nodes.axes_of(nodes[0]))
    operands = [n.all_input_nodes[0] for n in nodes]
    flat = [
        build.call(aten.reshape.default, x, [1, x.meta["val"].numel()])
        for x in operands
    ]
    rows = build.call(aten.cat.default, flat, 1)
    whole = collective_nodes.step(
        build,
        collective_nodes.all_gather,
        rows,
        0,
        collective_nodes.axes_of(nodes[0]),
    )
    starts = _starts(nodes, operands)

    def cut(node: fx.Node) -> fx.Node:
        x: Any = node.args[0]
        dim, shape = _dim(node), list(x.meta["val"].shape)
        piece = _piece(build, whole, 1, starts[node], math.prod(shape))
        piece = build.call(aten.reshape.default, piece, [count, *shape])
        piece = build.call(aten.movedim.int, piece, 0, dim)
        shape = list(node.meta["val"].shape)
        return build.contiguous(build.call(aten.reshape.default, piece, shape))

    return whole, cut


def _cutting(
    build: Builder, whole: fx.Node, dim: int, starts: dict[fx.Node, int]
) -> Callable[[fx.Node], fx.Node]:
    """Return a function that takes a node's result out of the joined one, which is flat
    along ``dim``."""

    def cut(node: fx.Node) -> fx.Node:
        shape = list(node.meta["val"].shape)
        piece = _piece(build, whole, dim, starts[node], math.prod(shape))
        return build.call(aten.reshape.default, piece, shape)

    return cut


def _dim(node: fx.Node) -> int:
    dim: Any = node.args[1]
    return dim


def _starts(nodes: Nodes, sized: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return where the part of each node begins, one after the other; parts have the
    sizes of the values of ``sized``."""
    starts, start = {}, 0
    for node, like in zip(nodes, sized, strict=True):
        starts[node] = start
        start += like.meta["val"].numel()
    return starts


def _piece(build: Builder, x: fx.Node, dim: int, start: int, size: int) -> fx.Node:
    return build.call(aten.slice.Tensor, x, dim, start, start + size)


_JOIN: dict[Any, Any] = {
    collective_nodes.all_reduce: _reduced,
    collective_nodes.reduce_scatter: _scattered,
    collective_nodes.all_gather: _collected,
}
