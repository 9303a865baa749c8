"""Programs on manual axes, simulated: each place computes on what it is fed; gradients
of parameters that rest split over these axes are means, of which each rank has a part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxpar.choose_plan import fastest_plan
from fxpar.config import Options
from fxpar.passes.boundaries import read_signature
from fxpar.passes.graph_bodies import module_of
from fxpar.passes.simulate.emulate_collectives import scatter
from fxpar.passes.simulate.lockstep import run_ranks
from fxpar.runtime.tracing import TracedCall
from fxpar.sharding.manual_axes import ManualAxes, planned_mesh
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_request import Request, known_machine, plan_mode
from fxpar.sharding.propagate.at_rest import at_rest
from fxpar.sharding.propagate.conventions import batch_axes
from fxpar.sharding.spec import Spec


class Layers(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = self.down(torch.tanh(self.up(x))).chunk(2)
        return (halves[0] - halves[1]).square().mean()


def planned(model: nn.Module, x: torch.Tensor, mesh: Mesh, mode: Any) -> Any:
    """The call, its module, what the pipeline gives, and the specs at rest."""
    axes = tuple(axis for axis in batch_axes(mesh) if mesh.sizes[axis] > 1)
    call = TracedCall(model, (x,), {}, True)
    module, fake_mode = call.trace()
    rests = {name: at_rest(p.shape, mesh) for name, p in model.named_parameters()}

    def declare(kind: str, payload: Any, node: fx.Node) -> Any:
        end = call.declare(kind, payload, node, [Spec.whole(x.dim())])
        return replace(end, rest=rests.get(end.name, end.rest))

    signature = read_signature(module.graph, declare)
    outputs = []
    results = list(module.graph.output_node().args[0])
    for k, out in enumerate(signature.outputs):
        rest = rests.get(out.name) if out.kind == "gradient" else None
        if rest is None:
            outputs.append(replace(out, lie="whole"))
            continue
        outputs.append(replace(out, rest=rest))
        with module.graph.inserting_before(module.graph.output_node()):
            mean = module.graph.call_function(
                torch.ops.fxpar.mean_over_ranks.default, (results[k], str(rest))
            )
        mean.meta["val"], results[k] = results[k].meta["val"], mean
    module.graph.output_node().args = (tuple(results),)
    options = Options(plan="search", hardware="h100")
    request = Request(
        planned_mesh(mesh, axes),
        replace(signature, outputs=tuple(outputs)),
        manual=ManualAxes(mesh, axes),
        mode=plan_mode(mode, options) if isinstance(mode, str) else mode,
        hardware=known_machine(options),
    )
    return call, module, fastest_plan(module.graph, fake_mode, request), rests


@pytest.mark.parametrize("rows", [8, 7], ids=["even", "chunks"])
@pytest.mark.parametrize("mode", ["propagate", "search"])
@pytest.mark.parametrize(
    "text", ["dp=2", "dp=3", "dp=2,tp=2", "tp=2,dp=2", "dp=2,ep=2"]
)
def test_each_place_has_its_own_loss_and_the_mean_of_gradients(
    text: str, mode: str, rows: int
) -> None:
    torch.manual_seed(0)
    mesh, model = Mesh.parse(text), Layers(rows).double()
    batch = batch_axes(mesh)
    xs = [torch.randn(6, 12).double() for _ in range(mesh.count(batch))]
    call, module, result, rests = planned(model, xs[0], mesh, mode)

    expected, losses = dict.fromkeys(rests, 0.0), []
    for x in xs:
        model.zero_grad()
        losses.append(model(x))
        losses[-1].backward()
        for name, p in model.named_parameters():
            expected[name] = expected[name] + p.grad / len(xs)

    program, feeds = result.decision.program, []
    for rank in range(mesh.size):
        values = call.inputs((xs[mesh.index(rank, batch)],), {})
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


def test_a_plan_is_followed_again() -> None:
    mesh, model = Mesh.parse("dp=2,tp=2"), Layers(8).double()
    x = torch.randn(6, 12).double()
    *_, result, _ = planned(model, x, mesh, "search")
    again = Plan.from_dict(result.plan.to_record())
    *_, followed, _ = planned(model, x, mesh, again)
    assert followed.plan.hash == result.plan.hash
    assert "dp" in str(result.plan.mesh)
