"""Random problems and what is true of them, by trying every choice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np

from fxpar.sharding.solver import Edge, Live, Problem, evaluate


def brute(problem: Problem, fixed: Mapping[int, int] | None = None):
    """(least cost of a choice that fits, least peak of an allowed choice)."""
    best = peak = math.inf
    fixed = fixed or {}
    options = [
        [fixed[i]] if i in fixed else range(len(cost))
        for i, cost in enumerate(problem.costs)
    ]
    for choice in itertools.product(*options):
        cost, usage = evaluate(problem, choice)
        if cost < math.inf:
            peak = min(peak, usage)
            if problem.limit is None or usage <= problem.limit:
                best = min(best, cost)
    return best, peak


def small(seed: int, *, memory: bool | None = None) -> Problem:
    """One to seven nodes: self edges, parallel edges, isolated nodes, single
    strategies, shared tables, forbidden pairs, negative costs; whole or real costs."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 8))
    sizes = random.integers(1, 5, count)
    whole, rate = random.random() < 0.5, random.choice([0.0, 0.1, 0.3])

    def array(shape, rate: float) -> np.ndarray:
        out = random.integers(0, 20, shape).astype(float)
        if not whole:
            out = random.random(shape) * 10.0 ** random.integers(-4, 3)
        if random.random() < 0.1:
            out = out - 5
        out[random.random(shape) < rate] = np.inf
        return out

    costs = tuple(array(k, rate / 3) for k in sizes)
    tables: list[np.ndarray] = []
    edges = []
    for _ in range(int(random.integers(0, 3 * count))):
        i, j = (int(x) for x in random.integers(0, count, 2))
        shape = (sizes[i], sizes[j])
        same = [t for t, table in enumerate(tables) if table.shape == shape]
        if not same or random.random() < 0.5:
            same = [len(tables)]
            tables.append(array(shape, rate))
        edges.append(Edge(i, j, same[0]))
    if memory is None:
        memory = random.random() < 0.6
    entries = _entries(random, sizes) if memory else ()
    top = sum(float(m.usage.max()) for m in entries)
    limit = top * random.choice([0.3, 0.4, 0.5, 0.6]) + 0.01 if memory else None
    return Problem(costs, tuple(edges), tuple(tables), entries, limit)


def _entries(random, sizes) -> tuple[Live, ...]:
    out = []
    for _ in range(int(random.integers(1, 2 * len(sizes) + 1))):
        i, begin = int(random.integers(len(sizes))), int(random.integers(0, 8))
        usage = random.integers(0, 10, sizes[i]).astype(float)
        if random.random() < 0.3:
            usage = usage / 7
        out.append(Live(i, begin, begin + int(random.integers(0, 9)), usage))
    return tuple(out)


def layered(
    layers: int,
    width: int,
    strategies: int,
    *,
    seed: int = 0,
    limit: float | None = None,
    noise: float = 0.0,
) -> Problem:
    """Layers of the same nodes, tied: a chain with skip edges whose tables are those of
    moving between layouts (numbered differently by each node), all alive from their
    layer to the end; what occupies less costs more. ``limit``: a share between the
    least peak and the largest one; ``noise``: how much layers differ."""
    random = np.random.default_rng(seed)
    k = strategies
    apart = np.abs(np.arange(k)[:, None] - np.arange(k))
    move = np.where(apart > 0, 1.0 + 0.3 * apart, 0.0)
    turns = [random.permutation(k) for _ in range(width)]
    pairs = [(a, b) for a in range(width) for b in range(width)]
    tables = [move[np.ix_(turns[a], turns[b])] for a, b in pairs]
    ramp = np.arange(k)
    own = [0.5 * ramp * random.random() + 3 * random.random(k) for _ in range(width)]
    usages = [(k - ramp) * float(random.integers(1, 9)) for _ in range(width)]
    costs, edges, memory, tied = [], [], [], []
    total = layers * width
    for node in range(total):
        layer, place = divmod(node, width)
        costs.append(own[place] * (1 + noise * random.random(k)))
        tied.append(place)
        memory.append(Live(node, layer, layers, usages[place]))
        for back in (1, 3, width):
            if node >= back:
                table = (node - back) % width * width + place
                edges.append(Edge(node - back, node, table))
    bound = None
    if limit is not None:
        low = layers * sum(float(u.min()) for u in usages)
        high = layers * sum(float(u.max()) for u in usages)
        bound = low + limit * (high - low)
    return Problem(
        tuple(costs), tuple(edges), tuple(tables), tuple(memory), bound, tuple(tied)
    )
