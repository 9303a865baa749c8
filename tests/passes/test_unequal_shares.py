"""Programs on meshes whose ranks have unequal shares; each wrong way is noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from fxpar.sharding import shard_sizes
from tests.helpers.odd_sizes import check

F = nn.functional


def mlp(x, w, b, v):
    return F.softmax(F.layer_norm(torch.relu(x @ w + b), b.shape), -1) @ v


def entropy(x, w, b, v):
    labels = torch.arange(len(x)) % v.shape[1]
    return F.cross_entropy(torch.relu(x @ w + b) @ v, labels) + v.mean()


def order(x, w, b, v):
    h = x @ w + b
    places = h.detach().argmax(0) + h.detach().argmin(0)
    scans = h.cumsum(0).sum() + h.cumsum(1).tanh().mean(0).sum()
    return scans + (places * b).sum() + h.amax(0).sum() + v.abs().amax(1).sum()


PROGRAMS = (mlp, entropy, order)
MESHES = ("dp=2[2,1]", "dp=4[1,5,1,2]", "dp=2[1,3],tp=2", "dp=2[1,3],tp=2[5,1]")
SIZES = ((7, 5, 6), (2, 7, 37), (12, 8, 10))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_odd_totals(program: Any) -> None:
    check(program, (7, 5, 6), "dp=2[1,3],tp=2[5,1]")


@pytest.mark.parametrize("program", (entropy, order), ids=lambda f: f.__name__)
def test_a_rank_has_nothing(program: Any) -> None:
    """Of 2 rows two ranks have one, and of 7 not all: 1, 4, 1, 1."""
    plan = check(program, (2, 7, 37), "dp=4[1,5,1,2]")
    assert 0 in [shard_sizes.shard(2, plan.mesh, ("dp",), rank)[1] for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("mesh", MESHES)
def test_more(program: Any, sizes: tuple[int, ...], mesh: str) -> None:
    check(program, sizes, mesh)


def test_the_batch_is_viewed_with_its_rows() -> None:
    """Shares that divide the batch divide what its rows are viewed as: nothing is
    gathered but sums."""

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = torch.relu(x.reshape(-1, 8) @ w).reshape(x.shape)
        return F.cross_entropy(h.flatten(0, 1), torch.arange(21) % 8)

    args = torch.randn(7, 3, 8), torch.randn(8, 8, requires_grad=True)
    plan = fxpar.plan(model, *args, mesh="dp=2{1.0,0.4}", mode="propagate", grad=True)
    assert {found.kind for found in plan.collectives} == {"all_reduce"}
    torch.testing.assert_close(plan.simulate(*args), plan.reference(*args))


# Each with what is broken, and a program that must notice.
