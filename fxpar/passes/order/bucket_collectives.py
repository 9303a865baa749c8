"""Finds the collectives of a forward or a backward that may be joined, in which
buckets, and joins them.

In: the graph of one of the two. Out: ``Joinable``, data that gives for any bucket sizes
the names of the collectives of each bucket; ``join_buckets`` makes one collective of
each, in place: their operands are copied into one tensor, which it moves, and its
result is split again; of gradients whose mean is taken it is divided first. A gather
may be joined if its operand is computed from graph inputs by cheap ops only; a
reduction if only cheap ops are between its result and the graph's output. Operands
never wait for a collective of their own bucket, nor for a bucket that does. In the
graph of a training step the update comes after the reductions, as the output does
elsewhere. Never: a value changes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import fx

from fxpar.graph.builder import (
    ORIGINS,
    Builder,
    custom_of,
    put_after_reads,
    region_of,
)
from fxpar.layers import numbered, rows_of_layers
from fxpar.passes.order.delay_work import from_inputs, hoist, is_cheap, is_chunk
from fxpar.passes.order.outline_layers import LEAST_CALLS
from fxpar.passes.simulate.launches import WAIT
from fxpar.sharding.cost.op import is_light, nbytes_of
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import descendants, phase_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

# The number of the checkpointed region of values that the backward gathers again; the
# user's regions have smaller ones.
REGATHERED = 1 << 20

# Key of ``meta["custom"]``, which all passes keep: the ``whole_bytes`` of the rank with
# the largest shards, if these are uneven.
LARGEST = "fxpar_largest"

_GATHER = c10d.all_gather_into_tensor.default
_SCATTER = c10d.reduce_scatter_tensor.default
_REDUCE = c10d.all_reduce.default


@dataclass
class _Bucket:
    """Is a list of collectives of one kind that become one."""

    # The part of layers that it joins (``Joinable._pieces``); None: of no layer.
    piece: Hashable = None
    # Names, in graph order.
    members: list[str] = field(default_factory=list)
    size: int = 0  # bytes


@dataclass(frozen=True)
class JoinableCollective:
    """Holds the facts of a collective that decide with which others it may join."""

    # The name of its node.
    name: str
    # "reduction", "gather", or "again": a backward's gather of what a forward gathered.
    what: str
    # Equal for those that may be joined.
    kind: Hashable
    # Its ``whole_bytes``.
    size: int
    # Names of the joinable reductions that it depends on.
    before: frozenset[str]


@dataclass(frozen=True)
class Joinable:
    """Holds the collectives of a phase that could be joined, whatever their sizes."""

    # In graph order.
    collectives: tuple[JoinableCollective, ...]

    @cached_property
    def _rows(self) -> list[tuple[list[JoinableCollective], int]]:
        """Return the collectives of layers that repeat, row by row, each with the
        number of collectives of a layer."""
        kinds = defaultdict[Hashable, list[JoinableCollective]](list)
        for each in self.collectives:
            kinds[each.kind, each.what].append(each)
        rows: list[tuple[list[JoinableCollective], int]] = []
        for members in kinds.values():
            sizes = numbered(each.size for each in members)
            next_sizes = (np.roll(sizes, -i).tolist() for i in range(3))
            finer = numbered(zip(*next_sizes, strict=True))
            for begin, end, count in rows_of_layers(sizes, finer):
                if end - begin >= LEAST_CALLS * count:
                    rows.append((members[begin:end], count))
        return rows

    def _pieces(self, most: Mapping[str, int]) -> dict[str, Hashable]:
        """Return, by name, a key that is equal for collectives of one bucket. Layers
        that repeat, and are not all in one bucket, are cut at the same places, so that
        what reads a bucket repeats as well: a bucket has a number of whole layers, or
        an equal part of one."""
        pieces: dict[str, Hashable] = {}
        for members, count in self._rows:
            room = most[members[0].what]
            small = [each.size if each.size < room else 0 for each in members]
            size = sum(small[:count])
            if sum(small) <= room:
                continue
            layers, parts = max(1, round(room / size)), max(1, round(size / room))
            for i, each in enumerate(members):
                layer, at = divmod(i, count)
                middle = sum(small[:at]) + small[at] / 2
                part = int(middle * parts / size)
                pieces[each.name] = (members[0].name, layer // layers, part)
        return pieces

    @staticmethod
    def of(graph: fx.Graph, *, reductions: bool) -> Joinable:
        """Return the joinable gathers of parameters of a graph and, if ``reductions``,
        the joinable reductions of gradients."""
        candidates = set[fx.Node]()
        gathers = graph.find_nodes(op="call_function", target=_GATHER)
        if gathers:
            derived = from_inputs(graph)
            candidates.update(
                node
                for node in gathers
                if node.args[0] in derived
                and (not reductions or _is_on_all_ranks(node))
            )
        before: Mapping[fx.Node, frozenset[str]] = {}
        if reductions:
            before_output = _before_output(graph)
            ends = {n for n in before_output if n.target in (_SCATTER, _REDUCE)}
            candidates |= ends
            before = _reductions_before(ends)
        none = frozenset[str]()
        return Joinable(
            tuple(
                JoinableCollective(
                    node.name,
                    _what(node, reductions),
                    _kind_of(node),
                    whole_bytes(node),
                    before.get(node, none),
                )
                for node in sorted(candidates)
                if _can_join(node)
            )
        )

    def buckets(self, **most: int) -> tuple[tuple[str, ...], ...]:
        """Return the names of the collectives to join, by bucket. ``most``: bytes of a
        full bucket, by ``JoinableCollective.what``."""
        opened: dict[Hashable, _Bucket] = {}
        filled: list[_Bucket] = []
        home: dict[str, _Bucket] = {}
        before = {each.name: each.before for each in self.collectives}
        pieces = self._pieces(most)
        for each in self.collectives:
            room = most[each.what]
            if each.size >= room:
                continue
            open_bucket = opened.get(each.kind)
            needs = _buckets(each.before, home, before)
            piece = pieces.get(each.name)
            if (
                open_bucket is None
                or id(open_bucket) in needs
                or open_bucket.piece != piece
                or (piece is None and open_bucket.size + each.size > room)
            ):
                open_bucket = opened[each.kind] = _Bucket(piece)
                filled.append(open_bucket)
            open_bucket.members.append(each.name)
            open_bucket.size += each.size
            home[each.name] = open_bucket
        return tuple(tuple(b.members) for b in filled if len(b.members) > 1)


def _what(node: fx.Node, backward: bool) -> str:
    if node.target is not _GATHER:
        return "reduction"
    is_again = backward and node.meta.get("ac_graph_id") == REGATHERED
    return "again" if is_again else "gather"


def _kind_of(node: fx.Node) -> Hashable:
    value = node.args[0].meta["val"]
    return node.target, node.args[1:], value.dtype, value.device


def _can_join(node: fx.Node) -> bool:
    """Return whether no schedule placed or fused a collective, and it is real."""
    real = not node.args[0].meta["val"].is_complex()
    return real and not is_chunk(node) and not region_of(node)


def _is_on_all_ranks(node: fx.Node) -> bool:
    """Return whether all ranks have this gather in a backward: with uneven shards some
    ranks may save values that others recompute, except for gathered parameters."""
    return LARGEST not in custom_of(node) or node.meta.get("ac_graph_id") == REGATHERED


def _before_output(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes with only cheap work between them and the output or update."""
    ends: set[fx.Node] = set()
    borders = {graph.output_node()}
    borders.update(node for node in graph.nodes if phase_of(node) == "update")
    pending = [read for border in borders for read in border.all_input_nodes]
    while pending:
        node = pending.pop()
        if node not in ends and all(
            user in borders or (user in ends and _can_lead_to_output(user.target))
            for user in node.users
        ):
            ends.add(node)
            pending += node.all_input_nodes if _can_lead_to_output(node.target) else ()
    return ends


