"""Scans from the last row to the first, as gradients of scans are: ranks that split the
dim exchange totals, and turn no rows round between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxpar
from tests.helpers.pairs import diagonal

aten = torch.ops.aten
Program = Callable[[torch.Tensor], torch.Tensor]

SCANS: dict[str, Program] = {
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: (x * 0.1 + 1).cumprod(0),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
}


def planned(fn: Program, rows: int, mesh: str = "tp=4") -> Any:
    """A plan with the rows split, which is right."""
    torch.manual_seed(0)
    x = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
    lies = [("tp", None)]
    plan = fxpar.plan(
        fn,
        x,
        mesh=mesh,
        in_specs=lies,
        out_specs=lies,
        mode="propagate",
        grad=True,
    )
    got, want = plan.outcome(x), plan.reference_outcome(x)
    torch.testing.assert_close(got.result, want.result, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(want.result, fn(x), rtol=1e-9, atol=1e-9)
    return plan


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("rows", [9, 16])
def test_totals_alone_are_sent(name: str, rows: int) -> None:
    """A row of each rank at a time: of 9 rows the last one has none."""
    plan = planned(SCANS[name], rows)
    kinds = {c.kind for c in plan.collectives}
    assert not kinds & {"permute", "all_to_all"}, "rows that are turned round"
    assert max(c.bytes for c in plan.collectives) <= 4 * 3 * 8


CHOICES: dict[str, Program] = {
    "cummax": lambda x: x.cummax(0)[0],
    # The first row is chosen in all shards.
    "one row": lambda x: (x - 9 * torch.arange(len(x)).unsqueeze(1)).cummax(-2)[0],
    "cummin": lambda x: x.cummin(0)[0].square(),
    "places read too": lambda x: (lambda v, i: v * (i + 1))(*x.cummin(0)),
}


@pytest.mark.parametrize(
    ("name", "rows", "mesh"), diagonal([*CHOICES], [7, 16, 37], ["tp=4", "tp=2,dp=2"])
)
def test_rows_chosen_before_a_shard_are_sent_as_one(
    name: str, rows: int, mesh: str
) -> None:
    plan = planned(CHOICES[name], rows, mesh)
    assert {c.kind for c in plan.collectives} <= {"all_gather", "permute"}
    # Of four ranks a row and where it lies, each way.
    assert sum(c.bytes for c in plan.collectives) <= 4 * 4 * 3 * 8


def test_no_rank_without_rows_chooses() -> None:
    """Of 9 rows the last of four has none."""
    planned(CHOICES["cummax"], 9)


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "tp=2,dp=2"])
def test_meshes(mesh: str) -> None:
    for name in SCANS:
        planned(SCANS[name], 7, mesh)


def scans_of(fn: Program, x: torch.Tensor) -> list[str]:
    plan = fxpar.plan(fn, x, mesh="tp=2", mode="propagate")
    return [str(n.target) for n in plan.result.normalized.nodes if "scan" in str(n)]


def test_what_is_no_scan_from_the_last_row_is_left_alone() -> None:
    x = torch.randn(4, 4)
    assert scans_of(lambda x: x.flip(0).cumsum(0).flip(0), x)
    assert not scans_of(lambda x: x.flip(1).cumsum(0).flip(0), x)
    assert not scans_of(lambda x: x.flip(0).cumsum(0).flip(1), x)
    assert not scans_of(lambda x: x.flip(0, 1).cumsum(0).flip(0), x)
    assert not scans_of(lambda x: x.flip(0).cumsum(0).flip(0), x.to(torch.int32))


def backs_of(fn: Program, x: torch.Tensor) -> list[str]:
    plan = fxpar.plan(fn, x, mesh="tp=2", mode="propagate")
    return [str(n.target) for n in plan.result.normalized.nodes if "back" in str(n)]


def test_what_adds_elsewhere_is_left_alone() -> None:
    """Along another dim, at places of another choice, or to what is no zero."""
    x = torch.randn(4, 4)

    def added(to: torch.Tensor, dim: int, places: torch.Tensor) -> torch.Tensor:
        return to.scatter_add(dim, places, x)

    assert backs_of(lambda x: added(x.new_zeros(4, 4), 0, x.cummax(0)[1]), x)
    assert not backs_of(lambda x: added(x.new_zeros(4, 4), 1, x.cummax(0)[1]), x)
    assert not backs_of(lambda x: added(x.new_ones(4, 4), 0, x.cummax(0)[1]), x)
    assert not backs_of(lambda x: added(x.new_zeros(4, 4), 0, x.sort(0)[1]), x)
