"""Applies verb ``overlap``: a product and the collective next to it run in chunks.

In: an Edit, the nodes where the chunks begin and where they end. Out: the joined
results.

``overlap(mm, rs, chunks=4)``: while chunk i is reduced, the product of chunk i + 1
runs. ``overlap(ag, mm, chunks=4)``: while chunk i is multiplied, chunk i + 1 is
gathered. The values between the two are computed per chunk by the rules of
``slice_op``, with chunks in place of ranks: an op that may cross a gather may run in
chunks (CoCoNeT, section 3.4; with functional collectives, which are asynchronous, on
any backend).

Chunks are cut along a dim that the collective does not touch, or within each rank's
part of the dim that it does. A chunk's collective starts as soon as its operand is
there, and is waited for where its result is read: gathers one chunk ahead, reductions
at the end. With ``ring=`` the chunks are the parts of the ranks, which go from
neighbour to neighbour (``ring``) instead. Messages to another stage run in chunks as
well. Never lets an op run in chunks that reads all of the cut dim.

``overlap(..., fused=1)``: products of the rows of a gather, along a dim that they do
not sum over, are ``fxpar::gather_matmul``; a product whose rows a reduce-scatter takes
is ``fxpar::matmul_scatter``. On GPUs that share memory these ops are PyTorch's own of
asynchronous tensor parallelism (``symm_mem::fused_all_gather_matmul``,
``symm_mem::fused_matmul_reduce_scatter``), elsewhere the two ops one after the other
(``graph.custom_ops``). Never chosen automatically: their seconds are not in the cost
model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.fusion import node_legality as order
from fxpar.fusion.node_legality import arrange
from fxpar.fusion.schedule_edit import Edit, check_staged, refuse
from fxpar.fusion.slice_op import Cutter, Refused, SlicePart, results_of
from fxpar.fusion.verbs import send_recv
from fxpar.fusion.verbs.ring import Ring
from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder
from fxpar.graph.custom_ops import group_name
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import has_any, name_of, op_facts_of
from fxpar.sharding.program import ancestors

aten = torch.ops.aten

# No mesh of a user has an axis of this name.
_AXIS = "__chunk"


class _Chunked(Builder):
    """Builds with chunks as one more axis of the mesh, which no rank is on."""

    def __init__(self, build: Builder, chunks: int) -> None:
        mesh = Mesh((*build.mesh.axes, (_AXIS, chunks)))
        super().__init__(build.graph, build.fake_mode, mesh)
        self.real = build

    def offset(
        self, axes: Sequence[str], stride: int, base: int = 0, around: int = 0
    ) -> Any:
        if _AXIS in axes:
            raise Refused("counts by index")
        return self.real.offset(axes, stride, base, around)


@dataclass(frozen=True)
class Chunks:
    """Says how the value at the collective's compute side is cut in chunks."""

    dim: int  # the dim of that value along which chunks are cut
    chunks: int  # number of chunks, in each of ``ranks`` parts
    ranks: int = 1  # 1, or the number of ranks in whose parts of the dim the chunks are

    def cut(self, build: Builder, x: fx.Node, dim: int, i: int) -> fx.Node:
        """Append chunk ``i`` of a whole value along its ``dim``."""
        shape = list(x.meta["val"].shape)
        if self.ranks == 1:
            size = shape[dim] // self.chunks
            return build.call(aten.slice.Tensor, x, dim, i * size, (i + 1) * size)
        size = shape[dim] // self.ranks // self.chunks
        split_shape = [*shape[:dim], self.ranks, self.chunks, size, *shape[dim + 1 :]]
        x = build.call(aten.reshape.default, x, split_shape)
        x = build.call(aten.select.int, x, dim + 1, i)
        together = [*shape[:dim], self.ranks * size, *shape[dim + 1 :]]
        return build.call(aten.reshape.default, x, together)

    def join(self, build: Builder, chunks: list[fx.Node], dim: int) -> fx.Node:
        """Append the whole value of its chunks; inverse of ``cut``."""
        if self.ranks == 1:
            return build.call(aten.cat.default, chunks, dim)
        shape = list(chunks[0].meta["val"].shape)
        size = shape[dim] // self.ranks
        split_shape = [*shape[:dim], self.ranks, size, *shape[dim + 1 :]]
        rows = [build.call(aten.reshape.default, c, split_shape) for c in chunks]
        x = build.call(aten.cat.default, rows, dim + 1)
        shape[dim] *= len(chunks)
        return build.call(aten.reshape.default, x, shape)


