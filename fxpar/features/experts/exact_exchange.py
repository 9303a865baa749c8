"""local -> local: sends the rows in slots that ranks exchange by exact numbers.

In: the local graph of one rank, with its steps, after ``keep_sorted``. Out: the same
graph, changed in place: where rows are put in slots (``fxpar::dispatch_slots`` with
``exact``) and an all-to-all brings the slots to the ranks of their experts,
``fxpar::send_rows`` brings the rows, and ``fxpar::return_rows`` brings them back. Slots
of experts' numbers, which say how many rows come, are exchanged as they are. Never:
changes a value. Slots with a reader that is not known here are exchanged as slots.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar.features.experts.keep_sorted import order_of, sorted_order
from fxpar.graph.builder import Builder, shape_of
from fxpar.graph.collective_nodes import all_to_all, axes_of
from fxpar.graph.custom_ops import group_name
from fxpar.graph.exact_ops import NONE, RETURN, SEND
from fxpar.sharding.op_facts import op_facts_of

aten = torch.ops.aten
ours = torch.ops.fxpar


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
    # The four results of ``fxpar::exact_places``.
    _places: list[fx.Node] = field(default_factory=list)
    # The order of received rows -> where in that order each of them is.
    _in_order: dict[fx.Node, fx.Node] = field(default_factory=dict)

    @property
    def group(self) -> str:
        return group_name(self.build.mesh, self.axes)

    def places(self) -> list[fx.Node]:
        """Return the four results of ``fxpar::exact_places``: rows, how many are sent,
        how many are received, slots."""
        if not self._places:
            call = self.build.call
            with self.build.before(self.ids.next):
                args = self.slot_rows, self.ids, self.count
                result = call(ours.exact_places.default, *args)
                self._places = [call(operator.getitem, result, i) for i in range(4)]
        return self._places

    def in_order(self, place: fx.Node) -> fx.Node:
        """Return where each received row is in an order in which slot i is at
        ``place[i]``."""
        if place not in self._in_order:
            slots = self.places()[3]
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
                    self._send(rows, x, copies, self.places()[3])

    def _send(self, node: fx.Node, x: Any, copies: Any, places: fx.Node) -> None:
        rows, sent, got, _ = self.places()
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
        rows, sent, got, places = self.places()
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
