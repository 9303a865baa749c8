"""Brings rows of tokens to groups of experts, and back: copied for each group, or in
slots that are sent.

``GroupCopies``: with ``groups`` > 1 a value of ``rows`` rows comes once for each group,
``[groups * rows, ...]``; the copy of a row that counts is the one of the group that has
the row's expert (``expert_ops``). ``DispatchedRows``: each group has slots for the rows
of each source (``dispatch_slots``), ``[groups * sources * room, ...]``: split by
sources before they are sent and by groups after it, an all-to-all each way.

In: a graph in global shapes. Out: nodes appended at the builder's place. Never: makes
a node twice, or changes one that is there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpar.features.experts.expert_ops import room_of
from fxpar.graph.builder import Builder, shape_of
from fxpar.graph.exact_ops import NONE
from fxpar.sharding.factors import Axes
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import user_line

aten = torch.ops.aten


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
        self._copies: dict[fx.Node, fx.Node] = {}
        self._chosen: dict[fx.Node, fx.Node] = {}
        self._own: fx.Node | None = None

    def of(self, x: fx.Node) -> fx.Node:
        """Return rows once for each group. An expanded value is expanded once."""
        if self.groups == 1:
            return x
        if x not in self._copies:
            source, leading = before_expand(x)
            features = shape_of(x)[1:]
            self._copies[x] = expanded(
                self.build, source, leading, features, self.groups
            )
        return self._copies[x]

    def of_tokens(self, x: fx.Node, copies: int) -> fx.Node:
        """Return rows once for each group, of tokens that each make ``copies`` rows."""
        if copies == 1:
            return self.of(x)
        tokens, *features = shape_of(x)
        x = self.build.call(aten.unsqueeze.default, x, 1)
        return expanded(self.build, x, [tokens, copies], features, self.groups)

    def choose(self, x: fx.Node) -> fx.Node | None:
        """Return the copy that counts of each row; None if ``x`` cannot be added up."""
        if self.groups == 1 or x in self._chosen:
            return self._chosen.get(x, x)
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
        self._chosen[x] = call(aten.sum.dim_IntList, parts, [0])
        return self._chosen[x]

    def is_own(self) -> fx.Node:
        """Return [groups, rows]: whether a row's expert is in a group."""
        if self._own is None:
            call, per = self.build.call, self.experts // self.groups
            with self.build.before(self.key.next):
                first = self.build.iota(self.groups, self.device, per)
                first = call(aten.unsqueeze.default, first, 1)
                low = call(aten.ge.Tensor, self.key, first)
                end = call(aten.add.Tensor, first, per)
                high = call(aten.lt.Tensor, self.key, end)
                self._own = call(aten.bitwise_and.Tensor, low, high)
        return self._own


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


ours = torch.ops.fxpar


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
        self._sent: dict[tuple[fx.Node, int], fx.Node] = {}
        self._slots_of: dict[fx.Node, fx.Node] = {}
        self._combined: dict[fx.Node, fx.Node] = {}
        self.ids = self._send(key, 1, NONE)

    def of(self, x: fx.Node) -> fx.Node:
        """Return rows in their slots. An expanded value is sent once."""
        if x not in self._slots_of:
            self._slots_of[x] = self._of(x)
        return self._slots_of[x]

    def _of(self, x: fx.Node) -> fx.Node:
        source, leading = before_expand(x)
        tokens, features = leading[0], list(shape_of(x)[1:])
        if len(leading) == 2 and shape_of(source) == (tokens, 1, *features):
            source = self.build.call(aten.reshape.default, source, [tokens, *features])
            return self.of_tokens(source, leading[1])
        return self._send(x, 1)

    def of_tokens(self, x: fx.Node, copies: int) -> fx.Node:
        """Return the rows of tokens that each make ``copies`` rows, in their slots."""
        return self._send(x, copies)

    def _send(self, x: fx.Node, copies: int, fill: int = 0) -> fx.Node:
        if (x, copies) not in self._sent:
            call = self.build.call
            sent = call(ours.dispatch_rows.default, x, self.slot_rows, copies, fill)
            if self.across:
                sent = call(ours.exchange_slots.default, sent, self.across)
            else:
                full = [self.count, *shape_of(x)[1:]]
                sent = call(aten.reshape.default, sent, full)
            self._sent[x, copies] = sent
        return self._sent[x, copies]

    def choose(self, x: fx.Node) -> fx.Node:
        """Return each row from its slot."""
        if x not in self._combined:
            call, full = self.build.call, [*self.shape, *shape_of(x)[1:]]
            if self.across:
                sizes = self.shape[:2]
                slots = call(ours.return_slots.default, x, *sizes, self.across)
            else:
                slots = call(aten.reshape.default, x, full)
            self._combined[x] = call(ours.combine_rows.default, slots, self.slots)
        return self._combined[x]
