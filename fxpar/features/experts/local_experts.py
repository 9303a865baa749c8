"""Makes the local forms of products by expert: rows are sorted by expert, then
multiplied.

In: calls of ``expert_ops`` with specs, then the local graph. Out: their local nodes.
Never: moves rows between ranks but by ``fxpar::exchange_slots`` and back. A rank has
some rows and some experts, which are counted from its own first. Its rows may still be
cut in parts of a batch: products take them in place until that is done, and
``sort_by_expert`` then sorts each part's rows. A row whose expert another rank has
comes last, where products give zero. ``sorted_rows`` then leaves rows in that order
between one product and the next.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.features.experts import expert_ops as _expert_ops  # noqa: F401  (registers ops)
from fxpar.graph.builder import Builder, shape_of, value_of
from fxpar.graph.collective_nodes import all_reduce, all_to_all, step
from fxpar.graph.exact_ops import NONE
from fxpar.sharding.factors import Axes
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.ops import LOCAL, rule_of
from fxpar.sharding.ops.local_call import LocalCall, Localizer
from fxpar.sharding.program import user_line
from fxpar.sharding.propagate.conventions import TIME
from fxpar.sharding.spec import Spec

aten = torch.ops.aten

# Which tensor of a product gives the expert of each row.
_IDS = 2
OWN_MM = torch.ops.fxpar.own_expert_mm.default
WITHIN = torch.ops.fxpar.within.default
OWN_OUTER = torch.ops.fxpar.own_expert_outer.default


@dataclass(frozen=True)
class _Sorted:
    """Holds how rows are sorted by expert on one rank."""

    # The product that needs them sorted.
    call: LocalCall
    # The row that is the i-th in order, for all i that there is room for.
    order: fx.Node
    # The place of each row in order.
    place: fx.Node
    # Where the rows of each expert end, in order.
    ends: fx.Node
    # How many rows belong to the rank if all experts have equally many.
    share: Any
    # Rows that there is room for; None: all.
    room: int | None

    def take(self, x: fx.Node) -> fx.Node:
        """Return rows in order."""
        return self.call.build.call(aten.index.Tensor, x, [self.order])

    def put_back(self, x: fx.Node) -> fx.Node:
        """Return rows in order put back in place; zero where there is no room for
        one."""
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
    experts: int,
    spread: float,
    room: float,
    axes: str,
) -> _Sorted:
    """Return how a product's rows are sorted. ``experts``: how many a rank has;
    ``spread``, ``room`` and ``axes``: as in ``fxpar::own_expert_mm``."""
    build, device = call.build, ids.meta["val"].device
    rows = call.operand_shape(0)[0]
    is_own = build.call(
        aten.bitwise_and.Tensor,
        build.call(aten.ge.Scalar, ids, 0),
        build.call(aten.lt.Scalar, ids, experts),
    )
    sort = build.call(
        aten.sort.stable,
        call.where(is_own, ids, experts),
        stable=True,
        dim=0,
        descending=False,
    )
    ordered, order = (build.call(operator.getitem, sort, i) for i in (0, 1))
    # Not over the order itself: Inductor (2.13) writes over what it reads as an index.
    zeros = build.call(aten.full.default, [rows], 0, dtype=torch.int64, device=device)
    place = build.call(aten.index_put.default, zeros, [order], build.iota(rows, device))
    expert_numbers = build.iota(experts, device)
    ends = build.call(
        aten.searchsorted.Tensor, ordered, expert_numbers, right=True, out_int32=True
    )
    share = value_of(rows) if spread == 1 else int(value_of(rows) / spread)
    most = math.ceil(room * share) if room else 0
    if not 0 < most < value_of(rows):
        return _Sorted(call, order, place, ends, share, None)
    order = build.call(aten.slice.Tensor, order, 0, 0, most)
    ends = _within(call, ends, ids, int(spread), experts, most, axes)
    return _Sorted(call, order, place, ends, share, most)


def _within(
    call: LocalCall,
    ends: fx.Node,
    ids: fx.Node,
    groups: int,
    per: int,
    room: int,
    axes: str,
) -> fx.Node:
    """Return the ends, checked that no group of experts has more rows than there is
    room for; ``axes`` split rows. Groups are counted from a rank's own, around."""
    build = call.build
    group, group_numbers = _groups(build, ids, per, groups)
    group = build.call(aten.remainder.Scalar, group, groups)
    chosen = build.call(aten.eq.Tensor, group, group_numbers)
    most = build.call(aten.amax.default, build.call(aten.sum.dim_IntList, chosen, [1]))
    where = user_line(call.node) or ""
    return _within_all(build, ends, most, room, where, axes)


