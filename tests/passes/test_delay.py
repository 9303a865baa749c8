"""Work that can wait runs beside a collective: which moves, and which must not.

Small graphs by hand, in order before and after, with equal results on every rank; and
the backward of two tensor-parallel layers in the order it runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxpar
from fxpar.passes.order.delay_work import delay
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.simulate.launches import WAIT
from tests.helpers.sketch import GATHER, REDUCE, Sketch, check_equal

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@pytest.fixture
def sketch() -> Sketch:
    return Sketch()


def delayed(sketch: Sketch) -> list[str]:
    """The order after, whose numbers are those before."""
    want = sketch.run()
    delay(sketch.graph)
    check_equal(sketch.run(), want)
    return sketch.order()


def linear(sketch: Sketch, g: Any, x: Any, w: Any) -> tuple[fx.Node, fx.Node]:
    """The backward of x @ w, the weight's gradient first: as autograd has it."""
    dw = sketch.call(aten.mm, sketch.call(aten.t, x), g)
    return dw, sketch.call(aten.mm, g, sketch.call(aten.t, w))


def test_gradients_of_weights_run_beside_an_all_reduce(sketch: Sketch) -> None:
    g, x, w = (sketch.input(4, 4) for _ in range(3))
    dw, dx = linear(sketch, g, x, w)
    y = sketch.reduce(dx)
    dw2, dx2 = linear(sketch, y, x, w)
    sketch.output(dw, dw2, sketch.reduce(dx2))
    assert delayed(sketch) == [
        *("t_1", "mm_1", "reduce", "t", "mm", "wait"),
        *("t_3", "mm_3", "reduce_1", "t_2", "mm_2", "wait_1"),
    ]


def test_back_to_the_last_wait_only(sketch: Sketch) -> None:
    """What is before it would be held for longer than from one wait to the next."""
    g, x, w = (sketch.input(4, 4) for _ in range(3))
    begun = sketch.call(REDUCE, w, "sum", "fxpar:dp")
    early = sketch.call(aten.mm, g, x)
    y = sketch.call(c10d.wait_tensor, begun)
    sketch.output(early, sketch.reduce(sketch.call(aten.sin, y)))
    assert delayed(sketch) == ["reduce", "mm", "wait", "sin", "reduce_1", "wait_1"]


def test_not_where_work_is_beside_already(sketch: Sketch) -> None:
    g, x, w = (sketch.input(4, 4) for _ in range(3))
    dw, dx = linear(sketch, g, x, w)
    begun = sketch.call(REDUCE, dx, "sum", "fxpar:dp")
    other = sketch.call(aten.mm, x, w)
    sketch.output(dw, other, sketch.call(c10d.wait_tensor, begun))
    before = sketch.order()
    assert delayed(sketch) == before


def test_not_beside_a_gather_of_parameters(sketch: Sketch) -> None:
    """It could have begun before: ``prefetch`` says when."""
    g, x, w, wide = *(sketch.input(4, 4) for _ in range(3)), sketch.input(4, 8)
    dw = sketch.call(aten.mm, x, g)
    y = sketch.call(aten.mm, wide, sketch.gather(w))
    z = sketch.call(aten.mm, wide, sketch.gather(sketch.call(aten.sin, g)))
    sketch.output(dw, y, z)
    assert delayed(sketch) == [
        *("mm", "gather", "wait"),
        *("sin", "gather_1", "mm_1", "wait_1", "mm_2"),
    ]


def test_light_work_alone_stays(sketch: Sketch) -> None:
    x = sketch.input(4, 4)
    light = sketch.call(aten.sin, x)
    sketch.output(light, sketch.reduce(sketch.call(aten.exp, x)))
    before = sketch.order()
    assert delayed(sketch) == before


def test_once_only(sketch: Sketch) -> None:
    """Beside two that are under way together, behind the start of both."""
    g, x, w = (sketch.input(4, 4) for _ in range(3))
    dw = sketch.call(aten.mm, x, g)
    computed = [sketch.call(aten.sin, n) for n in (w, g)]
    one = sketch.call(REDUCE, computed[0], "sum", "fxpar:dp")
    two = sketch.call(REDUCE, computed[1], "sum", "fxpar:tp")
    ends = [sketch.call(c10d.wait_tensor, n) for n in (one, two)]
    sketch.output(dw, *ends)
    assert delayed(sketch) == [
        *("sin", "sin_1", "reduce", "reduce_1", "mm", "wait", "wait_1")
    ]


def test_a_schedules_chunks_stay(sketch: Sketch) -> None:
    g, x, w = (sketch.input(4, 4) for _ in range(3))
    dw, dx = linear(sketch, g, x, w)
    y = sketch.reduce(dx)
    y.args[0].meta["fxpar_chunk"] = True
    sketch.output(dw, y)
    before = sketch.order()
    assert delayed(sketch) == before


def drawn(sketch: Sketch, x: fx.Node) -> fx.Node:
    return sketch.rewriter.call(aten.rand_like.default, x)


def communicated(sketch: Sketch, x: fx.Node) -> fx.Node:
    return sketch.call(GATHER, x, 2, "fxpar:dp")


def checked(sketch: Sketch, x: fx.Node) -> fx.Node:
    whole = sketch.rewriter.call(aten.any.default, x)
    sketch.rewriter.call(aten._functional_assert_async.msg, whole, "no", whole)
    return whole


def shipped(sketch: Sketch, x: fx.Node) -> fx.Node:
    """A product that communicates."""
    call, group = sketch.rewriter.call, "fxpar:tp"
    return call(torch.ops.fxpar.matmul_scatter.default, x, x, "sum", 0, 2, group)


