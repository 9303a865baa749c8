"""Swap the parameters of a model for the parts that a rank holds, as DTensors.

In: a module with plain parameters, and the layout of each (``parameter_layouts``). Out:
the same module, its classes those of ``sharded_modules``. State dicts of whole tensors
still load. Never: a decision on a layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fxpar import _torch
from fxpar.errors import ShardError
from fxpar.features.at_rest.crossings import part_of
from fxpar.features.at_rest.dtensor_ops import (
    combine_with_losses,
    complete_partials,
    draw_as_one_device,
    orthogonalize_whole,
    set_parts,
)
from fxpar.features.at_rest.global_values import write_to_parts
from fxpar.features.at_rest.homes import (
    Home,
    ParameterAtRest,
)
from fxpar.features.at_rest.parameter_layouts import ParameterLayout
from fxpar.features.at_rest.sharded_modules import adopt
from fxpar.runtime.calls.outside_graphs import HOME
from fxpar.runtime.ranks import consensus
from fxpar.runtime.ranks.drift import note_steps
from fxpar.runtime.ranks.groups import Ranks, device_mesh_of
from fxpar.runtime.ranks.presence import user_line
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.propagate.conventions import batch_axes
from fxpar.sharding.spec import Spec


def swap_parameters(
    model: nn.Module,
    ranks: Ranks,
    layout: Mapping[int, ParameterLayout],
    *,
    movable: bool,
) -> None:
    """Replace parameters by their shards, and classes by those that gather them.
    ``movable``: whether the first graph to read a parameter lays it out as it uses it.
    """
    note_steps(_home)
    names = {id(p): name for name, p in model.named_parameters()}
    home = Home(str(ranks.mesh), _batch(ranks.mesh), round=consensus.round_number())
    home.movable = {*names.values()} if movable else set()
    forms = {id(p): tuple(p.shape) for p in model.parameters()}
    home.is_even = all(
        own_layout.spec.is_even(ranks.mesh, forms[key])
        for key, own_layout in layout.items()
    )
    parts: dict[int, nn.Parameter] = {}
    originals = list(model.parameters())  # ids stay taken while parameters change
    modules = list(model.named_modules())
    for name, module in modules:
        _refuse_hidden(module, name, layout)
    for _, module in modules:
        infos = {}
        for key, p in list(_torch.objects.own_parameters(module).items()):
            if p is None:
                continue
            own_layout = layout[id(p)]
            if id(p) not in parts:
                parts[id(p)] = _resting(p, own_layout.spec, ranks)
                setattr(parts[id(p)], HOME, home)
            _torch.objects.own_parameters(module)[key] = parts[id(p)]
            infos[key] = ParameterAtRest(
                tuple(p.shape), str(own_layout.spec), own_layout.hint, names[id(p)]
            )
        if infos or module is model:
            adopt(module, home, infos, root=module is model)
            module.register_load_state_dict_pre_hook(_take_parts)
        if isinstance(module, nn.RNNBase):
            _torch.dynamo.list_recurrent_weights(module)
    del originals


def _batch(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of more than one rank that split the batch."""
    return tuple(axis for axis in batch_axes(mesh) if mesh.sizes[axis] > 1)


def _home(p: torch.Tensor) -> Home | None:
    return getattr(p, HOME, None)


def _resting(p: nn.Parameter, spec: Spec, ranks: Ranks) -> nn.Parameter:
    """Return the DTensor parameter that holds this rank's part of a plain one."""
    part = part_of(p.detach(), spec, ranks.mesh, ranks.rank)
    part = part.clone(memory_format=torch.contiguous_format)
    device = p.device.type
    if p.is_meta:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    complete_partials()
    combine_with_losses()
    write_to_parts()
    orthogonalize_whole()
    set_parts()
    if device == "cpu":
        draw_as_one_device()
    shape = torch.Size(p.shape)
    dtensor = DTensor.from_local(
        part,
        device_mesh_of(ranks.mesh, device),
        spec.to_placements(ranks.mesh),
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    parameter = nn.Parameter(dtensor, requires_grad=p.requires_grad)
    parameter.__dict__.update(p.__dict__)
    return parameter


def _refuse_hidden(
    module: nn.Module, name: str, layout: Mapping[int, ParameterLayout]
) -> None:
    """Raise ShardError if a module keeps parameters elsewhere too."""
    for key, value in module.__dict__.items():
        if _torch.dynamo.is_recurrent_weights(module, key):
            continue
        if key.startswith("_parameters") or key in ("_modules", "_buffers"):
            continue
        inside = value if isinstance(value, (list, tuple)) else [value]
        if isinstance(value, dict):
            inside = list(value.values())
        if any(isinstance(x, nn.Parameter) and id(x) in layout for x in inside):
            raise ShardError(
                f"{type(module).__name__} {name or 'model'} keeps a parameter in its "
                f"attribute {key!r} too, where it cannot be sharded",
                fix="read parameters as self.<name> where they are used",
            )


def _take_parts(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Let ``load_state_dict`` take whole tensors, each rank its part. Raises ShardError
    for the part of another rank."""
    for key in module.__dict__.get("_fxpar_rests", {}):
        name, resting = prefix + key, _torch.objects.own_parameters(module)[key]
        whole = state_dict.get(name)
        if isinstance(whole, DTensor):
            _refuse_others_part(name, whole)
        if (
            isinstance(whole, torch.Tensor)
            and isinstance(resting, DTensor)
            and not isinstance(whole, DTensor)
            and whole.shape == resting.shape
        ):
            mesh = Mesh.from_device_mesh(resting.device_mesh)
            spec = Spec.from_placements(resting.placements, mesh, resting.dim())
            part = part_of(whole, spec, mesh, resting.device_mesh.get_rank())
            state_dict[name] = DTensor.from_local(
                part.contiguous(),
                resting.device_mesh,
                resting.placements,
                run_check=False,
                shape=resting.shape,
                stride=resting.stride(),
            )


def _refuse_others_part(name: str, part: DTensor) -> None:
    """Raise ShardError if a DTensor was unpickled that another rank had pickled: it
    holds that rank's part, and the coordinates of its mesh say so."""
    mesh, rank = part.device_mesh, dist.get_rank()
    coordinates = mesh.get_coordinate()
    here = (mesh.mesh == rank).nonzero().flatten().tolist()
    if coordinates is None or list(coordinates) == here:
        return
    if any(placement.is_shard() for placement in part.placements):
        raise ShardError(
            f"rank {rank} loads the part of {name} that rank "
            f"{int(mesh.mesh[tuple(coordinates)])} saved",
            where=user_line(),
            fix="save by torch.distributed.checkpoint, or let rank 0 save whole "
            "tensors: get_model_state_dict(..., options=StateDictOptions("
            "full_state_dict=True))",
        )
