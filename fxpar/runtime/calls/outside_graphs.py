"""Code given to ``torch.compile`` that no graph contains: found, said, reduced.

A backend sees graphs alone. What Dynamo cannot trace (a frame it skips, code at a graph
break, a disabled function) is run by each rank as it stands. ``watch`` looks at each
call of what was compiled: it was one graph, from its first line to its last, or there
is code outside. Then the user is told, once, why and what it costs; and in local mode,
where such code runs on the rank's own part of the batch,
``runtime.ranks.reduce_gradients`` takes the mean of gradients over the ranks, and steps
of optimizers are checked (``runtime.calls.optimizer_steps``).

A model inside DistributedDataParallel needs no such wrapper: gradients that leave a
compiled graph are reduced already, and equal on every rank. The wrapper's hooks average
them, which changes no number, and costs an all-reduce (``warn_around``).
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from fxpar import _torch
from fxpar._torch.objects import TensorVersion
from fxpar.config import Options
from fxpar.errors import FxparWarning, OptionError, compose
from fxpar.runtime.at_rest.homes import HOME
from fxpar.runtime.ranks import reduce_gradients
from fxpar.runtime.ranks.groups import Ranks, join
from fxpar.runtime.ranks.meeting import current
from fxpar.runtime.tracing import modules_of


@dataclass(frozen=True)
class _Outside:
    """Code outside the graphs, as text."""

    # What it is called in messages: mostly a qualified name.
    code: str
    # As Dynamo says; "" if it does not.
    why: str
    # The user's line; None if not known.
    where: str | None = None


@dataclass(eq=False)
class _CompiledCallable:
    """A compiled module or function."""

    fn: Any  # a weak reference
    # What messages call it: the class of a module, or the function.
    name: str
    # As they were given to ``torch.compile``.
    options: dict[str, Any] | None
    # These, read at the first call; None before, or if they are wrong.
    settings: Options | None = None
    # Modules in the frames Dynamo met.
    by_id: dict[int, weakref.ref[nn.Module]] = field(default_factory=dict)
    # Of each graph that ran, whether the whole call was in it.
    whole: weakref.WeakKeyDictionary[Any, bool] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    parameters: dict[int, weakref.ref[Any]] = field(default_factory=dict)  # of graphs
    # Ids of the other tensors that graphs take, buffers among them.
    graph_inputs: set[int] = field(default_factory=set)
    before: dict[str, int] = field(default_factory=dict)  # Dynamo's graph breaks
    outside: dict[_Outside, bool] = field(default_factory=dict)  # whether it was said
    # Lines of graph breaks that a warning names.
    broken_at: set[str] = field(default_factory=set)
    # Code that Dynamo began to trace.
    begun: set[types.CodeType] = field(default_factory=set)
    # Whether this rank joined the mesh for it though nothing of it is compiled.
    is_joined: bool = False
    group: Any = None  # a weak reference: the one whose ranks know of it
    # Whether gradients of its modules are reduced in that group.
    reduced: bool = False
    # Whether buffers that each rank writes by itself were said.
    are_buffers_said: bool = False
    # Kinds of warnings of plans that were given.
    warnings_of_plans: set[str] = field(default_factory=set)

    @property
    def local(self) -> bool:
        return self.settings is not None and self.settings.inputs == "local"

    def modules(self) -> dict[str, nn.Module]:
        """The module it is, or those its code uses, as far as they are known."""
        fn = self.fn()
        modules = modules_of(fn) if fn is not None else {}
        if not isinstance(fn, nn.Module) and "" not in modules:
            listed = {id(module) for module in modules.values()}
            more = [
                m for key, r in self.by_id.items() if (m := r()) and key not in listed
            ]
            modules |= {f"{type(m).__name__}#{i}": m for i, m in enumerate(more)}
        return modules


@dataclass(eq=False)
class _Call:
    # The callable that is called.
    watched: _CompiledCallable
    handled: BaseException | None  # by code around the call
    breaks_before: int  # that Dynamo had met
    # Each buffer as it was, by its name, where that is looked at.
    buffers_before: dict[str, TensorVersion]
    # Of each graph that ran in it, whether the whole call was in it.
    ran: list[bool] = field(default_factory=list)


class _Calls(threading.local):
    """The calls under way in a thread, each inside the one before."""

    def __init__(self) -> None:
        self.stack: list[_Call] = []


_watched: weakref.WeakSet[_CompiledCallable] = weakref.WeakSet()
_calls = _Calls()
_skipped: dict[types.CodeType, _Outside] = {}


def watch(fn: Any, options: dict[str, Any] | None) -> tuple[Any, Any, Any]:
    """Look after the calls of a compiled ``fn``, for ``_torch.dynamo.on_compile``.

    Ranks that wait for this one can know from now on where it is."""
    current()
    owner = getattr(fn, "__self__", fn)
    name = getattr(fn, "__qualname__", type(fn).__name__)
    if isinstance(owner, nn.Module):
        name = type(owner).__name__
    if isinstance(fn, types.MethodType):
        reference: Any = weakref.WeakMethod(fn)
    else:
        try:
            reference = weakref.ref(fn)
        except TypeError:  # a class with slots
            reference = functools.partial(_itself, fn)
    watched = _CompiledCallable(reference, name, options)
    _watched.add(watched)
    if _takes_parts(options):
        # One may take its first step before the first call.
        pass

    def enter() -> Callable[[], None]:
        if watched.settings is None:
            _read(watched)
        breaks = _torch.dynamo.graph_breaks_so_far()
        buffers = _buffers(watched)
        _calls.stack.append(_Call(watched, sys.exc_info()[1], breaks, buffers))
        return _leave

    begins = functools.partial(_open_batch, watched)
    return enter, begins, functools.partial(_meet_frame, watched)


def options_of_call() -> Options | None:
    """The options of the compiled function that is being called; None outside."""
    return _calls.stack[-1].watched.settings if _calls.stack else None


def warnings_of_plans() -> set[str]:
    """Kinds of warnings that were given of the compiled function that is being called,
    to which more are added; empty outside."""
    return _calls.stack[-1].watched.warnings_of_plans if _calls.stack else set()


def _itself(fn: Any) -> Any:
    return fn


def _takes_parts(options: dict[str, Any] | None) -> bool:
    try:
        return Options.read(options).inputs == "local"
    except OptionError:
        return False  # which the backend raises where the user sees it


def _read(watched: _CompiledCallable) -> None:
    watched.before = _torch.dynamo.graph_breaks()
    try:
        watched.settings = Options.read(watched.options)
    except OptionError:
        return  # which the backend raises where the user sees it
    if watched.local:
        pass
    for root in watched.modules().values():
        for module in root.modules():
            _tell_home(module, watched.local)


def _tell_home(module: nn.Module, local: bool) -> None:
    home = module.__dict__.get(HOME)
    if home is not None:
        home.local = local


def _open_batch(watched: _CompiledCallable, frame: types.FrameType) -> None:
    """Dynamo is about to trace a frame for the first time: in local mode the rows of
    tensors it is given stay open, as the backend asks for otherwise, by a second trace
    (``require_dynamic_batch``), of what is not seen here."""
    return
    code = frame.f_code
    if not watched.local or code in watched.begun or _torch.dynamo.is_resumed(code):
        return
    watched.begun.add(code)
    buffers = {id(x) for root in watched.modules().values() for x in root.buffers()}
    local = {k: x for k, x in frame.f_locals.items() if k not in code.co_freevars}
    for x in _torch.fake.tree_leaves(local):
        plain = type(x) is torch.Tensor and x.dim() > 0 and id(x) not in buffers
        if (
            plain
            and getattr(x, LOCAL_MARK, True)
            and not _torch.dynamo.has_size_marks(x)
        ):
            open_rows(x)


def _meet_frame(
    watched: _CompiledCallable, frame: types.FrameType, error: Exception | None
) -> None:
    """Dynamo met a frame; an error means that it skips it."""
    for value in frame.f_locals.values():
        if isinstance(value, nn.Module):
            watched.by_id[id(value)] = weakref.ref(value)
            _tell_home(value, watched.local)
    if error is None:
        return
    why, where = _torch.one_graph.why_not_one_graph(error) or (
        str(error).split("\n")[0],
        None,
    )
    outside = _Outside(frame.f_code.co_qualname, why, where)
    _skipped[frame.f_code] = outside
    watched.outside.setdefault(outside, False)
    if watched.local:
        _settle(watched)


def graph_runs(graph: Any, broken_at: str | None, args: Sequence[Any]) -> None:
    """Note that a compiled graph runs, inside the call that is under way."""
    if not _calls.stack:
        return
    call = _calls.stack[-1]
    watched = call.watched
    if graph not in watched.whole:
        outermost = _torch.dynamo.between_graph_and_caller() <= 1
        watched.whole[graph] = broken_at is None and outermost
        for x in args:
            if isinstance(x, nn.Parameter):
                watched.parameters[id(x)] = weakref.ref(x)
            elif isinstance(x, torch.Tensor):
                watched.graph_inputs.add(id(x))
        if broken_at is not None:
            watched.broken_at.add(broken_at)
        if broken_at is not None and watched.local:
            watched.outside[_Outside("code at a graph break", "", broken_at)] = False
        if not watched.whole[graph] and watched.local:
            _settle(watched)
    call.ran.append(watched.whole[graph])


def _leave() -> None:
    """The end of a call."""
    call = _calls.stack.pop()
    watched = call.watched
    if call.ran == [True] or sys.exc_info()[1] is not call.handled:
        return
    if watched.settings is None:
        return
    if not call.ran and not watched.is_joined:
        watched.is_joined = True
        join(watched.settings)  # as the backend does, which is not called here
    for why, where in _torch.dynamo.graph_breaks_since(call.breaks_before):
        # Nothing was traced before it, so that no graph ends there.
        if call.ran and where not in watched.broken_at:
            watched.broken_at.add(where)
            outside = _Outside("code at a graph break", why, where)
            watched.outside.setdefault(outside, False)
    _settle(watched, compiled=bool(call.ran))
    _say_buffers(call)


def _buffers(watched: _CompiledCallable) -> dict[str, TensorVersion]:
    """Buffers, as they are, that no backward makes those of rank 0, as there
    is none; for the first call, and where code is known that no graph contains."""
    return {}
    if not watched.local or torch.is_grad_enabled() or watched.are_buffers_said:
        return {}
    if watched.whole and not watched.outside:
        return {}
    return written_buffers.versions_by_name(watched.modules(), watched.graph_inputs)


def _say_buffers(call: _Call) -> None:
    watched, before = call.watched, call.buffers_before
    if not before or not reduce_gradients.takes_part():
        return
    names = written_buffers.written_since(
        before, watched.modules(), watched.graph_inputs
    )
    if names:
        watched.are_buffers_said = True
        written_buffers.say_written(names)


def _settle(watched: _CompiledCallable, *, compiled: bool = True) -> None:
    """Code outside the graphs was met: say so, and have its gradients reduced, before a
    backward comes, which the compiled function itself may run."""
    if not reduce_gradients.takes_part():
        return
    if (
        watched.group is None
        or watched.group() is not _torch.distributed.default_group()
    ):
        watched.group, watched.reduced = (
            weakref.ref(_torch.distributed.default_group()),
            False,
        )
        _explain(watched, compiled=compiled)
    _say(watched)
    if watched.reduced:
        reduce_gradients.hook_new()
    elif watched.local and torch.is_grad_enabled():
        watched.reduced = True
        reduce_gradients.watch(watched.name, watched.modules())


def _explain(watched: _CompiledCallable, *, compiled: bool) -> None:
    """Why calls are not one graph, where no frame was met that says so."""
    for module in watched.modules().values():
        for code in map(_code_of, module.modules()):
            if code in _skipped:
                watched.outside.setdefault(_skipped[code], False)
    if not compiled and not watched.outside:
        breaks = _torch.dynamo.graph_breaks().items() - watched.before.items()
        why = next(
            (str(why).split("\n")[0] for why, _ in breaks), "not compiled by Dynamo"
        )
        watched.outside[_Outside(watched.name, why)] = False


def _code_of(module: nn.Module) -> Any:
    return getattr(type(module).forward, "__code__", None)


def _say(watched: _CompiledCallable) -> None:
    """Warn of what was not said yet, once per job: on rank 0."""
    if watched.local:
        cost = (
            "Each rank runs it as it stands, on its own part of the batch; gradients "
            "are averaged over the ranks when a backward ends, as DDP does"
        )
    else:
        cost = "Each rank runs the whole of it as it stands: nothing of it is split"
    fix = "change it so that Dynamo traces it: TORCH_LOGS=graph_breaks tells more"
    for outside in [x for x, was_said in watched.outside.items() if not was_said]:
        watched.outside[outside] = True
        if dist.get_rank() == 0:
            why = outside.why and f": {outside.why}"
            what = f"{outside.code} is in no graph{why}. {cost}"
            text = compose(what, where=outside.where, fix=fix)
            warnings.warn(text, FxparWarning, stacklevel=2)


def _trained() -> dict[int, str]:
    """Names of the parameters that compiled callables in local mode train, by id; ""
    for one that only a graph was seen to read."""
    local = [watched for watched in _watched if watched.local]
    references = [ref for watched in local for ref in watched.parameters.values()]
    names = {id(p): "" for ref in references if (p := ref()) is not None}
    return names | {id(p): name for each in local for name, p in _parameters_of(each)}


def _parameters_of(watched: _CompiledCallable) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in watched.modules().items():
        yield from module.named_parameters(prefix)


_SAID: WeakSet[nn.Module] = WeakSet()


def warn_around(ranks: Ranks) -> None:
    """Warn, once and on rank 0, of a wrapper around what is being compiled."""
    wrapper = _torch.dynamo.surrounding_ddp()
    if wrapper is None or ranks.mesh.size == 1 or ranks.rank != 0 or wrapper in _SAID:
        return
    _SAID.add(wrapper)
    size = sum(p.nbytes for p in wrapper.parameters() if p.requires_grad)
    warnings.warn(
        compose(
            "the model is inside DistributedDataParallel, which averages gradients "
            "that fxpar has reduced: this changes no number, and costs an all-reduce "
            f"of {size} bytes each step",
            fix="leave the wrapper out; where a library wraps the model, see "
            "docs/migrating.md",
        ),
        FxparWarning,
        stacklevel=2,
    )
