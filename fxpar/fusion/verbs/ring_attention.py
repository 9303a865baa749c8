"""Verb ``overlap`` of gathers of keys and values and an attention that reads them.

``overlap([ag, ag_1], attention, ring=1)``: keys and values go from neighbour to
neighbour, and no rank holds all of them. A rank attends its queries to each part while
the next one comes, and merges what it gets by log-sum-exp. In a backward the gradients
of keys and values travel as well, in the place of the reduce-scatters that follow, and
come home at last. Of a causal mask, which part is meant depends on the rank through
``Builder.offset`` alone; parts that nobody sees cost no arithmetic.

The scheme is that of ring attention (Liu et al., arXiv 2310.01889).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.fusion.node_legality import arrange
from fxpar.fusion.schedule import Line, Schedule
from fxpar.fusion.schedule_edit import Edit, refuse
from fxpar.fusion.slice_op import SlicePart
from fxpar.fusion.verbs import overlap as chunked
from fxpar.fusion.verbs.ring import Ring
from fxpar.passes import causal_attention as _ops  # noqa: F401  (registers ops)
from fxpar.passes import collective_nodes
from fxpar.passes.builder import Builder
from fxpar.passes.local_attention import laid_out, weighted
from fxpar.sharding.cost.op import contracts

aten = torch.ops.aten
ours = torch.ops.fxpar

# [batch, heads, sequence, features]
_SEQUENCE = 2


@dataclass(frozen=True)
class AttentionForm:
    """Where an attention has its arguments. Its first results are the output and a
    log-sum-exp of each query, or the gradients of queries, keys and values."""

    # Of the keys; the queries stand before them, the values behind.
    keys: int
    backward: bool
    # Of a causal mask by places: where queries begin.
    ahead: int | None
    # Of a causal mask that begins at the first key.
    causal: int | None
    # Of a bias, by position or name.
    bias: int | str | None


def form_of(target: Any) -> AttentionForm | None:
    """The form of an attention on [batch, heads, sequence, features], read off its
    schema; None of any other op."""
    if not contracts(target) or "attention" not in str(target):
        return None
    schema = _torch.objects.schema_of(target)
    if (
        schema is None
        or "_scaled_dot" not in str(target)
        and "causal" not in str(target)
    ):
        return None
    given = {a.name: i for i, a in enumerate(schema.arguments)}
    named = {a.name for a in schema.arguments if a.kwarg_only}

    def place(*names: str) -> Any:
        found = next((name for name in names if name in given), None)
        return found if found in named or found is None else given[found]

    return AttentionForm(
        keys=place("k", "key"),
        backward="backward" in str(target),
        ahead=place("ahead"),
        causal=place("is_causal"),
        bias=place("attn_mask", "attn_bias"),
    )


def rings_of(graph: fx.Graph) -> Schedule:
    """A line for each attention of a local graph with steps whose keys and values are
    gathered for it."""
    lines = []
    for node in graph.nodes:
        form = form_of(node.target)
        if form is None:
            continue
        found = [_gather_of(node.args[form.keys + i]) for i in range(2)]
        gathers = [gather for gather in found if gather is not None]
        names = tuple(dict.fromkeys(gather.name for gather in gathers))
        if len(gathers) == 2 and len({gather.args[1:] for gather in gathers}) == 1:
            lines.append(Line("overlap", (names, node.name), (("ring", 1),)))
    return Schedule(tuple(lines))


def _gather_of(x: Any) -> fx.Node | None:
    """The gather from which alone a value is made."""
    while x.target is not collective_nodes.all_gather:
        if len(x.all_input_nodes) != 1:
            return None
        (x,) = x.all_input_nodes
    return x


def overlap(
    edit: Edit,
    starts: tuple[fx.Node, ...],
    ends: tuple[fx.Node, ...],
    chunks: int | None = None,
    dim: int | None = None,
    ring: int | None = None,
    fused: int = 0,
) -> list[fx.Node]:
    """``overlap([ag, ag_1], attention, ring=1)``: gives its output, or the gradients of
    keys and values; anything else is ``overlap.overlap``."""
    form = form_of(ends[0].target) if len(ends) == 1 else None
    if form is not None and ring is not None and not fused:
        return _RingAttention(edit, form, starts, ends[0], chunks, dim, ring).run()
    return chunked.overlap(edit, starts, ends, chunks, dim, ring, fused)


class _RingAttention:
    """An attention, the gathers it reads, and what is between."""

    def __init__(
        self,
        edit: Edit,
        form: AttentionForm,
        gathers: tuple[fx.Node, ...],
        node: fx.Node,
        chunks: int | None,
        dim: int | None,
        ring: int,
    ) -> None:
        self.edit, self.form, self.node, self.gathers = edit, form, node, gathers
        for gather in gathers:
            if gather.target is not collective_nodes.all_gather:
                raise refuse("overlap", gather, "is no gather of keys or values")
        self.axes = collective_nodes.axes_of(gathers[0])
        self._check(chunks, dim, ring)
        self.read: Any = node.args[self.form.keys : self.form.keys + 2]
        paths = chunked.between(gathers, tuple(dict.fromkeys(self.read)))
        self.path = [n for n in paths if n not in gathers]
        self.size = self.read[0].meta["val"].shape[_SEQUENCE]

    def _check(self, chunks: int | None, dim: int | None, ring: int) -> None:
        node, mesh = self.node, self.edit.mesh
        if any(collective_nodes.axes_of(g) != self.axes for g in self.gathers):
            raise refuse("overlap", node, "reads gathers along several sets of axes")
        if mesh.count(self.axes) < 2:
            raise refuse("overlap", node, "has no neighbour to pass a part to")
        if chunks is not None or dim is not None or ring != 1:
            why = "goes in parts of the ranks, in one direction"
            raise refuse("overlap", node, why, fix="leave out chunks and dim, ring=1")
        causal, queries = self.form.causal, node.args[self.form.keys - 1]
        if causal is not None and len(node.args) > causal and node.args[causal]:
            raise refuse("overlap", node, "counts places from its first key")
        backward = self.form.backward
        lse = node.args[self.form.keys + 3] if backward else node
        value = lse.meta["val"] if backward else lse.meta["val"][1]
        if value.shape != queries.meta["val"].shape[:3]:
            raise refuse("overlap", node, "has no log-sum-exp for each query")

    def run(self) -> list[fx.Node]:
        """Rewrite the graph; what the line gives."""
        users = list(self.node.users)
        if any(user.target is not operator.getitem for user in users):
            raise refuse("overlap", self.node, "gives a tuple that is read whole")
        if self.form.backward:
            made, given, gone = self._backward()
        else:
            made, gone = self._forward(), []
            given = [made[0]]
        for user in users:
            if user.args[1] in made:
                user.replace_all_uses_with(made[user.args[1]])
        self.edit.erase([*users, *gone])
        arrange(self.edit.graph)
        return given

    def _ring(self) -> Ring:
        of = Ring.far_first if self.form.backward else Ring.near_first
        return of(self.edit.mesh, self.axes, _SEQUENCE, 1)

    def _on_part(
        self, build: Builder, ring: Ring, i: int, parts: Sequence[fx.Node]
    ) -> fx.Node:
        """The attention on the i-th part of keys and values."""
        sliced = {
            gather: SlicePart(part, int(gather.args[1]))
            for gather, part in zip(self.gathers, parts, strict=True)
        }
        known = {gather: (part.node, part.dim) for gather, part in sliced.items()}
        known |= chunked.on_part(self.edit, self.path, sliced, ring, i)
        args = list(self.node.args)
        for position, whole in enumerate(self.read, self.form.keys):
            if known.get(whole, (whole, None))[1] != _SEQUENCE:
                raise refuse("overlap", self.node, "reads no parts of the sequence")
            args[position] = known[whole][0]
        if self.form.ahead is not None:
            ahead, size = args[self.form.ahead], self.size // ring.chunks
            first = ring.parts[i] * size
            start = build.offset(self.axes, size, first, around=self.size)
            args[self.form.ahead] = build.compute(operator.sub, ahead, start)
        kwargs = dict(self.node.kwargs)
        place: Any = self.form.bias
        held: Any = kwargs if isinstance(place, str) else args
        if place in kwargs or isinstance(place, int) and place < len(args):
            held[place] = self._bias(build, ring, i, held[place])
        return build.call(self.node.target, *args, **kwargs)

    def _bias(self, build: Builder, ring: Ring, i: int, bias: Any) -> Any:
        """What of a bias is for the i-th part of the keys."""
        if bias is None or bias.meta["val"].shape[-1] != self.size:
            return bias
        return ring.cut(build, bias, bias.meta["val"].dim() - 1, i)

    def _forward(self) -> dict[int, fx.Node]:
        """Output and log-sum-exp over all keys, and what else is read."""
        whole = self.node.meta["val"]
        with self.edit.before(self.node) as build:
            ring, own = self._ring(), [gather.args[0] for gather in self.gathers]
            made = [
                self._on_part(build, ring, i, parts)
                for i, parts in enumerate(_near_first(build, ring, own))
            ]
            out, lse = (build.call(operator.getitem, made[0], k) for k in range(2))
            for node in made[1:]:
                seen, weight = (build.call(operator.getitem, node, k) for k in range(2))
                out, lse = _merged(build, (out, lse), (seen, weight))
            out = laid_out(build, _cast(build, out, whole[0].dtype), whole[0])
            more = {
                i: build.call(operator.getitem, made[0], i)
                for i, value in enumerate(whole[2:], 2)
                if isinstance(value, torch.Tensor)
            }
        return {0: out, 1: lse, **more}

    def _backward(self) -> tuple[dict[int, fx.Node], list[fx.Node], list[fx.Node]]:
        """Gradients of queries; those of keys and values, in the place of what reduced
        them; and that."""
        ends = [self._reduced(i) for i in (1, 2)]
        scatters = [end.scatter for end in ends]
        whole = self.node.meta["val"]
        with self.edit.before(max([self.node, *scatters])) as build:
            ring, own = self._ring(), [gather.args[0] for gather in self.gathers]
            coming, sums = (
                _far_first(build, ring, own, self.node.args[0]),
                list[fx.Node](),
            )
            shapes = [list(scatter.meta["val"].shape) for scatter in scatters]

            def summands(i: int) -> fx.Node:
                made = self._on_part(build, ring, i, next(coming))
                item = build.call(operator.getitem, made, 0)
                item = _cast(build, item, _exact(whole[0].dtype))
                sums.append(
                    build.call(aten.add.Tensor, sums.pop(), item) if sums else item
                )
                parts = [
                    self._part(build, made, k, end, ring, i)
                    for k, end in enumerate(ends, 1)
                ]
                return _packed(build, parts)

            kept = ring.reduced(build, summands, "sum")
            total = laid_out(build, _cast(build, sums[0], whole[0].dtype), whole[0])
            given = _unpacked(build, kept, shapes)
        for scatter, part in zip(scatters, given, strict=True):
            scatter.replace_all_uses_with(part)
        return {0: total}, given, scatters

    def _reduced(self, i: int) -> _Reduced:
        """What becomes of the gradient of the keys (1) or values (2)."""
        items = [user for user in self.node.users if user.args[1] == i]
        at, path = items[0] if len(items) == 1 else self.node, list[fx.Node]()
        while len(at.users) == 1:
            (reader,) = at.users
            if reader.target is collective_nodes.reduce_scatter:
                if reader.args[2:] == ("sum", self.axes):
                    return _Reduced(items[0], path, reader)
                break
            path.append(reader)
            at = reader
        why = "makes gradients of keys that no reduce-scatter takes"
        raise refuse("overlap", self.node, why)

    def _part(
        self, build: Builder, made: fx.Node, k: int, end: _Reduced, ring: Ring, i: int
    ) -> fx.Node:
        """The summand that a reduce-scatter would take of the i-th part."""
        item = build.call(operator.getitem, made, k)
        known = {end.item: SlicePart(item, _SEQUENCE)}
        out = chunked.on_part(self.edit, end.path, known, ring, i)
        node, dim = out[end.path[-1]] if end.path else (item, _SEQUENCE)
        if dim != end.scatter.args[1]:
            raise refuse("overlap", end.scatter, "takes no parts of the sequence")
        return node


@dataclass(frozen=True)
class _Reduced:
    """A gradient of an attention, what is done to it, and the reduce-scatter then."""

    item: fx.Node
    path: list[fx.Node]
    scatter: fx.Node


def _merged(
    build: Builder,
    one: tuple[fx.Node, fx.Node],
    other: tuple[fx.Node, fx.Node],
) -> tuple[fx.Node, fx.Node]:
    """Output and log-sum-exp over two sets of keys, in the precision of the latter."""
    total = build.call(aten.logaddexp.default, one[1], other[1])
    first, second = (weighted(build, out, lse, total) for out, lse in (one, other))
    return build.call(aten.add.Tensor, first, second), total


def _exact(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _cast(build: Builder, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    if x.meta["val"].dtype == dtype:
        return x
    return build.call(aten._to_copy.default, x, dtype=dtype)


def _packed(build: Builder, parts: Sequence[fx.Node]) -> fx.Node:
    """Parts as one message."""
    flat = [build.call(aten.reshape.default, part, [-1]) for part in parts]
    return build.call(aten.cat.default, flat)


def _unpacked(
    build: Builder, message: fx.Node, shapes: Sequence[Sequence[int]]
) -> list[fx.Node]:
    """Inverse of ``_packed``."""
    out, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        part = build.call(aten.slice.Tensor, message, 0, start, end)
        out.append(build.call(aten.view.default, part, list(shape)))
        start = end
    return out


def _near_first(
    build: Builder, ring: Ring, own: Sequence[fx.Node]
) -> Iterator[list[fx.Node]]:
    """Parts of all ranks, from a rank's own on; the next is under way when one is given
    out."""
    shapes = [list(x.meta["val"].shape) for x in own]
    message = _packed(build, own)
    for i in range(ring.chunks):
        last = i == ring.chunks - 1
        coming = message if last else ring.passed(build, message, 1)
        yield _unpacked(build, message, shapes) if i else list(own)
        message = coming


def _far_first(
    build: Builder, ring: Ring, own: Sequence[fx.Node], grad: fx.Node
) -> Iterator[list[fx.Node]]:
    """Parts of all ranks, a rank's own at last. A message holds nothing of the gradient
    but reads it: the forward's messages, which say the same, would else be kept."""
    shapes = [list(x.meta["val"].shape) for x in own]
    nothing = build.call(aten.slice.Tensor, grad, 0, 0, 0)
    message = ring.passed(build, _packed(build, [*own, nothing]), 1)
    for i in range(ring.chunks - 1):
        last = i == ring.chunks - 2
        coming = message if last else ring.passed(build, message, 1)
        yield _unpacked(build, message, shapes)
        message = coming
    yield list(own)
