"""Recomputes light values of the forward in the backward of a training step.

In: the graph of a whole step, its forward, backward and update in the order they run.
Out: the same graph, changed in place: light values of the forward that the backward
reads are computed again in the backward if it can compute them from values that are
kept anyway (``sharding.cost.recompute``). AOTAutograd does this when it splits forward
and backward; a step is one graph that it does not split.

Never repeated: collectives, draws, nodes that a schedule placed, and nodes that read an
input that the graph writes before its end.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxpar._torch.objects import calls_where
from fxpar.graph.builder import region_of
from fxpar.passes.order.sink_waits import is_chunk
from fxpar.sharding.cost.op import viewed
from fxpar.sharding.cost.recompute import computed_again
from fxpar.sharding.op_facts import is_draw, op_facts_of
from fxpar.sharding.program import PHASE, phase_of


def recompute_in_step(graph: fx.Graph) -> None:
    """Copy each recomputed node to before its first reader in the backward."""
    calls = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    later = {node for node in calls if phase_of(node) in ("backward", "update")}
    if not later:
        return
    writes = set(calls_where(graph, lambda target: op_facts_of(target).mutates))
    late: dict[fx.Node, None] = {}  # with nodes that passes added, without a phase
    for node in calls:
        if node in writes:
            continue  # a value that one reads was computed before the writes
        if node in later or any(read in late for read in node.all_input_nodes):
            late[node] = None
    if not late:
        return
    changed = {viewed(n) for w in writes if w < max(late) for n in w.all_input_nodes}
    recomputed = {
        node
        for node in computed_again(calls, late)
        if _is_pure(node) and changed.isdisjoint(map(viewed, node.all_input_nodes))
    }
    copies: dict[fx.Node, fx.Node] = {}
    for node in late:
        _copy_operands(graph, node, recomputed, copies)
        node.args = fx.node.map_arg(node.args, lambda n: copies.get(n, n))
        node.kwargs = fx.node.map_arg(node.kwargs, lambda n: copies.get(n, n))
    for node in reversed(calls):
        if node in recomputed and not node.users:
            graph.erase_node(node)
    graph.lint()


def _is_pure(node: fx.Node) -> bool:
    """Return whether an op may be repeated: it only computes, and draws nothing."""
    if node.target is operator.getitem:
        return _is_pure(node.args[0])
    if is_chunk(node) or region_of(node):
        return False
    tensors = isinstance(node.meta.get("val"), torch.Tensor | tuple | list)
    is_core = getattr(node.target, "namespace", "") in ("aten", "prims")
    return tensors and is_core and not is_draw(node)


def _copy_operands(
    graph: fx.Graph,
    reader: fx.Node,
    recomputed: set[fx.Node],
    copies: dict[fx.Node, fx.Node],
) -> None:
    """Insert copies of the recomputed nodes that a node depends on before it."""
    missing, stack = set[fx.Node](), [reader]
    while stack:
        reads = set(stack.pop().all_input_nodes) & recomputed
        new = reads - missing - copies.keys()
        missing |= new
        stack += new
    with graph.inserting_before(reader):
        for node in sorted(missing):
            operands = {n: copies.get(n, n) for n in node.all_input_nodes}
            copies[node] = copy = graph.node_copy(node, operands.__getitem__)
            custom = node.meta.get("custom") or {}
            copy.meta["custom"] = {**custom, PHASE: "backward"}
