"""Reports what Dynamo traces, breaks and skips, and changes it for fxpar's backends.

In: Dynamo's graphs, frames and backends. Out: facts about them, and hooks in Dynamo.
Never: changes for a backend that is not in ``SERVED``, except where a caller asks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx

from fxpar._fast.python_memory import in_one_block, old_objects_kept
from fxpar._fast.quick_graphs import quick_graphs
from fxpar._fast.switch import is_taken
from fxpar._torch.distributed import is_only_rank
from fxpar._torch.objects import memory_of, tensors_in
from fxpar.errors import is_library

# Raises in compiled code, with a message, where a tensor is False.
assert_in_graph = torch._assert_async

# Functions and methods of the op by which torch checks all elements of a tensor.
IS_ALL_TRUE = (torch._is_all_true, torch.Tensor._is_all_true)

# Backends that are fxpar's own.
SERVED: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def _is_ours(backend: Any) -> bool:
    return any(backend is each for each in SERVED)


def is_served(backend: Any) -> bool:
    """Return whether, for a backend, one of the layers that repeat is traced for all:
    it is one of fxpar's, and there are several ranks."""
    return _is_ours(backend) and not is_only_rank() and is_taken("layer_regions")


def example_of(node: fx.Node) -> Any:
    """Return what Dynamo, or a trace, knows of a node's value."""
    return node.meta.get("example_value", node.meta.get("val"))


def trace_instead(original: Callable[..., Any], instead: Callable[..., Any]) -> None:
    """Let Dynamo trace ``instead`` where ``original`` is called, a function of torch
    that it would otherwise call in the graph."""
    from torch._dynamo.trace_rules import get_torch_obj_rule_map

    get_torch_obj_rule_map().pop(original, None)
    torch.compiler.substitute_in_graph(original)(instead)


@quick_graphs()
def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy that compiling may consume, with bodies of its regions; parameters
    and constants are shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = fx.GraphModule(gm, graph)
    for name, body in list(copy.named_children()):
        if isinstance(body, fx.GraphModule):
            setattr(copy, name, body_copy := copy_graph(body))
            body_copy.meta = dict(body.meta)  # which ops of a checkpoint are kept
    copy.compile_subgraph_reason = getattr(gm, "compile_subgraph_reason", None)
    return copy


def trace_again(reason: str) -> None:
    """Make Dynamo, which is calling the backend, analyse the frame once more."""
    from torch._dynamo import exc

    # The first is let through from a backend, the second forgets the branches it took.
    class Again(exc.TensorifyScalarRestartAnalysis, exc.UnspecializeRestartAnalysis):
        pass

    raise Again(restart_reason=reason)


def current_trace() -> Any:
    """Return the object that stands for the current trace; None if there is none."""
    from torch._guards import TracingContext

    return TracingContext.try_get()


def outside_of_trace() -> contextlib.AbstractContextManager[Any]:
    """Suspend the current trace, so that another one has values of its own."""
    from torch._guards import tracing

    return tracing(None)


def is_to_local(node: fx.Node) -> bool:
    """Return whether a node of Dynamo's graph takes a rank's part out of a DTensor."""
    if node.op == "call_method":
        return node.target == "to_local"
    return getattr(node.target, "__name__", "") == "prim_to_local"  # torch 2.11


def graph_break_line(gm: fx.GraphModule) -> str | None:
    """Return the user's line where Dynamo broke the graph that ``gm`` ends, or None."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return _line_of_break(reason)


def _line_of_break(reason: Any) -> str:
    """Return the line of a break, or else its reason."""
    return line_in(reason.user_stack or ()) or str(reason.reason).splitlines()[0]


def line_in(stack: Sequence[Any]) -> str | None:
    """Return the line of the innermost frame of the user's code, or of the innermost;
    None if there are no frames."""
    own = [frame for frame in stack if not is_library(frame.filename)]
    frame = next(reversed(own or stack), None)
    return frame and f"{frame.filename}:{frame.lineno}: {frame.line}"


def graph_breaks_so_far() -> int:
    """Return how many breaks ``graph_breaks_since`` counts by now."""
    from torch._dynamo.utils import graph_break_reasons

    return len(graph_break_reasons)


def graph_breaks_since(count: int) -> list[tuple[str, str]]:
    """Return why, and at which of the user's lines, Dynamo broke graphs after the first
    ``count``, including breaks before which nothing had been traced."""
    from torch._dynamo.utils import graph_break_reasons

    reasons = graph_break_reasons[count:]
    return [(str(r.reason).splitlines()[0], _line_of_break(r)) for r in reasons]


def surrounding_ddp() -> torch.nn.Module | None:
    """Return the DistributedDataParallel whose forward is running; None if there is
    none."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._get_active_ddp_module()


