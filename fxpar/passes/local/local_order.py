"""Local forms of scans, and of choices of rows, along a dim that is split.

A scan: each rank scans its rows, ranks gather the total of each shard, and what the
shards before this one come to is added. A choice: each rank chooses among its rows,
ranks gather the candidates with their places, and choose among these.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.graph import collective_nodes
from fxpar.passes.local.local_call import LocalCall, Localizer
from fxpar.passes.local.local_indexing import rows_at
from fxpar.passes.local.local_reductions import least, most
from fxpar.sharding.factors import Axes

aten = torch.ops.aten

# Beyond the end of any dim.
_END = 2**63 - 1

# A dtype -> what is not chosen among numbers of it.
Never = Callable[[torch.dtype], int | float | bool]


@dataclass(frozen=True)
class Scan:
    """How shards of a scan are put together."""

    # What a shard comes to, called as ``(x, dim)``; keeps the dim.
    total: Callable[[LocalCall, fx.Node, int], fx.Node]
    # What changes nothing.
    identity: float
    # Puts what shards before come to together with a row.
    join: Any


def _sum(call: LocalCall, x: fx.Node, dim: int) -> fx.Node:
    dtype = call.node.meta["val"].dtype
    return call.build.call(aten.sum.dim_IntList, x, [dim], True, dtype=dtype)


def _product(call: LocalCall, x: fx.Node, dim: int) -> fx.Node:
    dtype = call.node.meta["val"].dtype
    return call.build.call(aten.prod.dim_int, x, dim, True, dtype=dtype)


def _logsumexp(call: LocalCall, x: fx.Node, dim: int) -> fx.Node:
    return call.build.call(aten.logsumexp.default, x, [dim], True)


_SCANS = {
    aten.cumsum.default: Scan(_sum, 0.0, aten.add.Tensor),
    aten.cumprod.default: Scan(_product, 1.0, aten.mul.Tensor),
    aten.logcumsumexp.default: Scan(_logsumexp, -math.inf, aten.logaddexp.default),
}


def _axes(call: LocalCall, x: fx.Node, dim: int | None) -> tuple[int, Axes]:
    """(dim from the front, axes that split it)."""
    ndim = x.meta["val"].dim()
    if dim is None or ndim == 0:
        return 0, ()
    axes = call.operands[0].dims[dim % ndim]
    return dim % ndim, axes if call.build.mesh.count(axes) > 1 else ()


def _gather(call: LocalCall, x: fx.Node, dim: int, axes: Axes) -> fx.Node:
    """What all shards gave, in order."""
    split, shape = list(call.operands[0].dims), list(call.shapes[0])
    shape[dim] = call.build.mesh.count(axes) * x.meta["val"].shape[dim]
    before = tuple(split)
    split[dim] = ()
    cut = collective_nodes.Cut(tuple(shape), before, tuple(split), (dim,))
    step = collective_nodes.all_gather
    return collective_nodes.step(call.build, step, x, dim, axes, cut=cut)


def _scan(call: LocalCall, x: fx.Node, dim: int, **settings: Any) -> fx.Node:
    own, (d, axes) = call.same(x, dim, **settings), _axes(call, x, dim)
    return _joined(call, x, own, d, axes, _SCANS[call.node.target], aten.lt.Scalar)


def _scan_back(call: LocalCall, x: fx.Node, dim: int, scan: str) -> fx.Node:
    """From the last row to the first: what the shards behind come to is put to it."""
    build, target, (d, axes) = call.build, getattr(aten, scan), _axes(call, x, dim)
    turned = build.call(aten.flip.default, x, [d])
    own = build.call(target.default, turned, d)
    own = build.call(aten.flip.default, own, [d])
    return _joined(call, x, own, d, axes, _SCANS[target.default], aten.gt.Scalar)


def _joined(
    call: LocalCall,
    x: fx.Node,
    own: fx.Node,
    d: int,
    axes: Axes,
    kind: Scan,
    comes_first: Any,
) -> fx.Node:
    """The scan ``own`` of a rank's rows ``x`` with what all shards come to that come
    first: compared with this rank's by their number."""
    if not axes:
        return own
    build = call.build
    totals = _gather(call, kind.total(call, x, d), d, axes)
    shards = build.mesh.count(axes)
    device, ndim = x.meta["val"].device, x.meta["val"].dim()
    number = build.call(aten.arange.default, shards, device=device)
    shape = [shards if i == d else 1 for i in range(ndim)]
    number = build.call(aten.view.default, number, shape)
    before = build.call(comes_first, number, build.offset(axes, 1))
    before = call.where(before, totals, kind.identity)
    return build.call(kind.join, own, kind.total(call, before, d))


