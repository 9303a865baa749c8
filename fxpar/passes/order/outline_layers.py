"""Outlines repeated layers into calls of one body, which is compiled once.

In: a forward or a backward as it goes to Inductor. Out: the same graph, changed in
place: the repeated segment of a layer is a call of a body that all of its kind share,
so that Inductor lowers and generates it once. Layers of a kind are identical in every
constant, shape and stride. Bodies hold ops that compute, and collectives from start to
wait. Never in a body: other collectives, writes, seeds and a rank's coordinates, so
that only memory of the outer graph is written, or under way where a body begins or
ends. A body's results have memory of their own; if several views of one are read
outside, they are made there. Views of operands are made inside if they are identical in
all calls. A reduction that starts inside a layer and ends after it, such as a bucket
that is full in the middle of it, starts right after the layer, and so do reductions of
its result over another axis: other layers of the kind have none there. Additions to
sums over microbatches, which are in place, run right after the layer.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.graph.builder import PROVENANCE
from fxpar.layers import is_aligned, labels_of
from fxpar.passes.order.layer_segments import (
    LEAST_CALLS,
    LayerSegment,
    can_come_later,
    fits,
    operands_of,
    segments,
)
from fxpar.sharding.cost.op import is_view

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
    calls: dict[str, list[fx.Node]] = {}
    for equal_segments in kinds.values():
        if len(equal_segments) >= LEAST_CALLS and _has_only_tensors(equal_segments[0]):
            name = _free_name(root)
            root.add_module(name, _body(equal_segments[0]))
            calls[name] = [_call(graph, segment, name) for segment in equal_segments]
    for name, of_body in calls.items():
        _make_views_inside(getattr(root, name), of_body)
    return sum(map(len, calls.values()))


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


def _call(graph: fx.Graph, segment: LayerSegment, name: str) -> fx.Node:
    """Replace a segment by a call of the body ``name``; return the call."""
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
    return call


def _make_views_inside(body: fx.GraphModule, calls: Sequence[fx.Node]) -> None:
    """Move the views that a body is given into it, if all its calls have the same."""
    columns, base_of = _views_given(calls)
    operands = body.graph.find_nodes(op="placeholder")
    for column in columns[len(operands) :]:
        with body.graph.inserting_after(operands[-1]):
            operands.append(body.graph.placeholder(f"operand{len(operands)}"))
        operands[-1].meta["val"] = column[0].meta["val"]
    place = operands[-1]
    in_order = sorted(base_of, key=lambda i: columns[i][0])
    for i in in_order:
        operand, view, base = operands[i], columns[i][0], operands[base_of[i]]
        with body.graph.inserting_after(place):
            place = body.graph.node_copy(view, {view.all_input_nodes[0]: base}.get)
        place.meta = dict(view.meta)
        operand.replace_all_uses_with(place)
        body.graph.erase_node(operand)
        operands[i] = place
    body.recompile()
    own = [column for i, column in enumerate(columns) if i not in base_of]
    for call, arguments in zip(calls, zip(*own, strict=True), strict=True):
        call.args = (*call.args[:2], *arguments)
    for i in reversed(in_order):
        for node in dict.fromkeys(columns[i]):
            if not node.users:
                node.graph.erase_node(node)


def _views_given(
    calls: Sequence[fx.Node],
) -> tuple[list[list[fx.Node]], dict[int, int]]:
    """Return the operands of a body's calls, one column for each operand, and {column
    of identical views: column of their bases}. The bases are an operand in the same
    position of all calls, or a new column after those of the operands."""
    columns = [list(each) for each in zip(*(c.args[2:] for c in calls), strict=True)]
    places = [{n: i for i, n in enumerate(c.args[2:])} for c in calls]
    base_of: dict[int, int] = {}
    for i, column in enumerate(columns):  # grows
        if not _has_identical_views(column):
            continue
        bases = [node.all_input_nodes[0] for node in column]
        at = {place.get(node) for node, place in zip(bases, places, strict=True)}
        if len(at) > 1:
            continue
        if at == {None}:
            for node, place in zip(bases, places, strict=True):
                place[node] = len(columns)
            columns.append(bases)
        base_of[i] = places[0][bases[0]]
    return columns, base_of


def _has_identical_views(column: Sequence[fx.Node]) -> bool:
    """Return whether nodes are identical views of tensors that a body may be given."""
    if not all(fits(node) and is_view(node) for node in column):
        return False
    bases = (node.all_input_nodes[0].meta.get("val") for node in column)
    are_aligned = all(isinstance(x, torch.Tensor) and is_aligned(x) for x in bases)
    return are_aligned and len(set(labels_of(column).tolist())) == 1


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
