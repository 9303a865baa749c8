"""Experts that rest over manual axes, simulated: each place computes on what it is fed,
and rows go to the ranks of their experts."""

from __future__ import annotations

import pytest
import torch

from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan import Plan
from fxpar.sharding.propagate.conventions import batch_axes
from tests.helpers.manual_axes import check_places, planned
from tests.helpers.pairs import diagonal
from tests.helpers.routed import Routed, batch_of, gathered_over_experts

pytest.importorskip("transformers.integrations.moe")

ROWS = 6


MESHES = ["ep=2", "dp=1,ep=2", "dp=2,ep=2", "ep=2,dp=3", "dp=2,ep=2,tp=2", "ep=4"]


@pytest.mark.parametrize(
    "mode", [pytest.param("propagate", marks=pytest.mark.slow), "search"]
)
@pytest.mark.parametrize(
    ("text", "exchange"), diagonal(MESHES, ["gather", "all_to_all", "auto"])
)
def test_each_place_has_its_own_loss_and_the_mean_of_gradients(
    text: str, mode: str, exchange: str
) -> None:
    torch.manual_seed(0)
    mesh, model = Mesh.parse(text), Routed().double()
    batches = [batch_of(ROWS, i) for i in range(mesh.count(batch_axes(mesh)))]
    plan = check_places(model, batches, mesh, mode, expert_exchange=exchange)
    assert gathered_over_experts(plan) == (exchange == "gather")
    assert plan.sent_rows == (() if exchange == "gather" else (ROWS,))


def test_a_plan_is_followed_again() -> None:
    mesh, model = Mesh.parse("dp=2,ep=2,tp=2"), Routed().double()
    *_, result, _ = planned(model, batch_of(ROWS, 0), mesh, "search")
    again = Plan.from_dict(result.plan.to_record())
    *_, followed, _ = planned(model, batch_of(ROWS, 0), mesh, again)
    assert followed.plan.hash == result.plan.hash
    assert followed.plan.sent_rows == (ROWS,)


@pytest.mark.parametrize("room", [8, 0])
def test_room_for_more_rows_than_a_place_has(room: int) -> None:
    mesh, model = Mesh.parse("ep=2"), Routed().double()
    batches = [batch_of(ROWS, i) for i in range(2)]
    plan = check_places(model, batches, mesh, "propagate", sent_room=room)
    assert gathered_over_experts(plan) == (room == 0)


class Twice(Routed):
    """Something else than the mixture reads weights of experts."""

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return super().forward(x, wanted) + self.up.square().sum()


def test_weights_are_gathered_where_gradients_are_no_sums_of_rows_alone() -> None:
    mesh, model = Mesh.parse("dp=2,ep=2"), Twice().double()
    batches = [batch_of(ROWS, i) for i in range(4)]
    plan = check_places(model, batches, mesh, "propagate")
    assert gathered_over_experts(plan) and not plan.sent_rows
