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
