"""Splits ops that cut, join, shift or repeat rows of a dim by position.

The touched dim may be split like all others: it is one factor, of which tensors have
different numbers of rows, and ranks exchange the rows that change ranks
(``Rule.moves``, by ``sharding.ops.reads``). When few rows are cut out each rank
gives those it has and zero elsewhere, so the result is partial; when few rows are put
in they are whole, and each rank takes its own. Every partial value may pass, except
that a filled-in constant allows only reductions that leave the constant unchanged.
In: calls of these ops. Out: their rules and local forms.
Never: cuts rows out of a split dim whose size is open.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar._torch.symbols import Inexpressible
from fxpar.sharding.factors import Reach, RowMoves, RowPiece, RowWindow, Rule
from fxpar.sharding.op_table import all_at, at, keeping, make, rows, words_of
from fxpar.sharding.ops.local_call import (
    LocalCall,
    is_within,
    part_of,
    rows_at,
    trailing,
)
from fxpar.sharding.ops.pointwise import broadcast
from fxpar.sharding.ops.reads import add_halo_rows, window_shape, with_halo_rows
from fxpar.sharding.ops.views import Shape, moves

aten = torch.ops.aten


# Rows that change ranks (``Rule.moves``)


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


# Cuts


def cut(
    x: torch.Tensor,
    dims: Sequence[int] | frozenset[int],
    *,
    drop: bool = False,
    results: int = 1,
) -> Rule:
    """Return the rule of ``dims`` that are whole in ``x``, and have another size, or
    are gone, in the results."""
    dims = frozenset(at(d, x.ndim) for d in dims)
    words = words_of(x, dims)
    result_words = ["_" if i in dims else w for i, w in enumerate(words)]
    if drop:
        result_words = [w for i, w in enumerate(words) if i not in dims]
    return make([words], [result_words] * results)


# A cut of fewer rows than 1 / _FEW of the dim is summed over ranks. An all-reduce of
# the rows sends twice their bytes, and several cuts of one tensor would share its
# gather.
_FEW = 4


# A part that is joined to one this many times as large may have fewer rows than there
# are ranks, for which the large one would not be split. It is whole, which sends as
# little.
_FEWER = 16


def is_few(rows: int, of: int) -> bool:
    """Return whether ranks sum ``rows`` rows that are cut out of ``of``, rather than
    exchange them."""
    return _FEW * rows <= of


# This many rows spread all over a dim are on all ranks. (With fewer rows than ranks the
# dim would be gathered.)
_MANY = 64


def is_summed(rows: int, of: int, step: int) -> bool:
    """Return whether ranks sum the rows of a slice, rather than exchange them."""
    is_all_over = rows >= _MANY and not is_few(step * rows, of)
    return is_few(rows, of) and not is_all_over


def _cut_rows(x: torch.Tensor, dim: int, rows: int, *, drop: bool = False) -> Rule:
    """Return the rule of ``rows`` rows cut out of a dim."""
    # A sum over ranks has no meaning for booleans.
    if x.ndim == 0 or x.dtype == torch.bool or not is_few(rows, x.shape[dim]):
        return cut(x, [dim], drop=drop)
    dim, words = at(dim, x.ndim), words_of(x)
    result_words = ["_" if i == dim else word for i, word in enumerate(words)]
    if drop:
        del result_words[dim]
    return make([words], [result_words])


def _placed(grad: torch.Tensor, shape: Shape, dim: int, added: bool = False) -> Rule:
    """Return the rule of a cut's backward: ``grad`` is put somewhere in zeros of this
    shape.

    ``added``: the dim is new to the result.
    """
    dim = at(dim, len(shape))
    words = words_of(shape, {dim})
    landed = ["_" if i == dim else w for i, w in enumerate(words)]
    if added:
        del landed[dim]
    return make([landed], [words])


def _is_full(n: int, start: int | None, end: int | None, step: int) -> bool:
    start, end, _ = slice(start, end).indices(n)
    return step == 1 and start == 0 and end >= n


def slice_(
    x: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Rule:
    n = x.shape[dim]
    if _is_full(n, start, end, step):
        return broadcast(x)
    positions = range(n)[start:end:step]
    rows = len(positions)
    if is_summed(rows, n, step) and x.dtype != torch.bool:
        return _cut_rows(x, dim, rows)
    return _sliced(x, at(dim, x.ndim), [rows], [positions.start], step)


def _sliced(
    x: torch.Tensor, dim: int, rows: Shape, starts: Iterable[int], step: int = 1
) -> Rule:
    """Return the rule of rows of a dim as results: result i has ``rows[i]`` rows from
    ``starts[i]`` on, at distance ``step``."""
    pieces = [
        RowPiece(0, i, n, first, step)
        for i, (n, first) in enumerate(zip(rows, starts, strict=False))
    ]
    results = [resized(x, dim, n) for n in rows]
    return moved([x], results, {dim: pieces}) or cut(x, [dim], results=len(rows))


def slice_scatter(
    x: torch.Tensor,
    source: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Rule:
    if _is_full(x.shape[dim], start, end, step):
        return broadcast(x, source)
    dim, rows = at(dim, x.ndim), source.shape[dim]
    if not is_few(rows, x.shape[dim]) and step <= _FEW:
        pieces = around(x.shape[dim], range(x.shape[dim])[start:end:step])
        rule = moved([x, source], [tuple(x.shape)], {dim: pieces})
        if rule is not None:
            return rule
    put_rule = into(x, _placed(source, x.shape, dim))
    return _open(put_rule, x, dim) if step == 1 else put_rule


def into(x: torch.Tensor, put_rule: Rule) -> Rule:
    """Return the rule that puts the operand into ``x``, its first operand, where
    ``put_rule`` puts it into zeros."""
    return replace(put_rule, operands=put_rule.results + put_rule.operands)


def _open(rule: Rule, x: torch.Tensor, dim: int) -> Rule:
    """Return the rule with that dim of ``x`` no longer whole."""
    return replace(rule, whole=rule.whole.difference(rule.operands[0][at(dim, x.ndim)]))


def select(x: torch.Tensor, dim: int, index: int) -> Rule:
    return _cut_rows(x, dim, 1, drop=True)


def select_scatter(x: torch.Tensor, source: torch.Tensor, dim: int, index: int) -> Rule:
    return _open(into(x, _placed(source, x.shape, dim, added=True)), x, dim)


def split(x: torch.Tensor, size: int, dim: int = 0) -> Rule:
    n = x.shape[dim]
    starts = range(0, n, size) if size else range(0)
    return split_with_sizes(x, [min(size, n - i) for i in starts] or [n], dim)


def split_with_sizes(x: torch.Tensor, sizes: Shape, dim: int = 0) -> Rule:
    return _sliced(x, at(dim, x.ndim), sizes, itertools.accumulate(sizes, initial=0))


def unbind(x: torch.Tensor, dim: int = 0) -> Rule:
    """Return the rule; each row is a result as by ``select``."""
    dim, words = at(dim, x.ndim), words_of(x)
    if x.dtype == torch.bool:  # a sum over ranks has no meaning for them
        return cut(x, [dim], drop=True, results=x.shape[dim])
    return make([words], [words[:dim] + words[dim + 1 :]] * x.shape[dim])


def cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Rule:
    """Return the rule; torch ignores an operand of shape (0,), whatever the others'
    shape."""
    ndim = max(x.ndim for x in tensors)
    dim = at(dim, ndim)
    if len({(x.ndim, x.dtype) for x in tensors}) == 1:
        sizes = [x.shape[dim] for x in tensors]
        starts = itertools.accumulate(sizes, initial=0)
        pieces = [
            RowPiece(i, 0, n, at=first)
            for i, (n, first) in enumerate(zip(sizes, starts, strict=False))
        ]
        whole = resized(tensors[0], dim, sum(sizes))
        few = [i for i, n in enumerate(sizes) if 0 < _FEWER * n <= max(sizes)]
        rule = moved(tensors, [whole], {dim: pieces}, few=few)
        if rule is not None:
            return rule
    model = next(x for x in tensors if x.ndim == ndim)
    words = ["_" if i == dim else w for i, w in enumerate(words_of(model))]
    return make([words if x.ndim == ndim else ["_"] for x in tensors], [words])


def stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Rule:
    words = words_of(tensors[0])
    dim = at(dim, len(words) + 1)
    return make([words] * len(tensors), [[*words[:dim], "_", *words[dim:]]])


def unfold(x: torch.Tensor, dim: int, size: int, step: int) -> Rule:
    """Return the rule of windows of rows, of which a rank has the windows of its own
    rows."""
    count = (x.shape[dim] - size) // step + 1 if x.ndim else 1
    if not isinstance(count, int) or count <= 1:
        rule = cut(x, [dim] if x.ndim else [])
        return replace(rule, results=((*rule.results[0], ()),))
    words, dim = words_of(x), at(dim, x.ndim)
    window = RowWindow(0, dim, x.shape[dim], count, Reach(step, span=size))
    return replace(make([words], [[*words, "_"]]), windows=(window,))


def unfold_backward(
    grad: torch.Tensor, shape: Shape, dim: int, size: int, step: int
) -> Rule:
    """Return the rule of windows of rows that are added to their rows; along dims where
    ``grad`` has one row it is broadcast."""
    count = grad.shape[dim] if shape else 1
    is_whole = not all(isinstance(n, int) for n in (*shape, count)) or count <= 1
    dim = at(dim, len(shape))
    words = words_of(shape, {dim} if is_whole else ())
    rows = grad.shape[: len(shape)]
    own = [
        "_" if i == dim and is_whole or i != dim and n == 1 else words[i]
        for i, n in enumerate(rows)
    ]
    rule = make([[*own, "_"]], [words])
    if is_whole:
        return rule
    window = RowWindow(1, dim, shape[dim], count, Reach(step, span=size))
    return replace(rule, windows=(window,))


def mirror(x: torch.Tensor, dims: Sequence[int]) -> Rule:
    """Return the rule of rows in reverse order."""
    turned = sorted(all_at(dims, x.ndim)) if dims and x.ndim else []
    backwards = {d: [RowPiece(0, 0, n := x.shape[d], n - 1, -1)] for d in turned}
    return moved([x], [tuple(x.shape)], backwards) or flip(x, dims)


def flip(x: torch.Tensor, dims: Sequence[int]) -> Rule:
    return keeping(x, {at(d, x.ndim) for d in dims})


def repeat(x: torch.Tensor, repeats: Sequence[int]) -> Rule:
    """Return the rule. Dims repeated once are factors; ranks exchange rows of others.
    Copies of one row are a factor of the result alone; together with those, or with new
    dims, other repeated dims stay whole."""
    new = len(repeats) - x.ndim
    repeated = {i: n for i in range(x.ndim) if (n := repeats[new + i]) != 1}
    pieces = {
        i: [RowPiece(0, 0, x.shape[i])]
        for i, n in repeated.items()
        if new == 0 and n and x.shape[i] > 1
    }
    if pieces and len(pieces) == len(repeated):
        shape = [n * size for n, size in zip(repeats, x.shape, strict=True)]
        rule = moved([x], [shape], pieces, turns=repeated)
        if rule is not None:
            return rule
    rows, words = [1] * new + list(x.shape), words_of(x, repeated)
    copies = [
        f"r{i}" if n == 1 < m else "_"
        for i, (n, m) in enumerate(zip(rows, repeats, strict=True))
    ]
    result = [
        w if m == 1 else c
        for w, c, m in zip(["_"] * new + words, copies, repeats, strict=True)
    ]
    return make([words], [result])


# Local forms


def _is_split(call: LocalCall, dim: int) -> bool:
    return bool(call.operands[0].dims and call.operands[0].dims[dim])


def _positions(call: LocalCall, dim: int, *cut: Any) -> range:
    """Return the rows of a dim of the first operand that a slice names."""
    rows = call.shapes[0][dim]
    if not all(n is None or isinstance(n, int) for n in (rows, *cut)):
        raise Inexpressible("rows are cut out of a dim whose size is dynamic")
    return range(rows)[slice(*cut)]


def _own_rows(call: LocalCall, x: fx.Node, dim: int, positions: range) -> fx.Node:
    """Return the rows at these positions where this rank has them, else zero."""
    build, device = call.build, x.meta["val"].device
    index = build.iota(len(positions), device, positions.step)
    index = build.call(aten.add.Tensor, index, positions.start)
    part = part_of(call, dim, index)
    assert part is not None
    rows = rows_at(call, part.rows_of(x), dim, part.read())
    ndim = x.meta["val"].dim()
    return call.where(trailing(call, part.inside, ndim - 1 - dim), rows, 0)


def _local_slice(
    call: LocalCall,
    x: fx.Node,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> fx.Node:
    dim %= max(len(call.shapes[0]), 1)
    if not _is_split(call, dim) or call.results[0].dims[dim]:  # not at all, or no cut
        return call.same(x, dim, start, end, step)
    return _own_rows(call, x, dim, _positions(call, dim, start, end, step))


def _local_select(call: LocalCall, x: fx.Node, dim: int, index: int) -> fx.Node:
    dim %= len(call.shapes[0])
    if not _is_split(call, dim):
        return call.same(x, dim, index)
    row = _own_rows(call, x, dim, _positions(call, dim, index, index + 1 or None))
    return call.build.call(aten.squeeze.dim, row, dim)


def _local_unbind(call: LocalCall, x: fx.Node, *dims: int) -> fx.Node:
    dim = sum(dims) % len(call.shapes[0])
    if not _is_split(call, dim):
        return call.same(x, *dims)
    rows = _own_rows(call, x, dim, _positions(call, dim, None))
    return call.same(rows, dim)


def _put(
    call: LocalCall, x: fx.Node, source: fx.Node, dim: int, positions: range
) -> fx.Node:
    """Return ``x`` with the rows of ``source`` that fall into this rank's rows."""
    build, device = call.build, x.meta["val"].device
    shape, axes = call.shapes[0], call.operands[0].dims[dim]
    index = build.iota(build.own_size(shape[dim], axes), device)
    first = build.own_start(shape[dim], axes, -positions.start)
    place = build.call(aten.add.Tensor, index, first)
    inside = is_within(call, place, len(positions))
    place = call.where(inside, place, 0)
    source_rows = rows_at(call, source, dim, place)
    inside = trailing(call, inside, len(shape) - 1 - dim)
    return build.call(aten.where.self, inside, source_rows, x)


