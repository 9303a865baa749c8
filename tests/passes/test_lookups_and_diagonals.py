"""Lookups and diagonals along split dims: what is sent is the cheapest that computes
what one device does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxpar
from fxpar.sharding.propagate import gather_early
from tests.helpers.pairs import diagonal

ROWS = ("tp", None)

MORE = torch.randint(0, 12, (40,))
FEW = torch.tensor([7, 2])


def sent(program: Callable[..., Any], rows: int = 12, **how: Any) -> list[str]:
    """The collectives of a program of one matrix whose rows are split, which computes
    what one device does, gradients too."""
    torch.manual_seed(0)
    x = torch.randn(rows, rows, dtype=torch.float64, requires_grad=True)
    return [c.kind for c in collectives(program, x, **{"in_specs": [ROWS]} | how)]


def collectives(
    program: Callable[..., Any], *args: torch.Tensor, mesh: str = "tp=4", **how: Any
) -> list[Any]:
    """Those of a program, forward and backward, which computes what one device does."""
    settings: Any = {"mesh": mesh, "mode": "propagate"} | how
    plan = fxpar.plan(program, *args, grad=True, **settings)
    got, want = plan.outcome(*args), plan.reference_outcome(*args)
    torch.testing.assert_close(got.result, want.result, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-9, atol=1e-9)
    return list(plan.collectives)


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


def summed(x: torch.Tensor) -> torch.Tensor:
    """Of all rows, without a kink before the sum."""
    return reduce(operator.add, [y * i for i, y in enumerate(x.unbind(0), 1)])


# Rows that are cut out, and what is sent: as (kind, rows), of 12.
CUTS: dict[str, tuple[Callable[[torch.Tensor], Any], list[tuple[str, int]]]] = {
    "all unbound": (lambda x: [y.sin() for y in x.unbind(0)], [("all_gather", 12)]),
    "all summed": (summed, [("all_reduce", 1)]),
    "some unbound": (
        lambda x: [y.sin() for y in x.unbind(0)[:2]],
        [("all_reduce", 1)] * 2,
    ),
    "all selected": (
        lambda x: [x[i].sin() for i in range(12)],
        [("all_gather", 12)],
    ),
    "some selected": (lambda x: [x[i].sin() for i in (7, 2)], [("all_reduce", 2)]),
    "short slices": (
        lambda x: [x[3 * i : 3 * i + 3].sin() for i in range(4)],
        [("all_gather", 12)],
    ),
}


def cut_rows(name: str) -> list[tuple[str, int]]:
    """(kind, rows) of what cuts of 12 rows send forward."""
    x = torch.randn(12, 5, dtype=torch.float64)
    how: Any = {"mesh": "tp=4", "mode": "propagate", "in_specs": [ROWS]}
    plan = fxpar.plan(CUTS[name][0], x, **how)
    torch.testing.assert_close(plan.simulate(x), plan.reference(x))
    gathers = [c for c in plan.collectives if c.kind == "all_gather"]
    assert bool(gathers) == any("gathered: " in note for note in plan.notes)
    return [(c.kind, c.bytes // (5 * 8)) for c in plan.collectives]


@pytest.mark.parametrize("name", CUTS)
def test_cuts(name: str) -> None:
    """Rows are summed, each by those who have them, or gathered once for all cuts."""
    assert cut_rows(name) == CUTS[name][1]


@pytest.mark.parametrize("rows", [12, 7])
def test_gradients_of_cuts(rows: int) -> None:
    kinds = sent(lambda x: summed(x.sin()) + x.unbind(0)[3].exp(), rows)
    assert kinds == ["all_reduce"] * 2


def test_cuts_by_themselves_send_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_early, "_cuts", lambda *_: {})
    assert cut_rows("all selected") == [("all_reduce", 1)] * 12


LAST = torch.tensor([3, 0, 5, 2, 2, 1, 4, 5])

# Lookups in each row of a batch, of which a rank reads its own.
OWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one of each": lambda x: x[torch.arange(8), LAST].sin(),
    "several of each": lambda x: x[torch.arange(8)[:, None], LAST.view(4, 2).T[0]],
    "dims apart": lambda x: x[torch.arange(8), :, LAST % 3].sin(),
    "behind others": lambda x: x.movedim(0, 1)[:, torch.arange(8), LAST % 3].sin(),
    "a diagonal": lambda x: x[torch.arange(7), torch.arange(7)].sin(),
}


@pytest.mark.parametrize("mesh", ["tp=4", "tp=3"])
@pytest.mark.parametrize("name", OWN)
def test_a_rank_looks_up_in_its_own_rows(name: str, mesh: str) -> None:
    """Nothing is sent."""
    x = torch.randn(8, 7, 3, dtype=torch.float64, requires_grad=True)
    specs = [("tp", None, None)]
    assert not collectives(OWN[name], x, mesh=mesh, in_specs=specs)


def test_values_that_stand_for_all_rows() -> None:
    x = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    y = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    index = [torch.arange(8)]
    found = collectives(
        lambda x, y: x.index_put(index, y, accumulate=True).sin(),
        *(x, y),
        in_specs=[ROWS, None],
    )
    assert [(c.kind, c.bytes) for c in found] == [("all_reduce", 8)]


# Of 4 images of 8 channels, 6 x 5, sampled at 4 x 2 places: how images and places lie,
# and what is sent: the gradient of what ranks have alike, in bytes.
SAMPLED: dict[str, tuple[Any, Any, list[tuple[str, int]]]] = {
    "batch": (("tp", None, None, None), ("tp", None, None, None), []),
    "channels": ((None, "tp", None, None), None, [("all_reduce", 4 * 4 * 2 * 2 * 8)]),
    "rows": (None, (None, "tp", None, None), [("all_reduce", 4 * 8 * 6 * 5 * 8)]),
    "columns": (None, (None, None, "tp", None), [("all_reduce", 4 * 8 * 6 * 5 * 8)]),
}


def sampled(
    how: str, mesh: str = "tp=4", mode: str = "bilinear", images: int = 4
) -> list[tuple[str, int]]:
    """What is sent where images are sampled by a grid."""
    image, places, _ = SAMPLED[how]
    torch.manual_seed(0)
    x = torch.randn(images, 8, 6, 5, dtype=torch.float64, requires_grad=True)
    grid = (torch.rand(images, 4, 2, 2).double() * 2 - 1).requires_grad_()
    found = collectives(
        lambda x, grid: F.grid_sample(x, grid, mode=mode, align_corners=False),
        *(x, grid),
        mesh=mesh,
        in_specs=[image, places],
    )
    return [(c.kind, c.bytes) for c in found]


@pytest.mark.parametrize(
    ("how", "mode"), diagonal([*SAMPLED], ["bilinear", "nearest", "bicubic"])
)
def test_samples_by_a_grid(how: str, mode: str) -> None:
    """An image is whole in its space alone."""
    mesh = "tp=2" if how == "columns" else "tp=4"
    assert sampled(how, mesh, mode) == SAMPLED[how][2]


def test_samples_by_a_grid_of_unlike_shards() -> None:
    assert sampled("batch", "tp=3", images=5) == []
    assert sampled("channels", "tp=3") == SAMPLED["channels"][2]
