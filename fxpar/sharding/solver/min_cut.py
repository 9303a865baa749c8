"""Finds a minimum cut of a directed graph.

In: edges with capacities that are numbers of any unit or ``inf``. Out: the capacity
that is cut, and of all least cuts the smallest side of the source and the smallest side
of the sink. Both are unique, whatever flow finds them. Parts that only source and sink
join are cut one by one, the capacities of each rounded to at most 2**29 ticks; a tick
is a power of two of the unit, so that whole numbers of up to 2**28 stay what they are.
Never: knows what a node is.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

# The ticks of all finite capacities of a part, and those of an infinite one: with the
# flow that may return on its edge a number of 32 bits, which are all that SciPy takes.
_TICKS, _INFINITE = 2**29, 2**30


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
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    number: dict[Hashable, int] = {source: 0, sink: 1}
    capacities: Counter[tuple[int, int]] = Counter()
    for x, y, capacity in edges:
        if x != y:
            ends = number.setdefault(x, len(number)), number.setdefault(y, len(number))
            capacities[ends] += capacity  # type: ignore[assignment]
    names, shape = [*number], (len(number), len(number))
    inner = [ends for ends in capacities if min(ends) > 1]
    tails, heads = zip(*inner, strict=True) if inner else ((), ())
    without_ends = coo_array(([1] * len(inner), (tails, heads)), shape)
    _, part_of = connected_components(without_ends, directed=False)
    parts: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)
    for ends, capacity in capacities.items():
        parts[part_of[max(ends)]][ends] = capacity
    total, early, late = 0.0, {source}, {sink}
    for part in parts.values():
        cut = _cut(part)
        if cut is None:
            return None
        total += cut.capacity
        early |= {names[i] for i in cut.early}
        late |= {names[i] for i in cut.late}
    return MinCut(total, early, late)


def _cut(capacities: Mapping[tuple[int, int], float]) -> MinCut | None:
    """Return the minimum cut between the nodes 0 and 1."""
    import numpy as np
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    nodes, ends = np.unique([(0, 1), *capacities], return_inverse=True)
    sizes = np.array([0, *capacities.values()], dtype=float)
    is_finite = sizes != np.inf
    total = sizes[is_finite].sum()
    unit = 2.0 ** math.ceil(math.log2(total / _TICKS)) if total else 1.0
    ticks = np.where(is_finite, np.rint(sizes / unit), _INFINITE).astype(np.int32)
    shape = len(nodes), len(nodes)
    graph = csr_array((ticks, ends.reshape(-1, 2).T), shape)
    if 1 in _reached(graph == _INFINITE, 0):
        return None
    flow = maximum_flow(graph, 0, 1)
    unused = graph - flow.flow
    early, late = _reached(unused, 0), _reached(unused.T, 1)
    return MinCut(flow.flow_value * unit, {*nodes[early]}, {*nodes[late]})


def _reached(graph: Any, start: int) -> Any:
    """Return the numbers of the nodes to which edges that are not zero lead."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order

    edges = csr_array(graph)
    edges.eliminate_zeros()
    return breadth_first_order(edges, start, return_predecessors=False)
