"""Rows of ops that read or write a tensor where an index tensor points.

Dims of the index pass through, and so do the operand's dims that are not indexed. An
indexed dim may be split as well: each rank looks up what falls into its part and puts
zero elsewhere, so the result is partial; an update keeps only what falls into its part
(the local forms are in ``fxpar/passes/local/local_indexing.py``). Updates that
accumulate may be split along the index too: each rank then holds a summand of the
result, its operand included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpar.sharding.factors import Rule
from fxpar.sharding.rules.table import names, row, text, whole

aten = torch.ops.aten

Indices = Sequence[torch.Tensor | None]


def align(shape: Sequence[int], full: Sequence[int], words: Sequence[str]) -> list[str]:
    """Words of a tensor that broadcasts to ``full``; a stretched dim has none."""
    skip = len(full) - len(shape)
    return [
        word if n == size else "_"
        for word, n, size in zip(words[skip:], shape, full[skip:], strict=True)
    ]


# Index lists: index.Tensor, index_put and their unchecked and masked forms


@dataclass(frozen=True)
class _Advanced:
    """The factors of ``operand[indices]``."""

    # Words of its dims.
    operand: list[str]
    # Words of each index.
    indices: list[list[str]]
    # Words of its dims.
    result: list[str]
    # Of the result.
    shape: list[int]


def index_dims(indices: Indices) -> tuple[list[int], int]:
    """(operand dims that are indexed, dim of the result where the index dims start):
    in place of the indexed dims where those are adjacent, in front otherwise."""
    dims = [d for d, index in enumerate(indices) if index is not None]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    return dims, dims[0] if adjacent else 0


def is_mask(index: torch.Tensor) -> bool:
    """Whether an entry of an index list selects by mask."""
    return index.dtype in (torch.bool, torch.uint8)


def _advanced(x: torch.Tensor, indices: Indices, free: bool = True) -> _Advanced | None:
    """None where a mask makes the shape depend on the data. ``free``: whether the
    indexed dims may be split."""
    tensors = [index for index in indices if index is not None]
    if not tensors or any(is_mask(index) for index in tensors):
        return None
    dims, at = index_dims(indices)
    # A sum over ranks has no meaning for booleans.
    mark = "" if free and x.dtype is not torch.bool else "!"
    operand = [f"s{d}{mark}" if d in dims else f"d{d}" for d in range(x.dim())]
    other_dims = [d for d in range(x.dim()) if d not in dims]
    shape = list(torch.broadcast_shapes(*(index.shape for index in tensors)))
    words = names(len(shape), "i")
    return _Advanced(
        operand,
        [align(index.shape, shape, words) for index in tensors],
        [f"d{d}" for d in other_dims[:at]] + words + [f"d{d}" for d in other_dims[at:]],
        [x.shape[d] for d in other_dims[:at]]
        + shape
        + [x.shape[d] for d in other_dims[at:]],
    )


def _index(x: torch.Tensor, indices: Indices) -> str | None:
    dims = _advanced(x, indices)
    if dims is None:
        return None
    return text(dims.operand, *dims.indices, results=[dims.result])


def _masked_index(
    x: torch.Tensor, mask: torch.Tensor, indices: Indices, fill: Any
) -> str | None:
    advanced = _advanced(x, indices, free=False)
    if advanced is None:
        return None
    where = align(mask.shape, advanced.shape, advanced.result)
    return text(advanced.operand, where, *advanced.indices, results=[advanced.result])


def _put(words: Sequence[str], accumulate: bool) -> list[str]:
    """An updated operand: added in where updates accumulate."""
    return ["+", *words] if accumulate else list(words)


def _whole(words: Sequence[str]) -> list[str]:
    """The words with each factor that is an index dim marked whole."""
    return [w + "!" if w[0] == "i" else w for w in words]


def _index_put(
    x: torch.Tensor, indices: Indices, values: torch.Tensor, accumulate: bool = False
) -> str | None:
    tensors = [index for index in indices if index is not None]
    if len(tensors) == 1 and is_mask(tensors[0]):
        return _mask_put(x, indices, values)
    advanced = _advanced(x, indices)
    if advanced is None:
        return None
    updates = [*advanced.indices, align(values.shape, advanced.shape, advanced.result)]
    if not accumulate:
        updates = [_whole(words) for words in updates]
    operand = [word.rstrip("!") for word in advanced.operand]
    return text(_put(operand, accumulate), *updates, results=[operand])


def _mask_put(x: torch.Tensor, indices: Indices, values: torch.Tensor) -> str | None:
    """``x[mask] = v``, pointwise as long as ``v`` does not count the mask's hits."""
    at = next(d for d, index in enumerate(indices) if index is not None)
    mask = indices[at]
    assert mask is not None
    trailing = x.dim() - at - mask.dim()
    if values.dim() > trailing and values.numel() != 1:
        return None
    words = names(x.dim())
    return text(
        words,
        words[at : at + mask.dim()],
        ["_"] * values.dim()
        if values.numel() == 1
        else align(values.shape, x.shape, words),
        results=[words],
    )


