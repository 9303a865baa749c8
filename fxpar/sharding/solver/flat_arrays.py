"""Stores a Network as flat arrays, the form the kernels and the integer program read.

In: a Network. Out: one Flat. Shared tables are stored once per orientation. Never:
changes the Network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxpar.sharding.solver import work_clock
from fxpar.sharding.solver.network import Network, range_sums

# Seconds of work: of a table's entry that a message passes, of an entry of a message,
# of an edge or range of rows that is looked at, of a node or edge made flat.
_CELL, _ENTRY, _LOOK, _FLATTEN = 8e-10, 4e-9, 6e-9, 3.5e-6


@dataclass(frozen=True)
class Flat:
    """Holds a network of n nodes and its memory rows, as arrays."""

    nodes: np.ndarray  # (n,) numbers of the nodes in the Network, ascending
    size: np.ndarray  # (n,) number of strategies of each node
    at: np.ndarray  # (n + 1,) where the strategies of each node begin in ``unary``
    unary: np.ndarray  # cost of each strategy of each node
    # (n + 1,) where the entries of each node begin; an edge is an entry at either end.
    first: np.ndarray
    other: np.ndarray  # by entry, the node at the other end
    table: np.ndarray  # by entry, where in ``pool`` its (K_i, K_j) table begins
    pair: np.ndarray  # by entry, the entry of the edge's other end
    message: np.ndarray  # by entry, where its K_i numbers are among all messages
    messages: int  # length of such an array
    pool: np.ndarray  # all tables, one after the other
    # By entry, where the least and largest of each row of its table are in ``low`` and
    # ``high``.
    rows: np.ndarray
    low: np.ndarray  # least entries of rows
    high: np.ndarray  # largest entries of rows
    live: np.ndarray  # (n + 1,) first usage of each node in the next three arrays
    begin: np.ndarray  # by usage, the first memory row that is occupied
    end: np.ndarray  # by usage, the row after the last
    use: np.ndarray  # by usage, where in ``usage`` its strategies begin
    usage: np.ndarray  # by strategy, the memory occupied
    room: np.ndarray  # by memory row, the most that it may hold
    when: np.ndarray  # by memory row, the Problem's time that it begins at, ascending
    constant: float  # the cost that every choice pays
    slack: float  # usage above ``room`` that counts as rounding

    @cached_property
    def sweep_seconds(self) -> float:
        """Return the seconds of work of a pass of messages there and back."""
        owner = np.repeat(np.arange(len(self.size)), np.diff(self.first))
        cells = float((self.size[owner] * self.size[self.other]).sum())
        entries = self.messages + len(self.other) + len(self.size)
        return _CELL * cells + _ENTRY * entries

    @cached_property
    def look_seconds(self) -> float:
        """Return the seconds of work of a look at a choice: its cost, or its usage."""
        return _LOOK * (len(self.other) + len(self.begin) + len(self.room))


def flatten(net: Network) -> Flat:
    """Return the Flat of the nodes alive; rows that cannot exceed their room are left
    out."""
    nodes = sorted(net.alive)
    place = {i: k for k, i in enumerate(nodes)}
    work_clock.did(_FLATTEN * (len(nodes) + sum(len(net.adj[i]) for i in nodes)))
    size = np.array([net.size(i) for i in nodes], np.int64)
    first, other, table, rows, pool, low, high = _edges(net, nodes, place)
    owner = np.repeat(np.arange(len(nodes)), np.diff(first))
    entry = {
        (i, j): e
        for e, (i, j) in enumerate(zip(owner.tolist(), other.tolist(), strict=True))
    }
    pair = [entry[j, i] for i, j in entry]
    message = np.append(0, np.cumsum(size[owner])).astype(np.int64)
    unary = [net.unary[i] for i in nodes]
    live, begin, end, use, usage, room, when = _memory(net, nodes)
    return Flat(
        np.array(nodes, np.int64),
        size,
        np.append(0, np.cumsum(size)).astype(np.int64),
        np.concatenate(unary) if unary else np.zeros(0),
        first,
        other,
        table,
        np.array(pair, np.int64),
        message[:-1],
        int(message[-1]),
        pool,
        rows,
        low,
        high,
        live,
        begin,
        end,
        use,
        usage,
        room,
        when,
        net.constant,
        net.slack,
    )


def _edges(
    net: Network, nodes: Sequence[int], place: dict[int, int]
) -> tuple[np.ndarray, ...]:
    """Return (first, other, table, rows, pool, low, high)."""
    offsets: dict[int, tuple[int, int]] = {}
    parts: list[np.ndarray] = []
    total = height = 0
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
    pool = np.concatenate([array.ravel() for array in parts] or none)
    low = np.concatenate([array.min(1) for array in parts] or none)
    high = np.concatenate([array.max(1) for array in parts] or none)
    return (
        np.array(first, np.int64),
        np.array(other, np.int64),
        np.array(table, np.int64),
        np.array(rows, np.int64),
        pool,
        low,
        high,
    )


def _memory(net: Network, nodes: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Return (live, begin, end, use, usage, room, when) over the rows that can be
    exceeded."""
    rows = [_summed_by_range(net.rows[i]) for i in nodes]
    items = [(a, b, usage) for part in rows for a, b, usage in part]
    begin = np.array([a for a, _, _ in items], np.int64)
    end = np.array([b for _, b, _ in items], np.int64)
    top = np.array([usage.max() for _, _, usage in items])
    tight = range_sums(begin, end, top, len(net.room)) > net.room - 1e-9 * abs(net.room)
    tight |= net.room < 0
    # In a stretch where nothing begins or ends, only the row with least room counts.
    renamed = np.append(0, np.cumsum(tight))
    begin, end, room = renamed[begin], renamed[end], net.room[tight]
    lives = begin < end
    starts = np.unique(np.concatenate([begin[lives], end[lives], [0]]))
    starts = starts[starts < len(room)]
    room = np.minimum.reduceat(room, starts) if len(room) else room
    when = net.times[tight][starts] if len(net.times) else np.arange(len(room))
    begin, end = np.searchsorted(starts, begin), np.searchsorted(starts, end)
    live, use, usages, row_numbers = [0], [], [], []
    total = m = 0
    for part in rows:
        for _, _, usage in part:
            if begin[m] < end[m]:
                row_numbers.append(m)
                use.append(total)
                usages.append(usage)
                total += len(usage)
            m += 1
        live.append(len(row_numbers))
    return (
        np.array(live, np.int64),
        begin[row_numbers].astype(np.int64),
        end[row_numbers].astype(np.int64),
        np.array(use, np.int64),
        np.concatenate(usages) if usages else np.zeros(0),
        room,
        when,
    )


