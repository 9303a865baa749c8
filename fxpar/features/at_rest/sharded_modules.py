"""Give modules whose parameters are sharded a class that shows global tensors.

In: a module, its ``Home`` and its ``ParameterAtRest``s. Out: ``adopt`` gives it a
subclass of its own class, in which each sharded parameter is a property: inside a
forward, and in what Dynamo traces, it is the global tensor, made by
``fxpar::to_global`` from this rank's part; anywhere else (optimizers, init functions,
``state_dict``) it is the DTensor parameter itself. Its methods handle what a user does
to the module: a parameter that is replaced, a module that is converted, copied or
pickled. Never: a decision on a layout, which ``used_layouts`` makes; a value kept after
the forward that read it.

A ``Home`` on each adopted module and each of its parameters has what all sharded
parameters of a model share, a ``ParameterAtRest`` on the module that holds a parameter
what is its own. Reads of parameters by eager code are noted: writes to what it read are
an error.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from fxpar import _torch
from fxpar.errors import ShardError
from fxpar.features.at_rest.crossings import dtensor_of, layout_of
from fxpar.runtime.ranks import mean_gradients as reduce
from fxpar.runtime.ranks.groups import HOME
from fxpar.runtime.ranks.presence import is_alone, user_line
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec

AT_REST = "_fxpar_rests"  # on adopted modules: parameter name -> ParameterAtRest
_NUMBERS = itertools.count()
_HOMES: weakref.WeakValueDictionary[int, Home] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class Home:
    """Holds what all sharded parameters of one model share, read while it is traced.
    ``HOME`` of adopted modules and their parameters."""

    mesh: str  # as ``FXPAR_MESH`` takes it
    batch: tuple[str, ...]  # axes that the batch is split over
    # As the option of this name; None if it is not set.
    param_dtype: torch.dtype | None = None
    reduce_dtype: str = ""  # as the option of this name, as text; "" if it is not set
    waiting: bool = False  # whether the code is inside ``no_sync``
    unreduced: bool = False  # whether gradients of earlier steps wait to be reduced
    # By id, weak references to the parameters that have a hook which reduces them.
    hooked: dict[int, Any] = field(default_factory=dict)
    # The last read of each parameter by eager code, until the forward ends: by the id
    # of the parameter, or by the graph that it leaves and its place there.
    reads: dict[Hashable, EagerRead] = field(default_factory=dict)
    # The latest two of them, as one may be made into the other, each with its value,
    # which the code may write to by ``.data``, and a copy.
    latest: list[tuple[EagerRead, torch.Tensor, torch.Tensor]] = field(
        default_factory=list
    )
    # Names of parameters that the first graph to read them lays out as it uses them.
    movable: set[str] = field(default_factory=set)
    is_even: bool = True  # whether all shards of each parameter have equal shapes
    # The adopted modules by id, as users' classes may have no hash.
    modules: weakref.WeakValueDictionary[int, nn.Module] = field(
        default_factory=weakref.WeakValueDictionary
    )
    # The Homes of the model and of its copies, in order of creation.
    copies: list[weakref.ref[Home]] = field(default_factory=list)
    local: bool = False  # whether each rank feeds its own part of the batch
    # The round of ranks in which the model was laid out, the same on all of them.
    round: int = 0
    # The number by which graphs name it (``home_of``).
    number: int = field(default_factory=_NUMBERS.__next__)

    def __post_init__(self) -> None:
        _HOMES[self.number] = self
        self.copies.append(weakref.ref(self))

    def __deepcopy__(self, _: Any) -> Home:
        """Return a Home of its own for a copied model."""
        return Home(
            self.mesh,
            self.batch,
            self.param_dtype,
            self.reduce_dtype,
            movable=set(self.movable),
            is_even=self.is_even,
            copies=self.copies,
            round=self.round,
        )


@dataclass(frozen=True)
class EagerRead:
    """Records that eager code read a parameter's global value, and may not write it."""

    parameter: str  # "Class.name" of the parameter
    line: str  # where the user's code read it
    value: weakref.ref[torch.Tensor]  # the global value, while it is alive
    memory: int  # the value's memory when it was read, as ``memory_of`` numbers it
    # Shares the count of writes to the global value, and holds none of its memory.
    counter: torch.Tensor
    writes: int  # the count of writes when it was read

    @staticmethod
    def of(value: torch.Tensor, parameter: str, line: str) -> EagerRead:
        """Return the record of a read of ``value`` in the user's ``line``."""
        counter = value.detach()  # shares the count of writes
        counter.data = value.new_empty(0)
        writes, memory = _torch.objects.version_of(value), _memory(value)
        return EagerRead(parameter, line, weakref.ref(value), memory, counter, writes)

    def refuse_writes(self) -> None:
        """Raise ShardError if the value was written to, in place or by ``.data = ``:
        the changed value is lost."""
        value = self.value()
        moved = value is not None and _memory(value) != self.memory
        if moved or _torch.objects.version_of(self.counter) != self.writes:
            raise written_parameter(self.parameter, self.line)


