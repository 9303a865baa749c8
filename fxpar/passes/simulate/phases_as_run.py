"""A local graph as it runs: the forward and the backward, each a graph of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx


@dataclass(frozen=True)
class PhasesAsRun:
    """Phases of a local graph, each in the order it runs."""

    # The forward, which has the graph's inputs, and gives its results and what is
    # saved; and the backward, which is given the inputs, then what is saved. One of all
    # where there is no backward.
    graphs: tuple[fx.Graph, ...]
    # Of each result of the local graph, whether the backward gives it.
    is_gradient: tuple[bool, ...]

    @staticmethod
    def whole(graph: fx.Graph) -> PhasesAsRun:
        """Of a graph with the backward behind the forward, if there is one."""
        return PhasesAsRun((graph,), (False,) * len(graph.output_node().args[0]))

    @property
    def inputs(self) -> list[fx.Node]:
        return list(self.graphs[0].find_nodes(op="placeholder"))

    @cached_property
    def given(self) -> Mapping[fx.Node, Any]:
        """Of each input of the backward what it is in the forward."""
        if len(self.graphs) == 1:
            return {}
        forward, backward = self.graphs
        saved = forward.output_node().args[0][self.is_gradient.count(False) :]
        inputs = backward.find_nodes(op="placeholder")
        return dict(zip(inputs, (*self.inputs, *saved), strict=True))

    @property
    def results(self) -> list[Any]:
        """What the local graph gives, in its order."""
        of = [iter(graph.output_node().args[0]) for graph in self.graphs]
        if len(of) == 1:
            return list(of[0])
        return [next(of[is_late]) for is_late in self.is_gradient]
