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
from torch import fx

from fxpar.sharding.factors import (
    MONOTONE,
    MOVEMENT,
    Passage,
    Reach,
    RowPiece,
    RowWindow,
    Rule,
)
from fxpar.sharding.op_table import make, rows, words_of
from fxpar.sharding.ops.halos import add_halo_rows, axes_of, exchange_of, windows_of
from fxpar.sharding.ops.local_call import LocalCall
from fxpar.sharding.ops.moved_dims import moved
from fxpar.sharding.ops.slicing import cut
from fxpar.sharding.ops.views import moves

aten = torch.ops.aten

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


# Local forms


def _local_pad_backward(
    turns: bool, call: LocalCall, grad: fx.Node, x: fx.Node, pad: Sequence[int]
) -> fx.Node:
    """Of the backward of a pad: rows are added up in the window of rows that a rank's
    own were made of. ``turns``: they were turned round, not repeated."""
    windows = windows_of(call, 2)
    if not windows:
        return call.same(grad, x, pad)
    build, rest = call.build, list(pad)
    shape = list(call.local_shape())
    for window in windows:
        at = 2 * (len(shape) - 1 - window.dim)
        rest[at : at + 2] = 0, 0
        shape[window.dim] = call.operand_shape(0)[window.dim]
    if any(rest):
        grad = call.same(grad, call.full(shape, 0, x), rest)
    for window in windows:
        before = pad[2 * (len(shape) - 1 - window.dim)]
        places = _padded_from(call, window, before, turns)
        shape[window.dim] = build.window_rows(exchange_of(call, window))
        zeros = call.full(shape, 0, x)
        indices = [*[None] * window.dim, places]
        grad = build.call(aten.index_put.default, zeros, indices, grad, True)
    return add_halo_rows(call, grad, 2)


def _padded_from(
    call: LocalCall, window: RowWindow, before: int, turns: bool
) -> fx.Node:
    """Of which rows of its window each row of a rank was made, by a pad with so many
    rows before."""
    build, last = call.build, window.rows - 1
    axes, device = axes_of(call, 0, window.dim), call.node.meta["val"].device
    place = build.iota(build.own_size(window.count, axes), device)
    start = build.own_start(window.count, axes, -before)
    place = build.call(aten.add.Tensor, place, start)
    if turns:
        place = build.call(aten.abs.default, place)
        place = build.call(aten.rsub.Scalar, place, last)
        place = build.call(aten.abs.default, place)
        place = build.call(aten.rsub.Scalar, place, last)
    else:
        place = build.call(aten.clamp.default, place, 0, last)
    first = build.window_start(exchange_of(call, window))
    return build.call(aten.sub.Tensor, place, first)


ROWS = {
    **rows("constant_pad_nd", constant_pad, facts="copies moves pointwise"),
    **moves(
        "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
        "replication_pad2d replication_pad3d",
        cut_ends,
        empty="fill",
    ),
    **rows(
        "replication_pad1d_backward replication_pad2d_backward "
        "replication_pad3d_backward",
        partial(_backward, repeated),
        linear="0",
        local=partial(_local_pad_backward, False),
        empty="fill",
    ),
    **rows(
        "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward",
        partial(_backward, turned),
        linear="0",
        local=partial(_local_pad_backward, True),
        empty="fill",
    ),
}
