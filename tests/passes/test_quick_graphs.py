"""Graphs built in less time: the same as without."""

from __future__ import annotations

import copy
import operator
import warnings
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxpar._fast.quick_graphs import quick_graphs
from tests.helpers.patched import needs_patches

pytestmark = needs_patches

aten = torch.ops.aten


def graph_of(*extra: Any) -> fx.Graph:
    """x + 1, viewed; ``extra``: more arguments of the view's shape."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.add.Tensor, (x, 1))
    z = graph.call_function(aten.view.default, (y, [2, 3, *extra]))
    graph.output((z,))
    return graph


def test_graphs_are_those_of_torch() -> None:
    with quick_graphs(), quick_graphs():
        quick = str(graph_of())
    assert str(graph_of()) == quick


def test_names_are_those_of_torch() -> None:
    def names() -> list[str]:
        graph = fx.Graph()
        asked = ["x", "x", "x_1", "x_7", "x", "x_7", "1y", "a b", "list", "x_07"]
        return [graph.create_node("placeholder", "x", name=n).name for n in asked]

    plain = names()
    with quick_graphs():
        assert [names(), names()] == [plain, plain]


@pytest.mark.skipif(not hasattr(fx.graph, "pytree"), reason="as torch 2.11 is")
@pytest.mark.parametrize("quick", [False, True])
def test_symbols_among_arguments_are_warned_of(quick: bool) -> None:
    symbol = ShapeEnv().create_unbacked_symint()

    def warned() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graph_of(symbol)
        return [str(x.message) for x in caught if "Raw SymInt" in str(x.message)]

    plain = warned()
    with quick_graphs():
        assert warned() == plain


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


def test_nodes_out_of_order_are_refused() -> None:
    graph = graph_of()
    add, view = graph.find_nodes(op="call_function", target=aten.add.Tensor) + (
        graph.find_nodes(op="call_function", target=aten.view.default)
    )
    view.append(add)
    with quick_graphs(), pytest.raises(RuntimeError, match="before it has been"):
        graph.eliminate_dead_code()


def broken(how: str) -> fx.GraphModule:
    """A module whose graph is not well formed, but where an attribute is "here"."""
    graph = graph_of()
    owner = fx.GraphModule({}, graph)
    owner.there, graph = torch.zeros(1), owner.graph
    add, *_ = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    if how == "order":
        add.next.append(add)
    elif how == "name":
        add.next._rename("x_1")
        object.__setattr__(add.next, "name", add.name)
    elif how == "table":
        graph._find_nodes_lookup_table.remove(add)
    elif how == "owner":
        object.__setattr__(add, "graph", graph_of())
    elif how in ("nowhere", "here"):
        name = "there" if how == "here" else how
        with graph.inserting_before(add), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph.get_attr(name)
    return owner


@pytest.mark.parametrize("how", ["order", "name", "table", "owner", "nowhere", "here"])
def test_graphs_that_are_not_well_formed_are_refused(how: str) -> None:
    """In the words of torch."""

    def said() -> str:
        try:
            broken(how).graph.lint()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return ""

    plain = said()
    assert bool(plain) == (how != "here")
    with quick_graphs():
        assert said() == plain
