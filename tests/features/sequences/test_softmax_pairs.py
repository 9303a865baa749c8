"""A softmax along a split dim: one message in the place of an all-reduce for each of
the largest score, the sum and the label's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxpar

ROWS, WORDS = 8, 16
SPLIT = (None, "tp")


def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, labels)


def smoothed(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, labels, label_smoothing=0.1)


def each(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, labels, reduction="none") * labels.ne(0)


def softmax(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (x.softmax(-1) * x).sum(-1)


def logarithm(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (x.log_softmax(-1) * x).sum(-1)


def logsumexp(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return x.logsumexp(-1)


def inputs(rows: int = ROWS, words: int = WORDS) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = 5 * torch.randn(rows, words, dtype=torch.float64)
    labels = torch.randint(0, words, (rows,))
    labels[::3] = -100
    return x.requires_grad_(), labels


def planned(fn: Any, *args: Any, mesh: str = "tp=4", **more: Any) -> Any:
    more = {"mode": "propagate", "grad": True, "schedule": "none", **more}
    rows = "dp" if "dp" in mesh else None
    specs = [(rows, "tp"), (rows,)]
    return fxpar.plan(fn, *args, mesh=mesh, in_specs=specs, **more)


def kinds(plan: Any) -> Counter:
    return Counter(c.kind for c in plan.collectives if "tp" in c.axes)


def matches(plan: Any, *args: Any) -> None:
    got, want = plan.simulate(*args), plan.reference(*args)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.fixture(autouse=True)
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")


# How many all-reduces are left: of what sums products with probabilities.
PROGRAMS: dict[Callable[..., Any], int] = {
    loss: 0,
    each: 0,
    smoothed: 1,
    logsumexp: 0,
    softmax: 2,
    logarithm: 2,
}


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize(
    "mesh", ["tp=4", pytest.param("dp=2,tp=2", marks=pytest.mark.slow)]
)
def test_one_message(fn: Any, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = inputs()
    plan = planned(fn, *args, mesh=mesh)
    assert kinds(plan)["all_gather"] == 1
    matches(plan, *args)
    monkeypatch.setenv("FXPAR_DISABLE", "pair_reductions")
    before = planned(fn, *args, mesh=mesh)
    assert "all_gather" not in kinds(before)
    saved = kinds(before)["all_reduce"] - kinds(plan)["all_reduce"]
    assert saved == (3 if fn in (loss, each, smoothed) else 2)
    assert plan.predicted.seconds < before.predicted.seconds


def test_a_number_subtracted_from_shifted_scores() -> None:
    def fn(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shifted = x - x.amax(-1, keepdim=True).detach()
        return shifted.exp().sum(-1).log() + (shifted - 1.0).square().sum(-1)

    args = inputs()
    plan = planned(fn, *args)
    assert kinds(plan)["all_gather"] == 1
    matches(plan, *args)


def hidden(rank: int | None) -> torch.Tensor:
    """Scores of which a rank, or all, have none that is a number."""
    x = inputs()[0].detach().clone()
    part = slice(None) if rank is None else slice(4 * rank, 4 * rank + 4)
    x[:, part] = -math.inf
    return x.requires_grad_()


@pytest.mark.parametrize("rank", [0, 3, None])
@pytest.mark.parametrize("fn", [logsumexp, loss], ids=lambda fn: fn.__name__)
def test_ranks_without_a_score(fn: Any, rank: int | None) -> None:
    args = hidden(rank), inputs()[1].clamp(4, 11)
    matches(planned(fn, *args), *args)


def test_long_messages_are_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather sends what all ranks have, an all-reduce about two parts."""
    monkeypatch.setenv("FXPAR_HARDWARE", "cpu")
    x = torch.empty(1 << 16, 64, device="meta", requires_grad=True)
    labels = torch.empty(1 << 16, dtype=torch.int64, device="meta")
    plan = planned(loss, x, labels, mesh="tp=16")
    assert kinds(plan) == {"all_reduce": 3}


def other_shift(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (x - x.amax(-1, keepdim=True) / 2).exp().sum(-1)


def other_scores(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (2 * x - x.amax(-1, keepdim=True)).exp().sum(-1)


def other_read(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    largest = x.amax(-1, keepdim=True)
    return (x - largest - labels[:, None]).exp().sum(-1) + largest[:, 0]


@pytest.mark.parametrize(
    "fn, left", [(other_shift, 0), (other_scores, 2), (other_read, 2)]
)
def test_what_is_no_softmax(fn: Any, left: int) -> None:
    """Of another shift made of the largest score the weights are others; else it is
    left alone."""
    args = inputs()[0].detach(), inputs()[1].clamp(0, 3)
    plan = planned(fn, *args, grad=False)
    assert kinds(plan)["all_reduce"] == left
    matches(plan, *args)
