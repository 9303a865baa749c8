"""Local forms of products by expert: rows are sorted by expert, then multiplied.

A rank has some rows and some experts. Its key of a row is the expert counted from its
own first; of a row whose expert another rank has, one more than it has experts: such
rows come last, where products give zero. ``keep_sorted`` then leaves rows in that order
between one product and the next.

Where a rank has all experts, its rows may still be cut in parts of a batch: products
stay as they are until that is done, and ``sort_by_expert`` then sorts each part's rows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.passes.builder import Builder, shape_of, value_of
from fxpar.passes.collective_nodes import all_reduce, step
from fxpar.passes.experts import expert_ops as _expert_ops  # noqa: F401  (registers ops)
from fxpar.passes.local.local_call import LocalCall, Localizer
from fxpar.sharding.factors import Axes
from fxpar.sharding.program import user_line
from fxpar.sharding.rules import rule_of
from fxpar.sharding.spec import Spec

aten = torch.ops.aten

# Which tensor of a product says the expert of each row.
_IDS = 2


@dataclass(frozen=True)
class _Sorted:
    """How rows are sorted by expert on one rank."""

    call: LocalCall
    # Where the i-th row in order lies, of those that there is room for; and where in
    # order each row is.
    order: fx.Node
    place: fx.Node
    # Behind the last row of each expert, in order.
    ends: fx.Node
    # How many rows are its own if all experts have alike many.
    share: Any
    # Rows that there is room for; None: for all.
    room: int | None

    def take(self, x: fx.Node) -> fx.Node:
        """Rows in order."""
        return self.call.build.call(aten.index.Tensor, x, [self.order])

    def put_back(self, x: fx.Node) -> fx.Node:
        """Rows that lie in order, where they lay before; zero where there is none."""
        call = self.call.build.call
        if self.room is None:
            return call(aten.index.Tensor, x, [self.place])
        place = call(aten.clamp.default, self.place, None, self.room - 1)
        has_room = call(aten.lt.Scalar, self.place, self.room)
        has_room = call(aten.unsqueeze.default, has_room, 1)
        return self.call.where(has_room, call(aten.index.Tensor, x, [place]), 0)


def _sorted(
    call: LocalCall,
    ids: fx.Node,
    of_rows: int,
    of_experts: int,
    groups: int,
    room: float,
) -> _Sorted:
    """``of_rows``, ``of_experts``: the tensors of the call, operands first, whose dim 0
    is rows, and experts."""
    build = call.build
    specs, device = (*call.operands, *call.results), ids.meta["val"].device
    experts, axes = call.shapes[of_experts][0], specs[of_experts].dims[0]
    per = experts // groups
    own_groups = groups // build.mesh.count(axes)
    rows = build.own_size(call.shapes[of_rows][0], specs[of_rows].dims[0])
    own = build.call(aten.sub.Tensor, ids, build.own_start(experts, axes))
    group = build.call(aten.div.Tensor_mode, own, per, rounding_mode="floor")
    group_numbers = build.call(
        aten.unsqueeze.default, build.iota(own_groups, device), 1
    )
    by_row = groups > 1 and call.shapes[_IDS][0] == call.shapes[of_rows][0]
    if by_row:
        own, group = (
            build.call(aten.reshape.default, x, [own_groups, rows // own_groups])
            for x in (own, group)
        )
    is_own = build.call(aten.eq.Tensor, group, group_numbers)
    key = build.call(
        aten.reshape.default, call.where(is_own, own, per * own_groups), [rows]
    )
    sort = build.call(aten.sort.stable, key, stable=True, dim=0, descending=False)
    ordered, order = (build.call(operator.getitem, sort, i) for i in (0, 1))
    row_numbers = build.iota(rows, device)
    place = build.call(aten.index_put.default, order, [order], row_numbers)
    expert_numbers = build.iota(per * own_groups, device)
    ends = build.call(
        aten.searchsorted.Tensor, ordered, expert_numbers, right=True, out_int32=True
    )
    if by_row:
        share = int(value_of(rows) / room) if room else value_of(rows)
        return _Sorted(call, order, place, ends, share, None)
    share = value_of(rows) // own_groups * per * own_groups // experts
    most = math.ceil(room * share) if room and own_groups == 1 < groups else 0
    if not 0 < most < value_of(rows):
        return _Sorted(call, order, place, ends, share, None)
    order = build.call(aten.slice.Tensor, order, 0, 0, most)
    axes = call.operands[_IDS].dims[0]
    ends = _within(call, ends, ids, groups, per, most, axes)
    return _Sorted(call, order, place, ends, share, most)


def _within(
    call: LocalCall,
    ends: fx.Node,
    ids: fx.Node,
    groups: int,
    per: int,
    room: int,
    axes: Axes,
) -> fx.Node:
    """The ends, if no group of experts has more rows than there is room for. ``axes``
    split rows: their ranks tell each other how many there are, so that all of them find
    the same, and none waits for one that has raised."""
    build = call.build
    group = build.call(aten.div.Tensor_mode, ids, per, rounding_mode="floor")
    group_numbers = build.iota(groups, ids.meta["val"].device)
    group_numbers = build.call(aten.unsqueeze.default, group_numbers, 1)
    chosen = build.call(aten.eq.Tensor, group, group_numbers)
    most = build.call(aten.amax.default, build.call(aten.sum.dim_IntList, chosen, [1]))
    if build.mesh.count(axes) > 1:
        most = step(build, all_reduce, most, "max", axes)
    where = user_line(call.node) or ""
    return build.call(torch.ops.fxpar.within.default, ends, most, room, where)


def _expert_mm(
    call: LocalCall, x: fx.Node, weight: fx.Node, ids: fx.Node, *options: Any
) -> fx.Node:
    """Each product sorts its rows."""
    sort, mm = _sorted(call, ids, 0, 1, *options), torch.ops.fxpar.grouped_mm.default
    inner = len(call.shapes[0])
    x, weight = _merged(call, x, 0, [1]), _merged(call, weight, 1, [1, inner])
    product = call.build.call(mm, sort.take(x), weight, sort.ends, sort.share)
    return _apart(call, sort.put_back(product))


def _expert_outer(
    call: LocalCall, x: fx.Node, y: fx.Node, ids: fx.Node, _: int, *options: Any
) -> fx.Node:
    outer = torch.ops.fxpar.grouped_outer.default
    sort = _sorted(call, ids, 0, 3, *options)
    x, y = _merged(call, x, 0, [1]), _merged(call, y, 1, [1])
    product = call.build.call(outer, sort.take(x), sort.take(y), sort.ends, sort.share)
    return _apart(call, product)


def _merged(
    call: LocalCall, x: fx.Node, operand: int, starts: Sequence[int]
) -> fx.Node:
    """An operand with the dims from each start to the next merged into one."""
    shape = call.operand_shape(operand)
    if len(shape) == len(starts) + 1:
        return x
    ends = (*starts[1:], len(shape))
    pairs = zip(starts, ends, strict=True)
    merged = [call.build.product(shape[a:b]) for a, b in pairs]
    return call.build.call(aten.reshape.default, x, [shape[0], *merged])


def _apart(call: LocalCall, product: fx.Node) -> fx.Node:
    """The result with all of its dims."""
    if len(product.meta["val"].shape) == len(call.result_shape()):
        return product
    return call.build.call(aten.reshape.default, product, [*call.local_shape()])


_SORTED: dict[Any, Localizer] = {
    torch.ops.fxpar.expert_mm.default: _expert_mm,
    torch.ops.fxpar.expert_outer.default: _expert_outer,
}


def _later(call: LocalCall, *args: Any) -> fx.Node:
    """The product itself, where a rank has all experts and so many rows; else one that
    sorts them."""
    rows = call.build.own_size(call.shapes[0][0], call.operands[0].dims[0])
    *_, groups, _ = args
    if groups == 1 and isinstance(rows, int):
        return call.same(*args)
    return _SORTED[call.node.target](call, *args)


def sort_by_expert(graph: fx.Graph, build: Builder) -> None:
    """Let the products that are left sort their rows, in place."""
    for node in list(graph.nodes):
        if node.target not in _SORTED:
            continue
        tensors = [*node.args[:3], node]
        specs = [Spec.whole(len(shape_of(x))) for x in tensors]
        shapes = tuple(map(shape_of, tensors))
        rule = rule_of(node.target, value_of(node.args), {}, node.meta["val"])
        assert rule is not None
        with build.before(node):
            operands, results = tuple(specs[:-1]), tuple(specs[-1:])
            call = LocalCall(build, node, rule, operands, results, shapes)
            product = _SORTED[node.target](call, *node.args)
        build.replace(node, product)


LOCAL: dict[Any, Localizer] = {
    "fxpar::expert_mm": _later,
    "fxpar::expert_outer": _later,
}
