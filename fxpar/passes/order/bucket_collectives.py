"""Joins collectives that can run together into one.

In: the bound graph of a forward or a backward, and the names of the collectives of each
bucket (``joinable_collectives`` chooses them). Out: the same graph, in place; small
all-gathers of parameters, and reductions of gradients, of one kind, group and dtype are
joined: their operands are copied into one tensor, which one collective moves, and its
result is split again. ``copy_together`` leaves copies of values that are in memory
already to torch. Never: a value changes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import fx

from fxpar.graph.builder import Builder, put_after_reads
from fxpar.graph.custom_ops import register_lowerings
from fxpar.passes.order.joinable_collectives import is_cheap
from fxpar.passes.order.outline_layers import INVOKE
from fxpar.passes.order.sink_waits import WAIT, hoist
from fxpar.sharding.cost.op import (
    bytes_of,
    is_contraction,
    is_light,
    is_view,
    viewed,
)
from fxpar.sharding.op_facts import op_facts_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

_GATHER = c10d.all_gather_into_tensor.default
_SCATTER = c10d.reduce_scatter_tensor.default
_REDUCE = c10d.all_reduce.default


def join_buckets(
    graph: fx.Graph, rewriter: Builder, buckets: Sequence[Sequence[str]]
) -> None:
    """Join the collectives of these names, bucket by bucket, in place. Results of the
    graph that are reduced become views of one tensor, which only gradients may be."""
    names = {name for bucket in buckets for name in bucket}
    nodes = {node.name: node for node in graph.nodes if node.name in names}
    for bucket in buckets:
        members = [nodes[name] for name in bucket]
        _join(rewriter, members)
        for member in members:
            graph.erase_node(member)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and is_cheap(node):
            graph.erase_node(node)
    if names:
        put_after_reads(graph)


@dataclass(frozen=True)
class _Stretch:
    """Holds the elements of a node that a bucket has: all, or part of its one row."""

    # The node that has the elements.
    node: fx.Node
    # The first element, along dim 1.
    begin: int = 0
    # After the last. None: all of the node, whatever its shape.
    end: int | None = None

    def with_next(self, other: _Stretch) -> _Stretch | None:
        """Return both as one if the other starts where this one ends, else None."""
        if self.end is None or (self.node, self.end) != (other.node, other.begin):
            return None
        return replace(self, end=other.end)

    def build(self, rewriter: Builder, rows: int) -> fx.Node:
        if self.end is None:
            return rewriter.call(aten.reshape.default, self.node, [rows, -1])
        if (self.begin, self.end) == (0, self.node.meta["val"].shape[1]):
            return self.node
        return rewriter.call(aten.slice.Tensor, self.node, 1, self.begin, self.end)


def _stretch_of(node: fx.Node, rows: int) -> _Stretch:
    """Return a node's stretch; for a part made by ``_split_result``, one of its row."""
    if rows == 1 and node.target is aten.reshape.default:
        piece = node.args[0]
        if piece.target is aten.slice.Tensor and len(piece.args) == 4:
            row, dim, begin, end = piece.args
            value = row.meta["val"]
            closed = all(type(n) is int for n in (begin, end, *value.shape))
            is_row = closed and value.dim() == 2 and len(value) == 1 and dim == 1
            if is_row and value.is_contiguous() and 0 <= begin <= end <= value.shape[1]:
                return _Stretch(row, begin, end)
    return _Stretch(node)


def _flat(rewriter: Builder, nodes: Iterable[fx.Node], rows: int) -> fx.Node:
    """Return the operands, each viewed as [rows, ...], joined along dim 1. Neighbours
    in the row of another bucket are read from it as one slice."""
    stretches: list[_Stretch] = []
    for node in nodes:
        stretch = _stretch_of(node, rows)
        both = stretches[-1].with_next(stretch) if stretches else None
        if both is None:
            stretches.append(stretch)
        else:
            stretches[-1] = both
    parts = [stretch.build(rewriter, rows) for stretch in stretches]
    return parts[0] if len(parts) == 1 else rewriter.call(aten.cat.default, parts, 1)


def _split_result(
    rewriter: Builder, x: fx.Node, rows: int, members: Sequence[fx.Node]
) -> None:
    """Replace the members' results by parts of ``x``, the bucket's [rows, elements]."""
    at = 0
    for member in members:
        shape = list(member.meta["val"].shape)
        width = math.prod(shape) // rows
        piece = rewriter.call(aten.slice.Tensor, x, 1, at, at + width)
        part = rewriter.call(aten.reshape.default, piece, shape)
        if not part.meta["val"].is_contiguous():  # views may follow
            layout = torch.contiguous_format
            part = rewriter.call(aten.clone.default, part, memory_format=layout)
        at += width
        (wait,) = member.users
        rewriter.replace(wait, part)
        for reader in list(part.users) if rows == 1 else ():  # no copy
            if op_facts_of(reader.target).reshapes:
                other = list(reader.meta["val"].shape)
                if all(type(n) is int for n in other):
                    reader.target, reader.args = aten.reshape.default, (piece, other)


