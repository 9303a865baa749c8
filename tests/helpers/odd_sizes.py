"""Small programs whose dims axes do not divide, or ranks share unequally."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fxpar
from fxpar.sharding.mesh import Mesh

Args = tuple[torch.Tensor, ...]


def arguments(rows: int, inner: int, words: int) -> Args:
    """x [rows, 4], w [4, inner], b [inner] and v [inner, words]."""
    torch.manual_seed(0)
    shapes = ((rows, 4), (4, inner), (inner,), (inner, words))
    return tuple(
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes
    )


def check(program: Callable[..., Any], sizes: tuple[int, ...], mesh: str) -> Any:
    """Every dim that can be is split; results and gradients are those of one device."""
    args, names = arguments(*sizes), Mesh.parse(mesh).names
    rows, inner = names[0], names[-1]
    specs = [(rows, None), (None, inner), (inner,), (None, rows)]
    plan = fxpar.plan(
        program, *args, mesh=mesh, mode="propagate", grad=True, in_specs=specs
    )
    assert not plan.result.decision.is_even
    got, want = plan.outcome(*args), plan.reference_outcome(*args)
    torch.testing.assert_close(got.result, want.result, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(want.result, program(*args), rtol=1e-9, atol=1e-9)
    return plan
