"""Rows of tokens in slots that are sent to the groups of their experts, and back.

Where ``group_copies`` has every row once for each group, here each group has slots for
the rows of each source (``dispatch_ops``), ``[groups * sources * room, ...]``: split by
sources before they are sent and by groups behind it, an all-to-all each way. In: a
graph in global shapes. Out: nodes appended where the builder stands, each made once.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxpar.passes.builder import Builder, shape_of
from fxpar.passes.experts.dispatch_ops import NONE, room_of
from fxpar.passes.experts.group_copies import before_expand
from fxpar.sharding.program import user_line

aten = torch.ops.aten
ours = torch.ops.fxpar


class DispatchedRows:
    """Slots of rows for groups of experts. ``key``: the expert of each row;
    ``sources``: parts of the rows; ``share``: as ``dispatch_ops.room_of``."""

    def __init__(
        self,
        build: Builder,
        key: fx.Node,
        experts: int,
        groups: int,
        sources: int,
        share: float,
    ) -> None:
        self.build, call = build, build.call
        count = shape_of(key)[0]
        room = room_of(count, groups, sources, share)
        slots = call(ours.dispatch_slots.default, key, experts, groups, sources, room)
        rows, self.slots, most = (call(operator.getitem, slots, i) for i in range(3))
        where = user_line(key) or ""
        self.slot_rows = call(ours.within.default, rows, most, room, where)
        self.shape = [groups, sources, room]
        # Rows of all groups, and what a product takes as the experts of rows.
        self.count = groups * sources * room
        self._sent: dict[tuple[fx.Node, int], fx.Node] = {}
        self._combined: dict[fx.Node, fx.Node] = {}
        self.ids = self._send(key, 1, NONE)

    def of(self, x: fx.Node) -> fx.Node:
        """Rows in their slots. What is expanded is sent once."""
        source, leading = before_expand(x)
        tokens, features = leading[0], list(shape_of(x)[1:])
        if len(leading) == 2 and shape_of(source) == (tokens, 1, *features):
            source = self.build.call(aten.reshape.default, source, [tokens, *features])
            return self.of_tokens(source, leading[1])
        return self._send(x, 1)

    def of_tokens(self, x: fx.Node, copies: int) -> fx.Node:
        """In their slots, rows of tokens that each make so many ``copies``."""
        return self._send(x, copies)

    def _send(self, x: fx.Node, copies: int, fill: int = 0) -> fx.Node:
        if (x, copies) not in self._sent:
            call = self.build.call
            sent = call(ours.dispatch_rows.default, x, self.slot_rows, copies, fill)
            full = [self.count, *shape_of(x)[1:]]
            self._sent[x, copies] = call(aten.reshape.default, sent, full)
        return self._sent[x, copies]

    def choose(self, x: fx.Node) -> fx.Node:
        """Each row as it is in its slot."""
        if x not in self._combined:
            call, full = self.build.call, [*self.shape, *shape_of(x)[1:]]
            slots = call(aten.reshape.default, x, full)
            self._combined[x] = call(ours.combine_rows.default, slots, self.slots)
        return self._combined[x]
