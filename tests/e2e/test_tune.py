"""``tune``: schedules measured on the mesh; all ranks take the same one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxpar
from fxpar.runtime import tune
from tests.sharding.search.test_search import machine
from tests.spawn import shared_pool

pytestmark = pytest.mark.multiprocess


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def hardware(tmp_path: Path) -> str:
    """On which splitting pays for small models."""
    path = str(tmp_path / "slow.json")
    machine().save(path)
    return path


class Blocks(nn.Module):
    """Two blocks with a norm of what was summed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ModuleList(nn.Linear(8, 16, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(16, 8, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = torch.nn.functional.layer_norm(x + down(torch.relu(up(x))), (8,))
        return x.square().mean()


def loss_of(hardware: str, codegen: str = "eager", **more: Any) -> tuple[float, Any]:
    """Loss on tp=4, after its backward, and the plan."""
    torch._dynamo.reset()
    hints = {"up.*.weight": ("tp", None), "down.*.weight": (None, "tp")}
    options = {"mesh": "tp=4", "codegen": codegen, "hardware": hardware}
    options |= {"schedule": "auto", "hints": hints, "plan": "propagate", **more}
    program = torch.compile(Blocks().double(), backend="fxpar", options=options)
    torch.manual_seed(1)
    loss = program(torch.randn(64, 8).double())
    loss.backward()
    return float(loss), fxpar.plans()[-1]


def measured(hardware: str, best: int) -> tuple[Any, ...]:
    """With clocks that differ on every rank: number ``best`` is the fastest, once the
    slowest rank counts, though rank 0 sees another."""
    rank, turn = dist.get_rank(), itertools.count()
    want, plain = loss_of(hardware)
    kept, counts = tune.measure, []

    def measure(steps: Sequence[tune.Step], name: str) -> list[float]:
        counts.append(len(steps))
        return kept(steps, name)

    def seconds(step: tune.Step) -> float:
        step()
        number = next(turn) % counts[0]
        if rank == 0:
            return 1.0 + 0.1 * (number == best)
        return 2.0 - (number == best) + 0.01 * rank

    with (
        mock.patch.object(tune, "_seconds", seconds),
        mock.patch.object(tune, "measure", measure),
    ):
        loss, plan = loss_of(hardware, tune=True)
    assert loss == pytest.approx(want, rel=1e-9)
    return plan.schedule, plan.hash, plan.notes[-1], plain.schedule


def test_the_slowest_rank_counts_and_all_take_the_same(hardware: str) -> None:
    pool = shared_pool(4)
    chosen = []
    for best in range(2):
        first, *others = pool.run(measured, hardware, best)
        assert all(other == first for other in others)
        schedule, _, note, plain = first
        assert plain
        assert (schedule == plain) == (best == 0)
        assert f"number {best + 1} is taken" in note
        chosen.append(schedule)
    assert len(set(chosen)) == 2


def really(hardware: str) -> tuple[float, float, Any]:
    """By the clock, under code generation."""
    want, _ = loss_of(hardware)
    loss, plan = loss_of(hardware, "inductor", tune=True)
    return loss, want, (plan.hash, plan.notes[-1])


@pytest.mark.slow
def test_by_the_clock(hardware: str) -> None:
    results = shared_pool(4).run(really, hardware, timeout=600.0)
    assert len({note for *_, note in results}) == 1
    for loss, want, (_, note) in results:
        assert loss == pytest.approx(want, rel=1e-9)
        assert "ms a step" in note


def alone(hardware: str) -> str:
    """Where one schedule is all there is, nothing is measured."""
    with mock.patch.object(tune, "measure", side_effect=AssertionError):
        _, plan = loss_of(hardware, tune=True, schedule="none")
    return plan.schedule


def test_a_given_schedule_is_not_measured(hardware: str) -> None:
    assert shared_pool(4).run(alone, hardware) == [""] * 4


def fails(hardware: str) -> None:
    """One rank's code cannot be made: the others are told."""
    broken = dist.get_rank() == 2

    def runnable(*_: Any, **__: Any) -> Any:
        if broken:
            raise RuntimeError("no code")
        return lambda: None

    with mock.patch.object(tune, "runnable", runnable):
        loss_of(hardware, tune=True)


def test_a_rank_that_fails_is_not_waited_for(hardware: str) -> None:
    errors = shared_pool(4).errors(fails, hardware)
    assert all("no code" in str(error) for error in errors), errors
