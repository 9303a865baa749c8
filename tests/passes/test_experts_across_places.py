"""Experts that rest over manual axes, simulated: each place computes on what it is fed,
and rows go to the ranks of their experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxpar.passes.graph_bodies import module_of
from fxpar.passes.simulate.emulate_collectives import scatter
from fxpar.passes.simulate.lockstep import run_ranks
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.propagate.conventions import batch_axes
from tests.helpers.routed import Routed, batch_of, gathered_over_experts
from tests.passes.test_manual_axes import planned

pytest.importorskip("transformers.integrations.moe")

ROWS = 6


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
    batches = [batch_of(ROWS, i) for i in range(mesh.count(batch))]
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

    assert gathered_over_experts(result.plan) == (exchange == "gather")
    assert result.plan.sent_rows == (() if exchange == "gather" else (ROWS,))
