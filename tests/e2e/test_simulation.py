"""Real models in float64: every mesh computes what one device computes.

All ranks run in lockstep in this process, so no summation order is hidden by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from tests.helpers.models import (
    DRAWS_RANDOM,
    NAMES,
    ODD_NAMES,
    Batch,
    build_double,
    double,
)

pytestmark = pytest.mark.usefixtures("propagated")

MESHES = ("dp=4", "tp=4", "dp=2,tp=2", "dp=2,fsdp=2,tp=2")
# Attention, dropout, convolutions; a mesh of three axes.
QUICK = {
    ("llama", "dp=2,fsdp=2,tp=2"),
    ("resnet", "dp=2,tp=2"),
}
TOLERANCE = 1e-9
FLOOR = (
    1e-4  # of the largest gradient: that of a bias of k_proj is zero but for rounding
)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with double():
        yield


def assert_close(
    got: torch.Tensor, want: torch.Tensor, scale: float, name: str
) -> None:
    error = (got - want).abs().max().item()
    assert error <= TOLERANCE * scale, f"{name}: {error:.3g} of {scale:.3g}"


def assert_all_close(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]
) -> None:
    assert set(got) == set(want)
    largest = max(x.abs().max().item() for x in want.values())
    for name, x in want.items():
        assert got[name].shape == x.shape
        scale = max(x.abs().max().item(), FLOOR * largest)
        assert_close(got[name], x, scale, name)


def eagerly(
    model: nn.Module, batch: Batch
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Loss, gradients and changed buffers by plain PyTorch."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loss = model(**batch)
    loss.backward()
    gradients = {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }
    changed = {
        name: buffer
        for name, buffer in model.named_buffers()
        if not torch.equal(buffer, before[name])
    }
    return loss.detach(), gradients, changed


def cases() -> Iterator[Any]:
    for name in NAMES:
        for mesh in MESHES:
            marks = () if (name, mesh) in QUICK else pytest.mark.slow
            yield pytest.param(name, mesh, id=f"{name}-{mesh}", marks=marks)
    for name in ODD_NAMES:
        for mesh in MESHES[:3]:
            yield pytest.param(name, mesh, id=f"{name}-{mesh}", marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "mesh"), list(cases()))
def test_loss_gradients_and_buffers(name: str, mesh: str) -> None:
    model, batch = build_double(name)
    plan = fxpar.plan(model, mesh=mesh, grad=True, **batch)
    assert plan.unknown == ()
    assert plan.collectives  # something is split
    torch.manual_seed(1)
    got = plan.outcome(**batch)
    torch.manual_seed(1)
    want = plan.reference_outcome(**batch)
    assert got.result.dtype == torch.float64
    wanted = [(want.result, want.gradients, want.mutations)]
    if name not in DRAWS_RANDOM:
        wanted.append(eagerly(model, batch))
    for loss, gradients, mutations in wanted:
        assert_close(got.result, loss, loss.abs().item(), "loss")
        assert_all_close(got.gradients, gradients)
        assert set(got.mutations) == set(mutations)
        for buffer, x in mutations.items():
            assert_close(
                got.mutations[buffer].double(), x, x.abs().max().item(), buffer
            )
    assert bool(want.mutations) == name.endswith("resnet")