def _candidates(
    call: LocalCall, values: fx.Node, places: fx.Node, d: int, axes: Axes
) -> tuple[fx.Node, fx.Node]:
    """Those of all shards, with their places in the whole dim."""
    start = call.build.own_start(call.shapes[0][d], axes)
    places = call.build.call(aten.add.Tensor, places, start)
    return _gather(call, values, d, axes), _gather(call, places, d, axes)


def _results(call: LocalCall, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    values, places = (call.build.call(operator.getitem, node, i) for i in range(2))
    return values, places


def _squeezed(call: LocalCall, x: fx.Node, d: int, keepdim: bool) -> fx.Node:
    return x if keepdim else call.build.call(aten.squeeze.dim, x, d)


def _filled(call: LocalCall, x: fx.Node, d: int, never: Never) -> fx.Node:
    """With as many rows as the largest shard has, if some rank has none: of what never
    wins."""
    spec, shape, build = call.operands[0], call.shapes[0], call.build
    if not call.is_empty(spec, shape, d):
        return x
    room, own = spec.local_shape(build.mesh, shape), call.operand_shape(0)
    padding = [
        build.missing(room[d], own[d]) if i == d else 0 for i in range(len(shape))
    ]
    return build.pad(x, padding, never(x.meta["val"].dtype))


def _place(
    never: Never,
    call: LocalCall,
    x: fx.Node,
    dim: int | None = None,
    keepdim: bool = False,
) -> fx.Node:
    """Where the largest or smallest row is."""
    d, axes = _axes(call, x, dim)
    if not axes:
        return call.same(x, dim, keepdim)
    build = call.build
    x = _filled(call, x, d, never)
    own = call.same(x, d, True)
    values = build.call(aten.gather.default, x, d, own)
    values, places = _candidates(call, values, own, d, axes)
    winner = call.same(values, d, True)
    return _squeezed(
        call, build.call(aten.gather.default, places, d, winner), d, keepdim
    )


def _row(
    never: Never, call: LocalCall, x: fx.Node, dim: int, keepdim: bool = False
) -> Any:
    """The largest or smallest row, and where it is."""
    d, axes = _axes(call, x, dim)
    if not axes:
        return call.same(x, dim, keepdim)
    x = _filled(call, x, d, never)
    values, places = _results(call, call.same(x, d, True))
    values, places = _candidates(call, values, places, d, axes)
    values, winner = _results(call, call.same(values, d, True))
    places = call.build.call(aten.gather.default, places, d, winner)
    return tuple(_squeezed(call, node, d, keepdim) for node in (values, places))


def _running(wins: Any, call: LocalCall, x: fx.Node, dim: int) -> Any:
    """The largest or smallest row up to each, and where it is. Of equal rows it is the
    last one, and of rows that are no number too."""
    d, axes = _axes(call, x, dim)
    if not axes:
        return call.same(x, dim)
    build = call.build
    values, places = _results(call, call.same(x, d))
    last, its_place = (
        build.call(aten.slice.Tensor, n, d, -1, _END) for n in (values, places)
    )
    totals, total_places = _candidates(call, last, its_place, d, axes)
    totals, winner = _results(call, call.same(totals, d))
    total_places = build.call(aten.gather.default, total_places, d, winner)
    device, shard = x.meta["val"].device, build.offset(axes, 1)
    before = build.call(aten.full.default, [1], shard, dtype=torch.int64, device=device)
    is_first = build.call(aten.eq.Scalar, before, 0)
    before = build.call(aten.sub.Tensor, before, 1)
    before = build.call(aten.clamp.default, before, 0)
    total, total_places = (rows_at(call, n, d, before) for n in (totals, total_places))
    places = build.call(
        aten.add.Tensor, places, build.own_start(call.shapes[0][d], axes)
    )
    own = build.call(wins, values, total)
    for always in (build.call(aten.ne.Tensor, values, values), is_first):
        own = build.call(aten.bitwise_or.Tensor, own, always)
    pairs = (values, total), (places, total_places)
    return tuple(build.call(aten.where.self, own, *pair) for pair in pairs)


def _choice_back(call: LocalCall, grad: fx.Node, places: fx.Node, dim: int) -> fx.Node:
    """Rows that were chosen in a shard before are the first of this one, and all one
    row: ranks gather what they come to and its place, and add what is theirs."""
    build, (d, axes) = call.build, _axes(call, grad, dim)
    like, shape = grad.meta["val"], call.operand_shape(0)
    options = {"dtype": like.dtype, "device": like.device}
    zeros = build.call(aten.full.default, shape, 0, **options)
    if not axes:
        return build.call(aten.scatter_add.default, zeros, d, places, grad)
    start = build.own_start(call.shapes[0][d], axes)
    totals = _gather(call, _chosen_before(call, grad, places, start, d), d, axes)
    first = build.call(aten.slice.Tensor, places, d, 0, 1)
    first = _gather(call, first, d, axes)
    grad = build.call(aten.cat.default, [grad, totals], d)
    places = build.call(aten.cat.default, [places, first], d)
    places = build.call(aten.sub.Tensor, places, start)
    is_own = build.call(aten.ge.Scalar, places, 0)
    is_below = build.call(aten.lt.Scalar, places, shape[d])
    is_own = build.call(aten.bitwise_and.Tensor, is_own, is_below)
    places, grad = (call.where(is_own, x, 0) for x in (places, grad))
    return build.call(aten.scatter_add.default, zeros, d, places, grad)


def _chosen_before(
    call: LocalCall, grad: fx.Node, places: fx.Node, start: Any, d: int
) -> fx.Node:
    """The sum of the rows whose places lie before this shard."""
    before = call.build.call(aten.lt.Scalar, places, start)
    rows = call.where(before, grad, 0)
    return call.build.call(aten.sum.dim_IntList, rows, [d], True)


def _topk(
    call: LocalCall, x: fx.Node, k: int, dim: int = -1, *settings: Any, **options: Any
) -> Any:
    d, axes = _axes(call, x, dim)
    if not axes:
        return call.same(x, k, dim, *settings, **options)
    rows = x.meta["val"].shape[d]
    values, places = _results(call, call.same(x, min(k, rows), d, *settings, **options))
    values, places = _candidates(call, values, places, d, axes)
    values, winner = _results(call, call.same(values, k, d, *settings, **options))
    return values, call.build.call(aten.gather.default, places, d, winner)


def _kthvalue(
    call: LocalCall, x: fx.Node, k: int, dim: int = -1, keepdim: bool = False
) -> Any:
    """The row of which ``k`` are no larger, and where it is: ranks gather as many of
    their smallest rows."""
    d, axes = _axes(call, x, dim)
    if not axes:
        return call.same(x, k, dim, keepdim)
    build, count = call.build, min(k, x.meta["val"].shape[d])
    smallest = build.call(aten.topk.default, x, count, d, False, True)
    values, places = _candidates(call, *_results(call, smallest), d, axes)
    values, winner = _results(call, call.same(values, k, d, True))
    places = build.call(aten.gather.default, places, d, winner)
    return tuple(_squeezed(call, node, d, keepdim) for node in (values, places))


LOCAL: dict[Any, Localizer] = {
    **dict.fromkeys(_SCANS, _scan),
    "fxpar::scan_back": _scan_back,
    "fxpar::choice_back": _choice_back,
    aten.cummax.default: partial(_running, aten.ge.Tensor),
    aten.cummin.default: partial(_running, aten.le.Tensor),
    aten.argmax.default: partial(_place, least),
    aten.argmin.default: partial(_place, most),
    aten.max.dim: partial(_row, least),
    aten.min.dim: partial(_row, most),
    aten.topk.default: _topk,
    aten.kthvalue.default: _kthvalue,
}
