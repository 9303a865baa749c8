"""A batch that its axes do not divide is not merged with another dim before a loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpar

F = nn.functional


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    words = logits.shape[-1]
    return F.cross_entropy(logits.view(-1, words), labels.view(-1), ignore_index=1)


def planned(batch: int, **how):
    torch.manual_seed(0)
    logits = torch.randn(batch, 5, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 7, (batch, 5))
    plan = fxpar.plan(
        loss, logits, labels, mesh="dp=4", mode="propagate", grad=True, **how
    )
    return plan, (logits, labels)


def shapes(plan) -> set[tuple[int, ...]]:
    nodes = plan.result.normalized.nodes
    values = (node.meta.get("val") for node in nodes if node.op == "call_function")
    return {tuple(x.shape) for x in values if isinstance(x, torch.Tensor)}


def test_rows_of_six_samples_stay_on_their_ranks() -> None:
    plan, inputs = planned(6)
    assert not {shape for shape in shapes(plan) if shape[:1] == (30,)}
    assert {c.kind for c in plan.collectives} == {"all_reduce"}
    assert max(c.bytes for c in plan.collectives) <= 16  # of scalars
    got, want = plan.outcome(*inputs), plan.reference_outcome(*inputs)
    torch.testing.assert_close(got.result, want.result, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(want.result, loss(*inputs), rtol=1e-9, atol=1e-9)


def test_a_batch_that_is_divided_is_merged_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, _ = planned(8)
    assert (40, 7) in shapes(plan)
    monkeypatch.setenv("FXPAR_DISABLE", "keep_batch_dim")
    assert str(planned(8)[0].result.normalized) == str(plan.result.normalized)
    assert (30, 7) in shapes(planned(6)[0])


@pytest.mark.parametrize("width", [30, 7])
def test_a_bias_of_as_many_channels_as_there_are_rows(width: int) -> None:
    """A bias is no batch, though it has as many elements as the merged one rows."""

    def biased(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, width) + bias
        return rows.tanh().view(x.shape).square().sum()

    x = torch.randn(6, 5, width, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(width, dtype=torch.float64, requires_grad=True)
    plan = fxpar.plan(biased, x, bias, mesh="dp=4", mode="propagate", grad=True)
    got, want = plan.outcome(x, bias), plan.reference_outcome(x, bias)
    torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.result, biased(x, bias), rtol=1e-9, atol=1e-9)
