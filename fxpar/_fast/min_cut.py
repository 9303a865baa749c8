"""Finds the minimum cut by which AOTAutograd splits forward and backward, quicker.

In: a graph of networkx with capacities, some without limit. Out: the cut that networkx
finds (3.7, as torch asks it): of all least ones that with the fewest nodes on the side
of the sink, which is unique and does not depend on the flow. networkx's preflow pushes
take a third of the time of the split; here, nodes that no finite cut separates from an
end are merged with it first, and for the rest, a tenth, Dinic's algorithm finds the
flow. Never: another cut than networkx's.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unittest import mock

from fxpar._fast.switch import shortcut

# By node and neighbour, the capacity left on the edge.
_Left = list[dict[int, float]]

_SOURCE, _SINK = 0, 1


@shortcut
def quick_min_cut() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which AOTAutograd splits graphs by this cut; if a torch asks
    networkx in another way than 2.13, networkx answers."""
    from torch._functorch import partitioners

    by_torch = partitioners.solve_min_cut

    def solve_min_cut(*args: Any, **kwargs: Any) -> Any:
        with _in_the_place_of_networkx():
            return by_torch(*args, **kwargs)

    return mock.patch.object(partitioners, "solve_min_cut", solve_min_cut)


def _in_the_place_of_networkx() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which ``networkx.minimum_cut`` is this one."""
    import networkx

    by_networkx = networkx.minimum_cut

    def cut(graph: Any, source: Any, sink: Any, *args: Any, **kwargs: Any) -> Any:
        least = None if args or kwargs else minimum_cut(graph, source, sink)
        if least is None:  # it says why there is none
            return by_networkx(graph, source, sink, *args, **kwargs)
        return least

    return mock.patch.object(networkx, "minimum_cut", cut)


def minimum_cut(
    graph: Any, source: Any, sink: Any
) -> tuple[float, tuple[set[Any], set[Any]]] | None:
    """Return the capacity that is cut, and the nodes of both sides; None if there is no
    such cut of finite capacity, or capacities are no whole numbers of bytes."""
    if source not in graph or sink not in graph:
        return None
    edges = graph.adj

    def unlimited(near: Any) -> Callable[[Any], list[Any]]:
        return lambda x: [y for y, e in near[x].items() if _capacity(e) == math.inf]

    early = _reached(source, unlimited(edges))
    late = _reached(sink, unlimited(graph.pred))
    if early & late:
        return None
    number = {**dict.fromkeys(early, _SOURCE), **dict.fromkeys(late, _SINK)}
    left: _Left = [{}, {}]
    for x in edges:
        if x not in number:
            number[x] = len(left)
            left.append({})
    for x, near in edges.items():
        a = number[x]
        for y, edge in near.items():
            b, capacity = number[y], _capacity(edge)
            if a in (b, _SINK) or b == _SOURCE or not capacity:
                continue
            if capacity != math.inf:
                if capacity != int(capacity):
                    return None  # sums would be rounded
                capacity = int(capacity)
            left[a][b] = left[a].get(b, 0) + capacity
            left[b].setdefault(a, 0)
    value = _fill(left)
    before = [[a for a in left[b] if left[a][b]] for b in range(len(left))]
    behind = _reached(_SINK, lambda b: before[b])
    sides: tuple[set[Any], set[Any]] = set(), set()
    for x in edges:
        sides[number[x] in behind].add(x)
    return value, sides


def _capacity(edge: Mapping[str, Any]) -> float:
    """Return the capacity of an edge; infinite where none is given, as for networkx."""
    capacity: float = edge.get("capacity", math.inf)
    return capacity


def _reached(begin: Any, near: Callable[[Any], Iterable[Any]]) -> set[Any]:
    """Return all nodes reached from a node, itself too."""
    seen, ahead = {begin}, [begin]
    while ahead:
        for x in near(ahead.pop()):
            if x not in seen:
                seen.add(x)
                ahead.append(x)
    return seen


def _fill(left: _Left) -> float:
    """Send a largest flow from source to sink, and leave in ``left`` the capacities
    that it does not use (Dinic, 1970). Return how much it is."""
    value: float = 0
    while True:
        distance = _distances(left)
        if _SOURCE not in distance:
            return value
        ways = list(map(list, left))
        while True:
            path = _path(left, distance, ways)
            if not path:
                break
            flow = min(left[a][b] for a, b in path)
            value += flow
            for a, b in path:
                left[a][b] -= flow
                left[b][a] += flow


def _distances(left: _Left) -> dict[int, int]:
    """Return the number of edges with capacity left from each node to the sink."""
    distance, ahead = {_SINK: 0}, deque([_SINK])
    while ahead:
        b = ahead.popleft()
        for a in left[b]:
            if a not in distance and left[a].get(b):
                distance[a] = distance[b] + 1
                ahead.append(a)
    return distance


def _path(
    left: _Left, distance: Mapping[int, int], ways: list[list[int]]
) -> list[tuple[int, int]]:
    """Return the edges of a shortest path to the sink, none if there is none any more;
    ``ways``: nodes after each that were not found to be dead ends."""
    path: list[tuple[int, int]] = []
    a = _SOURCE
    while a != _SINK:
        way = ways[a]
        nearer = distance[a] - 1
        while way and not (left[a][way[-1]] and distance.get(way[-1]) == nearer):
            way.pop()
        if way:
            path.append((a, way[-1]))
            a = way[-1]
        elif path:
            a, _ = path.pop()
            ways[a].pop()
        else:
            break
    return path
