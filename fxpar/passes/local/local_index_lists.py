"""Local forms of lookups and updates by index lists, where an indexed dim is split.

As in ``local_indexing``; and where positions are constants near the rows they make
(``sharding.near_rows``) a rank reads the window of rows that its own positions lie in,
or adds to it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import reduce
from typing import Any

import torch
from torch import fx

from fxpar.passes.local.halos import (
    add_halo_rows,
    exchange_of,
    windows_of,
    with_halo_rows,
)
from fxpar.passes.local.local_call import LocalCall, Localizer
from fxpar.passes.local.local_indexing import (
    Part,
    part_of,
    trailing,
    with_spares,
    without_spares,
)
from fxpar.sharding.factors import RowWindow
from fxpar.sharding.rules.indexing import index_dims, is_mask

aten = torch.ops.aten


def _in_windows(
    call: LocalCall, indices: Sequence[fx.Node | None], near: Sequence[RowWindow]
) -> list[fx.Node | None]:
    """An index list in which indices of the dims of windows count from where these
    begin."""
    places = list(indices)
    for window in near:
        index = places[window.dim]
        start = call.build.window_start(exchange_of(call, window))
        places[window.dim] = call.build.call(aten.sub.Tensor, index, start)
    return places


def _split_parts(
    call: LocalCall,
    indices: Sequence[fx.Node | None],
    apart: Collection[int] = (),
) -> dict[int, Part]:
    """The split dims that an index list meets, but for those left ``apart``."""
    parts = {}
    for d, index in enumerate(indices):
        if index is None or d in apart or is_mask(index.meta["val"]):
            continue
        part = part_of(call, d, index, signed=True)
        if part is not None:
            parts[d] = part
    return parts


def _inside(call: LocalCall, indices: Sequence[Any], parts: dict[int, Part], ndim: int):
    """Whether all indices fall into this rank's part, aligned with ``x[indices]``."""
    dims, at = index_dims(indices)
    inside = reduce(
        lambda a, b: call.build.call(aten.bitwise_and.Tensor, a, b),
        [part.inside for part in parts.values()],
    )
    return trailing(call, inside, ndim - len(dims) - at)


def _index(call: LocalCall, x: fx.Node, indices: Sequence[fx.Node | None]) -> fx.Node:
    near = windows_of(call, 0)
    x, indices = with_halo_rows(call, x, 0), _in_windows(call, indices, near)
    parts = _split_parts(call, indices, {window.dim for window in near})
    if not parts:
        return call.same(x, indices)
    places = [parts[d].read() if d in parts else i for d, i in enumerate(indices)]
    inside = _inside(call, indices, parts, x.meta["val"].dim())
    for part in parts.values():
        x = part.rows_of(x)
    return call.where(inside, call.same(x, places), 0)


def _index_put(
    call: LocalCall,
    x: fx.Node,
    indices: Sequence[fx.Node | None],
    values: fx.Node,
    accumulate: bool = False,
) -> fx.Node:
    near = windows_of(call, len(call.operands))
    if near:
        return _add_to_windows(call, x, indices, values, near)
    return _put(call, x, indices, _split_parts(call, indices), values, accumulate)


def _put(
    call: LocalCall,
    x: fx.Node,
    indices: Sequence[fx.Node | None],
    parts: dict[int, Part],
    values: fx.Node,
    accumulate: bool,
) -> fx.Node:
    """The values that fall into this rank's parts of the split dims, in ``x``."""
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
    near: Sequence[RowWindow],
) -> fx.Node:
    """Rows are added up in windows of zeros, and these where they lie."""
    build, shape, like = call.build, list(call.local_shape()), x.meta["val"]
    for window in near:
        shape[window.dim] = build.window_rows(exchange_of(call, window))
    options = {"dtype": like.dtype, "device": like.device}
    zeros = build.call(aten.full.default, shape, 0, **options)
    places = _in_windows(call, indices, near)
    parts = _split_parts(call, places, {window.dim for window in near})
    total = add_halo_rows(
        call, _put(call, zeros, places, parts, values, True), len(call.operands)
    )
    return build.call(aten.add.Tensor, x, total)


def _masked_index(
    call: LocalCall, x: fx.Node, mask: fx.Node, indices: Sequence[Any], fill: Any
) -> fx.Node:
    """What the mask leaves out may be looked up anywhere."""
    places = _in_windows(call, indices, windows_of(call, 0))
    return call.same(with_halo_rows(call, x, 0), mask, places, fill)


LOCAL: dict[Any, Localizer] = {
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten._unsafe_masked_index.default: _masked_index,
}
