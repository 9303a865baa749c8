"""Rows of fxpar's own ops, by name: they are registered by passes and runtime; of the
one op by which a graph writes to its inputs, and of what keeps effects in order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fxpar import _torch
from fxpar.sharding.factors import (
    MONOTONE,
    MOVEMENT,
    Passage,
    RowMoves,
    RowPiece,
    Rule,
)
from fxpar.sharding.rules.pointwise import broadcast
from fxpar.sharding.rules.row_builders import make, whole, words_of
from fxpar.sharding.rules.table import Row, names, row


def _dot(lhs: torch.Tensor, rhs: torch.Tensor, equation: str) -> str:
    return equation


def _random(*args: Any) -> Rule:
    """A scalar seed in; every dim of the result is free: it counts by global index."""
    return make([[]], [names(len(args[-1]))])


def _shift(x: torch.Tensor, dim: int, by: int, fill: float | None = None) -> Rule:
    """Every dim is free: ranks that split ``dim`` send rows to their neighbours."""
    reductions = ("avg", *MONOTONE) if fill else MOVEMENT
    n, passages = x.shape[dim], (Passage((0,), reductions),)
    if fill is None:
        start = by % n
        pieces = [RowPiece(0, 0, n - start, start), RowPiece(0, 0, start, at=n - start)]
    else:
        pieces = [RowPiece(0, 0, max(n - abs(by), 0), max(by, 0), at=max(-by, 0))]
    moves = RowMoves(dim, (n,), (n,), tuple(x for x in pieces if x.count), fill or 0)
    return replace(broadcast(x), passages=passages, moves=(moves,))


def _write(target: torch.Tensor, source: torch.Tensor) -> Rule:
    """An input is written where it rests, in whole."""
    ndim = target.dim()
    words = [f"{name}!" for name in names(ndim)]
    return make([words, words_of(source, range(source.dim()), "s")], [words])


def _in_order(token: torch.Tensor, op: Any, *args: Any, **kwargs: Any) -> Rule | None:
    """An op with an effect, such as a check that raises: all ranks do it alike, on
    whole operands. One with results could be split, for which there is no rule."""
    if _torch.objects.schema_of(op).returns:
        return None
    return whole(token, *args, **kwargs)


ROWS: dict[Any, Row] = {
    "higher_order::with_effects": row(_in_order),
    torch.ops.aten.copy_.default: row(_write),
    "fxpar::dot": row(_dot, linear="0|1"),
    "fxpar::seeds": row("-> n!"),
    "fxpar::random": row(_random),
    "fxpar::randint": row(_random),
    "fxpar::orthogonal": row("m! n! -> m! n!"),
    "fxpar::constrain": row(broadcast, movement="0"),
    "fxpar::shift": row(_shift),
}
