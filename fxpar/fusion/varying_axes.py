"""Finds the axes that each value of a local graph varies over.

In: a local graph with steps, whose inputs know their specs (``meta["fxpar_spec"]``).
Out: for every node, those inside regions too, the axes along which ranks may hold
different values. A value that does not vary over an axis is replicated along it, so
that each rank may compute on a slice; one that varies is a shard, a summand, or a value
of one rank alone: the steps that follow distinguish them. A value from another stage
varies as it did there (``meta["fxpar_sent"]``). Ops that communicate and are not in the
table here never come in (``node_legality.admit``). Never changes the graph.

The analysis is that of ``jax.shard_map``'s varying axes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpar.errors import ScheduleError
from fxpar.fusion.node_legality import CallableRegion
from fxpar.graph import (
    collective_nodes,
    custom_ops,
)
from fxpar.graph.builder import VARIES
from fxpar.graph.graph_bodies import all_nodes, body_of
from fxpar.passes.simulate.launches import EXACT, PRODUCTS
from fxpar.sharding import rank_ints
from fxpar.sharding.spec import Spec

Axes = frozenset[str]
Varies = dict[fx.Node, Axes]

# Steps after which ranks along the axes hold the same value.
_EQUAL = {collective_nodes.all_reduce, collective_nodes.all_gather}


def varying(graph: fx.Graph) -> Varies:
    """Return the axes of each node. Raises ScheduleError if an input has no spec."""
    inputs = graph.find_nodes(op="placeholder")
    varies = {node: of_spec(node) for node in inputs}
    _through(graph, varies)
    return varies


def _through(graph: fx.Graph, varies: Varies) -> None:
    """Add the axes of a graph's nodes to ``varies``, which has those of its inputs."""
    # For a node that gives several values: the axes of each.
    each: dict[Any, list[Axes]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        read = _of_any([varies[n] for n in node.all_input_nodes])
        if getattr(node.target, "namespace", None) in _ALONE:
            varies[node] = read
        elif node.target is operator.getitem and node.args[0] in each:
            varies[node] = each[node.args[0]][node.args[1]]
        elif isinstance(node.target, CallableRegion):
            each[node] = _of_region(node, varies)
            varies[node] = _of_any(each[node])
        elif node.target is _GATHERED:
            each[node] = _of_gathered(node, varies)
            varies[node] = _of_any(each[node])
        elif node.target in PRODUCTS or node.target in EXACT:
            varies[node] = read | set(custom_ops.group_axes(node.args[-1]))
        elif node.target in rank_ints.PLACES:
            varies[node] = frozenset(node.args[1])
        elif node.op == "get_attr" and (body := body_of(node)) is not None:
            nodes = all_nodes(body.graph)
            inside = (n for n in nodes if n.target in rank_ints.PLACES)
            varies[node] = frozenset[str]().union(*(n.args[1] for n in inside))
        elif node.target is collective_nodes.recv:
            varies[node] = node.meta["fxpar_sent"]
        elif node.target in _EQUAL:
            varies[node] = read - set(collective_nodes.axes_of(node))
        elif collective_nodes.is_step(node):
            varies[node] = read | set(collective_nodes.axes_of(node))
        else:
            varies[node] = read


_GATHERED = torch.ops.fxpar.gather_matmul.default

# Namespaces of ops that do not communicate and do not know their rank.
_ALONE = {"aten", "prims"}


def _of_any(several: Sequence[Axes]) -> Axes:
    return several[0] if len(several) == 1 else frozenset[str]().union(*several)


def _of_region(node: fx.Node, varies: Varies) -> list[Axes]:
    """Return the axes of each result of a region, whose nodes may cut and
    communicate."""
    region: Any = node.target
    inputs = region.graph.find_nodes(op="placeholder")
    varies.update(zip(inputs, (varies[n] for n in node.args), strict=True))
    _through(region.graph, varies)
    results: Any = region.graph.output_node().args[0]
    return [varies[result] for result in results]


def _of_gathered(node: fx.Node, varies: Varies) -> list[Axes]:
    """Return the axes of the gathered value, and of its products."""
    x, weights, *_, group = node.args
    whole = varies[x] - set(custom_ops.group_axes(group))
    return [whole, *(whole | varies[w] for w in weights)]


def of_spec(node: fx.Node) -> Axes:
    """Return the axes an input varies over."""
    spec = node.meta.get("fxpar_spec")
    if isinstance(spec, Spec):
        return frozenset((*spec.axes, *node.meta.get(VARIES, ())))
    if isinstance(node.meta.get("val"), torch.Tensor):
        raise ScheduleError(
            f"input {node.name} has no spec on the mesh",
            fix="pass inputs=[Spec, ...], one for each tensor the graph takes",
        )
    return frozenset()