def _masked_put(
    x: torch.Tensor, mask: torch.Tensor, indices: Indices, values: torch.Tensor
) -> str | None:
    advanced = _advanced(x, indices, free=False)
    if advanced is None:
        return None
    where = align(mask.shape, advanced.shape, advanced.result)
    updates = align(values.shape, advanced.shape, advanced.result)
    return text(
        _put(advanced.operand, True),
        where,
        *advanced.indices,
        updates,
        results=[advanced.operand],
    )


# One index along one dim


def _gather(x: torch.Tensor, dim: int, index: torch.Tensor, **_: Any) -> str | Rule:
    if x.dim() != index.dim() or not x.dim():
        return whole(x, index)
    dim %= x.dim()
    operand, places = [], []
    for d, (n, size) in enumerate(zip(x.shape, index.shape, strict=True)):
        if d == dim:
            operand.append("s!" if x.dtype is torch.bool else "s")
            places.append("i")
        else:
            shared = f"d{d}" if n == size else "_"
            operand.append(shared)
            places.append(shared)
    return text(operand, places, results=[places])


def _scatter(accumulate: bool):
    """Scatter into ``x`` along ``dim``, from ``src`` or of one scalar."""

    def factors(
        x: torch.Tensor, dim: int, index: torch.Tensor, src: Any, *_: Any, **__: Any
    ) -> str | Rule:
        tensors = [index, src] if isinstance(src, torch.Tensor) else [index]
        if not x.dim() or any(t.dim() != x.dim() for t in tensors):
            return whole(x, *tensors)
        dim %= x.dim()
        operand, updates = [], []
        for d, n in enumerate(x.shape):
            sizes = [t.shape[d] for t in tensors]
            # Only the first part of a longer src is read, at the index's own place.
            alike = len(set(sizes)) == 1
            if d == dim:
                operand.append("s")
                updates.append("i" if accumulate and alike else "_")
            else:
                operand.append(f"d{d}" if alike and sizes[0] == n else "_")
                updates.append(operand[-1])
        return text(
            _put(operand, accumulate), *[updates] * len(tensors), results=[operand]
        )

    return factors


def _scatter_reduce(*args: Any, reduce: str | None = None, **kwargs: Any) -> str | Rule:
    """A sum accumulates; the other reductions need all updates of a place at once."""
    name = reduce if reduce is not None else args[4]
    adds = name in ("sum", "add") and kwargs.get("include_self", True)
    return _scatter(adds)(*args[:4])


def _index_select(x: torch.Tensor, dim: int, index: torch.Tensor) -> str | Rule:
    if not x.dim():
        return whole(x, index)
    operand = names(x.dim())
    operand[dim] = "s!" if x.dtype is torch.bool else "s"
    result = names(x.dim())
    result[dim] = place = "i" if index.dim() else "_"
    return text(operand, [place] * index.dim(), results=[result])


def _index_update(accumulate: bool):
    """Update of slices of ``x`` along ``dim``: index_add, _copy, _fill, _reduce."""

    def factors(
        x: torch.Tensor, dim: int, index: torch.Tensor, source: Any, *_: Any, **__: Any
    ) -> str | Rule | None:
        if not x.dim():
            return whole(x, index, source)
        dim %= x.dim()
        operand, updates = names(x.dim()), names(x.dim())
        operand[dim] = "s"
        updates[dim] = "i" if accumulate and index.dim() else "_"
        tensors = [[updates[dim]] * index.dim()]
        if isinstance(source, torch.Tensor):
            if source.dim() not in (0, x.dim()):
                return None
            tensors.append(updates if source.dim() else [])
        return text(_put(operand, accumulate), *tensors, results=[operand])

    return factors


def _take(x: torch.Tensor, index: torch.Tensor) -> str:
    words = names(index.dim(), "i")
    return text(["_"] * x.dim(), words, results=[words])


