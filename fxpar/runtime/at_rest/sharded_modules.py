"""Modules whose parameters rest sharded: what a module looks like from inside.

``adopt`` gives a module a subclass of its own class. There each sharded parameter is a
property: inside a forward, and in what Dynamo traces, it is the global tensor, made by
``fxpar::to_global`` from this rank's part; anywhere else (optimizers, init functions,
``state_dict``) it is the DTensor parameter itself. Nothing here decides how a parameter
lies; ``parameter_layouts`` does.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from fxpar import _torch
from fxpar.errors import ShardError
from fxpar.passes.custom_ops import unreduced
from fxpar.runtime.ranks import reduce_gradients as reduce
from fxpar.runtime.ranks.gradient_sketches import parameters
from fxpar.runtime.ranks.presence import is_alone, user_line
from fxpar.sharding.spec import Spec

HOME = "_fxpar_home"  # on adopted modules and their parameters: the model's Home
RESTS = "_fxpar_rests"  # on adopted modules: parameter name -> ParameterAtRest
_NUMBERS = itertools.count()
_HOMES: weakref.WeakValueDictionary[int, Home] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class Home:
    """What all sharded parameters of one model share, read while it is traced."""

    # As ``FXPAR_MESH`` takes it.
    mesh: str
    # Axes that the batch is split over.
    batch: tuple[str, ...]
    # As the option of this name; None: none is set.
    param_dtype: torch.dtype | None = None
    # As the option of this name, as text; "": none is set.
    reduce_dtype: str = ""
    # Inside ``no_sync``.
    waiting: bool = False
    # Gradients of earlier steps wait to be reduced.
    unreduced: bool = False
    # Parameters have the hooks for that.
    hooked: bool = False
    # Each rank feeds its own part of the batch.
    local: bool = False
    # What eager code read last of each parameter, until the forward ends: by the id of
    # the parameter, or the graph that it leaves and its place there.
    reads: dict[Hashable, EagerRead] = field(default_factory=dict)
    # The latest of them with its value, which it may set ``.data`` of.
    latest: tuple[EagerRead, torch.Tensor] | None = None
    # By which graphs name it (``home_of``).
    number: int = field(default_factory=_NUMBERS.__next__)

    def __post_init__(self) -> None:
        _HOMES[self.number] = self

    def __deepcopy__(self, _: Any) -> Home:
        """A copied model is one of its own."""
        return Home(self.mesh, self.batch, self.param_dtype, self.reduce_dtype)


@dataclass(frozen=True)
class EagerRead:
    """That eager code read the global value of a parameter, which it must not write."""

    # "Class.name" of the parameter.
    parameter: str
    # Where the user's code read it.
    line: str
    # The global value, if it still is there.
    value: weakref.ref[torch.Tensor]
    # Of the value when it was read, as ``memory_of`` numbers it.
    memory: int
    # Counts the writes to the global value, and holds none of it.
    counter: torch.Tensor
    # As many there were when it was read.
    writes: int

    @staticmethod
    def of(value: torch.Tensor, parameter: str, line: str) -> EagerRead:
        counter = value.detach()  # shares the count of writes
        counter.data = value.new_empty(0)
        writes, memory = _torch.objects.version_of(value), _memory(value)
        return EagerRead(parameter, line, weakref.ref(value), memory, counter, writes)

    def refuse_writes(self) -> None:
        """Raise ShardError if there was one, in place or by ``.data = ``: the value
        that it changed is lost."""
        value = self.value()
        moved = value is not None and _memory(value) != self.memory
        if moved or _torch.objects.version_of(self.counter) != self.writes:
            raise written_parameter(self.parameter, self.line)


_memory = _torch.objects.memory_of


def holds_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has parameters of which each rank holds a part."""
    return any(hasattr(p, HOME) for p in parameters(optimizer))


def home_of(number: int) -> Home | None:
    """The Home with this number, while its model lives."""
    return _HOMES.get(number)


@dataclass(frozen=True)
class ParameterAtRest:
    """How a parameter rests and how the program should start to use it, as text."""

    # Of the global value.
    shape: tuple[int, ...]
    # Of the parts that ranks hold.
    spec: str
    # As ``constrain`` takes one; "": none.
    hint: str


