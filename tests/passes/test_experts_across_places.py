"""Experts that rest over manual axes, simulated: each place computes on what it is fed,
and rows go to the ranks of their experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxpar.passes.graph_bodies import module_of
from fxpar.passes.simulate.emulate_collectives import scatter
from fxpar.passes.simulate.lockstep import run_ranks
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.propagate.conventions import batch_axes
from tests.helpers.mixture import mixture
from tests.passes.test_manual_axes import planned

pytest.importorskip("transformers.integrations.moe")

WIDTH, EXPERTS, ROWS = 8, 4, 6
OUTPUTS = ("output up", "output down")


class Routed(nn.Module):
    """A mixture with a loss of its router, as each rank has it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 12))
        self.down = nn.Parameter(torch.randn(EXPERTS, 12, WIDTH))

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        scores = (self.router(x) + wanted).softmax(-1)
        balance = scores.mean(0).square().sum()
        y = mixture(x, scores, self.up, self.down)
        return y.square().mean() + 0.1 * balance


def fed(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a place is fed; rank 1 never chooses the first two experts, rank 2 only the
    last."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)
    wanted = torch.zeros(ROWS, EXPERTS, dtype=torch.float64)
    wanted[:, : {1: 2, 2: 3}.get(rank, 0)] = -50.0
    return x, wanted


@pytest.mark.parametrize("mode", ["propagate", "search"])
@pytest.mark.parametrize(
    "text", ["ep=2", "dp=1,ep=2", "dp=2,ep=2", "ep=2,dp=3", "dp=2,ep=2,tp=2", "ep=4"]
)
@pytest.mark.parametrize("exchange", ["auto", "all_to_all", "gather"])
def test_each_place_has_its_own_loss_and_the_mean_of_gradients(
    text: str, mode: str, exchange: str
) -> None:
    torch.manual_seed(0)
    mesh, model = Mesh.parse(text), Routed().double()
    batch = batch_axes(mesh)
    batches = [fed(i) for i in range(mesh.count(batch))]
    call, module, result, rests = planned(
        model, batches[0], mesh, mode, expert_exchange=exchange
    )

    expected: dict[str, Any] = dict.fromkeys(rests, 0.0)
    losses = []
    for one in batches:
        model.zero_grad()
        losses.append(model(*one))
        losses[-1].backward()
        for name, p in model.named_parameters():
            expected[name] = expected[name] + p.grad / len(batches)

    program, feeds = result.decision.program, []
    for rank in range(mesh.size):
        values = call.inputs(batches[mesh.index(rank, batch)], {})
        specs = (
            v if v is None else result.decision.edges.specs[v] for v in program.inputs
        )
        feeds.append(
            [
                x if spec is None else scatter(x, spec, mesh)[rank]
                for x, spec in zip(values, specs, strict=True)
            ]
        )
    outs = run_ranks(module_of(module, result.local), mesh, feeds)
    for k, out in enumerate(program.signature.outputs):
        if out.kind not in ("output", "gradient"):
            continue
        for rank in range(mesh.size):
            if out.kind == "output":
                want = losses[mesh.index(rank, batch)].detach()
            else:
                want = scatter(expected[out.name], rests[out.name], mesh)[rank]
            torch.testing.assert_close(outs[rank][k], want, rtol=1e-12, atol=1e-12)

    gathers = {"all_gather", "reduce_scatter", "all_reduce"}
    over = {
        c.axes
        for c in result.plan.collectives
        if c.kind in gathers and ("mixture.py:1" in c.source or c.source in OUTPUTS)
    }
    assert any("ep" in axes for axes in over) == (exchange == "gather")
