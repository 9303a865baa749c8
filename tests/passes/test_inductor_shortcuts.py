"""Shortcuts of Inductor's codegen: the same code as without, and torch asked less."""

from __future__ import annotations

import contextlib
import logging
import operator
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.repro import after_aot
from torch._inductor import constant_folding
from torch._inductor.codegen import cpp
from torch._inductor.graph import GraphLowering
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree
from torch.utils._sympy.functions import (
    FloorDiv,
    ModularIndexing,
)

from fxpar._torch import inductor, inductor_shortcuts, known_values
from fxpar._torch.objects import memory_of


def program(x: torch.Tensor, w: torch.Tensor) -> Any:
    """Views, products, a reduction, and indices with divisions."""
    y = F.gelu(x @ w).view(4, 2, 6).transpose(0, 1)
    parts = y.repeat_interleave(2, 0).reshape(-1, 6)
    return torch.softmax(parts, -1), parts.sum(0), y[:, 1:]


def traced() -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    with FakeTensorMode():
        fakes = [torch.empty(8, 4), torch.empty(4, 6)]
    table = inductor.decompositions()
    return make_fx(program, decomposition_table=table)(*fakes), fakes


class Generated(Exception):
    """The code is there, and need not be compiled."""


def code(*, shortcuts: bool) -> str:
    """What Inductor makes of the program."""
    texts: list[str] = []

    def save(text: str) -> None:
        texts.append(text)
        raise Generated

    without = mock.patch.object(inductor, "shortcuts", contextlib.nullcontext)
    gm, fakes = traced()
    with (
        contextlib.nullcontext() if shortcuts else without,
        mock.patch.object(GraphLowering, "save_output_code", save),
        torch._inductor.config.patch(fx_graph_cache=False, force_disable_caches=True),
        pytest.raises(Exception, match="Generated"),
    ):
        inductor.compile_inner(gm, fakes)
    (text,) = texts
    return text


def test_the_code_is_the_same() -> None:
    assert code(shortcuts=True) == code(shortcuts=False)


