"""Makes rules of ops that move rows of a dim, from the rows of operands that each
result has.

Such a dim is one factor, of which tensors have different numbers of rows, and ranks
that split it exchange the rows that change ranks (``Rule.moves``).
In: operands, shapes of results, pieces by dim. Out: a Rule.
Never: gives a rule to dims whose sizes are open.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from fxpar.sharding.factors import RowMoves, RowPiece, Rule
from fxpar.sharding.op_table import make, words_of
from fxpar.sharding.ops.views import Shape


def moved(
    operands: Sequence[torch.Tensor],
    results: Sequence[Shape],
    pieces: Mapping[int, Sequence[RowPiece]],
    fill: bool | int | float = 0,
    turns: Mapping[int, int] | None = None,
    few: Collection[int] = (),
) -> Rule | None:
    """Return the rule of operands' rows moved to results of these shapes: the pieces of
    each dim, one dim after the other, repeated as often as ``turns`` says. None where a
    size of such a dim is open. A result with one row is whole on every rank, and so are
    the operands numbered in ``few``."""
    shapes = [tuple(x.shape) for x in operands]
    moves = tuple(
        RowMoves(
            dim,
            tuple(shape[dim] for shape in shapes),
            tuple(shape[dim] for shape in results),
            tuple(rows),
            fill,
            turns=(turns or {}).get(dim, 1),
        )
        for dim, rows in pieces.items()
    )
    if not all(isinstance(n, int) for m in moves for n in (*m.sources, *m.targets)):
        return None
    unreduced = [
        [f"~d{m.dim}" for m in moves if shape[m.dim] == 1 < max(m.sources)]
        for shape in results
    ]
    words = [words_of(shape) for shape in results]
    ends = [[*dims, *marks] for dims, marks in zip(words, unreduced, strict=True)]
    own = [words_of(x) for x in shapes]
    for i, m in itertools.product(few, moves):
        own[i][m.dim] = "_"
    return replace(make(own, ends), moves=moves)


def resized(x: torch.Tensor | Shape, dim: int, rows: int) -> Shape:
    """Return the shape with ``rows`` rows of a dim."""
    shape = list(x.shape if isinstance(x, torch.Tensor) else x)
    shape[dim] = rows
    return shape


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
