"""A schedule's line ``fuse`` says what becomes one op, whatever the option says."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar import fusion
from fxpar.fusion.kernels import fuse_regions
from fxpar.fusion.kernels.fuse_regions import Fused, fuse_graph
from fxpar.runtime.calls import compiled_graph
from fxpar.runtime.steps import lowering_steps
from fxpar.sharding.plan import Plan
from tests.helpers.kernels.fused_graphs import (
    GROUP,
    ROWS,
    WIDTH,
    all_reduce,
    facts,
    lines,
    ops,
)
from tests.helpers.spawn import shared_pool

SQUARE = torch.zeros(WIDTH, WIDTH)
TALL = torch.zeros(ROWS, WIDTH)


def block(x: Any, w: Any, r: Any) -> Any:
    """Left to itself, all of it but the products is a region."""
    y = all_reduce(x @ w) + r
    return torch.tanh(y) @ w, y


def wide(x: Any, w: Any, r: Any) -> Any:
    """One that does not pay: what it makes is read again by ``cumsum``'s kernel."""
    return all_reduce(x @ w).cumsum(0) + r


def fused(f: Any, schedule: str, found: bool = False) -> tuple[fx.Graph, Fused]:
    traced = make_fx(f, tracing_mode="fake")(TALL, SQUARE, TALL)
    groups = {GROUP: ("tp",)}
    graph = fusion.apply(schedule, traced, "tp=2", groups=groups)
    known = facts("interpret")
    return graph, fuse_graph(graph, facts_of=lambda _: known, beyond_schedule=found)


def test_only_what_is_asked_for() -> None:
    graph, made = fused(block, "fuse([all_reduce, add])")
    assert lines(made) == [["all_reduce", "wait_tensor", "add"]]
    assert ops(graph) == ["mm", "region", "getitem", "tanh", "mm"]
    assert not made.unfused
    graph, made = fused(block, "fuse([all_reduce, add, tanh])", found=True)
    assert lines(made) == [["all_reduce", "wait_tensor", "add", "tanh"]]


def test_nothing_is_asked_for() -> None:
    graph, made = fused(block, "")
    assert made == Fused() and "region" not in ops(graph)
    _, made = fused(block, "", found=True)
    assert lines(made) == [["all_reduce", "wait_tensor", "add", "tanh"]]


def test_what_is_asked_for_need_not_pay() -> None:
    def read_again(x: Any, w: Any, r: Any) -> Any:
        return (all_reduce(x @ w) * 2).cumsum(-1) @ w

    assert not fused(read_again, "", found=True)[1].programs
    _, made = fused(read_again, "fuse([all_reduce, mul])")
    assert lines(made) == [["all_reduce", "wait_tensor", "mul"]]
    assert made.after >= made.before
    # What computes nothing is no region.
    _, made = fused(read_again, "fuse([all_reduce])")
    assert not made.programs and made.unfused


@pytest.mark.parametrize("found", [False, True])
def test_what_no_kernel_can_have_is_told(found: bool, caplog: Any) -> None:
    graph, made = fused(wide, "fuse([all_reduce, cumsum, add])", found)
    _, first, second = made.unfused
    assert "cumsum" in first and "no form in a generated kernel" in first
    assert "add" in second and "together with its collective" in second
    with caplog.at_level(logging.WARNING, "fxpar"):
        fuse_regions.say(made, "graph", 0)
    assert first in caplog.text


def test_it_may_wait_for_later_work() -> None:
    """Where nobody asks, a collective runs beside a product that could hide it."""

    def beside(x: Any, w: Any, r: Any) -> Any:
        y = all_reduce(x @ w)
        return y + r @ w

    assert not fused(beside, "", found=True)[1].programs
    graph, made = fused(beside, "fuse([all_reduce, add])")
    assert lines(made) == [["all_reduce", "wait_tensor", "add"]]
    assert ops(graph) == ["mm", "mm", "region", "getitem"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.down(torch.tanh(self.up(x))) + x)


HINTS = {"up.weight": ("tp", None), "up.bias": ("tp",), "down.weight": (None, "tp")}


def run(schedule: str) -> tuple[torch.Tensor, list[list[str]], str]:
    """A step's gradient, the regions' lines, and the plan as text."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    model, x = Block(), torch.randn(8, 16)
    options: dict[str, Any] = {"mesh": "tp=2", "hints": HINTS, "codegen": "eager"}
    options |= {"schedule": schedule}
    found: list[list[str]] = []
    kept = lowering_steps.fuse_graph

    def counting(*args: Any, **kwargs: Any) -> Fused:
        made = kept(*args, **kwargs)
        found.extend(lines(made))
        return made

    lowering_steps.fuse_graph = counting
    try:
        compiled = torch.compile(model, backend="fxpar", options=options)
        compiled(x).square().sum().backward()
    finally:
        lowering_steps.fuse_graph = kept
    assert model.up.weight.grad is not None
    plan = compiled_graph.plans()[-1]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        plan.save(file.name)
        assert Plan.load(file.name).regions == plan.regions
    return model.up.weight.grad, found, str(plan)


@pytest.mark.multiprocess
def test_training() -> None:
    pool = shared_pool(2)
    plain = pool.run(run, "none")
    schedule = "fuse([all_reduce, add_tensor_1, add_tensor_2, relu_default])"
    asked = pool.run(run, schedule)
    for (want, none, before), (gradient, found, after) in zip(
        plain, asked, strict=True
    ):
        assert not none and "region:" not in before
        assert [Counter(x) for x in found] == [
            Counter(["all_reduce", "wait_tensor", "add", "add_1", "relu"])
        ]
        torch.testing.assert_close(gradient, want, rtol=1e-6, atol=0)
        # The plan says how it runs and why so.
        (line,) = [x for x in after.splitlines() if x.startswith("region:")]
        assert "forward: 1 x fxpar::region all_reduce add relu" in line
        assert "one_shot: two shots carry no less between two ranks" in line


class Gated(Block):
    """Whose backward has an all-reduce behind the gradients of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.rms_norm(x, [16])
        return self.down(torch.tanh(self.gate(y)) * self.up(y)) + x


def regions(disable: list[str]) -> list[list[str]]:
    """Of two blocks, by the option."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    model, x = nn.Sequential(Gated(), Gated()), torch.randn(2, 4, 16)
    hints = {f"*{name}": spec for name, spec in HINTS.items()}
    hints["*gate.weight"] = ("tp", None)
    options: dict[str, Any] = {"mesh": "tp=2", "hints": hints, "codegen": "eager"}
    options |= {"schedule": "none", "fuse": "interpret", "disable": disable}
    options["plan"] = "propagate"
    found: list[list[str]] = []

    def counting(*args: Any, **kwargs: Any) -> Fused:
        made = fuse_graph(*args, **kwargs)
        found.extend(lines(made))
        return made

    with mock.patch.object(lowering_steps, "fuse_graph", counting):
        compiled = torch.compile(model, backend="fxpar", options=options)
        compiled(x.requires_grad_()).square().sum().backward()
    return found


@pytest.mark.multiprocess
def test_regions_come_before_work_is_put_beside_collectives() -> None:
    pool = shared_pool(2)
    without, found = pool.run(regions, ["delay"]), pool.run(regions, [])
    assert found == without and len(found[0]) == 4, "two of them in the backward"
