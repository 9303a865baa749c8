"""Reshard parameters at rest, and all tensors that share their layout.

In: parameters that no program has read, and their new specs. Out: the same objects with
other placements and local tensors; so are their gradients, the optimizer's state,
copies of the model, and tensors that share memory with one of these. Never: a decision
on a layout, or a reshard of a tensor whose local tensor a user may hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fxpar import _torch
from fxpar.features.at_rest.crossings import part_of
from fxpar.features.at_rest.global_values import gathered
from fxpar.features.at_rest.homes import (
    AT_REST,
    Home,
    ParameterAtRest,
    live_homes,
)
from fxpar.runtime.calls.outside_graphs import HOME
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec


@dataclass(frozen=True)
class Holder:
    """Is a place in a model that holds a parameter."""

    # The model's Home.
    home: Home
    # The module that has the parameter as an attribute.
    module: nn.Module
    # The attribute's name.
    key: str

    @property
    def at_rest(self) -> ParameterAtRest:
        """Return the layout of the parameter in this place."""
        info: ParameterAtRest = self.module.__dict__[AT_REST][self.key]
        return info


@dataclass(frozen=True)
class Movable:
    """Is a parameter that no program has read yet."""

    # The Home of its model.
    home: Home
    # Its name in the model.
    name: str
    # The DTensor.
    parameter: Any
    # All tensors to be resharded with it by description; itself as "value".
    tensors: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> Spec:
        """Return the spec in which the parameter is stored now."""
        mesh = Mesh.from_device_mesh(self.parameter.device_mesh)
        ndim = self.parameter.dim()
        return Spec.from_placements(self.parameter.placements, mesh, ndim)


def holders() -> dict[int, list[Holder]]:
    """Return the places that hold each parameter, by the id of the parameter."""
    by_id: dict[int, list[Holder]] = {}
    for home in live_homes():
        for module in list(home.modules.values()):
            own = _torch.objects.own_parameters(module)
            for key in module.__dict__[AT_REST]:
                if isinstance(p := own.get(key), DTensor):
                    by_id.setdefault(id(p), []).append(Holder(home, module, key))
    return by_id


def movables(homes: Collection[Home]) -> list[Movable]:
    """Return the movable parameters of models in order of their names, each with the
    tensors to be resharded with it; a parameter that two models hold is left out."""
    by_id = holders()
    by_name: dict[tuple[Home, str], Any] = {}
    for where in by_id.values():
        names = sorted({p.at_rest.name for p in where} & where[0].home.movable)
        if names and len({p.home for p in where}) == 1:
            holder = where[0]
            parameter = _torch.objects.own_parameters(holder.module)[holder.key]
            by_name[holder.home, names[0]] = parameter
    optimizers = sorted(
        _torch.objects.live_optimizers(), key=lambda x: type(x).__name__
    )
    every = []
    for home in homes:
        for name in sorted(home.movable):
            if (parameter := by_name.get((home, name))) is None:
                continue
            movable = Movable(home, name, parameter)
            for i, copy in enumerate(ref() for ref in home.copies):
                if copy is None or (p := by_name.get((copy, name))) is None:
                    continue
                if _torch.dtensor.has_layout_of(p, parameter):
                    which = "" if copy is home else f"copy {i}: "
                    for what, x in _with_state(p, optimizers).items():
                        movable.tensors[f"{which}{what}"] = x
            every.append(movable)
    return every


def _with_state(parameter: Any, optimizers: Iterable[Any]) -> dict[str, Any]:
    """Return a parameter, its gradient and its optimizer state by description; nothing
    if some state is a plain tensor of the local shard, or if two optimizers of one
    class have state for it."""
    tensors = {"value": parameter}
    if _torch.dtensor.has_layout_of(parameter.grad, parameter):
        tensors["gradient"] = parameter.grad
    for optimizer in optimizers:
        for key, x in _state_of(parameter, optimizer).items():
            what = f"{type(optimizer).__name__} {key}"
            if _torch.dtensor.has_layout_of(x, parameter):
                if _memory(x) in map(_memory, tensors.values()):
                    continue  # an optimizer that wraps another, or a twin, has it too
                if what in tensors:
                    return {}
                tensors[what] = x
            elif _is_bare(x):
                return {}
    return tensors


def _state_of(parameter: Any, optimizer: Any) -> dict[str, Any]:
    """Return tensors of an optimizer's state for a parameter; of its other attributes,
    those by the parameter's id and plain tensors that may belong to any parameter."""
    state = getattr(optimizer, "state", {}).get(parameter)
    by_key = dict(state) if isinstance(state, dict) else {"": state}
    if id(parameter) in {*map(id, _torch.objects.parameters_of(optimizer))}:
        for name, x in vars(optimizer).items():
            if name in _torch.objects.OPTIMIZER_ATTRIBUTES:
                continue
            by_key[f"{name}, bare"] = [*filter(_is_bare, _torch.fake.tree_leaves(x))]
            for key in x if isinstance(x, dict) else ():
                if (key if isinstance(key, int) else id(key)) == id(parameter):
                    by_key[name] = x[key]
    return {
        f"{key} {i}": leaf
        for key, x in by_key.items()
        for i, leaf in enumerate(_torch.fake.tree_leaves(x))
    }


