"""Real models trained on four ranks: losses and gradients are those of one device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from tests.models import DRAWS_RANDOM, NAMES, build_double, build_loss, double
from tests.spawn import shared_pool

pytestmark = pytest.mark.multiprocess

MESHES = ("dp=4", "tp=4", "dp=2,tp=2", "a=2,b=1,c=2")
STEPS = 10
LOSS = 1e-5  # relative
GRADIENT = 1e-4  # relative to the largest value of a gradient
FLOOR = 1e-6  # of the largest gradient: some are zero but for rounding

# ReLU jumps where a value is zero but for rounding, and the gradient with it: the one
# model that has it is trained in float64, where rounding does not reach that far.
DOUBLE = frozenset({"resnet"})

# The rest of the table is behind the marker slow.
QUICK = {
    ("llama", "dp=2,tp=2"),
    ("resnet", "dp=4"),
}
QUICK_GENERATED = frozenset({"llama"})


def cases() -> Iterator[object]:
    for name in NAMES:
        for mesh in MESHES:
            marks = () if (name, mesh) in QUICK else pytest.mark.slow
            yield pytest.param(name, mesh, id=f"{name}-{mesh}", marks=marks)


@dataclass(frozen=True)
class Run:
    """``gradients`` of the first step; ``state``: buffers at the end."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]


def train(name: str, options: dict[str, str] | None, steps: int = STEPS) -> Run:
    """Train a model, compiled with ``options``, or as it is if they are None."""
    with double() if name in DOUBLE else contextlib.nullcontext():
        return _train(name, options, steps)


def _train(name: str, options: dict[str, str] | None, steps: int) -> Run:
    model, batch = (build_loss, build_double)[name in DOUBLE](name)
    compiled = model
    if options is not None:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="fxpar", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(5)
    losses, gradients = [], {}
    for step in range(steps):
        loss = compiled(**batch)
        loss.backward()
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, gradients, dict(model.named_buffers()))


@cache
def one_device(name: str, steps: int = STEPS) -> Run:
    """Plain PyTorch; with dropout the same backend alone, since eager PyTorch draws
    other random numbers than compiled code does."""
    return train(name, {"codegen": "eager"} if name in DRAWS_RANDOM else None, steps)


def compare(runs: list[Run], want: Run) -> None:
    """Every rank's run with that of one device."""
    largest = max(x.abs().max().item() for x in want.gradients.values())
    for run in runs:
        assert run.losses == pytest.approx(want.losses, rel=LOSS, abs=0.0)
        assert run.losses == runs[0].losses
        assert set(run.gradients) == set(want.gradients)
        for name, x in want.gradients.items():
            error = (run.gradients[name] - x).abs().max().item()
            bound = max(GRADIENT * x.abs().max().item(), FLOOR * largest)
            assert error <= bound, f"{name}: {error:.3g}, allowed {bound:.3g}"
        for name, x in want.state.items():
            torch.testing.assert_close(run.state[name], x, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "mesh"), list(cases()))
def test_op_by_op(name: str, mesh: str) -> None:
    options = {"mesh": mesh, "codegen": "eager"}
    runs = shared_pool(4).run(train, name, options, timeout=300.0)
    compare(runs, one_device(name))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK_GENERATED else pytest.mark.slow)
        for name in NAMES
    ],
)
def test_generated_kernels(name: str) -> None:
    options = {"mesh": "dp=2,tp=2", "codegen": "inductor"}
    runs = shared_pool(4).run(train, name, options, timeout=900.0)
    compare(runs, one_device(name))
