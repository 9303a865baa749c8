"""Gives unequal ranks shares of the batch by their speed.

In: a traced graph, and a state with a request. Out: the request's mesh, with shares
along axes of the batch. Never: shares along an axis whose shards must be equal.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from fxpar.errors import MeshError
from fxpar.graph.region_ops import EDGES
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.sharding.mesh import Mesh, axis_of
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_request import Request
from fxpar.sharding.propagate.conventions import batch_axes
from fxpar.sharding.refine_mesh import rounded


def share_by_speed(graph: fx.Graph, state: JointState) -> None:
    """Give ranks of different speed shares of the rows that the batch axes split."""
    if state.request.meshes:
        return
    regions = any(n.target in EDGES for n in graph.nodes)
    state.rows = 0 if state.open else _first_rows(state)
    mesh, state.open_shares = by_speed(state.request, state.rows, regions=regions)
    state.request = state.request.on(mesh)


def _first_rows(state: JointState) -> int:
    """Return the batch's rows: of dim 0 of the first plain input with dims, else 0."""
    nodes = state.graph.find_nodes(op="placeholder")
    for node, declared in zip(nodes, state.request.signature.inputs, strict=True):
        value = node.meta.get("val")
        if declared.kind == "input" and isinstance(value, torch.Tensor) and value.dim():
            return int(value.shape[0])
    return 0


def by_speed(
    request: Request, rows: int, *, regions: bool
) -> tuple[Mesh, tuple[str, ...]]:
    """Return the mesh, and the axes whose shares are open. Unequal ranks get shares by
    their speeds along axes of the batch (of ``rows``) that have no shares; with a saved
    plan the mesh has the plan's shares.

    Shards stay equal along axes that split parameters at rest; and all shards stay
    equal in programs that are cut equally on all ranks: by manual regions
    (``regions``), by microbatches and by schedules given by name. Raises MeshError
    where the user gave shares along such axes.
    """
    mesh, mode = request.mesh, request.mode
    if isinstance(mode, Plan) and mode.mesh.unrefined.axes == mesh.unrefined.axes:
        mesh = replace(mesh, shares=mode.mesh.unrefined.shares)
    shares_by_axis = dict(zip(mesh.names, mesh.shares, strict=True))
    fixed = _equally_cut_axes(request, regions=regions)
    for axis, why in fixed.items():
        if mesh.weights_of(axis):
            raise MeshError(
                f"mesh {mesh} has unequal shares along {axis}, and {why} are equal",
                fix="leave out the shares",
            )
    if isinstance(mode, Plan):
        return mesh, ()
    open_ = [a for a in mesh.unlike if shares_by_axis[a] is None and a not in fixed]
    batch_axes_open = [axis for axis in open_ if axis in batch_axes(mesh)]
    shares = {axis: mesh.speeds_of(axis) for axis in batch_axes_open}
    return rounded(mesh.with_shares(shares), batch_axes_open, rows), tuple(open_)


def _equally_cut_axes(request: Request, *, regions: bool) -> dict[str, str]:
    """Return axis -> the name of the parts that must be equal on all ranks along it."""
    cutters = {
        "the shards of manual regions": regions,
        "microbatches": request.microbatches not in (None, 1),
        "the shards that a schedule rewrites": request.options.schedule
        not in ("auto", "none"),
    }
    for why, holds in cutters.items():
        if holds:
            return dict.fromkeys(request.mesh.unrefined.names, why)
    # Specs that ``fxpar.plan`` gets for its arguments describe the wanted plan.
    is_run = request.rank is not None
    return {
        axis_of(axis): f"the shards of {end.name} at rest"
        for end in request.signature.inputs
        if end.is_sharded
        and end.at_rest is not None
        and (is_run or end.kind != "input")
        for axis in end.at_rest.sharded_axes
    }
