"""Splits ops that cut, join, pad, shift or repeat rows of a dim by position, and those
that read or write diagonals.

The touched dim may be split like all others: it is one factor, of which tensors have
different numbers of rows, and ranks exchange the rows that change ranks
(``Rule.moves``, by ``sharding.ops.reads``). When few rows are cut out each rank
gives those it has and zero elsewhere, so the result is partial; when few rows are put
in they are whole, and each rank takes its own. Every partial value may pass, except
that a filled-in constant allows only reductions that leave the constant unchanged.

Pads that repeat or mirror rows have become lookups; in the backward of those that
repeat rows a rank sums the gradients of its own rows in the window of rows that they
were made of (``Rule.windows``). Where a diagonal is read a rank gives the elements in
its own rows and columns and zero elsewhere; where one is written it writes those.
In: calls of these ops. Out: their rules and local forms.
Never: cuts rows out of a split dim whose size is open; fills in a constant on ranks
that would then add it up.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar._torch.symbols import Inexpressible
from fxpar.sharding.factors import (
    MONOTONE,
    MOVEMENT,
    Passage,
    Reach,
    RowMoves,
    RowPiece,
    RowWindow,
    Rule,
)
from fxpar.sharding.op_table import all_at, at, keeping, make, rows, words_of
from fxpar.sharding.ops.local_call import (
    LocalCall,
    added_at,
    is_within,
    part_of,
    rows_at,
    trailing,
)
from fxpar.sharding.ops.pointwise import broadcast
from fxpar.sharding.ops.reads import (
    add_halo_rows,
    exchange_of,
    rows_read,
    window_shape,
    windows_of,
    with_halo_rows,
)
from fxpar.sharding.ops.views import Shape, moves
from fxpar.sharding.row_moves import around

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
    """Return the rule of ``rows`` rows cut out of a dim, which ranks sum if they are
    few. A sum over ranks has no meaning for booleans."""
    rule = cut(x, [dim], drop=drop)
    sums = x.ndim > 0 and x.dtype != torch.bool and is_few(rows, x.shape[dim])
    return replace(rule, whole=frozenset()) if sums else rule


def _put_rule(
    x: torch.Tensor, dim: int, *, drop: bool = False, whole: bool = False
) -> Rule:
    """Return the rule of rows put somewhere along a dim of ``x``. ``drop``: they lack
    the dim; ``whole``: it is whole in ``x``."""
    words = words_of(x, {dim} if whole else ())
    put = ["_" if i == dim else w for i, w in enumerate(words)]
    if drop:
        del put[dim]
    return make([words, put], [words])


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
    return _put_rule(x, dim, whole=step != 1)


def select(x: torch.Tensor, dim: int, index: int) -> Rule:
    return _cut_rows(x, dim, 1, drop=True)


def select_scatter(x: torch.Tensor, source: torch.Tensor, dim: int, index: int) -> Rule:
    return _put_rule(x, at(dim, x.ndim), drop=True)


def split(x: torch.Tensor, size: int, dim: int = 0) -> Rule:
    n = x.shape[dim]
    starts = range(0, n, size) if size else range(0)
    return split_with_sizes(x, [min(size, n - i) for i in starts] or [n], dim)


def split_with_sizes(x: torch.Tensor, sizes: Shape, dim: int = 0) -> Rule:
    return _sliced(x, at(dim, x.ndim), sizes, itertools.accumulate(sizes, initial=0))


def unbind(x: torch.Tensor, dim: int = 0) -> Rule:
    """Return the rule; each row is a result as by ``select``."""
    rule = cut(x, [dim], drop=True, results=x.shape[dim])
    # A sum over ranks has no meaning for booleans.
    return rule if x.dtype == torch.bool else replace(rule, whole=frozenset())


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
    rule = moved([x], [tuple(x.shape)], backwards)
    return rule or keeping(x, {at(d, x.ndim) for d in dims})


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


# Pads


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


def _pad_backward(grad: torch.Tensor, x: torch.Tensor, pad: Sequence[int]) -> Rule:
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


# Diagonals of matrices: a rank has the elements that are in its own rows and columns


def diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Rule:
    """Return the rule: each rank has the elements in its own rows and columns, and zero
    elsewhere."""
    rows, columns = x.shape[dim1], x.shape[dim2]
    count = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    words, line = _diagonal_words(x.shape, count, dim1, dim2)
    if x.dtype == torch.bool:  # a sum over ranks has no meaning for them
        words = [w + "!" * (w not in ("_", *line)) for w in words]
    return make([words], [line])


def _diagonal_words(
    shape: Shape, count: int, dim1: int, dim2: int
) -> tuple[list[str], list[str]]:
    """Return (words of matrices, words of a diagonal of ``count`` elements); the
    diagonal shares the word of a dim that it covers from end to end."""
    words = words_of(shape)
    first, second = at(dim1, len(shape)), at(dim2, len(shape))
    others = [w for d, w in enumerate(words) if d not in (first, second)]
    along = next((words[d] for d in (first, second) if shape[d] == count), "_")
    return words, [*others, along]


def diagonal_scatter(
    x: torch.Tensor, source: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Rule:
    words, line = _diagonal_words(x.shape, source.shape[-1], dim1, dim2)
    return make([words, line], [words])


# Local forms


def _is_split(call: LocalCall, dim: int) -> bool:
    return bool(call.operands[0].dims and call.operands[0].dims[dim])


def _positions(call: LocalCall, dim: int, *cut: Any) -> range:
    """Return the rows of a dim of the first operand that a slice names. Raises
    Inexpressible if they are not known before the program runs."""
    rows = call.shapes[0][dim]
    if not all(n is None or isinstance(n, int) for n in (rows, *cut)):
        raise Inexpressible("which rows are cut out of a split dim is dynamic")
    return range(rows)[slice(*cut)]


def _own_rows(call: LocalCall, x: fx.Node, dim: int, positions: range) -> fx.Node:
    """Return the rows at these positions where this rank has them, else zero."""
    build, device = call.build, x.meta["val"].device
    index = build.iota(len(positions), device, positions.step, positions.start)
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
    row = _own_rows(call, x, dim, _positions(call, dim, index, None)[:1])
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
    first = build.own_start(shape[dim], axes, -positions.start)
    place = build.iota(build.own_size(shape[dim], axes), device, start=first)
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
    positions = _positions(call, dim, index, None)[:1]
    return _put(call, x, row, dim, positions)


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


def _local_pad_backward(
    call: LocalCall, grad: fx.Node, x: fx.Node, pad: Sequence[int]
) -> fx.Node:
    """Return the gradient of the operand: rows are summed in the window of rows that a
    rank's own were made of."""
    windows = windows_of(call, 2)
    if not windows:
        return call.same(grad, x, pad)
    rest, shape = list(pad), list(call.local_shape())
    for window in windows:
        at = 2 * (len(shape) - 1 - window.dim)
        rest[at : at + 2] = 0, 0
        shape[window.dim] = call.operand_shape(0)[window.dim]
    if any(rest):
        grad = call.same(grad, call.full(shape, 0, x), rest)
    for window in windows:
        *_, places = rows_read(call, window, shape[window.dim])
        places = call.build.call(aten.reshape.default, places, [-1])
        shape[window.dim] = call.build.window_rows(exchange_of(call, window))
        grad = added_at(call, grad, shape, window.dim, places)
    return add_halo_rows(call, grad, 2)


