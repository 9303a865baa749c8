"""Rewriting a graph in place, in global shapes: what normalizing passes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

from fxpar.passes.builder import PROVENANCE, value_of


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Shape of a node's tensor value."""
    return tuple(int(n) for n in node.meta["val"].shape)


def copy_of(graph: fx.Graph) -> fx.Graph:
    """A copy whose nodes have metadata of their own."""
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = new.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    return new


class Rewriter:
    """Inserts calls with fake values before a node and replaces nodes."""

    def __init__(self, graph: fx.Graph, fake_mode: Any) -> None:
        self.graph, self.fake_mode = graph, fake_mode
        self._origin: fx.Node | None = None

    @contextmanager
    def before(self, node: fx.Node) -> Iterator[None]:
        """Calls inside are placed before ``node`` and carry its provenance."""
        outer, self._origin = self._origin, node
        try:
            with self.graph.inserting_before(node):
                yield
        finally:
            self._origin = outer

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Insert ``target(*args, **kwargs)`` with its fake value."""
        node = self.graph.call_function(target, args, kwargs)
        with self.fake_mode:
            node.meta["val"] = target(*value_of(args), **value_of(kwargs))
        if self._origin is not None:
            meta = self._origin.meta
            node.meta.update({k: meta[k] for k in PROVENANCE if k in meta})
        return node

    def replace(self, node: fx.Node, by: fx.Node) -> None:
        """Let ``by`` take every use of ``node`` and erase the node."""
        node.replace_all_uses_with(by)
        self.graph.erase_node(node)
