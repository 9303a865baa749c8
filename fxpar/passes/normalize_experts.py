"""traced -> normalized: rows sorted by expert are computed where their tokens lie.

A mixture of experts sorts the tokens by expert, multiplies the rows of each with its
weights and brings the results back. The sort mixes the samples of all ranks, so nothing
behind it could be split as they are. In: an ATen graph with such a sort. Out: the same
graph without it: products are ``fxpar::expert_mm`` and ``fxpar::expert_outer``, which
take rows in any order and the expert of each; what stands between makes rows one by one
(``row_wise``), and whatever reads them in another way reads them where they lay. For a
mesh with an axis for experts, rows come once for each group of experts that a rank has
(``fxpar/passes/expert_ops.py``): of a copy the rows of other groups are not read again.

What it never does: rewrite a part. Where something reads the sorted rows in a way that
is not known here, the graph stays as it is, and why is told.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.passes import expert_ops as _expert_ops  # noqa: F401  (registers ops)
from fxpar.passes.builder import Builder, shape_of
from fxpar.passes.row_wise import row_call
from fxpar.sharding.program import user_line
from fxpar.sharding.rules.op_facts import op_facts_of

aten = torch.ops.aten
prims = torch.ops.prims

_SORTS = (aten.sort.default, aten.sort.stable)
_INDEX = (aten.index.Tensor, aten._unsafe_index.Tensor)
_PUT = (aten.index_put.default, aten._unsafe_index_put.default)
# What adds up rows in any order.
_SUMS = (aten.sum.dim_IntList, aten.sum.default, aten.histc.default)
_GROUPED = "transformers.grouped_mm_fallback.default"
_GROUPED_BACKWARD = "transformers.grouped_mm_fallback_backward.default"
# Of a call that gives places: which of its results.
_PLACES = {
    aten.topk.default: 1,
    aten.sort.default: 1,
    aten.sort.stable: 1,
    aten.max.dim: 1,
    aten.min.dim: 1,
}


@dataclass(frozen=True)
class _Rows:
    """A value whose rows along a dim are sorted by expert, as one that is not sorted.

    Row i of the value is row ``order[i]`` of ``one``; or, of ``each``, row ``order[i]``
    of the copy for the group that has its expert.
    """

    dim: int
    # [rows]: of whole numbers, the same for every group.
    one: fx.Node | None = None
    # [groups * rows, ...].
    each: fx.Node | None = None


def experts_in_place(
    graph: fx.Graph, rewriter: Builder, groups: Callable[[int], int]
) -> list[str]:
    """Rewrite a graph in place; notes of what is left as it is. ``groups``: into how
    many a number of experts is split."""
    notes = []
    for node in list(graph.nodes):
        if node.target in _SORTS and len(shape_of(node.args[0])) == 1:
            products = _products_by(node)
            if products:
                mixture = _Mixture(rewriter, node, products, groups)
                mixture.read(list(graph.nodes))
                notes += mixture.write(graph)
    graph.eliminate_dead_code()
    return notes


# The sort, and the products that go by it


def _products_by(sort: fx.Node) -> dict[fx.Node, int]:
    """Grouped products of rows that a sort put in order -> how many experts."""
    if len(sort.args) > 2 or sort.kwargs.get("descending", False):
        return {}
    out = {}
    for node in sort.graph.nodes:
        offs = _ends_of(node)
        if offs is not None and _counts(offs, sort):
            out[node] = shape_of(offs)[0]
    return out


def _ends_of(node: fx.Node) -> fx.Node | None:
    """Where the groups of a grouped product end; None of any other call."""
    if node.target is aten._grouped_mm.default:
        plain = len(node.args) == 3 and not node.kwargs
        return node.args[2] if plain else None  # type: ignore[return-value]
    if str(node.target) in (_GROUPED, _GROUPED_BACKWARD):
        return node.args[2]  # type: ignore[return-value]
    return None


def _counts(ends: fx.Node, sort: fx.Node) -> bool:
    """Whether these are the ends of each expert's rows among those that are sorted."""
    total = _plain(ends)
    if total.target is not aten.cumsum.default or total.args[1] not in (0, -1):
        return False
    count = _plain(total.args[0])
    if count.target is not aten.histc.default:
        return False
    experts = shape_of(ends)[0]
    bins, low, high = (*count.args[1:], *_BINS[len(count.args) - 1 :])
    if (bins, low) != (experts, 0) or high not in (experts - 1, experts):
        return False
    counted, key = _plain(count.args[0]), _plain(sort.args[0])
    if counted.target is operator.getitem and counted.args == (sort, 0):
        counted = key
    return counted is key and _is_place(key)


