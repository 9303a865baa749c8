"""Losses computed outside the graph in local mode, each a rank's own, where ranks must
decide alike: a line search takes their mean, a learning rate they set is an error; and
steps of optimizers that are compiled, whose state is no part of a batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fxpar
from fxpar.errors import GradientError
from tests.helpers.spawn import shared_pool
from tests.helpers.training import whole

ROWS = 8
OPTIONS = {"mesh": "dp=2", "inputs": "local", "codegen": "eager"}


def batch(is_rank: bool) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    x, y = (torch.randn(ROWS, n, dtype=torch.float64, generator=made) for n in (6, 3))
    x[ROWS // 2 :] *= 3  # so that losses of the parts differ
    if is_rank:
        x, y = (t.chunk(2)[dist.get_rank()] for t in (x, y))
    return x, y


def model_of(is_rank: bool, shard: bool) -> tuple[nn.Module, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    if shard:
        model = fxpar.shard(model, mesh="dp=2")
    if not is_rank:
        return model, model
    return model, torch.compile(model, backend="fxpar", options=OPTIONS)


def searched(is_rank: bool, shard: bool = False) -> dict[str, Any]:
    """Steps of LBFGS, how often it asked for the loss, and what it was told last."""
    model, run = model_of(is_rank, shard)
    search = {"line_search_fn": "strong_wolfe", "max_iter": 5}
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, **search)
    x, y = batch(is_rank)
    asked = 0

    def closure() -> torch.Tensor:
        nonlocal asked
        asked += 1
        optimizer.zero_grad()
        loss = F.mse_loss(run(x), y)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    state = {name: whole(x) for name, x in model.state_dict().items()}
    return {"state": state, "losses": losses, "asked": asked}


@pytest.mark.multiprocess
@pytest.mark.parametrize("shard", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_line_search_sees_the_mean_of_the_losses(shard: bool) -> None:
    want = searched(is_rank=False)
    for got in shared_pool(2).run(searched, True, shard):
        assert got["asked"] == want["asked"]
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-9)
        for name, x in want["state"].items():
            torch.testing.assert_close(got["state"][name], x, rtol=1e-7, atol=1e-9)


def scheduled(mean: bool) -> str:
    """What is said where a scheduler lowers the rate by the loss: of this rank, which
    falls on one rank and rises on the other, or the mean of both."""
    model, run = model_of(is_rank=True, shard=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rates = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    x, y = batch(is_rank=True)
    try:
        for i in range(4):
            F.mse_loss(run(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = torch.tensor(float(i if dist.get_rank() else -i))
            if mean:
                dist.all_reduce(loss)
            rates.step(loss)
    except GradientError as error:
        return str(error)
    return "alike"


@pytest.mark.multiprocess
def test_a_learning_rate_of_a_rank_s_own_loss_is_an_error() -> None:
    for error in shared_pool(2).run(scheduled, False):
        assert "learning rate of group 0 of an optimizer differed" in error
        assert "give the scheduler what all ranks have alike" in error
    assert shared_pool(2).run(scheduled, True) == ["alike", "alike"]


def trained_in_parts(entry: str, mean: bool) -> str:
    """What is said of a rate that is a rank's own, where ranks hold parts."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"mesh": "dp=2", "codegen": "eager"}
    model = fxpar.shard(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), mesh="dp=2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    if entry == "train_step":
        step = fxpar.train_step(model, loss_of, optimizer, options=options)
    else:
        run = torch.compile(model, backend="fxpar", options=options)

        def step(x: torch.Tensor) -> None:
            loss_of(run, x).backward()
            optimizer.step()
            optimizer.zero_grad()

    try:
        for i in range(3):
            step(torch.ones(4, 8))
            if i == 0:
                by_rank = 0.01 if mean else 0.01 * (1 + dist.get_rank())
                optimizer.param_groups[0]["lr"] = by_rank
    except GradientError as error:
        return str(error)
    return "alike"


@pytest.mark.multiprocess
@pytest.mark.parametrize("entry", ["compile", "train_step"])
def test_rates_of_parameters_in_parts_are_compared(entry: str) -> None:
    """No two ranks hold what they could compare later."""
    for error in shared_pool(2).run(trained_in_parts, entry, False):
        assert "learning rate of group 0 of an optimizer differed" in error
    assert shared_pool(2).run(trained_in_parts, entry, True) == ["alike", "alike"]


def skipped(mean: bool) -> str:
    """What is said where a step is left out if the loss is no number: that of this
    rank, or the mean."""
    model, run = model_of(is_rank=True, shard=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = batch(is_rank=True)
    try:
        for i in range(4):
            F.mse_loss(run(x), y).backward()
            loss = torch.tensor(math.nan if i == dist.get_rank() == 1 else 0.0)
            if mean:
                dist.all_reduce(loss)
            if not loss.isnan():
                optimizer.step()
            optimizer.zero_grad()
    except GradientError as error:
        return f"call {i}: {error}"
    return "alike"


@pytest.mark.multiprocess
def test_a_step_that_a_rank_leaves_out_is_an_error() -> None:
    for error in shared_pool(2).run(skipped, False):
        assert error.startswith("call 2: a step of the optimizer was taken by rank 0")
        assert "torch.distributed.all_reduce" in error
    assert shared_pool(2).run(skipped, True) == ["alike", "alike"]


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


def compiled_steps(is_rank: bool, name: str, clips: bool) -> dict[str, torch.Tensor]:
    """Parameters after steps of a model and an optimizer that are compiled apart, or
    of a function that clips gradients and steps."""
    model, run = model_of(is_rank, shard=False)
    params = list(model.parameters())
    optimizer = OPTIMIZERS[name](params)

    def clipped() -> None:
        nn.utils.clip_grad_norm_(params, 0.1)
        optimizer.step()

    step = clipped if clips else optimizer.step
    if is_rank:
        step = torch.compile(step, backend="fxpar", options=OPTIONS)
    x, y = batch(is_rank)
    for _ in range(3):
        F.mse_loss(run(x), y).backward()
        step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "clips"),
    [
        ("momentum", False),
        ("SGD", True),
        pytest.param("Adagrad", True, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_step_of_an_optimizer(name: str, clips: bool) -> None:
    want = compiled_steps(False, name, clips)
    for got in shared_pool(2).run(compiled_steps, True, name, clips):
        for key, x in want.items():
            torch.testing.assert_close(got[key], x, rtol=1e-6, atol=1e-8)


def trained_at_rest(trains: bool) -> bool:
    """Calls of a model of which ranks hold parts, and steps of its optimizer."""
    torch.manual_seed(0)
    mesh, x = f"dp={dist.get_world_size()}", torch.ones(6, 6)
    model = fxpar.shard(nn.Linear(6, 6), mesh=mesh)
    if trains:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options = {"mesh": mesh, "codegen": "eager"}
        step = fxpar.train_step(
            model, lambda model, x: model(x).sum(), optimizer, options=options
        )
        step(x)
        step(x)
    else:
        torch.compile(model, backend="fxpar", options={"codegen": "eager"})(x)
    return True


@pytest.mark.multiprocess
def test_steps_before_a_process_group_are_not_compared_in_it() -> None:
    """The last step of a group is told to nobody; the next may have other ranks."""
    for size in (3, 2, 3):
        assert all(shared_pool(size).run(trained_at_rest, size == 3))
