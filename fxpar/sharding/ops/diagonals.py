"""Splits reading and writing of diagonals of matrices.

Rows or columns may be split. A rank has the elements of a diagonal that are in its own
rows and columns. Where a diagonal is read the rank gives those and zero elsewhere, so
the result is partial; where one is written it writes those.
In: calls of these ops. Out: their rules and local forms.
Never: exchanges rows.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpar.sharding.factors import Rule
from fxpar.sharding.op_table import at, make, rows, words_of
from fxpar.sharding.ops.local_call import LocalCall, part_of, rows_at, trailing
from fxpar.sharding.ops.views import Shape, moves

aten = torch.ops.aten


def diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Rule:
    """Return the rule: each rank has the elements in its own rows and columns, and zero
    elsewhere."""
    count = diagonal_rows(x.shape, offset, dim1, dim2)
    words, line = _diagonal_words(x.shape, count, dim1, dim2)
    if x.dtype == torch.bool:  # a sum over ranks has no meaning for them
        words = [w + "!" * (w not in ("_", *line)) for w in words]
    return make([words], [line])


def diagonal_rows(shape: Shape, offset: int, dim1: int, dim2: int) -> int:
    """Return how many elements a diagonal of a matrix has."""
    rows, columns = shape[dim1], shape[dim2]
    return max(0, min(rows + min(offset, 0), columns - max(offset, 0)))


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


def _starts(offset: int) -> tuple[int, int]:
    """Return (row, column) of the first element."""
    return max(-offset, 0), max(offset, 0)


def _local_diagonal(
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
    build, like = call.build, source.meta["val"]
    shape, spec, words = call.result_shape(), call.results[0], call.rule.results[0]
    dims = [dim % len(shape) for dim in (dim1, dim2)]
    if not any(spec.dims[d] for d in dims) or not call.shapes[1][-1]:
        return call.same(x, source, offset, dim1, dim2)
    along = call.rule.operands[1][-1]
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
        lead, count = 0, call.shapes[1][-1]
        place = build.call(aten.clamp.default, numbers[0], 0, count - 1)
        source = rows_at(call, source, like.dim() - 1, place)
    source = build.call(aten.unsqueeze.default, source, -1)
    ends = [dims[lead], dims[1 - lead]]
    order = [*(d for d in range(len(shape)) if d not in dims), *ends]
    places = [order.index(d) for d in range(len(shape))]
    source = build.call(aten.permute.default, source, places)
    return build.call(aten.where.self, hit, source, x)


ROWS = {
    **moves("diagonal", diagonal, local=_local_diagonal),
    **rows(
        "diagonal_scatter",
        diagonal_scatter,
        movement="0+1",
        local=_local_diagonal_scatter,
        facts="moves",
    ),
}