@pytest.mark.parametrize("make", [drawn, communicated, checked, shipped])
def test_what_keeps_its_place(
    sketch: Sketch, make: Callable[[Sketch, fx.Node], fx.Node]
) -> None:
    """And what it reads; not what reads it."""
    g, x, w = (sketch.input(4, 4) for _ in range(3))
    product = sketch.call(aten.mm, x, w)
    kept = make(sketch, product)
    after = sketch.call(aten.mm, g, g)
    sketch.output(after, kept, sketch.reduce(sketch.call(aten.sin, x)))
    delay(sketch.graph)
    nodes = [n for n in sketch.graph.nodes if n.op == "call_function"]
    (reduce,) = sketch.graph.find_nodes(op="call_function", target=REDUCE.default)
    assert nodes.index(product) < nodes.index(kept) < nodes.index(reduce)
    assert nodes[nodes.index(reduce) + 1] is after


def test_results_of_several_move_with_what_makes_them(sketch: Sketch) -> None:
    """A tuple's elements, and views, go where it goes."""
    x, w, y = (sketch.input(4, 4) for _ in range(3))
    call = sketch.rewriter.call
    product = sketch.call(aten.mm, x, w)
    parts = call(aten.split.Tensor, product, 2)
    first = call(operator.getitem, parts, 0)
    first = sketch.call(aten.exp, first)
    sketch.output(first, sketch.reduce(sketch.call(aten.sin, y)))
    assert delayed(sketch) == [
        *("sin", "reduce", "mm", "split_tensor", "getitem", "exp", "wait")
    ]


def test_nothing_moves_past_a_write(sketch: Sketch) -> None:
    """What is before it reads what was there before."""
    x, buffer, w = (sketch.input(4, 4) for _ in range(3))
    y = sketch.call(aten.mm, x, buffer)
    sketch.rewriter.call(aten.copy_.default, buffer, w)
    sketch.output(y, sketch.reduce(sketch.call(aten.sin, x)))
    before = sketch.order()
    assert delayed(sketch) == before == ["mm", "copy_", "sin", "reduce", "wait"]


def test_what_else_reads_an_all_reduces_operand_stays(sketch: Sketch) -> None:
    """So that it can be done in place. That of a gather is only read."""
    x, w = sketch.input(4, 4), sketch.input(4, 4)
    part = sketch.call(aten.exp, x)
    seen = sketch.call(aten.mm, sketch.call(aten.t, part), w)
    other = sketch.call(aten.mm, x, w)
    sketch.output(seen, other, sketch.reduce(part))
    assert delayed(sketch) == ["exp", "t", "mm", "reduce", "mm_1", "wait"]


def test_a_region_of_a_schedule_waits_inside(sketch: Sketch) -> None:
    x, w = sketch.input(4, 4), sketch.input(4, 4)
    product = sketch.call(aten.mm, x, w)
    y = sketch.reduce(sketch.call(aten.sin, x))
    y.args[0].meta["custom"] = {"fxpar_region": "r"}
    sketch.output(product, y)
    before = sketch.order()
    assert delayed(sketch) == before


def test_a_product_that_communicates_is_work_beside(sketch: Sketch) -> None:
    x, w = sketch.input(4, 4), sketch.input(4, 4)
    product = sketch.call(aten.mm, x, w)
    begun = sketch.call(REDUCE, sketch.call(aten.sin, x), "sum", "fxpar:dp")
    other = shipped(sketch, w)
    sketch.output(product, other, sketch.call(c10d.wait_tensor, begun))
    before = sketch.order()
    delay(sketch.graph)
    assert sketch.order() == before


@pytest.mark.parametrize(("rows", "count"), [(16, 12), (2, 4)])
def test_little_is_held_for_longer(sketch: Sketch, rows: int, count: int) -> None:
    """The nearest are moved, while what they read is little beside what is reduced."""
    h, c = sketch.input(8, 4), sketch.input(4, 4)
    made = []
    for _ in range(12):
        h = sketch.call(aten.mm, sketch.call(aten.sin, h), c)
        made.append(sketch.call(aten.mm, sketch.call(aten.t, h), h))
    part = sketch.rewriter.call(aten.repeat.default, h, [2, 1])
    part = sketch.rewriter.call(aten.slice.Tensor, part, 0, 0, rows)
    sketch.output(*made, sketch.reduce(sketch.call(aten.exp, part)))
    delayed(sketch)
    names = sketch.order()
    later = [n for n in names[names.index("reduce") :] if n.startswith("mm")]
    assert later == [n.name.replace("_default", "") for n in made[-count:]]


# A model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(16, 32, bias=False),
            nn.Linear(32, 16, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) + x


def beside(graph: fx.Graph) -> list[int]:
    """For each all-reduce the products that run before it is waited for."""
    nodes = list(graph.nodes)
    out = []
    for at, node in enumerate(nodes):
        if node.target is REDUCE.default:
            end = next(i for i, n in enumerate(nodes) if n.target is WAIT and i > at)
            found = nodes[at:end]
            out.append(sum("mm" in str(n.target) for n in found))
    return out


@pytest.mark.parametrize("disable", [(), ("delay",)])
def test_a_tensor_parallel_backward(disable: tuple[str, ...]) -> None:
    """As Megatron-LM: the gradient of a block's input is reduced beside the products
    that make those of its weights."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    x = torch.randn(8, 16, requires_grad=True)
    hints = {"*up.weight": ("tp", None), "*down.weight": (None, "tp")}
    plan = fxpar.plan(
        model, x, mesh="tp=4", hints=hints, grad=True, mode="propagate", schedule="none"
    )
    found = beside(as_run(plan.result.local, disable=disable))
    forward, backward = found[:2], found[2:]
    assert forward == [0, 0]
    assert backward == ([0, 0] if disable else [2, 2])