def calling_module(callee: Any) -> torch.nn.Module | None:
    """Return the outermost module that is being called, other than ``callee`` and what
    compiled it; None if there is none."""
    frame: Any = sys._getframe(1)
    outermost = None
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            module = frame.f_locals.get("self")
            if callee not in (module, getattr(module, "_orig_mod", None)):
                outermost = module
        frame = frame.f_back
    return outermost


def on_compile(
    backend: Callable[..., Any],
    watch: Callable[[Any, Any], tuple[Callable[..., Any], ...]],
) -> None:
    """Let ``watch(fn, options)`` see what ``torch.compile`` is given ``backend`` for,
    and Dynamo trace in less time for all backends that are ``SERVED``.

    ``watch`` returns two callables. The first is called before each call of the
    compiled ``fn``, and what it returns after the call. The second is called with each
    frame that Dynamo met there and could not compile, and Dynamo's error; with None for
    the error of other frames. ``backend`` alone sees graphs, but no frame without one.
    Inside DistributedDataParallel graphs stay whole: Dynamo would cut them as large as
    its buckets, for its all-reduces to begin early. Sizes that are equal by chance, as
    of the batch and of a sequence, are different symbols. A deep copy of what is
    compiled, and what is loaded from a file, is watched separately.
    """
    from torch._dynamo import config
    from torch._dynamo.eval_frame import (
        OptimizeContext,
        innermost_backend,
        innermost_fn,
    )
    from torch.fx.experimental import _config as shapes

    plain = OptimizeContext.__call__
    seen: weakref.WeakSet[Any] = weakref.WeakSet()  # it calls itself for a module
    hooks: weakref.WeakSet[Any] = weakref.WeakSet()  # a copied context has those too

    def call(self: Any, fn: Any) -> Any:
        innermost: Any = innermost_backend(self.callback)
        compiler = getattr(innermost, "compiler_fn", innermost)
        if _is_ours(compiler) and self not in seen:
            seen.add(self)
            frames = self.callback._torchdynamo_orig_backend
            self.callback._torchdynamo_orig_backend = _InsideContext(frames)
            if compiler is backend:
                look_after(self, fn, frames)
        return plain(self, fn)

    def look_after(context: Any, fn: Any, frames: Any) -> None:
        options = getattr(innermost_backend(frames), "kwargs", {}).get("options")
        enter, on_frame = watch(innermost_fn(fn), options)
        whole = config._make_closure_patcher(optimize_ddp=False)
        own = shapes._make_closure_patcher(use_duck_shape=False)
        others = [hook for hook in context.enter_exit_hooks if hook not in hooks]
        context.enter_exit_hooks = [*others, enter, whole, own]
        hooks.update((enter, whole, own))
        if hasattr(frames, "_inner_convert"):  # not so of ``fullgraph=True``
            frames._inner_convert = _Overheard(frames._inner_convert, on_frame)

    OptimizeContext.__call__ = call  # type: ignore[method-assign]


def _itself(x: Any) -> Any:
    return x


class _Conversion:
    """Wraps Dynamo's conversion of frames, to add to it."""

    def __init__(self, convert: Any) -> None:
        self._convert = convert

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__getattribute__("_convert"), name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and save the conversion alone: what is made of it is watched anew."""
        return _itself, (self._convert,)


class _InsideContext(_Conversion):
    """Wraps a conversion in the shortcuts for all backends of fxpar."""

    def __init__(self, convert: Any) -> None:
        super().__init__(convert)
        # Dynamo's C++ reads it where it would trace the Python code that converts
        # frames.
        self._torchdynamo_orig_backend = convert

    @in_one_block
    def __call__(self, *args: Any, skip: int = 0, **how: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if not is_only_rank():
                stack.enter_context(old_objects_kept())
                stack.enter_context(quick_graphs())
            # The frames of this method, and of ``in_one_block``.
            return self._convert(*args, skip=skip + 2, **how)


class _Overheard(_Conversion):
    """Reports each frame to ``on_frame``."""

    def __init__(self, convert: Any, on_frame: Callable[..., None]) -> None:
        super().__init__(convert)
        self._on_frame = on_frame

    def __call__(self, frame: Any, *args: Any, skip: int = 0, **how: Any) -> Any:
        try:
            converted = self._convert(frame, *args, skip=skip + 1, **how)
        except Exception as error:
            self._on_frame(frame, error)
            raise
        self._on_frame(frame, None)
        return converted


def seconds_by_phase() -> dict[str, float]:
    """Return the seconds that this process spent so far in phases of compiling that
    torch times, by torch's names."""
    from torch._dynamo.utils import compilation_time_metrics, cumulative_time_spent_ns

    phases = {name: spent / 1e9 for name, spent in cumulative_time_spent_ns.items()}
    return phases | {key: sum(each) for key, each in compilation_time_metrics.items()}


