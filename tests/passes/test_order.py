"""Scans and choices along a dim that is split: what ranks gather of one another, and
that the ranks compute what one device does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxpar
from fxpar.planning import TracedPlan

ROWS, COLUMNS = 24, 16


def cumsum(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0)


def cumprod(x: torch.Tensor) -> torch.Tensor:
    return x.cumprod(0)


def logcumsumexp(x: torch.Tensor) -> torch.Tensor:
    return x.logcumsumexp(0)


def cummax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(x.cummax(0))


def cummin(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(x.cummin(0))


def argmax(x: torch.Tensor) -> torch.Tensor:
    return x.argmax(0)


def largest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(x.max(0))


def three(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(x.topk(3, 0))


def third(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(x.kthvalue(3, 0))


def flipped(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


# What they send of the whole [24, 16] in float64 over four ranks.
SENT: dict[Callable[..., Any], dict[str, int]] = {
    cumsum: {"all_gather": 4 * COLUMNS * 8},
    cumprod: {"all_gather": 4 * COLUMNS * 8},
    logcumsumexp: {"all_gather": 4 * COLUMNS * 8},
    cummax: {"all_gather": 2 * 4 * COLUMNS * 8},
    cummin: {"all_gather": 2 * 4 * COLUMNS * 8},
    argmax: {"all_gather": 2 * 4 * COLUMNS * 8},
    largest: {"all_gather": 2 * 4 * COLUMNS * 8},
    three: {"all_gather": 2 * 4 * 3 * COLUMNS * 8},
    third: {"all_gather": 2 * 4 * 3 * COLUMNS * 8},
    flipped: {"permute": ROWS // 4 * COLUMNS * 8},
}


def planned(fn: Callable[..., Any], x: torch.Tensor, **how: Any) -> TracedPlan:
    return fxpar.plan(fn, x, mesh="tp=4", in_specs=[("tp", None)], **how)


def operand(rows: int = ROWS, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(rows, COLUMNS, dtype=torch.float64)


def sent(plan: TracedPlan) -> dict[str, int]:
    out: dict[str, int] = {}
    for c in plan.collectives:
        out[c.kind] = out.get(c.kind, 0) + c.bytes
    return out


@pytest.mark.parametrize("fn", SENT, ids=lambda fn: fn.__name__)
def test_what_stands_for_a_shard_is_gathered(fn: Callable[..., Any]) -> None:
    x = operand()
    spec = ("tp", None) if fn not in (argmax, largest, three, third) else None
    results = 2 if fn in (cummax, cummin, largest, three, third) else 1
    plan = planned(fn, x, mode="propagate", out_specs=[spec] * results)
    torch.testing.assert_close(plan.simulate(x), fn(x), rtol=1e-12, atol=1e-12)
    assert sent(plan) == SENT[fn]


def test_the_gradient_of_a_scan_gathers_totals_too() -> None:
    def weighted(x: torch.Tensor) -> torch.Tensor:
        return (x.cumsum(0) * x).sum(1)

    x = operand()
    x.requires_grad_()
    plan = planned(weighted, x, grad=True, mode="propagate", out_specs=[("tp",)])
    got, want = plan.simulate(x), plan.reference(x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    shard = ROWS // 4 * COLUMNS * 8
    assert max(c.bytes for c in plan.collectives) <= shard


@pytest.mark.parametrize("rows", [3, 5, 7])
@pytest.mark.parametrize("fn", [cumsum, cummax, argmax, largest])
def test_shards_that_are_not_alike(fn: Callable[..., Any], rows: int) -> None:
    """And empty ones: no row at all is never chosen, however small the others are."""
    for x in (operand(rows), torch.full((rows, COLUMNS), -torch.inf).double()):
        plan = planned(fn, x, mode="propagate")
        torch.testing.assert_close(plan.simulate(x), fn(x))


def test_more_rows_are_asked_for_than_a_shard_has() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.kthvalue(ROWS // 4 + 2, 0, True)[0]

    x = operand()
    x[3], x[20] = torch.nan, torch.inf
    plan = planned(fn, x, mode="propagate")
    torch.testing.assert_close(plan.simulate(x), fn(x), equal_nan=True)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.linalg.svdvals(x + 1),
        lambda x: sum((x + 1).unbind(0)),
    ],
)
def test_what_is_gathered_for_an_op_that_needs_the_dim_whole_is_noted(fn: Any) -> None:
    plan = planned(fn, operand(), mode="propagate")
    nbytes = 3 * ROWS // 4 * COLUMNS * 8
    (note, *_) = [note for note in plan.notes if note.startswith("gathered: ")]
    assert "reads dim 0" in note and "over tp" in note and "test_order.py" in note
    assert f"up to {nbytes} bytes to each rank" in note
    few = planned(lambda x: (x + 1).topk(3, 0)[0], operand(), mode="propagate")
    assert not any(note.startswith("gathered: ") for note in few.notes)


def test_ties_and_nans_are_chosen_as_on_one_device() -> None:
    x = torch.ones(ROWS, COLUMNS)
    x[5:, 3], x[7, 4], x[13, 4] = 2.0, torch.nan, torch.nan
    for fn in (argmax, largest, cummax, cummin):
        plan = planned(fn, x, mode="propagate")
        got, want = plan.simulate(x), fn(x)
        torch.testing.assert_close(got, want, equal_nan=True)


def test_a_batch_that_is_scanned_is_not_cut_in_time() -> None:
    """Samples meet in a scan along them: parts of a batch have another sum each."""
    x = operand()
    whole = fxpar.plan(cumsum, x, mesh="dp=2", mode="propagate")
    torch.testing.assert_close(whole.simulate(x), x.cumsum(0))


def middle(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(x.median(0))


def most_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(x.topk(20, 0))


def in_order(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple((x * 4).round().sort(dim=0, stable=True))


@pytest.mark.parametrize("fn", [in_order, middle, most_rows])
def test_what_needs_whole_rows_has_them_by_an_exchange(fn: Callable[..., Any]) -> None:
    """Another dim is split instead; equal rows of a stable sort keep their places."""
    spec = (None, "tp") if fn is not middle else ("tp",)
    x = operand()
    plan = planned(fn, x, mode="propagate", out_specs=[spec] * 2)
    torch.testing.assert_close(plan.simulate(x), fn(x), rtol=0, atol=0)
    assert sent(plan) == {"all_to_all": ROWS // 4 * COLUMNS * 8}
    assert not [note for note in plan.notes if "reads dim" in note]


def test_gradients_of_a_sort_are_exchanged_back() -> None:
    x = operand().requires_grad_()
    plan = planned(lambda x: x.sort(0)[0].sin(), x, mode="propagate", grad=True)
    torch.testing.assert_close(plan.simulate(x), plan.reference(x))
    kinds = [c.kind for c in plan.collectives]
    assert kinds == ["all_to_all", "all_to_all"]


@pytest.mark.parametrize("rows", [ROWS, 7])
def test_a_sequence_that_is_searched_may_be_split(rows: int) -> None:
    """Each rank counts its rows before an element."""
    ordered = torch.linspace(-1, 1, rows).double()
    x = torch.randn(5, dtype=torch.float64)

    def searched(ordered: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(ordered, x, right=True)

    plan = fxpar.plan(
        searched, ordered, x, mesh="tp=4", in_specs=[("tp",), None], mode="propagate"
    )
    assert torch.equal(plan.simulate(ordered, x), searched(ordered, x))
