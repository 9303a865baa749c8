"""Checks manual regions and bodies of branches and loops: steps of the pipeline.

In: a graph as it was traced. Out: the same graph: bodies are values of its nodes,
collectives of regions are named, loops have a known number of steps. Never: a
difference between ranks.
"""

from __future__ import annotations

from torch import fx

from fxpar.errors import PlanError
from fxpar.features.regions import manual_regions
from fxpar.graph import graph_bodies
from fxpar.graph.region_ops import EDGES
from fxpar.passes.simulate.loop_steps import count_steps
from fxpar.runtime.steps.pipeline_state import JointState


def show_bodies(graph: fx.Graph, state: JointState) -> None:
    """Give nodes of bodies of branches and loops these bodies as values.
    Raises PlanError if sizes are open and there are bodies."""
    graph_bodies.show_bodies(graph, graph.owning_module)
    if state.open and any(map(graph_bodies.body_of, graph.nodes)):
        raise PlanError("branches and loops need fixed sizes")


def absorb_regions(graph: fx.Graph, state: JointState) -> None:
    """Check manual regions, name their collectives. Raises PlanError for open sizes."""
    request = state.request
    if state.open and any(n.target in EDGES for n in graph.nodes):
        raise PlanError("manual regions need fixed sizes")
    manual_regions.absorb_regions(
        graph,
        state.fake_mode,
        request.mesh,
        bodies=request.bodies,
        is_open=bool(request.meshes),
    )


def count_loop_steps(graph: fx.Graph, state: JointState) -> None:
    """Give loops a known number of steps, in place."""
    count_steps(graph, state.fake_mode)
