"""A mixture of experts with a loss of its router, fed by rank."""

from __future__ import annotations

import torch
from torch import nn

from fxpar.sharding.plan import Plan
from tests.helpers.mixture import mixture

WIDTH, EXPERTS = 8, 4
_GRADIENTS = ("output up", "output down")


class Routed(nn.Module):
    """One expert for each token; sums count so that a part without rows has a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 12))
        self.down = nn.Parameter(torch.randn(EXPERTS, 12, WIDTH))

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        scores = (self.router(x) + wanted).softmax(-1)
        balance = scores.sum(0).square().sum()
        y = mixture(x, scores, self.up, self.down)
        return y.square().sum() / WIDTH + 0.1 * balance


def batch_of(rows: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a place is fed; place 1 never chooses the first two experts, place 2 only
    the last."""
    generator = torch.Generator().manual_seed(100 * rows + place)
    x = torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)
    wanted = torch.zeros(rows, EXPERTS, dtype=torch.float64)
    wanted[:, : {1: 2, 2: 3}.get(place, 0)] = -50.0
    return x, wanted


def gathered_over_experts(plan: Plan) -> bool:
    """Whether weights of experts, or their gradients, cross the axis of experts."""
    return any(
        "ep" in sent.axes and sent.kind != "all_to_all"
        for sent in plan.collectives
        if "mixture.py" in str(sent.source) or str(sent.source) in _GRADIENTS
    )
