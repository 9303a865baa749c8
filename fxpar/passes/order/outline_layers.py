"""Outlines repeated layers into calls of one body, which is compiled once.

In: a forward or a backward as it goes to Inductor. Out: the same graph, changed in
place: the repeated segment of a layer is a call of a body that all of its kind share,
so that Inductor lowers and generates it once. Layers of a kind are identical in every
constant, shape and stride. Bodies hold ops that compute, and collectives from start to
wait. Never in a body: other collectives, writes, seeds and a rank's coordinates, so
that only memory of the outer graph is written, or under way where a body begins or
ends. A body's results have memory of their own; if several views of one are read
outside, they are made there, and so are views of operands. A reduction that starts
inside a layer and ends after it, such as a bucket that is full in the middle of it,
starts right after the layer, and so do reductions of its result over another axis:
other layers of the kind have none there. Additions to sums over microbatches, which are
in place, run right after the layer.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from itertools import count
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.graph.builder import PROVENANCE
from fxpar.layers import is_aligned
from fxpar.passes.order.layer_segments import (
    LEAST_CALLS,
    LayerSegment,
    can_come_later,
    operands_of,
    segments,
)

# The op that calls a body.
INVOKE = _torch.inductor.invoke_subgraph()


def outline_layers(graph: fx.Graph, *, even: bool = True) -> int:
    """Replace repeated layers by calls of bodies; return the number of calls. ``even``:
    all shards are even (see ``segments``)."""
    root, inputs = graph.owning_module, graph.find_nodes(op="placeholder")
    if any(isinstance(node.meta.get("val"), torch.SymInt) for node in inputs):
        return 0  # sizes are open
    if root is None or not _torch.inductor.can_call_bodies():
        return 0
    kinds: dict[Any, list[LayerSegment]] = defaultdict(list)
    for segment in segments(graph, even=even):
        kinds[segment.text].append(segment)
    calls = 0
    for equal_segments in kinds.values():
        if len(equal_segments) >= LEAST_CALLS and _has_only_tensors(equal_segments[0]):
            name = _free_name(root)
            root.add_module(name, _body(equal_segments[0]))
            for segment in equal_segments:
                _call(graph, segment, name)
            calls += len(equal_segments)
    return calls


def _has_only_tensors(segment: LayerSegment) -> bool:
    """Return whether all operands and results are aligned tensors, and there is a
    result."""
    ends = (*operands_of(segment.nodes), *segment.results)
    values = [node.meta.get("val") for node in ends]
    tensors = all(isinstance(x, torch.Tensor) and is_aligned(x) for x in values)
    return tensors and bool(segment.results)


def _free_name(root: torch.nn.Module) -> str:
    names = (f"layer{i}" for i in count())
    return next(name for name in names if not hasattr(root, name))


def _body(segment: LayerSegment) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(operands_of(segment.nodes)):
        copies[node] = graph.placeholder(f"operand{i}")
        copies[node].meta["val"] = node.meta["val"]
    for node in segment.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    graph.output(tuple(copies[node] for node in segment.results))
    graph.eliminate_dead_code()
    _torch.inductor.keep_strides(graph)
    return fx.GraphModule(torch.nn.Module(), graph)


def _call(graph: fx.Graph, segment: LayerSegment, name: str) -> None:
    """Replace a segment by a call of the body ``name``."""
    inside = set(segment.nodes)
    first, last = segment.nodes[0], segment.nodes[-1]
    moved = _move_after(segment)
    operands = operands_of(segment.nodes)
    origin = {key: first.meta[key] for key in PROVENANCE if key in first.meta}
    results: dict[fx.Node, fx.Node] = {}
    with graph.inserting_after(last):
        at = graph.get_attr(name)
    with graph.inserting_after(at):
        call = graph.call_function(INVOKE, (at, name, *operands))
        call.meta = origin | {"val": tuple(n.meta["val"] for n in segment.results)}
    place = call
    for i, node in enumerate(segment.results):
        with graph.inserting_after(place):
            place = results[node] = graph.call_function(operator.getitem, (call, i))
        place.meta = dict(node.meta)

    def outside(node: fx.Node) -> fx.Node:
        """Return the value of a node of the segment, after the call."""
        nonlocal place
        if node not in inside:
            return node
        if node not in results:
            reads = {n: outside(n) for n in node.all_input_nodes}
            with graph.inserting_after(place):
                place = results[node] = graph.node_copy(node, reads.__getitem__)
            place.meta = dict(node.meta)
        return results[node]

    for node in segment.nodes:
        if any(user not in inside for user in node.users):
            users = [user for user in node.users if user not in inside]
            value = outside(node)
            for user in users:
                user.replace_input_with(node, value)
    for node in moved:
        place.append(node)
        place = node
    for node in reversed(segment.nodes):
        graph.erase_node(node)


def _move_after(segment: LayerSegment) -> list[fx.Node]:
    """Return the nodes between a segment's nodes that must move after it: reductions,
    sums, and nodes that read the segment, in order. The others, views of earlier
    memory, are moved before it."""
    inside, moved = set(segment.nodes), dict[fx.Node, None]()
    first, last = segment.nodes[0], segment.nodes[-1]
    node = first
    while node is not last:
        node, between = node.next, node
        if between in inside:
            continue
        reads_late = any(r in inside or r in moved for r in between.all_input_nodes)
        if reads_late or can_come_later(between):
            moved[between] = None
        else:
            first.prepend(between)
    return list(moved)
