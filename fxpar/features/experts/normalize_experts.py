"""traced -> normalized: computes rows sorted by expert in the order of their tokens.

A mixture of experts sorts the tokens by expert, multiplies the rows of each with its
weights and brings the results back. The sort mixes the samples of all ranks, so nothing
after it could be split by samples. In: an ATen graph with such a sort. Out: the same
graph without it: products are ``fxpar::expert_mm`` and ``fxpar::expert_outer``, which
take rows in any order and the expert of each; ops in between compute rows one by one
(``row_wise``), and whatever reads them in another way reads them in place. For a mesh
with an axis for experts, rows come once for each group of experts that a rank has,
``[groups * rows, ...]`` (``GroupCopies``): the copy of a row that counts is the one of
the group that has the row's expert, and of the others nothing is read again. Or each
group has slots for the rows of each source (``DispatchedRows``), ``[groups * sources *
room, ...]``: split by sources before they are sent and by groups after it, an
all-to-all each way.

Never: rewrites a part. Where something reads the sorted rows in a way that is not known
here, the graph stays as it is, and a note says why.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from fxpar._torch.objects import argument
from fxpar.features.experts.expert_axes import SORTS
from fxpar.features.experts.expert_ops import room_of
from fxpar.graph.builder import Builder, is_zeros, shape_of
from fxpar.graph.exact_ops import NONE
from fxpar.passes.row_wise import call_of, row_call
from fxpar.sharding.factors import Axes
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import user_line

aten = torch.ops.aten
ours = torch.ops.fxpar
prims = torch.ops.prims


# Rows for groups of experts, and back


class GroupCopies:
    """Copies rows for groups of experts. ``key``: the expert of each row; ``room``: as
    in ``expert_ops``."""

    # Whether rows stay where their tokens are until a product reads them.
    sends = False

    def __init__(
        self, build: Builder, key: fx.Node, experts: int, groups: int, room: float
    ) -> None:
        self.build, self.key = build, key
        self.options = (groups, room if groups > 1 else 0.0)
        self.experts, self.groups = experts, groups
        self.rows, self.device = shape_of(key)[0], key.meta["val"].device
        # Rows of all groups, and the experts of rows that a product takes.
        self.count, self.ids = groups * self.rows, key
        # Each is built once for a value.
        self.of, self.choose = cache(self._of), cache(self._choose)
        self.is_own = cache(self._is_own)

    def _of(self, x: fx.Node) -> fx.Node:
        """Return rows once for each group. An expanded value is expanded once."""
        if self.groups == 1:
            return x
        source, leading = before_expand(x)
        return expanded(self.build, source, leading, shape_of(x)[1:], self.groups)

    def of_tokens(self, x: fx.Node, copies: int) -> fx.Node:
        """Return rows once for each group, of tokens that each make ``copies`` rows."""
        if copies == 1:
            return self.of(x)
        tokens, *features = shape_of(x)
        x = self.build.call(aten.unsqueeze.default, x, 1)
        return expanded(self.build, x, [tokens, copies], features, self.groups)

    def _choose(self, x: fx.Node) -> fx.Node | None:
        """Return the copy that counts of each row; None if ``x`` cannot be added up."""
        if self.groups == 1:
            return x
        value, call = x.meta["val"], self.build.call
        if not value.dtype.is_floating_point:
            return None
        features = value.shape[1:]
        own = self.is_own()
        for _ in features:
            own = call(aten.unsqueeze.default, own, -1)
        zero = call(aten.full.default, [], 0, dtype=value.dtype, device=value.device)
        parts = call(aten.reshape.default, x, [self.groups, self.rows, *features])
        parts = call(aten.where.self, own, parts, zero)
        return call(aten.sum.dim_IntList, parts, [0])

    def _is_own(self) -> fx.Node:
        """Return [groups, rows]: whether a row's expert is in a group."""
        call, per = self.build.call, self.experts // self.groups
        with self.build.before(self.key.next):
            first = self.build.iota(self.groups, self.device, per)
            first = call(aten.unsqueeze.default, first, 1)
            low = call(aten.ge.Tensor, self.key, first)
            end = call(aten.add.Tensor, first, per)
            high = call(aten.lt.Tensor, self.key, end)
            return call(aten.bitwise_and.Tensor, low, high)


