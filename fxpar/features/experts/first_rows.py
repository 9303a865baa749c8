"""Skips rows after the last of a rank's own in what is computed of experts.

A rank has room for more rows of its experts than there are, and shapes give the room.
Rows in order of experts have its own first, and products read these alone; so where a
value is read by nothing else, the others need not be computed.

``mark_first_rows``: In: a local graph, before forward and backward are split. Out: in
place, values of which no row after the last is read are marked, so that the forward
knows it of what its backward reads. ``compute_first_rows``: In: a forward or a backward
on its way to code generation. Out: in place, values of which only first rows are read
are computed with exactly as many rows as there are, a number that the host reads: for
devices on which it does not wait. Results keep their shapes: what is after the last row
is not written.

Never: changes rows that are read, or moves a collective.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.features.experts import expert_ops as _expert_ops  # noqa: F401  (registers ops)
from fxpar.graph.builder import Builder, copy_of, shape_of
from fxpar.graph.exact_ops import RETURN, SEND
from fxpar.passes.order.outline_layers import FIRST_ROWS, is_of_first_rows
from fxpar.passes.row_wise import row_call, row_result, rows_read

aten = torch.ops.aten
MM = torch.ops.fxpar.grouped_mm.default
OUTER = torch.ops.fxpar.grouped_outer.default

# Which operands of a product are rows.
_ROWS = {MM: (0,), OUTER: (0, 1)}


def mark_first_rows(graph: fx.Graph) -> None:
    """Mark values of which only first rows are read, in place."""
    for ends in _all_ends(graph):
        needs = _FirstRows(graph, ends)
        for node in graph.nodes:
            if (node, 0) in needs.in_order and needs.is_enough(node, 0):
                custom = node.meta.get("custom") or {}
                node.meta["custom"] = custom | {FIRST_ROWS: True}


def compute_first_rows(graph: fx.Graph, build: Builder) -> None:
    """Rewrite a forward or a backward in place."""
    ends_of_all = [n for n in _all_ends(graph) if n.meta["val"].device.type == "cpu"]
    if not ends_of_all or not _torch.symbols.has_symbolic_sizes(build.fake_mode):
        return
    if _can_take_open_rows(graph, build.fake_mode):
        _rewrite(graph, build)


def _can_take_open_rows(graph: fx.Graph, fake_mode: Any) -> bool:
    """Return whether all ops take a number of rows that depends on data, tried on a
    copy."""
    copied_graph = copy_of(graph)
    try:
        _rewrite(copied_graph, Builder(copied_graph, fake_mode))
    except Exception as error:
        if _torch.aot.untraceable(error) is None:
            raise
        return False
    return True


def _rewrite(graph: fx.Graph, build: Builder) -> None:
    ends_of_all = [n for n in _all_ends(graph) if n.meta["val"].device.type == "cpu"]
    # Rules are for sizes that are known: all is read before anything is written.
    for rewritten in [_Rewritten(graph, build, ends) for ends in ends_of_all]:
        rewritten.write()
    graph.eliminate_dead_code()


def _all_ends(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that say where the rows of experts end, one for each order of
    rows."""
    products = [node for node in graph.nodes if node.target in _ROWS]
    return list(dict.fromkeys(node.args[2] for node in products))


class _FirstRows:
    """Says of which values only the rows up to the last of ``ends`` are read."""

    def __init__(self, graph: fx.Graph, ends: fx.Node) -> None:
        self.ends = ends
        self.products = [user for user in ends.users if user.target in _ROWS]
        self.operands = {
            product.args[i] for product in self.products for i in _ROWS[product.target]
        }
        self.room = shape_of(self.products[0].args[0])[0]
        # Values, and the dim along which their rows have the order that ``ends``
        # belongs to.
        self.in_order = _connected([*self.operands, *self.products])
        self._suffice: dict[tuple[fx.Node, int], bool] = {}

    def is_enough(self, node: fx.Node, dim: int) -> bool:
        """Return whether something reads the rows along a dim, and only up to the
        last."""
        key = node, dim
        if key not in self._suffice:
            value = node.meta.get("val")
            tensor = isinstance(value, torch.Tensor) and dim < value.dim()
            has_room = tensor and value.shape[dim] == self.room
            self._suffice[key] = bool(has_room and node.users) and all(
                self._is_first_reader(user, node, dim) for user in node.users
            )
        return self._suffice[key]

    def _is_first_reader(self, user: fx.Node, node: fx.Node, dim: int) -> bool:
        if user in self.products:
            rows = [user.args[i] for i in _ROWS[user.target]]
            others = [x for x in user.all_input_nodes if x not in rows]
            return dim == 0 and node in rows and node not in others
        if user.target is RETURN:
            return dim == 0 and user.all_input_nodes[0] is node
        if user.op == "output":
            return dim == 0 and is_of_first_rows(node)
        result = row_result(user, node, dim)
        return result is not None and self.is_enough(user, result)


