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
    flat: Flat, choice: np.ndarray, others: Sequence[np.ndarray], deadline: float
) -> np.ndarray:
    """The best cut between ``choice``, or another that fits, and any other; then again
    from there, until none is better or the deadline."""
    best, cost = choice, cost_of(flat, choice)
    starts = [choice] + [x for x in others if fits(flat, usage_of(flat, x))]
    while starts:
        again = False
        for start in starts:
            for other in others:
                for mixed in _cuts(flat, start, other):
                    if time.perf_counter() > deadline:
                        return best
                    value = cost_of(flat, mixed)
                    if value < cost - 1e-9 * abs(cost) and fits(
                        flat, usage_of(flat, mixed)
                    ):
                        best, cost, again = mixed, value, True
        starts = [best] if again else []
    return best


def _cuts(flat: Flat, a: np.ndarray, b: np.ndarray) -> Iterator[np.ndarray]:
    """``a`` with a stretch of each of several orders of the differing nodes as in
    ``b``: stretches from the beginning, and up to the end."""
    differ = np.flatnonzero(a != b)
    if not len(differ):
        return
    for order in (differ, _outward(flat, differ, 0), _outward(flat, differ, 1)):
        marks = np.unique(np.linspace(1, len(order), _CUTS).astype(np.int64))
        for mark in marks.tolist():
            for part in (order[:mark], order[-mark:]):
                out = a.copy()
                out[part] = b[part]
                yield out


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
