"""Mixing two choices: part of the nodes as in one, the rest as in the other.

In: a Flat, a choice that fits, others that may exceed the limit. Out: a choice that
fits and costs no more. Where layers repeat, one price on memory flips all of them at
once; the best choice often has some layers one way and some the other, and is a cut
through an order of the nodes. Never leaves the limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from fxpar.sharding.solver.flat import Flat, cost_of, fits, usage_of

# Cuts tried per order.
_CUTS = 32


def mix(
    flat: Flat,
    choice: np.ndarray,
    others: Sequence[np.ndarray],
    deadline: float,
    layer: np.ndarray | None = None,
) -> np.ndarray:
    """The best cut between ``choice``, or another that fits, and any other; then again
    from there, until none is better or the deadline. ``layer``: (nodes,) of each node,
    by which cuts are tried first."""
    best, cost = choice, cost_of(flat, choice)
    starts = [choice] + [x for x in others if fits(flat, usage_of(flat, x))]
    while starts:
        again = False
        for start in starts:
            for other in others:
                for mixed in _cuts(flat, start, other, layer):
                    if time.perf_counter() > deadline:
                        return best
                    value = cost_of(flat, mixed)
                    if value < cost - 1e-9 * abs(cost) and fits(
                        flat, usage_of(flat, mixed)
                    ):
                        best, cost, again = mixed, value, True
        starts = [best] if again else []
    return best


def _cuts(
    flat: Flat, a: np.ndarray, b: np.ndarray, layer: np.ndarray | None
) -> Iterator[np.ndarray]:
    """``a`` with a stretch of each of several orders of the differing nodes as in
    ``b``: stretches from the beginning, and up to the end."""
    differ = np.flatnonzero(a != b)
    if not len(differ):
        return
    for order, ends in _orders(flat, differ, layer):
        for mark in ends.tolist():
            for part in (order[:mark], order[mark:]):
                out = a.copy()
                out[part] = b[part]
                yield out


def _orders(
    flat: Flat, differ: np.ndarray, layer: np.ndarray | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Orders of some nodes, each with the places where it may be cut."""
    if layer is not None:
        order = differ[np.argsort(layer[differ], kind="stable")]
        yield order, np.append(np.flatnonzero(np.diff(layer[order])) + 1, len(order))
    marks = np.unique(np.linspace(0, len(differ), _CUTS).astype(np.int64))
    yield differ, marks
    for middle in (0, 1):
        yield _outward(flat, differ, middle), marks


def layers(flat: Flat, to: Sequence[int]) -> np.ndarray:
    """(nodes,) the layer of each, given the one it stands for: its place among those
    that stand for the same, counted backward where that is how it meets the others
    (the backward of a layer meets its forward); -1 where nothing repeats as often."""
    group = np.array([to[i] for i in flat.nodes.tolist()])
    _, group, count = np.unique(group, return_inverse=True, return_counts=True)
    often = int(np.bincount(count, count * (count > 1)).argmax())
    place = np.zeros(len(group))
    order = np.argsort(group, kind="stable")
    first = np.cumsum(count) - count
    place[order] = np.arange(len(group)) - first[group[order]]
    place -= (count[group] - 1) / 2
    owner = np.repeat(np.arange(len(flat.size)), np.diff(flat.first))
    alike = (count[group[owner]] == often) & (count[group[flat.other]] == often)
    a, b = owner[alike], flat.other[alike]
    pairs, inverse = np.unique(
        np.stack([group[a], group[b]]), axis=1, return_inverse=True
    )
    agree = np.bincount(inverse, place[a] * place[b], pairs.shape[1])
    near: dict[int, list[tuple[int, float]]] = {}
    for x, y, sign in zip(*pairs.tolist(), agree.tolist(), strict=True):
        near.setdefault(x, []).append((y, sign))
    turn: dict[int, int] = {}
    for root in near:
        queue = [root] if root not in turn else []
        turn.setdefault(root, 1)
        for x in queue:
            for y, sign in near[x]:
                if y not in turn:
                    turn[y] = turn[x] if sign > 0 else -turn[x]
                    queue.append(y)
    way = np.array([turn.get(g, 0) for g in range(len(count))])
    found = np.where(way[group] != 0, place * way[group] + (often - 1) / 2, -1.0)
    return np.rint(found).astype(np.int64)


def _outward(flat: Flat, nodes: np.ndarray, middle: int) -> np.ndarray:
    """The nodes by breadth-first search among them, from the first or a middle one;
    in a training graph a layer's forward and backward nodes come together."""
    inside = np.zeros(len(flat.size), bool)
    inside[nodes] = True
    order: list[int] = []
    starts = nodes[len(nodes) // 2 :] if middle else nodes
    for root in [*starts.tolist(), *nodes.tolist()]:
        if not inside[root]:
            continue
        inside[root] = False
        queue = [root]
        for i in queue:
            for j in flat.other[flat.first[i] : flat.first[i + 1]].tolist():
                if inside[j]:
                    inside[j] = False
                    queue.append(j)
        order += queue
    return np.array(order, np.int64)