def is_capturing(outputs: str) -> bool:
    """Return whether Dynamo is set to keep ``outputs`` ("scalar_outputs") in a graph,
    which it does by itself where there must be one graph."""
    from torch._dynamo import config

    return bool(getattr(config, f"capture_{outputs}"))


def graph_breaks() -> dict[str, int]:
    """Return how often Dynamo broke or gave up a graph, by its reasons."""
    from torch._dynamo.utils import counters

    return {**counters["unimplemented"], **counters["graph_break"]}


def between_graph_and_caller() -> int:
    """Return how many functions there are between the running graph of fxpar and the
    call of the compiled function: 1 where the graph is that of the outermost function.
    """
    frame, count = sys._getframe(1), 0
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        inlined = name == "inner" and file.endswith("_dynamo/external_utils.py")
        if inlined or not _is_machinery(frame):
            count += 1
        frame = frame.f_back  # type: ignore[assignment]
    return count


def _is_machinery(frame: Any) -> bool:
    """Return whether a frame belongs to the code that calls modules and compiled
    graphs."""
    name = frame.f_globals.get("__name__", "")
    return name.startswith(("torch._dynamo", "fxpar.")) or (
        name == "torch.nn.modules.module"
    )


def recurrent_members(cls: Any) -> dict[str, Any]:
    """Return the members of a subclass of an RNN (``nn.LSTM`` and the like) whose
    parameters are properties: the list of weights that it hands to its kernel is made
    in each forward, from the parameters there, and dropped after it."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._flat_weights = [getattr(self, name) for name in self._flat_weights_names]
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            list_recurrent_weights(self)

    def nothing(self: Any) -> None:
        pass

    names = ("flatten_parameters", "_update_flat_weights")
    return {"forward": not_compiled(forward), **dict.fromkeys(names, nothing)}


def not_compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` so that Dynamo does not compile it; Dynamo is loaded when it is
    first called."""
    from torch._compile import _disable_dynamo

    return _disable_dynamo(fn)


def compile_inlined_only(fn: Callable[..., Any]) -> None:
    """Keep Dynamo from compiling ``fn`` by itself, where it runs under code that is not
    compiled; in code that is compiled it is traced."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(fn.__code__)


def list_recurrent_weights(module: Any) -> None:
    """Make an RNN's list of weights anew, from the parameters that it has by now."""
    module._flat_weights = [module._parameters[n] for n in module._flat_weights_names]


