"""Runs the inner loops: message passing and descent over flat arrays.

In: the arrays of a Flat (see there for their layout). Out: arrays written in place, a
bound or a count. Compiled by numba at first call and kept on disk. Never: imported at
the head of a module, since importing numba takes time.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_compiled = njit(cache=True, error_model="numpy")


@_compiled
def _send(
    pool: np.ndarray,
    table: int,
    low: np.ndarray,
    high: np.ndarray,
    source: np.ndarray,
    out: np.ndarray,
) -> float:
    """Set ``out[b] = min_a(source[a] + table[a, b])``, less its minimum, which is
    returned; ``low`` and ``high``: the least and largest entry of each row of the
    table."""
    columns = len(out)
    out[:] = np.inf
    # No entry of the message is above this, so rows that are add nothing.
    enough = np.inf
    for a in range(len(source)):
        top = source[a] + high[a]
        enough = top if top < enough else enough
    for a in range(len(source)):
        base = source[a]
        if base + low[a] > enough:
            continue
        row = pool[table + a * columns : table + (a + 1) * columns]
        for b in range(columns):
            value = base + row[b]
            out[b] = value if value < out[b] else out[b]
    least = np.inf
    for b in range(columns):
        least = out[b] if out[b] < least else least
    for b in range(columns):
        out[b] -= least
    return least


@_compiled
def sweep(arrays, unary, messages, choice, excess, rounds):
    """Run ``rounds`` passes of TRW-S there and back; return the lower bound after the
    last. ``arrays``: as ``Flat.arrays``.

    ``messages`` is updated in place (start from zeros); ``choice`` becomes the decoding
    of the last forward pass; ``excess``: how much higher the bound before the last pass
    at least is when a node takes a strategy. Source: Kolmogorov, "Convergent
    tree-reweighted message passing for energy minimization", PAMI 28, 2006, sections
    3.2 and 3.3.
    """
    size, at, first, other, table, pair, message, rows, pool, low, high = arrays
    count = len(size)
    widest = 0
    for i in range(count):
        widest = max(widest, size[i])
    total = np.empty(widest)
    source = np.empty(widest)
    bound = 0.0
    for step in range(2 * rounds):
        back = step % 2 == 1
        bound = 0.0
        for turn in range(count):
            i = count - 1 - turn if back else turn
            k, entries = size[i], range(first[i], first[i + 1])
            costs = total[:k]
            costs[:] = unary[at[i] : at[i + 1]]
            before = 0
            for e in entries:
                costs += messages[message[e] : message[e] + k]
                if other[e] < i:
                    before += 1
            after = len(entries) - before
            if not back:
                _decode(arrays, i, costs, messages, choice)
            least = costs.min()
            bound += least
            costs -= least
            excess[at[i] : at[i + 1]] = costs
            share = 1.0 / max(before, after, 1)
            for e in entries:
                j = other[e]
                if (j < i) == back:
                    own = messages[message[e] : message[e] + k]
                    vector = source[:k]
                    vector[:] = share * costs - own
                    p = pair[e]
                    out = messages[message[p] : message[p] + size[j]]
                    r = rows[e]
                    ends = low[r : r + k], high[r : r + k]
                    bound += _send(pool, table[e], *ends, vector, out)
    return bound


@_compiled
def _decode(arrays, i, costs, messages, choice):
    """Choose the best strategy given the choices of earlier nodes, which replace their
    messages."""
    size, at, first, other, table, pair, message, rows, pool, low, high = arrays
    k = len(costs)
    best = np.inf
    choice[i] = costs.argmin()
    for a in range(k):
        value = costs[a]
        for e in range(first[i], first[i + 1]):
            j = other[e]
            if j < i:
                # Row of the flipped table at the neighbour's choice.
                cell = pool[table[pair[e]] + choice[j] * k + a]
                value += cell - messages[message[e] + a]
        if value < best:
            best = value
            choice[i] = a


@_compiled
def descend(arrays, unary, choice, rounds):
    """Move single nodes to their best strategy until nothing changes, at most
    ``rounds`` times over all nodes. Never enters a forbidden pair from an allowed
    choice."""
    size, at, first, other, table, pair, message, rows, pool, low, high = arrays
    for _ in range(rounds):
        changed = False
        for i in range(len(size)):
            k = size[i]
            cost = unary[at[i] : at[i + 1]].copy()
            for e in range(first[i], first[i + 1]):
                start = table[pair[e]] + choice[other[e]] * k
                cost += pool[start : start + k]
            best = cost.argmin()
            if cost[best] < cost[choice[i]]:
                choice[i] = best
                changed = True
        if not changed:
            break
