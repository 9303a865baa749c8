"""Finds a minimum cut of a directed graph.

In: edges with capacities that are numbers of any unit or ``inf``. Out: the capacity
that is cut, and of all least cuts the smallest side of the source and the smallest side
of the sink. Both are unique, whatever flow finds them. Capacities are rounded to ticks,
up to 2**29 for all of them; a tick is a power of two of the unit, so that whole numbers
of up to 2**28 in all stay what they are. Never: knows what a node is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import NamedTuple

# The ticks of all finite capacities, and those of an infinite one: with the flow that
# may return on its edge a number of 32 bits, which are all that SciPy takes.
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
    import numpy as np
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    number: dict[Hashable, int] = {source: 0, sink: 1}
    capacities: Counter[tuple[int, int]] = Counter()
    for x, y, capacity in edges:
        if x != y:
            ends = number.setdefault(x, len(number)), number.setdefault(y, len(number))
            capacities[ends] += capacity  # type: ignore[assignment]
    finite = [size for size in capacities.values() if size != math.inf]
    total = sum(finite)
    unit = 2.0 ** math.ceil(math.log2(total / _TICKS)) if total else 1.0
    ticks = [
        _INFINITE if size == math.inf else round(size / unit)
        for size in capacities.values()
    ]
    ends = np.array([*capacities], dtype=np.int32).reshape(-1, 2).T
    shape = len(number), len(number)
    graph = csr_array((np.array(ticks, dtype=np.int32), ends), shape)
    if 1 in _reached(graph == _INFINITE, 0):
        return None
    flow = maximum_flow(graph, 0, 1)
    unused = graph - flow.flow
    names = [*number]
    early = {names[i] for i in _reached(unused, 0)}
    late = {names[i] for i in _reached(unused.T, 1)}
    return MinCut(flow.flow_value * unit, early, late)


def _reached(graph: object, start: int) -> list[int]:
    """Return the nodes to which edges that are not zero lead."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order

    edges = csr_array(graph)
    edges.eliminate_zeros()
    order = breadth_first_order(edges, start, return_predecessors=False)
    return order.tolist()
