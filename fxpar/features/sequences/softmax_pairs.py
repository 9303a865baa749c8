"""Replaces the all-reduces of a softmax along a split dim by one all-gather.

In: the local graph of one rank, communication as steps. Out: the same graph, changed in
place. A softmax, a logsumexp or a cross entropy along a split dim takes the largest
score of all ranks, then the sum of the exponentials of the scores less that, then the
score of a label, which one rank has: three all-reduces of a number for each row, one
after the other. Instead each rank subtracts its own largest score, and the ranks gather
all these numbers: sums are weighted by the difference of the largest scores. Never: a
softmax changes for which the all-reduces are predicted to be faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.features.sequences.merge_attention import finite_or_zero
from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.sharding.cost import collectives
from fxpar.sharding.cost.op import nbytes_of
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import ancestors

aten = torch.ops.aten

# At most as many nodes compute the shift from the largest score.
_FEW = 8


@dataclass(frozen=True)
class SplitSoftmax:
    """Holds the nodes of ``exp(scores - shift)``, summed along a split dim."""

    # This rank's part.
    scores: fx.Node
    # All-reduce of the largest score.
    largest: fx.Node
    # The subtrahend: the largest score, or 0 for infinity.
    shift: fx.Node
    # All-reduce of the sum.
    total: fx.Node
    # All-reduce of the label's normalized score; None: none, or not of this form.
    label: fx.Node | None

    @property
    def reductions(self) -> list[fx.Node]:
        all_reduces = (self.largest, self.total, self.label)
        return [node for node in all_reduces if node is not None]

    @property
    def axes(self) -> tuple[str, ...]:
        return collective_nodes.axes_of(self.total)

    def is_faster(self, mesh: Mesh) -> bool:
        """Return whether one gather takes less time than the all-reduces; ``mesh`` has
        links."""
        sizes = [nbytes_of(node.meta["val"]) for node in self.reductions]
        reduce = collectives.along("all_reduce", mesh, self.axes)
        gather = collectives.along("all_gather", mesh, self.axes)
        return gather.seconds(sum(sizes)) < sum(map(reduce.seconds, sizes))


def pair_reductions(graph: fx.Graph, state: JointState) -> None:
    """Replace the all-reduces that normalize a softmax along a split dim by one
    exchange, where that pays."""
    hardware, mesh = state.request.hardware, state.decided.mesh
    if hardware is None or mesh.size == 1 or not state.decided.is_even:
        return
    links = hardware.at_speed(mesh.slowest).on(mesh)
    reduced = graph.find_nodes(op="call_function", target=collective_nodes.all_reduce)
    softmaxes = map(_softmax_of, reduced)
    paying = [softmax for softmax in softmaxes if softmax and softmax.is_faster(links)]
    for softmax in paying:
        _exchange(state.build, softmax)
    if paying:
        graph.eliminate_dead_code()


# Matching


def _softmax_of(total: fx.Node) -> SplitSoftmax | None:
    summed = _reduced(total, "sum", aten.sum.dim_IntList)
    if summed is None or summed.args[0].target is not aten.exp.default:
        return None
    shifted: Any = summed.args[0].args[0]
    if shifted.target is not aten.sub.Tensor or shifted.kwargs:
        return None
    scores, shift = shifted.args
    largest = _derived_from(shift) if isinstance(shift, fx.Node) else None
    maximum = _reduced(largest, "max", aten.amax.default)
    if maximum is None or largest is None or maximum.args[0] is not scores:
        return None
    same_axes = collective_nodes.axes_of(largest) == collective_nodes.axes_of(total)
    values = [node.meta["val"] for node in (scores, largest, total)]
    if (
        not same_axes
        or maximum.args[1] != summed.args[1]
        or maximum.args[2:] != (True,)
    ):
        return None
    if len({value.dtype for value in values}) > 1 or not values[0].is_floating_point():
        return None
    label = _label_of(shifted, total, largest)
    return SplitSoftmax(scores, largest, shift, total, label)


def _reduced(node: fx.Node | None, op: str, target: Any) -> fx.Node | None:
    """Return the operand of an all-reduce by ``op`` if it is a call of ``target`` that
    nothing else reads, else None."""
    if node is None or node.target is not collective_nodes.all_reduce:
        return None
    source: Any = node.args[0]
    fits = source.target is target and node.args[1] == op and len(source.users) == 1
    return source if fits else None


def _derived_from(shift: fx.Node) -> fx.Node | None:
    """Return the all-reduce from which, with constants, a shift is computed; None if it
    is not the only source."""
    seen, waiting, reductions = set[fx.Node](), [shift], list[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target is collective_nodes.all_reduce:
            reductions.append(node)
            continue
        if node.op != "call_function" or len(seen) > _FEW:
            return None
        waiting += node.all_input_nodes
    return reductions[0] if len(reductions) == 1 else None


def _label_of(shifted: fx.Node, total: fx.Node, largest: fx.Node) -> fx.Node | None:
    """Return the all-reduce of a label's normalized score, for which other ranks have
    0; None if there is none that can be moved."""
    logs = [(x,) for x in total.users if x.target is aten.log.default]
    normalized = [
        user
        for user in shifted.users
        if user.target is aten.sub.Tensor and user.args[1:] in logs and not user.kwargs
    ]
    reads = [n for x in normalized for n in x.users if n.target is aten.gather.default]
    for read in reads:
        ends = [n for n in read.users if n.target is aten.where.self]
        if len(read.users) != 1 or not ends or ends[0].args[1] is not read:
            continue
        for node in ends[0].users:
            same = _reduced(node, "sum", aten.where.self) is ends[0]
            if same and collective_nodes.axes_of(node) == collective_nodes.axes_of(
                total
            ):
                value = node.meta["val"]
                like = value.shape == largest.meta["val"].shape
                return node if like and largest not in _sources(node) else None
    return None


def _places(label: fx.Node) -> tuple[fx.Node, fx.Node, Any]:
    """Return (whether this rank has the label, its index, the value elsewhere)."""
    own, read, fill = label.args[0].args
    return own, read.args[2], fill


def _sources(label: fx.Node) -> set[fx.Node]:
    """Return the nodes that a label's index depends on."""
    return ancestors(x for x in _places(label) if isinstance(x, fx.Node))


