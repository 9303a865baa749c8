"""Decides which calls forward and backward run; those that the backward computes again
are in both.

In: a joint graph, in global shapes or in local ones. Out: its nodes, in order. Where
AOTAutograd solves a minimum cut, this decides one value after the other: a light op is
computed again if its operands weigh less than its result, or are kept anyway. Values
tagged to be computed again (gathered parameters, the user's checkpoints) are. Never:
changes the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxpar._torch.objects import tensors_in
from fxpar.sharding.cost.op import bytes_of, is_light, is_pointwise, is_view, viewed
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import ancestors, demand, depending_on_tangents

# By tag of a checkpoint: whether the backward computes a value again.
_TAGGED = {
    CheckpointPolicy.MUST_RECOMPUTE: True,
    CheckpointPolicy.PREFER_RECOMPUTE: True,
    CheckpointPolicy.MUST_SAVE: False,
}

# The most light ops in a row that are computed again; AOTAutograd bans long chains too.
_CHAIN = 16


def phases(
    graph: fx.Graph, gathered: Collection[fx.Node] = ()
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the calls of a graph that the forward runs, and those that the backward
    runs, each in order; those that the backward computes again are in both,
    ``gathered`` in any case. In a graph that is not joint all are of the forward."""
    calls = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    backward = depending_on_tangents(graph)
    if not backward:
        return calls, []
    again = computed_again(calls, backward, gathered)
    second = with_operands(calls, backward, again)
    results = [r for r in graph.output_node().args[0] if isinstance(r, fx.Node)]
    early = [r for r in results if r not in backward]
    ahead = ancestors([*early, *given_of(calls, second)])
    return [n for n in calls if n in ahead], second


def given_of(first: Iterable[fx.Node], second: Collection[fx.Node]) -> list[fx.Node]:
    """Return the nodes of the forward that the backward reads."""
    there, read = set(second), {r for n in second for r in n.all_input_nodes}
    return [n for n in first if n in read and n not in there]


def with_operands(
    calls: Iterable[fx.Node],
    backward: Collection[fx.Node],
    recomputed: Collection[fx.Node],
) -> list[fx.Node]:
    """Return the calls of ``backward``, and those of ``recomputed`` that these need,
    each before its first reader."""
    order: dict[fx.Node, None] = {}
    demand((node for node in calls if node in backward), order, recomputed)
    return list(order)


def computed_again(
    calls: Sequence[fx.Node],
    backward: Collection[fx.Node],
    gathered: Collection[fx.Node] = (),
) -> set[fx.Node]:
    """Return the nodes that the backward computes again, from other values that it is
    given. ``backward``: its own nodes; ``gathered``: nodes it makes again in any case.
    A node that would have to be written to memory, since a product reads it, is not
    computed again."""
    reads = {node: node.all_input_nodes for node in calls}
    read_nodes: set[fx.Node] = set()
    recomputed: set[fx.Node] = set()
    tags = {node: tag(node) for node in calls}
    saved = {viewed(node) for node, is_again in tags.items() if is_again is False}
    must = set(saved)
    row: dict[fx.Node, int] = {}  # how many ops after it are computed again
    for node in reversed(calls):
        if node in backward:
            if not is_light(node.target):
                must.update(viewed(read) for read in reads[node])
        elif node in read_nodes and (
            node in gathered
            or node not in saved
            and (tags[node] or _is_lighter(node, read_nodes, must))
        ):
            recomputed.add(node)
            count = row.get(node, 0) + 1
            row.update((r, max(count, row.get(r, 0))) for r in reads[node])
            if count >= _CHAIN:
                must.update(reads[node])
        else:
            continue
        read_nodes.update(reads[node])
    early = [node for node in calls if node not in backward]
    saved = {node for node in early if node in read_nodes and node not in recomputed}
    for node in _free(early, reads, saved - must, saved | recomputed):
        saved.discard(node)
        recomputed.add(node)
    for node in reversed(early):
        if node in recomputed:
            operands = (r for r in reads[node] if r.op != "placeholder")
            recomputed.update(r for r in operands if r not in saved)
    return recomputed


def _free(
    early: Sequence[fx.Node],
    reads: Mapping[fx.Node, Sequence[fx.Node]],
    may: Collection[fx.Node],
    available: Collection[fx.Node],
) -> list[fx.Node]:
    """Return the nodes of ``may`` that need not be saved, since a few light ops make
    them from others that are ``available``."""
    ops: dict[fx.Node, int] = {}  # how many in a row
    out = []
    for node in early:
        read = (r for r in reads[node] if r.op != "placeholder")
        count = 1 + max((ops.get(r, _CHAIN) for r in read), default=0)
        light = count <= _CHAIN and (_is_given(node) or is_pointwise(node))
        if light and (node in may or node not in available):
            ops[node] = count
            if node in may:
                out.append(node)
        elif node in available:
            ops[node] = 0
    return out


def _is_given(node: fx.Node) -> bool:
    """Return whether a value takes no work: a view, a constant, or no tensor."""
    if node.target is operator.getitem:
        return _is_given(node.args[0])
    if node.op == "get_attr" or op_facts_of(node.target).constant:
        return True
    return not tensors_in(node.meta.get("val")) or is_view(node)


def tag(node: fx.Node) -> bool | None:
    """Return whether a value is tagged to be computed again; None if it has no tag. The
    input of a later checkpointed region is kept, as in AOTAutograd: else the last
    region would be computed from the inputs of the first."""
    is_again, region = _own_tag(node), node.meta.get("ac_graph_id")
    if not is_again or region is None:
        return is_again
    later = (x for x in node.users if (x.meta.get("ac_graph_id") or region) > region)
    return not any(_own_tag(user) for user in later)


def _own_tag(node: fx.Node) -> bool | None:
    if node.target is operator.getitem:
        return _own_tag(node.args[0])
    return _TAGGED.get(node.meta.get("recompute"))


def _is_lighter(
    node: fx.Node, read_nodes: Collection[fx.Node], must: Collection[fx.Node]
) -> bool:
    """Return whether the values that ``node`` is computed from take less memory than
    itself; ``read_nodes`` are kept anyway."""
    if _is_given(node):
        return True
    if node in must or not is_pointwise(node):
        return False
    size = bytes_of(node)
    read = {viewed(read) for read in node.all_input_nodes}
    read = {
        r for r in read if r.op != "placeholder" and not op_facts_of(r.target).constant
    }
    more = sum(bytes_of(r) for r in read if r not in read_nodes)
    # If sizes are equal a single operand is kept: other values may be made from it too.
    return more < size or more == size and len(read) == 1