@pytest.mark.parametrize("is_traced", [False, True])
def test_texts_for_traces_are_made_if_one_is_taken(
    is_traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._logging import _internal

    handlers = [logging.NullHandler()] if is_traced else []
    monkeypatch.setattr(_internal.trace_log, "handlers", handlers)
    gm, _ = traced()
    with inductor_shortcuts.unread_texts(), inductor_shortcuts.unread_texts():
        for_trace = gm.print_readable(print_output=False, expanded_def=True)
        for_log = gm.print_readable(print_output=False, include_stride=True)
    assert bool(for_trace) == is_traced and "def forward" in for_log
    asked, left = mock.Mock(return_value=""), mock.Mock()
    with (
        mock.patch.object(torch.fx.graph_module, "_print_readable", asked),
        mock.patch.object(after_aot, "save_graph_repro", left),
    ):
        code(shortcuts=True)
        # Torch makes them, and makes them so.
        assert asked.called == left.called == is_traced
        with (
            torch._dynamo.config.patch(repro_after="aot"),
            inductor_shortcuts.unread_texts(),
        ):
            assert after_aot.save_graph_repro is left


def test_uses_of_constants_are_those_of_torch() -> None:
    gm, _ = traced()
    kinds = constant_folding.ConstantFolder(gm)
    plain = kinds.node_to_last_non_output_use()
    refuse = mock.Mock(side_effect=AssertionError)
    with (
        mock.patch.object(_pytree, "tree_map_only_", refuse),
        inductor_shortcuts.quick_constants(),
    ):
        assert kinds.node_to_last_non_output_use() == plain
    assert len(plain) > 5


@pytest.mark.parametrize("divided", [False, True])
def test_strides_within_lanes(divided: bool) -> None:
    """Divisions are simplified by the range, which changes what is read of them."""
    x, y = sympy.symbols("x y", integer=True)
    plain = 6 * y + x + 3
    index = plain + FloorDiv(x, 16) + ModularIndexing(x, 1, 32) if divided else plain
    ask = cpp.stride_at_vec_range.__wrapped__
    home = sys.modules[ask.__module__]
    want = ask(index, x, 16)
    for known in (home.stride_at, home.simplify_index_in_vec_range):
        known.cache_clear()
    with (
        inductor_shortcuts.shortcuts(),
        mock.patch.object(sympy, "simplify", side_effect=sympy.simplify) as simplify,
    ):
        assert ask(index, x, 16) == want
    # Of a plain one the difference alone is simplified.
    assert (simplify.call_count > 1) == divided


def test_values_are_made_of_known_forms() -> None:
    gm, fakes = traced()
    mode: Any = fakes[0].fake_mode

    def values() -> list[torch.Tensor]:
        with enable_python_dispatcher():
            FakeTensorProp(gm, mode=mode).propagate_dont_convert_inputs(*fakes)
        every = (node.meta.get("val") for node in gm.graph.nodes)
        return [value for value in every if isinstance(value, torch.Tensor)]

    want = values()
    with inductor_shortcuts.shortcuts():
        values()
        with mock.patch.object(known_values, "_asked", side_effect=AssertionError):
            got = values()
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
        assert ours.storage_offset() == theirs.storage_offset()
    # Views show what is shown without.
    homes = [[memory_of(x) for x in some] for some in (got, want)]
    alike = [[some.index(home) for home in some] for some in homes]
    assert alike[0] == alike[1]


def test_values_by_python_are_known_apart() -> None:
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(4, 6)
    args = mode, torch.ops.aten.mul.Tensor, (x, x), {}
    known_values.result(*args)
    asked = known_values._asked
    with mock.patch.object(known_values, "_asked", side_effect=asked) as again:
        known_values.result(*args)
        assert not again.called
        with enable_python_dispatcher(), mock.patch.dict(known_values._KNOWN):
            known_values.result(mode, torch.ops.aten.mul.Tensor, (x, x), {})
            keys = [key for key in known_values._KNOWN if key[0] is args[1]]
            assert {key[6] for key in keys} == {False, True}


def reading(values: list[Any], op: Any = torch.ops.aten.relu.default) -> list[fx.Node]:
    """Nodes that read one of several values of a tuple each, and of these what ``op``
    gives."""
    graph = fx.Graph()
    tuple_of = graph.placeholder("values")
    tuple_of.meta["val"] = tuple(values)
    nodes = []
    for i, value in enumerate(values):
        item = graph.call_function(operator.getitem, (tuple_of, i))
        node = graph.call_function(op, (item,))
        item.meta["val"] = node.meta["val"] = value
        nodes += [item, node]
    return nodes


def test_types_are_looked_at_once() -> None:
    from torch._inductor import lowering

    with FakeTensorMode():
        values = [torch.empty(4) for _ in range(5)] + [torch.empty(2).long(), None, 3]
    nodes = reading(values)
    looked = mock.Mock(side_effect=lowering.unsupported_output_tensor)
    with mock.patch.object(lowering, "unsupported_output_tensor", looked):
        by_torch = [lowering.fallback_node_due_to_unsupported_type(n) for n in nodes]
        assert looked.call_count > 2
        looked.reset_mock()
        with inductor_shortcuts.types_looked_at_once():
            from torch._inductor import graph, pattern_matcher

            ask = graph.fallback_node_due_to_unsupported_type
            assert ask is pattern_matcher.fallback_node_due_to_unsupported_type
            assert list(map(ask, nodes)) == by_torch
    assert looked.call_count == 2 and not any(by_torch)  # of floats and integers


@pytest.mark.parametrize("kind", ["complex", "meta", "sparse", "of e8m0"])
def test_types_without_code_are_torchs_to_refuse(kind: str) -> None:
    from torch._inductor import lowering

    with FakeTensorMode():
        x = {
            "complex": lambda: torch.empty(4, dtype=torch.complex64),
            "meta": lambda: torch.empty(4, device="meta"),
            "sparse": lambda: torch.sparse_coo_tensor(size=(4, 4)),
            "of e8m0": lambda: torch.empty(4, dtype=torch.float8_e8m0fnu),
        }[kind]()
        plain = torch.empty(4)
    for op in (torch.ops.aten.relu.default, torch.ops.aten.clone.default):
        nodes = reading([plain, x], op)
        ask = lowering.fallback_node_due_to_unsupported_type
        want = [ask(node) for node in nodes]
        with inductor_shortcuts.types_looked_at_once():
            ask = lowering.fallback_node_due_to_unsupported_type
            assert [ask(node) for node in nodes] == want
        assert any(want)


def test_values_of_bodies_are_known_in_one_graph() -> None:
    """Of calls of one body, that read values of the same form."""
    invoke: Any = inductor.invoke_subgraph()
    mode = FakeTensorMode()
    body, whole = fx.Graph(), fx.Graph()
    y = body.call_function(torch.ops.aten.mul.Tensor, (body.placeholder("x"), 2))
    body.output((y,))
    x = whole.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(4, 6)
    at = whole.get_attr("body")
    for _ in range(4):
        call = whole.call_function(invoke, (at, "body", x))
        x = whole.call_function(operator.getitem, (call, 0))
        x.meta["val"] = call.meta["val"] = None
    whole.output((x,))
    first = next(iter(whole.nodes)).meta["val"]
    gm = fx.GraphModule({"body": fx.GraphModule({}, body)}, whole)
    for node in gm.graph.find_nodes(op="call_function", target=operator.getitem):
        node.meta["val"] = first
    asked = mock.Mock(side_effect=FakeTensorProp.call_function)
    with (
        mock.patch.object(FakeTensorProp, "call_function", lambda *args: asked(*args)),
        inductor_shortcuts.shortcuts(),
    ):
        FakeTensorProp(gm, mode=mode).propagate_dont_convert_inputs(first)
    calls = [call for call in asked.call_args_list if call.args[1] is invoke]
    assert len(calls) == 1  # behind the first, which is propagated through
    items = gm.graph.find_nodes(op="call_function", target=operator.getitem)
    values = [node.meta["val"] for node in items]
    assert {tuple(x.shape) for x in values} == {(4, 6)}
    assert len({memory_of(x) for x in values}) == 4


IMPORTS = """
import jinja2
import fxpar._torch.inductor as inductor
compiled, make = [], jinja2.Environment.compile
jinja2.Environment.compile = lambda *a, **k: compiled.append(0) or make(*a, **k)
inductor.load()
assert not compiled, "templates were made"
from torch._inductor.kernel.mm import mm_template
from torch._inductor.codegen.common import KernelTemplate
late = mm_template.template
plain = KernelTemplate._template_from_string(late._source)
assert type(plain) is jinja2.Template
code = late.root_render_func.__code__
assert late and code.co_code == plain.root_render_func.__code__.co_code
assert len(compiled) == 2
"""


def test_templates_are_made_when_they_are_read() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
