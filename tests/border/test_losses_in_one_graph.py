"""Losses in which a trace of torch ends, or goes wrong: one graph here, with the
numbers and errors of one device, in both modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fxpar
from tests.helpers.spawn import shared_pool
from tests.helpers.training import gradients

F64 = torch.float64
OPTIONS = {"mesh": "dp=2", "inputs": "local", "codegen": "eager"}


def aligned(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Four steps of three classes, two labels each."""
    rows = len(y)
    log_probs = y.view(rows, 4, 3).transpose(0, 1).log_softmax(-1)
    lengths = torch.full((rows,), 4), torch.full((rows,), 2)
    return F.ctc_loss(log_probs, labels, *lengths)


def normal(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    mean, deviation = y.view(len(y), 2, 6).unbind(1)
    return nn.GaussianNLLLoss(full=True)(mean, labels[:, :1], deviation.exp())


LOSSES = {"aligned": aligned, "normal": normal}


def trained(name: str, is_rank: bool) -> tuple[torch.Tensor, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(5, 12).double()
    x, labels = torch.randn(8, 5, dtype=F64), torch.randint(1, 3, (8, 2))

    def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return LOSSES[name](model(x), labels)

    run: Callable[..., torch.Tensor] = loss
    if is_rank:
        run = torch.compile(loss, backend="fxpar", fullgraph=True, options=OPTIONS)
        x, labels = (t.chunk(2)[dist.get_rank()] for t in (x, labels))
    value = run(x, labels)
    value.backward()
    return value.detach(), gradients(model)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", LOSSES)
def test_means_are_those_of_the_whole_batch(name: str) -> None:
    want = trained(name, is_rank=False)
    for got in shared_pool(2).run(trained, name, True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("joined", [False, True])
def test_alignments(joined: bool, reduction: str, zero_infinity: bool) -> None:
    """Sequences of unlike lengths, some too short for their targets."""
    torch.manual_seed(0)
    x = torch.randn(6, 4, 5, dtype=F64, requires_grad=True)
    read = torch.tensor([6, 5, 6, 2 if zero_infinity else 6])
    said = torch.tensor([2, 3, 1, 3])
    targets = torch.randint(1, 5, (9,) if joined else (4, 3))

    def loss(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        log_probs = x.log_softmax(-1)
        how = {"reduction": reduction, "zero_infinity": zero_infinity}
        return F.ctc_loss(log_probs, targets, read, said, **how)

    plan = fxpar.plan(
        loss,
        *(x, targets),
        mesh="dp=2",
        grad=True,
        in_specs=[(None, "dp", None), None],
        mode="propagate",
    )
    got, want = plan.outcome(x, targets), loss(x, targets)
    torch.testing.assert_close(got.result, want, rtol=1e-12, atol=1e-12)
    (wanted,) = torch.autograd.grad(want.sum(), x)
    torch.testing.assert_close(got.gradients["x"], wanted, rtol=1e-12, atol=1e-12)
    kinds = {c.kind for c in plan.collectives}
    assert joined == ("all_gather" in kinds)  # where a sequence's targets lie is data


def test_one_sequence_without_a_batch() -> None:
    x = torch.randn(6, 5, dtype=F64)
    args = x.log_softmax(-1), torch.tensor([1, 2]), torch.tensor(6), torch.tensor(2)
    plan = fxpar.plan(F.ctc_loss, *args, mesh="dp=2")
    torch.testing.assert_close(plan.simulate(*args), F.ctc_loss(*args))


@pytest.mark.parametrize("shape", [(8, 4), (8, 1), (8,)])
def test_variances(shape: tuple[int, ...]) -> None:
    x, y = torch.randn(8, 4, dtype=F64), torch.randn(8, 4, dtype=F64)
    var = torch.rand(shape, dtype=F64)
    plan = fxpar.plan(F.gaussian_nll_loss, x, y, var, mesh="dp=2", mode="propagate")
    torch.testing.assert_close(plan.simulate(x, y, var), F.gaussian_nll_loss(x, y, var))
    var[3] = -1.0
    with pytest.raises(RuntimeError, match="var has negative entry"):
        plan.simulate(x, y, var)
    with pytest.raises(ValueError, match="var is of incorrect size"):
        fxpar.plan(F.gaussian_nll_loss, x, y, var[:3], mesh="dp=2")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(8, 4), (4,)])
def test_targets_end_at_the_first_negative(
    shape: tuple[int, ...], reduction: str
) -> None:
    """Not in torch's own decomposition (2.13), which any other backend takes."""
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=F64, requires_grad=True)
    rows = [[0, 2, -1, 1], [3, -1, 0, 0], [-1, 0, 1, 2], [1, 0, 3, 2]]
    targets = torch.tensor(rows * 2 if len(shape) == 2 else rows[0])

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.multilabel_margin_loss(x, targets, reduction=reduction)

    plan = fxpar.plan(loss, x, mesh="dp=2", grad=True, mode="propagate")
    got, want = plan.outcome(x), loss(x)
    torch.testing.assert_close(got.result, want)
    (wanted,) = torch.autograd.grad(want.sum(), x)
    torch.testing.assert_close(got.gradients["x"], wanted)
