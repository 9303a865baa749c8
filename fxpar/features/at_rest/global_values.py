"""Give the global values of DTensors, and let writes to them reach every rank's part.

In: an op on DTensors that DTensor (torch 2.13) runs on a copy of the local tensor, as
it gathers a row of a tensor that is split by rows, so that a write is lost; or that it
cannot run at all, such as ``index_fill_``. Out: every rank gathers the global value,
runs the op on it, and copies its own part back: the numbers are those of one device. A
view that shares no memory with any local tensor is computed each time it is read.
``_torch.dtensor.serve_aliases`` finds these ops by what DTensor would do. Never: a list
of ops.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from fxpar import _torch
from fxpar.errors import ShardError
from fxpar.features.at_rest.crossings import part_of
from fxpar.runtime.calls.outside_graphs import HOME
from fxpar.runtime.ranks.groups import has_device_mesh
from fxpar.runtime.ranks.presence import is_alone, user_line
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec


@functools.cache
def write_to_parts() -> None:
    """Let every write in place to a DTensor, or to a view of one, reach its parts."""
    _torch.dtensor.serve_aliases(_on_global_values, has_device_mesh)


def summed(x: Any) -> Any:
    """Return the DTensor, reduced so that it is partial over no axis."""
    if not any(p.is_partial() for p in x.placements):
        return x
    placements = [Replicate() if p.is_partial() else p for p in x.placements]
    return x.redistribute(placements=placements)


@torch.no_grad()
def gathered(x: Any) -> torch.Tensor:
    """Return the global value of a DTensor, in memory of its own."""
    if is_alone():
        raise ShardError(
            f"each rank holds a part of a tensor {list(x.shape)}, which no rank can "
            "read or write alone",
            where=user_line(),
            fix="do it on all ranks, outside of fxpar.alone()",
        )
    x = summed(x)
    mesh, spec = _layout(x)
    where = str(spec), "", str(mesh), "", "", -1
    whole: torch.Tensor = torch.ops.fxpar.to_global(x.to_local(), list(x.shape), *where)
    return whole


def part_held(x: Any, whole: torch.Tensor) -> torch.Tensor:
    """Return a view of the part of a global value that this rank holds of a DTensor."""
    mesh, spec = _layout(x)
    return part_of(whole, spec, mesh, dist.get_rank())


def _layout(x: Any) -> tuple[Mesh, Spec]:
    """Return the mesh and the spec of a DTensor."""
    mesh = Mesh.from_device_mesh(x.device_mesh)
    return mesh, Spec.from_placements(x.placements, mesh, x.dim())


def _on_global_values(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op that writes to DTensors, or makes views of one, on global values.

    Raises ShardError if the op changes the shape of a parameter, or writes to one
    through two operands, one of which is ``x.detach()`` or ``x.data``."""
    if not _torch.objects.is_mutable(op):
        return _views(op, *args, **kwargs)
    wholes: dict[int, torch.Tensor] = {}  # by the id of the DTensor
    operands: dict[int, Any] = {}  # by the id of the value that is used for it

    def whole(x: Any) -> Any:
        if not isinstance(x, DTensor):
            operands[id(x)] = x
            return x
        base, replay = _torch.dtensor.base_of(x)
        if id(base) not in wholes:
            wholes[id(base)] = gathered(base)
        value = replay(wholes[id(base)])
        operands[id(value)] = x
        return value

    plain = _torch.fake.tree_map(whole, (tuple(args), dict(kwargs)))
    results = op(*plain[0], **plain[1])
    written = {id(base): base for base in _written(op, args, kwargs)}.values()
    memories = {_torch.objects.memory_of(x.to_local()) for x in written}
    for x in written:
        value = wholes[id(x)]
        if value.shape == x.shape and len(memories) == len(written):
            x.to_local().copy_(part_held(x, value))
        elif torch.Tag.inplace_view in op.tags and not hasattr(x, HOME):
            _torch.dtensor.change_form(x, op, args, kwargs, value)
        else:
            raise ShardError(
                f"{op} changes the shape of a sharded tensor, or writes to it "
                "through two operands, one of which is x.detach() or x.data",
                where=user_line(),
                fix="change whole = x.full_tensor(), and copy it back: x.copy_(whole)",
            )

    def as_operand(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in operands:
            return operands[id(value)]
        mesh = next(x.device_mesh for x in operands.values() if isinstance(x, DTensor))
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim)

    return _torch.fake.tree_map(as_operand, results)


def _written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the DTensors that an op writes to, or to views of which it writes."""
    values = []
    for i, argument in enumerate(_torch.objects.schema_of(op).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values.append(args[i] if i < len(args) else kwargs.get(argument.name))
    leaves = _torch.fake.tree_flatten(values)[0]
    return [_torch.dtensor.base_of(x)[0] for x in leaves if isinstance(x, DTensor)]


def _views(op: Any, x: Any, *settings: Any, **more: Any) -> Any:
    """Return the views that an op makes of a DTensor, or of a view of one. Raises
    ShardError for ``as_strided`` of a view, which has no memory of its own."""
    is_strided = op is torch.ops.aten.as_strided.default
    if is_strided and not (x.is_contiguous() and _torch.objects.base_of(x) is x):
        raise ShardError(
            "as_strided of a view of a sharded tensor, which has no memory of its own",
            where=user_line(),
            fix="index the tensor instead, or take the view of x.full_tensor()",
        )
    base, before = _torch.dtensor.base_of(x)

    def views_of(whole: torch.Tensor) -> Any:
        return op(before(whole), *settings, **more)

    form = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    forms = op(form, *settings, **more)
    if isinstance(forms, torch.Tensor):
        return _torch.dtensor.copied_view(base, views_of, gathered, forms)

    def view(i: int) -> Any:
        return _torch.dtensor.copied_view(
            base, lambda whole: views_of(whole)[i], gathered, forms[i]
        )

    return [view(i) for i in range(len(forms))]
