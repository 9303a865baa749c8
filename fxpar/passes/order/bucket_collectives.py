"""bound -> bound: collectives that can run together become one.

In: the bound graph of a forward or a backward. Out: the same graph, in place; small
all-gathers of parameters, and reductions of gradients, of one kind, group and dtype are
joined until a bucket is full: their operands are copied into one tensor, which one
collective moves, and its result is cut up again. A gather joins if its operand is made
of graph inputs by cheap ops alone; a reduction if nothing but cheap ops stand between
its result and the graph's output. Operands never wait for anything of their own bucket,
nor for a bucket that does. In the graph of a training step the update stands behind
the reductions, as the output does elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxpar.passes.builder import Builder
from fxpar.passes.order.sink_waits import WAIT, is_chunk
from fxpar.sharding.cost.op import nbytes_of
from fxpar.sharding.program import phase_of
from fxpar.sharding.rules.op_facts import op_facts_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

# Bytes of a full bucket, in the form each rank holds whole. What is larger goes alone:
# there the bandwidth of the link counts and not its latency.
FULL = 1 << 20

# The checkpointed region of what is gathered again in the backward, among the user's.
REGATHERED = 1 << 20

# What a node says of itself, in ``meta["custom"]``, which all passes keep: which region
# a schedule made of it.
REGION = "fxpar_region"
# And what ``whole_bytes`` are on the rank with the largest shards, where these are not
# alike.
LARGEST = "fxpar_largest"

_GATHER = c10d.all_gather_into_tensor.default
_SCATTER = c10d.reduce_scatter_tensor.default
_REDUCE = c10d.all_reduce.default


@dataclass
class _Bucket:
    """Collectives of one kind that become one."""

    # In graph order.
    members: list[fx.Node] = field(default_factory=list)
    size: int = 0  # bytes


@dataclass(frozen=True)
class Joinable:
    """The collectives of a phase that could be joined, whatever their sizes."""

    # In graph order.
    nodes: tuple[fx.Node, ...]
    # For each of them the reductions among them that it depends on.
    before: Mapping[fx.Node, frozenset[fx.Node]]

    @staticmethod
    def of(graph: fx.Graph, *, reductions: bool) -> Joinable:
        """Gathers of parameters; ``reductions`` of gradients too."""
        input_derived = from_inputs(graph)
        near_output = _near_output(graph) if reductions else set[fx.Node]()
        nodes = []
        for node in graph.nodes:
            if node.target is _GATHER:
                joins = node.args[0] in input_derived and (
                    not reductions or _is_read_alike(node)
                )
            else:
                joins = node.target in (_SCATTER, _REDUCE) and node in near_output
            if joins and _may_join(node):
                nodes.append(node)
        before = _reductions_before(graph, near_output)
        return Joinable(tuple(nodes), {node: before[node] for node in nodes})

    def buckets(self, most: int, gathers: int) -> list[list[fx.Node]]:
        """Those that are joined, by bucket. ``most``: bytes of a full bucket,
        ``gathers``: of one of gathers."""
        opened: dict[Any, _Bucket] = {}
        filled: list[_Bucket] = []
        home: dict[fx.Node, _Bucket] = {}
        for node in self.nodes:
            value, size = node.args[0].meta["val"], whole_bytes(node)
            room = gathers if node.target is _GATHER else most
            if size >= room:
                continue
            key = node.target, node.args[1:], value.dtype, value.device
            open_bucket = opened.get(key)
            needs = _buckets(self.before[node], home, self.before)
            if (
                open_bucket is None
                or id(open_bucket) in needs
                or open_bucket.size + size > room
            ):
                open_bucket = opened[key] = _Bucket()
                filled.append(open_bucket)
            open_bucket.members.append(node)
            open_bucket.size += size
            home[node] = open_bucket
        return [bucket.members for bucket in filled if len(bucket.members) > 1]


def bucket(
    graph: fx.Graph,
    rewriter: Builder,
    *,
    reductions: bool,
    most: int = FULL,
    gathers: int = FULL,
) -> None:
    """Join collectives, in place; ``reductions`` too, which makes results of the graph
    views of one tensor, as only gradients may be. ``most``: bytes of a full bucket,
    ``gathers``: of one of gathers."""
    buckets = Joinable.of(graph, reductions=reductions).buckets(most, gathers)
    for members in buckets:
        _JOIN[members[0].target](rewriter, members)
        for member in members:
            graph.erase_node(member)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and _is_cheap(node):
            graph.erase_node(node)
    if buckets:
        _sort(graph)


def _may_join(node: fx.Node) -> bool:
    """Whether a schedule leaves it alone, and its kind can be joined."""
    real = not node.args[0].meta["val"].is_complex()
    return real and not is_chunk(node) and not region_of(node)


def _is_read_alike(node: fx.Node) -> bool:
    """Whether all ranks gather in a backward what it is given: where shards are not
    alike some may save what others compute again, but for what is made of parameters.
    """
    return LARGEST not in _custom(node) or node.meta.get("ac_graph_id") == REGATHERED


def from_inputs(graph: fx.Graph, through: Collection[Any] = ()) -> set[fx.Node]:
    """Nodes made of graph inputs by cheap ops, and those in ``through``, alone."""
    inputs = graph.find_nodes(op="placeholder")
    return derived_from(graph.nodes, inputs, through)


def derived_from(
    nodes: Iterable[fx.Node], inputs: Iterable[fx.Node], through: Collection[Any] = ()
) -> set[fx.Node]:
    """Inputs, and what of some nodes, in order, is made of these so."""
    derived = set(inputs)
    for node in nodes:
        if derived.issuperset(node.all_input_nodes) and (
            node.target in through or _is_cheap(node)
        ):
            derived.add(node)
    return derived


def _is_cheap(node: fx.Node) -> bool:
    """Whether work may stand between a collective and the border of the graph."""
    facts = op_facts_of(node.target)
    return facts.moves or facts.reshapes or facts.casts


def _near_output(graph: fx.Graph) -> set[fx.Node]:
    """Nodes between which and the output there is nothing but cheap work."""
    ends: set[fx.Node] = set()
    passing = {WAIT, _SCATTER, _REDUCE}
    for node in reversed(list(graph.nodes)):
        read = all(
            user.op == "output"
            or phase_of(user) == "update"
            or (
                user in ends
                and (
                    user.target in passing
                    or _is_cheap(user)
                    or op_facts_of(user.target).scales
                )
            )
            for user in node.users
        )
        if node.users and read:
            ends.add(node)
    return ends


def region_of(node: fx.Node) -> str | None:
    """The region that a schedule's line ``fuse`` made of it and others."""
    return _custom(node).get(REGION)


