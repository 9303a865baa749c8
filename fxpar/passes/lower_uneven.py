"""Lowering of reshards on shards that are not alike, by padding to shards that are.

``lower_uneven`` pads what a step gathers or splits, lowers it as ``lower`` does where
shards are alike, and cuts the result to what this rank holds. In: a step, its operand,
and how its kind is lowered. Out: the node of the result. What is padded reaches no
result. Never chooses how a kind is lowered.
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
from fxpar.graph.collective_nodes import Axes, Cut
from fxpar.sharding import shard_sizes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec

aten = torch.ops.aten

# Where a step's operand has its shape, if that is not the same on all ranks.
_SHAPE = "fxpar_shape"


def local_shape(node: fx.Node) -> tuple[Size, ...]:
    """What a rank holds of a step's operand."""
    return tuple(node.meta.get(_SHAPE) or node.meta["val"].shape)


def lower_uneven(
    lower: Callable[..., fx.Node],
    node: fx.Node,
    cut: Cut,
    build: Builder,
    x: fx.Node,
    *args: Any,
) -> fx.Node:
    """A step on shards that are not alike: what it gathers and what it splits is padded
    to shards that are, and what it gives is cut to what this rank holds. Unless an axis
    has shares, only the last shards are short, so what is gathered begins with all that
    is valid; else each is taken out by itself."""
    before, after = (
        [_own_size(build, cut, d, axes) for d, axes in enumerate(dims)]
        for dims in (cut.before, cut.after)
    )
    kind, changed = collective_nodes.kind_of(node), _changed(cut)
    if kind == "slice":
        return _own_slice(build, x, cut, changed)
    uneven = [d for d in changed if not _is_even(build.mesh, cut, d)]
    if uneven and (kind == "permute" or any(_is_far(cut, d) for d in uneven)):
        raise PlanError(
            f"{node.name} ({kind}) of {list(cut.shape)} from {Spec.of(cut.before)} to "
            f"{Spec.of(cut.after)} would move parts of shards"
        )
    padded, short = list(before), {}
    spread: dict[int, tuple[Size, list[Size]]] = {}
    for d in uneven:
        axes = collective_nodes.axes_of(node)
        count = build.mesh.count(axes)
        fewer = min(cut.before[d], cut.after[d], key=len)
        gathers = fewer == cut.after[d]
        if shard_sizes.has_shares(build.mesh, axes):
            room = build.largest_part(cut.shape[d], fewer, axes[0])
            parts = build.part_sizes(cut.shape[d], fewer, axes[0])
            if gathers:
                spread[d] = room, parts
            else:
                x = _pad_parts(build, x, d, room, parts)
                before[d] = build.product((room, count))
        else:
            room = _room(build, build.own_size(cut.shape[d], fewer), count)
        whole = build.product((room, count))
        padded[d], result_rows = (room, whole) if gathers else (whole, room)
        if result_rows != after[d] and d not in spread:
            short[d] = after[d]
    pairs = zip(padded, before, strict=True)
    padding = [build.missing(room, size) for room, size in pairs]
    if any(n != 0 for n in padding):
        x = build.pad(x, padding)
    outer, x.meta[_SHAPE] = x.meta.get(_SHAPE), padded
    result = lower(build, x, *args)
    x.meta[_SHAPE] = outer
    for d, (room, parts) in spread.items():
        result = _join_parts(build, result, d, room, parts)
    for d, size in short.items():
        result = build.call(aten.slice.Tensor, result, d, 0, size)
    if short:
        # On some ranks that is all there is, and so lies in order, on others not.
        result = build.call(
            aten.clone.default, result, memory_format=torch.contiguous_format
        )
    return result


def _changed(cut: Cut) -> list[int]:
    """The dims that a step cuts or joins."""
    pairs = enumerate(zip(cut.before, cut.after, strict=True))
    return [d for d, (before, after) in pairs if before != after]


def _is_even(mesh: Mesh, cut: Cut, d: int) -> bool:
    """Whether all ranks hold as much of a dim, before and after."""
    return cut.is_even_in(mesh, d)


def _own_size(build: Builder, cut: Cut, d: int, axes: Axes) -> Size:
    """Rows of a dim that this rank holds, split over axes."""
    if d in cut.alike:
        return cut.shape[d] // build.mesh.count(axes)
    return build.own_size(cut.shape[d], axes)


def _is_far(cut: Cut, d: int) -> bool:
    """Whether a dim loses or gains more than one axis at its minor end."""
    shorter, longer = sorted((cut.before[d], cut.after[d]), key=len)
    return longer[:-1] != shorter


def _room(build: Builder, rows: Size, count: int) -> Size:
    """Rows of the first chunk of so many of ``rows``."""
    rows = build.compute(operator.add, rows, count - 1)
    return build.compute(operator.floordiv, rows, count)


def _pad_parts(
    build: Builder, x: fx.Node, d: int, room: Size, parts: Sequence[Size]
) -> fx.Node:
    """``x`` with each of the parts of a dim padded to as much room."""
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
    """Inverse of ``_pad_parts``."""
    blocks = []
    for i, size in enumerate(parts):
        start = build.product((room, i)) if i else 0
        end = build.compute(operator.add, start, size)
        blocks.append(build.call(aten.slice.Tensor, x, d, start, end))
    return build.call(aten.cat.default, blocks, d)


def _own_slice(build: Builder, x: fx.Node, cut: Cut, dims: Sequence[int]) -> fx.Node:
    """What this rank holds of what it has of more."""
    for d in dims:
        rows, sub = cut.shape[d], operator.sub
        first = build.own_start(rows, cut.before[d])
        start = build.compute(sub, build.own_start(rows, cut.after[d]), first)
        end = build.compute(sub, build.own_end(rows, cut.after[d]), first)
        x = build.call(aten.slice.Tensor, x, d, start, end)
    return build.call(aten.clone.default, x, memory_format=torch.contiguous_format)
