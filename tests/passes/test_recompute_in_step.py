"""The backward of a whole step computes light values again: the numbers are the same to
the bit, less is kept between the two, and what draws or multiplies matrices runs once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from fxpar.graph.builder import REGION
from fxpar.passes.order.order_collectives import recompute_in_step
from fxpar.sharding.cost.op import bytes_of
from fxpar.sharding.program import PHASE, phase_of
from tests.helpers.sketch import Sketch, check_equal

aten = torch.ops.aten
Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def gated(h: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * h


def dropped(h: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return h * gate * (torch.rand_like(h) > 0.5)


def chained(h: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """A view, several results, and a value that the backward reads twice."""
    h, gate = torch.cat([h, gate], -1).chunk(2, -1)
    return (h.sin() * gate.cos()).mT.tanh().mT * h.sin()


def step_of(layer: Layer) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The forward and the backward of a layer between products, in one graph."""
    torch.manual_seed(0)
    shapes = ((8, 16), (16, 32), (16, 32), (32, 16))
    inputs = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]

    def forward(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        up, gate, down = weights
        return (layer(x @ up, x @ gate) @ down).square().sum()

    def step(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
        leaves = [w.detach().requires_grad_() for w in weights]
        loss = forward(x, *leaves)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    module = make_fx(step, decomposition_table={aten.silu_backward.default: silu_back})(
        *inputs
    )
    first = module.graph.find_nodes(op="call_function", target=aten.ones_like.default)
    phase = "forward"
    for node in module.graph.nodes:
        phase = "backward" if node in first else phase
        node.meta["custom"] = {PHASE: phase}
    return module, inputs


def silu_back(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x)
    return grad * s * (1 + x * (1 - s))


def kept(graph: fx.Graph) -> int:
    """Bytes that the backward reads of the forward."""
    late = [node for node in graph.nodes if phase_of(node) == "backward"]
    reads = {read for node in late for read in node.all_input_nodes}
    return sum(
        bytes_of(node)
        for node in reads
        if node.op == "call_function" and phase_of(node) == "forward"
    )


@pytest.mark.parametrize("layer", [gated, dropped, chained])
def test_light_values_are_computed_again(layer: Layer) -> None:
    module, inputs = step_of(layer)
    before, ops = kept(module.graph), Counter(n.target for n in module.graph.nodes)
    torch.manual_seed(1)
    want = module(*inputs)
    recompute_in_step(module.graph)
    module.recompile()
    torch.manual_seed(1)
    assert all(map(torch.equal, module(*inputs), want))
    assert kept(module.graph) < before
    after = Counter(n.target for n in module.graph.nodes)
    assert after > ops
    once = [op for op in ops if op in (aten.mm.default, aten.rand_like.default)]
    assert once and all(after[op] == ops[op] for op in once)


def test_what_draws_is_not_repeated() -> None:
    """Numbers that are drawn again are others, whatever a checkpoint says."""
    module, inputs = step_of(dropped)
    (draw,) = module.graph.find_nodes(op="call_function", target=aten.rand_like.default)
    for node in (draw, *draw.users):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    torch.manual_seed(1)
    want = module(*inputs)
    recompute_in_step(module.graph)
    module.recompile()
    torch.manual_seed(1)
    assert all(map(torch.equal, module(*inputs), want))


def sketched(
    build: Callable[[Sketch, fx.Node], tuple[fx.Node, fx.Node]],
) -> list[str]:
    """Names of the calls after the pass, of a step that multiplies by a light value,
    which its backward reads. ``build``: the value, and what else the backward reads."""
    sketch = Sketch()
    x = sketch.input(4, 4)
    value, grad = build(sketch, x)
    first = sketch.call(aten.mm, value, x)
    for node in sketch.graph.nodes:
        node.meta.setdefault("custom", {PHASE: "forward"})
    second = sketch.call(aten.maximum, sketch.call(aten.mm, grad, first), value)
    for node in (second, *second.all_input_nodes[:1]):
        node.meta["custom"] = {PHASE: "backward"}
    sketch.output(first, second)
    want = sketch.run()
    recompute_in_step(sketch.graph)
    check_equal(sketch.run(), want)
    return sketch.order()


@pytest.mark.parametrize("tagged", [True, False])
def test_a_collective_is_not_repeated(tagged: bool) -> None:
    """Nor is one in a checkpointed region, whose light values are."""

    def build(sketch: Sketch, x: fx.Node) -> tuple[fx.Node, fx.Node]:
        wait = sketch.reduce(x)
        value = sketch.call(aten.sin, wait)
        for node in (wait.args[0], wait, value) if tagged else ():
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        return value, x

    order = sketched(build)
    assert len([name for name in order if "reduce" in name]) == 1
    assert len([name for name in order if "sin" in name]) == 2


@pytest.mark.parametrize("mark", ["none", "chunk", "region"])
def test_what_a_schedule_placed_is_not_repeated(mark: str) -> None:
    def build(sketch: Sketch, x: fx.Node) -> tuple[fx.Node, fx.Node]:
        value = sketch.call(aten.sin, x)
        if mark == "chunk":
            value.meta["fxpar_chunk"] = True
        if mark == "region":
            value.meta["custom"] = {PHASE: "forward", REGION: "r0"}
        return value, x

    order = sketched(build)
    assert len([name for name in order if "sin" in name]) == (
        2 if mark == "none" else 1
    )


@pytest.mark.parametrize("written", ["x", "y"])
def test_what_reads_an_input_that_was_written_is_not_repeated(written: str) -> None:
    sketch = Sketch()
    x, y = sketch.input(4, 4), sketch.input(4, 4)
    value = sketch.call(aten.sin, x)
    first = sketch.call(aten.mm, value, y)
    write = sketch.call(aten.copy_, x if written == "x" else y, first)
    for node in (value, first, write):
        node.meta["custom"] = {PHASE: "forward"}
    second = sketch.call(aten.maximum, first, value)
    second.meta["custom"] = {PHASE: "backward"}
    sketch.output(first, second)
    want = sketch.run()
    recompute_in_step(sketch.graph)
    sines = [name for name in sketch.order() if "sin" in name]
    assert len(sines) == (1 if written == "x" else 2)
    check_equal(sketch.run(), want)


def test_writes_at_the_end_are_behind_all_that_is_repeated() -> None:
    sketch = Sketch()
    x, y = sketch.input(4, 4), sketch.input(4, 4)
    value = sketch.call(aten.sin, x)
    first = sketch.call(aten.mm, value, y)
    grad = sketch.call(aten.maximum, first, value)
    writes = sketch.call(aten.copy_, x, grad), sketch.call(aten.copy_, y, first)
    for node in (value, first):
        node.meta["custom"] = {PHASE: "forward"}
    for node in (grad, *writes):
        node.meta["custom"] = {PHASE: "update"}
    sketch.output(*writes)
    want = sketch.run()
    recompute_in_step(sketch.graph)
    assert len([name for name in sketch.order() if "sin" in name]) == 2
    check_equal(sketch.run(), want)


def test_a_forward_alone_stays() -> None:
    module, _ = step_of(gated)
    for node in module.graph.nodes:
        del node.meta["custom"]
    before = str(module.graph)
    recompute_in_step(module.graph)
    assert str(module.graph) == before