Layout = Chunks | Ring


@dataclass(frozen=True)
class OverlapScheme:
    """Is a way of a feature to overlap nodes of some kinds."""

    # The ops where chunks may end (``op_facts.has_any``).
    ops: str
    # With the arguments of ``overlap``; None: it is no way for them after all.
    overlap: Callable[..., list[fx.Node] | None]


# The first that is a way for the nodes is taken.
SCHEMES: list[OverlapScheme] = []


def overlap(
    edit: Edit,
    starts: tuple[fx.Node, ...],
    ends: tuple[fx.Node, ...],
    chunks: int | None = None,
    dim: int | None = None,
    ring: int | None = None,
    fused: int = 0,
) -> list[fx.Node]:
    """Apply ``overlap(ag, mm)`` or ``overlap(ag, [mm, mm_1])``, and return the joined
    results; or ``overlap(mm, rs)``, and return the joined result of the collective;
    ``overlap(recv, mm)`` and ``overlap(mm, send)`` likewise.

    chunks: how many, 2 by default. dim: of the collective's result, to be cut in
    chunks. ring: number of directions, 1 or 2; the chunks are then the parts of the
    ranks. fused: 1 for one op that does both.
    """
    for scheme in SCHEMES:
        if has_any([name_of(ends[0].target) or str(ends[0].target)], scheme.ops):
            args = edit, starts, ends, chunks, dim, ring, fused
            results = scheme.overlap(*args)
            if results is not None:
                return results
    if fused:
        if any(other is not None for other in (chunks, dim, ring)):
            why = "is fused with its collective, which has no chunks of its own"
            raise refuse(
                "overlap", starts[0], why, fix="leave out chunks, dim and ring"
            )
        if len(starts) == 1 and starts[0].target is collective_nodes.all_gather:
            return _fused_gather(edit, starts[0], ends)
        if len(ends) == 1 and ends[0].target is collective_nodes.reduce_scatter:
            return _fused_scatter(edit, starts, ends[0])
        why = "is no gather before products, and no product before a reduce-scatter"
        raise refuse("overlap", starts[0], why, fix="leave out fused")
    if len(starts) == 1 and starts[0].target in _FIRST:
        how = _Chunking(edit, starts[0], chunks, dim, ring)
        return _collective_first(edit, how, ends)
    if len(ends) == 1 and ends[0].target in _LAST:
        how = _Chunking(edit, ends[0], chunks, dim, ring)
        return _collective_last(edit, starts, how)
    raise refuse("overlap", starts[0], "is no gather, and comes before none")


# Collectives that chunks may begin with, or end with; a gather that ends them is one
# that others come before.
_FIRST = {collective_nodes.all_gather, collective_nodes.recv}
_LAST = {
    collective_nodes.reduce_scatter,
    collective_nodes.all_reduce,
    collective_nodes.permute,
    collective_nodes.all_gather,
    collective_nodes.send,
}
# Collectives that a ring may replace: a gather that comes first, a reduce-scatter that
# is last.
_RINGS = {collective_nodes.all_gather, collective_nodes.reduce_scatter}


class _Chunking:
    """Is the collective of a line, and how to cut it up. ``along``: the dim that it
    moves, None if it moves none; ``dim``: the one that the line names."""

    def __init__(
        self,
        edit: Edit,
        node: fx.Node,
        chunks: int | None,
        dim: int | None,
        ring: int | None,
    ) -> None:
        self.node, self.args, self.dim, self.ring = node, node.args[1:], dim, ring
        self.axes = collective_nodes.axes_of(node)
        self.chunks = 2 if chunks is None else chunks
        moves = node.target not in (
            collective_nodes.all_reduce,
            collective_nodes.permute,
            *collective_nodes.MESSAGES,
        )
        self.along: Any = node.args[1] if moves else None
        if node.target in collective_nodes.MESSAGES:
            check_staged("overlap", edit, node)
        if ring is not None:
            self._check_ring(edit, chunks)

    def _check_ring(self, edit: Edit, chunks: int | None) -> None:
        if self.node.target not in _RINGS:
            raise refuse(
                "overlap", self.node, "is no gather or reduce-scatter, as a ring"
            )
        if chunks is not None or self.dim not in (None, self.along):
            why = f"in a ring goes in parts of the ranks along dim {self.along}"
            raise refuse("overlap", self.node, why, fix="leave out chunks and dim")
        if edit.mesh.count(self.axes) < 2:
            raise refuse("overlap", self.node, "has no neighbour to pass a part to")


