"""``tune``: schedules measured on the mesh; all ranks take the same one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxpar
from fxpar.runtime.steps import tune_schedule
from tests.helpers.machines import machine
from tests.helpers.spawn import shared_pool

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
    """Loss on all ranks, after its backward, and the plan."""
    torch._dynamo.reset()
    hints = {"up.*.weight": ("tp", None), "down.*.weight": (None, "tp")}
    options = {
        "mesh": f"tp={dist.get_world_size()}",
        "codegen": codegen,
        "hardware": hardware,
    }
    options |= {"schedule": "auto", "hints": hints, "plan": "propagate", **more}
    program = torch.compile(Blocks().double(), backend="fxpar", options=options)
    torch.manual_seed(1)
    loss = program(torch.randn(64, 8).double())
    loss.backward()
    return float(loss), fxpar.plans()[-1]


def clocked(best: int, failing: Callable[[int, int, int], None]) -> Any:
    """Instead of the clock: number ``best`` is the fastest once the slowest rank
    counts, though rank 0 sees another. ``failing``: called after each step with the
    number of its schedule, the turn and the rank, may raise."""
    rank, kept = dist.get_rank(), tune_schedule.measure
    turns: Counter[int] = Counter()
    names: dict[int, int] = {}

    def seconds(step: tune_schedule.Step) -> float:
        step()
        number = names[id(step)]
        turns[number] += 1
        failing(number, turns[number], rank)
        if rank == 0:
            return 1.0 + 0.1 * (number == best)
        return 2.0 - (number == best) + 0.01 * rank

    def measure(steps: Mapping[int, tune_schedule.Step], name: str) -> Any:
        names.update({id(step): number for number, step in steps.items()})
        with mock.patch.object(tune_schedule, "_seconds", seconds):
            return kept(steps, name)

    return mock.patch.object(tune_schedule, "measure", measure)


def measured(hardware: str) -> tuple[str, ...]:
    want, plain = loss_of(hardware)
    with clocked(1, lambda *_: None):
        loss, plan = loss_of(hardware, tune=True)
    assert loss == pytest.approx(want, rel=1e-9)
    return plain.schedule, plan.schedule, plan.hash, plan.notes[-1]


def test_the_slowest_rank_counts_and_all_take_the_same(hardware: str) -> None:
    first, second = shared_pool(2).run(measured, hardware)
    assert second == first
    plain, schedule, _, note = first
    assert plain and schedule != plain
    assert "number 2 is taken" in note


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


def alone(hardware: str) -> tuple[str, str]:
    """Where one schedule is all there is, nothing is measured."""
    with mock.patch.object(tune_schedule, "measure", side_effect=AssertionError):
        _, plan = loss_of(hardware, tune=True, schedule="none")
    return plan.schedule, plan.notes[-1]


def test_a_given_schedule_is_not_measured_which_is_said(hardware: str) -> None:
    for schedule, note in shared_pool(2).run(alone, hardware):
        assert not schedule
        assert note.startswith("tune: nothing is measured")


def failing(hardware: str, all_of_them: bool) -> tuple[str, ...]:
    """Rank 1 cannot make the code of the schedule that is predicted best, or of any;
    rank 0 fails in a step of the second, after some that were counted."""
    kept, made = tune_schedule.runnable, itertools.count()

    def runnable(*args: Any, **how: Any) -> Any:
        if dist.get_rank() == 1 and (next(made) == 0 or all_of_them):
            raise MemoryError("no code")
        return kept(*args, **how)

    def late(number: int, turn: int, rank: int) -> None:
        if (number, turn, rank) == (1, tune_schedule.WARMUP + 2, 0):
            raise RuntimeError("out of memory")

    with mock.patch.object(tune_schedule, "runnable", runnable), clocked(1, late):
        _, plan = loss_of(hardware, tune=True)
    return plan.schedule, *plan.notes[-3:]


def test_what_fails_on_a_rank_is_left_out_on_all(hardware: str) -> None:
    first, *others = shared_pool(2).run(failing, hardware, False)
    assert all(other == first for other in others)
    schedule, one, two, taken = first
    assert schedule
    assert one.startswith("tune: schedule 1 of 3, ")
    assert one.endswith("is left out: rank 1 failed: MemoryError: no code")
    assert two.startswith("tune: schedule 2 of 3, ")
    assert two.endswith("is left out: rank 0 failed: RuntimeError: out of memory")
    assert "of 1 measured, in the order predicted, number 1 is taken" in taken


def test_if_none_is_left_all_ranks_are_told(hardware: str) -> None:
    for error in shared_pool(2).errors(failing, hardware, True):
        assert "could be measured: rank 1 failed: MemoryError: no code" in str(error)


@pytest.mark.parametrize(
    "like",
    [
        torch.empty(3, 4, dtype=torch.float8_e4m3fn),
        torch.empty(3, 4, dtype=torch.bfloat16).T,
        torch.empty(4, dtype=torch.float64).expand(3, 4),
        torch.empty(0, 4),
        torch.empty(()),
        torch.empty(3, dtype=torch.int64),
        torch.empty(3, dtype=torch.complex64),
    ],
    ids=lambda x: f"{x.dtype}{list(x.shape)}",
)
def test_inputs_that_are_made_up(like: torch.Tensor) -> None:
    made = tune_schedule._random_like(like)
    assert (made.shape, made.stride(), made.dtype) == (
        like.shape,
        like.stride(),
        like.dtype,
    )
    if made.dtype.is_floating_point and made.numel():
        assert 0 < made.float().abs().max() <= 1
