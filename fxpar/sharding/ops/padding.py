"""Splits pads with a constant, and gradients of pads with repeated rows.

Along a padded dim ranks exchange rows (``Rule.moves``). Pads that repeat or mirror rows
have become lookups; in the backward of those that repeat rows a rank sums the gradients
of its own rows in the window of rows that they were made of (``Rule.windows``). Every
partial value may pass a pad, except that a constant allows only reductions that leave
the constant unchanged.
In: calls of these ops. Out: their rules and local forms.
Never: fills in a constant on ranks that would then add it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from fxpar.sharding.ops.local_call import LocalCall, added_at
from fxpar.sharding.ops.reads import add_halo_rows, axes_of, exchange_of, windows_of
from fxpar.sharding.ops.slicing import cut, moved

aten = torch.ops.aten


def cut_ends(x: torch.Tensor, pad: Sequence[int]) -> Rule:
    """Return the rule with padded dims whole; ``pad``: from the last dim on, front and
    back."""
    dims = [x.ndim - 1 - i // 2 for i, n in enumerate(pad) if n]
    return cut(x, dims)


def constant_pad(x: torch.Tensor, pad: Sequence[int], value: Any = 0) -> Rule:
    """Return the rule. A zero stays under every reduction, another constant under those
    that keep equal values."""
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


def _backward(grad: torch.Tensor, x: torch.Tensor, pad: Sequence[int]) -> Rule:
    """Return the rule of the gradient of a pad that repeats the nearest row."""
    rule = cut_ends(x, pad)
    shapes = [*x.shape, *grad.shape]
    if min(pad) < 0 or not all(isinstance(n, int) for n in shapes):
        return Rule(rule.results + rule.operands, rule.operands, whole=rule.whole)
    words, windows = words_of(x), []
    for d in sorted({x.ndim - 1 - i // 2 for i, n in enumerate(pad) if n}):
        at, n, count = 2 * (x.ndim - 1 - d), x.shape[d], grad.shape[d]
        before, after = pad[at : at + 2]
        ends = range(before), range(count - after, count)
        head, tail = (
            tuple(min(max(i - before, 0), n - 1) for i in end) for end in ends
        )
        reach = Reach(1, first=-before, head=head, tail=tail)
        windows.append(RowWindow(2, d, n, count, reach))
    return replace(make([words, words], [words]), windows=tuple(windows))


# Local forms


def _local_pad_backward(
    call: LocalCall, grad: fx.Node, x: fx.Node, pad: Sequence[int]
) -> fx.Node:
    """Return the gradient of the operand: rows are summed in the window of rows that a
    rank's own were made of."""
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
        places = _padded_from(call, window, before)
        shape[window.dim] = build.window_rows(exchange_of(call, window))
        grad = added_at(call, grad, shape, window.dim, places)
    return add_halo_rows(call, grad, 2)


def _padded_from(call: LocalCall, window: RowWindow, before: int) -> fx.Node:
    """Return the row of its window of which each row of a rank was made, by a pad with
    ``before`` rows before."""
    build, last = call.build, window.rows - 1
    axes, device = axes_of(call, 0, window.dim), call.node.meta["val"].device
    place = build.iota(build.own_size(window.count, axes), device)
    start = build.own_start(window.count, axes, -before)
    place = build.call(aten.add.Tensor, place, start)
    place = build.call(aten.clamp.default, place, 0, last)
    first = build.window_start(exchange_of(call, window))
    return build.call(aten.sub.Tensor, place, first)


ROWS = {
    **rows("constant_pad_nd", constant_pad, facts="copies moves pointwise"),
    **rows(
        "replication_pad1d_backward replication_pad2d_backward "
        "replication_pad3d_backward",
        _backward,
        linear="0",
        local=_local_pad_backward,
        empty="fill",
    ),
}