def _collective_first(
    edit: Edit, how: _Chunking, ends: tuple[fx.Node, ...]
) -> list[fx.Node]:
    first = how.node
    region = between((first,), ends)
    if not region:
        raise refuse("overlap", first, f"is not read by {ends[0].name}")
    anchor = max(region).next
    with edit.before(anchor) as build:
        layout, dim, coming = _coming(edit, build, how)
        skew, arrived, results = (
            _Skew(anchor),
            list[fx.Node](),
            list[dict[fx.Node, Any]](),
        )
        for i, part in enumerate(coming):
            arrived.append(part)
            results.append(
                on_part(edit, region, {first: SlicePart(part, dim)}, layout, i)
            )
            skew.end()
        if how.ring is None:
            skew.order()
        without_result = [end for end in ends if end not in results[0]]
        if without_result:
            raise refuse("overlap", without_result[0], "gives no one tensor")
        wholes = [
            layout.join(build, [m[end][0] for m in results], results[0][end][1])
            for end in ends
        ]
        whole = layout.join(build, arrived, dim)
    inside = set(region)
    read_outside = [n for n in region if any(u not in inside for u in n.users)]
    if set(read_outside) - set(ends):
        raise refuse(
            "overlap", read_outside[0], "is read outside of what runs in chunks"
        )
    for end, node in zip(ends, wholes, strict=True):
        edit.read_instead(end, node, list(end.users))
    edit.erase(reversed(region))
    first.replace_all_uses_with(whole)
    edit.erase([first, whole])
    arrange(edit.graph)
    return wholes


def _coming(
    edit: Edit, build: Builder, how: _Chunking
) -> tuple[Layout, int, Iterator[fx.Node]]:
    """Return the layout of the parts of a gather, or a message; their dim; and the
    parts, each appended when it is asked for."""
    node, along, chunks = how.node, how.along, how.chunks
    x = node.all_input_nodes[0]
    if how.ring is not None:
        ring = Ring.nearest_first(edit.mesh, how.axes, along, how.ring)
        return ring, along, ring.arriving(build, x)
    if node.target is collective_nodes.recv:
        dim = 0 if how.dim is None else how.dim
        _check_size(node, x, dim, chunks)
        send_recv.check_buffer("overlap", node)
        shape = list(x.meta["val"].shape)
        shape[dim] //= chunks
        messages = (send_recv.received(build, node, shape) for _ in range(chunks))
        return Chunks(dim, chunks), dim, messages
    dim = along if how.dim is None else how.dim
    _check_size(node, x, dim, chunks)
    straight = Chunks(dim, chunks)
    gathers = (
        collective_nodes.step(
            build, node.target, straight.cut(build, x, dim, i), *how.args
        )
        for i in range(chunks)
    )
    inside = edit.mesh.count(how.axes) if dim == along else 1
    return Chunks(dim, chunks, inside), dim, gathers


def _collective_last(
    edit: Edit, starts: tuple[fx.Node, ...], how: _Chunking
) -> list[fx.Node]:
    last = how.node
    source = last.all_input_nodes[0]
    region = sorted({*starts, *between(starts, (source,))})
    if source not in region:
        raise refuse("overlap", last, f"does not reduce what {starts[0].name} gives")
    for node in region:
        outside = [u for u in node.users if u not in region and u is not last]
        if outside:
            raise refuse("overlap", node, f"is read by {outside[0].name} too")
    with edit.before(last) as build:
        if how.ring is not None:
            whole = _ring_last(edit, build, region, how)
        else:
            whole = _chunks_last(edit, build, region, how)
    edit.swap(last, whole)
    return [whole]


def _ring_last(
    edit: Edit, build: Builder, region: list[fx.Node], how: _Chunking
) -> fx.Node:
    """Append the region on each part, and sums of the parts that go from rank to
    rank."""
    if how.node.target is not collective_nodes.reduce_scatter:
        raise refuse("overlap", how.node, "ends no ring, which a reduce-scatter may")
    op: Any = how.args[1]
    assert how.ring is not None
    ring = Ring.farthest_first(edit.mesh, how.axes, how.along, how.ring)
    source = how.node.all_input_nodes[0]
    return ring.reduced(build, lambda i: _pull(edit, region, source, ring, i), op)


