"""Layers of whole steps, and of models whose parameters rest sharded, are traced once:
the graphs are those of tracing each, where layers do more than give new tensors too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxpar
from fxpar import _torch, compilation
from fxpar.compilation import Compilation
from fxpar.features.train_step import step as step_module
from fxpar.passes.repeated_segments import kept_values, repeated_segments
from tests.helpers.patched import needs_patches
from tests.helpers.traced_graphs import (
    LAYERS,
    WIDTH,
    Capture,
    Captured,
    chain,
    check,
    same,
)
from tests.helpers.wrapper import fake_group

Tensor = torch.Tensor

pytestmark = needs_patches


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    """A layer whose parameters have shapes of their own, and what else it does."""

    def __init__(self, number: int, part: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.number, self.part = number, part
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = chain(self.down(self.up(x).relu()))
        return x + self.part(self, h)


class Stack(nn.Module):
    def __init__(self, part: Callable[[Any, Tensor], Tensor], layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(i, part) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def plain(layer: Any, h: Tensor) -> Tensor:
    return h


def dropped(layer: Any, h: Tensor) -> Tensor:
    return F.dropout(h, 0.3)


def normed(layer: Any, h: Tensor) -> Tensor:
    """Writes to buffers."""
    return layer.norm(h)


def counted(layer: Any, h: Tensor) -> Tensor:
    layer.count.add_(1)
    return h * layer.count


def numbered(layer: Any, h: Tensor) -> Tensor:
    """Has a setting of its own."""
    return h * (layer.number + 0.5)


def hooked(layer: Any, h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: gradient * 2)
    return h


def viewed(layer: Any, h: Tensor) -> Tensor:
    return h.view(2, -1).view(h.shape)


# Graphs that were found to have kinds: the forward, then the whole step.
Kinds = list[list[Any]]


def step_graphs(
    model: nn.Module, make: Any, *, once: bool, calls: int = 1, **how: Any
) -> tuple[list[fx.Graph], Kinds]:
    """What is traced of a step by itself, and of that by AOTAutograd."""
    graphs: list[fx.Graph] = []
    kinds: Kinds = []
    compile_fx = _torch.aot.compile_fx

    def find(gm: fx.GraphModule) -> list[Any]:
        kinds.append(repeated_segments(gm) if once else [])
        return kinds[-1]

    def compiled(gm: fx.GraphModule, *args: Any, **options: Any) -> Any:
        graphs.append(gm.graph)
        return compile_fx(gm, *args, **options)

    def joint_pass(self: Any, gm: fx.GraphModule) -> None:
        graphs.append(gm.graph)
        raise Captured

    torch._dynamo.reset()
    options = {"codegen": "eager"}
    loss = lambda model, x: model(x)  # noqa: E731
    run = fxpar.train_step(
        model, loss, make(model.parameters()), options=options, **how
    )
    run.calls = calls - 1
    with (
        mock.patch.object(compilation, "repeated_segments", find),
        mock.patch.object(step_module, "repeated_segments", find),
        mock.patch.object(_torch.aot, "compile_fx", compiled),
        mock.patch.object(Compilation, "__call__", joint_pass),
        pytest.raises(Captured),
    ):
        run(torch.ones(4, WIDTH))
    return graphs, kinds


def copied(kinds: list[Any]) -> int:
    return sum(len(kind.segments) - 1 for kind in kinds if not kind.refused)


def check_step(part: Any, make: Any, layers: int = LAYERS, **how: Any) -> Kinds:
    model = Stack(part, layers)
    graphs, _ = step_graphs(model, make, once=False, **how)
    others, kinds = step_graphs(model, make, once=True, **how)
    for each, other in zip(graphs, others, strict=True):
        same(each, other)
    return kinds


def momentum(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


@pytest.mark.parametrize(
    "part",
    [plain, *(pytest.param(p, marks=pytest.mark.slow) for p in (dropped, viewed))],
)
def test_layers_of_a_step(part: Any) -> None:
    forward, step = check_step(part, momentum)
    assert copied(forward) == LAYERS - 2  # the first has no gradient to give
    assert not any(kind.refused for kind in step)
    # Layers of the forward and of the backward, and of the update what writes.
    assert copied([kind for kind in step if not kind.written]) >= 2 * (LAYERS - 2)
    assert any(kind.written for kind in step)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"clip": 1.0}, marks=pytest.mark.slow),
        {"accumulate": 2, "calls": 2},
        pytest.param({"scaler": torch.amp.GradScaler("cpu")}, marks=pytest.mark.slow),
    ],
    ids=["clip", "accumulate", "scaler"],
)
def test_gradients_of_a_step(how: dict[str, Any]) -> None:
    forward, _ = check_step(plain, momentum, **how)
    assert copied(forward) == LAYERS - 2  # the first has no gradient to give


_MORE = [
    pytest.param(part, marks=pytest.mark.slow) for part in (normed, counted, numbered)
]


@pytest.mark.slow
@pytest.mark.parametrize("part", [hooked, *_MORE])
def test_layers_of_a_step_that_are_traced_each(part: Any) -> None:
    forward, _ = check_step(part, momentum)
    assert copied(forward) == 0


def flat(fn: Any, *args: Tensor, once: bool) -> tuple[fx.Graph, list[Any]]:
    """What AOTAutograd traces of a graph that writes in place, and kinds in it."""
    mode = _torch.fake.new_fake_mode(symbols=True)
    fakes = [_torch.fake.as_fake(x, mode) for x in args]
    gm = _torch.aot.trace_flat(fn, fakes, mode)
    capture = Capture(once=once)
    with pytest.raises(Captured):
        capture.compile(gm, fakes)
    return capture.graphs[0], capture.kinds


def writing(x: Tensor, *states: Tensor) -> list[Tensor]:
    for state in states:
        state.mul_(0.5).add_(chain(x))
    return [x * 2]


def writing_twice(x: Tensor, state: Tensor) -> list[Tensor]:
    """To what the layer before wrote."""
    for _ in range(LAYERS):
        state.mul_(0.5).add_(chain(x))
    return [state * 2]


def writing_to_views(x: Tensor, *states: Tensor) -> list[Tensor]:
    for state in states:
        state[0].mul_(0.5).add_(chain(x)[0])
    return [x * 2]


def viewing(x: Tensor, *states: Tensor) -> list[Tensor]:
    """Views are read before what they are of is written."""
    views, out = [], x
    for state in states:
        out = chain(out @ state.t())
        views.append(state.t())
    for view in views:
        out = out + view
    for state in states:
        state.add_(chain(out))
    return [out]


def viewing_late(x: Tensor, *states: Tensor) -> list[Tensor]:
    """Views are read after what they are of is written."""
    views, out = [], x
    for state in states:
        out = chain(out @ state.t())
        views.append(state.t())
    for state in states:
        state.add_(1)
    for view in views:
        out = out + view
    return [out]


def writing_through(x: Tensor, *states: Tensor) -> list[Tensor]:
    """What is read is written by its views."""
    views, out = [], x
    for state in states:
        out = chain(out @ state.t())
        views.append(state.t())
    for view in views:
        view.add_(1)
    return [out, *(state.sum() for state in states)]


def giving_views(x: Tensor, *states: Tensor) -> list[Tensor]:
    """Views are results of the graph."""
    views, out = [], x
    for state in states:
        out = chain(out @ state.t())
        views.append(state.t())
    return [out, *views]


@pytest.mark.parametrize(
    "fn, is_copied",
    [
        (writing, True),
        (writing_twice, False),
        (writing_to_views, True),
        (viewing, True),
        (viewing_late, False),
        pytest.param(writing_through, False, marks=pytest.mark.slow),
        (giving_views, False),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_graphs_that_write(fn: Any, is_copied: bool) -> None:
    count = 2 if fn is writing_twice else LAYERS + 1
    args = [torch.ones(WIDTH, WIDTH) for _ in range(count)]
    each, _ = flat(fn, *args, once=False)
    once, kinds = flat(fn, *args, once=True)
    same(each, once)
    # Ops of ``chain``, with what stands around them.
    layers = [kind for kind in kinds if len(kind.segments[0]) > 5]
    assert layers
    assert (copied(layers) > 0) == is_copied


def test_what_lasts() -> None:
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        before, late = x.t(), x.view(-1)
        z = before * 2
        through = y.t()
        x.add_(1)
        x.mul_(2)
        through.add_(1)
        return [late * 2, z, x + y]

    mode = _torch.fake.new_fake_mode(symbols=True)
    fakes = [_torch.fake.as_fake(torch.ones(4, 4), mode) for _ in range(2)]
    graph = _torch.aot.trace_flat(fn, fakes, mode).graph
    lasting = {node.name for node in kept_values(graph)}
    assert {"t", "mul_"} <= lasting
    assert not {"view", "t_1", "add_", "arg0_1", "arg1_1"} & lasting


@pytest.mark.slow
def test_layers_of_parameters_at_rest() -> None:
    with fake_group(2):
        model = fxpar.shard(Stack(dropped, LAYERS), mesh="dp=2")
        check(model, torch.ones(4, WIDTH, requires_grad=True), copied=LAYERS - 1)


@pytest.mark.slow
@pytest.mark.parametrize("part", [normed, *_MORE])
def test_layers_of_parameters_at_rest_that_are_traced_each(part: Any) -> None:
    with fake_group(2):
        model = fxpar.shard(Stack(part, LAYERS), mesh="dp=2")
        check(model, torch.ones(4, WIDTH, requires_grad=True), copied=0)


@pytest.mark.slow
def test_layers_whose_parameters_rest_in_other_ways() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + chain(x @ self.w)

    model = nn.Sequential(*(Square() for _ in range(3 * LAYERS)))
    hints = {
        f"{i}.w": (None, "dp") if i % 2 else ("dp", None) for i in range(len(model))
    }
    with fake_group(2):
        model = fxpar.shard(model, mesh="dp=2", hints=hints)
        specs = [layer._parameters["w"].placements[0].dim for layer in model]
        assert specs == [i % 2 for i in range(len(model))]
        loss = lambda x: model(x).sum()  # noqa: E731
        assert check(loss, torch.ones(4, WIDTH, requires_grad=True), copied=None)
