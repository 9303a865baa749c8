"""Rows of ops that cut, join, shift or pad dims by position.

The touched dim stays whole; all others are factors. Where few rows are cut out it may
be split too: each rank gives those it has and zero elsewhere, so the result is partial.
What rows are put into may be split along their dim, of which each rank takes its own
(the local forms are in ``fxpar/passes/local/local_slices.py``). Every partial value may
pass, but where a constant is filled in only with a reduction that leaves the constant
as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fxpar.sharding.factors import MONOTONE, MOVEMENT, Passage, Rule
from fxpar.sharding.rules.pointwise import broadcast
from fxpar.sharding.rules.table import all_at, at, make, rows, words_of
from fxpar.sharding.rules.views import Shape, moves, transpose


def _cut(
    x: torch.Tensor,
    dims: Sequence[int] | frozenset[int],
    *,
    gone: bool = False,
    results: int = 1,
) -> Rule:
    """``dims`` whole in ``x``, and in the results of another size, or gone."""
    dims = frozenset(at(d, x.ndim) for d in dims)
    words = words_of(x, dims)
    kept = ["_" if i in dims else w for i, w in enumerate(words)]
    if gone:
        kept = [w for i, w in enumerate(words) if i not in dims]
    return make([words], [kept] * results)


# An all-reduce of the rows that are cut out sends twice their bytes, and more cuts of
# one tensor would share its gather.
_FEW = 4


def _cut_rows(x: torch.Tensor, dim: int, rows: int, *, gone: bool = False) -> Rule:
    """So many rows of a dim."""
    # A sum over ranks has no meaning for booleans.
    if x.ndim == 0 or x.dtype == torch.bool or _FEW * rows > x.shape[dim]:
        return _cut(x, [dim], gone=gone)
    dim, words = at(dim, x.ndim), words_of(x)
    kept = ["_" if i == dim else word for i, word in enumerate(words)]
    if gone:
        del kept[dim]
    return make([words], [kept])


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
    return _cut_rows(x, dim, len(range(n)[start:end:step]))


def slice_backward(
    grad: torch.Tensor, shape: Shape, dim: int, start: int, end: int, step: int
) -> Rule:
    full = _is_full(shape[dim], start, end, step)
    return broadcast(grad) if full else _spread(grad, shape, dim)


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
    spread = _into(x, _spread(source, x.shape, dim))
    return _open(spread, x, dim) if step == 1 else spread


def _into(x: torch.Tensor, spread: Rule) -> Rule:
    """What ``spread`` puts into zeros is put into ``x``, its first operand, instead."""
    return replace(spread, operands=spread.results + spread.operands)


def _open(rule: Rule, x: torch.Tensor, dim: int) -> Rule:
    """The rule with that dim of ``x`` no longer whole."""
    return replace(rule, whole=rule.whole.difference(rule.operands[0][at(dim, x.ndim)]))


def select(x: torch.Tensor, dim: int, index: int) -> Rule:
    return _cut_rows(x, dim, 1, gone=True)


def select_backward(grad: torch.Tensor, shape: Shape, dim: int, index: int) -> Rule:
    return _spread(grad, shape, dim, added=True)


def select_scatter(x: torch.Tensor, source: torch.Tensor, dim: int, index: int) -> Rule:
    return _open(_into(x, _spread(source, x.shape, dim, added=True)), x, dim)


def narrow(x: torch.Tensor, dim: int, *_: Any) -> Rule:
    return _cut(x, [dim])


def split(x: torch.Tensor, size: int, dim: int = 0) -> Rule:
    n = x.shape[dim]
    return _cut(x, [dim], results=max(1, -(-n // size)) if size else 1)


def split_with_sizes(x: torch.Tensor, sizes: Shape, dim: int = 0) -> Rule:
    return _cut(x, [dim], results=len(sizes))


def unbind(x: torch.Tensor, dim: int = 0) -> Rule:
    return _cut(x, [dim], gone=True, results=x.shape[dim])


def cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Rule:
    """An operand of shape (0,) is left out by torch, whatever the others' shape."""
    ndim = max(x.ndim for x in tensors)
    dim = at(dim, ndim)
    model = next(x for x in tensors if x.ndim == ndim)
    words = ["_" if i == dim else w for i, w in enumerate(words_of(model))]
    return make([words if x.ndim == ndim else ["_"] for x in tensors], [words])


def stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Rule:
    words = words_of(tensors[0])
    dim = at(dim, len(words) + 1)
    return make([words] * len(tensors), [[*words[:dim], "_", *words[dim:]]])


def diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Rule:
    rule = _cut(x, [dim1, dim2], gone=True)
    return replace(rule, results=((*rule.results[0], ()),))


def diagonal_backward(
    grad: torch.Tensor, shape: Shape, offset: int, dim1: int, dim2: int
) -> Rule:
    dims = {at(dim1, len(shape)), at(dim2, len(shape))}
    words = words_of(shape, dims)
    landed = [w for i, w in enumerate(words) if i not in dims]
    return make([[*landed, "_"]], [words])


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
    new = sorted((at(dim1, x.ndim + 1), at(dim2, x.ndim + 1)))
    words = words_of(x, {x.ndim - 1})
    result = words[:-1]
    for dim in new:
        result.insert(dim, "_")
    return make([words], [result])


def triangle(x: torch.Tensor, diagonal: int = 0) -> Rule:
    """Which elements stay depends on their position in the matrix."""
    words = words_of(x, {x.ndim - 2, x.ndim - 1})
    return make([words], [words])


def unfold(x: torch.Tensor, dim: int, size: int, step: int) -> Rule:
    rule = _cut(x, [dim] if x.ndim else [])
    return replace(rule, results=((*rule.results[0], ()),))


def unfold_backward(
    grad: torch.Tensor, shape: Shape, dim: int, size: int, step: int
) -> Rule:
    rule = _spread(grad, shape, dim)
    return replace(rule, operands=((*rule.operands[0], ()),))


def mirror(x: torch.Tensor, dims: Sequence[int]) -> Rule:
    """Rows in the other order. Along a dim that is split ranks exchange shards, which
    are of one size then."""
    turned = sorted(all_at(dims, x.ndim)) if dims and x.ndim else []
    words = words_of(x)
    evenly = frozenset(words[d] for d in turned) - {"_"}
    return replace(make([words], [words]), evenly=evenly, mirrored=tuple(turned))


def flip(x: torch.Tensor, dims: Sequence[int]) -> Rule:
    words = words_of(x, {at(d, x.ndim) for d in dims})
    return make([words], [words])


def roll(x: torch.Tensor, shifts: Any, dims: Sequence[int] = ()) -> Rule:
    return flip(x, sorted(all_at(dims, x.ndim)))


def rot90(x: torch.Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Rule:
    """A half turn is a flip; an odd number of quarters swaps the two dims as well."""
    turned = flip(x, dims)
    if k % 2 == 0:
        return turned
    swapped = transpose(x, *dims)
    return replace(swapped, whole=turned.whole)


def repeat(x: torch.Tensor, repeats: Sequence[int]) -> Rule:
    """Dims repeated once are factors, the others whole."""
    new = len(repeats) - x.ndim
    words = words_of(x, {i for i in range(x.ndim) if repeats[new + i] != 1})
    kept = ["_" if n != 1 else w for n, w in zip(repeats[new:], words, strict=True)]
    return make([words], [["_"] * new + kept])


# Padding


def _padded(x: torch.Tensor, pad: Sequence[int]) -> Rule:
    """Amounts are given from the last dim on, front and back."""
    dims = [x.ndim - 1 - i // 2 for i, n in enumerate(pad) if n]
    return _cut(x, dims)


def constant_pad(x: torch.Tensor, pad: Sequence[int], value: Any = 0) -> Rule:
    """A zero stays under every reduction, another constant under those of one value."""
    reductions = MOVEMENT if value == 0 else ("avg", *MONOTONE)
    return replace(_padded(x, pad), passages=(Passage((0,), reductions),))


def pad_backward(grad: torch.Tensor, x: torch.Tensor, pad: Sequence[int]) -> Rule:
    rule = _padded(x, pad)
    return Rule(rule.results + rule.operands, rule.operands, whole=rule.whole)


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
    **rows("constant_pad_nd", constant_pad),
    **moves(
        "reflection_pad1d reflection_pad2d reflection_pad3d", _padded, empty="fill"
    ),
    **moves(
        "replication_pad1d replication_pad2d replication_pad3d", _padded, empty="fill"
    ),
    **rows(
        """
        reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
        replication_pad1d_backward replication_pad2d_backward
        replication_pad3d_backward
        """,
        pad_backward,
        linear="0",
        empty="fill",
    ),
    **moves("rev", mirror, namespace="prims"),
    **moves("cat", cat, namespace="prims"),
}
