"""Splits lookups and updates by lists of indices: ``x[i, :, j]``, unchecked and masked.

They are split as in ``indexing``; and where positions are constants near the rows they
make (``sharding.near_rows``) a rank reads the window of rows that holds its own
positions, or adds to it.
In: calls of these ops. Out: their rules and local forms.
Never: gives a rule to a lookup by mask, whose shape depends on data.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import fx

from fxpar.sharding.factors import RowWindow
from fxpar.sharding.op_table import align, names, rows, text
from fxpar.sharding.ops.indexing import updated
from fxpar.sharding.ops.local_call import LocalCall
from fxpar.sharding.ops.own_rows import (
    Part,
    part_of,
    trailing,
    with_spares,
    without_spares,
)
from fxpar.sharding.ops.reads import (
    add_halo_rows,
    exchange_of,
    window_shape,
    windows_of,
    with_halo_rows,
)

aten = torch.ops.aten

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


# Local forms


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
    return without_spares(call, put, list(parts.values()))


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
    **rows(
        "index.Tensor _unsafe_index.Tensor",
        _index,
        movement="0",
        local=_local_index,
        facts="gathers",
    ),
    **rows(
        "_unsafe_masked_index",
        _masked_index,
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
