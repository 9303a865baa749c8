"""Handle parameters at rest in a Dynamo graph, in which they are crossings: calls of
``fxpar::to_global``, which give their global values.

In: a Dynamo graph, and the values it is called with. Out: the models whose parameters
it reads, and an error where it, or code between graphs, writes to one; ``globally``
gives the graph on global parameters, without the crossings, with facts on each input.
Never: a computation on values, or a change to a user's value.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy

from fxpar import _torch
from fxpar._torch.traced_once import SegmentKind
from fxpar.config import Options
from fxpar.features.at_rest.crossings import layout_of
from fxpar.features.at_rest.sharded_modules import (
    Home,
    home_of,
    note_read,
    refuse_writes,
    to_global_unreduced,
    written_parameter,
)
from fxpar.graph.builder import replace_items
from fxpar.passes.boundaries import looks_inside, stated_use
from fxpar.runtime.ranks.presence import user_line as running_line
from fxpar.sharding.program import Input, user_line
from fxpar.sharding.spec import Spec

Calling = Callable[..., Any]

# Dynamo's graphs name an op without its overload.
_CROSSINGS = (
    torch.ops.fxpar.to_global,
    torch.ops.fxpar.to_global.default,
    to_global_unreduced,
)


def homes(gm: fx.GraphModule) -> list[Home]:
    """Return the sharded models whose parameters a Dynamo graph uses."""
    return [home for home in dict.fromkeys(_crossings(gm).values()) if home is not None]


def refuse_written_parameters(gm: fx.GraphModule) -> None:
    """Raise ShardError if a Dynamo graph writes to a parameter at rest: the write would
    change the global value, which exists in this graph alone."""
    parameters: dict[int, fx.Node] = {}  # by the memory of their values
    for node, home in _crossings(gm).items():
        values = [node]
        if home is not None and home.param_dtype is not None:
            values += [user for user in node.users if user.target == "to"]  # its cast
        for value in values:
            memory = _torch.objects.memory_of(value.meta["example_value"])
            parameters.setdefault(memory, value)
    for node in _written(gm.graph) if parameters else ():
        memory = _torch.objects.memory_of(node.meta["example_value"])
        parameter = parameters.get(memory)
        if parameter is not None:
            shape = f"of shape {list(parameter.meta['example_value'].shape)}"
            raise written_parameter(shape, user_line(next(iter(node.users), node)))


def _written(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the tensors that a Dynamo graph writes to in place."""
    for node in graph.nodes:
        # ``x.data`` has a version counter of its own.
        x = node.meta.get("example_value")
        if isinstance(x, torch.Tensor) and _torch.objects.version_of(x):
            yield node
        # Fake tensors (torch 2.13) count no writes to lists.
        name = getattr(node.target, "__name__", "").partition(".")[0]
        if re.fullmatch("_(foreach|fused)_.*_", name):
            yield from node.args[0] if node.args else node.kwargs["self"]


def compare_parameters(gm: fx.GraphModule) -> Callable[[Calling], Calling]:
    """Return a wrapper for the call of a Dynamo graph. The wrapped call raises
    ShardError if code between graphs wrote to the global value of a parameter at rest,
    which a graph returned. A backward raises torch's error if a parameter it needs was
    written since the call. To be called before ``forget_homes``."""
    models, results = homes(gm), gm.graph.output_node().args[0]
    returned: dict[int, tuple[Home, str]] = {}
    for crossing, home in _crossings(gm).items():
        casts = [user for user in crossing.users if user.target == "to"]
        for i, node in enumerate(results):
            if home is not None and node in (crossing, *casts):
                returned[i] = home, f"of shape {crossing.args[1]}"

    def compared(call: Calling) -> Calling:
        def compare(*args: Any) -> Any:
            for home in models:
                refuse_writes(home, ends=False)
            split = [x for x in args if isinstance(x, DTensor) and x.requires_grad]
            count = functools.partial(_torch.dtensor.count_writes, split)
            count()
            outputs = call(*args)
            _torch.aot.before_backward(outputs, count)
            for i, (home, parameter) in returned.items():
                key, line = (id(compare), i), running_line()
                note_read(home, key, outputs[i], parameter, line)
            return outputs

        return compare if models else call

    return compared


def forget_homes(gm: fx.GraphModule) -> None:
    """Remove from a Dynamo graph, in place, the numbers of the models that own its
    parameters, so that it is the same program at every start of the process."""
    crossings = _crossings(gm)
    for node in crossings:
        node.args = (*node.args[:-1], -1)
    for module in filter(None, {node.graph.owning_module for node in crossings}):
        module.recompile()