def _summed_by_range(rows: Sequence[tuple[int, int, np.ndarray]]) -> list:
    """Return the entries of one node with those over the same rows summed."""
    summed: dict[tuple[int, int], np.ndarray] = {}
    for a, b, usage in rows:
        summed[a, b] = summed[a, b] + usage if (a, b) in summed else usage
    return [(a, b, usage) for (a, b), usage in summed.items()]


def cost_of(flat: Flat, choice: np.ndarray) -> float:
    """Return the cost of a choice per node, inf if forbidden."""
    work_clock.did(flat.look_seconds)
    total = flat.unary[flat.at[:-1] + choice].sum()
    owner = np.repeat(np.arange(len(flat.size)), np.diff(flat.first))
    forward = owner < flat.other
    i, j = owner[forward], flat.other[forward]
    cells = flat.table[forward] + choice[i] * flat.size[j] + choice[j]
    return float(total + flat.pool[cells].sum() + flat.constant)


def usage_of(flat: Flat, choice: np.ndarray) -> np.ndarray:
    """Return (rows,) the usage of each row by a choice."""
    work_clock.did(flat.look_seconds)
    owner = np.repeat(np.arange(len(flat.size)), np.diff(flat.live))
    used = flat.usage[flat.use + choice[owner]]
    return range_sums(flat.begin, flat.end, used, len(flat.room))


def fits(flat: Flat, used: np.ndarray) -> bool:
    """Return whether usages are within their rooms, up to rounding."""
    return bool((used <= flat.room + flat.slack).all())
