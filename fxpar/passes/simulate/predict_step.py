"""Predicts a step of a local graph on its mesh: the timeline of the slowest rank.

In: a local graph, joint or not, its mesh, the hardware, and settings of the order of
forward and backward. Out: a ``Timeline``. Forward and backward are partitioned and
ordered as when compiled; the stages of a pipeline are simulated together, and ranks
whose shards or speeds differ one by one. Recomputation follows a simpler rule than
AOTAutograd's, fusion simpler ones than Inductor's. Never changes the graph.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from fxpar._torch.fake import fake_mode_of
from fxpar.graph.pipeline_ops import OF_STAGES
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.order.order_collectives import DEFAULT, Settings
from fxpar.passes.rank_sizes import sized
from fxpar.passes.simulate.simulate_step import Timeline, simulate
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.pipeline_axis import pipeline_axis
from fxpar.sharding.search.unequal_shards import distinct_ranks


def predict_step(
    graph: fx.Graph,
    mesh: Mesh,
    hardware: Hardware,
    *,
    settings: Settings = DEFAULT,
    disable: Collection[str] = (),
    fused: bool = True,
) -> Timeline:
    """Return the timeline of one step. ``settings``, ``disable``: settings and disabled
    passes of the order; ``fused``: as for ``simulate``, which says what is raised."""
    axis = pipeline_axis(mesh)
    if axis is not None:
        simulate_stages = OF_STAGES["simulate"]
        timeline: Timeline = simulate_stages(
            graph, hardware.on(mesh), axis, hardware, fused=fused
        )
        return timeline
    graph = as_run(graph, disable=disable, settings=settings)
    if mesh.is_shared_equally:
        machine = hardware.at_speed(mesh.slowest)
        return simulate(graph, machine.on(mesh), machine, fused=fused)
    mode = fake_mode_of([n.meta["val"] for n in graph.find_nodes(op="placeholder")])
    lines = []
    for rank, speed in distinct_ranks(mesh):
        machine, own = hardware.at_speed(speed), sized(graph, mesh, rank, mode)
        lines.append(simulate(own, machine.on(mesh), machine, fused=fused))
    return max(lines, key=lambda line: line.seconds)
