"""Applies verb ``overlap`` to gathers and an attention that reads them, by the ring for
its kind.

In: an Edit, gathers, and an attention. Out: its results from parts of keys and values
that travel along a ring. ``proposals`` gives the lines that a graph takes. Never
changes a mask: parts count from where they begin.

The ring of a balanced attention: after ``balance(attention)`` the verb ``overlap([ag,
ag_1], attention, ring=1)`` has keys change places as queries did: a rank keeps the
first half of its own and swaps the second with its mirror, the rank as far from the
other end of the sequence. For every part that arrives, two pairs among the two halves
of its keys and the rank's two sets of queries see one another, on every rank in every
hop, so that the work is equal. Gradients of keys and values return in the same order,
and are swapped back.

The order is zigzag ring attention's (Zhu, github.com/zhuzilin/ring-flash-attention).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpar.features.sequences.balance import balances_of, mirrored
from fxpar.features.sequences.flex_ring import FlexRing
from fxpar.features.sequences.ring_attention import (
    FLEX,
    SEQUENCE,
    RingAttention,
    form_of,
)
from fxpar.fusion.schedule import Line, Schedule
from fxpar.fusion.schedule_attempts import Attempts
from fxpar.fusion.schedule_edit import Edit
from fxpar.fusion.verbs.ring import Ring
from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder

aten = torch.ops.aten


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

    def _check(self, chunks: int | None, dim: int | None, ring: int) -> None:
        self._check_ring(chunks, dim, ring)

    def _ring(self) -> Ring:
        order = (
            _HalvesRing.farthest_first
            if self.form.backward
            else _HalvesRing.nearest_first
        )
        return order(self.edit.mesh, self.axes, SEQUENCE, 1)

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
        args = self._arguments(ring, i, parts)
        rows = self.size // ring.chunks
        start = build.offset(self.axes, rows, ring.parts[i] * rows, around=self.size)
        *args, near_ahead, far_ahead, _, scale = args
        aheads = [
            build.compute(operator.sub, ahead, start)
            for ahead in (near_ahead, far_ahead)
        ]
        back = build.compute(operator.mul, start, 2)
        gap = build.compute(operator.sub, self.size - rows // 2, back)
        return build.call(self.node.target, *args, *aheads, gap, scale)


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
    for node in graph.nodes:
        form = form_of(node.target)
        if form is None:
            continue
        sources = [_gather_of(node.args[form.keys + i]) for i in range(2)]
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
