"""A backward that runs more than once: ``retain_graph=True``, two gradients of one
graph; as GANs weigh two losses by their gradients at the last layer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from tests.helpers.spawn import shared_pool
from tests.helpers.training import whole

pytestmark = pytest.mark.multiprocess


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 16), nn.Linear(16, 8)
        self.judge = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.decode(torch.relu(self.encode(x)))
        return (made - x).square().mean(), -self.judge(made).mean()


def gradients(losses: Any, weight: torch.Tensor) -> list[Any]:
    return [torch.autograd.grad(x, weight, retain_graph=True)[0] for x in losses]


def trained(mesh: str, how: str, codegen: str = "inductor", shard: bool = False) -> Any:
    """Losses, gradients and weights of four steps. ``how``: losses are weighed by their
    gradients ("adaptive"), from the third step on ("late"), or "twice" backward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Coder().double(), torch.randn(8, 8, dtype=torch.float64)
    run: Any = model
    if mesh:
        model = fxpar.shard(model, mesh=mesh) if shard else model
        options = {"mesh": mesh, "codegen": codegen}
        run = torch.compile(model, backend="fxpar", options=options)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(4):
        made, judged = run(x)
        loss = made + judged
        if how == "adaptive" or (how == "late" and step > 1):
            parts = [whole(g) for g in gradients((made, judged), model.decode.weight)]
            loss = made + parts[0].norm() / (parts[1].norm() + 1e-4) * judged
            seen += parts
        if how == "twice":
            loss.backward(retain_graph=True)
            once = [whole(p.grad).clone() for p in model.parameters()]
        loss.backward()
        if how == "twice":
            twice = [whole(p.grad) / 2 for p in model.parameters()]
            torch.testing.assert_close(twice, once, rtol=0, atol=0)
        seen += [loss.detach(), *(whole(p.grad).clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(whole(p.detach()) for p in model.parameters())]


QUICK = (
    ("dp=2", "inductor", False, "twice"),
    ("dp=2", "inductor", False, "late"),
)


@pytest.mark.parametrize(
    ("mesh", "codegen", "shard", "how"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(
            ("dp=2", "tp=2"),
            ("inductor", "eager"),
            (False, True),
            ("adaptive", "late", "twice"),
        )
    ],
)
def test_a_backward_runs_again(mesh: str, codegen: str, shard: bool, how: str) -> None:
    """With the numbers of one device, of what an earlier start compiled as well."""
    want = trained("", how)
    for _ in range(2):
        for got in shared_pool(2).run(trained, mesh, how, codegen, shard):
            torch.testing.assert_close(got, want)


def a_second_derivative() -> None:
    torch._dynamo.reset()
    model = Coder()
    run = torch.compile(model, backend="fxpar", options={"codegen": "eager"})
    loss, _ = run(torch.ones(4, 8))
    weight = model.encode.weight
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    gradient.square().sum().backward()


def test_a_second_derivative_is_refused() -> None:
    for error in shared_pool(2).errors(a_second_derivative, env={"FXPAR_MESH": "dp=2"}):
        assert "does not currently support double backward" in str(error)


def written_between(layer: int) -> list[Any]:
    """Gradients of a call after which a weight of a layer is written, and of a second
    call: one device, sharded, and one device without the write, of the first calls.
    Empty where a backward refuses."""
    found, unwritten = [], []
    for mesh in ("", "dp=2"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        run, x = model, torch.randn(4, 8)
        if mesh:
            run = model = fxpar.shard(model, mesh=mesh)
            run = torch.compile(model, backend="fxpar", options={"codegen": "eager"})
        for _ in range(2):
            if not mesh:
                loss = run(x).square().sum()
                unwritten.append([*torch.autograd.grad(loss, [*model.parameters()])])
            first = run(x).square().sum()
            with torch.no_grad():
                model[layer].weight[0].mul_(2)
            second = run(x).square().sum()
            for loss in (first, second):
                try:
                    gradients = torch.autograd.grad(loss, [*model.parameters()])
                    found.append([whole(x).clone() for x in gradients])
                except RuntimeError as error:
                    assert "modified by an inplace operation" in str(error)
                    found.append([])
    return found + unwritten


@pytest.mark.parametrize("layer", [0, 2])
def test_a_parameter_that_is_written_before_a_backward(layer: int) -> None:
    """Torch's error if the backward needs the value that it had and has no copy, as a
    compiled one may to compute activations again, else its gradients."""
    for found in shared_pool(2).run(written_between, layer):
        want, got, unwritten = found[:4], found[4:8], found[8:]
        for x, y, before in zip(
            got, want, [unwritten[0], [], unwritten[1], []], strict=True
        ):
            torch.testing.assert_close(x, (y or before) if x else [])
        assert got[1] and got[3]
        assert [not x for x in want] == [layer == 2, False] * 2


def read_as_a_view() -> list[str]:
    """What a backward raises, of which Inductor's forward could save a view of an
    input, or of a copy of it that Inductor leaves out, if that is written between."""
    raised = []
    for copy in (torch.Tensor.detach, torch.clone):
        torch._dynamo.reset()
        model, weight = nn.Linear(8, 8), nn.Parameter(torch.ones(8, 16))

        @torch.compile(backend="fxpar", options={"mesh": "dp=2"})
        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return (model(x) @ copy(weight)).square().sum()  # noqa: B023

        loss = loss_of(torch.ones(4, 8))
        with torch.no_grad():
            weight.mul_(0.5)
        try:
            loss.backward()
        except RuntimeError as error:
            raised.append(str(error))
    return raised


def test_an_input_that_is_written_before_a_backward() -> None:
    """The backward reads no value that was written since its forward."""
    for raised in shared_pool(2).run(read_as_a_view):
        assert len(raised) == 2
        assert all("modified by an inplace operation" in text for text in raised)
