"""Other choices of a search, lowered as the one that it made, and their steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def lowered(plan: Any, found: Any) -> tuple[Any, Any]:
    """(decision, local graph) of a plan's program under another ``Found``."""
    from fxpar import _torch
    from fxpar.passes.localize import insert_reshards, localize
    from fxpar.passes.order.delay_work import sink_waits
    from fxpar.passes.order.forward_backward import regather
    from fxpar.sharding.reshard.route import connect

    decision, graph = plan.result.decision, plan.result.normalized
    edges = connect(decision.program, found.strategies, found.settled, found.mesh)
    decision = replace(
        decision, strategies=found.strategies, settled=found.settled, edges=edges
    )
    fake_mode = _torch.fake.fake_mode_of([node.meta.get("val") for node in graph.nodes])
    local = localize(insert_reshards(graph, decision), decision, fake_mode)
    sink_waits(local)
    regather(local)
    return decision, local


def timeline(local: Any, mesh: Any, machine: Any) -> Any:
    """One step of a local graph, simulated as it is run."""
    from fxpar.passes.order.forward_backward import as_run
    from fxpar.passes.simulate.simulate_step import simulate

    return simulate(as_run(local), machine.on(mesh), machine)
