"""Applies verb ``overlap`` to gathers of keys and values and an attention that reads
them.

In: an Edit, the gathers, the attention, and its ``AttentionForm``, which names its
arguments and is read off the op's schema; flex_attention has none, so that its form is
written here. Out: its results, from parts of keys and values.

``overlap([ag, ag_1], attention, ring=1)``: keys and values go from neighbour to
neighbour, and no rank ever holds all of them. A rank attends its queries to each part
while the next one is on its way, and merges the results by log-sum-exp. In a backward
the gradients of keys and values travel as well, in place of the reduce-scatters that
follow, and arrive at their owners in the end. With a causal mask, parts depend on the
rank through ``Builder.offset`` alone; parts that no query sees cost no
arithmetic. Never changes which keys a query sees.

The scheme is that of ring attention (Liu et al., arXiv 2310.01889).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.features.sequences import causal_attention as _ops  # noqa: F401  (registers ops)
from fxpar.features.sequences.merge_attention import (
    RunningAttention,
    aligned,
    of_visible,
)
from fxpar.fusion.node_legality import arrange
from fxpar.fusion.schedule_edit import Edit, refuse
from fxpar.fusion.slice_op import SlicePart
from fxpar.fusion.verbs import overlap as chunked
from fxpar.fusion.verbs.ring import Ring
from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder, joined, split
from fxpar.graph.pipeline_ops import kind_of
from fxpar.passes.lower import restrided
from fxpar.sharding.cost.op import is_contraction
from fxpar.sharding.op_facts import BIASES


@dataclass(frozen=True)
class AttentionForm:
    """Names the arguments of an attention.

    Its first results are the output and a log-sum-exp of each query, or the gradients
    of queries, keys and values.
    """

    # Names of all arguments, in order; those by keyword too.
    names: tuple[str, ...]
    # Whether it gives gradients.
    backward: bool
    # Sets of queries: each has an output and a log-sum-exp, or gradients, of its own.
    sets: int = 1

    @property
    def read(self) -> tuple[str, str, str]:
        """Return the names of queries, keys and values."""
        at = self.names.index("k" if "k" in self.names else "key")
        query, key, value = self.names[at - 1 : at + 2]
        return query, key, value

    def arguments(self, node: fx.Node) -> dict[str, Any]:
        """Return the arguments that a call gives, by name."""
        return dict(zip(self.names, node.args, strict=False)) | node.kwargs


_FLEX = "query key value {} block_mask scale kernel_options score_others mask_others"
_FLEX_BACKWARD = "out logsumexp grad_out grad_logsumexp fw_graph joint_graph"
FLEX = {
    "higher_order::flex_attention": AttentionForm(
        tuple(_FLEX.format("score_mod").split()), backward=False
    ),
    "higher_order::flex_attention_backward": AttentionForm(
        tuple(_FLEX.format(_FLEX_BACKWARD).split()), backward=True
    ),
}


def form_of(target: Any) -> AttentionForm | None:
    """Return the form of an attention on [batch, heads, sequence, features]; None for
    any other op."""
    flex = FLEX.get(_torch.aot.higher_order_name(target))
    if flex is not None:
        return flex
    name, schema = str(target), _torch.objects.schema_of(target)
    if schema is None or not is_contraction(target) or "attention" not in name:
        return None
    names = tuple(argument.name for argument in schema.arguments)
    balanced = "near_ahead" in names
    if "_scaled_dot" not in name and "ahead" not in names and not balanced:
        return None
    return AttentionForm(names, "backward" in name, sets=2 if balanced else 1)


aten = torch.ops.aten
ours = torch.ops.fxpar

# [batch, heads, sequence, features]
SEQUENCE = 2

# A result of an attention: its position, or one within the tuple at a position.
Result = int | tuple[int, int]


class RingAttention:
    """Is an attention, the gathers it reads, and the ops between them."""

    # Says in which order parts travel, and how whole values are cut into them.
    kind = Ring

    def __init__(
        self,
        edit: Edit,
        form: AttentionForm,
        gathers: tuple[fx.Node, ...],
        node: fx.Node,
        ring: int,
        chunks: int | None = None,
        dim: int | None = None,
    ) -> None:
        self.edit, self.form, self.node, self.gathers = edit, form, node, gathers
        for gather in gathers:
            if gather.target is not collective_nodes.all_gather:
                raise refuse("overlap", gather, "is no gather of keys or values")
        self.axes = collective_nodes.axes_of(gathers[0])
        self.arguments = form.arguments(node)
        queries, *read = (self.arguments[name] for name in form.read)
        self.size = read[0].meta["val"].shape[SEQUENCE]
        self._check(queries, chunks, dim, ring)
        masks = (name for name in BIASES if self.arguments.get(name) is not None)
        self.mask = next(masks, None)
        paths = chunked.between(gathers, tuple(dict.fromkeys(read)))
        self.path = [n for n in paths if n not in gathers]

    def _check(
        self, queries: fx.Node, chunks: int | None, dim: int | None, ring: int
    ) -> None:
        node, mesh = self.node, self.edit.mesh
        if any(collective_nodes.axes_of(g) != self.axes for g in self.gathers):
            raise refuse("overlap", node, "reads gathers along several sets of axes")
        self._check_message(self.gathers)
        if mesh.count(self.axes) < 2:
            raise refuse("overlap", node, "has no neighbour to pass a part to")
        if chunks is not None or dim is not None or ring != 1:
            why = "goes in parts of the ranks, in one direction"
            raise refuse("overlap", node, why, fix="leave out chunks and dim, ring=1")
        if self.arguments.get("is_causal"):
            raise refuse("overlap", node, "counts positions from its first key")
        if any(self.arguments.get("grad_input_mask", ())[3:]):
            raise refuse("overlap", node, "makes a gradient of its bias")
        value = node.meta["val"][1]
        if self.form.backward:
            name = "logsumexp" if self.form.sets == 1 else "near_lse"
            value = self.arguments[name].meta["val"]
        if value.shape != queries.meta["val"].shape[:3]:
            raise refuse("overlap", node, "has no log-sum-exp for each query")

    def _check_message(self, collectives: Iterable[fx.Node]) -> None:
        """Raise ScheduleError if what travels together has several types, as where
        keys are gathered as complex numbers and values as real ones."""
        if len({kind_of(collective) for collective in collectives}) > 1:
            raise refuse("overlap", self.node, "would send several types together")

    def run(self) -> list[fx.Node]:
        """Rewrite the graph. Return the nodes that the line gives."""
        items = self._items()
        if self.form.backward:
            results, gives, scatters = self._backward()
        else:
            results, scatters = self._forward(), []
            gives = [results[0]]
        for item, result in items:
            if result in results:
                item.replace_all_uses_with(results[result])
        self.edit.erase([*(item for item, _ in items), *scatters])
        arrange(self.edit.graph)
        return gives

    def _items(self) -> list[tuple[fx.Node, Result]]:
        """Return the readers of the attention's results, each with the result it
        reads."""
        items = list(self.node.users)
        if any(item.target is not operator.getitem for item in items):
            raise refuse("overlap", self.node, "gives a tuple that is read whole")
        return [(item, item.args[1]) for item in items]

    def _ring(self) -> Ring:
        of = self.kind.farthest_first if self.form.backward else self.kind.nearest_first
        return of(self.edit.mesh, self.axes, SEQUENCE, 1)

    def _start(self, build: Builder, ring: Ring, i: int, size: int) -> Any:
        """Return the place at which the i-th part begins of a sequence of this size."""
        rows = size // ring.chunks
        return build.offset(self.axes, rows, ring.parts[i] * rows, around=size)

    def _on_part(
        self, build: Builder, ring: Ring, i: int, parts: Sequence[fx.Node]
    ) -> fx.Node:
        """Append the attention on the i-th part of keys and values."""
        values = self._arguments(ring, i, parts)
        if "ahead" in values:
            start = self._start(build, ring, i, self.size)
            values["ahead"] = build.compute(operator.sub, values["ahead"], start)
        if self.mask is not None:
            values[self.mask] = self._mask_of_part(build, ring, i, values[self.mask])
        args, names = list(values.values()), list(values)
        count = len(self.node.args)
        kwargs = dict(zip(names[count:], args[count:], strict=True))
        return build.call(self.node.target, *args[:count], **kwargs)

    def _arguments(
        self, ring: Ring, i: int, parts: Sequence[fx.Node]
    ) -> dict[str, Any]:
        """Return the arguments of the attention, by name and in their order, with the
        i-th part of keys and values."""
        sliced = {
            gather: SlicePart(part, int(gather.args[1]))
            for gather, part in zip(self.gathers, parts, strict=True)
        }
        slices = {gather: (part.node, part.dim) for gather, part in sliced.items()}
        slices |= chunked.on_part(self.edit, self.path, sliced, ring, i)
        values = dict(self.arguments)
        for name in self.form.read[1:]:
            part, dim = slices.get(values[name], (None, None))
            if dim != SEQUENCE:
                raise refuse("overlap", self.node, "reads no parts of the sequence")
            values[name] = part
        return values

    def _mask_of_part(
        self, build: Builder, ring: Ring, i: int, mask: fx.Node
    ) -> fx.Node:
        """Append the mask of the i-th part of the keys."""
        last = mask.meta["val"].dim() - 1
        if mask.meta["val"].shape[last] == 1:
            return mask
        part = ring.cut(build, mask, last, i)
        return aligned(build, part) if self.mask == "attn_bias" else part

    def _forward(self) -> dict[Result, fx.Node]:
        """Return output and log-sum-exp over all keys, and other results that are
        read."""
        whole = self.node.meta["val"]
        results: dict[Result, fx.Node] = {}
        with self.edit.before(self.node) as build:
            ring, shards = self._ring(), self._shards(build)
            attentions = [
                self._on_part(build, ring, i, parts)
                for i, parts in enumerate(_nearest_first(build, ring, shards))
            ]
            for at in range(0, 2 * self.form.sets, 2):
                parts = [self._weighted(build, node, at) for node in attentions]
                running = RunningAttention(*parts[0])
                for part in parts[1:]:
                    running = running.add(build, *part)
                out, total = running.result(build)
                out = build.cast(out, whole[at].dtype)
                results[at] = restrided(build, out, whole[at])
                results[at + 1] = self._logs(build, total, running)
            read = {result for item, result in self._items() if item.users}
            for i in read - {*results}:
                items = [build.call(operator.getitem, n, i) for n in attentions]
                results[i] = self._further(build, items)
        return results

    def _weighted(
        self, build: Builder, attention: fx.Node, at: int
    ) -> tuple[fx.Node, fx.Node]:
        """Return output and log-sum-exp, results ``at`` and the next one, of an
        attention to one part."""
        out, lse = (build.call(operator.getitem, attention, at + k) for k in range(2))
        if self.mask is None:
            return out, lse
        return out, of_visible(build, lse, self.form.arguments(attention)[self.mask])

    def _logs(
        self, build: Builder, total: fx.Node, running: RunningAttention
    ) -> fx.Node:
        """Return a log-sum-exp over all keys as the op gives it."""
        return total

    def _further(self, build: Builder, items: Sequence[fx.Node]) -> fx.Node:
        """Return a further result, from that of each part."""
        return items[0]

    def _shards(self, build: Builder) -> list[fx.Node]:
        """Return a rank's own keys and values, as they travel."""
        return [gather.args[0] for gather in self.gathers]

    def _home(self, build: Builder, gradient: fx.Node, dim: int) -> fx.Node:
        """Return the gradient of a rank's own keys or values, given that of its
        travelling part."""
        return gradient

    def _summed(
        self, build: Builder, attention: fx.Node
    ) -> dict[Result, tuple[fx.Node, torch.Tensor]]:
        """Return the results of a backward that are sums over all keys: the summand of
        a part, and the whole value."""
        whole = self.node.meta["val"]
        return {
            k: (build.call(operator.getitem, attention, k), whole[k])
            for k in range(self.form.sets)
        }

    def _backward(self) -> tuple[dict[Result, fx.Node], list[fx.Node], list[fx.Node]]:
        """Return the gradients of queries and other sums; those of keys and values, in
        place of their reduce-scatters; and these."""
        sets, whole = range(self.form.sets), dict[Result, torch.Tensor]()
        ends = [self._reduced(len(sets) + i) for i in range(2)]
        scatters = [end.scatter for end in ends]
        self._check_message(scatters)
        with self.edit.before(max([self.node, *scatters])) as build:
            ring, shards = self._ring(), self._shards(build)
            grad = self.arguments.get("grad_out", self.node.args[0])
            coming = _far_first(build, ring, shards, grad)
            sums = dict[Result, fx.Node]()

            def summands(i: int) -> fx.Node:
                attention = self._on_part(build, ring, i, next(coming))
                for k, (item, value) in self._summed(build, attention).items():
                    whole[k] = value
                    exact = torch.promote_types(value.dtype, torch.float32)
                    item = build.cast(item, exact)
                    sums[k] = (
                        build.call(aten.add.Tensor, sums[k], item)
                        if k in sums
                        else item
                    )
                parts = [
                    self._part(build, attention, k, end, ring, i)
                    for k, end in enumerate(ends, len(sets))
                ]
                return joined(build.call, parts)

            message = ring.reduced(build, summands, "sum")
            results = {
                k: restrided(build, build.cast(sums[k], value.dtype), value)
                for k, value in whole.items()
            }
            gradients = [
                self._home(build, part, int(scatter.args[1]))
                for part, scatter in zip(
                    split(build.call, message, scatters), scatters, strict=True
                )
            ]
        for scatter, part in zip(scatters, gradients, strict=True):
            scatter.replace_all_uses_with(part)
        return results, gradients, scatters

    def _reduced(self, i: int) -> _Reduced:
        """Return the path from the gradient of the keys or values, the i-th result, to
        its reduce-scatter."""
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
        self,
        build: Builder,
        attention: fx.Node,
        k: int,
        end: _Reduced,
        ring: Ring,
        i: int,
    ) -> fx.Node:
        """Append the summand of the i-th part for a reduce-scatter."""
        item = build.call(operator.getitem, attention, k)
        slices = {end.item: SlicePart(item, SEQUENCE)}
        results = chunked.on_part(self.edit, end.path, slices, ring, i)
        node, dim = results[end.path[-1]] if end.path else (item, SEQUENCE)
        if dim != end.scatter.args[1]:
            raise refuse("overlap", end.scatter, "takes no parts of the sequence")
        return node


