"""Toy programs whose dims no axis divides, and on meshes of unequal shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from fxpar.sharding import shard_sizes
from tests.helpers.odd_sizes import check

F = nn.functional
aten = torch.ops.aten


def mlp(x, w, b, v):
    return F.softmax(F.layer_norm(torch.relu(x @ w + b), b.shape), -1) @ v


def entropy(x, w, b, v):
    labels = torch.arange(len(x)) % v.shape[1]
    return F.cross_entropy(torch.relu(x @ w + b) @ v, labels)


def means(x, w, b, v):
    h = x @ w + b
    return h.mean() + h.mean(0).norm() + (h * h).mean(1).sum() + h.var(0).sum()


def largest(x, w, b, v):
    h = -(x @ w + b).exp()  # below zero, which padding would be above
    return h.amax(0).sum() + h.max() + (-h).amin(0).sum() + v.abs().amax(1).sum()


PROGRAMS = (mlp, entropy, means, largest)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("sizes", "mesh"), [((6, 5, 7), "dp=4"), ((3, 7, 37), "dp=2,tp=2")]
)
def test_toys(program: Callable[..., Any], sizes: tuple[int, ...], mesh: str) -> None:
    check(program, sizes, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mesh", ["dp=4", "tp=4", "dp=2,tp=2", "dp=3,tp=2", "dp=8"])
@pytest.mark.parametrize("sizes", [(6, 5, 7), (3, 7, 37), (5, 6, 101), (7, 3, 5)])
def test_more_toys(program: Any, sizes: tuple[int, ...], mesh: str) -> None:
    check(program, sizes, mesh)


def test_a_pool_of_windows_of_one_row() -> None:
    x = torch.randn(3, 1, 5, dtype=torch.float64, requires_grad=True)
    specs = [(None, None, "tp")]
    plan = fxpar.plan(
        lambda x: F.max_pool1d(x, 1), x, mesh="tp=2", in_specs=specs, grad=True
    )
    got, want = plan.outcome(x), plan.reference_outcome(x)
    torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "program",
    [lambda x: x.mean(), lambda x: x.mean(0), lambda x: x.float().mean().half()],
)
@pytest.mark.parametrize(("rows", "mesh"), [(5, "tp=4"), (4, "tp=4"), (3, "tp=2")])
def test_a_mean_in_float16_has_room(program: Any, rows: int, mesh: str) -> None:
    """What ranks average is up to as many times the mean as there are ranks."""
    x = torch.full((rows, 6), 60000, dtype=torch.float16)
    plan = fxpar.plan(program, x, mesh=mesh, in_specs=[("tp", None)], mode="propagate")
    assert plan.simulate(x).eq(60000).all()


# Unequal shares


def order(x, w, b, v):
    h = x @ w + b
    places = h.detach().argmax(0) + h.detach().argmin(0)
    scans = h.cumsum(0).sum() + h.cumsum(1).tanh().mean(0).sum()
    return scans + (places * b).sum() + h.amax(0).sum() + v.abs().amax(1).sum()


SHARED = (mlp, entropy, order)


@pytest.mark.parametrize("program", SHARED, ids=lambda f: f.__name__)
def test_odd_totals(program: Any) -> None:
    check(program, (7, 5, 6), "dp=2[1,3],tp=2[5,1]")


@pytest.mark.parametrize("program", (entropy, order), ids=lambda f: f.__name__)
def test_a_rank_has_nothing(program: Any) -> None:
    """Of 2 rows two ranks have one, and of 7 not all: 1, 4, 1, 1."""
    plan = check(program, (2, 7, 37), "dp=4[1,5,1,2]")
    assert 0 in [shard_sizes.shard(2, plan.mesh, ("dp",), rank)[1] for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("program", SHARED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", [(7, 5, 6), (2, 7, 37), (12, 8, 10)])
@pytest.mark.parametrize(
    "mesh", ["dp=2[2,1]", "dp=4[1,5,1,2]", "dp=2[1,3],tp=2", "dp=2[1,3],tp=2[5,1]"]
)
def test_more_shares(program: Any, sizes: tuple[int, ...], mesh: str) -> None:
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
