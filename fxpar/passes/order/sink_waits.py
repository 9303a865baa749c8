"""Moves the wait for a collective to where its result is first needed.

In: a local graph. Out: the same nodes, changed in place only in their order: a wait,
and ops that only rearrange its result, are right before its first reader. A collective
so overlaps with all work that does not depend on it; a gradient's reduction with the
rest of the backward. Never moves a collective, so all ranks keep one order of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.passes.simulate.launches import WAITS
from fxpar.sharding.cost.op import viewed
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import ancestors

aten = torch.ops.aten

WAIT = torch.ops._c10d_functional.wait_tensor.default
_SEND = torch.ops._c10d_functional.isend.default


def sink_waits(graph: fx.Graph) -> None:
    """Move every wait, and views of its result, before their first readers; the wait
    for a sent message, which has none, to the end."""
    waits = graph.find_nodes(op="call_function", target=WAIT)
    waited = derived_from(waits, lambda node: op_facts_of(node.target).sinks)
    for node in sorted(n for n in waited if not n.users):
        if node.target is WAIT and node.args[0].target is _SEND:
            graph.output_node().prepend(node)
    sink(graph, waited)


def is_chunk(node: fx.Node) -> bool:
    """Return whether a schedule made a collective a chunk, to overlap with work: it is
    neither joined with others nor waited for before its result is needed."""
    return bool(node.meta.get("fxpar_chunk"))


def sink(graph: fx.Graph, nodes: Collection[fx.Node]) -> None:
    """Move each of ``nodes`` right before its first reader, or before a later write to
    memory that it reads (a wait reads the memory of its collective); nodes of one
    reader keep their order."""
    writes = _writes(graph)
    first: dict[fx.Node, fx.Node] = {}
    for node in sorted(nodes, reverse=True):
        if node.users:
            reader = min(node.users)
            if writes:
                after = [w for m in _reads(node) for w in writes.get(m, ()) if node < w]
                reader = min([reader, *after])
            first.get(reader, reader).prepend(node)
            first[reader] = node


def needed(node: fx.Node) -> list[fx.Node]:
    """Return ``node`` and the nodes it is computed from, without placeholders, in
    order."""
    return sorted(n for n in ancestors([node]) if n.op != "placeholder")


def hoist(node: fx.Node, before: fx.Node) -> None:
    """Move ``node``, with the nodes it is computed from, before another node."""
    for each in needed(node):
        if before < each:
            before.prepend(each)


def _writes(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return the nodes that write to a memory, by the node that allocates it."""
    out: dict[fx.Node, list[fx.Node]] = {}
    for node in _torch.objects.calls_where(graph, is_write):
        for read in node.all_input_nodes:
            out.setdefault(viewed(read), []).append(node)
    return out


def is_write(target: Any) -> bool:
    """Return whether an op writes to its operands, and is no wait."""
    return op_facts_of(target).mutates and target not in WAITS


def _reads(node: fx.Node) -> set[fx.Node]:
    """Return the nodes whose memory an op reads; for a wait, also its collective's."""
    read = set(node.all_input_nodes)
    if node.target in WAITS:
        read.update(*(n.all_input_nodes for n in node.all_input_nodes))
    return {viewed(n) for n in read}


def derived_from(
    sources: Iterable[fx.Node], allows: Callable[[fx.Node], bool]
) -> set[fx.Node]:
    """Return ``sources`` and the nodes computed from them alone by nodes that
    ``allows`` takes."""
    derived = set(sources)
    pending = list(derived)
    while pending:
        for user in pending.pop().users:
            is_new = user not in derived and allows(user)
            if is_new and derived.issuperset(user.all_input_nodes):
                derived.add(user)
                pending.append(user)
    return derived
