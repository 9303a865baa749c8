"""Splits a local graph into forward and backward, schedules each, and joins them again.

In: a local graph, joint or not. Out: a new graph with the same results, in which nodes
are in the order of the compiled program: values that the backward needs are saved or
recomputed in the backward, and ``schedule`` has run on both. It is for
``simulate_step``; the program that runs is split by AOTAutograd, from the bound graph.
``sharding.cost.recompute`` chooses what is recomputed. ``Orders`` says which settings
give one order. Never: the given graph changes.

``tag`` tags a graph for AOTAutograd's partitioner, in place, by three functions:

``regather``: values that are gathered from parameters at rest, and computed from
nothing else, are recomputed, so that the partitioner saves this rank's shard for the
backward and not the whole (FSDP's reshard-after-forward). Without the tags the
partitioner may save either.

``save_readers_of_recomputed``: the partitioner weighs values by their size. Where
shards, or the ranks' inputs, have different sizes one rank could recompute a collective
whose result another saved, and wait for it forever; so nodes that read recomputed
values in the forward are saved: recomputed are only values that the backward itself
reads, on all ranks.

``recompute_views_of_inputs``: inputs are saved in place of their views.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxpar.graph.builder import part_of
from fxpar.passes.order.bucket_collectives import REGATHERED, Joinable
from fxpar.passes.order.order_collectives import (
    BEFORE_BUCKETS,
    DEFAULT,
    PhaseGraph,
    Settings,
    buckets_of,
    gathers_started,
    schedule,
)
from fxpar.sharding.cost.op import is_view
from fxpar.sharding.cost.recompute import given_of, phases
from fxpar.sharding.program import depending_on_tangents, phase_of


def tag(graph: fx.Graph, *, keep_gathered: bool, save_readers: bool) -> None:
    """Tag what the forward saves and what the backward computes or gathers again.
    ``keep_gathered``: parameters are not gathered again; ``save_readers``: shards, or
    the inputs of ranks, have different sizes."""
    if not keep_gathered:
        regather(graph)
    if save_readers:
        save_readers_of_recomputed(graph)
    recompute_views_of_inputs(graph)


def save_readers_of_recomputed(graph: fx.Graph) -> None:
    """Tag nodes that read recomputed values in the forward to be saved, in place."""
    backward = depending_on_tangents(graph)
    for node in graph.nodes:
        if node.op == "call_function" and node not in backward:
            tags = [read.meta.get("recompute") for read in node.all_input_nodes]
            if CheckpointPolicy.MUST_RECOMPUTE in tags:
                node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def regather(graph: fx.Graph) -> None:
    """Tag gathered parameters to be recomputed, in place."""
    if not depending_on_tangents(graph):
        return
    tagged: set[fx.Node] = set()
    for node in graph.nodes:
        is_saved = node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE
        if node.op != "call_function" or is_saved:
            continue
        read = node.all_input_nodes
        if node.meta.get("fxpar_parameter") or (read and tagged.issuperset(read)):
            tagged.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = REGATHERED


def recompute_views_of_inputs(graph: fx.Graph) -> None:
    """Tag views of inputs to be recomputed, in place, so that inputs are saved: views
    that Inductor returns (torch 2.13) count no writes, so that a backward would read
    what was written to an input since its forward."""
    views = set(graph.find_nodes(op="placeholder"))
    for node in graph.nodes:
        is_copy = node.target is torch.ops.aten.clone.default  # Inductor drops it
        if (is_copy or is_view(node)) and views.issuperset(node.all_input_nodes[:1]):
            views.add(node)
            if not is_copy:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


@dataclass(frozen=True)
class PhasedGraph:
    """Is a local graph with its calls by phase."""

    # The graph that has the calls.
    graph: fx.Graph
    # Calls that the forward runs; all calls of a graph that is not joint.
    forward: tuple[fx.Node, ...]
    # Calls that the backward runs, including those that it recomputes.
    backward: tuple[fx.Node, ...]
    # For each result, whether the backward computes it.
    is_gradient: tuple[bool, ...]

    @cached_property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(self.graph.find_nodes(op="placeholder"))

    @cached_property
    def saved(self) -> tuple[fx.Node, ...]:
        """Return the values of the forward that the backward reads."""
        return tuple(given_of(self.forward, self.backward))

    @property
    def count(self) -> int:
        """Return the number of phases."""
        return 1 + bool(self.backward)


def split_phases(graph: fx.Graph) -> PhasedGraph:
    """Return a local graph split into the calls of its forward and its backward."""
    backward_nodes = depending_on_tangents(graph)
    forward, backward = phases(graph)
    is_gradient = (result in backward_nodes for result in graph.output_node().args[0])
    return PhasedGraph(graph, tuple(forward), tuple(backward), tuple(is_gradient))


def as_run(
    graph: fx.Graph | PhasedGraph,
    *,
    disable: Collection[str] = (),
    settings: Settings = DEFAULT,
) -> fx.Graph:
    """Return the graph in the order in which it runs; ``disable``: passes of
    ``schedule`` to leave out; ``settings``: for the others.

    Nodes of the backward are tagged ("partitioner_tag"), as AOTAutograd tags them; the
    names of those that the forward has too, and computes first, end in "_again".
    """
    parts = graph if isinstance(graph, PhasedGraph) else split_phases(graph)
    phases = [phase_graph(parts, i) for i in range(parts.count)]
    for phase in phases:
        schedule(
            phase.graph, backward=phase.backward, disable=disable, settings=settings
        )
    if len(phases) == 1:
        return phases[0].graph
    forward, backward = (phase.graph for phase in phases)
    return _joined(forward, backward, parts.is_gradient)


def phase_graph(parts: PhasedGraph, i: int) -> PhaseGraph:
    """Return a copy of the forward (0) or the backward (1) by itself, before it is
    ordered; of the whole graph if it has no backward."""
    results = list(parts.graph.output_node().args[0])
    if parts.count == 1:
        whole = part_of(parts.inputs, parts.forward, results)
        of_step = any(map(phase_of, parts.forward))  # which has its backward inside
        return PhaseGraph(whole, of_step)
    pairs = zip(results, parts.is_gradient, strict=True)
    own = [result for result, is_gradient in pairs if is_gradient == bool(i)]
    if i == 0:
        graph = part_of(parts.inputs, parts.forward, [*own, *parts.saved])
    else:
        graph = part_of([*parts.inputs, *parts.saved], parts.backward, own)
    return PhaseGraph(graph, bool(i))


def _joined(
    forward: fx.Graph, backward: fx.Graph, is_backward: Sequence[bool]
) -> fx.Graph:
    """Append the backward to the graph of the forward, and return that; both are copies
    already. ``is_backward``: for each result, whether the backward computes it."""
    for graph, tag in ((forward, "is_forward"), (backward, "is_backward")):
        for node in graph.nodes:
            node.meta["partitioner_tag"] = tag
    end, count = forward.output_node(), is_backward.count(False)
    results = list(end.args[0])
    operands = [*forward.find_nodes(op="placeholder"), *results[count:]]
    forward.erase_node(end)
    inputs = backward.find_nodes(op="placeholder")
    names = {node.name for node in forward.nodes}
    for node in backward.nodes:
        if node.name in names:
            node.name = f"{node.name}_again"
    grads: Any = forward.graph_copy(backward, dict(zip(inputs, operands, strict=True)))
    of = iter(results[:count]), iter(grads)
    forward.output([next(of[is_late]) for is_late in is_backward])
    return forward


class Orders:
    """Says which settings give a split graph one order."""

    def __init__(self, parts: PhasedGraph) -> None:
        self.parts = parts
        # For each phase, what it can join, and how many gathers may start ahead.
        self._phases: list[tuple[Joinable, int]] = []
        for i in range(parts.count):
            phase = phase_graph(parts, i)
            for row in BEFORE_BUCKETS:
                row.run(phase.graph, phase)
            joinable = Joinable(())
            if phase.waits:
                joinable = Joinable.of(phase.graph, reductions=phase.backward)
            self._phases.append((joinable, gathers_started(phase.graph)))

    def of(self, settings: Settings) -> Hashable:
        """Return a key that is equal for settings that give the graph one order."""
        return tuple(
            (max(1, min(settings.ahead, started - 1)), buckets_of(joinable, settings))
            for joinable, started in self._phases
        )