def _join(rewriter: Builder, members: Sequence[fx.Node]) -> None:
    """Replace collectives by one, with its wait. A gather takes one row of each rank,
    and gives a row per rank; a reduce-scatter takes a row per rank, and gives one; an
    all-reduce takes and gives one. Reductions are joined where the last of them is,
    gathers, whose operands come from inputs, where the first is."""
    kind = members[0].target
    place = members[0] if kind is _GATHER else members[-1]
    ranks = 1 if kind is _REDUCE else place.args[-2]
    with rewriter.before(place):
        if kind is _GATHER:
            for member in members:
                hoist(member.args[0], place)
        rows = ranks if kind is _SCATTER else 1
        bucket = _flat(rewriter, [m.args[0] for m in members], rows)
        wait = rewriter.call(WAIT, rewriter.call(kind, bucket, *place.args[1:]))
        _split_result(rewriter, wait, ranks if kind is _GATHER else 1, members)


def copy_together(graph: fx.Graph) -> None:
    """Let torch make the copies of buckets that Inductor has nothing to fuse with, in
    place: its code, and the time to generate and to compile it, would grow with the
    parameters of a model."""
    copy_into_buckets(graph)
    scale_buckets(graph)
    split_buckets(graph)


# The least number of values in memory of a row that no collective sends: it may be
# fused with what reads it, and for fewer values loops are a few lines.
LEAST = 8


def copy_into_buckets(graph: fx.Graph) -> None:
    """Let torch fill rows of which most is in memory, in place: Inductor generates a
    loop for each part. Of a bucket that is sent, views of what a kernel of its own
    computes are copied, too, whoever does it."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts = node.args[0] if node.args else node.kwargs["tensors"]
        is_sent = any(op_facts_of(user.target).communicates for user in node.users)
        in_memory = [x for x in parts if _is_in_memory(x, is_sent=is_sent)]
        if len(in_memory) < (2 if is_sent else LEAST):
            continue
        if 2 * sum(map(bytes_of, in_memory)) > sum(map(bytes_of, parts)):
            register_lowerings()
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
            node.target = torch.ops.fxpar.join.default
            node.args, node.kwargs = (parts, dim), {}


def scale_buckets(graph: fx.Graph) -> None:
    """Multiply or divide a reduced bucket by a number at once, where each of its parts
    is and nothing that could be fused with it reads the result: all are gradients of
    which the mean over ranks is taken."""
    for wait in graph.find_nodes(op="call_function", target=WAIT):
        pieces = list(wait.users)
        parts = [user for piece in pieces for user in piece.users]
        scaled = [user for part in parts for user in part.users]
        if len(pieces) < 2 or any(len(n.users) != 1 for n in (*pieces, *parts)):
            continue
        if not all(map(is_view, (*pieces, *parts))):
            continue
        if not _SCALINGS.issuperset(node.target for node in scaled):
            continue
        if any(is_light(reader.target) for node in scaled for reader in node.users):
            continue
        kinds = {(node.target, *node.args[1:]) for node in scaled}
        if len(kinds) > 1:
            continue
        ((target, number),) = kinds
        with graph.inserting_after(wait):
            whole = graph.call_function(target, (wait, number))
        dtype = scaled[0].meta["val"].dtype
        value = torch.empty_like(wait.meta["val"], dtype=dtype)
        whole.meta = scaled[0].meta | {"val": value}
        for piece, part, node in zip(pieces, parts, scaled, strict=True):
            piece.replace_input_with(wait, whole)
            node.replace_all_uses_with(part)
            graph.erase_node(node)


# Ops on a tensor and a number.
_SCALINGS = {aten.div.Scalar, aten.mul.Scalar}


def split_buckets(graph: fx.Graph) -> None:
    """Let torch copy the parts of a bucket with a row of each rank at once, in place:
    Inductor launches a kernel for each part, and compiles one for each place that a
    part has in any bucket."""
    results = graph.output_node().all_input_nodes
    for wait in graph.find_nodes(op="call_function", target=WAIT):
        whole, pieces = wait.meta["val"], list(wait.users)
        if whole.dim() != 2 or len(whole) == 1 or len(pieces) < 2:
            continue
        if any(x.target is not aten.slice.Tensor or len(x.args) != 4 for x in pieces):
            continue
        if not {*results}.isdisjoint(pieces) or any(x.args[1] != 1 for x in pieces):
            continue
        pieces.sort(key=lambda piece: piece.args[2])
        edges = [0, *(piece.args[3] for piece in pieces)]
        if edges != [*(piece.args[2] for piece in pieces), whole.shape[1]]:
            continue
        sizes = [end - begin for begin, end in pairwise(edges)]
        split = torch.ops.fxpar.split_copied.default
        with graph.inserting_after(wait):
            parts = graph.call_function(split, (wait, sizes))
        parts.meta = wait.meta | {"val": split(whole, sizes)}
        for i, piece in enumerate(pieces):
            piece.target, piece.args = operator.getitem, (parts, i)
            piece.meta["val"] = parts.meta["val"][i]


def _is_in_memory(part: fx.Node, *, is_sent: bool) -> bool:
    """Return whether a part is, or is a view of, a graph input or a body's result; if
    it ``is_sent``, also a view of the result of an op with a kernel of its own, which
    could write to the bucket itself only if it were no view."""
    base = viewed(part)
    if base.op == "placeholder":
        return True
    if base.target is operator.getitem:
        return base.args[0].target is INVOKE
    is_view_of_other = is_sent and base is not part
    facts = op_facts_of(base.target)
    return is_view_of_other and (is_contraction(base.target) or facts.scatters)
