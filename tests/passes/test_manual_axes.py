"""Programs on manual axes, simulated: each place computes on what it is fed; gradients
of parameters that rest split over these axes are means, of which each rank has a part.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpar
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan import Plan
from fxpar.sharding.propagate.conventions import batch_axes
from tests.helpers.manual_axes import check_places, planned
from tests.helpers.pairs import diagonal


class Layers(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = self.down(torch.tanh(self.up(x))).chunk(2)
        return (halves[0] - halves[1]).square().mean()


MESHES = ["dp=2", "dp=3", "dp=2,tp=2", "tp=2,dp=2", "dp=2,ep=2"]


@pytest.mark.parametrize("rows", [8, 7], ids=["even", "chunks"])
@pytest.mark.parametrize(("text", "mode"), diagonal(MESHES, ["propagate", "search"]))
def test_each_place_has_its_own_loss_and_the_mean_of_gradients(
    text: str, mode: str, rows: int
) -> None:
    torch.manual_seed(0)
    mesh, model = Mesh.parse(text), Layers(rows).double()
    count = mesh.count(batch_axes(mesh))
    xs = [(torch.randn(6, 12).double(),) for _ in range(count)]
    check_places(model, xs, mesh, mode)


def test_a_plan_is_followed_again() -> None:
    mesh, model = Mesh.parse("dp=2,tp=2"), Layers(8).double()
    x = torch.randn(6, 12).double()
    *_, result, _ = planned(model, (x,), mesh, "search")
    again = Plan.from_dict(result.plan.to_record())
    *_, followed, _ = planned(model, (x,), mesh, again)
    assert followed.plan.hash == result.plan.hash
    assert "dp" in str(result.plan.mesh)


class Hinted(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = fxpar.constrain(torch.tanh(self.up(x)), "dp", "?")
        return self.down(hidden).square().mean()


@pytest.mark.parametrize(
    ("text", "mode"), diagonal(["dp=2", "dp=2,tp=2"], ["propagate", "search"])
)
def test_hints_that_name_the_batch_axis_split_nothing_of_a_place(
    text: str, mode: str
) -> None:
    torch.manual_seed(0)
    mesh = Mesh.parse(text)
    axis = "tp" if mesh.has("tp") else "dp"
    xs = [(torch.randn(6, 12).double(),) for _ in range(2)]
    for model in (Layers(8).double(), Hinted(8).double()):
        for hints in (
            {"up.weight": ("dp", None), "down.weight": (None, "dp")},
            {"up.weight": (("dp", axis) if axis != "dp" else "dp", "?")},
            {"*weight": ("dp?", "?")},
        ):
            check_places(model, xs, mesh, mode, hints=hints)
