"""Rows of ops that cut, join, shift or pad dims by position.

The touched dim may be split, as all others: it is one factor, of which tensors have
unlike numbers of rows, and ranks exchange those that change ranks (``Rule.moves``). Of
few rows that are cut out each rank gives those it has and zero elsewhere, so the result
is partial; few rows that are put in are whole, and each rank takes its own (the local
forms are in ``fxpar/passes/local``: ``local_moves``, ``local_slices``). Every partial
value may pass, but where a constant is filled in only with a reduction that leaves the
constant as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fxpar.sharding.factors import Reach, RowPiece, RowWindow, Rule
from fxpar.sharding.rules.moved_dims import around, moved, resized
from fxpar.sharding.rules.pointwise import broadcast
from fxpar.sharding.rules.table import all_at, at, make, rows, words_of
from fxpar.sharding.rules.views import Shape, moves, transpose


def cut(
    x: torch.Tensor,
    dims: Sequence[int] | frozenset[int],
    *,
    drop: bool = False,
    results: int = 1,
) -> Rule:
    """``dims`` whole in ``x``, and in the results of another size, or gone."""
    dims = frozenset(at(d, x.ndim) for d in dims)
    words = words_of(x, dims)
    result_words = ["_" if i in dims else w for i, w in enumerate(words)]
    if drop:
        result_words = [w for i, w in enumerate(words) if i not in dims]
    return make([words], [result_words] * results)


# An all-reduce of the rows that are cut out sends twice their bytes, and more cuts of
# one tensor would share its gather.
_FEW = 4


# A part that is joined to one so many times as large may have fewer rows than there are
# ranks, for which nobody would split the large one. It is whole, which sends as little.
_FEWER = 16


def is_few(rows: int, of: int) -> bool:
    """Whether ranks sum rows that are cut out of so many, rather than exchange them."""
    return _FEW * rows <= of


# So many rows that lie apart all over a dim lie on all ranks. (With fewer rows than
# ranks the dim would be gathered.)
_MANY = 64


def is_summed(rows: int, of: int, step: int) -> bool:
    """Whether ranks sum the rows of a slice, rather than exchange them."""
    is_all_over = rows >= _MANY and not is_few(step * rows, of)
    return is_few(rows, of) and not is_all_over


def _cut_rows(x: torch.Tensor, dim: int, rows: int, *, drop: bool = False) -> Rule:
    """So many rows of a dim."""
    # A sum over ranks has no meaning for booleans.
    if x.ndim == 0 or x.dtype == torch.bool or not is_few(rows, x.shape[dim]):
        return cut(x, [dim], drop=drop)
    dim, words = at(dim, x.ndim), words_of(x)
    result_words = ["_" if i == dim else word for i, word in enumerate(words)]
    if drop:
        del result_words[dim]
    return make([words], [result_words])


def _spread(grad: torch.Tensor, shape: Shape, dim: int, added: bool = False) -> Rule:
    """Backward of a cut: ``grad`` lands somewhere in zeros of this shape.

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
    """Rows of a dim from some places on, ``step`` apart, as results."""
    pieces = [
        RowPiece(0, i, n, first, step)
        for i, (n, first) in enumerate(zip(rows, starts, strict=False))
    ]
    results = [resized(x, dim, n) for n in rows]
    return moved([x], results, {dim: pieces}) or cut(x, [dim], results=len(rows))


def slice_backward(
    grad: torch.Tensor, shape: Shape, dim: int, start: int, end: int, step: int
) -> Rule:
    if _is_full(shape[dim], start, end, step):
        return broadcast(grad)
    rows, first = grad.shape[dim], range(shape[dim])[start:end:step].start
    if is_few(rows, shape[dim]):
        return _spread(grad, shape, dim)
    pieces = {at(dim, grad.ndim): [RowPiece(0, 0, rows, at=first, stride=step)]}
    return moved([grad], [shape], pieces) or _spread(grad, shape, dim)


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
    spread = _into(x, _spread(source, x.shape, dim))
    return _open(spread, x, dim) if step == 1 else spread


def _into(x: torch.Tensor, spread: Rule) -> Rule:
    """What ``spread`` puts into zeros is put into ``x``, its first operand, instead."""
    return replace(spread, operands=spread.results + spread.operands)