def _memory(x: DTensor) -> int:
    return _torch.objects.memory_of(_torch.dtensor.local_of(x))


def _is_bare(x: Any) -> bool:
    """Return whether ``x`` is a tensor that does not say which part it is."""
    if isinstance(x, DTensor):
        return not _torch.dtensor.has_plain_local(x)
    return isinstance(x, torch.Tensor) and x.dim() > 0


def twins_of(parameters: Iterable[Movable]) -> dict[int, list[Any]]:
    """Return, by the id of each tensor in ``parameters``, other DTensors that share its
    memory and its layout. Removes a tensor from ``parameters`` if a live object of
    another layout shares its memory: a view, or a local tensor that a user holds."""
    owners: dict[int, tuple[dict[str, Any], str, Any]] = {}
    for movable in parameters:
        for what, x in movable.tensors.items():
            owners[_memory(x)] = movable.tensors, what, x
    twins: dict[int, list[Any]] = {}
    parts, bare = set[int](), []
    for x in _torch.dtensor.live_users_of(owners):
        local = _torch.dtensor.local_of(x) if isinstance(x, DTensor) else x
        tensors, what, owner = owners[_torch.objects.memory_of(local)]
        if x is owner:
            parts.add(id(local))
        elif _torch.dtensor.has_layout_of(x, owner) and not hasattr(x, HOME):
            twins.setdefault(id(owner), []).append(x)
            parts.add(id(local))
        else:
            bare.append((x, tensors, what))
    for x, tensors, what in bare:
        if id(x) not in parts:
            tensors.pop(what, None)
    return twins


@torch.inference_mode(False)
@torch.no_grad()
def move(movable: Movable, spec: Spec, twins: Mapping[int, list[Any]]) -> None:
    """Reshard a parameter, and the tensors that go with it, to ``spec``. All ranks must
    call it. It takes memory for the global value of one tensor at a time."""
    by_id, mesh = holders(), Mesh.from_device_mesh(movable.parameter.device_mesh)
    placements = spec.to_placements(mesh)
    for x in movable.tensors.values():
        part = part_of(gathered(x), spec, mesh, dist.get_rank())
        part = part.clone(memory_format=torch.contiguous_format)
        for twin in (x, *twins.get(id(x), ())):
            _torch.dtensor.lay_out(twin, part, placements)
        for holder in by_id.get(id(x), ()):
            infos = holder.module.__dict__[AT_REST]
            infos[holder.key] = replace(holder.at_rest, spec=str(spec))
