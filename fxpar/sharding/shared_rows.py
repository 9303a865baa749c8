"""Slices of one tensor along a split dim, and what is put into zeros and added up, that
exchange rows at once.

In: how ops move rows (``RowMoves``, ``Exchange``). Out: the exchange of the window of
rows that all of them reach, and whether it takes less than one for each. Slices are
alike if they have as many rows; so are sums, the gradients of slices. Which are shared
in a local graph says ``passes.local.share_exchanges``, and a search prices the same
(``search.exchange_groups``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from fxpar.sharding import row_moves
from fxpar.sharding.factors import Reach, RowMoves, RowPiece
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.ops.moved_dims import around
from fxpar.sharding.row_moves import Exchange


def sliced_at(moves: RowMoves) -> int | None:
    """The first row of a slice, of which no row is left out; None of other moves."""
    if len(moves.pieces) != 1:
        return None
    first = moves.pieces[0].first
    return first if moves == slice_at(moves, first) else None


def slice_at(moves: RowMoves, first: int) -> RowMoves:
    """The slice of as many rows that begins at ``first``."""
    (n,), (rows,) = moves.sources[:1], moves.targets[:1]
    return RowMoves(moves.dim, (n,), (rows,), (RowPiece(0, 0, rows, first),))


def put_at(moves: RowMoves) -> int | None:
    """Where a second operand, of which no row is left out, is put into the first; None
    of other moves."""
    put = [piece for piece in moves.pieces if piece.source == 1]
    if len(moves.sources) != 2 or len(put) != 1:
        return None
    return put[0].at if moves == put_from(moves, put[0].at) else None


def put_from(moves: RowMoves, first: int) -> RowMoves:
    """As many rows put into as many from ``first`` on."""
    n, rows = moves.sources
    pieces = tuple(around(n, range(first, first + rows)))
    return RowMoves(moves.dim, (n, rows), (n,), pieces)


def window_of(exchanges: Sequence[Exchange]) -> Exchange:
    """The rows that slices alike reach, read at once; of what is put, added at once."""
    moves, axes = exchanges[0].moves, exchanges[0].axes
    adds = len(moves.sources) > 1
    firsts = firsts_of(exchanges)
    reach = Reach(1, first=min(firsts), span=max(firsts) - min(firsts) + 1)
    pieces = (RowPiece(0, 0, moves.sources[0]),)
    ends = moves.sources[1:] + moves.targets if adds else moves.sources + moves.targets
    window = RowMoves(moves.dim, ends[:1], ends[1:], pieces, 0, reach, adds)
    return Exchange(window, axes, (True,), (True,))


def firsts_of(exchanges: Sequence[Exchange]) -> list[int]:
    """Where each slice begins, or what is put."""
    return [
        piece.at if len(x.moves.sources) > 1 else piece.first
        for x in exchanges
        for piece in x.moves.pieces
        if piece.source == len(x.moves.sources) - 1
    ]


def is_split(exchange: Exchange) -> bool:
    """Whether all ends of an exchange lie split."""
    return all(exchange.split_sources) and all(exchange.split_targets)


def pays(
    window: Exchange, exchanges: Collection[Exchange], mesh: Mesh, row: float
) -> bool:
    """Whether a window takes less than exchanges by themselves, of rows of so many
    bytes, and sends no more."""
    seconds = sum(row_moves.seconds(exchange, mesh, row) for exchange in exchanges)
    rows = sum(row_moves.crossing(exchange, mesh)[0] for exchange in exchanges)
    sends_more = row_moves.crossing(window, mesh)[0] > rows
    return not sends_more and row_moves.seconds(window, mesh, row) < seconds


def alike(exchange: Exchange) -> Exchange | None:
    """The same of all that may share one exchange with it; None if none may."""
    if not is_split(exchange):
        return None
    moves = exchange.moves
    if sliced_at(moves) is not None:
        return replace(exchange, moves=slice_at(moves, 0))
    return (
        None if put_at(moves) is None else replace(exchange, moves=put_from(moves, 0))
    )