def _can_lead_to_output(target: Any) -> bool:
    """Return whether the operands of an op may be near the output if the op is."""
    facts = op_facts_of(target)
    return (
        facts.moves
        or facts.reshapes
        or facts.casts
        or facts.scales
        or target in (WAIT, _SCATTER, _REDUCE)
    )


def _reductions_before(
    reductions: Collection[fx.Node],
) -> dict[fx.Node, frozenset[str]]:
    """Return the names of the reductions that each node depends on, if any."""
    waits = {u: n for n in reductions for u in n.users if u.target is WAIT}
    none = frozenset[str]()
    out: dict[fx.Node, frozenset[str]] = {}
    for node in sorted(descendants(waits)):
        own = (waits[node].name,) if node in waits else ()
        out[node] = none.union(own, *(out.get(r, none) for r in node.all_input_nodes))
    return out


def _buckets(
    names: Iterable[str],
    home: Mapping[str, _Bucket],
    before: Mapping[str, Iterable[str]],
) -> set[int]:
    """Return the ids of the buckets that must be done before a node that depends on the
    named collectives: theirs, and those that any of their members depends on."""
    ids: set[int] = set()
    stack = list(names)
    while stack:
        bucket_of_node = home.get(stack.pop())
        if bucket_of_node is not None and id(bucket_of_node) not in ids:
            ids.add(id(bucket_of_node))
            stack += [n for member in bucket_of_node.members for n in before[member]]
    return ids


