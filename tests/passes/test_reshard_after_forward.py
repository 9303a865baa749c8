"""What is recomputed in the backward: gathered parameters, on all ranks or none."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxpar.passes.order.forward_backward import (
    recompute_views_of_inputs,
    regather,
    save_readers_of_recomputed,
)

aten = torch.ops.aten


def linear() -> tuple[fx.Graph, dict[str, fx.Node]]:
    """A gathered bias is added to a product, of which the backward reads the sum."""
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    for name in ("primals_1", "primals_2", "tangents_1"):
        nodes[name] = graph.placeholder(name)
    bias, x, tangent = nodes.values()
    nodes["gather"] = graph.call_function(aten.alias.default, (bias,))
    nodes["gather"].meta["fxpar_parameter"] = True
    nodes["view"] = graph.call_function(aten.alias.default, (nodes["gather"],))
    nodes["product"] = graph.call_function(aten.exp.default, (x,))
    sums = (nodes["product"], nodes["view"])
    nodes["sum"] = graph.call_function(aten.add.Tensor, sums)
    nodes["after"] = graph.call_function(aten.tanh.default, (nodes["sum"],))
    grads = (tangent, nodes["view"])
    nodes["grad"] = graph.call_function(aten.mul.Tensor, grads)
    graph.output((nodes["after"], nodes["grad"]))
    return graph, nodes


def tags(nodes: dict[str, fx.Node]) -> dict[str, CheckpointPolicy]:
    pairs = ((name, node.meta.get("recompute")) for name, node in nodes.items())
    return {name: tag for name, tag in pairs if tag is not None}


RECOMPUTED = dict.fromkeys(("gather", "view"), CheckpointPolicy.MUST_RECOMPUTE)


def test_gathered_parameters_are_recomputed() -> None:
    graph, nodes = linear()
    regather(graph)
    assert tags(nodes) == RECOMPUTED


def test_what_reads_them_in_the_forward_is_saved() -> None:
    graph, nodes = linear()
    regather(graph)
    save_readers_of_recomputed(graph)
    assert tags(nodes) == RECOMPUTED | {"sum": CheckpointPolicy.MUST_SAVE}


def test_what_the_user_recomputes_stays_so() -> None:
    graph, nodes = linear()
    nodes["sum"].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    regather(graph)
    save_readers_of_recomputed(graph)
    recomputed = RECOMPUTED | {"sum": CheckpointPolicy.MUST_RECOMPUTE}
    assert tags(nodes) == recomputed | {"after": CheckpointPolicy.MUST_SAVE}


def test_views_of_inputs_are_recomputed() -> None:
    """Of copies too, which Inductor leaves out; a copy stays as it is."""
    graph = fx.Graph()
    primal = graph.placeholder("primals_1")
    copy = graph.call_function(aten.clone.default, (primal,))
    views = [graph.call_function(aten.t.default, (x,)) for x in (primal, copy)]
    other = graph.call_function(
        aten.t.default, (graph.call_function(aten.exp, (copy,)),)
    )
    graph.output((*views, other))
    recompute_views_of_inputs(graph)
    nodes = {node.name: node for node in graph.nodes}
    want = dict.fromkeys((x.name for x in views), CheckpointPolicy.MUST_RECOMPUTE)
    assert tags(nodes) == want
