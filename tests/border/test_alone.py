"""``fxpar.alone()``: one rank by itself, the others none the wiser."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxpar
from fxpar.errors import FxparError, PlanError, ShardError
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.multiprocess


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def compiled(fn: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, backend="fxpar", options={"codegen": "eager"} | options)


def between_steps(before_first: bool, seconds: float, inputs: str) -> list[Any]:
    """Steps of all ranks, with evaluations and a step of rank 0 alone in between."""
    model, plain = model_of(), model_of()
    run = compiled(model, inputs=inputs)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    out = []
    for step in range(3):
        if dist.get_rank() == 0 and (step or before_first):
            with fxpar.alone():
                time.sleep(seconds)
                torch.testing.assert_close(run(x[:3]), plain(x[:3]))
                with torch.no_grad():
                    run(x[:3])
                run(x).square().mean().backward()
            model.zero_grad()
        run(x).square().mean().backward()
        out.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    plain(x).square().mean().backward()
    for each in out:
        for mine, p in zip(each, plain.parameters(), strict=True):
            torch.testing.assert_close(mine, p.grad)
    return [len(out), step]


@pytest.mark.parametrize(
    ("before_first", "seconds", "inputs"),
    [
        (True, 0.0, "global"),
        (False, 0.0, "local"),
        pytest.param(False, 6.0, "global", marks=pytest.mark.slow),
    ],
)
def test_a_rank_alone_disturbs_nothing(
    before_first: bool, seconds: float, inputs: str
) -> None:
    """However long it takes: others wait longer than FXPAR_TIMEOUT for it."""
    runs = shared_pool(2).run(
        between_steps, before_first, seconds, inputs, env={"FXPAR_TIMEOUT": "4"}
    )
    assert runs == [[3, 2], [3, 2]]


def sharded() -> None:
    model = fxpar.shard(model_of(), mesh="fsdp=2")
    run = compiled(model, mesh="fsdp=2")
    if dist.get_rank() == 0:
        with fxpar.alone(), pytest.raises(ShardError, match="evaluate on all ranks"):
            run(torch.ones(2, 4))
    run(torch.ones(2, 4))


def test_parameters_in_parts_take_all_ranks() -> None:
    shared_pool(2).run(sharded)


def whole_step() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fxpar.train_step(
        model, lambda m, x: m(x).square().mean(), optimizer, options={}
    )
    with fxpar.alone(), pytest.raises(PlanError, match="one program of all ranks"):
        step(torch.ones(2, 4))


def test_a_training_step_takes_all_ranks() -> None:
    whole_step()


def test_it_stands_around_compiled_code() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        with fxpar.alone():
            return x * 2

    with pytest.raises(Exception, match="alone"):
        torch.compile(fn, backend="eager", fullgraph=True)(torch.ones(2))
    assert issubclass(ShardError, FxparError)