def whole_bytes(node: fx.Node) -> int:
    """Return the bytes of the larger of operand and result; for uneven shards those of
    the largest, so that all ranks fill their buckets equally."""
    largest = custom_of(node).get(LARGEST)
    return largest or max(nbytes_of(x.meta["val"]) for x in (node, node.args[0]))


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


def _stretch_of(node: fx.Node, rows: int) -> tuple[fx.Node, int, int | None]:
    """Return (node that has the elements, the first, after the last): for a part made
    by ``_split_result`` those of its one row, else all of the node, with None."""
    if rows == 1 and node.target is aten.reshape.default:
        piece = node.args[0]
        if piece.target is aten.slice.Tensor and len(piece.args) == 4:
            row, dim, begin, end = piece.args
            value = row.meta["val"]
            closed = all(type(n) is int for n in (begin, end, *value.shape))
            is_row = closed and value.dim() == 2 and len(value) == 1 and dim == 1
            if is_row and value.is_contiguous() and 0 <= begin <= end <= value.shape[1]:
                return row, begin, end
    return node, 0, None


def _flat(rewriter: Builder, nodes: Iterable[fx.Node], rows: int) -> fx.Node:
    """Return the operands, each viewed as [rows, ...], joined along dim 1. Neighbours
    in the row of another bucket are read from it as one slice."""
    stretches: list[tuple[fx.Node, int, int | None]] = []
    for node in nodes:
        source, begin, end = _stretch_of(node, rows)
        if end is not None and stretches and stretches[-1][::2] == (source, begin):
            begin = stretches.pop()[1]
        stretches.append((source, begin, end))
    parts = []
    for node, begin, end in stretches:
        if end is None:
            part = rewriter.call(aten.reshape.default, node, [rows, -1])
        elif (begin, end) == (0, node.meta["val"].shape[1]):
            part = node
        else:
            part = rewriter.call(aten.slice.Tensor, node, 1, begin, end)
        parts.append(part)
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
        start = rewriter.call(kind, bucket, *place.args[1:])
        start.meta[ORIGINS] = "+".join(m.meta.get("fxpar_origin", "") for m in members)
        wait = rewriter.call(WAIT, start)
        whole = _scaled(rewriter, wait, members)
        _split_result(rewriter, whole, ranks if kind is _GATHER else 1, members)


def _scaled(rewriter: Builder, bucket: fx.Node, members: Sequence[fx.Node]) -> fx.Node:
    """Return a bucket multiplied or divided by a number at once, where each of its
    parts is, once, and nothing that could be fused with it reads the result: all are
    gradients of which the mean over ranks is taken. Else return the bucket."""
    scaled = [n for member in members for wait in member.users for n in wait.users]
    if not _SCALINGS.issuperset(node.target for node in scaled):
        return bucket
    calls = {(node.target, *node.args[1:]) for node in scaled}
    is_read = any(is_light(user.target) for node in scaled for user in node.users)
    count = len({node.args[0] for node in scaled})
    if is_read or len(calls) > 1 or not count == len(scaled) == len(members):
        return bucket
    for node in scaled:
        rewriter.replace(node, node.args[0])
    ((target, number),) = calls
    return rewriter.call(target, bucket, number)


# Ops on a tensor and a number.
_SCALINGS = {aten.div.Scalar, aten.mul.Scalar}