def _chunks_last(
    edit: Edit, build: Builder, region: list[fx.Node], how: _Chunking
) -> fx.Node:
    """Append the region on each chunk, and the collective of it."""
    last, along, chunks = how.node, how.along, how.chunks
    source = last.all_input_nodes[0]
    shape, dim = list(source.meta["val"].shape), how.dim
    if dim is None:
        whole = [d for d, n in enumerate(shape) if d != along and n % chunks == 0]
        dim = whole[0] if whole else (along if along is not None else 0)
    straight = Chunks(dim, chunks)
    by_rank = Chunks(dim, chunks, edit.mesh.count(how.axes))
    before = after = straight
    if dim == along:
        gathers = last.target is collective_nodes.all_gather
        before, after = (straight, by_rank) if gathers else (by_rank, straight)
    _check_size(last, source if before is straight else last, dim, chunks)
    pieces, skew = [], _Skew(last)
    for i in range(chunks):
        piece = _pull(edit, region, source, before, i)
        pieces.append(collective_nodes.step(build, last.target, piece, *how.args))
        if last.target is collective_nodes.send:
            order.instead(last, pieces[-1])
        skew.end()
    skew.order()
    if last.target is collective_nodes.send:
        return pieces[-1]  # a send has no other result than that it was sent
    return after.join(build, pieces, dim)


def on_part(
    edit: Edit,
    region: list[fx.Node],
    parts: dict[fx.Node, SlicePart],
    layout: Layout,
    i: int,
) -> dict[fx.Node, Any]:
    """Append the region on one chunk of the gathered value. Return node -> (its result
    on the chunk, the dim that is cut)."""
    cutter = _cutter(edit, layout, i, ())
    slices: dict[fx.Node, SlicePart] = dict(parts)
    results: dict[fx.Node, Any] = {}
    for node in region:
        if node in slices:
            continue
        try:
            by_result = results_of(node, cutter.on_parts(node, slices))
        except Refused as error:
            raise refuse("overlap", node, str(error)) from error
        for whole, (result, dim) in by_result.items():
            if dim is None:
                raise refuse("overlap", node, "sums over the dim that is cut")
            slices[whole] = SlicePart(result, dim)
            results[whole] = result, dim
    return results


def _pull(
    edit: Edit, region: list[fx.Node], last: fx.Node, layout: Layout, i: int
) -> fx.Node:
    """Append one chunk of ``last``, computed through the region."""
    cutter = _cutter(edit, layout, i, region)
    try:
        return cutter.sliced(last, layout.dim)
    except Refused as error:
        raise refuse("overlap", last, str(error)) from error


def _cutter(edit: Edit, layout: Layout, i: int, pull: Sequence[fx.Node]) -> Cutter:
    build = _Chunked(edit.build, layout.chunks)

    def cut(x: fx.Node, dim: int) -> fx.Node:
        return layout.cut(build, x, dim, i)

    grain = layout.ranks * layout.chunks
    # In a ring each rank has another part at a time.
    outside_axes = layout.axes if isinstance(layout, Ring) else ()
    parts = frozenset(pull)
    return Cutter(
        build, (_AXIS,), {}, pull=parts, cut=cut, grain=grain, outside_axes=outside_axes
    )


def _check_size(node: fx.Node, x: fx.Node, dim: int, chunks: int) -> None:
    shape = list(x.meta["val"].shape)
    if dim >= len(shape) or shape[dim] % chunks:
        raise refuse("overlap", node, f"of {shape} has no {chunks} chunks along {dim}")


