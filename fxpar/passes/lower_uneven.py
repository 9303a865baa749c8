"""Lowers reshards of uneven shards, by padding them to equal ones.

``lower_uneven`` pads the dims that a step gathers or splits, lowers it as ``lower``
does for even shards, and slices the result to this rank's rows. In: a step, its
operand, and how its kind is lowered. Out: the node of the result. Never: padding
reaches a result, or this module chooses how a kind is lowered.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder, Size
from fxpar.graph.collective_nodes import OWN_SHAPE, Axes, Cut
from fxpar.sharding import shard_sizes
from fxpar.sharding.spec import Spec

aten = torch.ops.aten


def lower_uneven(
    lower: Callable[..., fx.Node],
    node: fx.Node,
    cut: Cut,
    build: Builder,
    x: fx.Node,
    *args: Any,
) -> fx.Node:
    """Return the result of a step on uneven shards: the dims that it gathers or splits
    are padded to equal shards, and the result is sliced to this rank's rows. Unless an
    axis has shares, only the last shards are short, so all valid rows come first in a
    gathered dim; with shares, each part is sliced out by itself."""
    before, after = (
        [_own_size(build, cut, d, axes) for d, axes in enumerate(dims)]
        for dims in (cut.before, cut.after)
    )
    kind, changed = collective_nodes.kind_of(node), _changed(cut)
    if kind == "slice":
        return _own_slice(build, x, cut, changed)
    uneven = [d for d in changed if not cut.is_even_in(build.mesh, d)]
    if uneven and (kind == "permute" or any(_is_far(cut, d) for d in uneven)):
        raise PlanError(
            f"{node.name} ({kind}) of {list(cut.shape)} from {Spec.of(cut.before)} to "
            f"{Spec.of(cut.after)} would move parts of shards"
        )
    padded, short = list(before), {}
    joined_dims: dict[int, tuple[Size, list[Size]]] = {}
    for d in uneven:
        axes = collective_nodes.axes_of(node)
        count = build.mesh.count(axes)
        fewer = min(cut.before[d], cut.after[d], key=len)
        gathers = fewer == cut.after[d]
        if shard_sizes.has_shares(build.mesh, axes):
            room = build.largest_part(cut.shape[d], fewer, axes[0])
            parts = build.part_sizes(cut.shape[d], fewer, axes[0])
            if gathers:
                joined_dims[d] = room, parts
            else:
                x = _pad_parts(build, x, d, room, parts)
                before[d] = build.product((room, count))
        else:
            room = _room(build, build.own_size(cut.shape[d], fewer), count)
        whole = build.product((room, count))
        padded[d], result_rows = (room, whole) if gathers else (whole, room)
        if result_rows != after[d] and d not in joined_dims:
            short[d] = after[d]
    pairs = zip(padded, before, strict=True)
    padding = [build.missing(room, size) for room, size in pairs]
    if any(n != 0 for n in padding):
        x = build.pad(x, padding)
    own_shape, x.meta[OWN_SHAPE] = x.meta.get(OWN_SHAPE), padded
    result = lower(build, x, *args)
    x.meta[OWN_SHAPE] = own_shape
    for d, (room, parts) in joined_dims.items():
        result = _join_parts(build, result, d, room, parts)
    for d, size in short.items():
        result = build.call(aten.slice.Tensor, result, d, 0, size)
    if short:
        # A slice of all rows is contiguous, as on some ranks; on others it is not.
        result = build.call(
            aten.clone.default, result, memory_format=torch.contiguous_format
        )
    return result


def _changed(cut: Cut) -> list[int]:
    """Return the dims that a step splits or joins."""
    pairs = enumerate(zip(cut.before, cut.after, strict=True))
    return [d for d, (before, after) in pairs if before != after]


def _own_size(build: Builder, cut: Cut, d: int, axes: Axes) -> Size:
    """Return this rank's number of rows of a dim that is split over axes."""
    if d in cut.even_dims:
        return cut.shape[d] // build.mesh.count(axes)
    return build.own_size(cut.shape[d], axes)


def _is_far(cut: Cut, d: int) -> bool:
    """Return whether a dim changes by anything but one axis at its minor end."""
    shorter, longer = sorted((cut.before[d], cut.after[d]), key=len)
    return longer[:-1] != shorter


def _room(build: Builder, rows: Size, count: int) -> Size:
    """Return the rows of the largest of ``count`` chunks of ``rows``."""
    rows = build.compute(operator.add, rows, count - 1)
    return build.compute(operator.floordiv, rows, count)


def _pad_parts(
    build: Builder, x: fx.Node, d: int, room: Size, parts: Sequence[Size]
) -> fx.Node:
    """Return ``x`` with each part of dim ``d`` padded to ``room`` rows."""
    blocks, start = [], 0
    for size in parts:
        end = build.compute(operator.add, start, size)
        block = build.call(aten.slice.Tensor, x, d, start, end)
        padding: list[Size] = [0] * block.meta["val"].dim()
        padding[d] = build.missing(room, size)
        blocks.append(block if padding[d] == 0 else build.pad(block, padding))
        start = end
    return build.call(aten.cat.default, blocks, d)


def _join_parts(
    build: Builder, x: fx.Node, d: int, room: Size, parts: Sequence[Size]
) -> fx.Node:
    """Return ``x`` without the padding of ``_pad_parts``."""
    blocks = []
    for i, size in enumerate(parts):
        start = build.product((room, i)) if i else 0
        end = build.compute(operator.add, start, size)
        blocks.append(build.call(aten.slice.Tensor, x, d, start, end))
    return build.call(aten.cat.default, blocks, d)


def _own_slice(build: Builder, x: fx.Node, cut: Cut, dims: Sequence[int]) -> fx.Node:
    """Return this rank's rows after a slice step, taken from its rows before it."""
    for d in dims:
        rows, sub = cut.shape[d], operator.sub
        first = build.own_start(rows, cut.before[d])
        start = build.compute(sub, build.own_start(rows, cut.after[d]), first)
        end = build.compute(sub, build.own_end(rows, cut.after[d]), first)
        x = build.call(aten.slice.Tensor, x, d, start, end)
    return build.call(aten.clone.default, x, memory_format=torch.contiguous_format)
