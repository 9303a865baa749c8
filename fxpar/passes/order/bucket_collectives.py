"""Joins collectives that can run together into one.

In: the bound graph of a forward or a backward, and the names of the collectives of each
bucket (``joinable_collectives`` chooses them). Out: the same graph, in place; small
all-gathers of parameters, and reductions of gradients, of one kind, group and dtype are
joined: their operands are copied into one tensor, which one collective moves, and its
result is split again. ``copy_into_buckets`` does that copy by one call of torch where
the values are in memory already. Never: a value changes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxpar.graph.builder import Builder
from fxpar.graph.custom_ops import register_joins
from fxpar.passes.order.joinable_collectives import is_cheap
from fxpar.passes.order.outline_layers import INVOKE
from fxpar.passes.order.sink_waits import WAIT
from fxpar.sharding.cost.op import viewed
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
        _sort(graph)


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
                _hoist(member.args[0], place)
        rows = ranks if kind is _SCATTER else 1
        bucket = _flat(rewriter, [m.args[0] for m in members], rows)
        wait = rewriter.call(WAIT, rewriter.call(kind, bucket, *place.args[1:]))
        _split_result(rewriter, wait, ranks if kind is _GATHER else 1, members)


def _hoist(node: fx.Node, before: fx.Node) -> None:
    """Move the nodes that a gather's operand is computed from before the bucket."""
    if node.op == "placeholder" or node < before:
        return
    for read in node.all_input_nodes:
        _hoist(read, before)
    before.prepend(node)


def _sort(graph: fx.Graph) -> None:
    """Move nodes that read a result of a bucket after it; else keep the order."""
    placed: set[fx.Node] = set()
    waiting: dict[fx.Node, list[fx.Node]] = {}
    is_moved = False  # whether any node was moved so far
    *nodes, output = graph.nodes
    for first in nodes:
        stack = [first]
        while stack:
            node = stack.pop()
            reads = node.all_input_nodes
            if not placed.issuperset(reads):
                missing = next(read for read in reads if read not in placed)
                waiting.setdefault(missing, []).append(node)
                is_moved = True
                continue
            if is_moved:
                output.prepend(node)
            placed.add(node)
            stack.extend(reversed(waiting.pop(node, [])))


# The least number of values in memory: for fewer, loops are a few lines.
LEAST = 8


def copy_into_buckets(graph: fx.Graph) -> None:
    """Let torch copy buckets most of whose parts are in memory, in place, in the graph
    that goes to Inductor: it writes the result of an op outside of a body to its place
    in the bucket, and generates a loop for any other value, so that its code, and the
    C++ or Triton compiler's time, would grow with the layers of a model."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts = node.args[0] if node.args else node.kwargs["tensors"]
        in_memory = sum(map(_is_in_memory, parts))
        if in_memory >= LEAST and 2 * in_memory > len(parts):
            register_joins()
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
            node.target = torch.ops.fxpar.join.default
            node.args, node.kwargs = (parts, dim), {}


def _is_in_memory(part: fx.Node) -> bool:
    """Return whether a part is, or is a view of, a graph input or a body's result."""
    base = viewed(part)
    if base.op == "placeholder":
        return True
    return base.target is operator.getitem and base.args[0].target is INVOKE
