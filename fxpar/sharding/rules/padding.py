"""Rows of pads: with a constant, with rows again, with rows turned round.

Along a padded dim ranks exchange rows (``Rule.moves``). Pads that repeat rows are
lookups by now; of their backwards a rank adds up what its own rows give, in the window
of rows that they were made of (``Rule.windows``). Every partial value may pass a pad,
but where a constant is filled in only with a reduction that leaves the constant as it
is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fxpar.sharding.factors import (
    MONOTONE,
    MOVEMENT,
    Passage,
    Reach,
    RowPiece,
    RowWindow,
    Rule,
)
from fxpar.sharding.rules.moved_dims import moved
from fxpar.sharding.rules.slicing import cut
from fxpar.sharding.rules.table import make, rows, words_of
from fxpar.sharding.rules.views import moves

# (row of the result, rows before, rows of the operand) -> row of the operand.
Place = Callable[[int, int, int], int]


def cut_ends(x: torch.Tensor, pad: Sequence[int]) -> Rule:
    """Amounts are given from the last dim on, front and back."""
    dims = [x.ndim - 1 - i // 2 for i, n in enumerate(pad) if n]
    return cut(x, dims)


def constant_pad(x: torch.Tensor, pad: Sequence[int], value: Any = 0) -> Rule:
    """A zero stays under every reduction, another constant under those of one value."""
    reductions = MOVEMENT if value == 0 else ("avg", *MONOTONE)
    passages = (Passage((0,), reductions),)
    shape, pieces = list(x.shape), dict[int, list[RowPiece]]()
    for i in range(0, len(pad), 2):
        before, after = pad[i : i + 2]
        if before or after:
            dim, cut = x.ndim - 1 - i // 2, max(-before, 0)
            rows = shape[dim] - cut + min(after, 0)
            pieces[dim] = [RowPiece(0, 0, rows, cut, at=max(before, 0))]
            shape[dim] += before + after
    rule = moved([x], [shape], pieces, value)
    return replace(rule or cut_ends(x, pad), passages=passages)


def repeated(i: int, before: int, rows: int) -> int:
    """The row that a pad by the nearest one has at ``i``."""
    return min(max(i - before, 0), rows - 1)


def turned(i: int, before: int, rows: int) -> int:
    """The row that a pad by reflection has at ``i``."""
    return rows - 1 - abs(rows - 1 - abs(i - before))


def _backward(place: Place, grad: torch.Tensor, x: torch.Tensor, pad: Sequence[int]):
    rule = cut_ends(x, pad)
    shapes = [*x.shape, *grad.shape]
    if min(pad) < 0 or not all(isinstance(n, int) for n in shapes):
        return Rule(rule.results + rule.operands, rule.operands, whole=rule.whole)
    words, windows = words_of(x), []
    for d in sorted({x.ndim - 1 - i // 2 for i, n in enumerate(pad) if n}):
        at, n, count = 2 * (x.ndim - 1 - d), x.shape[d], grad.shape[d]
        before, after = pad[at : at + 2]
        ends = range(before), range(count - after, count)
        head, tail = (tuple(place(i, before, n) for i in end) for end in ends)
        reach = Reach(1, first=-before, head=head, tail=tail)
        windows.append(RowWindow(2, d, 0, n, count, reach))
    return replace(make([words, words], [words]), windows=tuple(windows))


ROWS = {
    **rows("constant_pad_nd", constant_pad),
    **moves(
        "reflection_pad1d reflection_pad2d reflection_pad3d", cut_ends, empty="fill"
    ),
    **moves(
        "replication_pad1d replication_pad2d replication_pad3d", cut_ends, empty="fill"
    ),
    **rows(
        """
        replication_pad1d_backward replication_pad2d_backward
        replication_pad3d_backward
        """,
        partial(_backward, repeated),
        linear="0",
        empty="fill",
    ),
    **rows(
        """
        reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
        """,
        partial(_backward, turned),
        linear="0",
        empty="fill",
    ),
}