_memory = _torch.objects.memory_of


def home_of(number: int) -> Home | None:
    """Return the Home with this number, None if its model is gone."""
    return _HOMES.get(number)


def live_homes() -> list[Home]:
    """Return the Homes of all live models."""
    return list(_HOMES.values())


@dataclass(frozen=True)
class ParameterAtRest:
    """Holds the layout of a parameter at rest, and the hint on its use in programs."""

    shape: tuple[int, ...]  # shape of the global value
    spec: str  # spec of the shards, as text
    hint: str  # a hint as ``constrain`` takes it; "" if there is none
    name: str  # first name of the parameter in its model


def refuse_writes(home: Home, *, ends: bool = True) -> None:
    """Raise ShardError if eager code wrote to a parameter that it read. ``ends``: the
    forward ends, and the values that it read are gone."""
    reads, latest = list(home.reads.values()), home.latest
    if ends:
        home.reads, home.latest = {}, []
    for read in reads:
        read.refuse_writes()
    _refuse_changes(latest)


def _refuse_changes(
    latest: Sequence[tuple[EagerRead, torch.Tensor, torch.Tensor]],
) -> None:
    """Raise ShardError if eager code wrote to one of the latest values that it read by
    its ``.data``, which counts no writes."""
    for read, value, before in latest:
        read.refuse_writes()
        now, then = (x.detach().reshape(-1).view(torch.uint8) for x in (value, before))
        if not torch.equal(now, then):
            raise written_parameter(read.parameter, read.line)


def note_read(
    home: Home, key: Hashable, value: torch.Tensor, parameter: str, line: str
) -> None:
    """Record that eager code reads the ``value`` of a parameter. Raises ShardError if
    it wrote to the value that it read of this parameter before, or to the two that it
    read last."""
    latest, home.latest = home.latest, []
    _refuse_changes(latest)
    if key in home.reads:
        home.reads.pop(key).refuse_writes()
    read = home.reads[key] = EagerRead.of(value, parameter, line)
    home.latest = [*latest[-1:], (read, value, value.detach().clone())]


def written_parameter(parameter: str, line: str | None) -> ShardError:
    """Return the error for a parameter that the forward writes to."""
    return ShardError(
        f"the forward writes to a parameter of a model that fxpar.shard split, "
        f"{parameter}",
        where=line,
        fix="write to it outside of the forward, or use fxpar.train_step; "
        "nn.Embedding(max_norm=...) writes to its table",
    )


# Classes


