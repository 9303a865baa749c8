"""Verb ``overlap``: a product and the collective beside it run in chunks.

``overlap(mm, rs, chunks=4)``: while chunk i is reduced, the product of chunk i + 1
runs. ``overlap(ag, mm, chunks=4)``: while chunk i is multiplied, chunk i + 1 is
gathered. The values between the two are computed per chunk by the rules of ``parts``,
with chunks in place of ranks: what may cross a gather may run in chunks (CoCoNeT,
section 3.4; with functional collectives, which are asynchronous, on any backend).

Chunks lie along a dim that the collective does not touch, or within each rank's part of
the one it does. A chunk's collective starts as soon as its operand is there, and is
waited for where its result is read: gathers one chunk ahead, reductions at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.fusion.edit import Edit, refuse
from fxpar.fusion.parts import Cutter, Part, Refused, results_of
from fxpar.fusion.regions import arrange
from fxpar.passes import steps
from fxpar.passes.builder import Builder
from fxpar.sharding.mesh import Mesh

aten = torch.ops.aten

# No mesh of a user has an axis of this name.
_AXIS = "__chunk"


class _Chunked(Builder):
    """Builds with chunks as one more axis of the mesh, which no rank is on."""

    def __init__(self, build: Builder, chunks: int) -> None:
        mesh = Mesh((*build.mesh.axes, (_AXIS, chunks)))
        super().__init__(build.graph, build.fake_mode, mesh)
        self.real = build

    def offset(self, axes: Sequence[str], stride: int, base: int = 0) -> Any:
        if _AXIS in axes:
            raise Refused("counts by index")
        return self.real.offset(axes, stride, base)


@dataclass(frozen=True)
class _Layout:
    """Where chunks lie: along ``dim`` of the value at the collective's compute side.
    ``ranks``: 1, or the ranks within whose parts of the dim they lie."""

    dim: int
    chunks: int
    ranks: int = 1

    def cut(self, build: Builder, x: fx.Node, dim: int, i: int) -> fx.Node:
        """Chunk ``i`` of a whole value along its ``dim``."""
        shape = list(x.meta["val"].shape)
        if self.ranks == 1:
            size = shape[dim] // self.chunks
            return build.call(aten.slice.Tensor, x, dim, i * size, (i + 1) * size)
        size = shape[dim] // self.ranks // self.chunks
        apart = [*shape[:dim], self.ranks, self.chunks, size, *shape[dim + 1 :]]
        x = build.call(aten.reshape.default, x, apart)
        x = build.call(aten.select.int, x, dim + 1, i)
        together = [*shape[:dim], self.ranks * size, *shape[dim + 1 :]]
        return build.call(aten.reshape.default, x, together)

    def join(self, build: Builder, chunks: list[fx.Node], dim: int) -> fx.Node:
        """The whole value of its chunks; inverse of ``cut``."""
        if self.ranks == 1:
            return build.call(aten.cat.default, chunks, dim)
        shape = list(chunks[0].meta["val"].shape)
        size = shape[dim] // self.ranks
        apart = [*shape[:dim], self.ranks, size, *shape[dim + 1 :]]
        rows = [build.call(aten.reshape.default, c, apart) for c in chunks]
        x = build.call(aten.cat.default, rows, dim + 1)
        shape[dim] *= len(chunks)
        return build.call(aten.reshape.default, x, shape)


def overlap(
    edit: Edit,
    first: fx.Node | tuple[fx.Node, ...],
    second: fx.Node | tuple[fx.Node, ...],
    chunks: int = 2,
    dim: int | None = None,
) -> list[fx.Node]:
    """``overlap(ag, mm)`` or ``overlap(ag, [mm, mm_1])``: gives the joined results;
    ``overlap(mm, rs)``: gives the joined result of the collective. ``dim``: of the
    collective's result that is cut in chunks."""
    starts, ends = _tuple(first), _tuple(second)
    if len(starts) == 1 and starts[0].target is steps.all_gather:
        return _gather_first(edit, starts[0], ends, chunks, dim)
    if len(ends) == 1 and ends[0].target in _LAST:
        return _reduce_last(edit, starts, ends[0], chunks, dim)
    raise refuse("overlap", starts[0], "is no gather, and comes before none")


