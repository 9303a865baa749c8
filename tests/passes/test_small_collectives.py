"""Small collectives of inputs start first, and what only the caller reads is waited for
last: what moves, and what must not.

Small graphs by hand, in order before and after, with equal results on every rank; and a
loss with ignored labels, as a training step runs it.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxpar
from fxpar.graph.pipeline_ops import MESSAGES
from fxpar.passes.order.bucket_collectives import LARGEST
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.order.order_collectives import start_first, wait_last
from fxpar.passes.simulate.launches import KINDS, WAIT, crossings
from fxpar.sharding.cost.op import is_contraction
from fxpar.sharding.program import PHASE
from tests.helpers.sketch import REDUCE, Sketch, check_equal

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@pytest.fixture
def sketch() -> Sketch:
    return Sketch()


def after(sketch: Sketch, run: Any) -> list[str]:
    """The order after, whose numbers are those before."""
    want = sketch.run()
    run(sketch.graph)
    check_equal(sketch.run(), want)
    return sketch.order()


def counted(sketch: Sketch, of: Any) -> fx.Node:
    """A reduction of how many are above zero."""
    count = sketch.call(aten.sum, sketch.call(aten.relu, of))
    return sketch.call(REDUCE, count, "sum", "fxpar:dp")


def two_sums(names: tuple[str, str]) -> fx.Graph:
    """Sums over ranks of two values of one size, for these ops, in this order."""
    sketch = Sketch()
    for name in names:
        launch = sketch.call(REDUCE, sketch.input(4, 4), "sum", "fxpar:dp")
        launch.meta["fxpar_origin"] = name
    return sketch.graph


def test_ranks_that_start_equal_sums_in_another_order_differ() -> None:
    here, there = (crossings(two_sums(names)) for names in (("a", "b"), ("b", "a")))
    assert len(here) == 2 and here != there and sorted(here) == sorted(there)
    assert here == crossings(two_sums(("a", "b")))
    # Places may run other programs, which name their ops otherwise.
    graphs = two_sums(("a", "b")), two_sums(("b", "a"))
    here, there = (crossings(graph, among=list(graph.nodes)) for graph in graphs)
    assert len(here) == 2 and here == there


def test_a_count_of_an_input_starts_first(sketch: Sketch) -> None:
    x, w, labels = (sketch.input(4, 4) for _ in range(3))
    y = sketch.call(aten.mm, x, w)
    count = sketch.call(c10d.wait_tensor, counted(sketch, labels))
    sketch.output(sketch.call(aten.maximum, y, count))
    assert after(sketch, start_first) == [
        *("relu", "sum", "reduce", "mm", "wait", "maximum"),
    ]


def test_a_count_starts_after_all_inputs(sketch: Sketch) -> None:
    """Ops with effects, as checks of solvers are, have a call between the inputs."""
    zeros = sketch.call(aten.zeros, [4, 4])
    x, labels = (sketch.input(4, 4) for _ in range(2))
    y = sketch.call(aten.mm, x, x)
    count = sketch.call(c10d.wait_tensor, counted(sketch, labels))
    sketch.output(sketch.call(aten.maximum, y, count), zeros)
    assert after(sketch, start_first) == [
        *("zeros", "relu", "sum", "reduce", "mm", "wait", "maximum"),
    ]
    sketch.graph.lint()


def test_not_of_what_work_made(sketch: Sketch) -> None:
    x, w = (sketch.input(4, 4) for _ in range(2))
    y = sketch.call(aten.mm, x, w)
    sketch.output(sketch.call(c10d.wait_tensor, counted(sketch, y)))
    before = sketch.order()
    assert after(sketch, start_first) == before


def test_not_of_what_another_collective_made(sketch: Sketch) -> None:
    x, w, labels = (sketch.input(4, 4) for _ in range(3))
    y = sketch.call(aten.mm, x, w)
    one = sketch.call(c10d.wait_tensor, counted(sketch, labels))
    other = sketch.call(c10d.wait_tensor, counted(sketch, one))
    sketch.output(y, other)
    assert after(sketch, start_first)[:4] == ["relu", "sum", "reduce", "mm"]


def test_not_what_is_written_to_before(sketch: Sketch) -> None:
    x, w, labels = (sketch.input(4, 4) for _ in range(3))
    y = sketch.call(aten.mm, x, w)
    sketch.call(aten.copy_, labels, y)
    sketch.output(sketch.call(c10d.wait_tensor, counted(sketch, labels)))
    before = sketch.order()
    start_first(sketch.graph)
    assert sketch.order() == before


def test_not_what_holds_much(sketch: Sketch) -> None:
    x, w, labels = (sketch.input(400, 400) for _ in range(3))
    y = sketch.call(aten.mm, x, w)
    above = sketch.call(aten.relu, labels)
    count = sketch.call(REDUCE, sketch.call(aten.sum, above), "sum", "fxpar:dp")
    wait = sketch.call(c10d.wait_tensor, count)
    sketch.output(sketch.call(aten.maximum, sketch.call(aten.minimum, y, above), wait))
    before = sketch.order()
    assert after(sketch, start_first) == before


def test_not_on_shards_that_are_not_alike(sketch: Sketch) -> None:
    """By their sizes ranks would decide each for itself, and wait for each other."""
    x, w, labels = (sketch.input(4, 4) for _ in range(3))
    y = sketch.call(aten.mm, x, w)
    begun = counted(sketch, labels)
    begun.meta["custom"] = {LARGEST: 128}
    sketch.output(y, sketch.call(c10d.wait_tensor, begun))
    before = sketch.order()
    assert after(sketch, start_first) == before


def test_not_a_chunk(sketch: Sketch) -> None:
    """A schedule has put it where it is."""
    x, w, labels = (sketch.input(4, 4) for _ in range(3))
    y = sketch.call(aten.mm, x, w)
    begun = counted(sketch, labels)
    begun.meta["fxpar_chunk"] = True
    sketch.output(y, sketch.call(c10d.wait_tensor, begun))
    before = sketch.order()
    assert after(sketch, start_first) == before


def test_not_a_gather_of_a_parameter(sketch: Sketch) -> None:
    """``prefetch`` places these; all at the start would hold all parameters whole."""
    x, w, other = (sketch.input(4, 4) for _ in range(3))
    y = sketch.call(aten.mm, x, w)
    sketch.output(y, sketch.gather(other))
    before = sketch.order()
    assert after(sketch, start_first) == before


def test_not_beside_messages_of_stages(sketch: Sketch) -> None:
    """Another stage has another order: each would wait for the other."""
    x, w, labels = (sketch.input(4, 4) for _ in range(3))
    y = sketch.call(aten.mm, x, w)
    sent = sketch.graph.call_function(next(iter(MESSAGES)), (y,))
    sent.meta["val"] = y.meta["val"]
    sketch.output(sent, sketch.call(c10d.wait_tensor, counted(sketch, labels)))
    before = sketch.order()
    start_first(sketch.graph)
    wait_last(sketch.graph)
    assert sketch.order() == before


def test_a_constant_comes_along(sketch: Sketch) -> None:
    x, w, labels = (sketch.input(4, 4) for _ in range(3))
    y = sketch.call(aten.mm, x, w)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no module owns the graph
        constant = sketch.graph.get_attr("constant")
    constant.meta["val"] = labels.meta["val"]
    above = sketch.call(aten.maximum, labels, constant)
    count = sketch.call(REDUCE, sketch.call(aten.sum, above), "sum", "fxpar:dp")
    sketch.output(y, sketch.call(c10d.wait_tensor, count))
    start_first(sketch.graph)
    assert sketch.order() == ["maximum", "sum", "reduce", "mm", "wait"]


def test_a_loss_is_waited_for_last(sketch: Sketch) -> None:
    x, w = (sketch.input(4, 4) for _ in range(2))
    wait = sketch.call(c10d.wait_tensor, counted(sketch, x))
    loss = sketch.call(aten.neg, wait)
    sketch.output(loss, sketch.call(aten.mm, x, w))
    assert after(sketch, wait_last) == [
        *("relu", "sum", "reduce", "mm", "wait", "neg"),
    ]


def test_not_what_work_reads(sketch: Sketch) -> None:
    x, w = (sketch.input(4, 4) for _ in range(2))
    wait = sketch.call(c10d.wait_tensor, counted(sketch, x))
    loss = sketch.call(aten.neg, wait)
    sketch.output(loss, sketch.call(aten.mm, sketch.call(aten.maximum, x, wait), w))
    order = after(sketch, wait_last)
    assert order.index("wait") < order.index("maximum") < order.index("mm")
    assert order[-1] == "neg"


def test_not_what_holds_much_until_the_end(sketch: Sketch) -> None:
    x, w = (sketch.input(400, 400) for _ in range(2))
    begun = sketch.call(REDUCE, x, "sum", "fxpar:dp")
    wait = sketch.call(c10d.wait_tensor, begun)
    loss = sketch.call(aten.sum, wait)
    sketch.output(loss, sketch.call(aten.mm, x, w))
    before = sketch.order()
    assert after(sketch, wait_last) == before


def test_not_the_update(sketch: Sketch) -> None:
    """A step counter that a reduction scales stays with the update."""
    x, w = (sketch.input(4, 4) for _ in range(2))
    wait = sketch.call(c10d.wait_tensor, counted(sketch, x))
    counter = sketch.call(aten.neg, wait)
    counter.meta["custom"] = {PHASE: "update"}
    sketch.output(counter, sketch.call(aten.mm, x, w))
    before = sketch.order()
    assert after(sketch, wait_last) == before


def test_not_what_is_no_scalar(sketch: Sketch) -> None:
    """A gradient and what is fused with its reduction stay together."""
    x, w = (sketch.input(4, 4) for _ in range(2))
    wait = sketch.call(c10d.wait_tensor, sketch.call(REDUCE, x, "sum", "fxpar:dp"))
    sketch.output(sketch.call(aten.neg, wait), sketch.call(aten.mm, x, w))
    before = sketch.order()
    assert after(sketch, wait_last) == before


class Head(nn.Module):
    """Two linear layers, and the mean loss of the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 12)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.outer(self.inner(x).relu())
        return nn.functional.cross_entropy(logits, labels)


def test_a_forward_counts_labels_beside_its_work() -> None:
    x, labels = torch.randn(8, 8, dtype=torch.float64), torch.randint(12, (8,))
    labels[5] = -100
    model = Head().double()
    plan = fxpar.plan(
        model, x, labels, mesh="dp=4", hints={"x": ("dp", None), "labels": ("dp",)}
    )
    torch.testing.assert_close(
        plan.simulate(x, labels), plan.reference(x, labels), rtol=1e-12, atol=0
    )
    graph = as_run(plan.result.local)
    nodes = list(graph.nodes)
    work = [i for i, n in enumerate(nodes) if is_contraction(n.target)]
    starts = [i for i, n in enumerate(nodes) if n.target in KINDS]
    waits = [i for i, n in enumerate(nodes) if n.target is WAIT]
    assert starts[0] < work[0], [n.name for n in nodes]
    assert waits[0] > work[0]