def _open(rule: Rule, x: torch.Tensor, dim: int) -> Rule:
    """The rule with that dim of ``x`` no longer whole."""
    return replace(rule, whole=rule.whole.difference(rule.operands[0][at(dim, x.ndim)]))


def select(x: torch.Tensor, dim: int, index: int) -> Rule:
    return _cut_rows(x, dim, 1, drop=True)


def select_backward(grad: torch.Tensor, shape: Shape, dim: int, index: int) -> Rule:
    return _spread(grad, shape, dim, added=True)


def select_scatter(x: torch.Tensor, source: torch.Tensor, dim: int, index: int) -> Rule:
    return _open(_into(x, _spread(source, x.shape, dim, added=True)), x, dim)


def narrow(x: torch.Tensor, dim: int, start: int, length: int) -> Rule:
    first = start + x.shape[dim] * (start < 0)
    return _sliced(x, at(dim, x.ndim), [length], [first])


def split(x: torch.Tensor, size: int, dim: int = 0) -> Rule:
    n = x.shape[dim]
    starts = range(0, n, size) if size else range(0)
    return split_with_sizes(x, [min(size, n - i) for i in starts] or [n], dim)


def split_with_sizes(x: torch.Tensor, sizes: Shape, dim: int = 0) -> Rule:
    return _sliced(x, at(dim, x.ndim), sizes, itertools.accumulate(sizes, initial=0))


def unbind(x: torch.Tensor, dim: int = 0) -> Rule:
    """Each row as ``select`` gives it."""
    dim, words = at(dim, x.ndim), words_of(x)
    if x.dtype == torch.bool:  # a sum over ranks has no meaning for them
        return cut(x, [dim], drop=True, results=x.shape[dim])
    return make([words], [words[:dim] + words[dim + 1 :]] * x.shape[dim])


def cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Rule:
    """An operand of shape (0,) is left out by torch, whatever the others' shape."""
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


def diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Rule:
    """Each rank has the elements that lie in its own rows and columns, and zero
    elsewhere."""
    count = diagonal_rows(x.shape, offset, dim1, dim2)
    words, line = _diagonal_words(x.shape, count, dim1, dim2)
    if x.dtype == torch.bool:  # a sum over ranks has no meaning for them
        words = [w + "!" * (w not in ("_", *line)) for w in words]
    return make([words], [line])


def diagonal_rows(shape: Shape, offset: int, dim1: int, dim2: int) -> int:
    """How many elements a diagonal of a matrix has."""
    rows, columns = shape[dim1], shape[dim2]
    return max(0, min(rows + min(offset, 0), columns - max(offset, 0)))


def _diagonal_words(
    shape: Shape, count: int, dim1: int, dim2: int
) -> tuple[list[str], list[str]]:
    """(words of matrices, words of a diagonal of so many elements), which lies along a
    dim that it goes through from end to end."""
    words = words_of(shape)
    first, second = at(dim1, len(shape)), at(dim2, len(shape))
    others = [w for d, w in enumerate(words) if d not in (first, second)]
    along = next((words[d] for d in (first, second) if shape[d] == count), "_")
    return words, [*others, along]


def diagonal_backward(
    grad: torch.Tensor, shape: Shape, offset: int, dim1: int, dim2: int
) -> Rule:
    words, line = _diagonal_words(shape, grad.shape[-1], dim1, dim2)
    return make([line], [words])


def diagonal_scatter(
    x: torch.Tensor,
    source: torch.Tensor,
    offset: int = 0,
    dim1: int = 0,
    dim2: int = 1,
) -> Rule:
    return _into(x, diagonal_backward(source, x.shape, offset, dim1, dim2))


def diag_embed(
    x: torch.Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1
) -> Rule:
    shape, rows = list(x.shape[:-1]), x.shape[-1] + abs(offset)
    for dim in sorted((at(dim1, x.ndim + 1), at(dim2, x.ndim + 1))):
        shape.insert(dim, rows)
    words, line = _diagonal_words(shape, x.shape[-1], dim1, dim2)
    return make([line], [words])


def triangle(x: torch.Tensor, diagonal: int = 0) -> Rule:
    """Which elements stay depends on their position in the matrix."""
    words = words_of(x, {x.ndim - 2, x.ndim - 1})
    return make([words], [words])