def adopt(
    module: nn.Module,
    home: Home,
    rests: dict[str, ParameterAtRest],
    *,
    root: bool = False,
) -> None:
    """Swap the class of ``module`` for a subclass with a property per parameter.
    ``root``: it is the whole model, whose inputs are cast."""
    module.__dict__[HOME] = home
    module.__dict__[RESTS] = rests
    cls: Any = type(module)
    module.__class__ = _subclass(cls, tuple(rests), root)


@functools.cache
def _subclass(cls: Any, names: tuple[str, ...], root: bool) -> type:
    """One subclass per class and names, so that equal layers stay equal to Dynamo."""
    members: dict[str, Any] = {name: _property(name) for name in names}
    if issubclass(cls, nn.RNNBase):
        members |= _torch.dynamo.recurrent_members(cls)
    if root:
        members["forward"] = _casting(members.get("forward") or cls.forward)
    members["register_parameter"] = _guarded(cls)
    members["_apply"] = _converted(cls)
    members["__deepcopy__"] = _copied(cls)
    members["__reduce_ex__"] = _reduced(cls)
    for name in ("__module__", "__qualname__", "__doc__"):
        members[name] = getattr(cls, name)
    return type(cls.__name__, (cls,), members)


def _casting(inner: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` on inputs of ``param_dtype``, as in FSDP2. Not a hook: hooks run
    before what is compiled, and the dtype is known once that is."""

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


def refuse_writes(home: Home, *, ends: bool = True) -> None:
    """Raise ShardError if eager code wrote to a parameter that it read. ``ends``: the
    forward does, and the values that it read are gone."""
    reads, latest = list(home.reads.values()), home.latest
    if ends:
        home.reads, home.latest = {}, None
    for read in reads:
        read.refuse_writes()
    del latest  # lived until it was compared


def note_read(
    home: Home, key: Hashable, value: torch.Tensor, parameter: str, line: str
) -> None:
    """Eager code reads the ``value`` of a parameter. Raises ShardError if it wrote to
    what it read of it before, or last."""
    latest, home.latest = home.latest, None
    if latest is not None:
        latest[0].refuse_writes()
    if key in home.reads:
        home.reads.pop(key).refuse_writes()
    read = home.reads[key] = EagerRead.of(value, parameter, line)
    home.latest = read, value


def written_parameter(parameter: str, line: str | None) -> ShardError:
    return ShardError(
        f"the forward writes to a parameter of a model that fxpar.shard split, "
        f"{parameter}",
        where=line,
        fix="write to it outside of the forward, or use fxpar.train_step; "
        "nn.Embedding(max_norm=...) writes to its table",
    )


def _property(name: str) -> property:
    def read(self: nn.Module) -> Any:
        if name not in self._parameters:  # as while it gets another name
            raise AttributeError(f"{type(self).__name__} has no parameter {name!r}")
        parameter = self._parameters[name]
        if not isinstance(parameter, DTensor):
            return parameter  # functional_call, or a plan being traced
        if (torch.compiler.is_compiling() or _in_forward()) and is_alone():
            raise ShardError(
                f"each rank holds a part of parameter {name}, which no rank can "
                "compute with alone",
                fix="evaluate on all ranks: leave out fxpar.alone() for models of "
                "fxpar.shard",
            )
        home, at_rest = getattr(self, HOME), getattr(self, RESTS)[name]
        if torch.compiler.is_compiling():
            return _globally(parameter, home, at_rest)
        if _in_forward():
            return _eagerly(parameter, home, at_rest, f"{type(self).__name__}.{name}")
        return parameter

    _torch.dynamo.compile_inlined_only(read)
    return property(read)


@_torch.dynamo.not_compiled
def _eagerly(parameter: Any, home: Home, at_rest: ParameterAtRest, name: str) -> Any:
    """The global value in code that no graph contains. There each rank of local mode
    has a gradient of its own part of the batch."""
    if home.local:
        reduce.meet(f"{name} {list(at_rest.shape)}")
    with _counting_writes():
        value = _globally(parameter, home, at_rest)
        if home.local:
            value = reduce.mean_of_gradient(value)
        note_read(home, id(parameter), value, name, user_line())
    return value


@contextlib.contextmanager
def _counting_writes() -> Iterator[None]:
    """In inference mode too, whose own tensors count no writes."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _globally(parameter: Any, home: Home, at_rest: ParameterAtRest) -> torch.Tensor:
    """The global value of a parameter, differentiable to its part."""
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
    """``to_global`` of a DTensor, whose gradient is a DTensor with sums over the batch
    axes: its local tensor has another shape than that of the parameter, which autograd
    refuses of an op on local tensors."""

    @staticmethod
    def forward(ctx: Any, parameter: Any, *how: Any) -> torch.Tensor:
        _, spec, _, mesh, summed, reduce, _ = how
        axes = tuple(summed.split("+"))
        ctx.lies = parameter.device_mesh, _unreduced(parameter, axes)
        ctx.like = parameter.shape, parameter.stride()
        ctx.how = str(unreduced(Spec.parse(spec), axes)), mesh, reduce
        return torch.ops.fxpar.to_global(parameter.to_local(), *how)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        part = torch.ops.fxpar.to_local(gradient, *ctx.how)
        shape, stride = ctx.like
        gradient = DTensor.from_local(
            part, *ctx.lies, run_check=False, shape=shape, stride=stride
        )
        return gradient, *[None] * 7


@torch.compiler.allow_in_graph
def to_global_unreduced(parameter: Any, *how: Any) -> torch.Tensor:
    return _Summed.apply(parameter, *how)


def _unreduced(parameter: Any, batch: Iterable[str]) -> list[Any]:
    names = parameter.device_mesh.mesh_dim_names
    return [
        Partial() if name in batch else placement
        for name, placement in zip(names, parameter.placements, strict=True)
    ]


def _in_forward() -> bool:
    """Whether a module is being called. Told by the stack and not by a flag, since code
    between graph breaks runs under frames that Dynamo took over."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in _CALLS:
            return True
        frame = frame.f_back
    return False


_CALLS = frozenset({"_call_impl", "_wrapped_call_impl"})  # of nn.Module


def _guarded(cls: type) -> Callable[..., None]:
    """``register_parameter`` that keeps a plain parameter from taking the place of a
    sharded one: an optimizer and a checkpoint know the other."""

    def register_parameter(self: nn.Module, name: str, param: Any) -> None:
        rests = self.__dict__.get(RESTS, {})
        if name in rests and param is not None and not isinstance(param, DTensor):
            raise ShardError(
                f"parameter {name!r} of a {cls.__name__} is replaced after shard",
                where=user_line(),
                fix="replace it before fxpar.shard; or copy values in, with "
                "load_state_dict",
            )
        cls.register_parameter(self, name, param)  # type: ignore[attr-defined]

    return register_parameter


def _converted(cls: type) -> Callable[..., nn.Module]:
    """What ``to``, ``half`` and the like call of a module. torch swaps parameters that
    are DTensors for others, but none that compiled code has a weak reference to."""

    def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        try:
            return cls._apply(self, *args, **kwargs)  # type: ignore[attr-defined]
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


def _copied(cls: type) -> Callable[[nn.Module, dict[int, Any]], nn.Module]:
    """``__deepcopy__`` that leaves gradients out, as that of ``nn.Parameter`` does: of
    a DTensor torch (2.13) copies the gradient too, and fails."""

    def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        for parameter in _torch.objects.own_parameters(self).values():
            if isinstance(parameter, DTensor) and id(parameter) not in memo:
                gradient, parameter.grad = parameter.grad, None
                try:
                    copy.deepcopy(parameter, memo)  # which memo then has
                finally:
                    parameter.grad = gradient
        inherited = getattr(cls, "__deepcopy__", None)
        if inherited is not None:
            return cast(nn.Module, inherited(self, memo))
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    return __deepcopy__


def _reduced(cls: Any) -> Callable[[nn.Module, Any], tuple[Any, ...]]:
    """``__reduce_ex__`` by which a module is copied, and not pickled."""

    def __reduce_ex__(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        make, *rest = cls.__reduce_ex__(self, protocol)
        return (_OnlyHere(make, cls.__name__), *rest)

    return __reduce_ex__


@dataclass(frozen=True)
class _OnlyHere:
    """Makes a copy of a sharded module in this process, and in no other."""

    # What makes one.
    make: Callable[..., Any]
    # Name of its class.
    cls: str

    def __call__(self, *args: Any) -> Any:
        return self.make(*args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardError(
            f"a {self.cls} that fxpar.shard split is pickled, of which this rank holds "
            "a part",
            fix="save model.state_dict(), by torch.save or "
            "torch.distributed.checkpoint, and load it into a new model",
        )
