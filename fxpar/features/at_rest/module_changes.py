"""Handle what a user does to a module whose parameters are sharded.

In: a class. Out: methods for its subclass of ``sharded_modules``: for a parameter that
is replaced, a module that is converted, copied or pickled. Never: called by compiled
code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn
from torch.distributed.tensor import DTensor

from fxpar import _torch
from fxpar.errors import ShardError
from fxpar.features.at_rest.homes import (
    AT_REST,
    Home,
)
from fxpar.runtime.calls.outside_graphs import HOME
from fxpar.runtime.ranks.presence import user_line
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec


def guarded(cls: type) -> Callable[..., None]:
    """Return a ``register_parameter`` that keeps a plain parameter from replacing a
    sharded one: an optimizer and a checkpoint know the old one. Another sharded
    parameter, as one of a layer it is tied to, is read in its own layout."""

    def register_parameter(self: nn.Module, name: str, param: Any) -> None:
        infos = self.__dict__.get(AT_REST, {})
        if name in infos and param is not None:
            home = self.__dict__[HOME]
            if not isinstance(param, DTensor) or not _is_part(param, home):
                raise ShardError(
                    f"parameter {name!r} of a {cls.__name__} is replaced after "
                    "fxpar.shard",
                    where=user_line(),
                    fix="replace it before fxpar.shard; or copy values in, with "
                    "load_state_dict",
                )
            layout = Spec.from_placements(
                param.placements, Mesh.from_device_mesh(param.device_mesh), param.dim()
            )
            self.__dict__[AT_REST] = infos | {
                name: replace(infos[name], shape=tuple(param.shape), spec=str(layout))
            }
            if self._parameters.get(name) is not param:
                home.movable.discard(infos[name].name)
            setattr(param, HOME, home)
        cls.register_parameter(self, name, param)  # type: ignore[attr-defined]

    return register_parameter


def _is_part(parameter: DTensor, home: Home) -> bool:
    """Return whether a parameter is sharded on the mesh of a model."""
    mesh = Mesh.from_device_mesh(parameter.device_mesh)
    is_partial = any(placement.is_partial() for placement in parameter.placements)
    return mesh.sizes == Mesh.parse(home.mesh).sizes and not is_partial


def converted(cls: type) -> Callable[..., nn.Module]:
    """Return the ``_apply`` that ``to``, ``half`` and others call. torch replaces
    parameters that are DTensors, but none to which compiled code has a weak reference;
    the new ones keep the attributes of the old, as plain parameters do."""

    def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        own = _torch.objects.own_parameters(self)
        attributes_of = {name: {**vars(p)} for name, p in own.items() if p is not None}
        try:
            result = cls._apply(self, *args, **kwargs)  # type: ignore[attr-defined]
            for name, attributes in attributes_of.items():
                vars(own[name]).update(attributes)
            return cast(nn.Module, result)
        except RuntimeError as error:
            if "swap" not in str(error):
                raise
            raise ShardError(
                f"parameters of a {cls.__name__} that fxpar.shard split are converted "
                "after a compiled call",
                where=user_line(),
                fix="convert the model before its first call, best before fxpar.shard",
            ) from error

    return _apply


def copied(cls: type) -> Callable[[nn.Module, dict[int, Any]], nn.Module]:
    """Return a ``__deepcopy__`` that leaves gradients out, as that of ``nn.Parameter``
    does: of a DTensor torch (2.13) copies the gradient too, and fails."""

    def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        for parameter in _torch.objects.own_parameters(self).values():
            if isinstance(parameter, DTensor) and id(parameter) not in memo:
                gradient, parameter.grad = parameter.grad, None
                try:
                    copy.deepcopy(parameter, memo)  # puts the copy into memo
                finally:
                    parameter.grad = gradient
        inherited = getattr(cls, "__deepcopy__", None)
        if inherited is not None:
            twin = cast(nn.Module, inherited(self, memo))
        else:
            twin = memo[id(self)] = type(self).__new__(type(self))
            twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        if isinstance(home := twin.__dict__.get(HOME), Home):
            home.modules[id(twin)] = twin
        return twin

    return __deepcopy__


def reduced(cls: Any) -> Callable[[nn.Module, Any], tuple[Any, ...]]:
    """Return a ``__reduce_ex__`` by which a module can be copied, but not pickled."""

    def __reduce_ex__(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        make, *rest = cls.__reduce_ex__(self, protocol)
        return (_OnlyHere(make, cls.__name__), *rest)

    return __reduce_ex__


@dataclass(frozen=True)
class _OnlyHere:
    """Makes a copy of a sharded module in this process, and in no other."""

    # Makes the copy.
    make: Callable[..., Any]
    # Name of its class.
    cls: str

    def __call__(self, *args: Any) -> Any:
        return self.make(*args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardError(
            f"a {self.cls} that fxpar.shard split is pickled, and this rank holds "
            "a part of it",
            fix="save model.state_dict(), by torch.save or "
            "torch.distributed.checkpoint, and load it into a new model",
        )
