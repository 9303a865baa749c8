"""Splits ops that read or write a tensor at positions of index tensors: along one dim,
or by lists of indices, ``x[i, :, j]``, unchecked and masked.

Dims of the index pass through, and so do the operand's dims that are not indexed. An
indexed dim may be split as well: each rank looks up the positions in its part and gives
zero elsewhere, so the result is partial; an update keeps only positions in its part
(``local_call.Part``). Updates that accumulate may be split along the index too: each
rank then holds a summand of the result, including the operand. Where the positions of a
list are constants near the rows they make (``sharding.near_rows``) a rank reads the
window of rows that holds its own positions, or adds to it.
In: calls of these ops, of losses and searches. Out: their rules and local forms.
Never: communicates for a split lookup, which gives a partial result; gives a rule to a
lookup by mask, whose shape depends on data.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import fx

from fxpar.sharding.factors import RowWindow, Rule
from fxpar.sharding.op_table import align, names, rows, text, whole
from fxpar.sharding.ops.local_call import (
    LocalCall,
    Part,
    part_of,
    trailing,
    with_spares,
)
from fxpar.sharding.ops.reads import (
    add_halo_rows,
    exchange_of,
    window_shape,
    windows_of,
    with_halo_rows,
)

aten = torch.ops.aten
prims = torch.ops.prims


def updated(words: Sequence[str], accumulate: bool) -> list[str]:
    """Return words of an updated operand: added in where updates accumulate."""
    return ["+", *words] if accumulate else list(words)


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


def _scatter(
    accumulate: bool,
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: Any,
    *_: Any,
    **__: Any,
) -> str | Rule:
    """Return the rule of scatters into ``x`` along ``dim``; ``src`` may be a scalar."""
    tensors = [index, src] if isinstance(src, torch.Tensor) else [index]
    if not x.dim() or any(t.dim() != x.dim() for t in tensors):
        return whole(x, *tensors)
    dim %= x.dim()
    operand, updates = [], []
    for d, n in enumerate(x.shape):
        sizes = [t.shape[d] for t in tensors]
        # Only the first part of a longer src is read, at the index's own place.
        has_one_size = len(set(sizes)) == 1
        if d == dim:
            operand.append("s")
            updates.append("i" if accumulate and has_one_size else "_")
        else:
            operand.append(f"d{d}" if has_one_size and sizes[0] == n else "_")
            updates.append(operand[-1])
    return text(
        updated(operand, accumulate), *[updates] * len(tensors), results=[operand]
    )


def _scatter_reduce(*args: Any, reduce: str | None = None, **kwargs: Any) -> str | Rule:
    """Return the rule. A sum accumulates; the other reductions need all updates of a
    place at once."""
    name = reduce if reduce is not None else args[4]
    adds = name in ("sum", "add") and kwargs.get("include_self", True)
    return _scatter(adds, *args[:4])


def _index_update(
    accumulate: bool,
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: Any,
    *_: Any,
    **__: Any,
) -> str | Rule | None:
    """Return the rule of updates of slices of ``x`` along ``dim``: index_add, _copy,
    _fill, _reduce."""
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
    return text(updated(operand, accumulate), *tensors, results=[operand])


# Losses and searches


def _searchsorted(
    sequence: torch.Tensor,
    x: torch.Tensor,
    *,
    sorter: torch.Tensor | None = None,
    **_: Any,
) -> str:
    """Return the rule: a position is the sum of the positions in each shard of the
    sequence."""
    words, rows = names(x.dim()), "k" if sorter is None else "k!"
    ordered = [*words[:-1], rows] if sequence.dim() > 1 else [rows]
    sorters = [ordered] if sorter is not None else []
    return text(ordered, words, *sorters, results=[words])


def _masked_scatter_backward(
    grad: torch.Tensor, mask: torch.Tensor, shape: Sequence[int]
) -> str:
    """Return the rule: an element's place is the mask's count of hits before it, so the
    mask is whole, and each rank puts its elements among zeros."""
    return text(names(grad.dim()), ["_"] * mask.dim(), results=[["_"] * len(shape)])


# Local forms of ops along one dim


def _local_lookup(
    call: LocalCall, x: fx.Node, dim: int, index: fx.Node, **settings: Any
) -> fx.Node:
    part = part_of(call, dim, index)
    if part is None:
        return call.same(x, dim, index, **settings)
    rows = call.same(part.rows_of(x), dim, part.read(), **settings)
    return call.where(part.inside, rows, 0)


def _is_one_per_row(
    call: LocalCall, x: fx.Node, dim: int, index: fx.Node, src: Any
) -> bool:
    """Return whether each row of ``x`` along ``dim`` gets exactly one update."""
    want = list(x.meta["val"].shape)
    want[dim] = 1
    shapes = [list(t.meta["val"].shape) for t in (index, src) if isinstance(t, fx.Node)]
    return all(shape == want for shape in shapes)


def _index_mask(call: LocalCall, x: fx.Node, dim: int, index: fx.Node) -> fx.Node:
    """Return where an index of size 1 along ``dim`` hits ``x``: pointwise, unlike a
    scatter, so that it fuses with the ops around it."""
    like, build = index.meta["val"], call.build
    rows, axes = call.shapes[0][dim], call.operands[0].dims[dim]
    own, start = build.own_size(rows, axes), build.own_start(rows, axes)
    numbers = build.cast(build.iota(own, like.device, start=start), like.dtype)
    rows = trailing(call, numbers, x.meta["val"].dim() - 1 - dim % x.meta["val"].dim())
    return build.call(aten.eq.Tensor, rows, index)


def _local_update(
    call: LocalCall,
    x: fx.Node,
    dim: int,
    index: fx.Node,
    src: Any,
    *settings: Any,
    by_element: bool,
    adds: bool = False,
    **options: Any,
) -> fx.Node:
    """Return an update of the rows that this rank has. ``by_element``: the index has
    the shape of the updates, else one number for each of their rows; ``adds``: the
    updates are added to what is there."""
    part, build = part_of(call, dim, index, signed=not (by_element or adds)), call.build
    if part is None:
        return call.same(x, dim, index, src, *settings, **options)
    is_plain = by_element and not settings and not options
    if is_plain and _is_one_per_row(call, x, dim, index, src):
        hit = _index_mask(call, x, dim, index)
        if adds:
            return build.call(aten.add.Tensor, x, call.where(hit, src, 0))
        src = src if isinstance(src, fx.Node) else call.full([], src, x)
        return build.call(aten.where.self, hit, src, x)
    shapes = [x.meta["val"].shape for x in (index, src) if isinstance(x, fx.Node)]
    if not adds or part.empty or by_element and len(set(shapes)) > 1:
        return part.put(x, dim, src, *settings, **options)
    ndim, inside = src.meta["val"].dim(), part.inside
    if ndim and not by_element:
        inside = trailing(call, inside, ndim - 1 - dim % ndim)
    src = call.where(inside, src, 0)
    return call.same(x, dim, part.fold(), src, *settings, **options)


def _local_masked_scatter_backward(
    call: LocalCall, grad: fx.Node, mask: fx.Node, shape: Sequence[int]
) -> fx.Node:
    """Return this rank's elements at their places, among zeros. The whole mask is
    counted; elements not selected go to a spare place past the end."""
    spec, build = call.operands[0], call.build
    if not spec.sharded_axes:
        return call.same(grad, mask, shape)
    n, whole = math.prod(shape), list(call.shapes[0])
    flat = build.call(aten.expand.default, mask, whole)
    flat = build.call(aten.reshape.default, flat, [-1])
    place = build.call(aten.cumsum.default, flat, 0)
    place = build.call(aten.sub.Tensor, place, 1)
    low = build.call(aten.lt.Scalar, place, n)
    selected = build.call(aten.bitwise_and.Tensor, flat, low)
    place = build.call(aten.reshape.default, call.where(selected, place, n), whole)
    for dim, axes in enumerate(spec.dims):
        if axes:
            start = build.own_start(whole[dim], axes)
            end = build.own_end(whole[dim], axes)
            place = build.call(aten.slice.Tensor, place, dim, start, end)
    zeros = call.full([n + 1], 0, grad)
    scattered = build.call(aten.index_put.default, zeros, [place], grad)
    scattered = build.call(aten.slice.Tensor, scattered, 0, 0, n)
    return build.call(aten.reshape.default, scattered, list(shape))


Indices = Sequence[torch.Tensor | None]


# Index lists: index.Tensor, index_put and their unchecked and masked forms


@dataclass(frozen=True)
class _Advanced:
    """Holds the factors of ``operand[indices]``."""

    # Words of the operand's dims.
    operand: list[str]
    # Words of each index.
    indices: list[list[str]]
    # Words of the result's dims.
    result: list[str]
    # The result's shape.
    shape: list[int]


def index_dims(indices: Indices) -> tuple[list[int], int]:
    """Return (operand dims that are indexed, dim of the result where the index dims
    start): in place of the indexed dims where those are adjacent, in front
    otherwise."""
    dims = [d for d, index in enumerate(indices) if index is not None]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    return dims, dims[0] if adjacent else 0


def is_mask(index: torch.Tensor) -> bool:
    """Return whether an entry of an index list selects by mask."""
    return index.dtype in (torch.bool, torch.uint8)


def _advanced(x: torch.Tensor, indices: Indices, free: bool = True) -> _Advanced | None:
    """Return the factors; None where a mask makes the shape depend on the data.
    ``free``: whether the indexed dims may be split."""
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


def _index(x: torch.Tensor, *masks_indices: Any) -> str | None:
    *masks, indices = masks_indices
    advanced = _advanced(x, indices, free=not masks)
    if advanced is None:
        return None
    where = [align(mask.shape, advanced.shape, advanced.result) for mask in masks]
    return text(advanced.operand, *where, *advanced.indices, results=[advanced.result])


def _whole(words: Sequence[str]) -> list[str]:
    """Return the words with each factor that is an index dim marked whole."""
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
    return text(updated(operand, accumulate), *updates, results=[operand])


def _mask_put(x: torch.Tensor, indices: Indices, values: torch.Tensor) -> str | None:
    """Return the rule of ``x[mask] = v``: pointwise if ``v`` has no row for each hit;
    else None."""
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
        updated(advanced.operand, True),
        where,
        *advanced.indices,
        updates,
        results=[advanced.operand],
    )


# Local forms of ops by lists of indices


def _in_windows(
    call: LocalCall, indices: Sequence[fx.Node | None], windows: Sequence[RowWindow]
) -> list[fx.Node | None]:
    """Return an index list in which indices of the windows' dims count from the begin
    of the window."""
    places = list(indices)
    for window in windows:
        index = places[window.dim]
        start = call.build.window_start(exchange_of(call, window))
        places[window.dim] = call.build.call(aten.sub.Tensor, index, start)
    return places


def _split_parts(
    call: LocalCall, indices: Sequence[fx.Node | None], skip: Collection[int] = ()
) -> dict[int, Part]:
    """Return dim -> this rank's part, for the split dims that are indexed, except
    ``skip``."""
    parts = {}
    for d, index in enumerate(indices):
        if index is None or d in skip or is_mask(index.meta["val"]):
            continue
        part = part_of(call, d, index, signed=True)
        if part is not None:
            parts[d] = part
    return parts


def _inside(call: LocalCall, indices: Sequence[Any], parts: dict[int, Part], ndim: int):
    """Return whether all indices fall into this rank's parts, aligned with
    ``x[indices]``."""
    dims, at = index_dims(indices)
    inside = reduce(
        lambda a, b: call.build.call(aten.bitwise_and.Tensor, a, b),
        [part.inside for part in parts.values()],
    )
    return trailing(call, inside, ndim - len(dims) - at)


def _local_index(
    call: LocalCall, x: fx.Node, indices: Sequence[fx.Node | None]
) -> fx.Node:
    windows = windows_of(call, 0)
    x, indices = with_halo_rows(call, x, 0), _in_windows(call, indices, windows)
    parts = _split_parts(call, indices, {window.dim for window in windows})
    if not parts:
        return call.same(x, indices)
    places = [parts[d].read() if d in parts else i for d, i in enumerate(indices)]
    inside = _inside(call, indices, parts, x.meta["val"].dim())
    for part in parts.values():
        x = part.rows_of(x)
    return call.where(inside, call.same(x, places), 0)


def _local_index_put(
    call: LocalCall,
    x: fx.Node,
    indices: Sequence[fx.Node | None],
    values: fx.Node,
    accumulate: bool = False,
) -> fx.Node:
    windows = windows_of(call, len(call.operands))
    if windows:
        return _add_to_windows(call, x, indices, values, windows)
    return _put(call, x, indices, _split_parts(call, indices), values, accumulate)


def _put(
    call: LocalCall,
    x: fx.Node,
    indices: Sequence[fx.Node | None],
    parts: dict[int, Part],
    values: fx.Node,
    accumulate: bool,
) -> fx.Node:
    """Return ``x`` with the values that fall into this rank's parts of the split
    dims."""
    if not parts:
        return call.same(x, indices, values, accumulate)
    if accumulate and not any(part.empty for part in parts.values()):
        places = [parts[d].fold() if d in parts else i for d, i in enumerate(indices)]
        inside = _inside(call, indices, parts, x.meta["val"].dim())
        return call.same(x, places, call.where(inside, values, 0), True)
    places = [parts[d].store() if d in parts else i for d, i in enumerate(indices)]
    accumulating = (True,) if accumulate else ()
    put = call.same(with_spares(call, x, list(parts)), places, values, *accumulating)
    return call.build.first_rows(put, [(dim, part.n) for dim, part in parts.items()])


def _add_to_windows(
    call: LocalCall,
    x: fx.Node,
    indices: Sequence[fx.Node | None],
    values: fx.Node,
    windows: Sequence[RowWindow],
) -> fx.Node:
    """Return ``x`` plus the rows, which are summed in windows of zeros and then sent to
    their owners."""
    position = len(call.operands)
    zeros = call.full(window_shape(call, call.local_shape(), position), 0, x)
    places = _in_windows(call, indices, windows)
    parts = _split_parts(call, places, {window.dim for window in windows})
    total = _put(call, zeros, places, parts, values, True)
    total = add_halo_rows(call, total, position)
    return call.build.call(aten.add.Tensor, x, total)


def _local_masked_index(
    call: LocalCall, x: fx.Node, mask: fx.Node, indices: Sequence[Any], fill: Any
) -> fx.Node:
    """Return the lookup; masked entries may be looked up anywhere."""
    places = _in_windows(call, indices, windows_of(call, 0))
    return call.same(with_halo_rows(call, x, 0), mask, places, fill)


ROWS = {
    # Inductor makes these from other ops.
    **rows(
        "index_put_ _index_put_impl _index_put_impl_ scatter_.src scatter_.value "
        "scatter_.reduce scatter_.value_reduce scatter_add_ scatter_reduce_.two",
        None,
        facts="scatters",
    ),
    # Their number depends on data.
    **rows(
        "nonzero unique_dim unique_consecutive unique_dim_consecutive",
        None,
        facts="alone",
    ),
    **rows(
        "gather", _gather, movement="0", local=_local_lookup, along=1, facts="gathers"
    ),
    # Local forms make it.
    **rows("index_select", None, facts="gathers"),
    **rows(
        "scatter.src scatter.value",
        partial(_scatter, False),
        linear="0+3",
        local=partial(_local_update, by_element=True),
        along=1,
        facts="scatters",
    ),
    **rows(
        "scatter.reduce scatter.value_reduce scatter_reduce.two",
        _scatter_reduce,
        local=partial(_local_update, by_element=True),
        facts="scatters",
    ),
    **rows(
        "scatter_add",
        partial(_scatter, True),
        linear="0+3",
        local=partial(_local_update, by_element=True, adds=True),
        along=1,
        facts="scatters",
    ),
    **rows(
        "index_add",
        partial(_index_update, True),
        linear="0+3",
        local=partial(_local_update, by_element=False, adds=True),
        facts="scatters",
    ),
    **rows(
        "index_reduce",
        partial(_index_update, False),
        local=partial(_local_update, by_element=False),
        facts="scatters",
    ),
    **rows(
        "bucketize.Tensor",
        lambda x, ends, **_: text(n := names(x.dim()), ["k"], results=[n]),
    ),
    **rows("searchsorted.Tensor", _searchsorted),
    **rows("masked_scatter", whole),
    **rows(
        "masked_scatter_backward",
        _masked_scatter_backward,
        linear="0",
        local=_local_masked_scatter_backward,
    ),
    **rows("nonzero_static", whole, facts="alone"),
    **rows(
        "index.Tensor _unsafe_index.Tensor",
        _index,
        movement="0",
        local=_local_index,
        facts="gathers",
    ),
    **rows(
        "_unsafe_masked_index",
        lambda x, mask, indices, _: _index(x, mask, indices),
        local=_local_masked_index,
        facts="gathers",
    ),
    **rows(
        "index_put _unsafe_index_put",
        _index_put,
        linear="0+2",
        local=_local_index_put,
        facts="scatters",
    ),
    **rows(
        "_unsafe_masked_index_put_accumulate",
        _masked_put,
        linear="0+3",
        facts="scatters",
    ),
}