def _crossings(gm: fx.GraphModule) -> dict[fx.Node, Home | None]:
    """Return the crossings in a graph and its bodies, each with its model; None: the
    model is gone."""
    graphs = (x.graph for x in gm.modules() if isinstance(x, fx.GraphModule))
    nodes = (node for graph in graphs for node in graph.nodes)
    return {x: home_of(x.args[-1]) for x in nodes if x.target in _CROSSINGS}


def follow_dtypes(homes: Sequence[Home], options: Options) -> None:
    """Make Dynamo trace again if a model was not traced with the dtypes in options."""
    param_dtype = getattr(torch, options.param_dtype) if options.param_dtype else None
    reduce_dtype = options.reduce_dtype or ""
    stale = [
        h
        for h in homes
        if (h.param_dtype, h.reduce_dtype) != (param_dtype, reduce_dtype)
    ]
    for home in stale:
        home.param_dtype, home.reduce_dtype = param_dtype, reduce_dtype
    if stale:
        _torch.dynamo.trace_again("fxpar: parameters take the dtype asked for")


@dataclass(frozen=True)
class Forward:
    """Is a forward that takes parameters by their global value."""

    module: fx.GraphModule  # the graph, without the crossings of parameters at rest
    ends: tuple[Input, ...]  # one per input
    trained: tuple[int, ...]  # positions of inputs that are parameters with a gradient
    # Layers that repeat; the ops of each kind are known once ``reached`` ran them.
    kinds: tuple[SegmentKind, ...] = ()


def spec_of(x: Any) -> Spec | None:
    """Return the spec of a DTensor; None for a plain tensor."""
    return layout_of(x)[1] if isinstance(x, DTensor) else None


def globally(
    gm: fx.GraphModule, inputs: Sequence[Input], examples: Sequence[Any]
) -> Forward:
    """Return the forward on global parameters: crossings of parameters at rest are
    removed.

    Raises PlanError if the program looks at one rank's part of a parameter.
    """
    _open_checkpoints(gm)
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    ends, trained = [], []
    for i, (node, name, x) in enumerate(zip(nodes, inputs, examples, strict=True)):
        use = _take_out(gm.graph, node) if isinstance(x, DTensor) else None
        ends.append(replace(name, at_rest=spec_of(x), use=use))
        if isinstance(x, torch.nn.Parameter) and x.requires_grad:
            trained.append(i)
    gm.graph.lint()
    gm.recompile()
    return Forward(gm, tuple(ends), tuple(trained))


def _open_checkpoints(gm: fx.GraphModule) -> None:
    """Replace checkpointed regions by their ops, as parameters at rest cross inside;
    the ops are tagged to be computed again, except where the user chooses for each
    op."""
    calls = [
        node
        for node in gm.graph.nodes
        if _torch.aot.higher_order_name(node.target) == _torch.aot.CHECKPOINT
    ]
    for call in calls:
        body = gm.get_submodule(call.args[0].target)
        _open_checkpoints(body)
        if _torch.aot.CHOOSES_SAVED not in body.meta:
            for node in body.graph.nodes:
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        for node in body.graph.find_nodes(op="get_attr"):
            name = f"{call.args[0].target}_{node.target}".replace(".", "_")
            setattr(gm, name, operator.attrgetter(node.target)(body))
            node.target = name
        placeholders = body.graph.find_nodes(op="placeholder")
        values = dict(zip(placeholders, call.args[1:], strict=True))
        with gm.graph.inserting_before(call):
            results = gm.graph.graph_copy(body.graph, values)
        (held, *_) = call.args
        replace_items(call, results)
        if not held.users:
            gm.graph.erase_node(held)


def _take_out(graph: fx.Graph, parameter: fx.Node) -> tuple[str, ...] | None:
    """Let the readers of a parameter's global value read the parameter itself. Returns
    the use that its hint states."""
    use = None
    for user in list(parameter.users):
        local = _torch.dynamo.is_to_local(user)
        for node in list(user.users) if local else [user]:
            if node.target not in _CROSSINGS:
                raise looks_inside(node)
            # Parameter or part, shape, spec, hint, ...
            use = stated_use(node.args[3])
            node.replace_all_uses_with(parameter)
            graph.erase_node(node)
        if local:
            graph.erase_node(user)
    return use


def fake_of(x: Any, mode: Any) -> Any:
    """Return a fake of the global value of ``x``, in memory of its own, open sizes at
    their current values; ``x`` if it is no tensor and no open size."""
    if not isinstance(x, torch.Tensor):
        return _torch.symbols.hint_of(x)
    if isinstance(x, DTensor):
        strides = torch.empty(x.shape, device="meta").stride()
    else:
        strides = x.stride()
    shape, strides = map(_torch.symbols.hint_shape, (x.shape, strides))
    with mode:
        return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
