"""What a search counts for a plan, and what the simulation of the lowered plan says."""

from __future__ import annotations

import pytest
import torch

import fxpar
from fxpar.sharding.hardware import BUILT_IN


def test_no_gather_widens_a_small_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 columns a rank instead of 16 start up in the same time."""
    monkeypatch.setenv("FXPAR_HARDWARE", "h100")
    x = torch.randn(32, 1024, dtype=torch.float64)
    w = torch.randn(1024, 16, dtype=torch.float64)
    plan = fxpar.plan(
        torch.mm,
        x,
        w,
        mesh="dp=2,tp=2",
        in_specs=[("dp", None), (None, "tp")],
        mode="search",
    )
    assert not plan.collectives
    torch.testing.assert_close(plan.simulate(x, w), x @ w)


@pytest.mark.parametrize("machine", [m.name for m in BUILT_IN])
def test_splitting_a_matmul_never_prolongs_it(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXPAR_HARDWARE", machine)
    x = torch.empty(32, 1024, dtype=torch.float64, device="meta")
    w = torch.empty(1024, 16, dtype=torch.float64, device="meta")
    took = [
        fxpar.plan(
            torch.mm, x, w, mesh="tp=8", in_specs=specs, mode="propagate"
        ).predicted.compute
        for specs in ([None, (None, None)], [(None, None), (None, "tp")])
    ]
    assert took[1] <= took[0]
