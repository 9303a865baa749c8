"""A training step whose update is one op with the reduction of its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fxpar
from fxpar.runtime.steps import lowering_steps
from tests.helpers.spawn import shared_pool


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def steps(codegen: str, fuse: str) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Parameter and state after a few steps, and how many ops write in place."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fxpar.shard(nn.Linear(64, 128, bias=False), mesh="dp=2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {"mesh": "dp=2", "codegen": codegen, "fuse": fuse}
    options["inputs"] = "local"  # each rank reads its own batch
    writes, kept = 0, lowering_steps.fuse_graph

    def counting(graph: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal writes
        made = kept(graph, *args, **kwargs)
        op = torch.ops.fxpar.region_.default
        writes += sum(
            len(n.args[1]) for n in graph.find_nodes(op="call_function", target=op)
        )
        return made

    weight = model.weight
    with mock.patch.object(lowering_steps, "fuse_graph", counting):
        step = fxpar.train_step(model, loss_of, optimizer, options=options)
        for _ in range(3):
            step(torch.randn(64, 64))
    assert model.weight is weight
    state = optimizer.state[weight]
    moments = [state[k].full_tensor() for k in ("exp_avg", "exp_avg_sq")]
    return weight.full_tensor().detach(), moments, writes


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_update(codegen: str) -> None:
    pool = shared_pool(2)
    plain = pool.run(steps, codegen, "none")
    fused = pool.run(steps, codegen, "interpret")
    for (weight, moments, none), (w, m, writes) in zip(plain, fused, strict=True):
        assert (none, writes) == (0, 3)
        for got, want in zip([w, *m], [weight, *moments], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
