"""Local forms of cuts, and of what is put in their place, where the dim is split.

A cut gives the rows that this rank has and zero elsewhere, so results add up. Of what
is put in, whole on every rank, each takes what falls into its rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpar._torch.symbols import Inexpressible
from fxpar.passes.local.local_call import LocalCall, Localizer
from fxpar.passes.local.local_indexing import part_of, rows_at, trailing

aten = torch.ops.aten


def _is_split(call: LocalCall, dim: int) -> bool:
    return bool(call.operands[0].dims and call.operands[0].dims[dim])


def _positions(call: LocalCall, dim: int, *cut: Any) -> range:
    """The rows of a dim of the first operand that a slice names."""
    rows = call.shapes[0][dim]
    if not all(n is None or isinstance(n, int) for n in (rows, *cut)):
        raise Inexpressible("rows are cut out of a dim whose size is left open")
    return range(rows)[slice(*cut)]


def _own_rows(call: LocalCall, x: fx.Node, dim: int, positions: range) -> fx.Node:
    """Of the rows at these positions those that this rank has, else zero."""
    build, device = call.build, x.meta["val"].device
    index = build.iota(len(positions), device, positions.step)
    index = build.call(aten.add.Tensor, index, positions.start)
    part = part_of(call, dim, index)
    assert part is not None
    rows = rows_at(call, part.rows_of(x), dim, part.read())
    ndim = x.meta["val"].dim()
    return call.where(trailing(call, part.inside, ndim - 1 - dim), rows, 0)


def _slice(
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


def _select(call: LocalCall, x: fx.Node, dim: int, index: int) -> fx.Node:
    dim %= len(call.shapes[0])
    if not _is_split(call, dim):
        return call.same(x, dim, index)
    row = _own_rows(call, x, dim, _positions(call, dim, index, index + 1 or None))
    return call.build.call(aten.squeeze.dim, row, dim)


def _put(
    call: LocalCall, x: fx.Node, source: fx.Node, dim: int, positions: range
) -> fx.Node:
    """``x`` with the rows of ``source`` that fall into this rank's."""
    build, device = call.build, x.meta["val"].device
    shape, axes = call.shapes[0], call.operands[0].dims[dim]
    index = build.iota(build.own_size(shape[dim], axes), device)
    first = build.own_start(shape[dim], axes, -positions.start)
    place = build.call(aten.add.Tensor, index, first)
    low = build.call(aten.ge.Scalar, place, 0)
    high = build.call(aten.lt.Scalar, place, len(positions))
    inside = build.call(aten.bitwise_and.Tensor, low, high)
    place = call.where(inside, place, 0)
    source_rows = rows_at(call, source, dim, place)
    inside = trailing(call, inside, len(shape) - 1 - dim)
    return build.call(aten.where.self, inside, source_rows, x)


def _slice_scatter(
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


def _select_scatter(
    call: LocalCall, x: fx.Node, source: fx.Node, dim: int, index: int
) -> fx.Node:
    dim %= len(call.shapes[0])
    if not _is_split(call, dim):
        return call.same(x, source, dim, index)
    row = call.build.call(aten.unsqueeze.default, source, dim)
    positions = _positions(call, dim, index, index + 1 or None)
    return _put(call, x, row, dim, positions)


LOCAL: dict[Any, Localizer] = {
    aten.slice.Tensor: _slice,
    aten.slice_copy.Tensor: _slice,
    aten.select.int: _select,
    aten.select_copy.int: _select,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
}
