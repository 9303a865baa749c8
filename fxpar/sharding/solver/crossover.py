"""Mixes two choices: part of the nodes as in one, the rest as in the other.

In: a Flat, a choice that fits, others that may exceed the limit. Out: a choice that
fits and costs no more. Where layers repeat, one price on memory flips all of them at
once; the best choice often has some layers one way and some the other, and is a cut
through an order of the nodes. Never: leaves the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fxpar.sharding.solver import work_clock
from fxpar.sharding.solver.flat_arrays import Flat, cost_of, fits, usage_of

# Cuts tried per order.
_CUTS = 32
# Seconds of work: of an edge in the costs of cuts, and in a breadth-first search.
_CUT, _STEP = 5e-8, 4e-8


def mix(
    flat: Flat,
    choice: np.ndarray,
    other_choices: Sequence[np.ndarray],
    deadline: float,
    layer: np.ndarray | None = None,
) -> np.ndarray:
    """Return the best cut between any two of ``choice`` and the others; then again
    between it and each of them, until none is better or the deadline. ``layer``:
    (nodes,) the layer of each node, by which cuts are tried first."""
    best, cost = choice, cost_of(flat, choice)
    choices = [choice, *other_choices]
    pairs = [(a, b) for k, a in enumerate(choices) for b in choices[k + 1 :]]
    while pairs:
        before = cost
        for a, b in pairs:
            for order, ends in _orders(flat, np.flatnonzero(a != b), layer):
                if work_clock.left(deadline) < 0:
                    return best
                below = cost - 1e-9 * abs(cost)
                for x, y in ((a, b), (b, a)):
                    mixed = _cut(flat, x, y, order, ends, below)
                    if mixed is not None and (value := cost_of(flat, mixed)) < cost:
                        best, cost = mixed, value
        pairs = [(best, other) for other in other_choices] if cost < before else []
    return best


def _cut(
    flat: Flat,
    a: np.ndarray,
    b: np.ndarray,
    order: np.ndarray,
    ends: np.ndarray,
    below: float,
) -> np.ndarray | None:
    """Return the cheapest choice that fits with the first nodes of ``order``, up to one
    of its ``ends``, as in ``b`` and the rest as in ``a``; None if none costs less than
    ``below``."""
    place = np.full(len(a), len(order))
    place[order] = np.arange(len(order))
    costs = cut_costs(flat, a, b, place, len(order))[ends]
    for k in np.argsort(costs, kind="stable").tolist():
        if costs[k] >= below:
            return None
        out = np.where(place < ends[k], b, a)
        if fits(flat, usage_of(flat, out)):
            return out
    return None


def cut_costs(
    flat: Flat, a: np.ndarray, b: np.ndarray, place: np.ndarray, count: int
) -> np.ndarray:
    """Return (count + 1,) costs: the m-th of the choice in which the nodes with
    ``place`` < m are as in ``b``, the others as in ``a``; inf where a pair is
    forbidden."""
    work_clock.did(_CUT * len(flat.other))
    owner = np.repeat(np.arange(len(flat.size)), np.diff(flat.first))
    one = np.flatnonzero(owner < flat.other)
    i, j, width = owner[one], flat.other[one], flat.size[flat.other[one]]
    # An edge changes where its first end does, and where its last one does.
    early = place[i] <= place[j]
    half = (np.where(early, b[i], a[i]), np.where(early, a[j], b[j]))
    cells = [(a[i], a[j]), half, (b[i], b[j])]
    edges = [flat.pool[flat.table[one] + x * width + y] for x, y in cells]
    ends = np.minimum(place[i], place[j]), np.maximum(place[i], place[j])
    nodes = [flat.unary[flat.at[:-1] + a], flat.unary[flat.at[:-1] + b]]
    change, forbidden = np.zeros(count + 2), np.zeros(count + 2)
    for values, at in ((nodes, (place,)), (edges, ends)):
        finite = [np.where(np.isinf(v), 0.0, v) for v in values]
        bad = [np.isinf(v).astype(float) for v in values]
        change[0] += finite[0].sum()
        forbidden[0] += bad[0].sum()
        for k, where in enumerate(at):
            np.add.at(change, where + 1, finite[k + 1] - finite[k])
            np.add.at(forbidden, where + 1, bad[k + 1] - bad[k])
    total = np.cumsum(change)[:-1] + flat.constant
    return np.where(np.cumsum(forbidden)[:-1] > 0, np.inf, total)


def _orders(
    flat: Flat, differ: np.ndarray, layer: np.ndarray | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield orders of some nodes, each with the places where it may be cut."""
    if not len(differ):
        return
    if layer is not None:
        order = differ[np.argsort(layer[differ], kind="stable")]
        yield order, np.append(np.flatnonzero(np.diff(layer[order])) + 1, len(order))
    marks = np.unique(np.linspace(0, len(differ), _CUTS).astype(np.int64))
    yield differ, marks
    for middle in (0, 1):
        yield _outward(flat, differ, middle), marks


