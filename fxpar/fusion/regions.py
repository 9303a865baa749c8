"""Verb ``fuse``: nodes become one region; and what is convex in a graph.

``fuse([nodes]) -> region``: the nodes, compute and at most one reduction and the
gathers that end it, are one call of a subgraph. In the graph that runs they are nodes
again that say which region they are of (``passes.buckets.REGION``); of these
``kernels.fuse`` makes one op. A region must be convex: no path leads out of it and
back, for then it would wait for itself (CoCoNeT, section 3.3).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.fusion.edit import Edit, refuse
from fxpar.passes import steps
from fxpar.passes.buckets import REGION

_REDUCING = {steps.all_reduce, steps.reduce_scatter}


class Region:
    """A subgraph as a callable: inputs in order, results as a tuple."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph

    @property
    def __name__(self) -> str:
        calls = [n for n in self.graph.nodes if n.op == "call_function"]
        return "region_" + "_".join(n.name for n in calls[:4])

    def __call__(self, *args: Any) -> Any:
        return torch.fx.Interpreter(fx.GraphModule(torch.nn.Module(), self.graph)).run(
            *args
        )


def fuse(edit: Edit, nodes: tuple[fx.Node, ...]) -> list[fx.Node]:
    """Gives the region."""
    members = sorted(set(nodes))
    for node in members:
        if node.op != "call_function":
            raise refuse("fuse", node, "is no op")
    between = path_outside(members)
    if between is not None:
        raise refuse("fuse", between, "lies between nodes of the region, outside it")
    reductions = [n for n in members if n.target in _REDUCING]
    if len(reductions) > 1:
        raise refuse("fuse", reductions[1], "is a second reduction in one region")
    over = {steps.axes_of(n) for n in members if n.target in steps.COLLECTIVE}
    if len(over) > 1:
        raise refuse("fuse", members[0], f"would communicate along {sorted(over)}")
    return [_outline(edit, members)]


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
        region = edit.graph.call_function(Region(graph), tuple(read))
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
        if not isinstance(region.target, Region):
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


def arrange(graph: fx.Graph) -> None:
    """Order nodes so that each stands behind what it reads, otherwise as they are."""
    done: set[fx.Node] = set()
    waiting: dict[fx.Node, list[fx.Node]] = {}
    order: list[fx.Node] = []

    def place(node: fx.Node) -> None:
        stack = [node]
        while stack:
            at = stack.pop()
            missing = next((n for n in at.all_input_nodes if n not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(at)
                continue
            done.add(at)
            order.append(at)
            stack += reversed(waiting.pop(at, []))

    for node in graph.nodes:
        if node not in done:
            place(node)
    _reorder(graph, order)


def _reorder(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    before: Any = None
    for node in order:
        if before is not None and before.next is not node:
            before.append(node)
        before = node
    graph.lint()