def before_expand(x: fx.Node) -> tuple[Any, list[int]]:
    """Return (what rows were expanded from, the dims that make the rows); the rows
    themselves if they are not expanded."""
    source: Any = x
    while op_facts_of(source.target).reshapes or source.target is aten.clone.default:
        source = source.args[0]
    features, full = list(shape_of(x)[1:]), list(shape_of(source))
    leading = full[: len(full) - len(features)]
    if source.target is aten.expand.default and full == leading + features:
        return source.args[0], leading
    return x, [shape_of(x)[0]]


def expanded(
    build: Builder,
    x: fx.Node,
    leading: Sequence[int],
    features: Sequence[int],
    groups: int,
) -> fx.Node:
    """Return ``x`` expanded to the dims ``leading``, which make the rows, and
    ``features``; once for each group."""
    full = [*leading, *features]
    if groups > 1:
        if len(shape_of(x)) == len(full):
            x = build.call(aten.unsqueeze.default, x, 0)
        full = [groups, *full]
    if shape_of(x) != tuple(full):
        x = build.call(aten.expand.default, x, full)
    shape = [groups * math.prod(leading), *features]
    return x if full == shape else build.call(aten.reshape.default, x, shape)


class DispatchedRows:
    """Puts rows in slots for groups of experts."""

    sends = True

    def __init__(
        self,
        build: Builder,
        key: fx.Node,
        experts: int,
        groups: int,
        sources: int,
        *,
        share: float,
        exact: bool,
        across: Axes = (),
        telling: Axes = (),
        rows: int = 0,
    ) -> None:
        """``key``: the expert of each row; ``sources``: parts of the rows that are sent
        separately; ``share``: as in ``expert_ops.room_of``; ``exact``: slots without a
        row are not sent (``exact_exchanges``). ``across``: manual axes whose ranks
        exchange rows that each has of its own; none: rows are on the ranks of all
        groups. ``telling``: axes whose ranks exchange their counts of rows, if not
        those that split the rows. ``rows``: of a part that all groups have room for at
        an even share; 0: as many as a part has."""
        self.build, call = build, build.call
        self.across, share = "+".join(across), 0.0 if exact else share
        room = room_of(rows * sources or shape_of(key)[0], groups, sources, share)
        sizes = experts, groups, sources, room, exact
        slots = call(ours.dispatch_slots.default, key, *sizes)
        rows_of_slots, self.slots, most = (
            call(operator.getitem, slots, i) for i in range(3)
        )
        self.slot_rows = rows_of_slots
        if not exact and (share or not across):
            where, axes = user_line(key) or "", ("+".join(telling),) if telling else ()
            self.slot_rows = call(
                ours.within.default, rows_of_slots, most, room, where, *axes
            )
        # What products take: groups that a rank has, and the room for rows.
        self.options = (1 if across else groups, share or float(groups))
        self.shape = [groups, sources, room]
        # Rows of all groups, and the experts of rows that a product takes.
        self.count = groups * sources * room
        # Each is built once for a value.
        self.of, self.of_tokens = cache(self._of), cache(self._send)
        self.choose = cache(self._choose)
        self.key, self.ids = key, self._send(key, 1, NONE)

    def _of(self, x: fx.Node) -> fx.Node:
        """Return rows in their slots. An expanded value is sent once."""
        source, leading = before_expand(x)
        tokens, features = leading[0], list(shape_of(x)[1:])
        if len(leading) == 2 and shape_of(source) == (tokens, 1, *features):
            source = self.build.call(aten.reshape.default, source, [tokens, *features])
            return self.of_tokens(source, leading[1])
        return self.ids if x is self.key else self.of_tokens(x, 1)

    def _send(self, x: fx.Node, copies: int, fill: int = 0) -> fx.Node:
        """Return the rows of tokens that each make ``copies`` rows, in their slots."""
        call = self.build.call
        sent = call(ours.dispatch_rows.default, x, self.slot_rows, copies, fill)
        if self.across:
            return call(ours.exchange_slots.default, sent, self.across)
        return call(aten.reshape.default, sent, [self.count, *shape_of(x)[1:]])

    def _choose(self, x: fx.Node) -> fx.Node:
        """Return each row from its slot."""
        call, full = self.build.call, [*self.shape, *shape_of(x)[1:]]
        if self.across:
            sizes = self.shape[:2]
            slots = call(ours.return_slots.default, x, *sizes, self.across)
        else:
            slots = call(aten.reshape.default, x, full)
        return call(ours.combine_rows.default, slots, self.slots)


