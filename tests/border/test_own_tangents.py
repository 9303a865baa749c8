"""Losses outside of graphs that are a rank's own, in global mode: an error on all ranks
at the next call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fxpar.errors import GradientError
from fxpar.runtime.ranks import drift
from tests.helpers.spawn import shared_pool

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]


class Apart(Exception):
    """Where ranks were told."""


def own_labels(y: torch.Tensor, step: int) -> torch.Tensor:
    return (y - dist.get_rank()).square().mean()


def own_noise(y: torch.Tensor, step: int) -> torch.Tensor:
    return (y + 0.1 * torch.randn_like(y)).square().mean()


def own_part(y: torch.Tensor, step: int) -> torch.Tensor:
    return y.tensor_split(2)[dist.get_rank()].square().mean()


def own_scale(y: torch.Tensor, step: int) -> torch.Tensor:
    return y.sum() * (1 + dist.get_rank())


def later(y: torch.Tensor, step: int) -> torch.Tensor:
    return own_labels(y, step) if step > 3 else y.square().mean()


def alike(y: torch.Tensor, step: int) -> torch.Tensor:
    return (y.transpose(0, 1).exp().sum() - y.expand(3, *y.shape).sum()).log()


def rounded(y: torch.Tensor, step: int) -> torch.Tensor:
    return (y * (1 + 1e-7 * dist.get_rank())).square().mean()


Loss = Callable[[torch.Tensor, int], torch.Tensor]


def train(loss: Loss, inputs: str) -> None:
    drift._FIRST = 10**9  # as ranks do at a program's first calls
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 300)).double()
    options = {"codegen": "eager", "mesh": "dp=2", "inputs": inputs}
    run = torch.compile(model, backend="fxpar", options=options)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    torch.manual_seed(dist.get_rank())
    for step in range(8):
        x = torch.full((8, 8), 0.1 + step).double()
        try:
            y = run(x)
        except GradientError as error:
            raise Apart(f"step {step}: {error}") from error
        loss(y, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("loss", "step"),
    [
        *(
            pytest.param(loss, 1, marks=pytest.mark.slow)
            for loss in (own_labels, own_noise, own_part, own_scale)
        ),
        (later, 5),
    ],
)
def test_all_ranks_are_told_at_the_next_call(loss: Loss, step: int) -> None:
    errors = shared_pool(2).errors(train, loss, "global", timeout=60.0)
    assert [type(error) for error in errors] == [Apart, Apart], errors
    assert str(errors[0]) == str(errors[1])
    assert str(errors[0]).startswith(f"step {step}: gradients of results")
    assert "another loss of them on rank 1 than on rank 0" in str(errors[0])
    assert "FXPAR_INPUTS=local" in str(errors[0])


@pytest.mark.parametrize(
    ("loss", "inputs"),
    [
        pytest.param(alike, "global", marks=pytest.mark.slow),
        pytest.param(rounded, "global", marks=pytest.mark.slow),
        pytest.param(own_labels, "local", marks=pytest.mark.slow),
        (own_part, "local"),
    ],
)
def test_what_may_differ_is_no_error(loss: Loss, inputs: str) -> None:
    shared_pool(2).run(train, loss, inputs, timeout=60.0)