def _starts(offset: int) -> tuple[int, int]:
    """Return (row, column) of the first element."""
    return max(-offset, 0), max(offset, 0)


def _local_diagonal(
    call: LocalCall, x: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> fx.Node:
    build, shape = call.build, call.shapes[0]
    dims = [dim % len(shape) for dim in (dim1, dim2)]
    if not any(call.operands[0].dims[d] for d in dims):
        return call.same(x, offset, dim1, dim2)
    count, axes = call.result_shape()[-1], call.results[0].dims[-1]
    own, device = build.own_size(count, axes), x.meta["val"].device
    places, parts = [], []
    for d, start in zip(dims, _starts(offset), strict=True):
        first = build.own_start(count, axes, start)
        place = build.iota(own, device, start=first)
        part = part_of(call, d, place)
        places.append(place if part is None else part.read())
        if part is not None:
            x = part.rows_of(x)
            parts.append(part)
    others = [d for d in range(len(shape)) if d not in dims]
    x = build.call(aten.permute.default, x, [*others, *dims])
    elements = build.call(aten.index.Tensor, x, [*[None] * len(others), *places])
    for part in parts:
        elements = call.where(part.inside, elements, 0)
    return elements


def _local_diagonal_scatter(
    call: LocalCall,
    x: fx.Node,
    source: fx.Node,
    offset: int = 0,
    dim1: int = 0,
    dim2: int = 1,
) -> fx.Node:
    """Return ``x`` with the elements of ``source`` that fall into this rank's rows and
    columns."""
    build, spec, shape = call.build, call.results[0], call.result_shape()
    dims, ndim = [dim % len(shape) for dim in (dim1, dim2)], len(shape)
    count, device = call.shapes[1][-1], source.meta["val"].device
    if not any(spec.dims[d] for d in dims) or not count:
        return call.same(x, source, offset, dim1, dim2)
    numbers = []  # of rows, and of columns, along the diagonal
    for d, start in zip(dims, _starts(offset), strict=True):
        own = build.own_size(shape[d], spec.dims[d])
        first = build.own_start(shape[d], spec.dims[d], -start)
        numbers.append(build.iota(own, device, start=first))
    columns = [
        trailing(call, n, ndim - 1 - d) for n, d in zip(numbers, dims, strict=True)
    ]
    hit = build.call(aten.eq.Tensor, *columns)
    part = part_of(call, ndim - 2, numbers[0], operand=1)
    place = build.call(aten.clamp.default, numbers[0], 0, count - 1)
    if part is not None:
        source, place = part.rows_of(source), part.read()
    source = rows_at(call, source, ndim - 2, place)
    source = build.call(aten.unsqueeze.default, source, -1)
    order = [*(d for d in range(ndim) if d not in dims), *dims]
    places = [order.index(d) for d in range(ndim)]
    source = build.call(aten.permute.default, source, places)
    return build.call(aten.where.self, hit, source, x)


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
    **moves("cat prims::cat", cat, facts="copies pointwise by_row"),
    **moves("stack _stack", stack),
    **moves(
        "unfold",
        unfold,
        local=lambda call, x, *how: call.same(with_halo_rows(call, x, 0), *how),
    ),
    **rows(
        "unfold_backward",
        unfold_backward,
        linear="0",
        shape=1,
        local=_local_unfold_backward,
    ),
    **moves("flip prims::rev", mirror),
    **moves("repeat", repeat, local=_local_repeat, facts="copies"),
    **rows("constant_pad_nd", constant_pad, facts="copies moves pointwise"),
    **rows(
        "replication_pad1d_backward replication_pad2d_backward "
        "replication_pad3d_backward",
        _pad_backward,
        linear="0",
        local=_local_pad_backward,
        empty="fill",
    ),
    **moves("diagonal", diagonal, local=_local_diagonal),
    **rows(
        "diagonal_scatter",
        diagonal_scatter,
        movement="0+1",
        local=_local_diagonal_scatter,
        facts="moves",
    ),
}
