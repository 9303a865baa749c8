"""Watches calls of compiled functions, and warns of their code outside of graphs.

A backend sees only graphs. Code that Dynamo cannot trace (a frame it skips, code at a
graph break, a disabled function) is run by each rank unchanged. In: each call of a
compiled function or module (``watch``), and each graph that runs in it. Out: a warning,
once, if a call was not one graph from its first line to its last; it says why and what
that costs.

In local mode ranks do at a call as DistributedDataParallel does at a forward: the
parameters of its modules are watched, so that their gradients become means over the
ranks (``runtime.ranks.mean_gradients``), and buffers become those of rank 0. Never: a
reduction for a model inside DistributedDataParallel, which does this itself.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxpar import _torch
from fxpar.config import Options
from fxpar.errors import (
    FxparError,
    OptionError,
    RankMismatchError,
    warn,
)
from fxpar.runtime.calls.call_variants import meet_first
from fxpar.runtime.ranks import (
    check_inputs,
    mean_gradients,
    meeting,
    worlds,
)
from fxpar.runtime.ranks.groups import HOME, Ranks, join
from fxpar.runtime.ranks.mean_gradients import MeanOver
from fxpar.runtime.ranks.presence import is_alone, user_line
from fxpar.runtime.tracing import modules_of


@dataclass(frozen=True)
class _Outside:
    """Describes code outside of the graphs, as text."""

    code: str  # its name in messages: mostly a qualified name
    why: str  # the reason that Dynamo gives; "" if none
    where: str | None = None  # the user's line; None if not known


@dataclass(eq=False)
class _CompiledCallable:
    """Holds what is known of a compiled module or function."""

    fn: Any  # a weak reference
    name: str  # its name in messages: the class of a module, or the function
    options: dict[str, Any] | None  # the options given to ``torch.compile``
    # The options as read at the first call; None before, or if they are wrong.
    settings: Options | None = None
    # Modules in the frames that Dynamo met, by their ids.
    by_id: dict[int, weakref.ref[nn.Module]] = field(default_factory=dict)
    # For each graph that ran, whether it contains the whole call.
    whole: weakref.WeakKeyDictionary[Any, bool] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    before: dict[str, int] = field(default_factory=dict)  # Dynamo's graph breaks
    outside: dict[_Outside, bool] = field(default_factory=dict)  # whether it was said
    # Lines of graph breaks that a warning names.
    broken_at: set[str] = field(default_factory=set)
    group: Any = None  # a weak reference: the group whose ranks know of it
    is_explained: bool = False  # whether reasons were looked for
    # This process on the mesh of ``group``; None: it takes no part in means.
    ranks: Ranks | None = None
    # Modules that have buffers.
    with_buffers: list[weakref.ref[nn.Module]] = field(default_factory=list)
    # (backwards, calls of whole models) when its buffers were last made equal.
    equal_since: tuple[int, int] | None = None
    # Kinds of warnings of plans that were already given.
    warnings_of_plans: set[str] = field(default_factory=set)

    @property
    def local(self) -> bool:
        return self.settings is not None and self.settings.inputs == "local"

    @property
    def over(self) -> MeanOver:
        """Return the ranks to average gradients over, those along manual axes."""
        assert self.ranks is not None
        assert self.ranks.manual is not None
        mesh, axes = self.ranks.manual.mesh, self.ranks.manual.axes
        return MeanOver(self.ranks.group(axes), mesh.count(axes))

    def modules(self) -> dict[str, nn.Module]:
        """Return, by name, the module it is, or known modules that its code uses."""
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
    watched: _CompiledCallable  # the callable of this call
    handled: BaseException | None  # by code around the call
    breaks_before: int  # graph breaks that Dynamo had met
    # For each graph that ran in it, whether it contains the whole call.
    ran: list[bool] = field(default_factory=list)


class _Calls(threading.local):
    """Holds the calls in progress in a thread, each inside the one before."""

    def __init__(self) -> None:
        self.stack: list[_Call] = []


_calls = _Calls()
_skipped: dict[types.CodeType, _Outside] = {}


def watch(fn: Any, options: dict[str, Any] | None) -> tuple[Any, Any]:
    """Return two callbacks for a compiled ``fn``, for ``_torch.dynamo.on_compile``: one
    that begins a call and returns what ends it, and one for each frame Dynamo meets.

    From now on ranks that wait for this one can know where it is."""
    meeting.current()
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
            reference = functools.partial(lambda x: x, fn)
    watched = _CompiledCallable(reference, name, options)

    def enter() -> Callable[[], None]:
        _begin(watched)
        breaks = _torch.dynamo.graph_breaks_so_far()
        _calls.stack.append(_Call(watched, sys.exc_info()[1], breaks))
        return _leave

    return enter, functools.partial(_meet_frame, watched)


def begins(model: nn.Module, options: dict[str, Any] | None) -> Callable[[], None]:
    """Return a function to call before each call of a program that contains a model
    but was not made by ``torch.compile``: in local mode ranks begin with equal
    parameters and buffers."""
    name = type(model).__name__
    return functools.partial(
        _begin, _CompiledCallable(weakref.ref(model), name, options)
    )


def _begin(watched: _CompiledCallable) -> None:
    if watched.settings is None:
        _read(watched)
    if watched.local and not is_alone():
        _begin_local(watched)


def options_of_call() -> Options | None:
    """Return the options of the compiled function in progress; None outside of one."""
    return _calls.stack[-1].watched.settings if _calls.stack else None


def warnings_of_plans() -> set[str]:
    """Return the kinds of plan warnings already given for the compiled function in
    progress, a set that callers add to; an empty one outside of a call."""
    return _calls.stack[-1].watched.warnings_of_plans if _calls.stack else set()


def _read(watched: _CompiledCallable) -> None:
    watched.before = _torch.dynamo.graph_breaks()
    try:
        watched.settings = Options.read(watched.options)
    except OptionError:
        return  # the backend raises it where the user sees it
    if not watched.local:
        _GLOBAL.add(watched)
    for root in watched.modules().values():
        for module in root.modules():
            _tell_home(module, local=watched.local)


def _tell_home(module: nn.Module, *, local: bool) -> None:
    home = module.__dict__.get(HOME)
    if home is not None:
        home.local = local


_ROOTS = [0]  # calls of whole models with buffers so far


def _begin_local(watched: _CompiledCallable) -> None:
    """Begin a call in local mode: watch new parameters, and make buffers equal."""
    group = _torch.distributed.default_group()
    is_first = watched.group is None or watched.group() is not group or group is None
    if is_first:
        watched.ranks = _join(watched)
        group = _torch.distributed.default_group()
        watched.group = group and weakref.ref(group)
    if watched.ranks is None or not mean_gradients.is_participating():
        return
    _leave_to_ddp(watched)
    if is_first:
        assert watched.settings is not None
        try:
            meet_first(watched.settings, watched.ranks, f"a call of {watched.name}")
        except FxparError:
            watched.settings = watched.group = None  # so that both are read again
            raise
        modules, fn = watched.modules(), watched.fn()
        around = _torch.dynamo.calling_module(getattr(fn, "__self__", fn))
        if around is not None:  # it may have parameters that no graph takes
            modules = {type(around).__name__: around, **modules}
            for module in around.modules():
                _tell_home(module, local=True)
        mean_gradients.watch(watched.name, modules, watched.over)
        _watch_trained_with(watched.name, modules, watched.over)
        _list_buffers(watched)
    else:
        mean_gradients.hook_new()
    if watched.with_buffers and not _calls.stack:
        _make_buffers_equal(watched)


def _watch_trained_with(
    name: str,
    modules: Mapping[str, nn.Module],
    over: MeanOver,
) -> None:
    """Watch the other parameters of optimizers that train parameters of ``modules``:
    those of model parts that are not compiled. Also make later steps warn of gradients
    that nobody averages."""
    ours = {id(p) for module in modules.values() for p in module.parameters()}
    for optimizer in _torch.objects.live_optimizers():
        trained = _torch.objects.parameters_of(optimizer)
        if any(id(p) in ours for p in trained):
            named = {
                f"{type(optimizer).__name__} {i}": p
                for i, p in enumerate(trained)
                if isinstance(p, nn.Parameter) and id(p) not in ours
            }
            mean_gradients.note(name, named, over)
    _warn_at_steps()


@functools.cache
def _warn_at_steps() -> None:
    # A compiled step calls the hook as it is: Dynamo cannot trace it.
    register_optimizer_step_pre_hook(torch.compiler.disable(_warn_of_own_gradients))


_STEPPED: WeakSet[Any] = WeakSet()  # optimizers that were checked
# Compiled callables whose gradients are of the whole batch on every rank.
_GLOBAL: WeakSet[_CompiledCallable] = WeakSet()


def _warn_of_own_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Warn, once per optimizer, of gradients in its step that nobody averages."""
    if optimizer in _STEPPED or not mean_gradients.is_participating():
        return
    trained = _torch.objects.parameters_of(optimizer)
    if all(p.grad is None for p in trained):
        return
    _STEPPED.add(optimizer)
    wrappers = _torch.objects.live(DistributedDataParallel)
    called = [module for watched in _GLOBAL for module in watched.modules().values()]
    left = {id(p) for module in (*wrappers, *called) for p in module.parameters()}
    own = [
        f"number {i} {list(p.shape)}"
        for i, p in enumerate(trained)
        if p.grad is not None and not isinstance(p, DTensor) and id(p) not in left
        if not mean_gradients.is_watched(p)
    ]
    if own:
        warn(
            f"{type(optimizer).__name__} steps parameters whose gradients are not "
            f"averaged over ranks: {check_inputs.listed(own)}; with "
            "FXPAR_INPUTS=local each rank has those of its own part of the batch",
            where=user_line(),
            fix="compile what they are in with backend='fxpar' as well, or wrap it in "
            "DistributedDataParallel; what one rank trains goes inside `with "
            "fxpar.alone():`",
        )


