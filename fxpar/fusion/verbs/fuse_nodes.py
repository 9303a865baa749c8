"""Verb ``fuse``: nodes become one region; and what is convex in a graph.

``fuse([nodes]) -> region``: the nodes, compute and at most one reduction and the
gathers or sends that end it, are one call of a subgraph. In the graph that runs they
are nodes again that say which region they are of (``passes.buckets.REGION``); of these
``kernels.fuse`` makes one op. A region must be convex: no path leads out of it and
back, for then it would wait for itself (CoCoNeT, section 3.3).
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

from torch import fx

from fxpar.fusion.kept_order import arrange as arrange
from fxpar.fusion.node_legality import CallableRegion as CallableRegion
from fxpar.fusion.node_legality import is_message
from fxpar.fusion.schedule_edit import Edit, refuse
from fxpar.passes import collective_nodes
from fxpar.passes.bucket_collectives import REGION

_REDUCING = {collective_nodes.all_reduce, collective_nodes.reduce_scatter}


def fuse(edit: Edit, nodes: tuple[fx.Node, ...]) -> list[fx.Node]:
    """Gives the region."""
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
        raise refuse("fuse", between, "lies between nodes of the region, outside it")
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
    _check_messages(members)
    return [_outline(edit, members)]


def _check_messages(members: list[fx.Node]) -> None:
    """A region may send, or receive: it could wait for what is made of what it sends,
    which no path in this graph says."""
    found = [node for node in members if is_message(node)]
    if len({node.target for node in found}) > 1:
        raise refuse("fuse", found[-1], "is received and sent in one region")


def _outline(edit: Edit, members: list[fx.Node]) -> fx.Node:
    inside = set(members)
    read = {n: None for m in members for n in m.all_input_nodes if n not in inside}
    given = [m for m in members if any(u not in inside for u in m.users)]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in read:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in members:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    graph.output(tuple(copies[node] for node in given))
    last = members[-1]
    with edit.graph.inserting_before(last.next):
        region = edit.graph.call_function(CallableRegion(graph), tuple(read))
        region.meta = {"val": tuple(node.meta["val"] for node in given)}
        region.meta["fxpar_origin"] = last.name
        for i, node in enumerate(given):
            taken = edit.graph.call_function(operator.getitem, (region, i))
            taken.meta = dict(node.meta)
            node.replace_all_uses_with(
                taken, delete_user_cb=lambda user: user not in inside
            )
    for node in reversed(members):
        edit.graph.erase_node(node)
    arrange(edit.graph)
    return region


def inline(graph: fx.Graph) -> None:
    """Put the nodes of every region back, in place; they say which one."""
    for region in list(graph.nodes):
        if not isinstance(region.target, CallableRegion):
            continue
        part = region.target.graph
        inputs = part.find_nodes(op="placeholder")
        copies = dict(zip(inputs, region.args, strict=True))
        with graph.inserting_before(region):
            for node in part.nodes:
                if node.op == "call_function":
                    copies[node] = graph.node_copy(node, copies.__getitem__)
                    custom = (node.meta.get("custom") or {}) | {REGION: region.name}
                    copies[node].meta = node.meta | {"custom": custom}
        results: Any = part.output_node().args[0]
        for taken in list(region.users):
            taken.replace_all_uses_with(copies[results[taken.args[1]]])
            graph.erase_node(taken)
        graph.erase_node(region)
    graph.lint()


def path_outside(nodes: Collection[fx.Node]) -> fx.Node | None:
    """A node outside on a path from one of ``nodes`` to another; None if they are
    convex. For nodes that do not read each other: whether one waits for another."""
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