# Losses and searches


def _nll(x: torch.Tensor, spatial: bool = False) -> tuple[list[str], list[str]]:
    """Words of the scores and of the target: classes are whole."""
    if not spatial:
        return (["n", "c!"], ["n"]) if x.dim() == 2 else (["c!"], [])
    return ["n", "c!", "h", "w"], ["n", "h", "w"]


def _nll_forward(spatial: bool):
    def factors(
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignore: int,
    ) -> str:
        scores, places = _nll(x, spatial)
        classes = [["c!"]] if weight is not None else []
        if reduction == 0:
            weights = [f"~{f}" for f in places]  # a zero, not a sum
            return text(scores, places, *classes, results=[places, weights])
        if reduction == 1:
            # A mean divides by the total weight, which no rank knows alone.
            scores = [f.rstrip("!") + "!" for f in scores]
        return text(scores, places, *classes, results=[[], []])

    return factors


def _nll_backward(spatial: bool):
    def factors(
        grad: torch.Tensor,
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignore: int,
        total: torch.Tensor,
    ) -> str:
        scores, places = _nll(x, spatial)
        classes = [["c!"]] if weight is not None else []
        grads = places if reduction == 0 else []
        return text(grads, scores, places, *classes, [], results=[scores])

    return factors


def _bucketize(x: torch.Tensor, boundaries: torch.Tensor, **_: Any) -> str:
    words = names(x.dim())
    return text(words, ["k"], results=[words])


def _searchsorted(
    sequence: torch.Tensor,
    x: torch.Tensor,
    *,
    sorter: torch.Tensor | None = None,
    **_: Any,
) -> str:
    """Shards of the sequence have so many rows each before an element of ``x``."""
    words, rows = names(x.dim()), "k" if sorter is None else "k!"
    ordered = [*words[:-1], rows] if sequence.dim() > 1 else [rows]
    sorters = [ordered] if sorter is not None else []
    return text(ordered, words, *sorters, results=[words])


def _masked_scatter_backward(
    grad: torch.Tensor, mask: torch.Tensor, shape: Sequence[int]
) -> str:
    """Where an element goes says the mask's count of those before it: the mask is
    whole, and each rank puts its elements among zeros."""
    return text(names(grad.dim()), ["_"] * mask.dim(), results=[["_"] * len(shape)])


ROWS = {
    aten.index.Tensor: row(_index, movement="0"),
    aten._unsafe_index.Tensor: row(_index, movement="0"),
    aten._unsafe_masked_index.default: row(_masked_index),
    aten.index_put.default: row(_index_put, linear="0+2"),
    aten._unsafe_index_put.default: row(_index_put, linear="0+2"),
    aten._unsafe_masked_index_put_accumulate.default: row(_masked_put, linear="0+3"),
    aten.gather.default: row(_gather, movement="0"),
    aten.index_select.default: row(_index_select, movement="0"),
    aten.take.default: row(_take, movement="0"),
    aten.scatter.src: row(_scatter(False), linear="0+3"),
    aten.scatter.value: row(_scatter(False)),
    aten.scatter.reduce: row(_scatter_reduce),
    aten.scatter.value_reduce: row(_scatter_reduce),
    aten.scatter_add.default: row(_scatter(True), linear="0+3"),
    aten.scatter_reduce.two: row(_scatter_reduce),
    aten.index_add.default: row(_index_update(True), linear="0+3"),
    aten.index_copy.default: row(_index_update(False), linear="0+3"),
    aten.index_fill.int_Scalar: row(_index_update(False)),
    aten.index_fill.int_Tensor: row(_index_update(False), linear="0+3"),
    aten.index_reduce.default: row(_index_update(False)),
    aten.nll_loss_forward.default: row(_nll_forward(False)),
    aten.nll_loss2d_forward.default: row(_nll_forward(True)),
    aten.nll_loss_backward.default: row(_nll_backward(False), linear="0"),
    aten.nll_loss2d_backward.default: row(_nll_backward(True), linear="0"),
    aten.bucketize.Tensor: row(_bucketize),
    aten.searchsorted.Tensor: row(_searchsorted),
    # Each element goes where the mask's count of those before it says.
    aten.masked_scatter.default: row(whole),
    aten.masked_scatter_backward.default: row(_masked_scatter_backward, linear="0"),
    aten.nonzero_static.default: row(whole),
}
