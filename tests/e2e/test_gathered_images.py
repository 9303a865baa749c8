"""Images that are gathered between convolutions, compiled by Inductor."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxpar
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.usefixtures("propagated")


class Convolutions(nn.Module):
    """The first is split over channels, what it gives is saved for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = fxpar.constrain(self.first(x), None, None, None, None)
        return self.second(torch.relu(self.norm(h)))


def of_a_late_rank() -> tuple[torch.Tensor, torch.Tensor]:
    """The largest errors of results, and of statistics, of calls that one rank is late
    for."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, single = Convolutions(), Convolutions()
    single.load_state_dict(model.state_dict())
    options = {"mesh": "tp=2", "plan": "propagate", "hints": {"first.weight": ("tp",)}}
    run = torch.compile(model, backend="fxpar", dynamic=False, options=options)
    x, wrong = torch.randn(1, 3, 64, 64), []
    for _ in range(3):
        dist.barrier()
        time.sleep(0.3 * dist.get_rank())
        wrong.append((run(x) - single(x)).abs().max().detach())
    pairs = zip(model.buffers(), single.buffers(), strict=True)
    return torch.stack(wrong), torch.stack([(a - b).abs().max() for a, b in pairs])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_nothing_reads_before_the_gather_ends() -> None:
    """Inductor would put images in its own layout as soon as there is a buffer."""
    for wrong, statistics in shared_pool(2).run(of_a_late_rank, timeout=300.0):
        assert wrong.max() < 1e-4, wrong
        assert statistics.max() < 1e-5, statistics
