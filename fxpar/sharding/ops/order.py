"""Splits ops that depend on the order of rows along a dim: scans, and choices of some
rows.

They may be split along that dim too: each rank scans its own rows, or chooses among
them, and ranks gather a summary of each shard (``Rule.gathered``): the total of a scan,
or the candidates of a choice with their places. Then each adds the totals of the shards
before its own, or chooses among all candidates. Ops that cannot be combined this way
(sorts, medians, choices of half of the rows) need the dim whole.
In: calls of these ops. Out: their rules and local forms.
Never: gathers a whole dim that may be split.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.sharding.factors import LINEAR, Axes, Gathered, Passage, Rule
from fxpar.sharding.op_table import at, keeping, make, rows, words_of
from fxpar.sharding.ops.local_call import LocalCall, is_within, rows_at
from fxpar.sharding.ops.reads import gathered
from fxpar.sharding.ops.reduction import filled, least, most, over

aten = torch.ops.aten

# Bytes of an index.
_INDEX = 8


def scan(x: torch.Tensor, dim: int = -1, *_: Any, **__: Any) -> Rule:
    """Return the rule of ops called as ``(x, dim, ...)`` whose row i depends on rows up
    to i."""
    rule = keeping(x)
    return rule if x.ndim == 0 else _gathering(rule, at(dim, x.ndim), 1, (0, 0))


def _gathering(rule: Rule, dim: int, rows: int, *ends: tuple[int, int]) -> Rule:
    """Return the rule where ranks gather rows of a dim of each shard. ``ends``:
    (operand, bytes of an element or 0 for the operand's own) of each gather."""
    (factor, *_) = (*rule.operands[0][dim], None)
    if factor is None:  # of one row
        return rule
    marks = tuple(Gathered(factor, i, rows, itemsize) for i, itemsize in ends)
    return replace(rule, gathered=marks)


def running_choice(x: torch.Tensor, dim: int) -> Rule:
    """Return the rule of ops called as ``(x, dim)`` that give the largest or smallest
    row up to each row, and its place."""
    rule = keeping(x, results=2)
    if x.ndim == 0:
        return rule
    rule = _gathering(rule, at(dim, x.ndim), 1, (0, 0), (0, _INDEX))
    return replace(rule, empty="never")


def choice(
    results: int,
    x: torch.Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    **_: Any,
) -> Rule:
    """Return the rule of ops called as ``(x, dim, keepdim=False)`` that give one row of
    each column, or its place, or both."""
    if dim is None or x.ndim == 0:
        return over(results=results)(x, dim, keepdim)
    return _top_rows(x, at(dim, x.ndim), 1 if keepdim else None, results)


def topk(x: torch.Tensor, k: int, dim: int = -1, *_: Any) -> Rule:
    return _of_candidates(x, k, dim, k)


def kthvalue(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Rule:
    return _of_candidates(x, k, dim, 1 if keepdim else None)


def _of_candidates(x: torch.Tensor, k: int, dim: int, count: int | None) -> Rule:
    """Return the rule of ``count`` rows of a dim, as for ``_top_rows``, with ``k``
    candidates of each shard: ranks have at least as many rows, or equal shards."""
    if x.ndim == 0:
        return make([[]], [[], []])
    dim = at(dim, x.ndim)
    rule = _top_rows(x, dim, count, 2, candidates=k)
    return replace(rule, least=tuple((f, k) for f in rule.operands[0][dim]))


def _top_rows(
    x: torch.Tensor, dim: int, count: int | None, results: int, candidates: int = 0
) -> Rule:
    """Return the rule of ``count`` rows of a dim, or None where the results lack the
    dim. Every rank chooses among the ``candidates`` of all shards, by default ``count``
    of each."""
    of_shard = candidates or count or 1
    # For half of the rows or more each of two ranks would send all its rows.
    all_rows = of_shard > 1 and 2 * of_shard >= x.shape[dim]
    words = words_of(x, {dim} if all_rows else ())
    mark = [f"~{words[dim]}"] if words[dim] != "_" and not all_rows else []
    result = [
        "_" if i == dim else word
        for i, word in enumerate(words)
        if i != dim or count is not None
    ]
    rule = make([words], [[*result, *mark]] * results)
    return rule if all_rows else _gathering(rule, dim, of_shard, (0, 0), (0, _INDEX))


def _scan_back(x: torch.Tensor, dim: int, kind: str) -> Rule:
    """Return the rule of a scan from the last row on; a sum may be of partial
    values."""
    passages = (Passage((0,), LINEAR),) if kind == "cumsum" else ()
    return replace(scan(x, dim), passages=passages)


def _choice_back(grad: torch.Tensor, places: torch.Tensor, dim: int) -> Rule:
    """Return the rule. Ranks gather the sum of a shard's rows that were chosen in
    earlier shards, and their place."""
    words = words_of(grad)
    rule = make([words, words], [words])
    rule = _gathering(rule, at(dim, grad.ndim), 1, (0, 0), (1, 0))
    return replace(rule, empty="never")


# Local forms

# An end beyond any dim.
_END = 2**63 - 1

# dtype -> a value that is never chosen among numbers of it.
Never = Callable[[torch.dtype], int | float | bool]


@dataclass(frozen=True)
class Scan:
    """Says how shards of a scan are combined."""

    # Returns the total of a shard, called as ``(call, x, dim)``; keeps the dim.
    total: Callable[[LocalCall, fx.Node, int], fx.Node]
    # The total of no rows.
    identity: float
    # Op that joins a row with the total of the shards before.
    join: Any


def _sum(call: LocalCall, x: fx.Node, dim: int) -> fx.Node:
    dtype = call.node.meta["val"].dtype
    return call.build.call(aten.sum.dim_IntList, x, [dim], True, dtype=dtype)


def _product(call: LocalCall, x: fx.Node, dim: int) -> fx.Node:
    dtype = call.node.meta["val"].dtype
    return call.build.call(aten.prod.dim_int, x, dim, True, dtype=dtype)


_SCANS = {
    aten.cumsum.default: Scan(_sum, 0.0, aten.add.Tensor),
    aten.cumprod.default: Scan(_product, 1.0, aten.mul.Tensor),
    aten.logcumsumexp.default: Scan(
        lambda call, x, dim: call.build.call(aten.logsumexp.default, x, [dim], True),
        -math.inf,
        aten.logaddexp.default,
    ),
}


def _axes(call: LocalCall, x: fx.Node, dim: int | None) -> tuple[int, Axes]:
    """Return (dim from the front, axes that split it)."""
    ndim = x.meta["val"].dim()
    if dim is None or ndim == 0:
        return 0, ()
    axes = call.operands[0].dims[dim % ndim]
    return dim % ndim, axes if call.build.mesh.count(axes) > 1 else ()


def _local_scan(call: LocalCall, x: fx.Node, dim: int, **settings: Any) -> fx.Node:
    own, (d, axes) = call.same(x, dim, **settings), _axes(call, x, dim)
    return _joined(call, x, own, d, axes, _SCANS[call.node.target], aten.lt.Scalar)


def _local_scan_back(call: LocalCall, x: fx.Node, dim: int, scan: str) -> fx.Node:
    """Return the scan from the last row to the first, joined with the shards after."""
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
    """Return the scan ``own`` of a rank's rows ``x``, joined with the totals of the
    shards that come first, by comparing shard numbers with this rank's."""
    if not axes:
        return own
    build = call.build
    totals = gathered(call, kind.total(call, x, d), d, axes)
    shards = build.mesh.count(axes)
    device, ndim = x.meta["val"].device, x.meta["val"].dim()
    number = build.call(aten.arange.default, shards, device=device)
    shape = [shards if i == d else 1 for i in range(ndim)]
    number = build.call(aten.view.default, number, shape)
    before = build.call(comes_first, number, build.offset(axes, 1))
    before = call.where(before, totals, kind.identity)
    return build.call(kind.join, own, kind.total(call, before, d))


# Rows, and their places.
Pair = tuple[fx.Node, fx.Node]


def _among(
    call: LocalCall, own: Pair, d: int, axes: Axes, choose: Callable[[fx.Node], Pair]
) -> Pair:
    """Return the rows that ``choose`` takes of all shards' candidates, and their
    places; ``own``: this shard's."""
    values, places = own
    start = call.build.own_start(call.shapes[0][d], axes)
    places = call.build.call(aten.add.Tensor, places, start)  # in the whole dim
    values, places = (gathered(call, x, d, axes) for x in (values, places))
    values, winner = choose(values)
    return values, call.build.call(aten.gather.default, places, d, winner)


def _results(call: LocalCall, node: fx.Node) -> Pair:
    values, places = (call.build.call(operator.getitem, node, i) for i in range(2))
    return values, places


def _squeezed(call: LocalCall, rows: Pair, d: int, keepdim: bool) -> Pair:
    if keepdim:
        return rows
    values, places = (call.build.call(aten.squeeze.dim, x, d) for x in rows)
    return values, places


def _local_row(
    never: Never,
    call: LocalCall,
    x: fx.Node,
    dim: int | None = None,
    keepdim: bool = False,
) -> Any:
    """Return the largest or smallest row and its place, or if that is the op's only
    result the place."""
    d, axes = _axes(call, x, dim)
    if not axes:
        return call.same(x, dim, keepdim)
    is_place = isinstance(call.node.meta["val"], torch.Tensor)

    def choose(x: fx.Node) -> Pair:
        chosen = call.same(x, d, True)
        if not is_place:
            return _results(call, chosen)
        return call.build.call(aten.gather.default, x, d, chosen), chosen

    own = choose(filled(call, x, [d], never(x.meta["val"].dtype)))
    rows = _squeezed(call, _among(call, own, d, axes, choose), d, keepdim)
    return rows[1] if is_place else rows


def _local_running(wins: Any, call: LocalCall, x: fx.Node, dim: int) -> Any:
    """Return the largest or smallest row up to each row, and its place: the last of
    equal rows, and the last NaN."""
    d, axes = _axes(call, x, dim)
    if not axes:
        return call.same(x, dim)
    build = call.build
    values, places = _results(call, call.same(x, d))
    last, its_place = (
        build.call(aten.slice.Tensor, n, d, -1, _END) for n in (values, places)
    )
    totals, total_places = _among(
        call, (last, its_place), d, axes, lambda x: _results(call, call.same(x, d))
    )
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


def _local_choice_back(
    call: LocalCall, grad: fx.Node, places: fx.Node, dim: int
) -> fx.Node:
    """Return the gradient. Rows of this shard that choose a row of an earlier shard are
    its first rows, and all choose the same row: ranks gather their sum and its place,
    and each adds the sums that belong to its rows."""
    build, (d, axes) = call.build, _axes(call, grad, dim)
    shape = call.operand_shape(0)
    zeros = call.full(shape, 0, grad)
    if not axes:
        return build.call(aten.scatter_add.default, zeros, d, places, grad)
    start = build.own_start(call.shapes[0][d], axes)
    before = call.where(build.call(aten.lt.Scalar, places, start), grad, 0)
    before = build.call(aten.sum.dim_IntList, before, [d], True)
    totals = gathered(call, before, d, axes)
    first = build.call(aten.slice.Tensor, places, d, 0, 1)
    first = gathered(call, first, d, axes)
    grad = build.call(aten.cat.default, [grad, totals], d)
    places = build.call(aten.cat.default, [places, first], d)
    places = build.call(aten.sub.Tensor, places, start)
    is_own = is_within(call, places, shape[d])
    places, grad = (call.where(is_own, x, 0) for x in (places, grad))
    return build.call(aten.scatter_add.default, zeros, d, places, grad)


def _local_topk(
    call: LocalCall, x: fx.Node, k: int, dim: int = -1, *settings: Any, **options: Any
) -> Any:
    d, axes = _axes(call, x, dim)
    if not axes:
        return call.same(x, k, dim, *settings, **options)
    rows = x.meta["val"].shape[d]

    def choose(values: fx.Node, k: int = k) -> Pair:
        return _results(call, call.same(values, k, d, *settings, **options))

    return _among(call, choose(x, min(k, rows)), d, axes, choose)


def _local_kthvalue(
    call: LocalCall, x: fx.Node, k: int, dim: int = -1, keepdim: bool = False
) -> Any:
    """Return the k-th smallest row, and its place: ranks gather their ``k`` smallest
    rows."""
    d, axes = _axes(call, x, dim)
    if not axes:
        return call.same(x, k, dim, keepdim)
    build, count = call.build, min(k, x.meta["val"].shape[d])
    smallest = build.call(aten.topk.default, x, count, d, False, True)

    def choose(values: fx.Node) -> Pair:
        return _results(call, call.same(values, k, d, True))

    rows = _among(call, _results(call, smallest), d, axes, choose)
    return _squeezed(call, rows, d, keepdim)


_PLACE, _ROW = partial(choice, 1), partial(choice, 2)

ROWS = {
    **rows("cumsum", scan, linear="0", local=_local_scan, rows=1),
    **rows("cumprod", scan, local=_local_scan, rows=1),
    **rows("logcumsumexp", scan, local=_local_scan),
    **rows("cummax", running_choice, local=partial(_local_running, aten.ge.Tensor)),
    **rows("cummin", running_choice, local=partial(_local_running, aten.le.Tensor)),
    **rows("argmax", _PLACE, local=partial(_local_row, least), places=0),
    **rows("argmin", _PLACE, local=partial(_local_row, most), places=0),
    **rows("max.dim", _ROW, local=partial(_local_row, least), places=1),
    **rows("min.dim", _ROW, local=partial(_local_row, most), places=1),
    **rows("topk", topk, local=_local_topk, places=1, facts="orders alone"),
    **rows("kthvalue", kthvalue, local=_local_kthvalue, places=1, facts="orders"),
    **rows("fxpar::scan_back", _scan_back, local=_local_scan_back, facts="replaced"),
    **rows(
        "fxpar::choice_back",
        _choice_back,
        linear="0",
        local=_local_choice_back,
        facts="replaced",
    ),
}
