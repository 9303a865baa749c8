"""Small models, their batches and their one-device programs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

import fxpar
from fxpar import _torch
from fxpar.passes.localize import insert_reshards, localize
from fxpar.sharding.decide import Decision


def program_of(fn: Any, *args: Any, mesh: str, **kwargs: Any) -> Any:
    plan = fxpar.plan(fn, *args, mesh=mesh, mode="replicate", **kwargs)
    return plan.result.decision.program


def local_graph(decision: Decision) -> fx.Graph:
    """What each rank runs under a decision, without a schedule."""
    graph = decision.program.ops[0].node.graph
    fake_mode = _torch.fake.fake_mode_of([node.meta.get("val") for node in graph.nodes])
    return localize(insert_reshards(graph, decision), decision, fake_mode)


def mlp(layers: int = 1, width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        for _ in range(layers)
    ]
    return nn.Sequential(*blocks).double()


def batch(rows: int = 32, width: int = 16) -> torch.Tensor:
    return torch.randn(rows, width, dtype=torch.float64)
