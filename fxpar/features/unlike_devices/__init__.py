"""Adds shares of the batch for ranks of different speed.

In: a mesh with speeds or shares, or a plan with them. Out: the mesh with shares of its
batch axes. Never: a difference between ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpar.features.feature import Feature, later
from fxpar.passes.order.order_collectives import Pass
from fxpar.sharding.plan import Plan

_by_speed = later(f"{__name__}.speed_shares", "by_speed")

# The ops at the edges of manual regions.
_EDGES = {"fxpar.enter_region.default", "fxpar.leave_region.default"}


def _is_on(_: Any, state: Any) -> bool:
    mesh, mode = state.request.mesh, state.request.mode
    return isinstance(mode, Plan) or bool(mesh.unlike) or any(mesh.shares)


def share_by_speed(graph: fx.Graph, state: Any) -> None:
    """Give ranks of different speed shares of the rows that the batch axes split."""
    if state.request.meshes:
        return
    regions = any(str(n.target) in _EDGES for n in graph.nodes)
    state.rows = 0 if state.open else _first_rows(state)
    mesh, state.open_shares = _by_speed(state.request, state.rows, regions=regions)
    state.request = state.request.on(mesh)


def _first_rows(state: Any) -> int:
    """Return the batch's rows: of dim 0 of the first plain input with dims, else 0."""
    nodes = state.graph.find_nodes(op="placeholder")
    for node, declared in zip(nodes, state.request.signature.inputs, strict=True):
        value = node.meta.get("val")
        if declared.kind == "input" and isinstance(value, torch.Tensor) and value.dim():
            return int(value.shape[0])
    return 0


FEATURE = Feature(
    "unlike_devices",
    {"show_bodies": [Pass("share_by_speed", share_by_speed, when=_is_on)]},
)