@dataclass(frozen=True)
class _Reduced:
    """Holds a gradient of an attention, the ops on it, and its reduce-scatter."""

    # The gradient, a getitem of the attention.
    item: fx.Node
    # Ops from the gradient to the reduce-scatter, in order.
    path: list[fx.Node]
    # Reduces it over the ranks, and reads the last of ``path``.
    scatter: fx.Node


def _nearest_first(
    build: Builder, ring: Ring, shards: Sequence[fx.Node]
) -> Iterator[list[fx.Node]]:
    """Yield parts of all ranks, from a rank's own on; the next one is in flight when
    one is yielded."""
    message = joined(build.call, shards)
    for i in range(ring.chunks):
        last = i == ring.chunks - 1
        coming = message if last else ring.passed(build, message, 1)
        yield split(build.call, message, shards) if i else list(shards)
        message = coming


def _far_first(
    build: Builder, ring: Ring, shards: Sequence[fx.Node], grad: fx.Node
) -> Iterator[list[fx.Node]]:
    """Yield parts of all ranks, a rank's own at last. The message reads an empty slice
    of the gradient so that it differs from the forward's equal messages, which would
    else be kept until the backward."""
    nothing = build.call(aten.slice.Tensor, grad, 0, 0, 0)
    message = ring.passed(build, joined(build.call, [*shards, nothing]), 1)
    for i in range(ring.chunks - 1):
        last = i == ring.chunks - 2
        coming = message if last else ring.passed(build, message, 1)
        yield split(build.call, message, shards)
        message = coming
    yield list(shards)