def unfold(x: torch.Tensor, dim: int, size: int, step: int) -> Rule:
    """Windows of rows, of which a rank reads those of its own."""
    count = (x.shape[dim] - size) // step + 1 if x.ndim else 1
    if not isinstance(count, int) or count <= 1:
        rule = cut(x, [dim] if x.ndim else [])
        return replace(rule, results=((*rule.results[0], ()),))
    words, dim = words_of(x), at(dim, x.ndim)
    window = RowWindow(0, dim, 1, x.shape[dim], count, Reach(step, span=size))
    return replace(make([words], [[*words, "_"]]), windows=(window,))


def unfold_backward(
    grad: torch.Tensor, shape: Shape, dim: int, size: int, step: int
) -> Rule:
    """Windows of rows added where they lie; along dims that ``grad`` has one row of, it
    is broadcast."""
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
    window = RowWindow(1, dim, 0, shape[dim], count, Reach(step, span=size))
    return replace(rule, windows=(window,))


def mirror(x: torch.Tensor, dims: Sequence[int]) -> Rule:
    """Rows in the other order."""
    turned = sorted(all_at(dims, x.ndim)) if dims and x.ndim else []
    backwards = {d: [RowPiece(0, 0, n := x.shape[d], n - 1, -1)] for d in turned}
    return moved([x], [tuple(x.shape)], backwards) or flip(x, dims)


def flip(x: torch.Tensor, dims: Sequence[int]) -> Rule:
    words = words_of(x, {at(d, x.ndim) for d in dims})
    return make([words], [words])


def roll(x: torch.Tensor, shifts: Any, dims: Sequence[int] = ()) -> Rule:
    """Without dims those of the flat tensor are rolled."""
    whole = flip(x, sorted(all_at(dims, x.ndim)))
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or len(set(all_at(dims, x.ndim))) < len(dims):
        return whole
    shifts = [shifts] if isinstance(shifts, int) else shifts
    pieces = {}
    for dim, by in zip(dims, shifts, strict=True):
        n = x.shape[dim]
        back = by % n if n else 0
        ends = [RowPiece(0, 0, back, n - back), RowPiece(0, 0, n - back, at=back)]
        pieces[at(dim, x.ndim)] = [piece for piece in ends if piece.count]
    return moved([x], [tuple(x.shape)], pieces) or whole


def rot90(x: torch.Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Rule:
    """A half turn is a flip; an odd number of quarters swaps the two dims as well."""
    turned = flip(x, dims)
    if k % 2 == 0:
        return turned
    swapped = transpose(x, *dims)
    return replace(swapped, whole=turned.whole)


def repeat(x: torch.Tensor, repeats: Sequence[int]) -> Rule:
    """Dims repeated once are factors; of others ranks exchange rows. Copies of one row
    are a factor of the result alone; beside those, and dims that are new, others that
    are repeated stay whole."""
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


ROWS = {
    **moves("slice.Tensor slice_copy.Tensor", slice_),
    **moves("slice_backward", slice_backward, shape=1),
    **rows("slice_scatter", slice_scatter, movement="0+1"),
    **moves("select.int select_copy.int", select),
    **moves("select_backward", select_backward, shape=1),
    **rows("select_scatter", select_scatter, movement="0+1"),
    **moves("narrow_copy", narrow),
    **moves("split.Tensor split_copy.Tensor unsafe_split.Tensor", split),
    **moves("split_with_sizes split_with_sizes_copy", split_with_sizes),
    **moves("unsafe_split_with_sizes", split_with_sizes),
    **moves("unbind.int unbind_copy.int", unbind),
    **moves("cat", cat),
    **moves("stack _stack", stack),
    **moves("diagonal diagonal_copy", diagonal),
    **moves("diagonal_backward", diagonal_backward, shape=1),
    **rows("diagonal_scatter", diagonal_scatter, movement="0+1"),
    **moves("diag_embed", diag_embed),
    **moves("tril triu", triangle),
    **moves("unfold unfold_copy", unfold),
    **rows("unfold_backward", unfold_backward, linear="0", shape=1),
    **moves("flip", mirror),
    **moves("roll", roll),
    **moves("rot90", rot90),
    **moves("repeat", repeat),
    **moves("rev", mirror, namespace="prims"),
    **moves("cat", cat, namespace="prims"),
}
