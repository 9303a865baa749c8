"""Starts small collectives that need no work first, and waits last for results that
only the caller reads.

In: the bound graph of a forward, a backward or a step. Out: the same nodes, changed in
place only in their order. ``start_first``: a collective of values that light ops
compute from graph inputs, such as the number of valid labels, starts before any other
work, so that no rank waits for the others in the middle of a step. ``wait_last``: a
wait, and light ops that only lead from it to an output of one element, such as the mean
of a loss, come last, so that the backward of a step does not wait for them.

Never: either one holds more than ``ROOM`` bytes for longer, moves work that contracts,
draws or writes, or touches the update, chunks, fused regions, gathers that ``prefetch``
places, or a graph with messages between stages, whose ranks have different orders of
collectives; or ``start_first`` moves a collective on uneven shards.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from fxpar._torch.objects import calls_where
from fxpar.graph.builder import custom_of, region_of
from fxpar.graph.pipeline_ops import MESSAGES
from fxpar.passes.order.joinable_collectives import LARGEST, from_inputs
from fxpar.passes.order.sink_waits import WAIT, is_chunk, sink
from fxpar.passes.simulate.launches import KINDS
from fxpar.sharding.cost.op import bytes_of, is_contraction, is_light, is_view, viewed
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import ancestors, descendants, phase_of

# Bytes that may be held for longer, in all.
ROOM = 1 << 20


def start_first(graph: fx.Graph) -> None:
    """Move collectives of small values that light ops compute from graph inputs, with
    these ops, before all other work, in their order."""
    collectives = calls_where(graph, lambda target: KINDS.get(target) in _STARTED)
    if not collectives or _has_messages(graph):
        return
    placed_by_prefetch = from_inputs(graph, through={*KINDS, WAIT})
    sources = _light_sources(graph)
    started: dict[fx.Node, None] = {}
    room = ROOM
    for node in collectives:
        if not _can_start(node) or node in placed_by_prefetch:
            continue
        if not sources.issuperset(node.all_input_nodes):
            continue
        moved = dict.fromkeys(needed(node))
        held = {viewed(n) for n in moved if not moved.keys() >= n.users.keys()}
        new = [n for n in held - started.keys() if n.op == "call_function"]
        size = sum(map(bytes_of, new))
        if size <= room:
            room -= size
            started.update(moved)
    others = (n for n in graph.nodes if n.op != "placeholder" and n not in started)
    first = next(others)  # the output at the latest
    for node in sorted(started):
        first.prepend(node)


def wait_last(graph: fx.Graph) -> None:
    """Move waits, and light ops after them, that lead only to outputs of one element,
    to the end."""
    results = graph.output_node().all_input_nodes
    if _has_messages(graph) or not any(map(_is_one, results)):
        return
    waited = descendants(graph.find_nodes(op="call_function", target=WAIT))
    last: set[fx.Node] = set()
    room = ROOM
    for node in sorted(waited, reverse=True):
        if not _is_only_for_scalars(node, last) or not _can_wait(node):
            continue
        reads = {viewed(n) for n in node.all_input_nodes}
        size = bytes_of(node) + sum(map(bytes_of, reads))
        if size <= room:
            room -= size
            last.add(node)
    sink(graph, last)


def needed(node: fx.Node) -> list[fx.Node]:
    """Return ``node`` and the nodes it is computed from, without placeholders, in
    order."""
    return sorted(n for n in ancestors([node]) if n.op != "placeholder")


def is_pure(node: fx.Node) -> bool:
    """Return whether an op does nothing but compute its result."""
    target = node.target
    if node.op != "call_function" or node.is_impure() or region_of(node):
        return False
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        return False
    if target is operator.getitem or is_contraction(target):
        return True
    is_core = getattr(target, "namespace", "") in ("aten", "prims")
    return (
        is_core and (is_light(target) or is_view(node)) and "assert" not in str(target)
    )


# Kinds of collectives that may start first.
_STARTED = ("all_gather", "reduce_scatter", "all_reduce")

# Kinds of nodes that need no work.
_INPUTS = ("placeholder", "get_attr")


def _has_messages(graph: fx.Graph) -> bool:
    return bool(calls_where(graph, MESSAGES.__contains__))


def _can_start(node: fx.Node) -> bool:
    """Return whether a collective may move before others: not if its shards are uneven,
    since ranks would then decide by different sizes."""
    is_even = LARGEST not in custom_of(node)
    return is_even and not is_chunk(node) and not region_of(node)


def _is_only_for_scalars(node: fx.Node, last: Collection[fx.Node]) -> bool:
    """Return whether a node leads only to outputs of one element, such as a loss, by
    nodes in ``last``."""
    for user in node.users:
        if user.op == "output":
            if not _is_one(node):
                return False
        elif user not in last:
            return False
    return bool(node.users)


def _is_one(node: fx.Node) -> bool:
    """Return whether a node is a tensor without dims."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.dim()


def _can_wait(node: fx.Node) -> bool:
    if node.target is WAIT:
        return not is_chunk(node.args[0]) and not region_of(node.args[0])
    return _is_light_work(node) and phase_of(node) != "update"


def _is_light_work(node: fx.Node) -> bool:
    return is_pure(node) and not is_contraction(node.target)


def _light_sources(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes computed from graph inputs by light ops, before any write."""
    light = set[fx.Node]()
    for node in graph.nodes:
        if node.op == "call_function" and _is_write(node.target):
            break
        is_light = node.op in _INPUTS or _is_light_work(node)
        if is_light and light.issuperset(node.all_input_nodes):
            light.add(node)
    return light


def _is_write(target: Any) -> bool:
    return target is not WAIT and op_facts_of(target).mutates
