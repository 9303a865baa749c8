"""Finds a minimum cut of a directed graph, exactly.

In: edges with capacities that are whole numbers or ``inf``. Out: the capacity that is
cut, and of all least cuts the smallest side of the source and the smallest side of the
sink. Both are unique, whatever flow finds them. Never: knows what a node is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import NamedTuple


class MinCut(NamedTuple):
    """Holds what all least cuts between two nodes have in common."""

    capacity: float  # the capacity of the edges that are cut
    # Nodes that every least cut leaves with the source, and those with the sink.
    early: set
    late: set


def minimum_cut(
    edges: Iterable[tuple[Hashable, Hashable, float]], source: Hashable, sink: Hashable
) -> MinCut | None:
    """Return the minimum cut of edges (tail, head, capacity); edges of the same ends
    are one. None if no cut is finite."""
    import networkx
    from networkx.algorithms.flow import dinitz

    capacities: Counter[tuple[Hashable, Hashable]] = Counter()
    for x, y, capacity in edges:
        capacities[x, y] += capacity  # type: ignore[assignment]
    graph, unused = networkx.DiGraph(), networkx.DiGraph()
    for each in graph, unused:
        each.add_nodes_from((source, sink))
    graph.add_weighted_edges_from(
        ((*ends, size) for ends, size in capacities.items()), "capacity"
    )
    try:
        flow = dinitz(graph, source, sink)
    except networkx.NetworkXUnbounded:
        return None
    for x, y, edge in flow.edges(data=True):
        if edge["flow"] < edge["capacity"]:
            unused.add_edge(x, y)
    early = {source} | networkx.descendants(unused, source)
    late = {sink} | networkx.ancestors(unused, sink)
    return MinCut(flow.graph["flow_value"], early, late)
