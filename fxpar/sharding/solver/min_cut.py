"""Finds a minimum cut of a directed graph, exactly.

In: edges with capacities that are whole numbers or ``inf``. Out: the capacity that is
cut, and of all least cuts the smallest side of the source and the smallest side of the
sink. Both are unique, whatever flow finds them. Nodes that no finite cut separates from
an end are merged with it first; Dinic's algorithm finds the flow of the others. Never:
rounds, or knows what a node is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple, TypeVar

N = TypeVar("N", bound=Hashable)

# By node and neighbour, the capacity left on the edge.
_Left = list[dict[int, float]]

_SOURCE, _SINK = 0, 1


class MinCut(NamedTuple):
    """Holds what all least cuts between two nodes have in common."""

    capacity: float  # the capacity of the edges that are cut
    # Nodes that every least cut leaves with the source, and those with the sink.
    early: set
    late: set


def minimum_cut(
    edges: Iterable[tuple[N, N, float]], source: N, sink: N
) -> MinCut | None:
    """Return the minimum cut of edges (tail, head, capacity); edges of the same ends
    are one. None if no cut is finite, or a finite capacity is no whole number, whose
    sums would be rounded."""
    edges = list(edges)
    after: dict[N, list[N]] = {}
    before: dict[N, list[N]] = {}
    for x, y, capacity in edges:
        if capacity == math.inf:
            after.setdefault(x, []).append(y)
            before.setdefault(y, []).append(x)
    early = _reached(source, lambda x: after.get(x, ()))
    late = _reached(sink, lambda x: before.get(x, ()))
    if not early.isdisjoint(late):
        return None
    number = {**dict.fromkeys(early, _SOURCE), **dict.fromkeys(late, _SINK)}
    left: _Left = [{}, {}]
    for x, y, capacity in edges:
        for node in (x, y):
            if node not in number:
                number[node] = len(left)
                left.append({})
        a, b = number[x], number[y]
        if a in (b, _SINK) or b == _SOURCE or not capacity:
            continue
        if capacity != math.inf:
            if capacity != int(capacity):
                return None
            capacity = int(capacity)
        left[a][b] = left[a].get(b, 0) + capacity
        left[b].setdefault(a, 0)
    value = _fill(left)
    first = _reached(_SOURCE, lambda a: [b for b, c in left[a].items() if c])
    last = _reached(_SINK, lambda b: [a for a in left[b] if left[a][b]])
    return MinCut(
        value,
        {x for x, at in number.items() if at in first},
        {x for x, at in number.items() if at in last},
    )


def _reached(begin: N, near: Callable[[N], Iterable[N]]) -> set[N]:
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
