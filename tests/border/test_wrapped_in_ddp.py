"""A model in DistributedDataParallel already: numbers are right, and a warning says
what the wrapper costs. Losses and gradients are those of one device, in float64."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from fxpar.errors import FxparWarning
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.multiprocess

WIDTH = 256  # parameters of 1.6 MB fill more than one of the buckets below
STEPS = 3


class Net(nn.Module):
    """Three layers with a normalization, whose buffers the wrapper broadcasts."""

    def __init__(self, skipped: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.mid = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.down = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(2, 2)
        self.unused.requires_grad_(False)
        if skipped:
            self.down.forward = torch.compiler.disable(self.down.forward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.mid(self.up(x).relu()).tanh()))


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)


def part(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


Trained = list[tuple[float, dict[str, torch.Tensor]]]


def train(model: nn.Module, run: nn.Module, own: Any, every: int = 1) -> Trained:
    """Losses and gradients; ``every``: steps of which one updates, the others under
    the wrapper's ``no_sync``."""
    optimizer, out = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS * every):
        last = (step + 1) % every == 0
        waits = getattr(run, "no_sync", contextlib.nullcontext)
        with contextlib.nullcontext() if last else waits():
            loss = run(own(batch(step))).square().mean()
            loss.backward()
        if last:
            named = model.named_parameters()
            grads = {n: p.grad.clone() for n, p in named if p.grad is not None}
            out.append((loss.item(), grads))
            optimizer.step()
            optimizer.zero_grad()
    return out


def wrapped(
    inputs: str, way: str = "in place", how: dict | None = None, **more: Any
) -> tuple[Trained, list[str]]:
    """Training steps of a model compiled inside, below or around the wrapper."""
    torch._dynamo.reset()
    model = Net(skipped=more.pop("skipped", False)).double()
    compiled = {
        "backend": "fxpar",
        "options": {"codegen": "eager", "inputs": inputs} | more.pop("options", {}),
    }
    how = {"bucket_cap_mb": 1, **(how or {})}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if way == "in place":
            model.compile(**compiled)
            run: Any = DDP(model, **how)
        elif way == "below":
            run = DDP(torch.compile(model, **compiled), **how)
        else:
            run = torch.compile(DDP(model, **how), **compiled)
        own = part if inputs == "local" else torch.Tensor.clone
        trained = train(model, run, own, **more)
    texts = [str(w.message) for w in caught if w.category is FxparWarning]
    return trained, [text for text in texts if "is inside Distributed" in text]


def eager(inputs: str, every: int = 1) -> Trained:
    """What an eager model gives: whole batches on one device, parts in the wrapper."""
    model = Net().double()
    if inputs == "global":
        return train(model, model, torch.Tensor.clone, every)
    return train(model, DDP(model), part, every)


def check(ranks: list[tuple[Trained, list[str]]], inputs: str, every: int = 1) -> None:
    wants = shared_pool(2).run(eager, inputs, every)
    model = Net().double()
    for want, (trained, _) in zip(wants, ranks, strict=True):
        for (loss, grads), (got, got_grads) in zip(want, trained, strict=True):
            assert got == pytest.approx(loss, rel=1e-12)
            assert set(got_grads) == set(grads)
            for name, grad in got_grads.items():
                torch.testing.assert_close(grad, grads[name], rtol=1e-9, atol=1e-12)
    for rank, (_, texts) in enumerate(ranks):
        assert len(texts) == (rank == 0 and inputs == "global"), texts
    if inputs == "local":
        return
    size = 8 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert f"all-reduce of {size} bytes" in ranks[0][1][0]
    assert "fix: leave the wrapper out" in ranks[0][1][0]


@pytest.mark.parametrize(
    ("way", "inputs"),
    [
        ("in place", "local"),
        ("below", "global"),
        pytest.param("around", "local", marks=pytest.mark.slow),
        pytest.param("in place", "global", marks=pytest.mark.slow),
        pytest.param("below", "local", marks=pytest.mark.slow),
        pytest.param("around", "global", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_one_device(way: str, inputs: str) -> None:
    check(shared_pool(2).run(wrapped, inputs, way), inputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True, "broadcast_buffers": False},
    ],
    ids=lambda how: next(iter(how)),
)
def test_ways_to_wrap(how: dict) -> None:
    check(shared_pool(2).run(wrapped, "local", "in place", how), "local")


def accumulated(inputs: str) -> tuple[Trained, list[str]]:
    return wrapped(inputs, every=2)


@pytest.mark.slow
@pytest.mark.parametrize("inputs", ["local", "global"])
def test_gradients_accumulated_under_no_sync(inputs: str) -> None:
    check(shared_pool(2).run(accumulated, inputs), inputs, every=2)


def skips() -> tuple[Trained, list[str]]:
    return wrapped("local", skipped=True)


@pytest.mark.slow
def test_the_wrapper_reduces_what_is_not_compiled() -> None:
    check(shared_pool(2).run(skips), "local")


def plans_made() -> int:
    import fxpar

    before = len(fxpar.plans())
    wrapped("local", options={"plan": "replicate"})  # as no other, which it would share
    return len(fxpar.plans()) - before


def test_the_program_is_not_cut_at_buckets() -> None:
    assert shared_pool(2).run(plans_made) == [1, 1]


def test_alone_nothing_is_said() -> None:
    """One rank has nothing to reduce."""
    trained, texts = shared_pool(2).run(wrapped, "global", ranks=1)[0]
    assert texts == [] and len(trained) == STEPS
