"""Applies verbs to attention: ``overlap`` to gathers and an attention that reads them,
by the ring for its kind, and ``balance``. ``proposals`` gives the lines that a graph
takes.

``overlap``. In: an Edit, gathers, and an attention. Out: its results from parts of keys
and values that travel along a ring. Never changes a mask: parts count from where they
begin.

``balance``: queries of causal attention change places, so that all ranks have equal
work. In: an Edit and an attention with a causal mask by index, its queries split along
the sequence. Out: a balanced attention in its place. Of such queries the first rank's
see few keys, the last rank's all. Each rank keeps the first half of its queries and
swaps the second with its mirror, the rank as far from the other end; results are
swapped back. In a backward, operands that belong to queries are swapped, and their
gradients swapped back. Keys are whole, and never change places. This is the head-tail
order of Llama 3 (arXiv 2407.21783, section 3.3.2), for attention alone.

The ring of a balanced attention: after ``balance(attention)`` the verb ``overlap([ag,
ag_1], attention, ring=1)`` has keys change places as queries did: a rank keeps the
first half of its own and swaps the second with its mirror, the rank as far from the
other end of the sequence. For every part that arrives, two pairs among the two halves
of its keys and the rank's two sets of queries see one another, on every rank in every
hop, so that the work is equal. Gradients of keys and values return in the same order,
and are swapped back.
The order is zigzag ring attention's (Zhu, github.com/zhuzilin/ring-flash-attention).

The ring of a flex_attention: on each part that arrives, the functions of scores and
masks count from where the part begins in the sequence, lists of blocks are those of its
keys, and gradients of captured tensors are summed over the parts. No block of the mask
is cut: parts are whole blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import fx

from fxpar._torch.objects import calls_where
from fxpar.features.sequences import local_flex
from fxpar.features.sequences.merge_attention import RunningAttention, items
from fxpar.features.sequences.ring_attention import (
    FLEX,
    SEQUENCE,
    Result,
    RingAttention,
    form_of,
)
from fxpar.fusion.choose_schedule import Attempts
from fxpar.fusion.node_legality import arrange
from fxpar.fusion.schedule import Line, Schedule
from fxpar.fusion.schedule_edit import Edit, refuse
from fxpar.fusion.verbs.ring import Ring, of_rank
from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder
from fxpar.passes.lower import restrided
from fxpar.sharding import rank_ints
from fxpar.sharding.cost.program_kernels import obstacle
from fxpar.sharding.mesh import Mesh

aten = torch.ops.aten
ours = torch.ops.fxpar


class _HalvesRing(Ring):
    """Is a ring of parts that hold the first half of a rank's rows and the second half
    of its mirror rank's."""

    def cut(self, build: Builder, x: fx.Node, dim: int, i: int) -> fx.Node:
        shape, halves = list(x.meta["val"].shape), 2 * self.chunks
        split_shape = [*shape[:dim], halves, shape[dim] // halves, *shape[dim + 1 :]]
        x = build.call(aten.reshape.default, x, split_shape)
        near = build.offset(self.axes, 2, 2 * self.parts[i], around=halves)
        far = build.compute(operator.sub, halves - 1, near)
        parts = [build.call(aten.select.int, x, dim, place) for place in (near, far)]
        return build.call(aten.cat.default, parts, dim)


class BalancedRing(RingAttention):
    """Is a balanced attention, the gathers it reads, and the ops between them."""

    kind = _HalvesRing

    def _shards(self, build: Builder) -> list[fx.Node]:
        return [self._home(build, g.args[0], int(g.args[1])) for g in self.gathers]

    def _home(self, build: Builder, x: fx.Node, dim: int) -> fx.Node:
        rows = x.meta["val"].shape[dim]
        half = rows // 2
        near = build.call(aten.slice.Tensor, x, dim, 0, half)
        far = build.call(aten.slice.Tensor, x, dim, half, rows)
        parts = [near, mirrored(build, far, self.axes)]
        return build.call(aten.cat.default, parts, dim)

    def _on_part(
        self, build: Builder, ring: Ring, i: int, parts: Sequence[fx.Node]
    ) -> fx.Node:
        """Append the attention on the i-th part, whose first half keeps its place and
        whose second half is as far from the end as the first from the begin."""
        values, rows = self._arguments(ring, i, parts), self.size // ring.chunks
        start = self._start(build, ring, i, self.size)
        for name in ("near_ahead", "far_ahead"):
            values[name] = build.compute(operator.sub, values[name], start)
        back = build.compute(operator.mul, start, 2)
        values["gap"] = build.compute(operator.sub, self.size - rows // 2, back)
        return build.call(self.node.target, *values.values())


# Names of arguments that are functions of scores.
_SCORES = ("score_mod", "fw_graph", "joint_graph")

# Position among the results of a backward of the gradients of captured tensors.
_CAPTURED = 3

# Positions in a block mask: the number of keys, lists of blocks of keys, lists of
# blocks of queries for each block of keys, the order in which a backward writes, and
# the keys of a block.
_KEYS, _BY_QUERIES, _BY_KEYS, _ORDER, _BLOCK = 1, (2, 4), (6, 8), slice(10, -3), -2


class FlexRing(RingAttention):
    """Is a flex_attention, the gathers it reads, and the ops between them."""

    def _check(
        self, queries: fx.Node, chunks: int | None, dim: int | None, ring: int
    ) -> None:
        super()._check(queries, chunks, dim, ring)
        mask = self.arguments["block_mask"]
        block = mask[_BLOCK]
        if any(x is not None for x in mask[_ORDER]):
            raise refuse("overlap", self.node, "writes in an order of all blocks")
        if self.size > block and self.size % (block * self.edit.mesh.count(self.axes)):
            why = f"is masked in blocks of {block} keys, of which a part cuts one"
            raise refuse("overlap", self.node, why)

    def _items(self) -> list[tuple[fx.Node, Result]]:
        items = list[tuple[fx.Node, Result]]()
        for item, result in super()._items():
            if self.form.backward and result == _CAPTURED:
                items += [(inner, (_CAPTURED, inner.args[1])) for inner in item.users]
            items.append((item, result))
        return items

    def _on_part(
        self, build: Builder, ring: Ring, i: int, parts: Sequence[fx.Node]
    ) -> fx.Node:
        values, key = self._arguments(ring, i, parts), local_flex.SCORE[-1]
        for name in _SCORES:
            if name in values:
                values[name] = self._counting_on(build, ring, i, values[name], key)
        values["block_mask"] = self._mask_on(build, ring, i, values["block_mask"])
        options = local_flex.weighted_options(values["kernel_options"])
        values["kernel_options"] = options
        # Only gradients of keys and values have another shape than in the whole:
        # functions of scores need not run for fake values.
        node = build.graph.call_function(self.node.target, tuple(values.values()))
        results = list(self.node.meta["val"])
        if self.form.backward:
            read = [values[name].meta["val"] for name in self.form.read[1:]]
            with build.fake_mode:
                results[1:3] = map(torch.empty_like, read)
        node.meta["val"] = tuple(results)
        build.stamp(node)
        return node

    def _counting_on(
        self, build: Builder, ring: Ring, i: int, function: fx.Node, key: int
    ) -> fx.Node:
        """Return a function whose input ``key`` counts from the begin of the i-th
        part."""
        starts = {key: lambda inner: self._start(inner, ring, i, self.size)}
        return local_flex.shifted(build, function, starts, f"{self.node.name}_{i}")

    def _mask_on(
        self, build: Builder, ring: Ring, i: int, mask: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Return the block mask of the i-th part of the keys."""
        own, function = list(mask), mask[-1]
        own[-1] = self._counting_on(build, ring, i, function, local_flex.MASK[-1])
        own[_KEYS] = self.size // ring.chunks
        blocks = self.size // mask[_BLOCK]
        if blocks <= 1:
            return tuple(own)
        count, first = blocks // ring.chunks, self._start(build, ring, i, blocks)
        for at in _BY_QUERIES:
            if mask[at] is not None:
                number, index = mask[at : at + 2]
                lists = local_flex.own_blocks(build, number, index, first, count)
                own[at : at + 2] = lists
        for at in _BY_KEYS if self.form.backward else ():
            if mask[at] is not None:
                own[at : at + 2] = [ring.cut(build, x, 2, i) for x in mask[at : at + 2]]
        return tuple(own)

    def _weighted(
        self, build: Builder, attention: fx.Node, at: int
    ) -> tuple[fx.Node, fx.Node]:
        out, logs = super()._weighted(build, attention, at)
        return out, local_flex.natural(build, logs, out)

    def _logs(
        self, build: Builder, total: fx.Node, running: RunningAttention
    ) -> fx.Node:
        return local_flex.to_base_2(build, total, running.shift)

    def _further(self, build: Builder, items: Sequence[fx.Node]) -> fx.Node:
        return reduce(partial(build.call, aten.maximum.default), items)

    def _summed(
        self, build: Builder, attention: fx.Node
    ) -> dict[Result, tuple[fx.Node, torch.Tensor]]:
        captured = self.node.meta["val"][_CAPTURED]
        summed = super()._summed(build, attention)
        gradients = build.call(operator.getitem, attention, _CAPTURED)
        for k, value in enumerate(captured):
            # Kernels make no gradient for integers, though fakes of kernels have one.
            if value is not None and value.is_floating_point():
                item = build.call(operator.getitem, gradients, k)
                summed[_CAPTURED, k] = item, value
        return summed


def proposals(state: Attempts) -> dict[str, Schedule]:
    """Return a ring for each attention that reads gathered keys, balanced queries, and
    both, for the graph with the best schedule of ``state``."""
    best = state.schedule
    graph = state.graph(best)
    rings, balances = rings_of(graph), balances_of(graph, state.mesh)
    ways = {"rings of keys and values": rings, "attentions balanced": balances}
    if rings.lines and balances.lines:
        both = balances + rings_of(state.graph(best + balances))
        ways["lines of balanced rings"] = both
    return ways


def rings_of(graph: fx.Graph) -> Schedule:
    """Return a line for each attention of a local graph with steps whose keys and
    values are gathered for it."""
    lines = []
    for node in calls_where(graph, lambda target: form_of(target) is not None):
        form = form_of(node.target)
        assert form is not None
        arguments = form.arguments(node)
        sources = [_gather_of(arguments[name]) for name in form.read[1:]]
        gathers = [gather for gather in sources if gather is not None]
        names = tuple(dict.fromkeys(gather.name for gather in gathers))
        if len(gathers) == 2 and len({gather.args[1:] for gather in gathers}) == 1:
            lines.append(Line("overlap", (names, node.name), (("ring", 1),)))
    return Schedule(tuple(lines))


def _gather_of(x: Any) -> fx.Node | None:
    """Return the gather from which alone a value is computed; None if there is none."""
    while x.target is not collective_nodes.all_gather:
        if len(x.all_input_nodes) != 1:
            return None
        (x,) = x.all_input_nodes
    return x


def overlap(
    edit: Edit,
    starts: tuple[fx.Node, ...],
    ends: tuple[fx.Node, ...],
    chunks: int | None,
    dim: int | None,
    ring: int | None,
    fused: int,
) -> list[fx.Node] | None:
    """Apply ``overlap([ag, ag_1], attention, ring=1)``. Return its output, or the
    gradients of keys and values; None if it is no ring of one attention."""
    form = form_of(ends[0].target) if len(ends) == 1 else None
    if form is None or ring is None or fused:
        return None
    scheme = BalancedRing if form.sets > 1 else RingAttention
    if form in FLEX.values():
        scheme = FlexRing
    return scheme(edit, form, starts, ends[0], ring, chunks, dim).run()


# The verb ``balance``

_FORWARD = ours.causal_attention.default
_BACKWARD = ours.causal_attention_backward.default


def balances_of(graph: fx.Graph, mesh: Mesh) -> Schedule:
    """Return a line for each attention of a local graph that can be balanced."""
    lines = [
        Line("balance", (node.name,))
        for node in graph.nodes
        if node.target in (_FORWARD, _BACKWARD) and _obstacle(node, mesh) is None
    ]
    return Schedule(tuple(lines))


def balance(edit: Edit, node: fx.Node) -> list[fx.Node]:
    """Apply ``balance(attention)``. Return its output, or the gradient of queries."""
    if node.target not in (_FORWARD, _BACKWARD):
        raise refuse("balance", node, "is not attention with a causal mask by position")
    why = _obstacle(node, edit.mesh)
    if why is not None:
        raise refuse("balance", node, why)
    rewrite = _balanced if node.target is _FORWARD else _balanced_backward
    with edit.before(node) as build:
        results = rewrite(build, node)
    users = list(node.users)
    for user in users:
        user.replace_all_uses_with(results[user.args[1]])
    edit.erase(users)
    arrange(edit.graph)
    return [results[0]]


def _obstacle(node: fx.Node, mesh: Mesh) -> str | None:
    """Return why an attention cannot be balanced; None if it can."""
    queries, keys = _rows(node)
    ahead: Any = node.args[-2]
    if not isinstance(ahead, fx.Node) or ahead.target is not rank_ints.offset:
        return (
            "has queries that begin at the same position on all ranks, or not at "
            "equal steps"
        )
    _, axes, stride, *begin = ahead.args
    count = mesh.count(axes)
    if stride != queries or any(begin):
        return "has queries that are not in order"
    why = obstacle(queries, keys, count)
    if why is not None:
        return why
    if any(user.target is not operator.getitem for user in node.users):
        return "gives a tuple that is read whole"
    return None


def _rows(node: fx.Node) -> tuple[int, int]:
    """Return the numbers of queries and of keys of a call."""
    first = int(node.target is _BACKWARD)
    query, key = (x.meta["val"] for x in node.args[first : first + 2])
    return query.shape[SEQUENCE], key.shape[SEQUENCE]


def mirrored(build: Builder, x: fx.Node, axes: Sequence[str]) -> fx.Node:
    """Return ``x`` of the mirror rank: as far from the other end of those along
    axes."""
    last = build.mesh.count(axes) - 1
    return of_rank(build, x, axes, lambda i: last - i)


class _Halves:
    """Splits and joins tensors with one row for each query: the half that a rank keeps,
    and the half that it swaps."""

    def __init__(self, build: Builder, node: fx.Node) -> None:
        self.build, self.rows = build, _rows(node)[0]
        ahead: Any = node.args[-2]
        self.axes = tuple(ahead.args[1])

    def places(self) -> tuple[Any, Any, int]:
        """Return the index of the first query in each half that a rank attends: its own
        first half, and the second half of its mirror rank; and of the second half of
        the keys."""
        half, count = self.rows // 2, self.build.mesh.count(self.axes)
        near = self.build.offset(self.axes, 2 * half)
        far = self.build.offset(self.axes, -2 * half, (2 * count - 1) * half)
        return near, far, count * half

    def split(self, x: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return the rows that a rank attends: its own first half, and the mirror's
        second."""
        slice_, half = aten.slice.Tensor, self.rows // 2
        near = self.build.call(slice_, x, SEQUENCE, 0, half)
        far = self.build.call(slice_, x, SEQUENCE, half, self.rows)
        return near, mirrored(self.build, far, self.axes)

    def joined(self, near: fx.Node, far: fx.Node, like: torch.Tensor) -> fx.Node:
        """Return the rows in their first order, laid out as ``like``: inverse of
        ``split``."""
        rows = [near, mirrored(self.build, far, self.axes)]
        return restrided(self.build, self.build.call(aten.cat.default, rows, 2), like)


def _balanced(build: Builder, node: fx.Node) -> dict[int, fx.Node]:
    """Return output and log-sum-exp, by position."""
    query, key, value, _, scale = node.args
    halves, whole = _Halves(build, node), node.meta["val"]
    near, far = halves.split(query)
    op = ours.balanced_causal_attention.default
    arguments = near, key, value, far, *halves.places(), scale
    outputs = build.call(op, *arguments)
    near_out, near_lse, far_out, far_lse = items(build, outputs)
    return {
        0: halves.joined(near_out, far_out, whole[0]),
        1: halves.joined(near_lse, far_lse, whole[1]),
    }


def _balanced_backward(build: Builder, node: fx.Node) -> dict[int, fx.Node]:
    """Return gradients of queries, keys and values, by position."""
    grad, query, key, value, out, lse, _, scale = node.args
    halves, whole = _Halves(build, node), node.meta["val"]
    sets = [halves.split(x) for x in (grad, query, out, lse)]
    near, far = zip(*sets, strict=True)
    op = ours.balanced_causal_attention_backward.default
    arguments = (*near[:2], key, value, *near[2:], *far, *halves.places(), scale)
    near_dq, far_dq, dk, dv = items(build, build.call(op, *arguments))
    return {0: halves.joined(near_dq, far_dq, whole[0]), 1: dk, 2: dv}
