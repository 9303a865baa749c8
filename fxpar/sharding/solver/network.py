"""Defines the two forms that every phase works on: a pairwise network, forbidden pairs
being inf, which can be changed, and the same as flat arrays, which kernels and the
integer program read.

In: a Problem. Out: a Network without self edges, parallel edges, or strategies that no
choice can use; its memory in rows that matter. Changes keep the least cost and are
written on a trail, by which a choice of the Network becomes one of the Problem.
A Flat is made of what is left of a Network. Never: looks for a choice itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from fxpar.sharding.solver import work_clock
from fxpar.sharding.solver.problem import Infeasible, Problem, range_sums

T = TypeVar("T")

# Seconds of work of a node or edge of a Problem.
_BUILD = 2e-6
# (first row, row after the last, usage per strategy)
Row = tuple[int, int, np.ndarray]
# Sets the choice of an eliminated node, given the choices of nodes eliminated later or
# never; choices here are the Problem's numbers.
Undo = Callable[[list[int]], None]


class Tables:
    """Caches derived tables, each made once for every edge that shares its source."""

    def __init__(self) -> None:
        self._tables: dict[tuple, tuple[object, Any]] = {}

    def once(self, key: tuple, sources: object, make: Callable[[], T]) -> T:
        """Return the object made for a key; ``sources`` are kept alive, since keys hold
        ids."""
        entry = self._tables.get(key)
        if entry is None:
            entry = self._tables[key] = (sources, make())
        return entry[1]

    def flip(self, table: np.ndarray) -> np.ndarray:
        """Return the transposed table; flipping it again gives back the same object."""
        if ("flip", id(table)) not in self._tables:
            self.pair(table, np.ascontiguousarray(table.T))
        return self._tables["flip", id(table)][1]

    def pair(self, table: np.ndarray, flipped: np.ndarray) -> None:
        """Register a table and its transposed one with each other."""
        self._tables["flip", id(table)] = (table, flipped)
        self._tables["flip", id(flipped)] = (flipped, table)

    def add(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return the elementwise sum."""
        return self.once(("add", id(a), id(b)), (a, b), lambda: a + b)

    def rows(self, a: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Return the rows of an index array."""
        return self.once(("rows", id(a), index.tobytes()), a, lambda: a[index])

    def dead(self, a: np.ndarray) -> np.ndarray | None:
        """Return (rows,) whether every entry of a row is forbidden; None if of no
        row."""
        rows = self.once(("dead", id(a)), a, lambda: np.isinf(a).all(1))
        return rows if rows.any() else None


@dataclass
class Network:
    """Holds nodes, edges as ``adj[i][j]`` of shape (K_i, K_j) with ``adj[j][i]`` its
    flip, and memory rows: at each row r, which is for the Problem's time ``times[r]``,
    the summed usage is at most ``room[r]``.

    ``names[i]``: the Problem's number of each strategy left, ascending.
    """

    unary: list[np.ndarray]  # cost of each strategy of each node
    adj: list[dict[int, np.ndarray]]  # tables of the edges, by node and neighbour
    rows: list[list[Row]]  # the memory rows that each node is in
    room: np.ndarray  # the most that each memory row may hold
    tables: Tables  # tables derived once for all edges that share a source
    names: list[np.ndarray]  # numbers of the strategies that are left
    alive: set[int]  # nodes not yet eliminated
    constant: float = 0.0  # the cost of eliminated nodes
    slack: float = 0.0  # how far rounding may put a summed usage above its room
    # The Problem's time of each memory row.
    times: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    # How eliminated nodes are chosen, in order of elimination.
    trail: list[Undo] = field(default_factory=list)

    def size(self, i: int) -> int:
        """Return how many strategies a node has left."""
        return len(self.unary[i])

    def connect(self, i: int, j: int, table: np.ndarray) -> None:
        """Add a table to the edge of two different nodes."""
        if j in self.adj[i]:
            table = self.tables.add(self.adj[i][j], table)
        self.adj[i][j] = table
        self.adj[j][i] = self.tables.flip(table)

    def disconnect(self, i: int, j: int) -> None:
        """Drop an edge."""
        del self.adj[i][j], self.adj[j][i]

    def keep(self, i: int, positions: np.ndarray) -> None:
        """Leave a node only the strategies of an index array."""
        if not len(positions):
            raise Infeasible("no choice is allowed: a node has no strategy left")
        self.unary[i] = self.unary[i][positions]
        self.names[i] = self.names[i][positions]
        self.rows[i] = [(a, b, usage[positions]) for a, b, usage in self.rows[i]]
        for j, table in list(self.adj[i].items()):
            self.adj[i][j] = cut = self.tables.rows(table, positions)
            self.adj[j][i] = self.tables.flip(cut)

    def expand(
        self, nodes: Iterable[int] = (), choice: Iterable[int] = ()
    ) -> tuple[int, ...]:
        """Return the Problem's choice, from the position chosen for each of the nodes
        alive."""
        out = [0] * len(self.names)
        for i, k in zip(nodes, choice, strict=True):
            out[i] = int(self.names[i][k])
        for undo in reversed(self.trail):
            undo(out)
        return tuple(out)


def build(problem: Problem, fixed: Mapping[int, int] | None = None) -> Network:
    """Return the Network of a Problem, with some nodes pinned to a strategy.

    Raises Infeasible if no choice is allowed, whatever the limit.
    """
    tables = Tables()
    count = len(problem.costs)
    work_clock.did(_BUILD * (count + len(problem.edges)))
    unary = list(problem.costs)
    net = Network(
        unary,
        [{} for _ in range(count)],
        [[] for _ in range(count)],
        np.zeros(0),
        tables,
        [np.arange(len(cost)) for cost in unary],
        set(range(count)),
    )
    for i, j, t in problem.edges:
        if i == j:
            unary[i] = unary[i] + np.diagonal(problem.tables[t])
        else:
            net.connect(i, j, problem.tables[t])
    for i, k in (fixed or {}).items():
        pinned = np.full(len(unary[i]), np.inf)
        pinned[k] = unary[i][k]
        unary[i] = pinned
    edges = [(i, j) for i in range(count) for j in net.adj[i] if i < j]
    consistent(net, range(count), edges)
    if problem.limit is not None:
        net.slack = 5e-13 * problem.limit
        _lay_rows(net, problem)
    return net


def consistent(
    net: Network, nodes: Iterable[int] = (), edges: Iterable[tuple[int, int]] = ()
) -> set[int]:
    """Remove strategies whose own cost is inf and those that an edge forbids with all
    of the other end's, starting from the given nodes and edges; return the nodes that
    lost one. Raises Infeasible if a node loses all."""
    pending: dict[int, np.ndarray] = {}

    def mark(i: int, bad: np.ndarray | None) -> None:
        if bad is not None:
            pending[i] = bad | pending[i] if i in pending else bad

    for i in nodes:
        bad = np.isinf(net.unary[i])
        mark(i, bad if bad.any() else None)
    for i, j in edges:
        mark(i, net.tables.dead(net.adj[i][j]))
        mark(j, net.tables.dead(net.adj[j][i]))
    touched = set()
    while pending:
        i = next(iter(pending))
        net.keep(i, np.flatnonzero(~pending.pop(i)))
        touched.add(i)
        for j in net.adj[i]:
            mark(j, net.tables.dead(net.adj[j][i]))
    return touched


def _lay_rows(net: Network, problem: Problem) -> None:
    """Add rows at the times that could exceed the limit and at which no other time's
    live set includes this one's."""
    assert problem.limit is not None
    live = [
        (m.node, m.begin, m.end, np.asarray(m.usage, float)[net.names[m.node]])
        for m in problem.memory
        if m.begin < m.end
    ]
    live = [item for item in live if item[3].any()]
    if not live:
        return
    begin = np.array([item[1] for item in live])
    end = np.array([item[2] for item in live])
    times = _maximal(begin, end)
    top = np.array([item[3].max() for item in live])
    first, last = np.searchsorted(times, begin), np.searchsorted(times, end)
    tight = range_sums(first, last, top, len(times)) > problem.limit * (1 - 1e-9)
    times = times[tight]
    net.room, net.times = np.full(len(times), float(problem.limit)), times
    for node, a, b, usage in live:
        r, s = (int(x) for x in np.searchsorted(times, (a, b)))
        if r < s:
            net.rows[node].append((r, s, usage))


def _maximal(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the begin times after which something ends before anything else begins."""
    starts = np.unique(begin)
    ends = np.unique(end)
    # Ends in (start, next start].
    following = np.append(starts[1:], np.iinfo(np.int64).max)
    count = np.searchsorted(ends, following, "right") - np.searchsorted(
        ends, starts, "right"
    )
    return starts[count > 0]


# Seconds of work: of a table's entry that a message passes, of an entry of a message,
# of an edge or range of rows that is looked at, of a node or edge made flat.
_CELL, _ENTRY, _LOOK, _FLATTEN = 8e-10, 4e-9, 6e-9, 3.5e-6


class Flat:
    """Holds the n nodes alive of a Network, and the memory rows that can exceed their
    room, as arrays."""

    def __init__(self, net: Network) -> None:
        nodes = sorted(net.alive)
        work_clock.did(_FLATTEN * (len(nodes) + sum(len(net.adj[i]) for i in nodes)))
        # (n,) numbers of the nodes in the Network, ascending.
        self.nodes = np.array(nodes, np.int64)
        # (n,) number of strategies of each node.
        self.size = np.array([net.size(i) for i in nodes], np.int64)
        # (n + 1,) where the strategies of each node begin in ``unary``.
        self.at = np.append(0, np.cumsum(self.size)).astype(np.int64)
        # Cost of each strategy of each node.
        self.unary = np.concatenate([net.unary[i] for i in nodes] or [np.zeros(0)])
        self.constant = net.constant  # the cost that every choice pays
        self.slack = net.slack  # usage above ``room`` that counts as rounding
        self._lay_edges(net, nodes)
        self._lay_memory(net, [_summed_by_range(net.rows[i]) for i in nodes])

    def _lay_edges(self, net: Network, nodes: Sequence[int]) -> None:
        place = {i: k for k, i in enumerate(nodes)}
        offsets: dict[int, tuple[int, int]] = {}
        parts, total, height = [], 0, 0
        first, other, table, rows = [0], [], [], []
        for i in nodes:
            for j in sorted(net.adj[i]):
                array = net.adj[i][j]
                if id(array) not in offsets:
                    offsets[id(array)] = total, height
                    parts.append(array)
                    total, height = total + array.size, height + len(array)
                other.append(place[j])
                table.append(offsets[id(array)][0])
                rows.append(offsets[id(array)][1])
            first.append(len(other))
        none = [np.zeros(0)]
        # (n + 1,) where the entries of each node begin; an edge is an entry at either
        # end.
        self.first = np.array(first, np.int64)
        # By entry, the node that it is of, and the one at the other end.
        self.owner = np.repeat(np.arange(len(nodes)), np.diff(self.first))
        self.other = np.array(other, np.int64)
        # By entry, where in ``pool`` its (K_i, K_j) table begins.
        self.table = np.array(table, np.int64)
        # All tables, one after the other.
        self.pool = np.concatenate([array.ravel() for array in parts] or none)
        # By entry, where the least and largest of each row of its table are in ``low``
        # and ``high``.
        self.rows = np.array(rows, np.int64)
        self.low = np.concatenate([array.min(1) for array in parts] or none)
        self.high = np.concatenate([array.max(1) for array in parts] or none)
        ends = zip(self.owner.tolist(), other, strict=True)
        entry = {pair: e for e, pair in enumerate(ends)}
        # By entry, the entry of the edge's other end.
        self.pair = np.array([entry[j, i] for i, j in entry], np.int64)
        message = np.append(0, np.cumsum(self.size[self.owner])).astype(np.int64)
        # By entry, where its K_i numbers are among all messages; how many those are.
        self.message, self.messages = message[:-1], int(message[-1])

    def _lay_memory(self, net: Network, rows: Sequence[list[Row]]) -> None:
        items = [item for part in rows for item in part]
        begin = np.array([a for a, _, _ in items], np.int64)
        end = np.array([b for _, b, _ in items], np.int64)
        top = np.array([usage.max() for _, _, usage in items])
        most = range_sums(begin, end, top, len(net.room))
        tight = (most > net.room - 1e-9 * abs(net.room)) | (net.room < 0)
        # In a stretch where nothing begins or ends, only the row with least room
        # counts.
        renamed = np.append(0, np.cumsum(tight))
        begin, end, room = renamed[begin], renamed[end], net.room[tight]
        lives = begin < end
        starts = np.unique(np.concatenate([begin[lives], end[lives], [0]]))
        starts = starts[starts < len(room)]
        # By memory row, the most that it may hold.
        self.room = np.minimum.reduceat(room, starts) if len(room) else room
        # By memory row, the Problem's time that it begins at, ascending.
        times = (
            net.times[tight][starts] if len(net.times) else np.arange(len(self.room))
        )
        self.when = times
        # By usage, the first memory row that is occupied, and the row after the last.
        self.begin = np.searchsorted(starts, begin[lives]).astype(np.int64)
        self.end = np.searchsorted(starts, end[lives]).astype(np.int64)
        # By usage, the node that it is of; (n + 1,) the first usage of each node.
        holder = np.repeat(np.arange(len(rows)), list(map(len, rows)))
        self.holder = holder[lives].astype(np.int64)
        self.live = np.searchsorted(self.holder, np.arange(len(rows) + 1))
        usages = [
            usage for (_, _, usage), alive in zip(items, lives, strict=True) if alive
        ]
        # By usage, where in ``usage``, the memory occupied, its strategies begin.
        self.use = np.cumsum([0, *map(len, usages)])[:-1].astype(np.int64)
        self.usage = np.concatenate(usages or [np.zeros(0)])

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return the arrays that kernels read (``numba_loops``)."""
        of_nodes = self.size, self.at, self.first
        of_entries = self.other, self.table, self.pair, self.message, self.rows
        return *of_nodes, *of_entries, self.pool, self.low, self.high

    @cached_property
    def sweep_seconds(self) -> float:
        """Return the seconds of work of a pass of messages there and back."""
        cells = float((self.size[self.owner] * self.size[self.other]).sum())
        entries = self.messages + len(self.other) + len(self.size)
        return _CELL * cells + _ENTRY * entries

    @cached_property
    def look_seconds(self) -> float:
        """Return the seconds of work of a look at a choice: its cost, or its usage."""
        return _LOOK * (len(self.other) + len(self.begin) + len(self.room))


def _summed_by_range(rows: Sequence[Row]) -> list[Row]:
    """Return the entries of one node with those over the same rows summed."""
    summed: dict[tuple[int, int], np.ndarray] = {}
    for a, b, usage in rows:
        summed[a, b] = summed[a, b] + usage if (a, b) in summed else usage
    return [(a, b, usage) for (a, b), usage in summed.items()]


def cost_of(flat: Flat, choice: np.ndarray) -> float:
    """Return the cost of a choice per node, inf if forbidden."""
    work_clock.did(flat.look_seconds)
    total = flat.unary[flat.at[:-1] + choice].sum()
    forward = flat.owner < flat.other
    i, j = flat.owner[forward], flat.other[forward]
    cells = flat.table[forward] + choice[i] * flat.size[j] + choice[j]
    return float(total + flat.pool[cells].sum() + flat.constant)


def usage_of(flat: Flat, choice: np.ndarray) -> np.ndarray:
    """Return (rows,) the usage of each row by a choice."""
    work_clock.did(flat.look_seconds)
    used = flat.usage[flat.use + choice[flat.holder]]
    return range_sums(flat.begin, flat.end, used, len(flat.room))


def fits(flat: Flat, used: np.ndarray) -> bool:
    """Return whether usages are within their rooms, up to rounding."""
    return bool((used <= flat.room + flat.slack).all())
