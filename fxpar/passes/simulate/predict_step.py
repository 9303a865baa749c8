"""A step of a local graph on the mesh it was made for: the slowest rank's timeline.

In: a local graph, joint or not, its mesh, the hardware, and how forward and backward
are ordered. Out: a ``Timeline``. What is simulated has forward and backward parted and
ordered as when compiled; of a program in stages all places are simulated together, of
ranks whose shards or speeds differ each one. Which values the backward computes again
is decided by a simpler rule than AOTAutograd's, fusion by simpler ones than Inductor's.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from fxpar._torch.fake import fake_mode_of
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.order.order_collectives import DEFAULT, Settings
from fxpar.passes.rank_sizes import sized
from fxpar.passes.simulate.simulate_pipeline import simulate_pipeline
from fxpar.passes.simulate.simulate_step import Timeline, simulate
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.pipeline_axis import pipeline_axis
from fxpar.sharding.search.unequal_shards import unlike_ranks


def predict_step(
    graph: fx.Graph,
    mesh: Mesh,
    hardware: Hardware,
    *,
    settings: Settings = DEFAULT,
    disable: Collection[str] = (),
    fused: bool = True,
) -> Timeline:
    """The timeline of one step. ``settings``, ``disable``: of what orders forward and
    backward. ``fused``: as for ``simulate``, which says what is raised."""
    axis = pipeline_axis(mesh)
    if axis is not None:
        return simulate_pipeline(graph, hardware.on(mesh), axis, hardware, fused=fused)
    graph = as_run(graph, disable=disable, settings=settings)
    if mesh.is_shared_equally:
        machine = hardware.at_speed(mesh.slowest)
        return simulate(graph, machine.on(mesh), machine, fused=fused)
    mode = fake_mode_of([n.meta["val"] for n in graph.find_nodes(op="placeholder")])
    lines = []
    for rank, speed in unlike_ranks(mesh):
        machine, own = hardware.at_speed(speed), sized(graph, mesh, rank, mode)
        lines.append(simulate(own, machine.on(mesh), machine, fused=fused))
    return max(lines, key=lambda line: line.seconds)
