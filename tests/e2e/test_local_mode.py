"""What local mode says of ranks that do not go together, and what places draw."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fxpar
from fxpar.errors import RankMismatchError
from fxpar.runtime.steps import plan_steps
from tests.helpers.spawn import ranks_of, shared_pool
from tests.helpers.training import place_of

pytestmark = pytest.mark.multiprocess


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.one if x.shape[0] == 2 else self.two)(x).square().mean()


def built(**options: Any) -> tuple[nn.Module, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Branching().double()
    if options.pop("shard", False):
        model = fxpar.shard(model, mesh="dp=2")
    options = {"codegen": "eager", "plan": "propagate", "inputs": "local"} | options
    return model, torch.compile(model, backend="fxpar", options=options)


def branches() -> None:
    """Ranks gather other parameters, of one size."""
    _, run = built(shard=True)
    run(torch.ones(2 + dist.get_rank(), 4).double()).backward()


def test_ranks_that_gather_other_parameters() -> None:
    for error in shared_pool(2).errors(branches, timeout=60.0):
        assert isinstance(error, RankMismatchError), error
        assert "rank 1 gathers or reduces other parameters than rank 0" in str(error)
        assert "test_local_mode.py" in str(error)


def one_backward_fewer() -> None:
    _, run = built()
    for step in range(3):
        loss = run(torch.ones(2, 4).double())
        if step < 2 or dist.get_rank():
            loss.backward()


@pytest.mark.slow
def test_a_rank_that_leaves_out_a_backward() -> None:
    env = {"FXPAR_TIMEOUT": "4", "FXPAR_LATE_TIMEOUT": "8"}
    errors = shared_pool(2).errors(one_backward_fewer, env=env, timeout=90.0)
    assert isinstance(errors[1], RankMismatchError), errors
    assert "the end of a backward" in str(errors[1])
    assert "test_local_mode.py" in str(errors[1])


def masks(mesh: str, codegen: str) -> list[torch.Tensor]:
    torch._dynamo.reset()
    options = {"mesh": mesh, "codegen": codegen, "inputs": "local"}
    run = torch.compile(
        lambda x: F.dropout(x @ x.mT, 0.5), backend="fxpar", options=options
    )
    torch.manual_seed(3)
    return [run(torch.ones(16, 16)) for _ in range(2)]


@pytest.mark.parametrize(
    "codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_places_draw_numbers_of_their_own(codegen: str) -> None:
    """From one seed; ranks of one place draw the same."""
    pool = ranks_of("dp=2,tp=2")
    drawn = pool.run(masks, "dp=2,tp=2", codegen, timeout=200.0)
    for step in range(2):
        of_ranks = [each[step] for each in drawn]
        assert torch.equal(of_ranks[0], of_ranks[1])
        assert torch.equal(of_ranks[2], of_ranks[3])
        assert not torch.equal(of_ranks[0], of_ranks[2])


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 3:
            return fxpar.constrain(x, "nowhere", None).sum()
        return x.sum()


def fails_in_one_place() -> None:
    torch._dynamo.reset()
    layer = nn.Linear(4, 4).double()
    whole = nn.Sequential(layer, Fails())
    options = {"codegen": "eager", "inputs": "local"}
    run = torch.compile(whole, backend="fxpar", options=options)
    run(torch.ones(2 + place_of("dp=2")[0], 4).double()).backward()


@pytest.mark.slow
def test_a_place_that_fails_tells_the_other() -> None:
    env = {"FXPAR_TIMEOUT": "4", "FXPAR_LATE_TIMEOUT": "8"}
    first, second = shared_pool(2).errors(fails_in_one_place, env=env, timeout=90.0)
    assert "nowhere" in str(second)
    assert isinstance(first, RankMismatchError), first


QUICK = ("hints", "search", "local")
HINTS = {"0.weight": ("dp", None), "2.weight": (None, "dp")}


def laid_out(how: str, plan: str) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and parameters of three steps. ``how``: of ``fxpar.shard``, or "ddp"."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    batches = [torch.randn(8, 8).double() for _ in range(3)]
    parts = [x.chunk(2) for x in batches]
    if how != "ddp":
        sample = ((batches[0],), {}) if how == "sample" else None
        hints = HINTS if how == "hints" else None
        model = fxpar.shard(model, mesh="dp=2", sample=sample, hints=hints)
        options = {"codegen": "eager", "plan": plan, "inputs": "local"}
        run = torch.compile(model, backend="fxpar", options=options)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for part in parts:
        if how == "ddp":
            each = [model(x).square().mean() for x in part]
            (sum(each) / 2).backward()
            losses.append(float(each[dist.get_rank()].detach()))
        else:
            loss = run(part[dist.get_rank()]).square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return losses, [p.detach() for p in whole]


@pytest.mark.parametrize(
    ("how", "plan", "inputs"),
    [
        pytest.param(*case, marks=() if case == QUICK else pytest.mark.slow)
        for case in product(
            ("hints", "sample"), ("search", "propagate"), ("local", "global")
        )
    ],
)
def test_layouts_that_name_the_batch_axis(how: str, plan: str, inputs: str) -> None:
    env = {"FXPAR_INPUTS": inputs, "FXPAR_PLAN": plan}
    pool = shared_pool(2)
    expected = pool.run(laid_out, "ddp", plan, timeout=100.0)
    results = pool.run(laid_out, how, plan, env=env, timeout=100.0)
    for (losses, ps), (want, qs) in zip(results, expected, strict=True):
        assert losses == pytest.approx(want, rel=1e-10)
        for p, q in zip(ps, qs, strict=True):
            torch.testing.assert_close(p, q)


def compared_memory() -> list[bool]:
    """For each schedule that is chosen: whether what runs holds what was simulated."""
    torch._dynamo.reset()
    model = nn.Sequential(*[nn.Linear(64, 64), nn.Tanh()] * 2)
    model = fxpar.shard(model, mesh="dp=2")
    options = {"plan": "search", "schedule": "auto", "inputs": "local"}
    options |= {"codegen": "eager", "cache_plans": False}
    run, same = torch.compile(model, backend="fxpar", options=options), []
    memory = plan_steps._memory

    def noted(state: Any) -> Any:
        simulated = memory(state)
        if state.run is not None:
            same.append(simulated == memory(replace(state, run=None)))
        return simulated

    with mock.patch.object(plan_steps, "_memory", side_effect=noted):
        run(torch.randn(8, 64)).square().mean().backward()
    return same


def test_a_schedule_is_simulated_on_the_program_that_runs() -> None:
    leader, _ = shared_pool(2).run(compared_memory, timeout=100.0)
    assert leader and all(leader)
