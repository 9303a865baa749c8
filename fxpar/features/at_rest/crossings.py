"""Define the crossings between a user's code and the mesh, as they run outside a graph.

In: global values, or this rank's part of one. Out: ``fxpar.constrain`` gives the plan a
hint; ``fxpar.global_value`` takes a DTensor into a program. Through
``fxpar::to_global`` and ``fxpar::to_local`` that DTensor and parameters at rest enter,
and their gradients leave: in a compiled graph the partitioner removes both ops; run
eagerly, every rank computes on global values, so that one gathers and the other takes
this rank's part. Never: a decision on a layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fxpar import _torch
from fxpar.errors import HintError, ShardError
from fxpar.graph import custom_ops as _custom_ops  # noqa: F401  (registers fxpar's ops)
from fxpar.runtime.ranks.groups import group_of
from fxpar.sharding.hints import is_dim
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec

Entry = str | Iterable[str] | None


def constrain(x: torch.Tensor, *dims: Entry) -> torch.Tensor:
    """Hint that ``x`` is sharded as ``dims`` says: ``constrain(x, "dp", None, "tp")``.

    One entry per dim: an axis, a tuple of axes, None (whole), "?" (open), "tp?" (split
    and open to more), any of them with a priority ("tp p2"). Dims left out are open.
    "!tp" (whole along tp) and "|" (a barrier) belong to the tensor, not to a dim.
    Outside a compiled graph it is the identity. Raises HintError if there are more
    entries than dims; that axes exist and divide is checked when the graph is planned.
    """
    count = len([entry for entry in dims if is_dim(entry)])
    if count > x.dim():
        raise HintError(
            f"constrain: {count} entries for a tensor of {x.dim()} dims",
            fix="give at most one entry per dim",
        )
    if not dims or not torch.compiler.is_compiling():
        return x
    words = ["_" if x is None else x for x in dims]
    text = ",".join([x if isinstance(x, str) else "+".join(x) for x in words])
    return torch.ops.fxpar.constrain(x, text)


def global_value(x: torch.Tensor) -> torch.Tensor:
    """Return the global value of a DTensor, of which a compiled program computes with
    this rank's part as the plan says; any other tensor is returned itself. For batches
    that ranks read in parts, in global mode.

    The DTensor is on the program's mesh, split as ``torch.chunk`` splits. Raises
    ShardError if it is a sum of parts, or split along strides.
    """
    if not isinstance(x, DTensor):
        return x
    # In terms that Dynamo traces: placements and meshes are objects of its own there.
    devices, dims = x.device_mesh, [""] * x.dim()
    names = devices.mesh_dim_names or ()
    placements: tuple[Any, ...] = x.placements
    for axis, placement in zip(names, placements, strict=True):
        if placement.is_shard():
            dim = placement.dim % len(dims)
            dims[dim] = f"{dims[dim]}+{axis}" if dims[dim] else axis
        elif not placement.is_replicate():
            raise ShardError(
                f"a DTensor with placement {placement} along {axis} was fed",
                fix="feed one whose placements are Shard and Replicate",
            )
    mesh = ",".join(f"{axis}={devices.size(i)}" for i, axis in enumerate(names))
    spec = "[" + ", ".join([dim or "_" for dim in dims]) + "]"
    how = spec, "", mesh, "", -1
    return torch.ops.fxpar.to_global(x.to_local(), list(x.shape), *how)


def layout_of(x: DTensor) -> tuple[Mesh, Spec]:
    """Return the mesh and the spec of a DTensor."""
    mesh = Mesh.from_device_mesh(x.device_mesh)
    return mesh, Spec.from_placements(x.placements, mesh, x.dim())


def with_part(x: DTensor, part: torch.Tensor) -> DTensor:
    """Return a DTensor of the layout of ``x`` of which ``part`` is this rank's part."""
    return dtensor_of(part, x.device_mesh, x.placements, x.shape, x.stride())


def dtensor_of(
    part: torch.Tensor, mesh: Any, placements: Any, shape: Any, stride: Any
) -> DTensor:
    """Return the DTensor of this shape and stride of which ``part`` is this rank's
    part."""
    how = {"run_check": False, "shape": shape, "stride": stride}
    return DTensor.from_local(part, mesh, placements, **how)


def part_of(x: torch.Tensor, spec: Spec, mesh: Mesh, rank: int) -> torch.Tensor:
    """Return the part of a global value that ``rank`` holds, a view; of a sum, the
    first rank along each partial axis holds all of it, the others zeros."""
    x = x[spec.slices(mesh, x.shape, rank)]
    if any(mesh.index(rank, (axis,)) for axis in spec.partial_axes):
        return torch.zeros_like(x)
    return x


@torch.library.impl("fxpar::to_global", "CompositeExplicitAutograd")
def _(local, shape, spec, hint, mesh, reduce, home):
    layout, mesh = Spec.parse(spec), Mesh.parse(mesh)
    if layout.is_whole:
        return local.clone()
    # Not by DTensor: on gloo (2.13) its gathers may end before their threads do.
    axes = mesh.ordered(layout.sharded_axes)
    members = mesh.group(dist.get_rank(), axes)
    # Messages are as large as the largest part.
    sent = local.new_zeros(layout.local_shape(mesh, shape))
    sent[tuple(map(slice, local.shape))] = local
    parts = [torch.empty_like(sent) for _ in members]
    group = _torch.distributed.group_named(group_of(mesh, axes))
    dist.all_gather(parts, sent, group=group)
    whole = local.new_empty(shape)
    for member, part in zip(members, parts, strict=True):
        own = part_of(whole, layout, mesh, member)
        own.copy_(part[tuple(map(slice, own.shape))])
    return whole


@torch.library.impl("fxpar::to_local", "CompositeExplicitAutograd")
def _(x, spec, mesh, reduce):
    rank = _torch.distributed.own_rank()
    part = part_of(x, Spec.parse(spec), Mesh.parse(mesh), rank)
    return part.clone(memory_format=torch.contiguous_format)