def compile_as_one(fn: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """Compile a function by ``torch.compile`` into one graph without a break, with a
    code object of its own: Dynamo counts recompilations per code object. Calls of
    loggers are left out of it, since they would break it."""
    from torch._dynamo import config

    own = types.FunctionType(
        fn.__code__.replace(),
        fn.__globals__,
        fn.__name__,
        fn.__defaults__,
        fn.__closure__,
    )
    compiled = torch.compile(own, backend=backend, fullgraph=True)

    names = ("debug", "info", "warning", "warning_once", "error", "critical", "log")

    def call(*args: Any, **kwargs: Any) -> Any:
        # Libraries add methods to loggers when they are imported.
        methods = {getattr(logging.Logger, name, None) for name in names} - {None}
        ignored = config.ignore_logging_functions | methods
        own_settings = config.patch(ignore_logging_functions=ignored)
        with own_settings, _settings_unwritten():
            return compiled(*args, **kwargs)

    return call


def _settings_unwritten() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which Dynamo notes no settings among its metrics: 2.11 sorts
    the functions that it is to ignore, fails, and logs that at length."""
    from torch._dynamo import utils

    if torch.__version__ >= "2.13":
        return contextlib.nullcontext()
    return mock.patch.object(utils, "_get_dynamo_config_for_logging", lambda: None)


def is_recompile_limit(error: BaseException) -> bool:
    """Return whether Dynamo refused to compile a function once more."""
    from torch._dynamo import exc

    return isinstance(error, exc.FailOnRecompileLimitHit)


def why_not_one_graph(error: BaseException) -> tuple[str, str | None] | None:
    """Return what Dynamo could not trace, by its error, and at which of the user's
    lines; None for other errors."""
    from torch._dynamo import exc

    if not isinstance(error, (exc.Unsupported, exc.UserError)):
        return None
    stack = getattr(error, "real_stack", None) or ()
    return str(error).splitlines()[0], line_in(stack)


def copy_detached_results(gm: fx.GraphModule) -> None:
    """Copy results of a Dynamo graph that are detached from a value of which other
    results are views with a gradient, while the value itself is no result and no input,
    in place. AOTAutograd (torch 2.13) loses the gradient of the views, and without a
    word."""
    output, by_memory = gm.graph.output_node(), dict[int, list[fx.Node]]()
    for node in output.all_input_nodes:
        x = example_of(node)
        if node.op != "placeholder" and isinstance(x, torch.Tensor):
            by_memory.setdefault(memory_of(x), []).append(node)
    inputs = {id(example_of(x)) for x in gm.graph.find_nodes(op="placeholder")}
    for nodes in by_memory.values():
        values = list(map(example_of, nodes))
        bases = {id(x._base) for x in values if x.requires_grad}
        if not bases or id(None) in bases or bases & inputs:
            continue
        for node, x in zip(nodes, values, strict=True):
            if not x.requires_grad:
                output.replace_input_with(node, _cloned(node, output))


def separate_views(gm: fx.GraphModule) -> None:
    """Let no two results of a Dynamo graph be views, with a gradient, of a value that
    is no result, in place: with DTensors among its inputs AOTAutograd refuses them.

    A result that the others are views of, and that is a view itself, as that of
    ``F.linear`` on three dims, is copied where it is computed, and they stay views of
    it. Where there is none, all but one are copied.
    """
    output, inputs = gm.graph.output_node(), set[int]()
    for kind in ("placeholder", "get_attr"):
        inputs.update(*map(_memories, gm.graph.find_nodes(op=kind)))
    by_memory: dict[int, list[fx.Node]] = {}
    for node in output.all_input_nodes:
        for memory in _memories(node) - inputs:
            if example_of(node).requires_grad and not _is_piece(node):
                by_memory.setdefault(memory, []).append(node)
    for nodes in by_memory.values():
        bases = {*map(_viewed, nodes)}
        base = bases.pop()
        if bases or not any(example_of(x) is example_of(base) for x in nodes):
            for node in nodes[1:]:
                output.replace_input_with(node, _cloned(node, output))
        elif len(nodes) > 1 and example_of(base)._base is not None:
            copy = _cloned(base, base.next)
            base.replace_all_uses_with(copy, lambda user, copy=copy: user is not copy)


def _cloned(node: fx.Node, before: fx.Node) -> fx.Node:
    """Return a new node that copies the value of another: what it is where ``before``
    runs."""
    with node.graph.inserting_before(before):
        copy = node.graph.call_method("clone", (node,))
    copy.meta = dict(node.meta) | {"example_value": example_of(node).clone()}
    return copy


def _memories(node: fx.Node) -> set[int]:
    """Return numbers for the memory of the tensors of a node's value."""
    return {*map(memory_of, tensors_in(example_of(node)))}


def _viewed(node: fx.Node) -> fx.Node:
    """Return the first of the nodes that a value, one tensor, is a view of."""
    memory = _memories(node)
    while bases := [x for x in node.all_input_nodes if memory & _memories(x)]:
        node = bases[0]
    return node


def _is_piece(node: fx.Node) -> bool:
    """Return whether a value is one of those that a view like ``chunk`` gives, of which
    AOTAutograd refuses none: nobody may write to them."""
    several = node.target is operator.getitem and node.args[0]
    is_one = isinstance(several, fx.Node) and isinstance(
        example_of(several), (tuple, list)
    )
    return is_one and _viewed(node) is not several