# Rows that are sorted

# Kernels of grouped products take rows of 16 bytes.
_WIDTH = 8

# Ops that add up rows in any order.
_SUMS = (aten.sum.dim_IntList, aten.sum.default, aten.histc.default)


@dataclass(frozen=True)
class _SortedRows:
    """Is a value whose rows along a dim are sorted by expert, held as one that is not
    sorted.

    Row i of the value is row ``order[i]`` of ``plain``; or, with ``per_group``, row
    ``order[i]`` of the copy for the group that has its expert.
    """

    # The dim of the rows.
    dim: int
    # [rows]: whole numbers, the same for every group.
    plain: fx.Node | None = None
    # [groups * rows, ...].
    per_group: fx.Node | None = None


class Mixture:
    """Holds the rows that one sort puts in order, and what is computed from them.
    ``products``: grouped products of these rows -> how many experts each has;
    ``copies``: brings the rows to groups of experts."""

    def __init__(
        self,
        build: Builder,
        sort: fx.Node,
        products: Mapping[fx.Node, int],
        copies: GroupCopies | DispatchedRows,
    ) -> None:
        self.build, self.sort = build, sort
        self.products, self.copies = products, copies
        self.key: Any = sort.args[0]
        self.rows, self.experts = shape_of(self.key)[0], max(products.values())
        # Values in order of experts; and results of calls that give several.
        self.values: dict[fx.Node, _SortedRows] = {}
        self.results: dict[fx.Node, dict[int, _SortedRows | fx.Node]] = {}
        # Index of rows -> the number that row numbers were divided by in it.
        self.numbers: dict[fx.Node, int] = {}
        # Values that give the place in order of each row.
        self.inverse: set[fx.Node] = set()
        # Values that are not in order any more -> the same, computed in place.
        self.replacements: dict[fx.Node, fx.Node] = {}

    def read(self, nodes: Sequence[fx.Node]) -> None:
        """Compute in place what the nodes compute in order."""
        with self.build.before(self.sort.next):
            rows = self.build.iota(self.rows, self.key.meta["val"].device)
        self.numbers[rows] = 1
        self.results[self.sort] = {0: _SortedRows(0, self.key), 1: _SortedRows(0, rows)}
        for node in nodes:
            reads_rows = any(
                x in self.values or x in self.results or x in self.inverse
                for x in node.all_input_nodes
            )
            if reads_rows and node.op == "call_function":
                with self.build.before(node):
                    self._read(node)

    def _read(self, node: fx.Node) -> None:
        read = Mixture._product if node in self.products else _READS.get(node.target)
        value = (read or Mixture._by_row)(self, node)
        if isinstance(value, _SortedRows):
            self.values[node] = value
        elif isinstance(value, fx.Node):
            self.replacements[node] = value

    # Into order and out of it

    def _number(self, index: Any) -> tuple[fx.Node, int | None] | None:
        """Return (rows that an index in order reads, by how much row numbers were
        divided)."""
        rows = self.values.get(index)
        if rows is None or rows.plain is None or len(shape_of(rows.plain)) != 1:
            return None
        return rows.plain, self.numbers.get(rows.plain)

    def _index(self, node: fx.Node) -> _SortedRows | fx.Node | None:
        x, (index, *further_indices) = _arguments(node, 2)
        if further_indices:
            return None
        if index in self.inverse:
            rows = self.values.get(x)
            return self._in_place(rows) if rows is not None and rows.dim == 0 else None
        lookup = self._number(index)
        if lookup is None or x in self.values:
            return None
        row_index, divisor = lookup
        if self._is_by_expert(x, row_index):
            # [experts, n] as weights [experts, width, n]
            weight = self.build.call(aten.unsqueeze.default, x, 1)
            weight = self.build.pad(weight, (0, _WIDTH - 1, 0))
            args = self._ones(x), weight, self.copies.ids, *self.copies.options
            product = self.build.call(ours.expert_mm.default, *args)
            return _SortedRows(0, per_group=product)
        tokens, *features = shape_of(x)
        if divisor is None or tokens * divisor != self.rows:
            x = self.build.call(aten.index.Tensor, x, [row_index])
            divisor = 1
        is_per_group = x.meta["val"].dtype.is_floating_point or features
        if is_per_group and not self.copies.sends:
            return _SortedRows(0, per_group=self.copies.of_tokens(x, divisor))
        if divisor > 1:
            x = self.build.call(aten.unsqueeze.default, x, 1)
        full = [tokens, divisor] if divisor > 1 else [self.rows]
        return _SortedRows(0, plain=expanded(self.build, x, full, features, 1))

    # A row of each expert that is looked up, such as a bias, is multiplied with ones by
    # expert: nothing is sent, since a rank reads rows of its own experts alone. It is
    # one of ``_WIDTH`` rows, as kernels want it; the others are zero.

    def _is_by_expert(self, x: fx.Node, index: fx.Node) -> bool:
        """Return whether rows of ``x`` are looked up by expert, in groups of these."""
        (groups, _), shape = self.copies.options, shape_of(x)
        of_experts = len(shape) == 2 and shape[0] == self.experts
        floats = of_experts and x.meta["val"].dtype.is_floating_point
        has_count = index is self.key and isinstance(self.copies.count, int)
        return groups > 1 and floats and has_count

    def _ones(self, like: fx.Node) -> fx.Node:
        """Return ones, [rows of all groups, width]."""
        value, shape = like.meta["val"], [self.copies.count, _WIDTH]
        options = {"dtype": value.dtype, "device": value.device}
        return self.build.call(aten.full.default, shape, 1, **options)

    def _each(self, x: fx.Node) -> fx.Node | None:
        """Return a value in order, as rows for each group along its dim."""
        rows = self.values.get(x)
        if rows is None or rows.per_group is not None:
            return rows and rows.per_group
        plain = rows.plain
        if plain is None or rows.dim > 1 or (rows.dim and len(shape_of(plain)) > 2):
            return None
        if rows.dim == 0:
            return self.copies.of(plain)
        return self._transposed(self.copies.of(self._transposed(plain)))

    def _transposed(self, x: fx.Node) -> fx.Node:
        """Return a matrix transposed; its source if it is a transpose itself."""
        if x.target is aten.permute.default and x.args[1] == [1, 0]:
            read: Any = x.args[0]
            return read
        return self.build.call(aten.permute.default, x, [1, 0])

    def _in_place(self, rows: _SortedRows) -> fx.Node | None:
        """Return a value in order, put back in place."""
        if rows.plain is not None or rows.per_group is None:
            return rows.plain
        return self.copies.choose(rows.per_group)

    # Calls

    def _put(self, node: fx.Node) -> _SortedRows | fx.Node | None:
        x, (index, *further_indices), values, accumulate = _arguments(node, 4)
        if further_indices or x in self.values:
            return None
        all_rows = shape_of(x)[0] == self.rows
        if index in self.inverse:
            fills = all_rows and (not accumulate or is_zeros(x))
            if not fills or values in self.values or shape_of(values) != shape_of(x):
                return None
            if self.copies.sends:
                return _SortedRows(0, values)
            return _SortedRows(0, per_group=self.copies.of(values))
        fills = all_rows and not accumulate
        lookup = self._number(index)
        if lookup is None:
            return None
        if fills and lookup[1] == 1:
            if values in self.values:
                return self._in_place(self.values[values])
            if _is_range(values, self.rows):
                self.inverse.add(node)
            return None
        return self._sum_up(x, index, values) if accumulate else None

    def _add(self, node: fx.Node) -> fx.Node | None:
        x, dim, index, values = _arguments(node, 4)
        return None if dim or node.kwargs else self._sum_up(x, index, values)

    def _sum_up(self, x: fx.Node, index: fx.Node, values: fx.Node) -> fx.Node | None:
        """Return ``x`` with rows in order added to the rows that an index names."""
        lookup, rows = self._number(index), self.values.get(values)
        if lookup is None or rows is None or rows.dim != 0 or x in self.values:
            return None
        (row_index, divisor), call, shape = lookup, self.build.call, shape_of(x)
        each = self._each(values) if self._is_by_expert(x, row_index) else None
        if each is not None:
            outer, sizes = ours.expert_outer.default, self.copies.options
            args = self._ones(x), each, self.copies.ids, self.experts, *sizes
            sums = call(aten.select.int, call(outer, *args), 1, 0)
            return sums if is_zeros(x) else call(aten.add.Tensor, x, sums)
        summands = self._in_place(rows)
        if summands is None:
            return None
        if divisor is None or shape[0] * divisor != self.rows:
            return call(aten.index_put.default, x, [row_index], summands, True)
        if divisor > 1:
            by_token = [shape[0], divisor, *shape[1:]]
            summands = call(aten.reshape.default, summands, by_token)
            summands = call(aten.sum.dim_IntList, summands, [1])
        return summands if is_zeros(x) else call(aten.add.Tensor, x, summands)

    def _product(self, node: fx.Node) -> _SortedRows | fx.Node | None:
        x, y, _, grad = _arguments(node, 4)
        call, key, options = self.build.call, self.copies.ids, self.copies.options
        mm, outer = ours.expert_mm.default, ours.expert_outer
        if self.products[node] != self.experts:
            return None
        count, left, right = self.experts, self._each(x), self._each(grad or y)
        if left is None:
            return None
        if grad is not None:
            if right is None or y in self.values:
                return None
            weight = call(aten.permute.default, y, [0, 2, 1])
            self.results[node] = {
                0: _SortedRows(0, per_group=call(mm, right, weight, key, *options)),
                1: call(outer.default, left, right, key, count, *options),
            }
            return None
        if y not in self.values and self.values[x].dim == 0:
            return _SortedRows(0, per_group=call(mm, left, y, key, *options))
        if right is None or (self.values[x].dim, self.values[y].dim) != (1, 0):
            return None
        left = self._transposed(left)
        return call(outer.default, left, right, key, count, *options)

    def _inverse_sort(self, node: fx.Node) -> _SortedRows | fx.Node | None:
        """Note the results of a sort of the order: they give the place in order of each
        row."""
        lookup = self._number(node.args[0])
        is_rising = not argument(node, "descending")
        if lookup is not None and lookup[1] == 1 and is_rising:
            self.inverse |= {user for user in node.users if call_of(user) == (node, 1)}
        return None

    def _sum(self, node: fx.Node) -> fx.Node | _SortedRows | None:
        x, dims, *_ = _arguments(node, 2)
        rows, ndim = self.values.get(x), len(shape_of(x))
        if rows is None:
            return None
        over = dims if node.target is aten.sum.dim_IntList and dims else range(ndim)
        if rows.dim not in [d % ndim for d in over]:
            return self._by_row(node)
        chosen = self._in_place(rows) if rows.dim == 0 else None
        if chosen is None:
            return None
        target: Any = node.target
        return self.build.call(target, chosen, *node.args[1:], **node.kwargs)

    def _by_row(self, node: fx.Node) -> _SortedRows | None:
        """Return the result, over rows in place, of a call that computes rows one by
        one."""
        operands = {x: self.values[x] for x in node.all_input_nodes if x in self.values}
        row_dims = {x: rows.dim for x, rows in operands.items()}
        call = next((row_call(node, dim, x) for x, dim in row_dims.items()), None)
        if call is None or call.row_dims != row_dims:
            return None
        plain_rows = self._plain_rows(node, operands)
        if len(plain_rows) == len(operands):
            value = call.with_operands(self.build, plain_rows, self.rows)
            self._divide(node, value, plain_rows)
        else:
            pairs = [(x, self._each(x)) for x in operands]
            rows_per_group = {x: value for x, value in pairs if value is not None}
            if len(rows_per_group) < len(operands):
                return None
            value = call.with_operands(self.build, rows_per_group, self.copies.count)
        kind = "plain" if len(plain_rows) == len(operands) else "per_group"
        if isinstance(value.meta["val"], torch.Tensor):
            return _SortedRows(call.result_dims[0], **{kind: value})
        self.results[node] = {
            i: _SortedRows(d, **{kind: self.build.call(operator.getitem, value, i)})
            for i, d in enumerate(call.result_dims)
        }
        return None

    def _plain_rows(
        self, node: fx.Node, operands: dict[fx.Node, _SortedRows]
    ) -> dict[fx.Node, fx.Node]:
        """Return the operands that are read in place. Rows that were sent are brought
        back where otherwise others would have to be sent for a result that no product
        reads."""
        plain = {x: r.plain for x, r in operands.items() if r.plain is not None}
        mixed = 0 < len(plain) < len(operands) and self.copies.sends
        if not mixed or any(r.dim for r in operands.values()):
            return plain
        if self._has_product(node, set()):
            return plain
        chosen = {x: self._in_place(rows) for x, rows in operands.items()}
        return plain if None in chosen.values() else chosen

    def _has_product(self, node: fx.Node, seen: set[fx.Node]) -> bool:
        """Return whether a product reads rows that are computed from a value in
        order."""
        for user in set(node.users) - seen:
            seen.add(user)
            sums_rows = user.target in _SUMS and 0 in (_arguments(user, 2)[1] or [0])
            leaves = user.target in _READS and user.target not in _SUMS
            follows = user.target is operator.getitem or not (leaves or sums_rows)
            if user in self.products or (follows and self._has_product(user, seen)):
                return True
        return False

    def _divide(
        self, node: fx.Node, quotient: fx.Node, plain_rows: dict[fx.Node, fx.Node]
    ) -> None:
        """Note that row numbers were divided by a whole number."""
        x, divisor = _arguments(node, 2)
        floor = node.kwargs.get("rounding_mode") == "floor"
        if node.target is aten.div.Tensor_mode and floor and isinstance(divisor, int):
            divided = self.numbers.get(plain_rows[x]) if x in plain_rows else None
            if divided is not None and divisor > 0:
                self.numbers[quotient] = divided * divisor

    def write(self, graph: fx.Graph) -> list[str] | None:
        """Replace values in order by the values computed in place, if nothing is left
        that needs the order; else return a note of the op that does."""
        live = set[fx.Node]()
        stack = [
            node for node in graph.nodes if node.op == "output" or node.is_impure()
        ]
        while stack:
            node = stack.pop()
            if node not in live:
                live.add(node)
                stack += [self.replacements.get(x, x) for x in node.all_input_nodes]
        if live & set(self.products):
            sorted_values = {*self.values, *self.results}
            readers = [
                node
                for node in graph.nodes
                if node in live - sorted_values
                and sorted_values.intersection(node.all_input_nodes)
            ]
            if not readers:
                return []
            at = user_line(readers[0])
            return [
                f"rows sorted by expert are read by {readers[0].target}"
                f"{f' at {at}' if at else ''} in an order that no rule keeps: all "
                "tokens are sorted together, experts stay whole"
            ]
        for node, replacement in self.replacements.items():
            node.replace_all_uses_with(replacement)
        return None


# How a call is rewritten that reads in another way than row by row.
_READS: dict[Any, Callable[[Mixture, fx.Node], Any]] = {
    operator.getitem: lambda mixture, node: mixture.results.get(node.args[0], {}).get(
        node.args[1]
    ),
    aten.index.Tensor: Mixture._index,
    aten._unsafe_index.Tensor: Mixture._index,
    aten.index_put.default: Mixture._put,
    aten._unsafe_index_put.default: Mixture._put,
    aten.index_add.default: Mixture._add,
    **dict.fromkeys(SORTS, Mixture._inverse_sort),
    **dict.fromkeys(_SUMS, Mixture._sum),
}


def _arguments(node: fx.Node, count: int) -> Any:
    """Return the first ``count`` arguments of a call; None for those that are left
    out."""
    return [*node.args[:count], *[None] * (count - len(node.args))]


def _is_range(node: fx.Node, rows: int) -> bool:
    """Return whether a value is the numbers from 0 up to ``rows``."""
    if node.target is not prims.iota.default:
        return False
    return [argument(node, x) for x in ("length", "start", "step")] == [rows, 0, 1]
