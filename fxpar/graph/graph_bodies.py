"""Handles bodies, the graphs that higher-order ops run, as values of a graph.

In: a graph with ``get_attr`` nodes, one for each body. Out: while it is planned and
rewritten, each such node has the body as its value (``meta["val"]``), so that passes
hand it on like any other value and may replace it; ``hold`` puts the bodies on the
module of a graph that is to run. A local body is the same on all ranks, as local graphs
are; ``bound_body`` binds it to one. Never: a body's ops are planned here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Builder
from fxpar.sharding import rank_ints


def body_of(node: fx.Node) -> fx.GraphModule | None:
    """Return the body that a node holds; None if it holds something else."""
    value = node.meta.get("val") if node.op == "get_attr" else None
    return value if isinstance(value, fx.GraphModule) else None


def named_body(node: fx.Node) -> fx.GraphModule | None:
    """Return the body that a node holds, or that its graph's module does, as in a graph
    that is to run; None if there is none."""
    if node.op != "get_attr":
        return None
    body = body_of(node) or attribute_at(node.graph.owning_module, str(node.target))
    return body if isinstance(body, fx.GraphModule) else None


def bodies_of(node: fx.Node) -> list[fx.GraphModule]:
    """Return the bodies that a call runs."""
    values = map(body_of, node.all_input_nodes)
    return [body for body in values if body is not None]


def all_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes of a graph and of the bodies that its nodes hold."""
    for node in graph.nodes:
        yield node
        body = body_of(node)
        if body is not None:
            yield from all_nodes(body.graph)


def show_bodies(graph: fx.Graph, root: torch.nn.Module | None) -> None:
    """Set the values of nodes that name bodies of ``root`` to the bodies, in place."""
    for node in graph.find_nodes(op="get_attr"):
        body = attribute_at(root, str(node.target)) if root is not None else None
        if isinstance(body, fx.GraphModule):
            node.meta["val"] = body
            show_bodies(body.graph, body)


def attribute_at(root: Any, path: str) -> Any:
    """Return the attribute of a module at a dotted path; None if there is none."""
    for name in path.split("."):
        root = getattr(root, name, None)
    return root


def hold(root: torch.nn.Module, graph: fx.Graph) -> None:
    """Add the bodies of a graph to the modules of ``root``; its nodes no longer hold
    them, as Inductor wants it."""
    for node in graph.find_nodes(op="get_attr"):
        body = body_of(node)
        if body is not None:
            root.add_module(str(node.target), body)
            del node.meta["val"]


def is_of_a_rank(body: fx.GraphModule) -> bool:
    """Return whether a body depends on the rank."""
    return any(node.target in rank_ints.PLACES for node in all_nodes(body.graph))


def bound_body(body: fx.GraphModule, rank: int) -> fx.GraphModule:
    """Return a local body with the rank's numbers in place of ``rank_ints`` calls."""
    if not is_of_a_rank(body):
        return body
    bound = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in body.graph.nodes:
        if node.target in rank_ints.PLACES:
            copies[node] = rank_ints.place(node.target, node.args, rank)
            continue
        copies[node] = bound.node_copy(node, copies.__getitem__)
        inner = body_of(node)
        if inner is not None:
            copies[node].meta["val"] = bound_body(inner, rank)
    return module_of(body, bound)


def module_of(root: torch.nn.Module | None, graph: fx.Graph) -> fx.GraphModule:
    """Return a graph as a module with the attributes of ``root`` that it reads, and its
    bodies."""
    attributes = {}
    for node in graph.find_nodes(op="get_attr"):
        body = body_of(node)
        path = str(node.target)
        attributes[path] = attribute_at(root, path) if body is None else body
    return fx.GraphModule(attributes, graph)


def new_body(build: Builder, old: fx.Node, body: fx.GraphModule, name: str) -> fx.Node:
    """Append a node that holds another body than ``old`` does."""
    node = build.graph.create_node("get_attr", f"{old.target}_{name}")
    node.meta = {**old.meta, "val": body}
    return node
