"""Programs on manual axes, simulated: plans, and their numbers on all ranks beside what
each place computes by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from fxpar.choose_plan import fastest_plan
from fxpar.config import Options
from fxpar.graph.graph_bodies import module_of
from fxpar.passes.simulate.emulate_collectives import scatter
from fxpar.passes.simulate.lockstep import run_ranks
from fxpar.runtime.tracing import TracedCall, read_signature
from fxpar.sharding.manual_axes import ManualAxes, planned_mesh
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_request import Request, known_machine, plan_mode
from fxpar.sharding.propagate.at_rest import at_rest
from fxpar.sharding.propagate.conventions import batch_axes
from fxpar.sharding.spec import Spec

Batch = tuple[torch.Tensor, ...]


def planned(
    model: nn.Module,
    batch: tuple[torch.Tensor, ...],
    mesh: Mesh,
    mode: Any,
    *,
    expert_exchange: str = "auto",
    **asked: Any,
) -> Any:
    """The call, its module, what the pipeline gives, and the specs at rest. ``asked``:
    of the request."""
    axes = tuple(axis for axis in batch_axes(mesh) if mesh.sizes[axis] > 1)
    call = TracedCall(model, batch, {}, True)
    module, fake_mode = call.trace()
    rests = {name: at_rest(p.shape, mesh) for name, p in model.named_parameters()}

    def declare(kind: str, payload: Any, node: fx.Node) -> Any:
        end = call.declare(kind, payload, node, [Spec.whole(x.dim()) for x in batch])
        return replace(end, at_rest=rests.get(end.name, end.at_rest))

    signature = read_signature(module.graph, declare)
    outputs = []
    results = list(module.graph.output_node().args[0])
    for k, out in enumerate(signature.outputs):
        rest = rests.get(out.name) if out.kind == "gradient" else None
        if rest is None:
            outputs.append(replace(out, layout="whole"))
            continue
        outputs.append(replace(out, at_rest=rest))
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
        mode=plan_mode(mode, options, mesh.size) if isinstance(mode, str) else mode,
        hardware=known_machine(options, mesh.size),
        options=Options(
            schedule="none", expert_exchange=expert_exchange, cache_plans=False
        ),
        **asked,
    )
    return call, module, fastest_plan(module.graph, fake_mode, request), rests


def check_places(
    model: nn.Module, batches: Sequence[Batch], mesh: Mesh, mode: Any, **asked: Any
) -> Plan:
    """The plan for batches of places; losses are each place's own, gradients means."""
    batch = batch_axes(mesh)
    call, module, result, rests = planned(model, batches[0], mesh, mode, **asked)

    expected: dict[str, Any] = dict.fromkeys(rests, 0.0)
    losses = []
    for each in batches:
        model.zero_grad()
        losses.append(model(*each))
        losses[-1].backward()
        for name, p in model.named_parameters():
            expected[name] = expected[name] + p.grad / len(batches)  # type: ignore

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
    return result.plan
