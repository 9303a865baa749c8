"""What several ops read of one tensor, sent once, is priced once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxpar

ROWS = [("tp", None)]


@pytest.fixture(autouse=True)
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")


def searched(fn: Callable[..., Any], *args: Any, **how: Any) -> Any:
    how = {"mesh": "tp=4", "mode": "search", "in_specs": ROWS, **how}
    return fxpar.plan(fn, *args, **how)


def priced(plan: Any) -> float:
    """Seconds that the search says a step takes."""
    return float(plan.result.decision.search.predicted)


def row_by_row(x: torch.Tensor) -> torch.Tensor:
    return sum(x.select(0, k).tanh() for k in range(16))


@pytest.mark.parametrize("rows", [16, 64])
def test_what_a_hint_lays_out_is_sent_once(rows: int) -> None:
    """Each select reads all rows, which lie split: they are gathered for all of them,
    and that is what the search says."""
    plan = searched(row_by_row, torch.randn(rows, 1 << 12))
    assert len(plan.collectives) == 1
    assert priced(plan) == pytest.approx(plan.predicted.seconds, rel=0.05)
    assert plan.result.decision.search.is_proved


def three_points(x: torch.Tensor) -> torch.Tensor:
    return x[2:] - 2 * x[1:-1] + x[:-2]


@pytest.mark.parametrize("grad", [False, True])
def test_slices_and_their_gradients_share_an_exchange(grad: bool) -> None:
    x = torch.randn(1 << 10, 1 << 13, requires_grad=grad)
    plan = searched(three_points, x, out_specs=ROWS, grad=grad)
    assert [c.kind for c in plan.collectives] == ["permute"] * (1 + grad)
    assert plan.result.decision.search.is_proved


@pytest.mark.parametrize("step", [1, 4])
def test_rows_cut_one_by_one_are_summed_once(step: int) -> None:
    """Sixteen rows of 256 are summed at once, in place of what each of them is, or all
    of the tensor; so the search says."""

    def cut(x: torch.Tensor) -> torch.Tensor:
        h = x.exp()
        return sum(h.select(0, step * k).tanh() for k in range(16))

    x = torch.empty(256, 1 << 16)
    plan = searched(cut, x)
    assert [c.kind for c in plan.collectives] == ["reduce_scatter"]
    assert plan.collectives[0].bytes == 16 * x[0].nbytes
    assert priced(plan) == pytest.approx(plan.predicted.seconds, rel=0.25)


def test_cuts_far_apart_or_of_most_rows_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def slices(fn: Callable[..., Any], n: int) -> int:
        plan = fxpar.plan(fn, torch.randn(n, 4), mesh="tp=2", mode="propagate")
        nodes = plan.result.normalized.nodes
        return sum("slice" in str(node.target) for node in nodes)

    assert slices(lambda x: x[0] + x[1], 16) == 1
    assert slices(lambda x: x[0] + x[1] + x[15], 64) == 0
    assert slices(lambda x: x[0] + x[1] + x[2], 8) == 0
    assert slices(lambda x: x[0] * 2, 16) == 0