# What chunks may end with; a gather that ends them is one that others come before.
_LAST = {steps.reduce_scatter, steps.all_reduce, steps.permute, steps.all_gather}


def _tuple(nodes: fx.Node | tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    return nodes if isinstance(nodes, tuple) else (nodes,)


def _gather_first(
    edit: Edit,
    gather: fx.Node,
    ends: tuple[fx.Node, ...],
    chunks: int,
    dim: int | None,
) -> list[fx.Node]:
    along: Any = gather.args[1]
    axes, x = steps.axes_of(gather), gather.all_input_nodes[0]
    dim = along if dim is None else dim
    layout = _Layout(dim, chunks, edit.mesh.count(axes) if dim == along else 1)
    _check_size(gather, x, dim, chunks)
    region = _between((gather,), ends)
    if not region:
        raise refuse("overlap", gather, f"is not read by {ends[0].name}")
    anchor = max(region).next
    with edit.before(anchor) as build:
        straight, skew = _Layout(dim, chunks), _Skew(anchor)
        gathered, made = [], []
        for i in range(chunks):
            part = straight.cut(build, x, dim, i)
            gathered.append(steps.step(build, steps.all_gather, part, along, axes))
            parts = {gather: Part(gathered[i], dim)}
            made.append(_run(edit, region, parts, layout, i, chunks))
            skew.end()
        skew.order()
        lost = [end for end in ends if end not in made[0]]
        if lost:
            raise refuse("overlap", lost[0], "gives no one tensor")
        joined = [
            layout.join(build, [m[end][0] for m in made], made[0][end][1])
            for end in ends
        ]
        whole = layout.join(build, gathered, dim)
    inside = set(region)
    left = [n for n in region if any(u not in inside for u in n.users)]
    if set(left) - set(ends):
        raise refuse("overlap", left[0], "is read outside of what runs in chunks")
    for end, node in zip(ends, joined, strict=True):
        end.replace_all_uses_with(node)
    edit.erase(reversed(region))
    gather.replace_all_uses_with(whole)
    edit.erase([gather, whole])
    arrange(edit.graph)
    return joined


def _reduce_last(
    edit: Edit,
    starts: tuple[fx.Node, ...],
    reduced: fx.Node,
    chunks: int,
    dim: int | None,
) -> list[fx.Node]:
    source = reduced.all_input_nodes[0]
    args: Any = reduced.args
    along = args[1] if isinstance(args[1], int) else None
    count = edit.mesh.count(steps.axes_of(reduced))
    shape = list(source.meta["val"].shape)
    if dim is None:
        whole = [d for d, n in enumerate(shape) if d != along and n % chunks == 0]
        dim = whole[0] if whole else (along if along is not None else 0)
    apart, straight = _Layout(dim, chunks, count), _Layout(dim, chunks)
    before = after = straight
    if dim == along:
        gathers = reduced.target is steps.all_gather
        before, after = (straight, apart) if gathers else (apart, straight)
    _check_size(reduced, source if before is straight else reduced, dim, chunks)
    region = sorted({*starts, *_between(starts, (source,))})
    if source not in region:
        raise refuse("overlap", reduced, f"does not reduce what {starts[0].name} gives")
    for node in region:
        outside = [u for u in node.users if u not in region and u is not reduced]
        if outside:
            raise refuse("overlap", node, f"is read by {outside[0].name} too")
    with edit.before(reduced) as build:
        pieces, skew = [], _Skew(reduced)
        for i in range(chunks):
            made = _pull(edit, region, source, before, i, chunks)
            pieces.append(steps.step(build, reduced.target, made, *args[1:]))
            skew.end()
        skew.order()
        joined = after.join(build, pieces, dim)
    edit.swap(reduced, joined)
    return [joined]


def _run(
    edit: Edit,
    region: list[fx.Node],
    parts: dict[fx.Node, Part],
    layout: _Layout,
    i: int,
    chunks: int,
) -> dict[fx.Node, Any]:
    """The region on one chunk of what was gathered."""
    cutter = _cutter(edit, layout, i, chunks, ())
    known: dict[fx.Node, Part] = dict(parts)
    out: dict[fx.Node, Any] = {}
    for node in region:
        if node in known:
            continue
        try:
            made = results_of(node, cutter.on_parts(node, known))
        except Refused as error:
            raise refuse("overlap", node, str(error)) from error
        for whole, (result, dim) in made.items():
            if dim is None:
                raise refuse("overlap", node, "sums over the dim that is cut")
            known[whole] = Part(result, dim)
            out[whole] = result, dim
    return out


def _pull(
    edit: Edit, region: list[fx.Node], last: fx.Node, layout: _Layout, i: int, n: int
) -> fx.Node:
    """One chunk of ``last``, computed through the region."""
    cutter = _cutter(edit, layout, i, n, region)
    try:
        return cutter.sliced(last, layout.dim)
    except Refused as error:
        raise refuse("overlap", last, str(error)) from error


def _cutter(
    edit: Edit, layout: _Layout, i: int, chunks: int, pull: Sequence[fx.Node]
) -> Cutter:
    build = _Chunked(edit.build, chunks)

    def cut(x: fx.Node, dim: int) -> fx.Node:
        return layout.cut(build, x, dim, i)

    grain = layout.ranks * layout.chunks
    return Cutter(build, (_AXIS,), {}, pull=frozenset(pull), cut=cut, grain=grain)


def _check_size(node: fx.Node, x: fx.Node, dim: int, chunks: int) -> None:
    shape = list(x.meta["val"].shape)
    if chunks < 2 or not 0 <= dim < len(shape) or shape[dim] % chunks:
        raise refuse("overlap", node, f"of {shape} has no {chunks} chunks along {dim}")


def _between(starts: tuple[fx.Node, ...], ends: tuple[fx.Node, ...]) -> list[fx.Node]:
    """Nodes on a path from a start to an end, ends included, starts not."""
    after, at = set(starts), min(starts)
    last = max(ends)
    while at is not last:
        at = at.next
        if any(n in after for n in at.all_input_nodes):
            after.add(at)
    found: set[fx.Node] = {end for end in ends if end in after}
    rest = list(found)
    while rest:
        for node in rest.pop().all_input_nodes:
            if node in after and node not in found and node not in starts:
                found.add(node)
                rest.append(node)
    return sorted(found - set(starts))


class _Skew:
    """Orders what chunks are made of, so that they run beside each other: what comes
    after s collectives of chunk i stands with the start of chunk i + s, after it."""

    def __init__(self, anchor: fx.Node) -> None:
        self.last = anchor.prev
        self.anchor = anchor
        self.chunks: list[list[fx.Node]] = []

    def end(self) -> None:
        """A chunk is built: all that stands before the anchor since the one before."""
        built = []
        node = self.anchor.prev
        while node is not self.last:
            built.append(node)
            node = node.prev
        self.chunks.append(built[::-1])
        self.last = self.anchor.prev

    def order(self) -> None:
        """Move the nodes."""
        late: dict[fx.Node, int] = {}
        place = []
        for i, chunk in enumerate(self.chunks):
            for k, node in enumerate(chunk):
                late[node] = max(
                    (
                        late[n] + (n.target in steps.COLLECTIVE)
                        for n in node.all_input_nodes
                        if n in late
                    ),
                    default=0,
                )
                place.append((i + late[node], late[node], k, node))
        for *_, node in sorted(place, key=lambda p: p[:3]):
            self.anchor.prepend(node)