def between(starts: Sequence[fx.Node], ends: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes on a path from a start to an end, ends included, starts not."""
    after, at = set(starts), min(starts)
    last = max(ends)
    while at is not last:
        at = at.next
        if any(n in after for n in at.all_input_nodes):
            after.add(at)
    members = ancestors((end for end in ends if end in after), after - set(starts))
    return sorted(members - set(starts))


class _Skew:
    """Orders the nodes of chunks so that chunks overlap: those after s collectives of
    chunk i are placed after the start of chunk i + s."""

    def __init__(self, anchor: fx.Node) -> None:
        self.last = anchor.prev
        self.anchor = anchor
        self.chunks: list[list[fx.Node]] = []

    def end(self) -> None:
        """Note that a chunk is complete: all nodes before the anchor since the last
        one."""
        chunk = []
        node = self.anchor.prev
        while node is not self.last:
            chunk.append(node)
            node = node.prev
        for member in chunk:
            if member.target in collective_nodes.COLLECTIVE:
                member.meta["fxpar_chunk"] = True
        self.chunks.append(chunk[::-1])
        self.last = self.anchor.prev

    def order(self) -> None:
        """Move the nodes of all chunks."""
        hops: dict[fx.Node, int] = {}
        place = []
        for i, chunk in enumerate(self.chunks):
            for k, node in enumerate(chunk):
                hops[node] = max(
                    (
                        hops[n] + (n.target in collective_nodes.COLLECTIVE)
                        for n in node.all_input_nodes
                        if n in hops
                    ),
                    default=0,
                )
                place.append((i + hops[node], hops[node], k, node))
        for *_, node in sorted(place, key=lambda p: p[:3]):
            self.anchor.prepend(node)


ours = torch.ops.fxpar

_SUMS = ("sum", "avg")


def _fused_gather(edit: Edit, gather: fx.Node, ends: tuple[fx.Node, ...]) -> Any:
    """Put a gather and the products ``ends`` into one op. Return the products."""
    args: Any = gather.args
    x, dim = args[0], args[1]
    if dim == x.meta["val"].dim() - 1:
        raise refuse("overlap", gather, "gathers the dim that a product sums over")
    weights = [_weight(end, gather) for end in ends]
    with edit.before(max(ends).next) as build:
        fused = _fused_call(
            edit, build, gather, ours.gather_matmul.default, x, weights, dim
        )
        whole = build.call(operator.getitem, fused, 0)
        rows = [build.call(operator.getitem, fused, i) for i in range(1, len(ends) + 1)]
        products = [
            build.call(aten.reshape.default, x, list(end.meta["val"].shape))
            for x, end in zip(rows, ends, strict=True)
        ]
    for end, product in zip(ends, products, strict=True):
        edit.swap(end, product)
    edit.swap(gather, whole)
    arrange(edit.graph)
    return products


def _fused_scatter(edit: Edit, starts: tuple[fx.Node, ...], reduced: fx.Node) -> Any:
    """Put a product and its reduce-scatter into one op. Return the result of each
    rank."""
    args: Any = reduced.args
    source, dim, op = args[0], args[1], args[2]
    product = _before_reshapes(source)
    shape = list(source.meta["val"].shape)
    if starts != (product,) or product.target is not aten.mm.default:
        why = "does not reduce the rows of a product of two matrices"
        raise refuse("overlap", reduced, why)
    if op not in _SUMS or dim == len(shape) - 1:
        raise refuse("overlap", reduced, f"is a {op} along dim {dim} of {len(shape)}")
    chain, read_too = source, "is read by others too"
    while chain is not product.args[0]:
        if len(chain.users) > 1:
            raise refuse("overlap", chain, read_too)
        if chain is product:
            break
        chain = chain.all_input_nodes[0]
    x, w = product.args
    with edit.before(reduced) as build:
        rows = [*shape[:-1], x.meta["val"].shape[1]]
        x = build.call(aten.reshape.default, x, rows)
        fused = _fused_call(
            edit, build, reduced, ours.matmul_scatter.default, x, w, op, dim
        )
    edit.swap(reduced, fused)
    return [fused]


def _fused_call(
    edit: Edit, build: Builder, node: fx.Node, target: Any, *args: Any
) -> Any:
    axes = collective_nodes.axes_of(node)
    if edit.mesh.ordered(axes) != tuple(axes):
        raise refuse("overlap", node, f"has its axes in another order than {edit.mesh}")
    return build.call(target, *args, edit.mesh.count(axes), group_name(edit.mesh, axes))


def _before_reshapes(node: fx.Node) -> Any:
    """Return the value before reshapes that keep the last dim: the same rows, in
    order."""
    while op_facts_of(node.target).reshapes:
        source = node.all_input_nodes[0]
        if node.meta["val"].shape[-1:] != source.meta["val"].shape[-1:]:
            break
        node = source
    return node


def _weight(end: fx.Node, gather: fx.Node) -> Any:
    """Return the matrix that a product multiplies the gathered value with."""
    args: Any = end.args
    if end.target is not aten.mm.default or _before_reshapes(args[0]) is not gather:
        raise refuse(
            "overlap", end, f"is no product of the rows of {gather.name} with a matrix"
        )
    if gather in ancestors([args[1]]):
        raise refuse("overlap", end, f"has {gather.name} on both sides")
    return args[1]
