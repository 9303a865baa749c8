"""Norms over images and volumes of which any dim of space is split: ranks sum what
their own points make of the statistics, and no image is gathered."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxpar
from fxpar._torch import decompositions

Norm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

CHANNELS, GROUPS = 6, 2


def group(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x, GROUPS, w, b)


NORMS: dict[str, Norm] = {
    "group": group,
    "one group": lambda x, w, b: F.group_norm(x, 1, w, b),
    "without weights": lambda x, w, b: F.group_norm(x * w[0], GROUPS) + b[0],
    "instance": lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    "batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
}

# Axes of the dims of space, and their sizes.
SPACE: dict[str, tuple[str, tuple[str | None, ...], tuple[int, ...]]] = {
    "columns": ("w=4", (None, "w"), (5, 8)),
    "both": ("h=2,w=2", ("h", "w"), (4, 6)),
    "odd columns": ("w=4", (None, "w"), (4, 7)),
    "depth, height": ("h=2,w=2", ("w", "h", None), (2, 4, 3)),
    "width": ("w=2", (None, None, "w"), (2, 3, 4)),
}


def planned(norm: Norm, space: str) -> tuple[Any, tuple[torch.Tensor, ...]]:
    mesh, axes, sizes = SPACE[space]
    torch.manual_seed(0)
    x = torch.randn(3, CHANNELS, *sizes).double().requires_grad_()
    w, b = (torch.randn(CHANNELS).double().requires_grad_() for _ in range(2))

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = norm(x, w, b)
        return (y * torch.sin(3 * x)).sum() + y[0].square().sum()

    specs = [(None, None, *axes), None, None]
    plan = fxpar.plan(
        fn, x, w, b, mesh=mesh, in_specs=specs, grad=True, mode="propagate"
    )
    return plan, (x, w, b)


QUICK = {
    ("group", "both"),
    ("group", "odd columns"),
    ("group", "depth, height"),
    ("instance", "columns"),
}


@pytest.mark.parametrize(
    ("name", "space"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK))
        for case in itertools.product(NORMS, SPACE)
    ],
)
def test_statistics_are_summed_over_ranks(name: str, space: str) -> None:
    plan, args = planned(NORMS[name], space)
    assert {c.kind for c in plan.collectives} == {"all_reduce"}
    # Sums of a channel of a sample, and never a row of points.
    assert max(c.bytes for c in plan.collectives) <= 3 * CHANNELS * 8 * 3
    got, want = plan.outcome(*args), plan.reference_outcome(*args)
    torch.testing.assert_close(got.result, want.result, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-9, atol=1e-9)


def test_points_as_one_dim_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's own decomposition costs."""
    monkeypatch.setattr(decompositions, "TABLE", {})
    monkeypatch.setattr("fxpar._torch.inductor.TABLE", {})
    plan, _ = planned(group, "columns")
    assert "all_gather" in {c.kind for c in plan.collectives}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("weights", [True, False])
def test_decompositions_are_the_ops(dtype: torch.dtype, weights: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, CHANNELS, 4, 5, dtype=dtype)
    w = torch.randn(CHANNELS, dtype=dtype) if weights else None
    sizes = 3, CHANNELS, 20, GROUPS
    aten, table = torch.ops.aten, decompositions.TABLE
    forward, backward = aten.native_group_norm, aten.native_group_norm_backward
    near: dict[str, float] = {"rtol": 2e-2, "atol": 2e-2}
    if dtype is torch.float64:
        near = {"rtol": 1e-12, "atol": 1e-12}
    args = (x, w, None if w is None else w * 2, *sizes, 1e-5)
    want = forward(*args)
    torch.testing.assert_close(table[forward.default](*args), want, **near)
    of_backward = (x.cos(), x, *want[1:], w, *sizes)
    for mask in ([True, weights, weights], [False, weights, weights]):
        got = table[backward.default](*of_backward, mask)
        wanted = backward(*of_backward, mask)
        assert [g is None for g in got] == [not asked for asked in mask]
        for a, b in zip(got, wanted, strict=True):
            if a is not None:
                assert a.dtype == b.dtype
                torch.testing.assert_close(a, b, **near)
