"""Says which nodes of a local graph belong to stages.

In: a local graph and its program. Out: ``Kinds``: nodes of the forward and of the
backward, which each belong to one stage, and nodes of all places: the update, writes to
inputs, and random draws. All others have no home, and run wherever they are read: nodes
computed from weights alone, from the batch alone, or from constants, and views. Never:
changes the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from functools import cached_property
from typing import Any, NamedTuple

from torch import fx

from fxpar.graph import collective_nodes as steps
from fxpar.graph.builder import STAGE
from fxpar.sharding.cost.op import flops_of, is_view, tensors_in
from fxpar.sharding.op_facts import is_draw, op_facts_of
from fxpar.sharding.program import Program, backward_of, phase_of
from fxpar.sharding.propagate.conventions import batch_inputs

FORWARD, BACKWARD, EVERYWHERE = "forward", "backward", "everywhere"


class StageHome(NamedTuple):
    """Says where a node runs."""

    # FORWARD or BACKWARD of a stage; EVERYWHERE: at all places.
    phase: str
    stage: int


ALL = StageHome(EVERYWHERE, -1)


def home_of(node: fx.Node) -> StageHome | None:
    """Return the home of a node; None: it runs wherever it is read."""
    home: StageHome | None = node.meta.get(STAGE)
    return home


def is_loose_view(node: fx.Node) -> bool:
    """Return whether a node only shows its operand, all of it, in another way."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if steps.is_step(node) or len(node.all_input_nodes) != 1 or not is_view(node):
        return False
    operands = tensors_in(node.all_input_nodes[0].meta.get("val"))
    results = tensors_in(node.meta.get("val"))
    return (
        len(results) == len(operands) == 1 and results[0].numel() >= operands[0].numel()
    )


def viewed_value(node: fx.Node) -> fx.Node:
    """Return the value that a chain of such views shows."""
    while is_loose_view(node):
        node = node.all_input_nodes[0]
    return node


class Kinds:
    """Sorts nodes into ``forward``, ``backward`` and ``everywhere``; all others run
    where they are read."""

    def __init__(self, graph: fx.Graph, program: Program) -> None:
        self.graph, self.program = graph, program
        self.inputs = graph.find_nodes(op="placeholder")
        self.forward: set[fx.Node] = set()
        self.backward: set[fx.Node] = set()
        self.everywhere: set[fx.Node] = set()
        tagged = backward_of(graph)
        of_batch, of_weights = self._batch, set(self.weights)
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            read = node.all_input_nodes
            of_batch.update([node] if not of_batch.isdisjoint(read) else [])
            of_weights.update([node] if not of_weights.isdisjoint(read) else [])
            staged = self._kind_by_operands(node, tagged)
            if staged is not None:
                staged.add(node)
            elif node in of_batch and not is_loose_view(node):
                weighed = node in of_weights or flops_of(node)
                self.forward.update([node] if weighed else [])

    def _kind_by_operands(
        self, node: fx.Node, tagged: Collection[fx.Node]
    ) -> set[fx.Node] | None:
        """Return the kind of a node if its operands decide it; None if they do not."""
        if steps.is_step(node) or node.target is operator.getitem:
            # It is of the kind of the value that it moves, or takes a part of.
            source: Any = node.args[0]
            base = viewed_value(source)
            kinds = (self.forward, self.backward, self.everywhere)
            return next((kind for kind in kinds if base in kind), None)
        writes = op_facts_of(node.target).mutates
        if phase_of(node) == "update" or writes or is_draw(node):
            return self.everywhere
        read = set(map(viewed_value, node.all_input_nodes))
        if is_loose_view(node):
            return None
        sources = [self.tangents, self.backward, *[self.forward] * (node in tagged)]
        is_backward = not all(kind.isdisjoint(read) for kind in sources)
        return self.backward if is_backward else None

    @cached_property
    def tangents(self) -> set[fx.Node]:
        """Return the inputs that are gradients of results."""
        pairs = zip(self.inputs, self.program.signature.inputs, strict=True)
        return {node for node, declared in pairs if declared.kind == "tangent"}

    @cached_property
    def _batch(self) -> set[fx.Node]:
        batch = set(batch_inputs(self.program))
        pairs = zip(self.inputs, self.program.inputs, strict=True)
        nodes = {node for node, v in pairs if v is not None and v in batch}
        return nodes or {
            node
            for node, declared in zip(
                self.inputs, self.program.signature.inputs, strict=True
            )
            if declared.kind == "input"
        }

    @cached_property
    def weights(self) -> dict[fx.Node, str]:
        """Return the inputs that are weights, and their names."""
        out = {}
        declared = self.program.signature.inputs
        for node, declared_input in zip(self.inputs, declared, strict=True):
            value = node.meta.get("val")
            floating = tensors_in(value) and value.dtype.is_floating_point
            is_plain = declared_input.kind == "input" and node not in self._batch
            if declared_input.kind == "parameter" or (is_plain and floating):
                out[node] = declared_input.name
        return out
