"""Ops that are decomposed so that ranks can split what they are made of: weights by
their norms, zeros without memory."""

from __future__ import annotations

import pytest
import torch

import fxpar
from fxpar._torch import decompositions

BACKWARD = torch.ops.aten._weight_norm_interface_backward.default


def planned(v: torch.Tensor, dim: int, at: int) -> fxpar.planning.TracedPlan:
    """Of a weight that lies split along dim ``at``, with a norm for each row of
    ``dim``."""
    shape = [1] * v.dim()
    shape[dim] = v.shape[dim]
    g = torch.rand(shape, dtype=v.dtype, requires_grad=True)
    spec = ["tp" if d == at else None for d in range(v.dim())]
    plan = fxpar.plan(
        lambda v, g: torch._weight_norm(v, g, dim).sin(),
        *(v, g),
        mesh="tp=2",
        in_specs=[tuple(spec), None],
        out_specs=[tuple(spec)],
        grad=True,
        mode="propagate",
    )
    got, want = plan.outcome(v, g), plan.reference_outcome(v, g)
    torch.testing.assert_close(got.result, want.result, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-12, atol=1e-12)
    return plan


@pytest.mark.parametrize(("dim", "at"), [(0, 0), (0, 1), (2, 1), (2, 2)])
def test_a_weight_is_never_gathered(dim: int, at: int) -> None:
    v = torch.randn(8, 6, 4, dtype=torch.float64, requires_grad=True)
    kinds = {c.kind for c in planned(v, dim, at).collectives}
    # Sums of squares and of products where a norm is of rows on several ranks.
    assert kinds <= {"all_reduce"}


def test_gathered_without_a_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(decompositions.TABLE, BACKWARD)
    v = torch.randn(8, 6, 4, dtype=torch.float64, requires_grad=True)
    with pytest.warns(fxpar.errors.FxparWarning, match="no sharding rule"):
        plan = planned(v, 0, 1)
    assert "all_gather" in {c.kind for c in plan.collectives}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_decomposition_is_the_op(dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(0)
    v, g = torch.randn(6, 8), torch.rand((6, 1) if dim == 0 else (1, 8))
    v, g = v.to(dtype), g.to(dtype)
    w, norm = torch.ops.aten._weight_norm_interface(v, g, dim)
    args = (w.cos(), v, g, norm, dim)
    for got, want in zip(
        decompositions.TABLE[BACKWARD](*args), BACKWARD(*args), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_zeros_without_memory_are_zeros() -> None:
    """Forward derivatives are made of them; their fake views are on no device."""

    def derivative(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(lambda x: (x @ w).tanh() @ w.mT, (x,), (x.sin(),))[1]

    x = torch.randn(8, 4, dtype=torch.float64)
    w = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    specs = [("dp", None), None]
    plan = fxpar.plan(
        derivative, x, w, mesh="dp=2", in_specs=specs, grad=True, mode="propagate"
    )
    assert "_efficientzerotensor" not in str(plan)
    got, want = plan.outcome(x, w), plan.reference_outcome(x, w)
    torch.testing.assert_close(got.result, derivative(x, w))
    torch.testing.assert_close(got.gradients, want.gradients)
