"""Norms of split tensors, and what item() says of summands, are those of one device;
gradients that ``no_sync`` left unreduced are reduced in the end."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fxpar
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.multiprocess

ORDERS = (0, 1, 2, 3, float("inf"), float("-inf"))
DIMS = (None, 0, 1, [0, 1])


def values() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.split = nn.Parameter(torch.randn(8, 4, dtype=torch.float64))
    model.rows = nn.Parameter(torch.randn(2, 8, dtype=torch.float64))
    return model


def norms(mesh: str | None) -> dict[str, torch.Tensor]:
    model = values()
    if mesh is not None:
        model = fxpar.shard(model, mesh=mesh)
    out = {}
    for (name, p), order, dim, keep in itertools.product(
        model.named_parameters(), ORDERS, DIMS, (False, True)
    ):
        made = torch.linalg.vector_norm(p.detach(), order, dim, keep)
        if isinstance(made, DTensor):
            assert not any(place.is_partial() for place in made.placements)
            made = made.full_tensor()
        out[f"{name} {order} {dim} {keep}"] = made
    narrow = torch.linalg.vector_norm(model.split.detach(), dtype=torch.float64)
    out["dtype"] = narrow.full_tensor() if mesh else narrow
    tiny = torch.linalg.vector_norm(model.split.detach().half() * 2.0**-14)
    out["squares below the least number"] = tiny.full_tensor() if mesh else tiny
    return out


@pytest.mark.parametrize(
    "mesh", [pytest.param("dp=4", marks=pytest.mark.slow), "dp=2,tp=2"]
)
def test_norms(mesh: str) -> None:
    want = norms(None)
    for got in shared_pool(4).run(norms, mesh):
        assert got.keys() == want.keys()
        for name, x in want.items():
            torch.testing.assert_close(got[name], x, msg=name)


def items(mesh: str | None) -> list[Any]:
    model = values()
    if mesh is not None:
        model = fxpar.shard(model, mesh=mesh)
    for p in model.parameters():
        p.grad = 2 * p.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    total = model.split.detach().sum()
    return [norm.item(), float(total), bool((model.split.detach() > 99).any())]


def test_item_is_of_all_ranks() -> None:
    for got in shared_pool(4).run(items, "dp=4"):
        assert got == pytest.approx(items(None))


def unfrozen() -> list[bool]:
    """Whether gradients lie as their parameters do after a loop with ``no_sync``, of a
    model and then of the same with a parameter that was frozen before."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[1].weight.requires_grad_(False)
    model = fxpar.shard(model, mesh="dp=2")
    options = {"codegen": "eager", "mesh": "dp=2"}
    run = torch.compile(model, backend="fxpar", options=options)
    reduced = []
    for _ in range(2):
        with fxpar.no_sync(model):
            run(torch.ones(4, 8)).sum().backward()
        run(torch.ones(4, 8)).sum().backward()
        grads = [(p.grad, p) for p in model.parameters() if p.grad is not None]
        reduced.append(all(g.placements == p.placements for g, p in grads))
        model.zero_grad()
        model[1].weight.requires_grad_(True)
    return reduced


@pytest.mark.usefixtures("propagated")
def test_a_parameter_that_was_frozen_is_reduced_after_no_sync() -> None:
    assert shared_pool(4).run(unfrozen, ranks=2) == [[True, True]] * 2