def _join(watched: _CompiledCallable) -> Ranks | None:
    """Join the mesh, and return this process on it; None if no axis is manual."""
    assert watched.settings is not None
    settings = watched.settings
    if settings.mesh is None:
        modules = (m for root in watched.modules().values() for m in root.modules())
        homes = (m.__dict__[HOME] for m in modules if HOME in m.__dict__)
        home = next(homes, None)
        settings = settings if home is None else replace(settings, mesh=home.mesh)
    ranks = join(settings)
    return None if ranks.manual is None else ranks


_DDP: WeakSet[nn.Module] = WeakSet()  # wrappers that were met


def _leave_to_ddp(watched: _CompiledCallable) -> None:
    """Stop watching parameters and buffers of a DistributedDataParallel around or
    inside the module, which handles them itself."""
    around = _torch.dynamo.surrounding_ddp()
    wrappers = [] if around is None else [around]
    if watched.ranks is not None and not watched.with_buffers:
        roots = watched.modules().values()
        inside = (m for root in roots for m in root.modules())
        wrappers += [m for m in inside if isinstance(m, DistributedDataParallel)]
    for wrapper in wrappers:
        if wrapper not in _DDP:
            _DDP.add(wrapper)
            mean_gradients.leave(wrapper.parameters())
            _list_buffers(watched)


