"""Graphs built in less time: the same as without."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from fxpar._fast.quick_graphs import quick_graphs
from tests.helpers.patched import needs_patches

pytestmark = needs_patches

aten = torch.ops.aten


def graph_of() -> fx.Graph:
    """x + 1, viewed."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.add.Tensor, (x, 1))
    z = graph.call_function(aten.view.default, (y, [2, 3]))
    graph.output((z,))
    return graph


def test_graphs_are_those_of_torch() -> None:
    with quick_graphs(), quick_graphs():
        quick = str(graph_of())
    assert str(graph_of()) == quick


def test_code_is_written_when_it_is_run() -> None:
    x = torch.zeros(6)
    with quick_graphs():
        gm = fx.GraphModule({}, graph_of())
        gm.recompile()
        copied = copy.deepcopy(gm)
    for module in (gm, copied):
        assert "aten.view.default" in module.code
        (result,) = module(x)
        assert torch.equal(result, torch.ones(2, 3))
    add = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)[0]
    add.args = (add.args[0], 2)
    gm.recompile()
    (result,) = gm(x)
    assert torch.equal(result, torch.full((2, 3), 2.0))
    assert not isinstance(fx.GraphModule({}, graph_of()), _LazyGraphModule)


def test_modules_of_a_users_class_stay_as_they_are() -> None:
    class Own(fx.GraphModule):
        pass

    with quick_graphs():
        own = Own({}, graph_of())
        copied = copy.deepcopy(own)
    for module in (own, copied):
        assert isinstance(module, Own) and not isinstance(module, _LazyGraphModule)


@pytest.mark.parametrize("is_dead", [False, True])
def test_dead_code_goes(is_dead: bool) -> None:
    graph = graph_of()
    (view,) = graph.output_node().all_input_nodes
    if is_dead:
        with graph.inserting_before(graph.output_node()):
            relu = graph.call_function(aten.relu.default, (view,))
            graph.call_function(aten.relu.default, (relu,))
    with quick_graphs():
        assert graph.eliminate_dead_code() == is_dead
    assert [n.name for n in graph.nodes] == [n.name for n in graph_of().nodes]


def test_what_has_effects_stays() -> None:
    graph = graph_of()
    add, *_ = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    with graph.inserting_after(add):
        graph.call_function(aten.add_.Tensor, (add, 1))
    before = [n.name for n in graph.nodes]
    with quick_graphs():
        assert not graph.eliminate_dead_code()
    assert [n.name for n in graph.nodes] == before


def test_dead_code_goes_in_graphs_inside() -> None:
    inner = graph_of()
    view = inner.output_node().all_input_nodes[0]
    with inner.inserting_after(view):
        inner.call_function(aten.relu.default, (view,))
    body = fx.GraphModule({}, inner)
    graph = fx.Graph()
    x = graph.placeholder("x")
    called = graph.call_function(operator.call, (graph.get_attr("body"), x))
    graph.output((called,))
    outer = fx.GraphModule({"body": body}, graph)
    with quick_graphs():
        outer.graph.eliminate_dead_code()
    left = [n.target for n in outer.body.graph.nodes if n.op == "call_function"]
    assert left == [aten.add.Tensor, aten.view.default]