def _groups(
    build: Builder, ids: fx.Node, per: int, groups: int
) -> tuple[fx.Node, fx.Node]:
    """Return the group, of ``per`` experts, of each row, and [groups, 1]: their
    numbers."""
    group = build.call(aten.div.Tensor_mode, ids, per, rounding_mode="floor")
    numbers = build.iota(groups, ids.meta["val"].device)
    return group, build.call(aten.unsqueeze.default, numbers, 1)


def _within_all(
    build: Builder, x: fx.Node, most: fx.Node, room: int, where: str, axes: str
) -> fx.Node:
    """Return ``fxpar::within`` of the most rows that any rank along ``axes`` counts."""
    if axes:
        most = step(build, all_reduce, most, "max", tuple(axes.split("+")))
    return build.call(WITHIN, x, most, room, where)


def _sort_mm(
    call: LocalCall, x: fx.Node, weight: fx.Node, ids: fx.Node, *options: Any
) -> fx.Node:
    """Return the local product, which sorts its rows and puts its results back."""
    mm = torch.ops.fxpar.grouped_mm.default
    sort = _sorted(call, ids, shape_of(weight)[0], *options)
    inner = len(shape_of(x))
    x, weight = _merged(call, x, 0, [1]), _merged(call, weight, 1, [1, inner])
    product = call.build.call(mm, sort.take(x), weight, sort.ends, sort.share)
    return _reshaped(call, sort.put_back(product))


def _sort_outer(
    call: LocalCall, x: fx.Node, y: fx.Node, ids: fx.Node, experts: int, *options: Any
) -> fx.Node:
    """Return the local product in the layout that it is read in: the gradient of a
    weight ``[experts, n, k]`` is transposed, and an optimizer that reads it together
    with the weight is twice as slow."""
    build, outer = call.build, torch.ops.fxpar.grouped_outer.default
    sort = _sorted(call, ids, experts, *options)
    x, y = _merged(call, x, 0, [1]), _merged(call, y, 1, [1])
    left, right = sort.take(x), sort.take(y)
    if not _transposing(call.node):
        return _reshaped(call, build.call(outer, left, right, sort.ends, sort.share))
    product = build.call(outer, right, left, sort.ends, sort.share)
    return _reshaped(call, build.call(aten.permute.default, product, [0, 2, 1]))


def _transposing(product: fx.Node) -> list[fx.Node]:
    """Return the views through which alone a product ``[experts, k, n]`` is read
    transposed; none if it is not."""
    views, node = list[fx.Node](), product
    while len(node.users) == 1:
        node = next(iter(node.users))
        views.append(node)
        if node.target is aten.permute.default:
            return views if node.args[1] == [0, 2, 1] else []
        if not op_facts_of(node.target).reshapes:
            break
    return []


def _merged(
    call: LocalCall, x: fx.Node, operand: int, starts: Sequence[int]
) -> fx.Node:
    """Return an operand with the dims from each start to the next merged into one."""
    shape = call.operand_shape(operand)
    if len(shape) == len(starts) + 1:
        return x
    ends = (*starts[1:], len(shape))
    pairs = zip(starts, ends, strict=True)
    merged = [call.build.product(shape[a:b]) for a, b in pairs]
    return call.build.call(aten.reshape.default, x, [shape[0], *merged])


def _reshaped(call: LocalCall, product: fx.Node) -> fx.Node:
    """Return the result with all of its dims."""
    if len(product.meta["val"].shape) == len(call.result_shape()):
        return product
    return call.build.call(aten.reshape.default, product, [*call.local_shape()])


_SORTED: dict[Any, Localizer] = {OWN_MM: _sort_mm, OWN_OUTER: _sort_outer}


def _mm(
    call: LocalCall, x: fx.Node, weight: fx.Node, ids: fx.Node, *options: Any
) -> fx.Node:
    experts, axes = call.shapes[1][0], call.operands[1].dims[0]
    own = _own_ids(call, ids, experts, axes, *options)
    return _later(call, OWN_MM, x, weight, *own)


def _outer(
    call: LocalCall, x: fx.Node, y: fx.Node, ids: fx.Node, experts: int, *options: Any
) -> fx.Node:
    axes = call.results[0].dims[0]
    own, *own_options = _own_ids(call, ids, experts, axes, *options)
    per_rank = experts // call.build.mesh.count(axes)
    return _later(call, OWN_OUTER, x, y, own, per_rank, *own_options)


