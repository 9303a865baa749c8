"""Finds nodes of a graph by a predicate on their targets.

In: a graph and a predicate. Out: nodes. Never: asks the predicate twice for a target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


def calls_where(graph: fx.Graph, holds: Callable[[Any], bool]) -> list[fx.Node]:
    """Return the calls of functions for which ``holds`` is true, in order."""
    table = graph._find_nodes_lookup_table.table
    calls = [
        node
        for (op, target), nodes in table.items()
        if op == "call_function" and nodes and holds(target)
        for node in nodes
    ]
    return sorted(calls)