# The arguments of ``histc`` behind the first, where they are left out.
_BINS = (100, 0, 0)


def _plain(node: Any) -> fx.Node:
    """What a chain of casts is of."""
    while True:
        facts = op_facts_of(node.target)
        if not (facts.casts or facts.renames or node.target is aten.clone.default):
            return node
        node = node.args[0]


def _is_place(node: fx.Node) -> bool:
    """Whether elements are places along a dim, and so not negative."""
    while True:
        facts = op_facts_of(node.target)
        if not (facts.reshapes or facts.casts or facts.renames or facts.view):
            break
        if node.target is operator.getitem:
            break
        node = node.args[0]  # type: ignore[assignment]
    if node.target is aten.argmax.default:
        return True
    if node.target is not operator.getitem:
        return False
    source: Any = node.args[0]
    return _PLACES.get(source.target) == node.args[1]


class _Mixture:
    """The rows that one sort puts in order, and what is computed of them."""

    def __init__(
        self,
        build: Builder,
        sort: fx.Node,
        products: dict[fx.Node, int],
        groups: Callable[[int], int],
    ) -> None:
        self.build, self.sort, self.products = build, sort, products
        self.key: Any = sort.args[0]
        self.rows = shape_of(self.key)[0]
        self.experts = max(products.values())
        self.groups = groups(self.experts)
        # Values in order of experts; and results of calls that give several.
        self.values: dict[fx.Node, _Rows] = {}
        self.results: dict[fx.Node, dict[int, _Rows | fx.Node]] = {}
        # Of an index of rows: the row's own number, divided by this.
        self.numbers: dict[fx.Node, int] = {}
        # Where in order each row is.
        self.inverse: set[fx.Node] = set()
        # What is not in order any more -> the same, computed in place.
        self.instead: dict[fx.Node, fx.Node] = {}
        self.copies: dict[fx.Node, fx.Node] = {}
        self.chosen: dict[fx.Node, fx.Node] = {}
        self.own: fx.Node | None = None

    def read(self, nodes: Sequence[fx.Node]) -> None:
        """Compute in place what is computed in order."""
        with self.build.before(self.sort.next):
            rows = self.build.call(
                prims.iota.default,
                self.rows,
                start=0,
                step=1,
                dtype=torch.int64,
                device=self.key.meta["val"].device,
                requires_grad=False,
            )
        self.numbers[rows] = 1
        self.results[self.sort] = {0: _Rows(0, self.key), 1: _Rows(0, rows)}
        for node in nodes:
            known = any(
                x in self.values or x in self.results or x in self.inverse
                for x in node.all_input_nodes
            )
            if known and node.op == "call_function":
                with self.build.before(node):
                    self._read(node)

    def _read(self, node: fx.Node) -> None:
        target = node.target
        if target is operator.getitem:
            made = self.results.get(node.args[0], {}).get(node.args[1])  # type: ignore
        elif target in _INDEX:
            made = self._index(*node.args)
        elif target in _PUT:
            made = self._put(node, *node.args)
        elif target is aten.index_add.default and node.args[1] == 0:
            made = None if node.kwargs else self._add(*node.args[::2], node.args[3])
        elif node in self.products:
            made = self._product(node)
        elif target in _SORTS:
            made = self._sort_again(node)
        elif target in _SUMS:
            made = self._sum(node)
        else:
            made = self._by_row(node)
        if isinstance(made, _Rows):
            self.values[node] = made
        elif isinstance(made, fx.Node):
            self.instead[node] = made

    # Into order and out of it

    def _number(self, index: Any) -> tuple[fx.Node, int | None] | None:
        """(rows that an index in order reads, by how much row numbers were divided)."""
        rows = self.values.get(index)
        if rows is None or rows.one is None or len(shape_of(rows.one)) != 1:
            return None
        return rows.one, self.numbers.get(rows.one)

    def _index(self, x: fx.Node, indices: Any) -> _Rows | fx.Node | None:
        index, *more = indices
        if more:
            return None
        if index in self.inverse:
            rows = self.values.get(x)
            return self._choose(rows) if rows is not None and rows.dim == 0 else None
        found = self._number(index)
        if found is None or x in self.values:
            return None
        one, divided = found
        shape = shape_of(x)
        if divided is None or shape[0] * divided != self.rows:
            read = self.build.call(aten.index.Tensor, x, [one])
            return self._entered(read)
        if divided == 1:
            return self._entered(x)
        x = self.build.call(aten.unsqueeze.default, x, 1)
        return self._entered(x, [shape[0], divided, *shape[1:]])

    def _entered(self, x: fx.Node, full: list[int] | None = None) -> _Rows:
        """A value in place, put in order. ``full``: what it is expanded to, whose
        leading dims make the rows."""
        whole = full or list(shape_of(x))
        if x.meta["val"].dtype.is_floating_point or _behind(whole, self.rows):
            each = self._copy(x) if full is None else self._spread(x, whole)
            return _Rows(0, each=each)
        return _Rows(0, one=self._spread(x, whole, 1))

    def _copy(self, x: fx.Node) -> fx.Node:
        """Rows once for each group. What is expanded is expanded once."""
        if self.groups == 1:
            return x
        if x not in self.copies:
            source: Any = x
            while (
                op_facts_of(source.target).reshapes
                or source.target is aten.clone.default
            ):
                source = source.args[0]
            full = list(shape_of(source))
            rest = list(shape_of(x)[1:])
            if (
                source.target is aten.expand.default
                and _behind(full, self.rows) == rest
            ):
                source = source.args[0]
            else:
                source, full = x, list(shape_of(x))
            self.copies[x] = self._spread(source, full)
        return self.copies[x]

    def _spread(
        self, x: fx.Node, full: Sequence[int], groups: int | None = None
    ) -> fx.Node:
        """``x`` expanded to ``full``, for each group, as rows."""
        groups, call = groups or self.groups, self.build.call
        rest = _behind(full, self.rows) or []
        if groups > 1:
            if len(shape_of(x)) == len(full):
                x = call(aten.unsqueeze.default, x, 0)
            full = [groups, *full]
        if shape_of(x) != tuple(full):
            x = call(aten.expand.default, x, list(full))
        shape = [groups * self.rows, *rest]
        return x if list(full) == shape else call(aten.reshape.default, x, shape)

    def _each(self, x: fx.Node) -> fx.Node | None:
        """A value in order, as rows for each group along its dim."""
        rows = self.values.get(x)
        if rows is None or rows.each is not None:
            return rows and rows.each
        return self._copy(rows.one) if rows.dim == 0 and rows.one else None

    def _choose(self, rows: _Rows) -> fx.Node | None:
        """A value in order, put back in place: of each row the copy that counts."""
        if rows.one is not None:
            return rows.one
        x: Any = rows.each
        if self.groups == 1 or x in self.chosen:
            return self.chosen.get(x, x)
        value, call = x.meta["val"], self.build.call
        if not value.dtype.is_floating_point:
            return None
        rest = value.shape[1:]
        own = self._is_own()
        for _ in rest:
            own = call(aten.unsqueeze.default, own, -1)
        zero = call(aten.full.default, [], 0, dtype=value.dtype, device=value.device)
        parts = call(aten.reshape.default, x, [self.groups, self.rows, *rest])
        parts = call(aten.where.self, own, parts, zero)
        self.chosen[x] = call(aten.sum.dim_IntList, parts, [0])
        return self.chosen[x]

    def _is_own(self) -> fx.Node:
        """[groups, rows]: whether a row's expert is in a group."""
        if self.own is None:
            call, per = self.build.call, self.experts // self.groups
            with self.build.before(self.sort.next):
                group = call(aten.div.Tensor_mode, self.key, per, rounding_mode="floor")
                each = call(
                    prims.iota.default,
                    self.groups,
                    start=0,
                    step=1,
                    dtype=torch.int64,
                    device=self.key.meta["val"].device,
                    requires_grad=False,
                )
                each = call(aten.unsqueeze.default, each, 1)
                self.own = call(aten.eq.Tensor, group, each)
        return self.own

    # Calls

    def _put(
        self,
        node: fx.Node,
        x: fx.Node,
        indices: Any,
        values: fx.Node,
        accumulate: bool = False,
    ) -> _Rows | fx.Node | None:
        index, *more = indices
        if more:
            return None
        fills = not accumulate and shape_of(x)[0] == self.rows
        if index in self.inverse:
            fills = fills or (_is_zero(x) and shape_of(x)[0] == self.rows)
            return _Rows(0, each=self._copy(values)) if fills else None
        found = self._number(index)
        if found is None:
            return None
        if fills and found[1] == 1:
            if values in self.values:
                return self._choose(self.values[values])
            if _counts_up(values, self.rows):
                self.inverse.add(node)
            return None
        return self._add(x, index, values) if accumulate else None

    def _add(self, x: fx.Node, index: fx.Node, values: fx.Node) -> fx.Node | None:
        """Rows in order added to those of ``x`` that an index names."""
        found, rows = self._number(index), self.values.get(values)
        if found is None or rows is None or rows.dim != 0:
            return None
        chosen, call = self._choose(rows), self.build.call
        if chosen is None:
            return None
        one, divided = found
        shape = shape_of(x)
        if divided is None or shape[0] * divided != self.rows:
            return call(aten.index_put.default, x, [one], chosen, True)
        if divided > 1:
            parts = [shape[0], divided, *shape[1:]]
            chosen = call(aten.reshape.default, chosen, parts)
            chosen = call(aten.sum.dim_IntList, chosen, [1])
        return chosen if _is_zero(x) else call(aten.add.Tensor, x, chosen)

    def _product(self, node: fx.Node) -> _Rows | fx.Node | None:
        x, y, _, *grad = node.args
        ours = torch.ops.fxpar
        call, key, groups = self.build.call, self.key, self.groups
        rows, others = self.values.get(x), self.values.get(y)  # type: ignore[arg-type]
        if self.products[node] != self.experts or rows is None:
            return None
        left: Any = self._each(x)  # type: ignore[arg-type]
        if grad:
            dy = self._each(grad[0])  # type: ignore[arg-type]
            if dy is None or left is None:
                return None
            weight = call(aten.permute.default, y, [0, 2, 1])
            self.results[node] = {
                0: _Rows(0, each=call(ours.expert_mm.default, dy, weight, key, groups)),
                1: call(ours.expert_outer.default, left, dy, key, self.experts, groups),
            }
            return None
        if others is None:
            if left is None or rows.dim != 0 or len(shape_of(y)) != 3:  # type: ignore
                return None
            return _Rows(0, each=call(ours.expert_mm.default, left, y, key, groups))
        right = self._each(y)  # type: ignore[arg-type]
        if right is None or left is None or (rows.dim, others.dim) != (1, 0):
            return None
        left = call(aten.permute.default, left, [1, 0])
        return call(ours.expert_outer.default, left, right, key, self.experts, groups)

    def _sort_again(self, node: fx.Node) -> None:
        """A sort of the order gives where in order each row is."""
        found = self._number(node.args[0])
        if found is not None and found[1] == 1 and len(node.args) < 3:
            self.inverse |= {
                user
                for user in node.users
                if user.target is operator.getitem and user.args[1] == 1
            }

    def _sum(self, node: fx.Node) -> fx.Node | _Rows | None:
        x: Any = node.args[0]
        rows = self.values.get(x)
        if rows is None:
            return None
        dims = node.args[1] if len(node.args) > 1 else None
        over = range(len(shape_of(x))) if not dims or node.target in _SUMS[1:] else dims
        if rows.dim not in [d % len(shape_of(x)) for d in over]:  # type: ignore
            return self._by_row(node)
        chosen = self._choose(rows) if rows.dim == 0 else None
        if chosen is None:
            return None
        return self.build.call(node.target, chosen, *node.args[1:], **node.kwargs)  # type: ignore

    def _by_row(self, node: fx.Node) -> _Rows | None:
        """A call that makes rows one by one, of rows in place."""
        held = {x: self.values[x] for x in node.all_input_nodes if x in self.values}
        call = row_call(node, {x: rows.dim for x, rows in held.items()})
        if call is None:
            return None
        ones = {x: rows.one for x, rows in held.items() if rows.one is not None}
        if len(ones) == len(held):
            made = call.again(self.build, ones, self.rows)
            self._divide(node, made, ones)
        else:
            each = {x: self._each(x) for x in held}
            if None in each.values():
                return None
            made = call.again(self.build, each, self.groups * self.rows)  # type: ignore
        kind = "one" if len(ones) == len(held) else "each"
        if isinstance(made.meta["val"], torch.Tensor):
            return _Rows(call.result_dims[0], **{kind: made})
        self.results[node] = {
            i: _Rows(d, **{kind: self._item(made, i)})
            for i, d in enumerate(call.result_dims)
        }
        return None

    def _divide(
        self, node: fx.Node, made: fx.Node, ones: dict[fx.Node, fx.Node]
    ) -> None:
        """Note the number of rows divided by a whole number."""
        x, *more = node.args
        floor = node.kwargs.get("rounding_mode") == "floor"
        if node.target is aten.div.Tensor_mode and floor and isinstance(more[0], int):
            before = self.numbers.get(ones[x]) if x in ones else None  # type: ignore
            if before is not None:
                self.numbers[made] = before * more[0]

    def _item(self, node: fx.Node, i: int) -> fx.Node:
        item = self.build.graph.call_function(operator.getitem, (node, i))
        item.meta["val"] = node.meta["val"][i]
        self.build.stamp(item)
        return item

    def write(self, graph: fx.Graph) -> list[str]:
        """Put what is computed in place instead of what was in order, if nothing is
        left that needs the order; else a note of what does."""
        live = set[fx.Node]()
        stack = [
            node for node in graph.nodes if node.op == "output" or node.is_impure()
        ]
        while stack:
            node = stack.pop()
            if node not in live:
                live.add(node)
                stack += [self.instead.get(x, x) for x in node.all_input_nodes]
        if live & set(self.products):
            known = {*self.values, *self.results}
            readers = [
                node
                for node in graph.nodes
                if node in live - known and known.intersection(node.all_input_nodes)
            ]
            return [_left(readers[0])] if readers else []
        for node, made in self.instead.items():
            node.replace_all_uses_with(made)
        return []


def _left(reader: fx.Node) -> str:
    """A note of what needs rows sorted by expert."""
    at = user_line(reader)
    where = f" at {at}" if at else ""
    return (
        f"rows sorted by expert are read by {reader.target}{where} in an order that no "
        "rule keeps: all tokens are sorted together, experts stay whole"
    )


def _behind(full: Sequence[int], rows: int) -> list[int] | None:
    """The dims behind those that make so many rows together."""
    count = 1
    for d, n in enumerate(full):
        count *= n
        if count == rows and full[d + 1 : d + 2] != [1]:
            return list(full[d + 1 :])
    return None


def _is_zero(node: fx.Node) -> bool:
    """Whether a value is zero everywhere."""
    return node.target is aten.full.default and node.args[1] == 0


def _counts_up(node: fx.Node, rows: int) -> bool:
    """Whether a value is the numbers from 0 up to ``rows``."""
    if node.target is prims.iota.default:
        given = node.kwargs.get("start", 0), node.kwargs.get("step", 1)
        return (*node.args[:1], *given) == (rows, 0, 1)
    if node.target is aten.arange.default:
        return node.args == (rows,)
    return node.target is aten.arange.start_step and node.args in (
        (0, rows),
        (0, rows, 1),
    )
