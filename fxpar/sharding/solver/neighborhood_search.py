"""Searches large neighbourhoods: some nodes are chosen anew while the rest stay.

In: a Flat, a choice that fits, a clock. Out: a choice that fits and costs no more. A
window is a set of free nodes; costs and usages of the others are folded into it, it is
reduced exactly and given to the integer program. Never: leaves the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fxpar.sharding.solver import message_passing, milp, work_clock
from fxpar.sharding.solver.exact_reductions import forbid_above, reduce
from fxpar.sharding.solver.network import (
    Flat,
    Network,
    Tables,
    cost_of,
    fits,
    usage_of,
)
from fxpar.sharding.solver.problem import Infeasible

# Variables of the first window's integer program, and bounds on later ones.
_FIRST, _LEAST, _MOST = 8_000, 1_000, 400_000
# Shares of all strategies, best merit first, that windows choose among.
_SHARES = (0.2, 0.35, 0.6, 1.0)
# Seconds of work of a node or edge in a window.
_RESTRICT = 1.4e-5


def improve(
    flat: Flat,
    choice: np.ndarray,
    deadline: float,
    *,
    bound: float,
    merit: np.ndarray,
    tolerance: float = 1e-9,
) -> np.ndarray:
    """Return a choice at least as good, working until the gap to ``bound`` is within
    ``tolerance`` or the deadline.

    ``merit``: (strategies,) how much worse than its node's best each looks, by which
    some windows leave strategies out, to be larger.
    """
    random = np.random.default_rng(0)
    cost = cost_of(flat, choice)
    targets = np.full(len(_SHARES), float(_FIRST))
    late = 0.0  # the most a window was late
    picks: list[Callable] = [_ball, _living, _mixed]
    while cost - bound > tolerance * abs(cost):
        begun = work_clock.now()
        seconds_left = work_clock.left(deadline) - late
        if seconds_left < 0.05:
            break
        turn = int(random.integers(len(_SHARES)))
        keep = _keep(flat, choice, merit, _SHARES[turn])
        weight, target = variables_of(flat, keep), targets[turn]
        whole = weight.sum() <= target
        pick = picks[int(random.integers(len(picks)))]
        free = np.arange(len(flat.size))
        if not whole:
            free = pick(flat, choice, weight, target, random)
        until = begun + min(seconds_left - 0.02, max(1.0, seconds_left / 20))
        window_choice, proved = solve_window(flat, choice, free, until, keep)
        spent = work_clock.now() - begun
        late = max(late, begun + spent - until)
        if window_choice is not None:
            value = cost_of(flat, window_choice)
            if value <= cost and fits(flat, usage_of(flat, window_choice)):
                choice, cost = window_choice, value
        if whole and proved and keep.all():
            break
        quick = proved and spent < max(0.5, seconds_left / 60)
        change = 1.15 if quick else 0.8 if proved else 0.5
        targets[turn] = np.clip(target * change, _LEAST, _MOST)
    return choice


def solve_window(
    flat: Flat,
    choice: np.ndarray,
    free: np.ndarray,
    deadline: float,
    keep: np.ndarray,
) -> tuple[np.ndarray | None, bool]:
    """Return a choice that fits with the free nodes chosen anew among the strategies of
    the mask ``keep``, or None, and whether it is optimal."""
    net = restrict(flat, choice, free)
    try:
        if not keep.all():
            for k, i in enumerate(free.tolist()):
                net.keep(k, np.flatnonzero(keep[flat.at[i] : flat.at[i + 1]]))
        inside = [np.searchsorted(net.names[k], choice[i]) for k, i in enumerate(free)]
        forbid_above(net, _inner_cost(net, inside))
        reduce(net, deadline)
    except Infeasible:
        return None, True
    core = Flat(net)
    magnitude = max(abs(cost_of(flat, choice) - flat.constant), 1e-300)
    best, proved = _settle(core, magnitude, deadline)
    if best is None:
        return None, proved
    out = choice.copy()
    out[free] = net.expand(core.nodes, best)
    return out, proved


def _settle(
    core: Flat, magnitude: float, deadline: float
) -> tuple[np.ndarray | None, bool]:
    """Return the best choice found that fits or None, and whether that is proved."""
    if not len(core.size):
        empty = np.zeros(0, np.int64)
        return (empty if fits(core, np.zeros(len(core.room))) else None), True
    best, cost, bound = message_passing.pass_messages(core, deadline, patience=20)
    if best is not None and not fits(core, usage_of(core, best)):
        best = None
    if best is not None and cost - bound <= 1e-9 * abs(cost):
        return best, True
    answer = milp.solve_program(core, deadline, magnitude=magnitude, gap=1e-5)
    return (best if answer.choice is None else answer.choice), answer.proved


def _inner_cost(net: Network, choice: Sequence) -> float:
    """Return the cost of a choice in a Network of which nothing is eliminated."""
    total = sum(float(net.unary[i][k]) for i, k in enumerate(choice))
    return total + sum(
        float(table[choice[i], choice[j]])
        for i, neighbors in enumerate(net.adj)
        for j, table in neighbors.items()
        if i < j
    )


def restrict(flat: Flat, choice: np.ndarray, free: np.ndarray) -> Network:
    """Return the Network of the free nodes (numbered in their order) with the others
    fixed."""
    place = {int(i): k for k, i in enumerate(free)}
    work_clock.did(_RESTRICT * len(free) * (1 + len(flat.other) / len(flat.size)))
    unary, arrays = [], {}
    adj: list[dict[int, np.ndarray]] = [{} for _ in free]
    rows: list[list] = []
    own = np.zeros(len(flat.room))  # usage by the free nodes
    for k, i in enumerate(free.tolist()):
        size = int(flat.size[i])
        cost = flat.unary[flat.at[i] : flat.at[i + 1]].copy()
        for e in range(flat.first[i], flat.first[i + 1]):
            j, start = int(flat.other[e]), int(flat.table[e])
            if j in place:
                shape = (size, int(flat.size[j]))
                if start not in arrays:
                    cells = flat.pool[start : start + shape[0] * shape[1]]
                    arrays[start] = cells.reshape(shape)
                adj[k][place[j]] = arrays[start]
            else:
                row = int(flat.table[flat.pair[e]]) + int(choice[j]) * size
                cost += flat.pool[row : row + size]
        unary.append(cost)
        live = range(flat.live[i], flat.live[i + 1])
        span = [(int(flat.begin[m]), int(flat.end[m]), int(flat.use[m])) for m in live]
        rows.append([(a, b, flat.usage[u : u + size]) for a, b, u in span])
        for a, b, u in span:
            own[a:b] += flat.usage[u + choice[i]]
    room = flat.room - usage_of(flat, choice) + own
    tables = Tables()
    for i, neighbors in enumerate(adj):
        for j, table in neighbors.items():
            if i < j:
                tables.pair(table, adj[j][i])
    names = [np.arange(len(cost)) for cost in unary]
    alive = set(range(len(free)))
    return Network(unary, adj, rows, room, tables, names, alive, slack=flat.slack)


def _keep(
    flat: Flat, choice: np.ndarray, merit: np.ndarray, share: float
) -> np.ndarray:
    """Return (strategies,) a mask of a share of all strategies: the chosen, and the
    best."""
    cut = np.partition(merit, min(int(share * len(merit)), len(merit) - 1))
    keep = merit <= cut[min(int(share * len(merit)), len(merit) - 1)]
    keep[flat.at[:-1] + choice] = True
    return keep


def variables_of(flat: Flat, keep: np.ndarray) -> np.ndarray:
    """Return (nodes,) each node's share of an integer program's variables, where the
    mask ``keep`` leaves each node some strategies."""
    owner = flat.owner
    size = np.add.reduceat(keep.astype(np.int64), flat.at[:-1])
    pairs = size[owner] * size[flat.other]
    return size + np.bincount(owner, pairs, len(size)) / 2


def _grow(
    flat: Flat, seeds: list[int], weight: np.ndarray, target: float, random
) -> list[int]:
    """Return nodes reached from seeds by random steps over edges until ``target`` is
    full."""
    reached, total = set(seeds), float(weight[seeds].sum())
    front = list(seeds)
    while front and total < target:
        at = int(random.integers(len(front)))
        i = front[at]
        ends = flat.other[flat.first[i] : flat.first[i + 1]].tolist()
        neighbors = [j for j in ends if j not in reached]
        if not neighbors:
            front[at] = front[-1]
            front.pop()
            continue
        j = neighbors[int(random.integers(len(neighbors)))]
        reached.add(j)
        front.append(j)
        total += float(weight[j])
    return sorted(reached)


def _ball(flat: Flat, choice: np.ndarray, weight, target, random) -> np.ndarray:
    """Return a random connected set."""
    seeds = [int(random.integers(len(flat.size)))]
    return np.array(_grow(flat, seeds, weight, target, random), np.int64)


def _living(flat: Flat, choice: np.ndarray, weight, target, random) -> np.ndarray:
    """Return random nodes among those alive at one tight row, as they trade memory
    there."""
    if not len(flat.room):
        return _ball(flat, choice, weight, target, random)
    owner = flat.holder
    free = flat.room - usage_of(flat, choice)
    tight = np.argsort(free + random.exponential(0.05, len(free)) * flat.room.max())
    row = int(tight[0])
    living = np.unique(owner[(flat.begin <= row) & (row < flat.end)])
    order = random.permutation(living)
    count = int(np.searchsorted(np.cumsum(weight[order]), target)) + 1
    return np.sort(order[:count])


def _mixed(flat: Flat, choice: np.ndarray, weight, target, random) -> np.ndarray:
    """Return connected sets around a few nodes alive at one tight row."""
    seeds = _living(flat, choice, weight, target, random)
    few = random.permutation(seeds)[: int(random.integers(1, 6))]
    return np.array(_grow(flat, few.tolist(), weight, target, random), np.int64)
