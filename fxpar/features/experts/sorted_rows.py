"""local: keeps rows sorted between products by expert, and sends rows by exact numbers.

In: the local graph of one rank, with its steps. Out: the same graph, changed in place.

``keep_sorted``: the local form of a product by expert sorts its rows, multiplies and
puts them back (``local_experts``); rows would leave an order and enter the same order
again. What is computed between two such products row by row is computed in order, and
one sort serves all products by the same experts. Never: changes a row, or keeps an
order across a collective.

``exact_exchanges``, after it: where rows are put in slots (``fxpar::dispatch_slots``
with ``exact``) and an all-to-all brings the slots to the ranks of their experts,
``fxpar::send_rows`` brings the rows, and ``fxpar::return_rows`` brings them back. Slots
of experts' numbers, which say how many rows come, are exchanged as they are. Never:
changes a value. Slots with a reader that is not known here are exchanged as slots.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import PART, STAGE, Builder, shape_of
from fxpar.graph.collective_nodes import all_to_all, axes_of
from fxpar.graph.custom_ops import group_name
from fxpar.graph.exact_ops import NONE, RETURN, SEND
from fxpar.passes.row_wise import RowCall, call_of, row_call
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.rank_ints import PLACES

aten = torch.ops.aten
ours = torch.ops.fxpar
prims = torch.ops.prims

_PRODUCTS = ("fxpar.grouped_mm.default", "fxpar.grouped_outer.default")


def keep_sorted(graph: fx.Graph, build: Builder) -> None:
    """Rewrite a local graph in place."""
    if not any(str(node.target) in _PRODUCTS for node in graph.nodes):
        return
    _join_equal_calls(graph)
    orders: dict[fx.Node, _InOrder] = {}
    for node in list(graph.nodes):
        order = order_of(node)
        if order is None:
            continue
        rows = orders.setdefault(order, _InOrder(build, order))
        if rows.can_be_in_order(node.args[0], 0) or rows.has(node.args[0]):
            with build.before(node):
                build.replace(node, rows.of(node.args[0], 0))
        else:
            rows.keep(node)
    graph.eliminate_dead_code()


def order_of(node: fx.Node) -> fx.Node | None:
    """Return the order in which a node reads rows; None if it does not sort."""
    if node.target is not aten.index.Tensor or len(node.args[1]) != 1:
        return None
    (order,) = node.args[1]
    source, i = call_of(_all_rows_order(order))
    return order if source.target is aten.sort.stable and i == 1 else None


def _all_rows_order(order: fx.Node) -> Any:
    """Return the order of all rows, of which ``order`` may be the first part, if there
    is room for no more."""
    cut = order.target is aten.slice.Tensor and order.args[1:3] == (0, 0)
    return order.args[0] if cut else order


def _put_back(node: fx.Node, order: fx.Node) -> Any:
    """Return the rows in order that a node puts back in place; None for any other
    node."""
    whole = _all_rows_order(order)
    read: Any = node.args[1] if whole is not order and len(node.args) == 3 else node
    if node.target is not (aten.where.self if read is not node else aten.index.Tensor):
        return None
    if read.target is not aten.index.Tensor or len(read.args[1]) != 1:
        return None
    (place,) = read.args[1]
    if read is not node and place.target is aten.clamp.default:
        place = place.args[0]
    return read.args[0] if sorted_order(place) is whole else None


def sorted_order(place: Any) -> Any:
    """Return the order in which a value says the place of each row; None for other
    values."""
    if place.target is not aten.index_put.default or len(place.args) != 3:
        return None
    rows, (order, *others), numbers = place.args
    fills = op_facts_of(rows.target).constant and shape_of(rows) == shape_of(place)
    counts = numbers.target is prims.iota.default and shape_of(numbers) == shape_of(
        rows
    )
    return order if fills and counts and not others else None


class _InOrder:
    """Holds values with their rows in one order."""

    def __init__(self, build: Builder, order: fx.Node) -> None:
        self.build, self.order = build, order
        # How many rows there is room for; None: all.
        self.rows = None if _all_rows_order(order) is order else shape_of(order)[0]
        self._can_be: dict[tuple[fx.Node, int], bool] = {}
        self._in_order: dict[tuple[fx.Node, int], fx.Node] = {}

    def has(self, node: fx.Node) -> bool:
        """Return whether a value was read in order before."""
        return (node, 0) in self._in_order

    def keep(self, read: fx.Node) -> None:
        """Note a node that reads a value in order."""
        self._in_order[read.args[0], 0] = read

    def can_be_in_order(self, node: fx.Node, dim: int) -> bool:
        """Return whether a value is computed, row by row, from rows that were put back,
        and can be computed in order."""
        key = node, dim
        if key not in self._can_be:
            self._can_be[key] = False
            self._can_be[key] = self._can_compute_in_order(node, dim)
        return self._can_be[key]

    def _can_compute_in_order(self, node: fx.Node, dim: int) -> bool:
        if dim == 0 and _put_back(node, self.order) is not None:
            return True
        call = _row_call_of(node, dim)
        operands = {} if call is None else call.row_dims
        ordered = {x: d for x, d in operands.items() if self.can_be_in_order(x, d)}
        return bool(ordered) and all(
            d == 0 for x, d in operands.items() if x not in ordered
        )

    def of(self, node: fx.Node, dim: int) -> fx.Node:
        """Return a value with its rows in order."""
        key = node, dim
        if key not in self._in_order:
            self._in_order[key] = self._of(node, dim)
        return self._in_order[key]

    def _of(self, node: fx.Node, dim: int) -> fx.Node:
        rows = _put_back(node, self.order) if dim == 0 else None
        if rows is not None:
            return rows
        if not self.can_be_in_order(node, dim):
            return self.build.call(aten.index.Tensor, node, [self.order])
        source, i = call_of(node)
        key = source, -1  # one call for all its results
        if key not in self._in_order:
            call = _row_call_of(node, dim)
            assert call is not None
            in_order = {x: self.of(x, d) for x, d in call.row_dims.items()}
            self._in_order[key] = call.with_operands(self.build, in_order, self.rows)
        result = self._in_order[key]
        return (
            result if source is node else self.build.call(operator.getitem, result, i)
        )


def _row_call_of(node: fx.Node, dim: int) -> RowCall | None:
    """Return the call that computes a value row by row; None if none does."""
    source, i = call_of(node)
    value = source.meta.get("val")
    tensors = value if isinstance(value, (list, tuple)) else [value]
    if source.op != "call_function" or not all(
        isinstance(x, torch.Tensor) for x in tensors
    ):
        return None
    return row_call(source, dim, i)


def _join_equal_calls(graph: fx.Graph) -> None:
    """Replace calls that give the same whole numbers by one node: sorts, and their
    inputs. Calls of two stages or two parts of a batch stay separate."""
    first_of: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.is_impure() or not _has_integers(node):
            continue
        home = (node.meta.get(STAGE), node.meta.get(PART))
        key = (node.target, _frozen(node.args), _frozen(node.kwargs), home)
        first = first_of.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _has_integers(node: fx.Node) -> bool:
    """Return whether a call gives whole numbers, and the same ones whenever it is
    made."""
    facts, value = op_facts_of(node.target), node.meta.get("val")
    if facts.random or facts.draws:
        return False
    if node.target in PLACES:
        return True
    values = value if isinstance(value, (list, tuple)) else [value]
    return all(
        isinstance(x, torch.Tensor) and not x.dtype.is_floating_point for x in values
    )


def _frozen(arg: Any) -> Hashable:
    """Return an argument as a key in which numbers of different types differ."""
    if isinstance(arg, (list, tuple)):
        return tuple(map(_frozen, arg))
    if isinstance(arg, dict):
        return tuple((name, _frozen(x)) for name, x in sorted(arg.items()))
    return arg if isinstance(arg, fx.Node) else (type(arg), str(arg))


# Exact exchanges


def exact_exchanges(graph: fx.Graph, build: Builder) -> None:
    """Rewrite a local graph in place."""
    slots = ours.dispatch_slots.default
    for node in graph.find_nodes(op="call_function", target=slots):
        if not node.args[-1]:
            continue
        exchange = _exchange_of(node, build)
        if exchange is None:
            continue
        for read in graph.find_nodes(
            op="call_function", target=ours.dispatch_rows.default
        ):
            if read.args[1] is exchange.slot_rows and read.args[3] != NONE:
                exchange.send(read)
        for read in graph.find_nodes(
            op="call_function", target=ours.combine_rows.default
        ):
            if read.args[1] in exchange.slots:
                exchange.give_back(read)
    graph.eliminate_dead_code()


def _exchange_of(slots: fx.Node, build: Builder) -> _Exchange | None:
    """Return how the rows of some slots are exchanged; None if no all-to-all over all
    groups exchanges them, or if not every row has a slot."""
    _, experts, groups, sources, room, _ = slots.args
    items = {user.args[1]: user for user in slots.users}
    rows = shape_of(slots.args[0])[0]
    if 0 not in items or rows > sources * room:
        return None
    for read in items[0].users:
        if read.target is ours.dispatch_rows.default and read.args[3] == NONE:
            for step in _steps(read, 1, 0):
                axes = axes_of(step)
                if build.mesh.count(axes) == groups:
                    slots_of = [items[1]] if 1 in items else []
                    return _Exchange(build, items[0], slots_of, step, axes, rows)
    return None


def _steps(node: fx.Node, source: int, target: int) -> Iterator[fx.Node]:
    """Yield the even all-to-alls of a value between two dims."""
    for user in node.users:
        dims = user.args[1:3]
        if user.target is all_to_all and dims == (source, target) and not user.kwargs:
            yield user


@dataclass
class _Exchange:
    """Holds the rows of one rank and the group that it exchanges them with."""

    # Adds nodes.
    build: Builder
    # Which row is in each slot.
    slot_rows: fx.Node
    # In which slot each row is.
    slots: list[fx.Node]
    # The expert of each slot that is received.
    ids: fx.Node
    # The axes of the group.
    axes: tuple[str, ...]
    # How many rows a rank has.
    count: int
    # The order of received rows -> where in that order each of them is.
    _in_order: dict[fx.Node, fx.Node] = field(default_factory=dict)

    @property
    def group(self) -> str:
        return group_name(self.build.mesh, self.axes)

    @cached_property
    def places(self) -> list[fx.Node]:
        """Return the four results of ``fxpar::exact_places``: rows, how many are sent,
        how many are received, slots."""
        call, args = self.build.call, (self.slot_rows, self.ids, self.count)
        with self.build.before(self.ids.next):
            result = call(ours.exact_places.default, *args)
            return [call(operator.getitem, result, i) for i in range(4)]

    def in_order(self, place: fx.Node) -> fx.Node:
        """Return where each received row is in an order in which slot i is at
        ``place[i]``."""
        if place not in self._in_order:
            slots = self.places[3]
            with self.build.before(max(place, slots).next):
                call = self.build.call
                self._in_order[place] = call(aten.index.Tensor, place, [slots])
        return self._in_order[place]

    def send(self, read: fx.Node) -> None:
        """Send the rows that ``read`` puts in slots by exact numbers."""
        x, _, copies, fill = read.args
        if fill:
            return
        for step in list(_steps(read, 1, 0)):
            if axes_of(step) != self.axes:
                continue
            for rows in list(_as_rows(step)):
                for user in list(rows.users):
                    place = place_of(order_of(user))
                    if place is not None and user.args[0] is rows:
                        self._send(user, x, copies, self.in_order(place))
                if rows.users:
                    self._send(rows, x, copies, self.places[3])

    def _send(self, node: fx.Node, x: Any, copies: Any, places: fx.Node) -> None:
        rows, sent, got, _ = self.places
        with self.build.before(node):
            args = x, rows, places, sent, got, copies, self.group
            self.build.replace(node, self.build.call(SEND, *args))

    def give_back(self, read: fx.Node) -> None:
        """Bring the rows that ``read`` takes from slots back by exact numbers."""
        step: Any = read.args[0]
        if step not in _steps(step.args[0], 0, 1) or axes_of(step) != self.axes:
            return
        y = _rows_of(step.args[0])
        if y is None:
            return
        rows, sent, got, places = self.places
        place = y.args[1][0] if y.target is aten.index.Tensor else None
        if place is not None and sorted_order(place) is not None:
            y, places = y.args[0], self.in_order(place)
        with self.build.before(read):
            args = y, rows, places, sent, got, self.group
            self.build.replace(read, self.build.call(RETURN, *args))


def _as_rows(step: fx.Node) -> Iterator[fx.Node]:
    """Yield the views of received slots as rows, with one dim for all of them."""
    groups, sources, room, *features = shape_of(step)
    for user in step.users:
        rows = (groups * sources * room, *features)
        if op_facts_of(user.target).reshapes and shape_of(user) == rows:
            yield user


def _rows_of(slots: Any) -> Any:
    """Return the rows that slots are a view of; None if they are no view."""
    groups, sources, room, *features = shape_of(slots)
    if not op_facts_of(slots.target).reshapes:
        return None
    rows = slots.args[0]
    return rows if shape_of(rows) == (groups * sources * room, *features) else None


def place_of(order: fx.Node | None) -> fx.Node | None:
    """Return the place of each row in an order; None if the graph does not have it."""
    for user in order.users if order is not None else ():
        if sorted_order(user) is order:
            return user
    return None
