"""Shortcuts of tracing and codegen: what is computed anew of every op is known.

In: the parts of AOTAutograd and Inductor that look at each op of a graph. Out: the same
numbers and code from them, in less time. Never changes what they decide.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils import _pytree

from fxpar._torch import known_values

aten = torch.ops.aten


@contextlib.contextmanager
def shortcuts() -> Iterator[None]:
    """Context of Inductor's codegen in which all are taken."""
    with (
        _plain_indices_stay(),
        _values_of_known_forms(),
        known_values.values_known(),
        types_looked_at_once(),
        unread_texts(),
    ):
        yield


@contextlib.contextmanager
def unread_texts() -> Iterator[None]:
    """Context in which graphs are not written down for traces (``TORCH_TRACE``) if none
    is taken: torch (2.13) makes the texts at once, and only then asks whether it is.
    Logs, which ask first, and what is left where compiling fails, are as ever."""
    from torch._dynamo import config
    from torch._logging._internal import trace_log

    write = fx.GraphModule.print_readable

    def print_readable(self: Any, *args: Any, **kwargs: Any) -> str:
        # As what is written for traces alone asks for.
        for_traces = kwargs.keys() & {"expanded_def", "fast_sympy_print"}
        is_shown = kwargs.get("print_output", True)
        return "" if for_traces and not is_shown else write(self, *args, **kwargs)

    if trace_log.handlers:
        yield
        return
    with contextlib.ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(patch(fx.GraphModule, "print_readable", print_readable))
        repro = sys.modules.get("torch._dynamo.repro.after_aot")
        if repro is not None and not config.repro_after:
            stack.enter_context(patch(repro, "save_graph_repro"))
        yield


class _NodesOfArguments:
    """``torch.utils._pytree``, by which a look for constants goes through arguments."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_pytree, name)

    def tree_map_only_(self, kind: Any, fn: Any, tree: Any, *how: Any) -> Any:
        if kind is not fx.Node or how:
            return _pytree.tree_map_only_(kind, fn, tree, *how)
        fx.node.map_arg(tree, fn)  # which is C++, and changes nothing either
        return tree


def quick_constants() -> contextlib.AbstractContextManager[Any]:
    """Context in which Inductor's look for constants in a graph, which calls a function
    with each node that is read, finds the nodes quicker. Nothing to do for a torch that
    finds them in another way."""
    from torch._inductor import constant_folding

    if getattr(constant_folding, "pytree", None) is not _pytree:
        return contextlib.nullcontext()
    return mock.patch.object(constant_folding, "pytree", _NodesOfArguments())


def late_templates() -> contextlib.AbstractContextManager[Any]:
    """Context of an import of Inductor in which templates of kernels are made of their
    text when they are first read: torch (2.13) makes all at once, for GPUs alone, which
    is half of what the import takes."""
    from torch._inductor.codegen.common import KernelTemplate

    name = "_template_from_string"
    make = getattr(KernelTemplate, name, None)
    if make is None:
        return contextlib.nullcontext()
    late = functools.partial(_LateTemplate, make)
    return mock.patch.object(KernelTemplate, name, staticmethod(late))


class _LateTemplate:
    """A template that is made of its text when something of it is read."""

    def __init__(self, make: Callable[[str], Any], source: str) -> None:
        self._make, self._source = make, source

    @functools.cached_property
    def _template(self) -> Any:
        return self._make(self._source)

    def __bool__(self) -> bool:
        return bool(self._template)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._template, name)


def _plain_indices_stay() -> contextlib.AbstractContextManager[Any]:
    """An index without divisions has nothing to be simplified by a range: what is read
    of it is the difference of two, which Inductor (2.13) simplifies by itself."""
    from torch._inductor import sizevars
    from torch._inductor.codegen import cpp
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    name = "simplify_index_in_vec_range"
    home: Any = sizevars if hasattr(sizevars, name) else cpp  # torch 2.11
    simplify = getattr(home, name)

    def simplified(index: Any, var: Any, lanes: int) -> Any:
        if index.has(FloorDiv, ModularIndexing):
            return simplify(index, var, lanes)
        return index

    return mock.patch.object(home, name, simplified)


def _values_of_known_forms() -> contextlib.AbstractContextManager[Any]:
    """Fake values of a graph, which Inductor makes again before it lowers it."""
    from torch.fx.passes import fake_tensor_prop

    prop: Any = fake_tensor_prop.FakeTensorProp
    ask = prop.call_function
    call_body = getattr(torch.ops.higher_order, "invoke_subgraph", None)

    def call_function(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, torch._ops.OpOverload):
            return known_values.result(self._mode, target, args, kwargs)
        if target is not call_body or kwargs:
            return ask(self, target, args, kwargs)
        bodies = self.__dict__.setdefault("fxpar_bodies", {})  # while they stay alike
        body, name, *operands = args

        def call(_: Any) -> Any:
            return ask(self, target, args, kwargs)

        key = id(body), name
        return known_values.of_body(self._mode, key, operands, call, bodies)

    return mock.patch.object(prop, "call_function", call_function)


# Of values that hold no tensor.
_PLAIN = frozenset((int, float, bool, str, complex, type(None)))

# Of values that hold others, and always the same.
_TUPLES = (tuple, fx.immutable_collections.immutable_list)


class _SupportedValues:
    """Values of nodes whose types Inductor has code for, whatever the op: of tensors
    these are a matter of dtype, device and layout."""

    def __init__(self, refuses: Callable[[torch.Tensor], bool]) -> None:
        """``refuses``: as Inductor says of the result of any op."""
        self._refuses, self._kind = refuses, known_values.fake_tensor()
        self._tensors: dict[Any, bool] = {}
        self._tuples: dict[int, tuple[Any, bool]] = {}  # by id, which they keep

    def has(self, value: Any) -> bool:
        """Whether it is one; False for what may hold tensors that are not seen."""
        if type(value) in _TUPLES:
            facts = self._tuples.get(id(value))
            if facts is None:
                facts = self._tuples[id(value)] = value, all(map(self.has, value))
            return facts[1]
        return type(value) in _PLAIN or self._has_tensor(value)

    def _has_tensor(self, x: Any) -> bool:
        if type(x) is not self._kind:
            return False
        key = x.dtype, x.fake_device, x.layout
        if key not in self._tensors:
            # Of the others it warns, and asks what op it is.
            is_real = x.layout is torch.strided and not x.is_complex()
            self._tensors[key] = is_real and not self._refuses(x)
        return self._tensors[key]


@contextlib.contextmanager
def types_looked_at_once() -> Iterator[None]:
    """Context in which Inductor looks once at the types of a value: 2.13 does so for
    each node that reads it, at all that a tuple holds for one of it."""
    from torch._inductor import graph, lowering, pattern_matcher

    name = "fallback_node_due_to_unsupported_type"
    ask: Any = lowering.fallback_node_due_to_unsupported_type
    if hasattr(ask, "fxpar"):  # inside such a context already
        yield
        return
    supported = _SupportedValues(lowering.unsupported_output_tensor)

    def falls_back(node: fx.Node, *how: Any, **named: Any) -> bool:
        values = (x.meta.get("val") for x in (node, *node._input_nodes))
        if all(map(supported.has, values)):
            return False
        return bool(ask(node, *how, **named))

    falls_back.fxpar = True  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        for module in (graph, lowering, pattern_matcher):
            if getattr(module, name, None) is ask:
                stack.enter_context(mock.patch.object(module, name, falls_back))
        yield
