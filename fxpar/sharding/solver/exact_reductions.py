"""Reduces a Network exactly: to a smaller one with the same least cost.

In: a Network, changed in place: nodes that another one decides merged into it, nodes of
degree up to two without memory eliminated. Out: the smaller Network, with the
eliminated nodes on its trail. Never: changes the least cost, or guesses.

Elimination of nodes of degree 0, 1 and 2: Scholz and Eckstein, "Register allocation for
irregular architectures", LCTES 2002 (R0, RI, RII).
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from fxpar.sharding.solver import work_clock
from fxpar.sharding.solver.network import Network, Row, consistent

# Largest (K_j, K_k, K_i) block the elimination of a node of degree two may cost.
_BLOCK = 2_000_000
# Seconds of work: of a look at a node, of an entry of a block.
_VISIT, _ENTRY = 5e-5, 5e-9


def reduce(net: Network, deadline: float) -> None:
    """Reduce in place until nothing applies or the work passes ``deadline``."""
    queued = set(net.alive)
    while queued:
        # By rounds, so that a hub is looked at once for all its neighbours' changes.
        work, queued = sorted(queued, key=lambda i: (len(net.adj[i]), i)), set()
        for i in work:
            if work_clock.left(deadline) < 0:
                return
            if i in net.alive:
                work_clock.did(_VISIT)
                queued |= _reduce_node(net, i)


def forbid_above(net: Network, cost: float) -> None:
    """Forbid strategies and pairs that no choice of at most this cost (without the
    constant) can use, since the least of everything else already costs too much.

    Raises Infeasible if that leaves nothing.
    """
    edges = [(i, j) for i in sorted(net.alive) for j in net.adj[i] if i < j]
    consistent(net, sorted(net.alive), edges)
    if cost == np.inf:
        return
    least = sum(float(net.unary[i].min()) for i in net.alive)
    lows = {id(net.adj[i][j]): float(net.adj[i][j].min()) for i, j in edges}
    least += sum(lows[id(net.adj[i][j])] for i, j in edges)
    spare = cost - least + 1e-9 * abs(cost)
    for i in net.alive:
        unary = net.unary[i]
        net.unary[i] = np.where(unary > unary.min() + spare, np.inf, unary)
    for i, j in edges:
        table = net.adj[i][j]
        make = partial(_cut, table, lows[id(table)] + spare)
        cut = net.tables.once(("above", id(table), spare), table, make)
        net.adj[i][j], net.adj[j][i] = cut, net.tables.flip(cut)
    consistent(net, sorted(net.alive), edges)


def _cut(table: np.ndarray, top: float) -> np.ndarray:
    return np.where(table > top, np.inf, table)


def _reduce_node(net: Network, i: int) -> set[int]:
    """Apply the reductions that one node allows; return the nodes to look at again."""
    revisit: set[int] = set()
    _settle_rows(net, i)
    neighbors = set(net.adj[i])
    if net.size(i) == 1:
        _fold(net, i)
    elif len(neighbors) == 0 and not net.rows[i]:
        net.keep(i, np.array([int(np.argmin(net.unary[i]))]))
        _fold(net, i)
    elif len(neighbors) == 1 and not net.rows[i]:
        _eliminate_leaf(net, i)
    elif (
        len(neighbors) == 2
        and not net.rows[i]
        and net.size(i) * math.prod(map(net.size, neighbors)) <= _BLOCK
    ):
        _eliminate_link(net, i)
        j, k = neighbors
        revisit |= _around(net, consistent(net, (), [(j, k)]))
    else:
        leader = _leader(net, i)
        if leader is None:
            return revisit
        _follow(net, i, leader)
        edges = [(leader, j) for j in net.adj[leader] if j in neighbors]
        revisit |= _around(net, consistent(net, (), edges))
    return revisit | neighbors | _around(net, consistent(net, neighbors))


def _around(net: Network, nodes: set[int]) -> set[int]:
    return nodes.union(*(net.adj[i] for i in nodes))


def _settle_rows(net: Network, i: int) -> None:
    """Take usage that is the same under every strategy off the room."""
    varying: list[Row] = []
    for a, b, usage in net.rows[i]:
        least = usage.min()
        net.room[a:b] -= least
        if usage.max() > least:
            varying.append((a, b, usage - least))
    net.rows[i] = varying


def _fold(net: Network, i: int) -> None:
    """Turn a node with one strategy into costs of its neighbours."""
    net.constant += float(net.unary[i][0])
    for j, table in list(net.adj[i].items()):
        net.unary[j] = net.unary[j] + table[0]
        net.disconnect(i, j)
    net.alive.discard(i)
    name = int(net.names[i][0])

    def undo(choice: list[int]) -> None:
        choice[i] = name

    net.trail.append(undo)


def _eliminate_leaf(net: Network, i: int) -> None:
    """Eliminate a node of degree one: the neighbour pays for the node's best answer to
    it."""
    ((j, table),) = net.adj[i].items()
    total = net.tables.flip(table) + net.unary[i]  # (K_j, K_i)
    best = total.argmin(1)
    net.unary[j] = net.unary[j] + total[np.arange(len(best)), best]
    net.disconnect(i, j)
    net.alive.discard(i)
    _answer(net, i, j, best)


def _answer(net: Network, i: int, j: int, best: np.ndarray) -> None:
    """Write on the trail that i takes ``best[position of j's choice]``."""
    mine, theirs = net.names[i], net.names[j]

    def undo(choice: list[int]) -> None:
        choice[i] = int(mine[best[np.searchsorted(theirs, choice[j])]])

    net.trail.append(undo)


def _eliminate_link(net: Network, i: int) -> None:
    """Eliminate a node of degree two: an edge between the neighbours pays for its best
    answer."""
    (j, table_j), (k, table_k) = sorted(net.adj[i].items())
    unary = net.unary[i]
    # Layers that repeat share the work and its tables.
    key, sources = (id(table_j), id(table_k), unary.tobytes()), (table_j, table_k)

    def answers() -> np.ndarray:
        work_clock.did(_ENTRY * len(unary) * table_j.shape[1] * table_k.shape[1])
        flip = net.tables.flip
        total = flip(table_j)[:, None, :] + (flip(table_k) + unary)[None, :, :]
        return total.argmin(2)

    def costs() -> np.ndarray:
        states = np.arange(len(best))[:, None], np.arange(best.shape[1])[None, :]
        return table_j[best, states[0]] + table_k[best, states[1]] + unary[best]

    best = net.tables.once(("best", *key), sources, answers)
    table = net.tables.once(("link", *key), sources, costs)
    net.disconnect(i, j)
    net.disconnect(i, k)
    net.alive.discard(i)
    names, first, second = net.names[i], net.names[j], net.names[k]

    def undo(choice: list[int]) -> None:
        a = np.searchsorted(first, choice[j])
        b = np.searchsorted(second, choice[k])
        choice[i] = int(names[best[a, b]])

    net.trail.append(undo)
    net.connect(j, k, table)


def _leader(net: Network, i: int) -> int | None:
    """Return a neighbour each of whose strategies allows the node exactly one; None if
    none."""
    for j in sorted(net.adj[i], key=lambda j: (net.size(j), j)):
        if len(net.adj[i]) > 2 and net.size(j) > 2 * net.size(i):
            break  # merging would make the other tables larger
        table = net.adj[j][i]
        if net.tables.once(("one", id(table)), table, partial(_is_single, table)):
            return j
    return None


def _is_single(table: np.ndarray) -> bool:
    return bool((np.isfinite(table).sum(1) == 1).all())


def _follow(net: Network, i: int, j: int) -> None:
    """Merge a node into the neighbour that decides it, memory and all."""
    table = net.adj[j][i]
    best = np.isfinite(table).argmax(1)
    net.unary[j] = net.unary[j] + table[np.arange(len(best)), best] + net.unary[i][best]
    net.disconnect(i, j)
    for k, other in list(net.adj[i].items()):
        net.disconnect(i, k)
        net.connect(j, k, net.tables.rows(other, best))
    net.rows[j] = net.rows[j] + [(a, b, usage[best]) for a, b, usage in net.rows[i]]
    net.rows[i] = []
    net.alive.discard(i)
    _answer(net, i, j, best)
