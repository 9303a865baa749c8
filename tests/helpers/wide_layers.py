"""Layers that are four times as wide inside, and what a search finds for them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from fxpar.sharding.cost.hardware_table import Hardware, Level
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Program
from fxpar.sharding.search.batch_parts import PartProgram
from fxpar.sharding.search.run_search import SearchOptions, SearchResult, search
from tests.helpers.machines import machine

WIDTH, ROWS, LAYERS = 64, 64, 8

# Nothing has a fixed price, and a network carries anything at once.
FREE = replace(machine(), levels=(Level(0, 1e30, 0.0, 0.0),))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def layers(count: int = LAYERS) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(count)]).double()


def rows(count: int = ROWS) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(count, WIDTH, dtype=torch.float64)


def found_for(
    program: Program, mesh: str, on: Hardware, part: PartProgram | None = None
) -> SearchResult:
    return search(program, Mesh.parse(mesh), SearchOptions(on), {}, parts=part)
