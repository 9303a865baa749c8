"""Give modules whose parameters are sharded a class that shows global tensors.

In: a module, its ``Home`` and its ``ParameterAtRest``s. Out: ``adopt`` gives it a
subclass of its own class, in which each sharded parameter is a property: inside a
forward, and in what Dynamo traces, it is the global tensor, made by
``fxpar::to_global`` from this rank's part; anywhere else (optimizers, init functions,
``state_dict``) it is the DTensor parameter itself. Its methods handle what a user does
to the module: a parameter that is replaced, a module that is converted, copied or
pickled. Never: a decision on a layout, which ``used_layouts`` makes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from fxpar import _torch
from fxpar.errors import ShardError
from fxpar.features.at_rest.crossings import layout_of
from fxpar.features.at_rest.homes import (
    AT_REST,
    Home,
    ParameterAtRest,
    note_read,
    refuse_writes,
)
from fxpar.graph.custom_ops import unreduced
from fxpar.runtime.ranks import mean_gradients as reduce
from fxpar.runtime.ranks.groups import HOME
from fxpar.runtime.ranks.presence import is_alone, user_line
from fxpar.sharding.mesh import Mesh
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
    members["register_parameter"] = guarded(cls)
    members["_apply"] = converted(cls)
    members["__deepcopy__"] = copied(cls)
    members["__reduce_ex__"] = reduced(cls)
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
    layout = list(at_rest.shape), at_rest.spec, at_rest.hint, home.mesh
    how = home.reduce_dtype, home.number
    if home.batch and (home.waiting or home.unreduced):
        whole = to_global_unreduced(parameter, *layout, "+".join(home.batch), *how)
    else:
        whole = torch.ops.fxpar.to_global(parameter.to_local(), *layout, "", *how)
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


def guarded(cls: type) -> Callable[..., None]:
    """Return a ``register_parameter`` that keeps a plain parameter from replacing a
    sharded one: an optimizer and a checkpoint know the old one. Another sharded
    parameter, as one of a layer it is tied to, is read in its own layout."""

    def register_parameter(self: nn.Module, name: str, param: Any) -> None:
        infos = self.__dict__.get(AT_REST, {})
        if name in infos and param is not None:
            home = self.__dict__[HOME]
            is_part = False
            if isinstance(param, DTensor):
                mesh, layout = layout_of(param)
                same = mesh.axes == Mesh.parse(home.mesh).axes
                is_part = same and not layout.partial
            if not is_part:
                raise ShardError(
                    f"parameter {name!r} of a {cls.__name__} is replaced after "
                    "fxpar.shard",
                    where=user_line(),
                    fix="replace it before fxpar.shard; or copy values in, with "
                    "load_state_dict",
                )
            self.__dict__[AT_REST] = infos | {
                name: replace(infos[name], shape=tuple(param.shape), spec=str(layout))
            }
            if self._parameters.get(name) is not param:
                home.movable.discard(infos[name].name)
            setattr(param, HOME, home)
        cls.register_parameter(self, name, param)  # type: ignore[attr-defined]

    return register_parameter


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

    make: Callable[..., Any]  # makes the copy
    cls: str  # name of its class

    def __call__(self, *args: Any) -> Any:
        return self.make(*args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardError(
            f"a {self.cls} that fxpar.shard split is pickled, and this rank holds "
            "a part of it",
            fix="save model.state_dict(), by torch.save or "
            "torch.distributed.checkpoint, and load it into a new model",
        )
