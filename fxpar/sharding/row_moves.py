"""Computes which rows ranks exchange: the rows that each rank sends each other rank.

A tensor that is not split is whole on every rank: as an operand it gives its rows to
that rank alone, as a result it gets them all. Shards may be of any size, also 0.
In: how an op moves rows of a dim (``RowMoves``), the axes that split the dim, and for
which tensors. Out: for each pair of members of a group the ``Run``s of rows that go
from one to the other, as numbers; the most that a rank sends, and its price. Of several
exchanges of rows of one tensor: the exchange of the window of rows that all of them
reach, and whether it takes less time; the step ``share_exchanges`` chooses those
that share in a local graph, where a search has priced each by itself. Never: looks at
graphs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from fxpar.sharding import shard_sizes
from fxpar.sharding.cost.collectives import along
from fxpar.sharding.factors import Axes, Reach, RowMoves, RowPiece
from fxpar.sharding.mesh import Mesh


@dataclass(frozen=True)
class Run:
    """Describes rows at a constant distance where they are taken, and where they are
    put."""

    # Position of the first among the rank's rows of all operands, joined.
    first: int
    # Distance between them there; backwards if negative.
    step: int
    # Number of rows.
    count: int
    # Position of the first among the taking rank's rows of all results, joined.
    at: int
    # Distance between them there.
    stride: int

    def joined(self, other: Run) -> Run | None:
        """Return both as one, if the other continues this one; else None."""
        one = self.count == 1
        step = other.first - self.first if one else self.step
        stride = other.at - self.at if one else self.stride
        follows = (
            other.first == self.first + self.count * step
            and other.at == self.at + self.count * stride
        )
        has_same_step = other.count == 1 or (other.step, other.stride) == (step, stride)
        if not (follows and has_same_step and step and stride > 0):
            return None
        return Run(self.first, step, self.count + other.count, self.at, stride)


# [giver][taker]: the runs sent, in order.
Runs = tuple[tuple[tuple[Run, ...], ...], ...]


@dataclass(frozen=True)
class Exchange:
    """Describes an op that moves rows, and the layout of these rows on the mesh."""

    # The op, in rows of the whole dim.
    moves: RowMoves
    # The axes that split the dim, major to minor.
    axes: Axes
    # For each operand, whether the axes split it.
    split_sources: tuple[bool, ...]
    # For each result, whether the axes split it.
    split_targets: tuple[bool, ...]

    @cached_property
    def text(self) -> str:
        """Return the exchange as text, for an argument of an op."""
        return json.dumps(astuple(self))

    @staticmethod
    @lru_cache(maxsize=1 << 10)
    def parse(text: str) -> Exchange:
        """Return the exchange of a ``text``."""
        moves, *rest = _as_tuples(json.loads(text))
        dim, sources, targets, pieces, fill, reach, *how = moves
        rows = tuple(RowPiece(*piece) for piece in pieces)
        reach = None if reach is None else Reach(*reach)
        return Exchange(RowMoves(dim, sources, targets, rows, fill, reach, *how), *rest)


def _as_tuples(x: Any) -> Any:
    return tuple(map(_as_tuples, x)) if isinstance(x, list) else x


@lru_cache(maxsize=1 << 12)
def runs(exchange: Exchange, mesh: Mesh) -> Runs:
    """Return the runs from each member of a group along the axes, in mesh order, to
    each."""
    moves, members = exchange.moves, mesh.group(0, exchange.axes)
    source_rows, target_rows = (
        [_extents(exchange, mesh, rank, of_targets) for rank in members]
        for of_targets in (False, True)
    )
    table: list[list[list[Run]]] = [[[] for _ in members] for _ in members]
    read = [(i, to, p) for i, to in enumerate(target_rows) for p in _read(moves, to)]
    for taker, to, piece in read:
        begin, size = to[piece.target]
        inside = _meeting(piece.at, piece.stride, piece.count, begin, size)
        givers = (
            range(len(members)) if exchange.split_sources[piece.source] else [taker]
        )
        for giver in givers if inside else ():
            start, rows = source_rows[giver][piece.source]
            first = piece.first + piece.step * inside.start
            own = _meeting(first, piece.step, len(inside), start, rows)
            if not own:
                continue
            source_start = sum(n for _, n in source_rows[giver][: piece.source]) - start
            target_start = sum(n for _, n in to[: piece.target]) - begin
            run = Run(
                source_start + first + piece.step * own.start,
                piece.step,
                len(own),
                target_start + piece.at + piece.stride * (inside.start + own.start),
                piece.stride,
            )
            _append(table[giver][taker], run)
    return tuple(tuple(map(tuple, row)) for row in table)


def _read(moves: RowMoves, to: Sequence[tuple[int, int]]) -> Sequence[RowPiece]:
    """Return the pieces from which rows of the results may come; with several turns the
    pieces of the turns that contain the rows."""
    if moves.turns == 1:
        return moves.pieces
    ((begin, size),) = to
    turn = turn_of(moves)
    return [
        replace(piece, at=piece.at + first)
        for first in range(begin // turn * turn, begin + size, turn)
        for piece in moves.pieces
    ]


def turn_of(moves: RowMoves) -> int:
    """Return the most rows that a rank gets of one result, after which they repeat; all
    rows where there is one turn."""
    return max(moves.targets) // moves.turns


def _extents(
    exchange: Exchange, mesh: Mesh, rank: int, of_targets: bool
) -> list[tuple[int, int]]:
    """Return (first row, rows) of the part of each operand that a rank holds, or of
    each result that it gets: its shard, or the rows of its window."""
    moves = exchange.moves
    if moves.reach is not None and of_targets != moves.adds:
        first, rows, _ = window(exchange, mesh, rank)
        (count,) = moves.sources if moves.adds else moves.targets
        is_spare = not shard_sizes.shard(count, mesh, exchange.axes, rank)[1]
        return [(-rows if is_spare else first, rows)]
    all_rows = moves.targets if of_targets else moves.sources
    splits = exchange.split_targets if of_targets else exchange.split_sources
    shards = [
        shard_sizes.shard(n, mesh, exchange.axes, rank) if split else (0, n)
        for n, split in zip(all_rows, splits, strict=True)
    ]
    if not of_targets:
        return shards
    return [(first, min(rows, turn_of(moves))) for first, rows in shards]


@lru_cache(maxsize=1 << 12)
def window(exchange: Exchange, mesh: Mesh, rank: int) -> tuple[int, int, int]:
    """Return (first row, rows, rows with padding) of the window of a rank, which may
    begin before the dim and end after it. With equal shards all ranks have equally many
    rows with padding. A rank without windows has the number of rows of one window, all
    of them outside of the dim."""
    moves, axes = exchange.moves, exchange.axes
    assert moves.reach is not None
    (count,) = moves.sources if moves.adds else moves.targets
    if not shard_sizes.is_even(count, mesh, axes):
        first, rows = read_by(
            moves.reach, count, *shard_sizes.shard(count, mesh, axes, rank)
        )
        return first, rows, rows
    windows = {
        member: read_by(
            moves.reach, count, *shard_sizes.shard(count, mesh, axes, member)
        )
        for member in mesh.group(rank, axes)
    }
    return *windows[rank], max(rows for _, rows in windows.values())


def read_by(reach: Reach, count: int, start: int, size: int) -> tuple[int, int]:
    """Return (first row, rows) that rows ``[start, start + size)`` of ``count`` read;
    if there are none, the span of one window."""
    if not size:
        return 0, reach.span
    end, begin, tail = start + size, len(reach.head), count - len(reach.tail)
    inside = range(max(start, begin), min(end, tail))
    firsts = [*reach.head[start:end]]
    firsts += [
        (reach.first + reach.step * i) // reach.of for i in {*inside[:1], *inside[-1:]}
    ]
    firsts += reach.tail[max(0, start - tail) : max(0, end - tail)]
    return min(firsts), max(firsts) - min(firsts) + reach.span


def _append(out: list[Run], run: Run) -> None:
    longer = out[-1].joined(run) if out else None
    if longer is None:
        out.append(run)
    else:
        out[-1] = longer


def _meeting(first: int, step: int, count: int, start: int, size: int) -> range:
    """Return the numbers i for which row ``first + step * i`` is in ``[start, start +
    size)``."""
    if step < 0:
        backwards = _meeting(first + step * (count - 1), -step, count, start, size)
        return range(count - backwards.stop, count - backwards.start)
    begin = max(0, -((first - start) // step))
    end = min(count, -((first - start - size) // step))
    return range(begin, max(begin, end))


def own_rows(exchange: Exchange, mesh: Mesh, rank: int) -> int:
    """Return how many rows of all results a rank has."""
    if exchange.moves.reach is not None and not exchange.moves.adds:
        return window(exchange, mesh, rank)[2]
    return sum(rows for _, rows in _extents(exchange, mesh, rank, of_targets=True))


@lru_cache(maxsize=1 << 12)
def crossing(exchange: Exchange, mesh: Mesh) -> tuple[int, int]:
    """Return the most rows that one rank sends to or receives from others, and the most
    ranks it does so with."""
    counts = [
        [
            sum(run.count for run in there) if i != j else 0
            for j, there in enumerate(row)
        ]
        for i, row in enumerate(runs(exchange, mesh))
    ]
    ends = [*counts, *zip(*counts, strict=True)]
    return max(map(sum, ends)), max(sum(n > 0 for n in end) for end in ends)


def most_rows(exchange: Exchange, mesh: Mesh) -> int:
    """Return the most rows of all results that any rank has."""
    if exchange.moves.reach is not None and not exchange.moves.adds:
        members = mesh.group(0, exchange.axes)
        return max(own_rows(exchange, mesh, rank) for rank in members)
    targets = zip(exchange.moves.targets, exchange.split_targets, strict=True)
    shards = (
        shard_sizes.largest(rows, mesh, exchange.axes) if split else rows
        for rows, split in targets
    )
    return sum(min(rows, turn_of(exchange.moves)) for rows in shards)


def message(exchange: Exchange, mesh: Mesh, row: float) -> tuple[str, float]:
    """Return (kind, bytes on a rank before it) of the collective that takes equally
    long, for rows of ``row`` bytes: a permute where each rank has one peer, else an
    all-to-all."""
    rows, peers = crossing(exchange, mesh)
    if peers <= 1:
        return "permute", float(rows * row)
    count = mesh.count(exchange.axes)
    return "all_to_all", rows * row * count / (count - 1)


def seconds(exchange: Exchange, mesh: Mesh, row: float) -> float:
    """Return the seconds of the exchange, for rows of ``row`` bytes."""
    kind, nbytes = message(exchange, mesh, row)
    if not nbytes:
        return 0.0
    return along(kind, mesh, mesh.ordered(exchange.axes)).seconds(nbytes)


# Exchanges of one tensor that several ops share: of slices along a split dim with
# equally many rows, or of their gradients, which are put into zeros and added up.


def around(n: int, positions: range) -> list[RowPiece]:
    """Return the pieces of ``n`` rows of the first operand, with the second's at
    ``positions``."""
    start, step, rows = positions.start, positions.step, len(positions)
    last = start + step * (rows - 1)
    pieces = [RowPiece(0, 0, start), RowPiece(1, 0, rows, at=start, stride=step)]
    for i in range(1, step):
        between = len(range(start + i, last, step))
        pieces.append(RowPiece(0, 0, between, start + i, step, start + i, step))
    pieces.append(RowPiece(0, 0, n - last - 1, last + 1, at=last + 1))
    return [piece for piece in pieces if piece.count]


def slice_at(moves: RowMoves, first: int) -> RowMoves:
    """Return the slice with equally many rows that begins at ``first``."""
    (n,), (rows,) = moves.sources[:1], moves.targets[:1]
    return RowMoves(moves.dim, (n,), (rows,), (RowPiece(0, 0, rows, first),))


def put_from(moves: RowMoves, first: int) -> RowMoves:
    """Return the move that puts equally many rows into as many from ``first`` on."""
    n, rows = moves.sources
    pieces = tuple(around(n, range(first, first + rows)))
    return RowMoves(moves.dim, (n, rows), (n,), pieces)


def window_of(exchanges: Sequence[Exchange]) -> Exchange:
    """Return the exchange that reads at once the rows that slices of the same kind
    reach; for rows that are put, the exchange that adds them at once."""
    moves, axes = exchanges[0].moves, exchanges[0].axes
    adds = len(moves.sources) > 1
    firsts = firsts_of(exchanges)
    reach = Reach(1, first=min(firsts), span=max(firsts) - min(firsts) + 1)
    pieces = (RowPiece(0, 0, moves.sources[0]),)
    ends = moves.sources[1:] + moves.targets if adds else moves.sources + moves.targets
    window = RowMoves(moves.dim, ends[:1], ends[1:], pieces, 0, reach, adds)
    return Exchange(window, axes, (True,), (True,))


def firsts_of(exchanges: Sequence[Exchange]) -> list[int]:
    """Return where each slice begins, or where each operand is put."""
    return [
        piece.at if len(x.moves.sources) > 1 else piece.first
        for x in exchanges
        for piece in x.moves.pieces
        if piece.source == len(x.moves.sources) - 1
    ]


def is_split(exchange: Exchange) -> bool:
    """Return whether all operands and results of an exchange are split."""
    return all(exchange.split_sources) and all(exchange.split_targets)


def is_faster(
    window: Exchange, exchanges: Collection[Exchange], mesh: Mesh, row: float
) -> bool:
    """Return whether a window takes less time than separate exchanges, for rows of
    ``row`` bytes, and sends no more."""
    separate = sum(seconds(exchange, mesh, row) for exchange in exchanges)
    rows = sum(crossing(exchange, mesh)[0] for exchange in exchanges)
    sends_more = crossing(window, mesh)[0] > rows
    return not sends_more and seconds(window, mesh, row) < separate


def sharing_key(exchange: Exchange) -> Exchange | None:
    """Return a key that is equal for all exchanges that may share one; None if it
    cannot be shared."""
    moves, firsts = exchange.moves, firsts_of([exchange])
    if not is_split(exchange) or len(moves.sources) > 2 or len(firsts) != 1:
        return None
    of_kind = slice_at if len(moves.sources) == 1 else put_from
    if moves != of_kind(moves, firsts[0]):  # rows that are not contiguous
        return None
    return replace(exchange, moves=of_kind(moves, 0))
