"""Applies verb ``overlap`` to gathers of keys and values and a flex_attention that
reads them.

In and out: as for any ring of an attention (``ring_attention``). On each part that
arrives, the functions of scores and masks count from where the part begins in the
sequence, lists of blocks are those of its keys, and gradients of captured tensors are
summed over the parts. Never cuts a block of the mask: parts are whole blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import fx

from fxpar.features.sequences import local_flex
from fxpar.features.sequences.merge_attention import RunningAttention
from fxpar.features.sequences.ring_attention import (
    Result,
    RingAttention,
)
from fxpar.fusion.schedule_edit import refuse
from fxpar.fusion.verbs.ring import Ring
from fxpar.graph.builder import Builder, Size

aten = torch.ops.aten

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

    def _check(self, chunks: int | None, dim: int | None, ring: int) -> None:
        super()._check(chunks, dim, ring)
        mask = self.form.argument(self.node, "block_mask")
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
        args, names = self._arguments(ring, i, parts), self.form.names
        key = local_flex.SCORE[-1]
        for name in _SCORES:
            if name in names:
                at = names.index(name)
                args[at] = self._counting_on(build, ring, i, args[at], key)
        at = names.index("block_mask")
        args[at] = self._mask_on(build, ring, i, args[at])
        at = names.index("kernel_options")
        args[at] = local_flex.weighted_options(args[at])
        return self._call(build, args)

    def _call(self, build: Builder, args: Sequence[Any]) -> fx.Node:
        """Append the attention on a part. Only gradients of keys and values have
        another shape than in the whole: functions of scores need not run for fake
        values."""
        node = build.graph.call_function(self.node.target, tuple(args))
        results = list(self.node.meta["val"])
        if self.form.backward:
            read = args[self.form.keys : self.form.keys + 2]
            with build.fake_mode:
                results[1:3] = [torch.empty_like(x.meta["val"]) for x in read]
        node.meta["val"] = tuple(results)
        build.stamp(node)
        return node

    def _counting_on(
        self, build: Builder, ring: Ring, i: int, function: fx.Node, key: int
    ) -> fx.Node:
        """Return a function whose input ``key`` counts from the begin of the i-th
        part."""
        rows = self.size // ring.chunks

        def start(inner: Builder) -> Size:
            return inner.offset(self.axes, rows, ring.parts[i] * rows, around=self.size)

        name = f"{self.node.name}_{i}"
        return local_flex.shifted(build, function, {key: start}, name)

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
        count = blocks // ring.chunks
        first = build.offset(self.axes, count, ring.parts[i] * count, around=blocks)
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
