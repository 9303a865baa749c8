"""Gradients of a convolution's weight run beside what is sent of its input's: the one
call that makes both is parted where that helps, and whole elsewhere.

Small graphs by hand, with equal results on every rank; and the backward of convolutions
that are split along space, in the order it runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxpar
from fxpar.passes.order import delay_work
from fxpar.passes.order.delay_work import delay
from fxpar.passes.order.forward_backward import as_run
from tests.helpers.sketch import REDUCE, Sketch, check_equal

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

BACKWARD = aten.convolution_backward.default
WHOLE, INPUT, WEIGHT = [True, True, False], [True, False, False], [False, True, False]


@pytest.fixture
def sketch() -> Sketch:
    return Sketch()


def gradients(sketch: Sketch, mask: list[bool] = WHOLE) -> list[fx.Node]:
    """Of a convolution: those of the mask."""
    g, x, w = (sketch.input(*shape) for shape in [(2, 3, 4, 4)] * 2 + [(3, 3, 3, 3)])
    bias = [3] if mask[2] else None
    settings = bias, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask
    call = sketch.rewriter.call(BACKWARD, g, x, w, *settings)
    asked = [i for i in range(3) if mask[i]]
    return [sketch.rewriter.call(operator.getitem, call, i) for i in asked]


def rows(sketch: Sketch, x: fx.Node, start: int) -> fx.Node:
    part = sketch.rewriter.call(aten.slice.Tensor, x, 2, start, start + 1)
    return sketch.call(aten.exp, part)


def begun(sketch: Sketch, x: fx.Node, group: str = "fxpar:dp") -> fx.Node:
    return sketch.call(REDUCE, x, "sum", group)


def waited(sketch: Sketch, node: fx.Node) -> fx.Node:
    return sketch.call(c10d.wait_tensor, node)


def masks(graph: fx.Graph) -> list[Any]:
    """What each backward of a convolution makes, in order."""
    calls = graph.find_nodes(op="call_function", target=BACKWARD)
    return [call.args[-1] for call in calls]


def delayed(sketch: Sketch) -> list[str]:
    """The order after, whose numbers are those before, to the last bit."""
    want = sketch.run()
    delay(sketch.graph)
    check_equal(sketch.run(), want)
    return [name.replace("convolution_", "") for name in sketch.order()]


def test_the_weights_gradient_runs_beside_a_small_message(sketch: Sketch) -> None:
    """The one call held all that its halves read, whatever is sent."""
    dx, dw = gradients(sketch)
    sketch.output(dw, dx, waited(sketch, begun(sketch, rows(sketch, dx, 0))))
    assert delayed(sketch) == [
        *("backward", "getitem", "slice_tensor", "exp", "reduce"),
        *("backward_1", "getitem_1", "wait"),
    ]
    assert masks(sketch.graph) == [INPUT, WEIGHT]


def test_all_messages_start_before_it(sketch: Sketch) -> None:
    dx, dw = gradients(sketch)
    one, two = (begun(sketch, rows(sketch, dx, i)) for i in (0, 3))
    sketch.output(dw, waited(sketch, one), waited(sketch, two))
    assert (
        delayed(sketch)[-7:]
        == [
            *("reduce", "slice_tensor_1", "exp_1", "reduce_1"),
            *("backward_1", "getitem_1", "wait", "wait_1"),
        ][-7:]
    )


def test_the_biases_gradient_goes_with_it(sketch: Sketch) -> None:
    dx, dw, db = gradients(sketch, [True, True, True])
    made = sketch.call(aten.sin, db)
    sketch.output(made, dw, waited(sketch, begun(sketch, rows(sketch, dx, 0))))
    assert delayed(sketch)[-5:] == [
        *("backward_1", "getitem_1", "getitem_2", "sin", "wait")
    ]
    assert masks(sketch.graph) == [INPUT, [False, True, True]]


def needs_the_weights(sketch: Sketch) -> None:
    dx, dw = gradients(sketch)
    sketch.output(dx, waited(sketch, begun(sketch, dw)))


def sends_the_weights_first(sketch: Sketch) -> None:
    """Collectives keep their order."""
    dx, dw = gradients(sketch)
    first = begun(sketch, dw, "fxpar:tp")
    second = waited(sketch, begun(sketch, dx))
    sketch.output(second, waited(sketch, first))


def has_work_beside(sketch: Sketch) -> None:
    dx, dw = gradients(sketch)
    a, b = sketch.input(4, 4), sketch.input(4, 4)
    first = begun(sketch, dx)
    product = sketch.call(aten.mm, a, b)
    sketch.output(dw, product, waited(sketch, first))


def makes_one(sketch: Sketch) -> None:
    (dx,) = gradients(sketch, INPUT)
    sketch.output(waited(sketch, begun(sketch, rows(sketch, dx, 0))))


@pytest.mark.parametrize(
    "draw",
    [needs_the_weights, sends_the_weights_first, has_work_beside, makes_one],
)
def test_what_stays_one_call(sketch: Sketch, draw: Callable[[Sketch], None]) -> None:
    draw(sketch)
    before, was = str(sketch.graph), masks(sketch.graph)
    delayed(sketch)
    assert str(sketch.graph) == before
    assert masks(sketch.graph) == was
    (call,) = sketch.graph.find_nodes(op="call_function", target=BACKWARD)
    assert [value is not None for value in call.meta["val"]] == was[0]


def test_what_is_given_as_one_stays_one_call(sketch: Sketch) -> None:
    """A part of a graph whose rest reads the gradient of the weight."""
    dx, _ = gradients(sketch)
    sketch.output(dx.args[0], waited(sketch, begun(sketch, rows(sketch, dx, 0))))
    before = str(sketch.graph)
    delay(sketch.graph)
    assert str(sketch.graph) == before


def test_parted_and_joined_is_as_it_was(sketch: Sketch) -> None:
    sketch.output(*gradients(sketch, [True, True, True]))
    (call,) = sketch.graph.find_nodes(op="call_function", target=BACKWARD)
    before, value, want = str(sketch.graph), call.meta["val"], sketch.run()
    half = delay_work.part(call)
    assert masks(sketch.graph) == [INPUT, [False, True, True]]
    check_equal(sketch.run(), want)
    delay_work.join(call, half)
    assert str(sketch.graph) == before
    assert all(a is b for a, b in zip(call.meta["val"], value, strict=True))


# Convolutions split along space


class Net(nn.Module):
    def __init__(self, dims: int = 2, **last: Any) -> None:
        super().__init__()
        conv = nn.Conv2d if dims == 2 else nn.Conv3d
        self.first = conv(2, 3, 3, padding=1)
        self.second = conv(3, 3, 5, padding=2)
        self.last = conv(3, 2, 3, **{"padding": 1, **last})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.last(x).square().mean()


SPLIT: dict[str, tuple[int, dict[str, Any], tuple[int, ...], str]] = {
    "plain": (2, {}, (1, 2, 16, 6), "h=2"),
    "volume": (3, {}, (1, 2, 8, 4, 4), "h=2"),
    "stride": (2, {"stride": 2}, (1, 2, 16, 6), "h=2"),
    "dilation": (2, {"dilation": 2, "padding": 2}, (1, 2, 16, 6), "h=2"),
    "shards smaller than the halo": (2, {}, (1, 2, 4, 6), "h=4"),
    "uneven": (2, {}, (1, 2, 13, 6), "h=3"),
}


def planned(name: str) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    dims, last, shape, mesh = SPLIT[name]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    options = {"mode": "propagate", "schedule": "none", "grad": True}
    lie = tuple("h" if d == 2 else None for d in range(len(shape)))
    model = Net(dims, **last).double()
    return fxpar.plan(model, x, mesh=mesh, in_specs=[lie], **options), x


def beside_halos(graph: fx.Graph) -> list[list[str]]:
    """From the first permute of each halo of a gradient to its first reader: what is
    sent, and what is computed."""
    names = {torch.ops.fxpar.permute.default: "permute", BACKWARD: "backward"}
    names[torch.ops.fxpar.move_rows.default] = "permute"
    nodes = [n for n in graph.nodes if n.meta.get("partitioner_tag") == "is_backward"]
    out, at = [], 0
    while at < len(nodes):
        if names.get(nodes[at].target) == "permute":
            reader = min(nodes[at].users)
            end = nodes.index(reader) if reader in nodes else len(nodes)
            between = [names.get(node.target) for node in nodes[at:end]]
            out.append([name for name in between if name])
            at = end
        at += 1
    return out


@pytest.mark.parametrize("name", SPLIT)
def test_halos_of_a_gradient_start_before_the_weights(name: str) -> None:
    plan, x = planned(name)
    run = beside_halos(as_run(plan.result.local))
    assert len(run) >= 2
    for found in run:
        assert found == [*["permute"] * (len(found) - 1), "backward"]
    whole = beside_halos(as_run(plan.result.local, disable=("delay",)))
    assert all("backward" not in found for found in whole)
    result = replace(plan.result, graph=as_run(plan.result.local))
    got, want = replace(plan, result=result).outcome(x), plan.reference_outcome(x)
    torch.testing.assert_close(got.result, want.result, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-9, atol=1e-9)