# Rewriting


def _exchange(build: Builder, softmax: SplitSoftmax) -> None:
    """Replace the all-reduces by one gather of a row of numbers from each rank."""
    largest, shift, total = softmax.largest, softmax.shift, softmax.total
    _, dims, *keep = total.args[0].args
    maximum: Any = largest.args[0]
    if softmax.label is not None:
        label_nodes = [n for n in _sources(softmax.label) if n > largest]
        for node in sorted(label_nodes):
            largest.prepend(node)
    with build.before(largest):
        finite = finite_or_zero(build, maximum)
        exponentials = build.call(aten.sub.Tensor, softmax.scores, finite)
        exponentials = build.call(aten.exp.default, exponentials)
        own = [maximum, build.call(aten.sum.dim_IntList, exponentials, dims, *keep)]
        if softmax.label is not None:
            is_own, place, fill = _places(softmax.label)
            dim = softmax.label.args[0].args[1].args[1]
            score = build.call(aten.gather.default, softmax.scores, dim, place)
            own.append(build.call(aten.where.self, is_own, score, fill))
        numbers = _gathered(build, own, softmax.axes)
        new_largest = build.call(aten.amax.default, numbers[0], [0])
        new_largest = build.call(
            aten.reshape.default, new_largest, list(largest.meta["val"].shape)
        )
    largest.replace_all_uses_with(new_largest)
    shift = new_largest if shift is largest else shift
    with build.before(total):
        flat = build.call(aten.reshape.default, shift, [1, -1])
        weights = build.call(aten.sub.Tensor, finite_or_zero(build, numbers[0]), flat)
        weights = build.call(aten.exp.default, weights)
        sums = build.call(aten.mul.Tensor, numbers[1], weights)
        sums = build.call(aten.sum.dim_IntList, sums, [0])
        sums = build.call(aten.reshape.default, sums, list(total.meta["val"].shape))
    total.replace_all_uses_with(sums)
    if softmax.label is not None:
        with build.before(softmax.label):
            score = build.call(aten.sum.dim_IntList, numbers[2], [0])
            shape = list(softmax.label.meta["val"].shape)
            score = build.call(aten.reshape.default, score, shape)
            score = build.call(aten.sub.Tensor, score, shift)
            logarithm = build.call(aten.log.default, sums)
            score = build.call(aten.sub.Tensor, score, logarithm)
        softmax.label.replace_all_uses_with(score)


def _gathered(
    build: Builder, own: Sequence[fx.Node], axes: tuple[str, ...]
) -> list[fx.Node]:
    """Return each value of all ranks, ``[ranks, elements]``, from one message."""
    flat = [build.call(aten.reshape.default, x, [1, -1]) for x in own]
    message = build.call(aten.cat.default, flat, 1)
    gather = collective_nodes.all_gather
    message = collective_nodes.step(build, gather, message, 0, axes)
    values, start = [], 0
    for x in flat:
        end = start + x.meta["val"].shape[1]
        values.append(build.call(aten.slice.Tensor, message, 1, start, end))
        start = end
    return values