def _list_buffers(watched: _CompiledCallable) -> None:
    left = {id(module) for wrapper in _DDP for module in wrapper.modules()}
    watched.with_buffers = [
        weakref.ref(module)
        for root in watched.modules().values()
        for module in root.modules()
        if next(module.buffers(recurse=False), None) is not None
        and id(module) not in left
    ]


def _make_buffers_equal(watched: _CompiledCallable) -> None:
    """Set buffers to those of rank 0, as DDP does before each forward. A part of a
    model that is compiled by itself may be called often in one forward: its buffers are
    set once between two backwards."""
    modules = [m for reference in watched.with_buffers if (m := reference())]
    buffers = {
        id(x): x
        for module in modules
        for x in module.buffers(recurse=False)
        if not isinstance(x, DTensor)
    }
    if not buffers:
        return
    fn = watched.fn()
    if _torch.dynamo.calling_module(getattr(fn, "__self__", fn)) is None:
        _ROOTS[0] += 1
    since = mean_gradients.backwards(), _ROOTS[0]
    if since != watched.equal_since:
        watched.equal_since = since
        _take_buffers(watched.name, list(buffers.values()))


def _take_buffers(name: str, buffers: Sequence[torch.Tensor]) -> None:
    """Fill buffers with those of rank 0. Every rank calls this. ``name``: of the
    callable that uses them, for messages. Raises RankMismatchError if a rank does not
    come, or has other buffers."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for x in buffers:
        groups.setdefault((x.dtype, x.device), []).append(x)
    sizes = {
        f"{len(group)} of {dtype}": sum(x.numel() for x in group)
        for (dtype, _), group in groups.items()
    }
    with torch.no_grad(), worlds.inside(None):
        words = meeting.meet(f"a call of {name}, which has buffers", str(sizes))
        if (other := meeting.first_other(words)) is not None:
            raise meeting.as_reported(
                RankMismatchError(
                    f"{name} has other buffers on rank {other} than on rank 0",
                    fix="build the same model on every rank",
                )
            )
        for group in groups.values():
            flat = torch.cat([x.detach().reshape(-1) for x in group])
            check_inputs.broadcast(flat)
            parts = flat.split([x.numel() for x in group])
            for x, part in zip(group, parts, strict=True):
                with torch.inference_mode(x.is_inference()):
                    x.copy_(part.view(x.shape))


def _meet_frame(
    watched: _CompiledCallable, frame: types.FrameType, error: Exception | None
) -> None:
    """Note a frame that Dynamo met; with an ``error``, one that it skips."""
    for value in frame.f_locals.values():
        if isinstance(value, nn.Module):
            watched.by_id[id(value)] = weakref.ref(value)
            _tell_home(value, local=watched.local)
    if error is None:
        return
    why, where = _torch.dynamo.why_not_one_graph(error) or (
        str(error).split("\n")[0],
        None,
    )
    outside = _Outside(frame.f_code.co_qualname, why, where)
    _skipped[frame.f_code] = outside
    watched.outside.setdefault(outside, False)
    if watched.local:
        _note_modules(watched)
        _settle(watched)


def graph_runs(
    graph: Any,
    broken_at: str | None,
    args: Sequence[Any],
    names: Sequence[str] = (),
) -> None:
    """Note that a compiled graph runs inside the call in progress. ``names``: of its
    arguments."""
    if not _calls.stack:
        return
    call = _calls.stack[-1]
    watched = call.watched
    if graph not in watched.whole:
        outermost = _torch.dynamo.between_graph_and_caller() <= 1
        watched.whole[graph] = broken_at is None and outermost
        if broken_at is not None:
            watched.broken_at.add(broken_at)
        if broken_at is not None and watched.local:
            watched.outside[_Outside("code at a graph break", "", broken_at)] = False
        if watched.local:
            _note_modules(watched)
        if not watched.whole[graph] and watched.local:
            _settle(watched)
    if watched.ranks is not None and torch.is_grad_enabled():
        named = zip(names or map(str, range(len(args))), args, strict=True)
        _note_args(watched, dict(named))
    call.ran.append(watched.whole[graph])


def _note_modules(watched: _CompiledCallable) -> None:
    """Watch the parameters of the modules that are known so far."""
    if watched.ranks is None or not mean_gradients.is_participating():
        return
    modules = watched.modules().items()
    parameters = {k: p for prefix, m in modules for k, p in m.named_parameters(prefix)}
    mean_gradients.note(watched.name, parameters, watched.over)
    _list_buffers(watched)


def _note_args(watched: _CompiledCallable, args: Mapping[str, Any]) -> None:
    """Watch parameters among the arguments of a graph, and those that they were
    computed from in eager code."""
    if not mean_gradients.is_participating():
        return
    parameters = {k: x for k, x in args.items() if isinstance(x, nn.Parameter)}
    mean_gradients.note(watched.name, parameters, watched.over)
    for key, x in args.items():
        leaves = {
            f"parameter {i} under {key}": p
            for i, p in enumerate(mean_gradients.leaves_under(x))
        }
        # Not early: DDP may be around their modules.
        mean_gradients.note(watched.name, leaves, watched.over, early=False)
        for p in leaves.values():
            if (home := getattr(p, HOME, None)) is not None:
                home.local = True


def _leave() -> None:
    """End a call: note its code outside of graphs, and warn of it."""
    call = _calls.stack.pop()
    watched = call.watched
    if call.ran == [True] or sys.exc_info()[1] is not call.handled:
        return
    if watched.settings is None:
        return
    if not call.ran:
        join(watched.settings)  # as the backend does, which is not called here
        if watched.local:
            _note_modules(watched)
    for why, where in _torch.dynamo.graph_breaks_since(call.breaks_before):
        # Nothing was traced before this break, so that no graph ends at it.
        if call.ran and where not in watched.broken_at:
            watched.broken_at.add(where)
            outside = _Outside("code at a graph break", why, where)
            watched.outside.setdefault(outside, False)
    _settle(watched, compiled=bool(call.ran))


def _settle(watched: _CompiledCallable, *, compiled: bool = True) -> None:
    """Warn of code outside of the graphs, after looking for the reasons once."""
    if not mean_gradients.is_participating():
        return
    if not watched.is_explained:
        watched.is_explained = True
        _explain(watched, compiled=compiled)
    _say(watched)


def _explain(watched: _CompiledCallable, *, compiled: bool) -> None:
    """Note why calls are not one graph where no frame that Dynamo met says it."""
    for module in watched.modules().values():
        for own in module.modules():
            code = getattr(type(own).forward, "__code__", None)
            if code in _skipped:
                watched.outside.setdefault(_skipped[code], False)
    if not compiled and not watched.outside:
        breaks = _torch.dynamo.graph_breaks().items() - watched.before.items()
        why = next(
            (str(why).split("\n")[0] for why, _ in breaks), "not compiled by Dynamo"
        )
        watched.outside[_Outside(watched.name, why)] = False


def _say(watched: _CompiledCallable) -> None:
    """Warn of code outside of the graphs that was not warned of yet, on rank 0."""
    if watched.local:
        cost = (
            "Each rank runs it uncompiled, on its own part of the batch, as under DDP"
        )
    else:
        cost = "Each rank runs the whole of it uncompiled: nothing of it is split"
    fix = (
        "change it so that Dynamo traces it: TORCH_LOGS=graph_breaks says why it "
        "does not"
    )
    for outside in [x for x, was_said in watched.outside.items() if not was_said]:
        watched.outside[outside] = True
        if dist.get_rank() == 0:
            why = outside.why and f": {outside.why}"
            what = f"{outside.code} is in no graph{why}. {cost}"
            warn(what, where=outside.where, fix=fix)


_SAID: WeakSet[nn.Module] = WeakSet()


def warn_around(ranks: Ranks) -> None:
    """Warn, once and on rank 0, of a DistributedDataParallel around the model."""
    wrapper = _torch.dynamo.surrounding_ddp()
    if wrapper is None or ranks.mesh.size == 1 or ranks.rank != 0 or wrapper in _SAID:
        return
    if ranks.manual is not None:
        return  # its parameters are left to it
    _SAID.add(wrapper)
    size = sum(p.nbytes for p in wrapper.parameters() if p.requires_grad)
    warn(
        "the model is inside DistributedDataParallel, which averages gradients "
        "that fxpar has reduced: this changes no number, and costs an all-reduce "
        f"of {size} bytes each step",
        fix="leave the wrapper out; where a library wraps the model, see "
        "docs/tutorials/from_trainers.md",
    )
