"""Defines the problem the solver is given and the answer it gives, as plain data.

In: costs, shared edge tables, memory entries. Out: a total cost and a peak for any
choice, and the smaller problem in which tied nodes are one. Never: solves a problem, or
looks at graphs, tensors or meshes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fxpar.errors import FxparError


class Live(NamedTuple):
    """Is the memory a node occupies while it lives."""

    node: int
    begin: int  # the first time at which it lives
    end: int  # the first at which it does not
    usage: np.ndarray  # (K,) >= 0, by strategy, in any unit


class Edge(NamedTuple):
    """Is a cost on two nodes."""

    i: int  # the node whose strategy is the row of the table
    j: int  # the node whose strategy is the column; if it is ``i``, the diagonal counts
    table: int  # index in ``Problem.tables``


@dataclass(frozen=True)
class Problem:
    """Asks for one strategy per node such that the sum of costs is least."""

    costs: tuple[np.ndarray, ...]  # (K_i,) cost of each strategy of node i, K_i >= 1
    edges: tuple[Edge, ...] = ()  # pairs of nodes, with the table of each
    # (K_i, K_j) arrays, each used by any number of ``edges``. A cost is finite, or inf
    # for "not allowed".
    tables: tuple[np.ndarray, ...] = ()
    memory: tuple[Live, ...] = ()  # which node occupies memory when
    # The most that may live at any time, in the unit of ``Live.usage``; None: no limit.
    limit: float | None = None
    # For node i the node whose strategies its own correspond to one to one (itself, if
    # none); None: no ties. They guide the search and do not constrain the answer.
    tied: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        sizes = [len(c) for c in self.costs]
        assert all(sizes), "a node has no strategy"
        for i, j, t in self.edges:
            assert self.tables[t].shape == (sizes[i], sizes[j]), (i, j, t)
        assert all(len(m.usage) == sizes[m.node] for m in self.memory)
        if self.tied is not None:
            assert len(self.tied) == len(sizes)
            assert all(sizes[i] == sizes[r] for i, r in enumerate(self.tied))
            assert all(self.tied[r] == r for r in self.tied), "a tie of a tie"


@dataclass(frozen=True)
class Solution:
    """Is a choice within the limit."""

    choice: tuple[int, ...]  # strategy of each node
    cost: float  # cost of the choice
    bound: float  # no choice costs less
    seconds: float
    peak: float  # the most memory in use at any time
    # Cost of the best choice found without the limit, if one was searched for.
    unlimited: float | None = None
    stopped: bool = False  # wall-clock time ended it: another run may answer otherwise

    @property
    def gap(self) -> float:
        """Return (cost - bound) / |cost|."""
        if self.cost <= self.bound:
            return 0.0
        return (self.cost - self.bound) / abs(self.cost) if self.cost else math.inf


class Infeasible(FxparError, ValueError):
    """Says that no choice is allowed, or none was found that fits.

    ``choice``: the allowed choice of the least peak met.
    """

    def __init__(
        self,
        what: str,
        limit: float | None = None,
        choice: Sequence[int] | None = None,
    ) -> None:
        super().__init__(what)
        self.limit, self.choice = limit, choice


def evaluate(problem: Problem, choice: Sequence[int]) -> tuple[float, float]:
    """Return (cost, peak usage) of a choice, straight from the definition; the cost is
    inf where something is not allowed, the peak 0 where nothing lives."""
    parts = [float(c[k]) for c, k in zip(problem.costs, choice, strict=True)]
    tables = problem.tables
    parts += [float(tables[t][choice[i], choice[j]]) for i, j, t in problem.edges]
    if math.inf in parts:
        return math.inf, peak(problem, choice)[0]
    return math.fsum(parts), peak(problem, choice)[0]


def peak(problem: Problem, choice: Sequence[int]) -> tuple[float, int]:
    """Return (largest summed usage, a time at which it is reached); (0, 0) without
    memory."""
    entries = [m for m in problem.memory if m.begin < m.end]
    if not entries:
        return 0.0, 0
    usage = np.array([m.usage[choice[m.node]] for m in entries], float)
    times = np.unique([m.begin for m in entries])
    first = np.searchsorted(times, [m.begin for m in entries])
    last = np.searchsorted(times, [m.end for m in entries])
    time = int(times[np.argmax(range_sums(first, last, usage, len(times)))])
    # Summed afresh: a running sum of floats drifts.
    now = [u for m, u in zip(entries, usage, strict=True) if m.begin <= time < m.end]
    return math.fsum(now), time


def range_sums(
    first: np.ndarray, last: np.ndarray, amount: np.ndarray, count: int
) -> np.ndarray:
    """Return (count,) sums of amounts over their half-open ranges of rows."""
    change = np.zeros(count + 1)
    np.add.at(change, first, amount)
    np.add.at(change, last, -amount)
    return np.cumsum(change[:-1])


def tie(problem: Problem) -> tuple[Problem, list[int]]:
    """Return the problem in which tied nodes are one node, and the index of each old
    node in it.

    Costs of a group add up, so a choice there costs as much as the same choice of all
    tied nodes here.
    """
    assert problem.tied is not None
    heads = sorted(set(problem.tied))
    place = {head: k for k, head in enumerate(heads)}
    to = [place[head] for head in problem.tied]
    costs = [np.zeros(len(problem.costs[head])) for head in heads]
    for i, cost in enumerate(problem.costs):
        costs[to[i]] = costs[to[i]] + cost
    counts: dict[Edge, int] = {}
    for i, j, t in problem.edges:
        edge = Edge(to[i], to[j], t)
        counts[edge] = counts.get(edge, 0) + 1
    tables: list[np.ndarray] = []
    edges: list[Edge] = []
    table_of: dict[tuple[int, int], int] = {}
    for edge, count in counts.items():
        key = (edge.table, count)
        if key not in table_of:
            table_of[key] = len(tables)
            tables.append(problem.tables[edge.table] * count)
        edges.append(Edge(edge.i, edge.j, table_of[key]))
    memory = tuple(m._replace(node=to[m.node]) for m in problem.memory)
    tied = Problem(tuple(costs), tuple(edges), tuple(tables), memory, problem.limit)
    return tied, to
