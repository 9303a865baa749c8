"""Local form of ``fxpar::shift``: rows cut, sent on along a split dim, and joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpar.passes import collective_nodes
from fxpar.passes.local_call import Call, Localizer
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.shift_messages import pieces

aten = torch.ops.aten
prims = torch.ops.prims


def _shift(
    call: Call, x: fx.Node, dim: int, by: int, fill: float | None = None
) -> fx.Node:
    build, rows = call.build, call.shapes[0][dim]
    mesh, axes = build.mesh, call.operands[0].dims[dim]
    shards = mesh.count(axes)
    parts = []
    for piece in pieces(rows, shards, by):
        part = x
        if piece.end - piece.start < rows // shards:
            part = build.call(aten.slice.Tensor, x, dim, piece.start, piece.end)
        if piece.further:
            sources = _sources(mesh, axes, piece.further)
            part = collective_nodes.step(
                build, collective_nodes.permute, part, sources, mesh.ordered(axes)
            )
        parts.append(part)
    moved = parts[0] if len(parts) == 1 else build.call(aten.cat.default, parts, dim)
    if fill is not None:
        moved = call.where(_inside(call, moved, dim, by), moved, fill)
    if moved is x:
        return build.call(aten.clone.default, x, memory_format=torch.contiguous_format)
    return moved


def _sources(mesh: Mesh, axes: Sequence[str], further: int) -> tuple[int, ...]:
    """For each member of a group, in mesh order, the member that holds the shard so
    many further on."""
    shard = [mesh.index(rank, axes) for rank in mesh.group(0, axes)]
    holder = {s: i for i, s in enumerate(shard)}
    return tuple(holder[(s + further) % len(shard)] for s in shard)


def _inside(call: Call, moved: fx.Node, dim: int, by: int) -> fx.Node:
    """Which rows come from within the dim."""
    build, like = call.build, moved.meta["val"]
    rows, n = call.shapes[0][dim], int(like.shape[dim])
    index = build.call(
        prims.iota.default,
        n,
        start=build.offset(call.operands[0].dims[dim], n),
        step=1,
        dtype=torch.int64,
        device=like.device,
        requires_grad=False,
    )
    for _ in range(like.dim() - 1 - dim):
        index = build.call(aten.unsqueeze.default, index, -1)
    if by > 0:
        return build.call(aten.lt.Scalar, index, rows - by)
    return build.call(aten.ge.Scalar, index, -by)


LOCAL: dict[Any, Localizer] = {"fxpar::shift": _shift}
