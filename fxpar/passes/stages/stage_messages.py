"""Messages of several tensors at once between places along the pipeline axis.

In: a graph of stages while it is laid out (``lay_out_stages``), nodes that are there.
Out: nodes appended to it: tensors are joined to one, which crosses, and taken apart.
What rests split along the axis is put together at one place (``gather_at``), a gradient
that one place has is dealt out (``scatter_from``), a result goes to all places
(``spread_from``). The group is that of the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.passes.stages import pipeline_ops as _pipeline_ops  # noqa: F401  (registers ops)
from fxpar.sharding.cost.op import bytes_of

aten = torch.ops.aten
ours = torch.ops.fxpar

# The place of what runs at all.
EVERY = -1

# So many bytes a message has at most, unless one tensor has more.
BUCKET = 4 << 20

# (place, op, its arguments) -> the node, appended.
Put = Callable[..., fx.Node]


def buckets(nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """Nodes of one dtype in runs of up to ``BUCKET`` bytes, in order."""
    runs: list[list[fx.Node]] = []
    open_runs: dict[Any, tuple[list[fx.Node], int]] = {}
    for node in nodes:
        key, size = kind_of(node), bytes_of(node)
        run, total = open_runs.get(key, ([], 0))
        if not run or total + size > BUCKET:
            run, total = [], 0
            runs.append(run)
        run.append(node)
        open_runs[key] = run, total + size
    return runs


def kind_of(node: fx.Node) -> Any:
    """What tensors of one message have in common."""
    return node.meta["val"].dtype, node.meta["val"].device


def gather_at(
    put: Put,
    target: int,
    shards: Sequence[Sequence[fx.Node]],
    dims: Sequence[int],
    group: str,
) -> list[fx.Node]:
    """Tensors put together at a place. ``shards``: of each place, of each tensor;
    ``dims``: along which they are split."""
    arrived: list[Sequence[fx.Node]] = []
    for source, own in enumerate(shards):
        if source == target:
            arrived.append(own)
            continue
        flat = _joined(put, source, own)
        message = put(target, ours.transfer.default, flat, source, target, group)
        arrived.append(_apart(put, target, message, [x.meta["val"] for x in own]))
    columns = zip(*arrived, strict=True)
    return [
        put(target, aten.cat.default, list(parts), dim)
        for parts, dim in zip(columns, dims, strict=True)
    ]


def scatter_from(
    put: Put,
    source: int,
    values: Sequence[fx.Node],
    dims: Sequence[int],
    places: int,
    group: str,
) -> list[fx.Node]:
    """Every place gets its part, along a dim each, of what one place has."""
    pieces: list[fx.Node] = []
    for i in range(places):
        for value, dim in zip(values, dims, strict=True):
            size = value.meta["val"].shape[dim] // places
            bounds = i * size, (i + 1) * size
            pieces.append(put(source, aten.slice.Tensor, value, dim, *bounds))
    flat = _joined(put, source, pieces)
    own = put(EVERY, ours.scatter.default, flat, source, places, group)
    return _apart(put, EVERY, own, [x.meta["val"] for x in pieces[: len(values)]])


def spread_from(
    put: Put, source: int, values: Sequence[fx.Node], group: str
) -> list[fx.Node]:
    """Every place gets what one has."""
    if len(values) == 1:
        return [put(EVERY, ours.spread.default, values[0], source, group)]
    flat = _joined(put, source, values)
    whole = put(EVERY, ours.spread.default, flat, source, group)
    return _apart(put, EVERY, whole, [x.meta["val"] for x in values])


def _joined(put: Put, place: int, values: Sequence[fx.Node]) -> fx.Node:
    """The numbers of tensors in one."""
    flat = [put(place, aten.reshape.default, x, [-1]) for x in values]
    return flat[0] if len(flat) == 1 else put(place, aten.cat.default, flat)


def _apart(
    put: Put, place: int, flat: fx.Node, like: Sequence[torch.Tensor]
) -> list[fx.Node]:
    """Tensors of these shapes, whose numbers are in one."""
    out, start = [], 0
    for value in like:
        end = start + value.numel()
        part = flat
        if end - start < flat.meta["val"].numel():
            part = put(place, aten.slice.Tensor, flat, 0, start, end)
        out.append(put(place, aten.reshape.default, part, list(value.shape)))
        start = end
    return out