def _custom(node: fx.Node) -> dict[str, Any]:
    return node.meta.get("custom") or {}


def _reductions_before(
    graph: fx.Graph, near_output: Collection[fx.Node]
) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each node the reductions it depends on that could be joined. (Gathers that
    could be depend on nothing.)"""
    none: frozenset[fx.Node] = frozenset()
    if not any(node.target in (_SCATTER, _REDUCE) for node in near_output):
        return dict.fromkeys(graph.nodes, none)
    out: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        reductions = none.union(*(out[read] for read in node.all_input_nodes))
        out[node] = reductions
        if node.target is WAIT:
            source = node.args[0]
            if source in near_output and source.target in (_SCATTER, _REDUCE):
                out[node] = reductions | {source}
    return out


def _buckets(
    nodes: Iterable[fx.Node],
    home: Mapping[fx.Node, _Bucket],
    before: Mapping[fx.Node, Iterable[fx.Node]],
) -> set[int]:
    """Ids of the buckets that must be done before ``nodes`` are: theirs, and those that
    any member of these depends on."""
    ids: set[int] = set()
    stack = list(nodes)
    while stack:
        bucket_of_node = home.get(stack.pop())
        if bucket_of_node is not None and id(bucket_of_node) not in ids:
            ids.add(id(bucket_of_node))
            stack += [n for member in bucket_of_node.members for n in before[member]]
    return ids


def whole_bytes(node: fx.Node) -> int:
    """Bytes of the larger of operand and result; where shards are not alike of the
    largest ones, so that all ranks fill their buckets with the same."""
    largest = _custom(node).get(LARGEST)
    return largest or max(nbytes_of(x.meta["val"]) for x in (node, node.args[0]))


def _wait_of(node: fx.Node) -> fx.Node:
    (wait,) = node.users
    return wait


@dataclass(frozen=True)
class _Stretch:
    """Elements of a node that go into a bucket: all, or [begin, end) of its one row."""

    # Whose elements.
    node: fx.Node
    # The first of them, along dim 1.
    begin: int = 0
    # Behind the last. None: all of the node, whatever its shape.
    end: int | None = None

    def with_next(self, other: _Stretch) -> _Stretch | None:
        """Both as one, if the other lies behind this one."""
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
    """Where a node's elements lie: what ``_split_result`` made is read in its row."""
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
    """[rows, all of them]: row r of each operand, seen as [rows, ...], side by side.
    Neighbours in the row of another bucket are read from it as they lie."""
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
    """Results of the members, from their bucket's [rows, all of them]."""
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
        rewriter.replace(_wait_of(member), part)
        for reader in list(part.users) if rows == 1 else ():  # no copy
            if op_facts_of(reader.target).reshapes:
                other = list(reader.meta["val"].shape)
                if all(type(n) is int for n in other):
                    reader.target, reader.args = aten.reshape.default, (piece, other)


