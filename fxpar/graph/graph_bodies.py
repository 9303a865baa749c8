"""Bodies, the graphs that ops of higher order run, as values of the graph they are in.

A body stands in a graph as a ``get_attr`` node. While planned and rewritten the node
holds it as its value (``meta["val"]``), so that passes hand it on like any other and
may put another in its place; a graph that is to run gets them on its module by
``hold``. A local body is rank-agnostic, as local graphs are: ``bound_body`` puts a rank
into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Builder
from fxpar.sharding import rank_ints


def body_of(node: fx.Node) -> fx.GraphModule | None:
    """The body that a node stands for; None if it stands for something else."""
    value = node.meta.get("val") if node.op == "get_attr" else None
    return value if isinstance(value, fx.GraphModule) else None


def bodies_of(node: fx.Node) -> list[fx.GraphModule]:
    """The bodies that a call runs."""
    values = map(body_of, node.all_input_nodes)
    return [body for body in values if body is not None]


def all_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of a graph, and of bodies in it, whose names are values already."""
    for node in graph.nodes:
        yield node
        body = body_of(node)
        if body is not None:
            yield from all_nodes(body.graph)


def show_bodies(graph: fx.Graph, root: torch.nn.Module | None) -> None:
    """Give nodes that stand for bodies of ``root`` these as values, in place."""
    for node in graph.find_nodes(op="get_attr"):
        body = attribute_at(root, str(node.target)) if root is not None else None
        if isinstance(body, fx.GraphModule):
            node.meta["val"] = body
            show_bodies(body.graph, body)


def attribute_at(root: Any, path: str) -> Any:
    """What a module has at a path of names; None if it has nothing there."""
    for name in path.split("."):
        root = getattr(root, name, None)
    return root


def hold(root: torch.nn.Module, graph: fx.Graph) -> None:
    """Put the bodies of a graph among the modules of ``root``; its nodes hold them no
    more, as Inductor wants it."""
    for node in graph.find_nodes(op="get_attr"):
        body = body_of(node)
        if body is not None:
            root.add_module(str(node.target), body)
            del node.meta["val"]


def is_of_a_rank(body: fx.GraphModule) -> bool:
    """Whether a body does not run alike on all ranks."""
    return any(node.target in rank_ints.PLACES for node in all_nodes(body.graph))


def bound_body(body: fx.GraphModule, rank: int) -> fx.GraphModule:
    """A local body with the rank's coordinates folded in."""
    if not is_of_a_rank(body):
        return body
    bound = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in body.graph.nodes:
        if node.target in rank_ints.PLACES:
            copies[node] = rank_ints.place(node.target, node.args, rank)
            continue
        copies[node] = bound.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
        inner = body_of(node)
        if inner is not None:
            copies[node].meta["val"] = bound_body(inner, rank)
    return module_of(body, bound)


def module_of(root: torch.nn.Module | None, graph: fx.Graph) -> fx.GraphModule:
    """A graph as a module that has what it needs of ``root``, and its bodies."""
    attributes = {}
    for node in graph.find_nodes(op="get_attr"):
        body = body_of(node)
        path = str(node.target)
        attributes[path] = attribute_at(root, path) if body is None else body
    return fx.GraphModule(attributes, graph)


def new_body(build: Builder, old: fx.Node, body: fx.GraphModule, name: str) -> fx.Node:
    """A node that stands for another body in the place of ``old``, appended."""
    node = build.graph.create_node("get_attr", f"{old.target}_{name}")
    node.meta = {**old.meta, "val": body}
    return node
