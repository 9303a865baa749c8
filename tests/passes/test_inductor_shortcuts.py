"""Shortcuts of Inductor's codegen: the same code as without, and torch asked less."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor import constant_folding
from torch._inductor.codegen import cpp
from torch._inductor.graph import GraphLowering
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

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
    asked = mock.Mock(return_value="")
    with mock.patch.object(torch.fx.graph_module, "_print_readable", asked):
        code(shortcuts=True)
    assert asked.called == is_traced  # torch makes them, and makes them so


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
