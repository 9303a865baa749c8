"""Local forms of diagonals of matrices whose rows or columns are split.

A rank has the elements of a diagonal that lie in its own rows and columns. Where one is
read it gives those and zero elsewhere, so results add up; where one is written it
writes those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpar.passes.local.local_call import LocalCall, Localizer
from fxpar.passes.local.local_indexing import part_of, rows_at, trailing

aten = torch.ops.aten


def _starts(offset: int) -> tuple[int, int]:
    """(row, column) of the first element."""
    return max(-offset, 0), max(offset, 0)


def _diagonal(
    call: LocalCall, x: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> fx.Node:
    build, spec, shape = call.build, call.operands[0], call.shapes[0]
    dims = [dim % len(shape) for dim in (dim1, dim2)]
    if not any(spec.dims[d] for d in dims):
        return call.same(x, offset, dim1, dim2)
    count, axes = call.result_shape()[-1], call.results[0].dims[-1]
    along = call.rule.results[0][-1]
    own = build.iota(build.own_size(count, axes), x.meta["val"].device)
    places, inside = [], []
    for d, start in zip(dims, _starts(offset), strict=True):
        if along and call.rule.operands[0][d] == along:
            places.append(own)
            continue
        first = build.own_start(count, axes, start)
        place = build.call(aten.add.Tensor, own, first)
        part = part_of(call, d, place)
        places.append(place if part is None else part.read())
        if part is not None:
            x = part.rows_of(x)
            inside.append(part.inside)
    others = [d for d in range(len(shape)) if d not in dims]
    x = build.call(aten.permute.default, x, [*others, *dims])
    elements = build.call(aten.index.Tensor, x, [*[None] * len(others), *places])
    for here in inside:
        elements = call.where(here, elements, 0)
    return elements


def _put(
    call: LocalCall, source: fx.Node, x: fx.Node | None, offset: int, dims: list[int]
) -> fx.Node:
    """``x``, or zeros, with the elements of ``source`` that fall into this rank's rows
    and columns."""
    build, like, position = call.build, source.meta["val"], len(call.operands) - 1
    shape, spec, words = call.result_shape(), call.results[0], call.rule.results[0]
    along = call.rule.operands[position][-1]
    numbers = []
    for d, start in zip(dims, _starts(offset), strict=True):
        own = build.iota(build.own_size(shape[d], spec.dims[d]), like.device)
        first = build.own_start(shape[d], spec.dims[d], -start)
        numbers.append(build.call(aten.add.Tensor, own, first))
    last = len(shape) - 1
    columns = [trailing(call, n, last - d) for n, d in zip(numbers, dims, strict=True)]
    hit = build.call(aten.eq.Tensor, *columns)
    lead = next((k for k, d in enumerate(dims) if along and words[d] == along), None)
    if lead is None:
        lead, count = 0, call.shapes[position][-1]
        place = build.call(aten.clamp.default, numbers[0], 0, count - 1)
        source = rows_at(call, source, like.dim() - 1, place)
    source = build.call(aten.unsqueeze.default, source, -1)
    ends = [dims[lead], dims[1 - lead]]
    order = [*(d for d in range(len(shape)) if d not in dims), *ends]
    places = [order.index(d) for d in range(len(shape))]
    source = build.call(aten.permute.default, source, places)
    if x is None:
        size, options = list(call.local_shape()), {"device": like.device}
        x = build.call(aten.full.default, size, 0, dtype=like.dtype, **options)
    return build.call(aten.where.self, hit, source, x)


def _is_split(call: LocalCall, dims: Sequence[int]) -> bool:
    empty = not call.shapes[len(call.operands) - 1][-1]
    return any(call.results[0].dims[d] for d in dims) and not empty


def _diagonal_scatter(
    call: LocalCall,
    x: fx.Node,
    source: fx.Node,
    offset: int = 0,
    dim1: int = 0,
    dim2: int = 1,
) -> fx.Node:
    dims = [dim % len(call.result_shape()) for dim in (dim1, dim2)]
    if not _is_split(call, dims):
        return call.same(x, source, offset, dim1, dim2)
    return _put(call, source, x, offset, dims)


def _diagonal_backward(
    call: LocalCall, grad: fx.Node, shape: Any, offset: int, dim1: int, dim2: int
) -> fx.Node:
    dims = [dim % len(call.result_shape()) for dim in (dim1, dim2)]
    if not _is_split(call, dims):
        return call.same(grad, list(call.local_shape()), offset, dim1, dim2)
    return _put(call, grad, None, offset, dims)


def _diag_embed(
    call: LocalCall, x: fx.Node, offset: int = 0, dim1: int = -2, dim2: int = -1
) -> fx.Node:
    dims = [dim % len(call.result_shape()) for dim in (dim1, dim2)]
    if not _is_split(call, dims):
        return call.same(x, offset, dim1, dim2)
    return _put(call, x, None, offset, dims)


LOCAL: dict[Any, Localizer] = {
    aten.diagonal.default: _diagonal,
    aten.diagonal_copy.default: _diagonal,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.diagonal_backward.default: _diagonal_backward,
    aten.diag_embed.default: _diag_embed,
}
