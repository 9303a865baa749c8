"""Small models, their batches and their one-device programs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fxpar


def program_of(fn: Any, *args: Any, mesh: str, **kwargs: Any) -> Any:
    plan = fxpar.plan(fn, *args, mesh=mesh, mode="replicate", **kwargs)
    return plan.result.decision.program


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
