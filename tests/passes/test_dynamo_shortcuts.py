"""Shortcuts of Dynamo: the same graph and guards as without, and torch asked less."""

from __future__ import annotations

import contextlib
import logging
import operator
import re
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._dynamo import guards
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import sym_node
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from fxpar._torch.dynamo_shortcuts import shortcuts, unmade_values
from fxpar._torch.known_sizes import counts_replacements, sizes_known


def program(x: torch.Tensor, w: torch.Tensor) -> Any:
    """Views, products, comparisons and reductions on an open size."""
    for _ in range(3):
        y = (x @ w).view(x.shape[0], 2, -1).transpose(1, 2)
        x = F.gelu(y.reshape(x.shape)) + torch.arange(x.shape[0])[:, None]
    parts = torch.cat([x, x[1:]]).softmax(-1)
    return parts.sum(), parts[: x.shape[0] - 1]


def traced(around: Any) -> tuple[str, list[str]]:
    """The graph that Dynamo makes of the program with an open size, and its guards."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, examples: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    said: list[str] = []

    def note(found: Any) -> None:
        each = (f"{x.name} {x.create_fn_name()} {x.code_list}" for x in found)
        # Torch numbers what it calls the builtins.
        said.extend(sorted(re.sub(r"(builtins_dict___)\d+", r"\1", x) for x in each))

    torch._dynamo.reset()
    x, w = torch.randn(6, 8), torch.randn(8, 8)
    torch._dynamo.mark_dynamic(x, 0)
    with around, torch._dynamo.config.patch(guard_nn_modules=True):
        compiled = torch._dynamo.optimize(backend, guard_export_fn=note)(program)
        with torch.no_grad():
            compiled(x, w)
            compiled(torch.randn(9, 8), w)
    (gm,) = graphs
    text = gm.print_readable(print_output=False, include_stride=True)
    sizes = [str(node.meta.get("example_value")) for node in gm.graph.nodes]
    return "\n".join([text, *sizes]), said


def test_graph_and_guards_are_the_same() -> None:
    without, asked = traced(contextlib.nullcontext()), 0
    ask = SymNode._mul

    def count(self: Any, other: Any) -> Any:
        nonlocal asked
        asked += 1
        return ask(self, other)

    with mock.patch.object(SymNode, "_mul", count):
        assert traced(contextlib.nullcontext()) == without
        before, asked = asked, 0
        assert traced(shortcuts()) == without
    assert without[1] and asked <= before
    if counts_replacements():
        assert 0 < asked < before / 4
    assert SymNode._mul is ask


def fake(env: ShapeEnv, *hints: int) -> Any:
    """A value whose sizes are all open."""
    dims = StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(hints))
    mode = FakeTensorMode(shape_env=env)
    return mode.from_tensor(torch.empty(hints), symbolic_context=dims)


def sizes(env: ShapeEnv, *hints: int) -> list[torch.SymInt]:
    return list(fake(env, *hints).shape)


OPERATIONS = [
    *(operator.add, operator.sub, operator.mul, operator.eq, operator.ne),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.floordiv),
    *(operator.mod, torch.sym_max, lambda a, b: (a < b) & (a > 2)),
    *(lambda a, b: (a + 1) * b, lambda a, b: (a == b) | (b > 3), lambda a, b: a / b),
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_known_is_what_torch_says(operation: Any) -> None:
    env = ShapeEnv()
    a, b = sizes(env, 5, 7)
    for pair in ((a, b), (a, a), (a, 4), (3, b)):
        want = operation(*pair)
        with sizes_known(), sizes_known():
            both = [operation(*pair) for _ in range(2)]
        for got in both:
            assert type(got) is type(want)
            if isinstance(want, (torch.SymInt, torch.SymBool, torch.SymFloat)):
                assert got.node.expr == want.node.expr
                assert got.node.hint == want.node.hint
                assert got.node.pytype is want.node.pytype
    assert isinstance(SymNode.expr, property) and not hasattr(
        SymNode.expr.fget, "fxpar"
    )


def test_a_size_that_is_replaced_is_asked_anew() -> None:
    env = ShapeEnv()
    a, b = sizes(env, 5, 6)
    with sizes_known():
        before = (a * b).node.expr
        assert (a * b).node.expr == before
        assert bool(a == 5)  # from now on it is
        after = (a * b).node.expr
    assert after != before and after == 5 * b.node.expr == (a * b).node.expr


def test_environments_are_known_apart() -> None:
    (a,), (b,) = sizes(ShapeEnv(), 5), sizes(ShapeEnv(), 7)
    with sizes_known():
        for x, hint in ((a, 5), (b, 7), (a, 5)):
            assert (x + x).node.hint == 2 * hint
            assert (x + x).node.shape_env is x.node.shape_env


@pytest.mark.skipif(not counts_replacements(), reason="torch 2.11")
def test_logs_say_all() -> None:
    level = sym_node.sym_node_log.level
    plain = SymNode._mul
    try:
        sym_node.sym_node_log.setLevel(logging.DEBUG)
        with sizes_known():
            assert SymNode._mul is plain
    finally:
        sym_node.sym_node_log.setLevel(level)
    with sizes_known():
        assert SymNode._mul is not plain


@pytest.mark.parametrize("logged", [False, True])
def test_guards_are_timed_for_logs(
    logged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = mock.Mock(return_value=1.0)
    monkeypatch.setattr(guards, "profile_guard_manager", timed, raising=False)
    enabled = mock.Mock(return_value=logged)
    monkeypatch.setattr(guards.guards_log, "isEnabledFor", enabled)
    with shortcuts():
        guards.profile_guard_manager(None, {}, 1)
    assert timed.called == logged


def test_values_are_kept_as_before() -> None:
    """Of views and others, on open sizes and on fixed ones: the next op like one has
    what the first had, and no second value is made to look at."""

    def values(mode: FakeTensorMode, x: Any) -> list[Any]:
        with mode:
            y = x.view(x.shape[1], x.shape[0])
            return [y, y + 1, y.sum(0), y.t(), *torch.ops.aten.topk(y, 2), y.bool()]

    said, asked = [], []
    for around in (contextlib.nullcontext(), unmade_values()):
        FakeTensorMode.cache_clear()
        x = fake(ShapeEnv(), 4, 6)
        ask = mock.create_autospec(SymNode._mul, side_effect=SymNode._mul)
        with around, mock.patch.object(SymNode, "_mul", ask):
            first = values(x.fake_mode, x)
            asked.append(ask.call_count)
            second = values(x.fake_mode, x)
        for a, b in zip(first, second, strict=True):
            assert str(a) == str(b) and a.stride() == b.stride()
            assert torch._C._dispatch_keys(a) == torch._C._dispatch_keys(b)
        hits = FakeTensorMode.cache_hits
        said.append((hits, [(str(a), a.dtype, str(a.stride())) for a in first]))
    assert said[0] == said[1] and said[0][0] >= 5
    assert asked[1] < asked[0]


LOCAL_MAP = """
import sys, torch
from fxpar._torch.dynamo_shortcuts import shortcuts
home = "torch.distributed.tensor.experimental._func_map"
def fn(x):
    return torch.sin(x) + 1
with shortcuts():
    torch.compile(fn, backend="eager")(torch.ones(2))
    assert home not in sys.modules, "imported for nothing"
    from torch._dynamo.variables.higher_order_ops import (
        LocalMapWrappedHigherOrderVariable as Variable,
    )
    from torch.distributed.tensor.experimental._func_map import _local_map_wrapped
    with Variable.enable():
        assert Variable.should_wrap_in_hop(_local_map_wrapped)
        assert not Variable.should_wrap_in_hop(fn)
    assert not Variable.should_wrap_in_hop(_local_map_wrapped)
"""


def test_a_function_of_torchs_is_known_once_it_is_imported() -> None:
    subprocess.run([sys.executable, "-c", LOCAL_MAP], check=True)