def _join_gathers(rewriter: Builder, members: Sequence[fx.Node]) -> None:
    """Each rank's parts in one row; the result has a row per rank."""
    first = members[0]
    _, count, group = first.args
    with rewriter.before(first):
        for member in members:
            _hoist(member.args[0], first)
        row = _flat(rewriter, [m.args[0] for m in members], 1)
        bucket_gather = rewriter.call(_GATHER, row, count, group)
        whole = rewriter.call(WAIT, bucket_gather)
        _split_result(rewriter, whole, count, members)


def _hoist(node: fx.Node, before: fx.Node) -> None:
    """Move what a gather's operand is made of before the bucket."""
    if node.op == "placeholder" or node < before:
        return
    for read in node.all_input_nodes:
        _hoist(read, before)
    before.prepend(node)


def _join_scatters(rewriter: Builder, members: Sequence[fx.Node]) -> None:
    """A row for each rank; the result is this rank's row."""
    last = members[-1]
    _, op, count, group = last.args
    with rewriter.before(last):
        rows = _flat(rewriter, [m.args[0] for m in members], count)
        bucket_scatter = rewriter.call(_SCATTER, rows, op, count, group)
        mine = rewriter.call(WAIT, bucket_scatter)
        _split_result(rewriter, mine, 1, members)


def _join_reductions(rewriter: Builder, members: Sequence[fx.Node]) -> None:
    last = members[-1]
    with rewriter.before(last):
        row = _flat(rewriter, [m.args[0] for m in members], 1)
        bucket_reduce = rewriter.call(_REDUCE, row, *last.args[1:])
        whole = rewriter.call(WAIT, bucket_reduce)
        _split_result(rewriter, whole, 1, members)


_JOIN = {
    _GATHER: _join_gathers,
    _SCATTER: _join_scatters,
    _REDUCE: _join_reductions,
}


def _sort(graph: fx.Graph) -> None:
    """Move what reads a result of a bucket behind it, else keep the order."""
    placed: set[fx.Node] = set()
    waiting: dict[fx.Node, list[fx.Node]] = {}
    *nodes, output = graph.nodes
    for first in nodes:
        stack = [first]
        while stack:
            node = stack.pop()
            missing = next((r for r in node.all_input_nodes if r not in placed), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(node)
                continue
            output.prepend(node)
            placed.add(node)
            stack.extend(reversed(waiting.pop(node, [])))
