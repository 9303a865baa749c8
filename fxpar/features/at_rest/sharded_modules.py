"""Give modules whose parameters are sharded a class that shows global tensors.

In: a module, its ``Home`` and its ``ParameterAtRest``s. Out: ``adopt`` gives it a
subclass of its own class, in which each sharded parameter is a property: inside a
forward, and in what Dynamo traces, it is the global tensor, made by
``fxpar::to_global`` from this rank's part; anywhere else (optimizers, init functions,
``state_dict``) it is the DTensor parameter itself. Never: a decision on a layout, which
``parameter_layouts`` makes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from fxpar import _torch
from fxpar.errors import ShardError
from fxpar.features.at_rest import module_changes
from fxpar.features.at_rest.homes import (
    AT_REST,
    Home,
    ParameterAtRest,
    note_read,
    refuse_writes,
)
from fxpar.graph.custom_ops import unreduced
from fxpar.runtime.calls.outside_graphs import HOME
from fxpar.runtime.ranks import mean_gradients as reduce
from fxpar.runtime.ranks.presence import is_alone, user_line
from fxpar.sharding.spec import Spec


def adopt(
    module: nn.Module,
    home: Home,
    infos: dict[str, ParameterAtRest],
    *,
    root: bool = False,
) -> None:
    """Swap the class of ``module`` for a subclass with a property per parameter.
    ``root``: it is the whole model, whose inputs are cast."""
    module.__dict__[HOME] = home
    module.__dict__[AT_REST] = infos
    home.modules[id(module)] = module
    cls: Any = type(module)
    module.__class__ = _subclass(cls, tuple(infos), root)


@functools.cache
def _subclass(cls: Any, names: tuple[str, ...], root: bool) -> type:
    """Return one subclass per class and names: equal layers stay equal to Dynamo."""
    members: dict[str, Any] = {name: _property(name) for name in names}
    if issubclass(cls, nn.RNNBase):
        members |= _torch.dynamo.recurrent_members(cls)
    if root:
        members["forward"] = _casting(members.get("forward") or cls.forward)
    members["register_parameter"] = module_changes.guarded(cls)
    members["_apply"] = module_changes.converted(cls)
    members["__deepcopy__"] = module_changes.copied(cls)
    members["__reduce_ex__"] = module_changes.reduced(cls)
    for name in ("__module__", "__qualname__", "__doc__"):
        members[name] = getattr(cls, name)
    return type(cls.__name__, (cls,), members)


def _casting(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``forward`` that casts its inputs to ``param_dtype``, as in FSDP2. It is
    no hook: hooks run before what is compiled, and the dtype is known once that is."""

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        dtype = self.__dict__[HOME].param_dtype

        def cast(x: Any) -> Any:
            floats = isinstance(x, torch.Tensor) and x.is_floating_point()
            return x.to(dtype) if floats else x

        if dtype is not None:
            args, kwargs = _torch.fake.tree_map(cast, (args, kwargs))
        results = inner(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            refuse_writes(self.__dict__[HOME])
        return results

    return forward


def _property(name: str) -> property:
    """Return the property that reads a sharded parameter: its global value in a
    forward, else the DTensor itself."""

    def read(self: nn.Module) -> Any:
        if name not in self._parameters:  # e.g. while it gets another name
            raise AttributeError(f"{type(self).__name__} has no parameter {name!r}")
        parameter = self._parameters[name]
        if not isinstance(parameter, DTensor):
            return parameter  # functional_call, or a plan being traced
        if (torch.compiler.is_compiling() or _is_in_forward()) and is_alone():
            raise ShardError(
                f"each rank holds a part of parameter {name}, which no rank can "
                "compute with alone",
                fix="evaluate on all ranks: leave out fxpar.alone() for models of "
                "fxpar.shard",
            )
        home, at_rest = getattr(self, HOME), getattr(self, AT_REST)[name]
        if torch.compiler.is_compiling():
            return _globally(parameter, home, at_rest)
        if _is_in_forward():
            return _eagerly(parameter, home, at_rest, f"{type(self).__name__}.{name}")
        return parameter

    _torch.dynamo.compile_inlined_only(read)
    return property(read)


@_torch.dynamo.not_compiled
def _eagerly(parameter: Any, home: Home, at_rest: ParameterAtRest, name: str) -> Any:
    """Return the global value in code that no graph contains. There each rank of local
    mode has a gradient of its own part of the batch."""
    if home.local:
        reduce.meet(f"{name} {list(at_rest.shape)}")
    with _counting_writes():
        value = _globally(parameter, home, at_rest)
        if value.requires_grad:
            # Whether ranks feed parts may be known only once a graph reads it.
            value.register_hook(lambda g: reduce.mean_of(g) if home.local else g)
        note_read(home, id(parameter), value, name, user_line())
    return value


@contextlib.contextmanager
def _counting_writes() -> Iterator[None]:
    """Let new tensors count writes, which those made in inference mode do not."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _globally(parameter: Any, home: Home, at_rest: ParameterAtRest) -> torch.Tensor:
    """Return the global value of a parameter, differentiable to its part."""
    if home.batch and (home.waiting or home.unreduced):
        whole = to_global_unreduced(
            parameter,
            list(at_rest.shape),
            at_rest.spec,
            at_rest.hint,
            home.mesh,
            "+".join(home.batch),
            home.reduce_dtype,
            home.number,
        )
    else:
        whole = torch.ops.fxpar.to_global(
            parameter.to_local(),
            list(at_rest.shape),
            at_rest.spec,
            at_rest.hint,
            home.mesh,
            "",
            home.reduce_dtype,
            home.number,
        )
    if home.param_dtype is not None and whole.is_floating_point():
        whole = whole.to(home.param_dtype)
    return whole


class _Summed(torch.autograd.Function):
    """Is ``to_global`` of a DTensor whose gradient is a DTensor partial over the batch
    axes: the gradient's local tensor has another shape than the parameter's, which
    autograd refuses for an op on local tensors."""

    @staticmethod
    def forward(ctx: Any, parameter: Any, *how: Any) -> torch.Tensor:
        _, spec, _, mesh, summed, reduce, _ = how
        axes = tuple(summed.split("+"))
        ctx.layout = parameter.device_mesh, _unreduced(parameter, axes)
        ctx.like = parameter.shape, parameter.stride()
        ctx.how = str(unreduced(Spec.parse(spec), axes)), mesh, reduce
        return torch.ops.fxpar.to_global(parameter.to_local(), *how)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        part = torch.ops.fxpar.to_local(gradient, *ctx.how)
        shape, stride = ctx.like
        gradient = DTensor.from_local(
            part, *ctx.layout, run_check=False, shape=shape, stride=stride
        )
        return gradient, *[None] * 7


@torch.compiler.allow_in_graph
def to_global_unreduced(parameter: Any, *how: Any) -> torch.Tensor:
    """Return the global value of a parameter whose gradient is left unreduced."""
    return _Summed.apply(parameter, *how)


def _unreduced(parameter: Any, batch: Iterable[str]) -> list[Any]:
    """Return the placements of a gradient that is partial over the batch axes."""
    names = parameter.device_mesh.mesh_dim_names
    return [
        Partial() if name in batch else placement
        for name, placement in zip(names, parameter.placements, strict=True)
    ]


def _is_in_forward() -> bool:
    """Return whether a module is being called. The stack says so and not a flag, since
    code between graph breaks runs under frames that Dynamo took over."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in _CALLS:
            return True
        frame = frame.f_back
    return False


_CALLS = frozenset({"_call_impl", "_wrapped_call_impl"})  # of nn.Module
