"""Lookups and diagonals along split dims: what is sent is the cheapest that computes
what one device does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxpar

ROWS = ("tp", None)

MORE = torch.randint(0, 12, (40,))
FEW = torch.tensor([7, 2])


def sent(program: Callable[..., Any], rows: int = 12, **how: Any) -> list[str]:
    """The collectives of a program of one matrix whose rows are split, which computes
    what one device does, gradients too."""
    torch.manual_seed(0)
    x = torch.randn(rows, rows, dtype=torch.float64, requires_grad=True)
    settings: Any = {"mesh": "tp=4", "mode": "propagate", "in_specs": [ROWS]} | how
    plan = fxpar.plan(program, x, grad=True, **settings)
    got, want = plan.outcome(x), plan.reference_outcome(x)
    torch.testing.assert_close(got.result, want.result, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-9, atol=1e-9)
    return [c.kind for c in plan.collectives]


@pytest.mark.parametrize("rows", [12, 7])
@pytest.mark.parametrize(
    ("program", "kinds"),
    [
        (lambda x: x.diagonal().square(), []),
        (lambda x: torch.diag(x, -2).square(), ["all_reduce"]),
        (lambda x: (x @ x.detach().mT).diagonal().sum(), ["all_gather", "all_reduce"]),
        (
            lambda x: torch.diagonal_scatter(x, x[0].square()),
            ["all_gather", "reduce_scatter"],
        ),
    ],
    ids=["main", "another", "of a product", "put in"],
)
def test_diagonals(program: Any, kinds: list[str], rows: int) -> None:
    """What is sent is no larger than a row, but for the other side of a product."""
    assert sorted(sent(program, rows)) == kinds


def test_rows_and_columns_of_a_diagonal() -> None:
    specs = [("dp", "tp")]
    kinds = sent(lambda x: x.diagonal().square(), mesh="dp=2,tp=2", in_specs=specs)
    assert kinds == ["all_reduce"]


@pytest.mark.parametrize(
    ("program", "kinds"),
    [
        (lambda x: x[MORE].square(), ["all_gather"]),
        (lambda x: x.index_select(0, MORE).tanh(), ["all_gather"]),
        (lambda x: x[FEW].square(), ["all_reduce"]),
        # Summands pass on to where they are few.
        (lambda x: (x[MORE] * 2).sum(), ["all_reduce"]),
    ],
    ids=["more rows", "more selected", "few rows", "summed behind"],
)
def test_lookups(program: Any, kinds: list[str]) -> None:
    """What is looked up is gathered where that is less than the rows that are read."""
    assert sent(program) == kinds


def test_a_table_stays_as_it_lies() -> None:
    """Parameters are split where they are looked up, whatever is read of them."""

    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(8, 4))

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.table[index])

    hints, index = {"table": ("tp", None)}, torch.randint(0, 8, (64,))
    plan = fxpar.plan(Table(), index, mesh="tp=4", mode="propagate", hints=hints)
    assert [c.kind for c in plan.collectives] == ["all_reduce"]
