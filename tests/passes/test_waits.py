"""Waits stand where their results are first needed; collectives stay in their order."""

from __future__ import annotations

import torch
from torch import fx, nn

import fxpar
from fxpar.passes.order.delay_work import sink_waits
from fxpar.passes.order.order_collectives import drop_unread
from fxpar.passes.simulate.launches import WAIT

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def order(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def test_a_wait_moves_with_its_views_past_what_does_not_need_it() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    sent = graph.call_function(c10d.all_reduce.default, (x, "sum", "g"), name="sent")
    wait = graph.call_function(WAIT, (sent,), name="wait")
    view = graph.call_function(aten.view.default, (wait, [4]), name="view")
    other = graph.call_function(aten.sin.default, (x,), name="other")
    more = graph.call_function(aten.cos.default, (other,), name="more")
    needs = graph.call_function(aten.exp.default, (view,), name="needs")
    graph.output((wait, needs, more))
    sink_waits(graph)
    assert order(graph)[1:-1] == ["sent", "other", "more", "wait", "view", "needs"]


def test_one_collective_is_waited_for_once() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    sent = graph.call_function(c10d.all_reduce.default, (x, "sum", "g"), name="sent")
    waits = [graph.call_function(WAIT, (sent,), name=f"wait_{i}") for i in range(2)]
    uses = [graph.call_function(aten.sin.default, (wait,)) for wait in waits]
    graph.output(tuple(uses))
    drop_unread(graph)
    assert order(graph)[1:3] == ["sent", "wait_0"] and len(sent.users) == 1
    assert [use.args for use in uses] == [(waits[0],)] * 2


def test_a_result_needed_at_once_stays() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    sent = graph.call_function(c10d.all_reduce.default, (x, "sum", "g"), name="sent")
    wait = graph.call_function(WAIT, (sent,), name="wait")
    uses = graph.call_function(aten.sin.default, (wait,), name="uses")
    graph.output((uses, wait))
    before = order(graph)
    sink_waits(graph)
    assert order(graph) == before


def test_gradients_are_reduced_beside_the_backward(monkeypatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(8, 8)

    def graph() -> fx.Graph:
        return fxpar.plan(model, x, mesh="dp=4", grad=True).result.local

    def sent(graph: fx.Graph) -> list[str]:
        return [n.name for n in graph.nodes if "all_reduce" in str(n.target)]

    def work_before_waits(graph: fx.Graph) -> int:
        """Products between the first reduction sent and the first wait."""
        nodes = list(graph.nodes)
        first = next(i for i, n in enumerate(nodes) if "all_reduce" in str(n.target))
        wait = next(i for i, n in enumerate(nodes) if n.target is WAIT)
        return sum(n.target is aten.mm.default for n in nodes[first:wait])

    sunk = graph()
    monkeypatch.setenv("FXPAR_DISABLE", "sink_waits")
    plain = graph()
    assert sent(sunk) == sent(plain)
    assert work_before_waits(plain) == 0
    assert work_before_waits(sunk) > 0
