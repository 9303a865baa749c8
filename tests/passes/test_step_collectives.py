"""What a plan says of a step's communication is what its local graph does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import fxpar
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.simulate.launches import KINDS, facts_of
from fxpar.sharding.program import depending_on_tangents

HINTS = {"w1": (None, "tp"), "w2": ("tp", None)}


def layer(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.relu(x @ w1) @ w2).square().sum()


def planned(schedule: str = "none") -> Any:
    tensors = torch.randn(4, 8), torch.randn(8, 16), torch.randn(16, 8)
    args = [x.requires_grad_() for x in tensors]
    given: dict[str, Any] = {"mesh": "tp=2", "hints": HINTS, "mode": "propagate"}
    return fxpar.plan(layer, *args, grad=True, schedule=schedule, **given)


def run(graph: Any) -> Counter[str]:
    """Collectives that a step runs, by kind, none joined with another."""
    nodes = as_run(graph, disable={"bucket"}).nodes
    return Counter(KINDS[node.target] for node in nodes if node.target in KINDS)


@pytest.mark.parametrize("again", [False, True])
def test_what_is_computed_again_is_sent_again(again: bool) -> None:
    """What tanh's backward reads is reduced; checkpointed, in the backward too."""
    graph = planned().result.local
    late = depending_on_tangents(graph)
    for node in graph.nodes if again else ():
        if node.op == "call_function" and node not in late:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    sent, done = facts_of(graph)
    assert [(c.kind, c.bytes) for c in sent] == [("all_reduce", 4 * 8 * 4)] * (
        3 if again else 2
    )
    assert run(graph) == Counter(c.kind for c in sent)
    assert [moved for _, moved in done] == [c.bytes for c in sent]
    assert len({reshard for reshard, _ in done}) == 2


def test_a_schedule_moves_what_a_reshard_sends() -> None:
    """Half of what is joined by an all-gather goes into the reduce-scatter before."""
    plan = planned("split(all_reduce)")
    kinds = [c.kind for c in plan.collectives]
    assert kinds == ["reduce_scatter", "all_gather", "all_reduce"]
    assert run(plan.result.local) == Counter(kinds)
    assert all("test_step_collectives.py" in c.source for c in plan.collectives)
    size = 4 * 8 * 4
    assert [c.bytes for c in plan.collectives] == [size] * 3
    assert sorted(moved for _, moved in facts_of(plan.result.local)[1]) == [
        size,
        2 * size,
    ]
