"""Sums over microbatches: products add to them, and compiled code keeps each in one
piece of memory, unless the sum so far is read again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import fxpar
from fxpar import _torch
from fxpar._torch.fake import new_fake_mode
from fxpar.features.stages import sums_of_parts
from fxpar.graph.builder import Builder
from tests.helpers.wrapper import code_of

aten, ours = torch.ops.aten, torch.ops.fxpar
SHAPES = ((4, 3), (3, 5), (4, 3), (3, 5))

Program = Callable[..., Any]


def graph_of(program: Program, *dtypes: torch.dtype) -> fx.Graph:
    """The graph of ``program(call, a, b, c, d)``."""
    graph, mode = fx.Graph(), new_fake_mode()
    build, inputs = Builder(graph, mode), []
    for name, shape in zip("abcd", SHAPES, strict=True):
        inputs.append(graph.placeholder(name))
        with mode:
            dtype = dtypes[0] if dtypes else torch.float64
            inputs[-1].meta["val"] = torch.empty(shape, dtype=dtype)

    def call(op: Any, *args: Any) -> fx.Node:
        return build.call(op.default if hasattr(op, "overloads") else op, *args)

    results = program(call, *inputs)
    graph.output(results if isinstance(results, tuple) else (results,))
    return graph


def two_parts(call: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return call(ours.accumulate, call(aten.mm, a, b), call(aten.mm, c, d))


def read_twice(call: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    product = call(aten.mm, c, d)
    return call(ours.accumulate, call(aten.mm, a, b), product), product


def wider(call: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    convert = torch.ops.prims.convert_element_type
    total = call(convert, call(aten.mm, a, b), torch.float64)
    return call(ours.accumulate, total, call(aten.mm, c, d))


def no_product(call: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    total = call(ours.accumulate, call(aten.mm, a, b), call(aten.mm, c, d))
    return call(ours.accumulate, total, call(aten.exp, total))


def inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=made, dtype=dtype) for shape in SHAPES]


def run(graph: fx.Graph, given: list[torch.Tensor]) -> Any:
    return fx.GraphModule(torch.nn.Module(), graph)(*given)


def text_of(graph: fx.Graph) -> list[str]:
    calls = graph.nodes
    return [f"{n.target} {n.args}" for n in calls if n.op == "call_function"]


def test_a_product_adds_to_the_sum() -> None:
    graph = graph_of(two_parts)
    want = run(graph, inputs())
    sums_of_parts.accumulate_products(graph)
    graph.lint()
    assert text_of(graph) == [
        "aten.mm.default (a, b)",
        "fxpar.accumulate_product.default (mm_default, c, d)",
    ]
    torch.testing.assert_close(run(graph, inputs()), want)


@pytest.mark.parametrize(
    ("program", "dtype"),
    [(read_twice, torch.float64), (wider, torch.float32)],
)
def test_a_product_that_is_needed_or_of_another_dtype_stays(
    program: Program, dtype: torch.dtype
) -> None:
    graph = graph_of(program, dtype)
    before = text_of(graph)
    sums_of_parts.accumulate_products(graph)
    assert text_of(graph) == before


@pytest.mark.parametrize("program", [two_parts, no_product])
def test_compiled_sums_lie_where_the_sum_so_far_does(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums_of_parts.register_lowering()
    graph = graph_of(program)
    sums_of_parts.accumulate_products(graph)
    count = len(graph.find_nodes(op="call_function", target=ours.accumulate.default))
    code = code_of(graph, monkeypatch)
    assert code.count("aten.addmm_.default(") == 1
    assert code.count("aten.add_.Tensor(") == count
    assert "fxpar.accumulate" not in code


def test_a_sum_so_far_that_is_read_later_is_not_written_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def program(call: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        first = call(aten.mm, a, b)
        second = call(ours.accumulate_product, first, c, d)
        return call(ours.accumulate, second, second), first

    sums_of_parts.register_lowering()
    code = code_of(graph_of(program), monkeypatch)
    assert "fxpar.accumulate_product.default(" in code and "addmm_" not in code


@pytest.mark.slow
@pytest.mark.parametrize("program", [two_parts, no_product, read_twice, wider])
def test_compiled_numbers_are_those_of_the_graph(program: Program) -> None:
    sums_of_parts.register_lowering()
    dtype = torch.float32 if program is wider else torch.float64
    graph = graph_of(program, dtype)
    want = run(graph, inputs(dtype))
    sums_of_parts.accumulate_products(graph)
    given = inputs(dtype)
    values = [n.meta["val"] for n in graph.find_nodes(op="placeholder")]
    graph.set_codegen(fx.graph.CodeGen())
    module = fx.GraphModule(torch.nn.Module(), graph)
    got = _torch.inductor.compile_inner(module, values)(list(given))
    torch.testing.assert_close(tuple(got), want)
    torch.testing.assert_close(given, inputs(dtype), rtol=0, atol=0)


def test_gradients_of_matrices_are_summed_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_MICROBATCHES", "4")
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 4)).double()
    x = torch.randn(8, 16, dtype=torch.float64)
    plan = fxpar.plan(model, x, mesh="dp=1", grad=True, mode="propagate")
    calls = [n.target for n in plan.result.local.nodes]
    # Of two weights; those of the biases are sums of no product.
    assert calls.count(ours.accumulate_product.default) == 2 * 3
    assert calls.count(ours.accumulate.default) == 2 * 3
    (got, gradients), (want, of_one) = plan.simulate(x), plan.reference(x)
    torch.testing.assert_close((got, gradients), (want, of_one))