def _connected(nodes: Iterable[fx.Node]) -> set[tuple[fx.Node, int]]:
    """Return the values with rows along dim 0, and all that are computed from one
    another row by row, each with the dim of its rows."""
    out = {(node, 0) for node in nodes if node.target is not OUTER}
    queue = list(out)
    while queue:
        node, dim = queue.pop()
        connected = list(_read(node, dim).items())
        results = ((user, row_result(user, node, dim)) for user in node.users)
        connected += [(user, d) for user, d in results if d is not None]
        queue += [pair for pair in connected if pair not in out]
        out.update(connected)
    return out


def _read(node: fx.Node, dim: int = 0) -> dict[fx.Node, int]:
    """Return the operands that a value is computed from row by row -> the dim of their
    rows; none if it is not."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor):
        return {}
    return (rows_read(node, dim) if dim < value.dim() else None) or {}


class _Rewritten:
    """Is a graph in which values of first rows are computed with these rows alone."""

    def __init__(self, graph: fx.Graph, build: Builder, ends: fx.Node) -> None:
        self.graph, self.build, self.ends = graph, build, ends
        self.needs = _FirstRows(graph, ends)
        self.inside = self._computed()
        self._first: dict[tuple[fx.Node, int], fx.Node] = {}

    def write(self) -> None:
        """Replace values with room by values of first rows."""
        inside = self.inside
        if not inside:
            return
        self.rows = self._count()
        for node in inside:
            with self.build.before(node):
                self._first[node, 0] = self._make(node)
        first = set(self._first.values())
        for node in inside:
            for user in list(node.users):
                if user not in inside and user not in first:
                    self._give(node, user)

    def _computed(self) -> dict[fx.Node, dict[fx.Node, int]]:
        """Return the nodes that are computed with first rows alone, in order -> the
        operands that each is computed from row by row; nothing before the ends are
        known."""
        is_past_ends = self.ends.op == "placeholder"
        inside: dict[fx.Node, dict[fx.Node, int]] = {}
        for node in self.graph.nodes:
            rows = (node, 0) in self.needs.in_order and self.needs.is_enough(node, 0)
            if is_past_ends and rows:
                reads = _read(node)
                if reads or node.target in (MM, SEND) or _is_in_order(node):
                    inside[node] = reads
            is_past_ends = is_past_ends or node is self.ends
        return inside

    def _count(self) -> fx.Node:
        """Return the node of how many rows there are, a number of the host."""
        inputs = self.graph.find_nodes(op="placeholder")
        last_before = inputs[-1] if self.ends.op == "placeholder" else self.ends
        with self.build.before(last_before.next), self.build.at(self.ends):
            last = self.build.call(aten.select.int, self.ends, 0, -1)
            number = self.graph.call_function(aten._local_scalar_dense.default, (last,))
            _torch.symbols.let_depend_on_data(
                number, self.build.fake_mode, self.needs.room
            )
        return number

    def _make(self, node: fx.Node) -> fx.Node:
        call = self.build.call
        if node.target is MM:
            x, *others = node.args
            return call(MM, self._of(x, 0), *others)
        if node.target is SEND:
            x, rows, places, *others = node.args
            return call(SEND, x, rows, self._of(places, 0), *others)
        if _is_in_order(node):
            x, (order,) = node.args
            return call(aten.index.Tensor, x, [self._of(order, 0)])
        reads = self.inside[node]
        by_row = row_call(node, reads)
        assert by_row is not None
        first = {x: self._of(x, d) for x, d in reads.items()}
        return by_row.with_operands(self.build, first, self.rows)

    def _of(self, node: Any, dim: int) -> fx.Node:
        """Return the first rows of a value."""
        if (node, dim) not in self._first:
            call = self.build.call
            return call(aten.slice.Tensor, node, dim, 0, self.rows)
        return self._first[node, dim]

    def _give(self, node: fx.Node, user: fx.Node) -> None:
        """Let a user outside read the first rows; with the room of all rows, unless it
        takes rows by their count."""
        with self.build.before(user):
            if user in self.needs.products or user.target is RETURN:
                value = self._first[node, 0]
                operands = list(user.args)
                rows = _ROWS.get(user.target, (0,))
                if user.target is MM:  # all of its results are read
                    value = self._all(value)
                for i in rows:
                    if operands[i] is node:
                        operands[i] = value
                    elif user.target is OUTER:
                        operands[i] = self._of(operands[i], 0)
                user.args = tuple(operands)
            else:
                user.replace_input_with(node, self._all(self._first[node, 0]))

    def _all(self, rows: fx.Node) -> fx.Node:
        """Return rows with the room of all."""
        return self.build.call(torch.ops.fxpar.with_room.default, rows, self.needs.room)


def _is_in_order(node: fx.Node) -> bool:
    """Return whether a value is rows read in an order."""
    if node.target is not aten.index.Tensor or len(node.args[1]) != 1:
        return False
    (order,) = node.args[1]
    return order is not None and len(shape_of(order)) == 1
