"""What local mode says of ranks that do not go together, and what places draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fxpar
from fxpar.errors import RankMismatchError
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


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
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


def test_a_place_that_fails_tells_the_other() -> None:
    env = {"FXPAR_TIMEOUT": "4", "FXPAR_LATE_TIMEOUT": "8"}
    first, second = shared_pool(2).errors(fails_in_one_place, env=env, timeout=90.0)
    assert "nowhere" in str(second)
    assert isinstance(first, RankMismatchError), first
