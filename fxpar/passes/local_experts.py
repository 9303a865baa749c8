"""Local forms of products by expert: rows are sorted by expert, then multiplied.

A rank has some rows and some experts. Its key of a row is the expert counted from its
own first; of a row whose expert another rank has, one more than it has experts: such
rows come last, where products give zero. ``keep_sorted`` then leaves rows in that order
between one product and the next.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.passes import expert_ops as _expert_ops  # noqa: F401  (registers ops)
from fxpar.passes.builder import value_of
from fxpar.passes.local_call import LocalCall, Localizer

aten = torch.ops.aten


@dataclass(frozen=True)
class _Sorted:
    """How rows are sorted by expert on one rank."""

    call: LocalCall
    # Where the i-th row in order lies, and where in order each row is.
    order: fx.Node
    place: fx.Node
    # Behind the last row of each expert, in order.
    ends: fx.Node
    # How many rows are its own if all experts have alike many.
    rows: Any

    def take(self, x: fx.Node) -> fx.Node:
        """Rows in order."""
        return self.call.build.call(aten.index.Tensor, x, [self.order])

    def put_back(self, x: fx.Node) -> fx.Node:
        """Rows that lie in order, where they lay before."""
        return self.call.build.call(aten.index.Tensor, x, [self.place])


def _sorted(
    call: LocalCall, ids: fx.Node, of_rows: int, of_experts: int, groups: int
) -> _Sorted:
    """``of_rows``, ``of_experts``: the tensors of the call, operands first, whose dim 0
    is rows, and experts."""
    build = call.build
    specs, device = (*call.operands, *call.results), ids.meta["val"].device
    experts, axes = call.shapes[of_experts][0], specs[of_experts].dims[0]
    per = experts // groups
    held = groups // build.mesh.count(axes)
    rows = build.own_size(call.shapes[of_rows][0], specs[of_rows].dims[0])
    own = build.call(aten.sub.Tensor, ids, build.own_start(experts, axes))
    group = build.call(aten.div.Tensor_mode, own, per, rounding_mode="floor")
    each = build.call(aten.unsqueeze.default, build.iota(held, device), 1)
    mine = build.call(aten.eq.Tensor, group, each)
    key = build.call(aten.reshape.default, call.where(mine, own, per * held), [rows])
    sort = build.call(aten.sort.stable, key, stable=True, dim=0, descending=False)
    ordered, order = (build.call(operator.getitem, sort, i) for i in (0, 1))
    counted = build.iota(rows, device)
    place = build.call(aten.index_put.default, order, [order], counted)
    wanted = build.iota(per * held, device)
    ends = build.call(
        aten.searchsorted.Tensor, ordered, wanted, right=True, out_int32=True
    )
    share = value_of(rows) // held * per * held // experts
    return _Sorted(call, order, place, ends, share)


def _expert_mm(
    call: LocalCall, x: fx.Node, weight: fx.Node, ids: fx.Node, groups: int
) -> fx.Node:
    by = _sorted(call, ids, 0, 1, groups)
    product = call.build.call(
        torch.ops.fxpar.grouped_mm.default, by.take(x), weight, by.ends, by.rows
    )
    return by.put_back(product)


def _expert_outer(
    call: LocalCall, x: fx.Node, y: fx.Node, ids: fx.Node, experts: int, groups: int
) -> fx.Node:
    by = _sorted(call, ids, 0, 3, groups)
    return call.build.call(
        torch.ops.fxpar.grouped_outer.default, by.take(x), by.take(y), by.ends, by.rows
    )


LOCAL: dict[Any, Localizer] = {
    "fxpar::expert_mm": _expert_mm,
    "fxpar::expert_outer": _expert_outer,
}
