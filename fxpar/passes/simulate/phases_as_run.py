"""Defines ``PhasesAsRun``: the forward and the backward of a local graph, in order.

In: an ordered graph of each phase. Out: what connects them. Never changes a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx


@dataclass(frozen=True)
class PhasesAsRun:
    """Holds the phases of a local graph, each in the order in which it runs."""

    # The forward, which has the graph's inputs and returns its results, then the saved
    # values; and the backward, whose inputs are the graph's, then the saved values. One
    # graph if there is no backward.
    graphs: tuple[fx.Graph, ...]
    # For each result of the local graph, whether the backward computes it.
    is_gradient: tuple[bool, ...]

    @staticmethod
    def whole(graph: fx.Graph) -> PhasesAsRun:
        """Return one phase for a graph in which a backward may follow the forward."""
        return PhasesAsRun((graph,), (False,) * len(graph.output_node().args[0]))

    @property
    def inputs(self) -> list[fx.Node]:
        return list(self.graphs[0].find_nodes(op="placeholder"))

    @cached_property
    def given(self) -> Mapping[fx.Node, Any]:
        """Return {input of the backward: its node in the forward}."""
        if len(self.graphs) == 1:
            return {}
        forward, backward = self.graphs
        saved = forward.output_node().args[0][self.is_gradient.count(False) :]
        inputs = backward.find_nodes(op="placeholder")
        return dict(zip(inputs, (*self.inputs, *saved), strict=True))

    @property
    def results(self) -> list[Any]:
        """Return the results of the local graph, in its order."""
        of = [iter(graph.output_node().args[0]) for graph in self.graphs]
        if len(of) == 1:
            return list(of[0])
        return [next(of[is_late]) for is_late in self.is_gradient]
