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
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
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

    # Names, in graph order.
    members: list[str] = field(default_factory=list)
    size: int = 0  # bytes


@dataclass(frozen=True)
class JoinableCollective:
    """What of a collective tells which others it may be joined with."""

    name: str
    # Not a reduction.
    is_gather: bool
    # Equal for those that may be joined.
    kind: Hashable
    # As ``whole_bytes``.
    size: int
    # Names of the reductions among those that could be joined that it depends on.
    before: frozenset[str]


@dataclass(frozen=True)
class Joinable:
    """The collectives of a phase that could be joined, whatever their sizes; in graph
    order."""

    collectives: tuple[JoinableCollective, ...]

    @staticmethod
    def of(graph: fx.Graph, *, reductions: bool) -> Joinable:
        """Gathers of parameters; ``reductions`` of gradients too."""
        gathers = graph.find_nodes(op="call_function", target=_GATHER)
        joined = set[fx.Node]()
        if gathers:
            derived = from_inputs(graph)
            joined.update(
                node
                for node in gathers
                if node.args[0] in derived and (not reductions or _is_read_alike(node))
            )
        before: Mapping[fx.Node, frozenset[str]] = {}
        if reductions:
            near_output = _near_output(graph)
            found = {n for n in near_output if n.target in (_SCATTER, _REDUCE)}
            joined |= found
            before = _reductions_before(found)
        none = frozenset[str]()
        return Joinable(
            tuple(
                JoinableCollective(
                    node.name,
                    node.target is _GATHER,
                    _kind_of(node),
                    whole_bytes(node),
                    before.get(node, none),
                )
                for node in sorted(joined)
                if _may_join(node)
            )
        )

    def buckets(self, most: int, gathers: int) -> tuple[tuple[str, ...], ...]:
        """Names of those that are joined, by bucket. ``most``: bytes of a full bucket,
        ``gathers``: of one of gathers."""
        opened: dict[Hashable, _Bucket] = {}
        filled: list[_Bucket] = []
        home: dict[str, _Bucket] = {}
        before = {each.name: each.before for each in self.collectives}
        for each in self.collectives:
            room = gathers if each.is_gather else most
            if each.size >= room:
                continue
            open_bucket = opened.get(each.kind)
            needs = _buckets(each.before, home, before)
            if (
                open_bucket is None
                or id(open_bucket) in needs
                or open_bucket.size + each.size > room
            ):
                open_bucket = opened[each.kind] = _Bucket()
                filled.append(open_bucket)
            open_bucket.members.append(each.name)
            open_bucket.size += each.size
            home[each.name] = open_bucket
        return tuple(tuple(b.members) for b in filled if len(b.members) > 1)


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
    joinable = Joinable.of(graph, reductions=reductions)
    join_buckets(graph, rewriter, joinable.buckets(most, gathers))


def join_buckets(
    graph: fx.Graph, rewriter: Builder, buckets: Iterable[Sequence[str]]
) -> None:
    """Join the collectives of these names, bucket by bucket, in place."""
    names = {name for bucket in buckets for name in bucket}
    nodes = {node.name: node for node in graph.nodes if node.name in names}
    for bucket in buckets:
        members = [nodes[name] for name in bucket]
        _JOIN[members[0].target](rewriter, members)
        for member in members:
            graph.erase_node(member)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and _is_cheap(node):
            graph.erase_node(node)
    if names:
        _sort(graph)


def _kind_of(node: fx.Node) -> Hashable:
    value = node.args[0].meta["val"]
    return node.target, node.args[1:], value.dtype, value.device


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
    return derived_from(graph.find_nodes(op="placeholder"), through)


def derived_from(
    inputs: Iterable[fx.Node],
    through: Collection[Any] = (),
    within: Collection[fx.Node] | None = None,
) -> set[fx.Node]:
    """Inputs, and what is made of these so; ``within`` some nodes, if told."""
    derived = set(inputs)
    pending = list(derived)
    while pending:
        for user in pending.pop().users:
            if user in derived or not (within is None or user in within):
                continue
            if (_is_cheap(user) or user.target in through) and derived.issuperset(
                user.all_input_nodes
            ):
                derived.add(user)
                pending.append(user)
    return derived


def _is_cheap(node: fx.Node) -> bool:
    """Whether work may stand between a collective and the border of the graph."""
    facts = op_facts_of(node.target)
    return facts.moves or facts.reshapes or facts.casts


def _near_output(graph: fx.Graph) -> set[fx.Node]:
    """Nodes between which and the output there is nothing but cheap work."""
    ends: set[fx.Node] = set()
    borders = {graph.output_node()}
    borders.update(node for node in graph.nodes if phase_of(node) == "update")
    pending = [read for border in borders for read in border.all_input_nodes]
    while pending:
        node = pending.pop()
        if node not in ends and all(
            user in borders or (user in ends and _leads_on(user.target))
            for user in node.users
        ):
            ends.add(node)
            pending += node.all_input_nodes if _leads_on(node.target) else ()
    return ends


def _leads_on(target: Any) -> bool:
    """Whether what an op reads may be near the output, if the op is."""
    facts = op_facts_of(target)
    return (
        facts.moves
        or facts.reshapes
        or facts.casts
        or facts.scales
        or target in (WAIT, _SCATTER, _REDUCE)
    )


def region_of(node: fx.Node) -> str | None:
    """The region that a schedule's line ``fuse`` made of it and others."""
    return _custom(node).get(REGION)


def _custom(node: fx.Node) -> dict[str, Any]:
    return node.meta.get("custom") or {}


def _reductions_before(
    reductions: Collection[fx.Node],
) -> dict[fx.Node, frozenset[str]]:
    """For nodes that depend on some reductions, the names of these."""
    waits = {u: n for n in reductions for u in n.users if u.target is WAIT}
    behind, pending = set(waits), list(waits)
    while pending:
        new = [user for user in pending.pop().users if user not in behind]
        behind.update(new)
        pending += new
    none = frozenset[str]()
    out: dict[fx.Node, frozenset[str]] = {}
    for node in sorted(behind):
        own = (waits[node].name,) if node in waits else ()
        out[node] = none.union(own, *(out.get(r, none) for r in node.all_input_nodes))
    return out


def _buckets(
    names: Iterable[str],
    home: Mapping[str, _Bucket],
    before: Mapping[str, Iterable[str]],
) -> set[int]:
    """Ids of the buckets that must be done before what depends on collectives is:
    theirs, and those that any member of these depends on."""
    ids: set[int] = set()
    stack = list(names)
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
    is_moved = False  # anything so far
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