def adopt(
    module: nn.Module,
    home: Home,
    infos: dict[str, ParameterAtRest],
    *,
    root: bool,
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
    for name in ("__module__", "__qualname__", "__doc__"):
        members[name] = getattr(cls, name)
    return type(cls.__name__, (_Sharded, cls), members)


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

    # By its code Dynamo names a function, and counts how often it was compiled.
    own: Any = forward
    own.__code__ = own.__code__.replace(co_qualname=own.__qualname__)
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
    # Tensors that are made in inference mode count no writes.
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        value = _globally(parameter, home, at_rest)
        if value.requires_grad:
            # Whether ranks feed parts may be known only once a graph reads it.
            value.register_hook(lambda g: reduce.mean_of(g) if home.local else g)
        note_read(home, id(parameter), value, name, user_line())
    return value


def _globally(parameter: Any, home: Home, at_rest: ParameterAtRest) -> torch.Tensor:
    """Return the global value of a parameter, differentiable to its part."""
    layout = list(at_rest.shape), at_rest.spec, at_rest.hint, home.mesh
    how = home.reduce_dtype, home.number
    if home.batch and (home.waiting or home.unreduced):
        whole = to_global_unreduced(parameter, *layout, "+".join(home.batch), *how)
    else:
        whole = torch.ops.fxpar.to_global(parameter.to_local(), *layout, *how)
    if home.param_dtype is not None and whole.is_floating_point():
        whole = whole.to(home.param_dtype)
    return whole


class _Summed(torch.autograd.Function):
    """Is ``to_global`` of a DTensor whose gradient is a DTensor partial over the batch
    axes: the gradient's local tensor has another shape than the parameter's, which
    autograd refuses for an op on local tensors."""

    @staticmethod
    def forward(ctx: Any, parameter: Any, *how: Any) -> torch.Tensor:
        *layout, summed, reduce, home = how
        (_, spec, _, mesh), axes = layout, summed.split("+")
        names, placements = parameter.device_mesh.mesh_dim_names, parameter.placements
        partial = [
            Partial() if name in axes else placement
            for name, placement in zip(names, placements, strict=True)
        ]
        ctx.layout = parameter.device_mesh, partial
        ctx.like = parameter.shape, parameter.stride()
        dims = [[x for x in dim if x not in axes] for dim in Spec.parse(spec).dims]
        ctx.how = str(Spec.of(dims, [(axis, "sum") for axis in axes])), mesh, reduce
        return torch.ops.fxpar.to_global(parameter.to_local(), *layout, reduce, home)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        part = torch.ops.fxpar.to_local(gradient, *ctx.how)
        return dtensor_of(part, *ctx.layout, *ctx.like), *[None] * 7


@torch.compiler.allow_in_graph
def to_global_unreduced(parameter: Any, *how: Any) -> torch.Tensor:
    """Return the global value of a parameter whose gradient is left unreduced."""
    return _Summed.apply(parameter, *how)


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


class _Sharded(nn.Module):
    """Handles what a user does to a module whose parameters are sharded; the base of
    its class, before its own class."""

    def register_parameter(self, name: str, param: Any) -> None:
        """Keep a plain parameter from replacing a sharded one: an optimizer and a
        checkpoint know the old one. Another sharded parameter, as one of a layer it is
        tied to, is read in its own layout."""
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
                    f"parameter {name!r} of a {type(self).__name__} is replaced after "
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
        super().register_parameter(name, param)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Convert, as ``to``, ``half`` and others ask. torch replaces parameters that
        are DTensors, but none to which compiled code has a weak reference; the new ones
        keep the attributes of the old, as plain parameters do."""
        own = _torch.objects.own_parameters(self)
        attributes_of = {name: {**vars(p)} for name, p in own.items() if p is not None}
        try:
            result = super()._apply(*args, **kwargs)
        except RuntimeError as error:
            if "swap" not in str(error):
                raise
            raise ShardError(
                f"parameters of a {type(self).__name__} that fxpar.shard split are "
                "converted after a compiled call",
                where=user_line(),
                fix="convert the model before its first call, best before fxpar.shard",
            ) from error
        for name, attributes in attributes_of.items():
            vars(own[name]).update(attributes)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Leave gradients out, as the copy of a ``nn.Parameter`` does: of a DTensor
        torch (2.13) copies the gradient too, and fails."""
        for parameter in _torch.objects.own_parameters(self).values():
            if isinstance(parameter, DTensor) and id(parameter) not in memo:
                gradient, parameter.grad = parameter.grad, None
                try:
                    copy.deepcopy(parameter, memo)  # puts the copy into memo
                finally:
                    parameter.grad = gradient
        inherited = getattr(super(), "__deepcopy__", None)
        if inherited is not None:
            twin = inherited(memo)
        else:
            twin = memo[id(self)] = type(self).__new__(type(self))
            twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        if isinstance(home := twin.__dict__.get(HOME), Home):
            home.modules[id(twin)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Let the module be copied, but not pickled."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, *rest = reduced
        return (_OnlyHere(make, type(self).__name__), *rest)


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
