"""Nodes of a graph by what holds of their targets, which is asked once a target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


def calls_where(graph: fx.Graph, holds: Callable[[Any], bool]) -> list[fx.Node]:
    """The calls of functions of which that holds, in order."""
    table = graph._find_nodes_lookup_table.table
    calls = [
        node
        for (op, target), nodes in table.items()
        if op == "call_function" and nodes and holds(target)
        for node in nodes
    ]
    return sorted(calls)
