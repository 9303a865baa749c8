"""Joins exchanges of rows of one tensor: of slices along a split dim, and of their
gradients, which are put into zeros and added up.

Slices with equally many rows may share an exchange; so may sums, the gradients of
slices. ``passes.local.share_exchanges`` chooses those that share in a local graph, and
a search prices the same choice (``search.formulate``).
In: how ops move rows (``RowMoves``, ``Exchange``). Out: the exchange of the window of
rows that all of them reach, and whether it takes less time than one exchange for each.
Never: looks at graphs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from fxpar.sharding import row_moves
from fxpar.sharding.factors import Reach, RowMoves, RowPiece
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.ops.slicing import around
from fxpar.sharding.row_moves import Exchange


def sliced_at(moves: RowMoves) -> int | None:
    """Return the first row of a contiguous slice; None of other moves."""
    if len(moves.pieces) != 1:
        return None
    first = moves.pieces[0].first
    return first if moves == slice_at(moves, first) else None


def slice_at(moves: RowMoves, first: int) -> RowMoves:
    """Return the slice with equally many rows that begins at ``first``."""
    (n,), (rows,) = moves.sources[:1], moves.targets[:1]
    return RowMoves(moves.dim, (n,), (rows,), (RowPiece(0, 0, rows, first),))


def put_at(moves: RowMoves) -> int | None:
    """Return the row of the first operand at which a contiguous second operand is put;
    None of other moves."""
    put = [piece for piece in moves.pieces if piece.source == 1]
    if len(moves.sources) != 2 or len(put) != 1:
        return None
    return put[0].at if moves == put_from(moves, put[0].at) else None


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
    seconds = sum(row_moves.seconds(exchange, mesh, row) for exchange in exchanges)
    rows = sum(row_moves.crossing(exchange, mesh)[0] for exchange in exchanges)
    sends_more = row_moves.crossing(window, mesh)[0] > rows
    return not sends_more and row_moves.seconds(window, mesh, row) < seconds


def sharing_key(exchange: Exchange) -> Exchange | None:
    """Return a key that is equal for all exchanges that may share one; None if it
    cannot be shared."""
    if not is_split(exchange):
        return None
    moves = exchange.moves
    if sliced_at(moves) is not None:
        return replace(exchange, moves=slice_at(moves, 0))
    return (
        None if put_at(moves) is None else replace(exchange, moves=put_from(moves, 0))
    )