def _local_slice_scatter(
    call: LocalCall,
    x: fx.Node,
    source: fx.Node,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> fx.Node:
    dim %= max(len(call.shapes[0]), 1)
    if not _is_split(call, dim) or call.operands[1].dims[dim]:
        return call.same(x, source, dim, start, end, step)
    positions = _positions(call, dim, start, end, step)
    return _put(call, x, source, dim, positions) if positions else x


def _local_select_scatter(
    call: LocalCall, x: fx.Node, source: fx.Node, dim: int, index: int
) -> fx.Node:
    dim %= len(call.shapes[0])
    if not _is_split(call, dim):
        return call.same(x, source, dim, index)
    row = call.build.call(aten.unsqueeze.default, source, dim)
    positions = _positions(call, dim, index, index + 1 or None)
    return _put(call, x, row, dim, positions)


def _local_unfold(call: LocalCall, x: fx.Node, *settings: int) -> fx.Node:
    return call.same(with_halo_rows(call, x, 0), *settings)


def _local_unfold_backward(
    call: LocalCall, grad: fx.Node, shape: Any, dim: int, size: int, step: int
) -> fx.Node:
    own = window_shape(call, call.local_shape(), 1)
    return add_halo_rows(call, call.same(grad, own, dim, size, step), 1)


def _local_repeat(call: LocalCall, x: fx.Node, repeats: Sequence[int]) -> fx.Node:
    """Return the repeated shard; of one row as many copies as this rank has."""
    new = len(repeats) - len(call.shapes[0])
    rows, own = (1,) * new + call.shapes[0], call.local_shape()
    triples = zip(rows, own, repeats, strict=True)
    return call.same(x, [k if n == 1 else m for n, k, m in triples])


ROWS = {
    **moves(
        "slice.Tensor slice_copy.Tensor",
        slice_,
        local=_local_slice,
        facts="sinks by_row",
    ),
    **rows(
        "slice_scatter",
        slice_scatter,
        movement="0+1",
        local=_local_slice_scatter,
        facts="moves by_row",
    ),
    **moves("select.int select_copy.int", select, local=_local_select, facts="by_row"),
    **rows(
        "select_scatter",
        select_scatter,
        movement="0+1",
        local=_local_select_scatter,
        facts="moves",
    ),
    **moves("split.Tensor split_copy.Tensor", split, facts="splits by_row"),
    **moves(
        "split_with_sizes",
        split_with_sizes,
        facts="splits by_row",
    ),
    **moves("unbind.int", unbind, local=_local_unbind),
    **moves("cat", cat, facts="copies pointwise by_row"),
    **moves("stack _stack", stack),
    **moves("unfold", unfold, local=_local_unfold),
    **rows(
        "unfold_backward",
        unfold_backward,
        linear="0",
        shape=1,
        local=_local_unfold_backward,
    ),
    **moves("flip prims::rev", mirror),
    **moves("repeat", repeat, local=_local_repeat, facts="copies"),
    **moves("prims::cat", cat),
}
