"""``options={"fuse": "interpret"}``: whole models with their regions as single ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import fxpar
from fxpar.runtime.steps import lowering_steps
from tests.helpers.models import NAMES, build_loss
from tests.helpers.spawn import shared_pool

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.usefixtures("propagated"),
]

STEPS = 4


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def losses(name: str, mesh: str, fuse: str, sharded: bool) -> tuple[list[float], int]:
    """Of a few steps, and how many regions the graphs had."""
    torch._dynamo.reset()
    model, batch = build_loss(name)
    if sharded:
        model = fxpar.shard(model, mesh=mesh)
    options: dict[str, Any] = {"mesh": mesh, "codegen": "eager", "fuse": fuse}
    compiled = torch.compile(model, backend="fxpar", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(5)
    found, out, kept = [], [], lowering_steps.fuse_graph

    def counting(*args: Any, **kwargs: Any) -> Any:
        found.append(kept(*args, **kwargs))
        return found[-1]

    with mock.patch.object(lowering_steps, "fuse_graph", counting):
        for _ in range(STEPS):
            loss = compiled(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())
    return out, sum(len(each.programs) for each in found)


@pytest.mark.parametrize(
    ("mesh", "sharded"), [("tp=4", False), ("dp=2,tp=2", False), ("dp=4", True)]
)
@pytest.mark.parametrize("name", NAMES)
def test_regions_change_no_loss(name: str, mesh: str, sharded: bool) -> None:
    pool = shared_pool(4)
    plain = pool.run(losses, name, mesh, "none", sharded, timeout=400.0)
    fused = pool.run(losses, name, mesh, "interpret", sharded, timeout=400.0)
    for (want, none), (got, regions) in zip(plain, fused, strict=True):
        assert not none
        assert got == pytest.approx(want, rel=1e-6, abs=0.0)
        if mesh == "tp=4" and name != "resnet":
            assert regions > 0
