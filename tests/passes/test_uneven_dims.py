"""Toy programs whose dims no axis divides; each way to get them wrong is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxpar
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


# Each with what is broken, and a program that must notice.


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