def layers(flat: Flat, to: Sequence[int]) -> np.ndarray:
    """Return (nodes,) the layer of each, given ``to``, the node that each is tied to.

    The layer is its place among those tied to the same one, counted backward where that
    is how it meets the others (the backward of a layer meets its forward); -1 where
    nothing repeats as often.
    """
    group = np.array([to[i] for i in flat.nodes.tolist()])
    _, group, count = np.unique(group, return_inverse=True, return_counts=True)
    often = int(np.bincount(count, count * (count > 1)).argmax())
    place = np.zeros(len(group))
    order = np.argsort(group, kind="stable")
    first = np.cumsum(count) - count
    place[order] = np.arange(len(group)) - first[group[order]]
    place -= (count[group] - 1) / 2
    owner = np.repeat(np.arange(len(flat.size)), np.diff(flat.first))
    is_common = (count[group[owner]] == often) & (count[group[flat.other]] == often)
    a, b = owner[is_common], flat.other[is_common]
    pairs, inverse = np.unique(
        np.stack([group[a], group[b]]), axis=1, return_inverse=True
    )
    agree = np.bincount(inverse, place[a] * place[b], pairs.shape[1])
    neighbors: dict[int, list[tuple[int, float]]] = {}
    for x, y, sign in zip(*pairs.tolist(), agree.tolist(), strict=True):
        neighbors.setdefault(x, []).append((y, sign))
    turn: dict[int, int] = {}
    for root in neighbors:
        queue = [root] if root not in turn else []
        turn.setdefault(root, 1)
        for x in queue:
            for y, sign in neighbors[x]:
                if y not in turn:
                    turn[y] = turn[x] if sign > 0 else -turn[x]
                    queue.append(y)
    way = np.array([turn.get(g, 0) for g in range(len(count))])
    layer_numbers = np.where(
        way[group] != 0, place * way[group] + (often - 1) / 2, -1.0
    )
    return np.rint(layer_numbers).astype(np.int64)


def _outward(flat: Flat, nodes: np.ndarray, middle: int) -> np.ndarray:
    """Return the nodes by breadth-first search among them, from the first or a middle
    one; in a training graph a layer's forward and backward nodes come together."""
    work_clock.did(_STEP * (len(nodes) + len(flat.other)))
    waiting = np.zeros(len(flat.size), bool)
    waiting[nodes] = True
    order: list[int] = []
    starts = nodes[len(nodes) // 2 :] if middle else nodes
    for root in [*starts.tolist(), *nodes.tolist()]:
        if not waiting[root]:
            continue
        waiting[root] = False
        queue = [root]
        for i in queue:
            for j in flat.other[flat.first[i] : flat.first[i + 1]].tolist():
                if waiting[j]:
                    waiting[j] = False
                    queue.append(j)
        order += queue
    return np.array(order, np.int64)