def _own_ids(
    call: LocalCall, ids: fx.Node, experts: int, axes: Axes, groups: int, room: float
) -> tuple[fx.Node, float, float, str]:
    """Return (to which of this rank's own experts each row belongs, the options
    ``spread``, ``room`` and ``axes`` of a product of such rows). ``axes`` split
    experts."""
    build, by_row = call.build, call.shapes[_IDS][0] == call.shapes[0][0]
    own_groups = groups // build.mesh.count(axes)
    start = build.own_start(experts, axes)
    if start != 0:
        ids = build.call(aten.sub.Tensor, ids, start)
    if own_groups > 1:
        ids = _once(call, ids, experts // groups, own_groups)
    if by_row and room:
        return ids, room, 0.0, ""
    if own_groups > 1 or groups == 1:
        return ids, float(groups), 0.0, ""
    return ids, float(groups), room, _telling(call, _IDS)


def _telling(call: LocalCall, operand: int) -> str:
    """Return the axes that split an operand, whose ranks exchange their counts; parts
    of a batch, which a rank has itself, are checked each by itself."""
    axes = (axis for dim in call.operands[operand].dims for axis in dim)
    count = call.build.mesh.count
    return "+".join(axis for axis in axes if axis != TIME and count((axis,)) > 1)


def _exchange_slots(call: LocalCall, slots: fx.Node, axes: str) -> fx.Node:
    """Return the slots for a rank's own experts, from every rank along the axes."""
    ranks = _ranks_along(call, axes)
    rows = step(call.build, all_to_all, slots, 1, 0, ranks) if ranks else slots
    return call.build.call(aten.reshape.default, rows, [*call.local_shape()])


def _return_slots(
    call: LocalCall, rows: fx.Node, groups: int, sources: int, axes: str
) -> fx.Node:
    ranks = _ranks_along(call, axes)
    count = call.build.mesh.count(ranks)
    room, *features = call.local_shape()[2:]
    shape = [groups // count, sources * count, room, *features]
    slots = call.build.call(aten.reshape.default, rows, shape)
    return step(call.build, all_to_all, slots, 0, 1, ranks) if ranks else slots


def _ranks_along(call: LocalCall, axes: str) -> Axes:
    """Return the axes that have several ranks."""
    sizes = call.build.mesh.sizes
    return tuple(axis for axis in axes.split("+") if sizes.get(axis, 1) > 1)


def _once(call: LocalCall, ids: fx.Node, per: int, groups: int) -> fx.Node:
    """Return the experts of rows that come once for each of a rank's ``groups`` of
    ``per`` experts: none where a row belongs to another group."""
    build, rows = call.build, call.operand_shape(0)[0]
    group, group_numbers = _groups(build, ids, per, groups)
    if call.shapes[_IDS][0] == call.shapes[0][0]:
        ids, group = (
            build.call(aten.reshape.default, x, [groups, rows // groups])
            for x in (ids, group)
        )
    is_own = build.call(aten.eq.Tensor, group, group_numbers)
    return build.call(aten.reshape.default, call.where(is_own, ids, NONE), [rows])


def _later(call: LocalCall, target: Any, *args: Any) -> fx.Node:
    """Return a product of a rank's own rows by its own experts, which sorts them only
    when it is known which of them are multiplied at a time; at once if their number is
    not known."""
    if isinstance(call.operand_shape(0)[0], int):
        return call.build.call(target, *args)
    return _SORTED[target](call, *args)


def sort_by_expert(graph: fx.Graph, build: Builder) -> None:
    """Let products of a rank's own rows sort them, and ranks exchange their counts, in
    place."""
    for node in list(graph.nodes):
        if node.target is WITHIN and len(node.args) == 5:
            with build.before(node):
                checked = _within_all(build, *node.args)
            build.replace(node, checked)
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
        views = _transposing(node) if node.target is OWN_OUTER else []
        build.replace(node, product)
        for view in views:  # their strides are those of the product now
            target: Any = view.target
            with build.fake_mode:
                view.meta["val"] = target(*value_of(view.args))


LOCAL.update(
    {
        "fxpar::expert_mm": _mm,
        "fxpar::expert_outer": _outer,
        "fxpar::within": lambda call, *args: call.same(
            *args[:4], *(args[4:] or [_telling(call, 1)])
        ),
        "fxpar::exchange_slots": _exchange_slots,
        "fxpar::return_slots": _return_slots,
    }
)
