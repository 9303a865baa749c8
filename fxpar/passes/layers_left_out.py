"""Layers of a graph of Dynamo that may be left out, where only the first of a row say
anything new.

In: a graph as Dynamo traced it. Out: of each row of layers that are alike, node for
node, and hand values on, which of them may go: all but the first two. What reads the
last reads the second then. The shorter graph computes something else, and is never run;
but what is known of values, by rules that look at nothing but the ops before them, is
known of those left out if both layers that stay leave the same (``carried``). Left out
are no layers that read what others do not, but for inputs of which nothing is to be
known (``fixed``), nor such that write to what others read.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import fx

from fxpar._torch.dynamo import example_of
from fxpar._torch.objects import version_of
from fxpar._torch.segment_kinds import SegmentKind
from fxpar.passes.repeated_segments import repeated_segments

# Layers of a row that stay, and a row is so long at least.
STAY, LEAST = 2, 4


@dataclass(frozen=True)
class LayersLeftOut:
    """Layers that may be left out."""

    # A node of a layer that goes -> the one of the last layer that stays.
    instead: dict[fx.Node, fx.Node] = field(default_factory=dict)
    # What the first layer of a row leaves, and the second.
    carried: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)

    def leave_out(self, twins: dict[fx.Node, fx.Node]) -> None:
        """Take the layers out of a copy of the graph, in place. ``twins``: the nodes
        of the copy, by those of the graph."""
        layers = {twins[node] for node in self.instead}
        for node, other in self.instead.items():
            twins[node].replace_all_uses_with(
                twins[other], lambda user: user not in layers
            )
        for node in reversed(self.instead):
            twins[node].graph.erase_node(twins[node])
        for node, other in self.instead.items():
            twins[node] = twins[other]


def layers_left_out(gm: fx.GraphModule, fixed: Set[fx.Node]) -> LayersLeftOut:
    """Layers of all rows of a graph that may be left out. ``fixed``: inputs that a
    layer may have for itself."""
    out = LayersLeftOut()
    for kind in repeated_segments(gm):
        if len(kind.segments) < LEAST or not _hands_on(kind, fixed):
            continue
        first, last, *others = kind.segments
        for nodes in others:
            out.instead.update(zip(nodes, last, strict=True))
        out.carried.extend((first[i], last[i]) for i in kind.results)
    return out


def _hands_on(kind: SegmentKind, fixed: Set[fx.Node]) -> bool:
    """Whether layers read what the one before leaves, and otherwise all the same, or
    something fixed; and only the last is read elsewhere."""
    segments = kind.segments
    for nodes, behind in pairwise(segments):
        inside = {*nodes, *behind}
        if any(not inside.issuperset(nodes[i].users) for i in kind.results):
            return False
    if any(numbers != kind.numbers[0] for numbers in kind.numbers):
        return False
    at = [{nodes[i]: i for i in kind.results} for nodes in segments]
    tensors = ([node for node, _ in each] for each in kind.operands)
    for reads in zip(*tensors, strict=True):
        handed = {before.get(x) for before, x in zip(at, reads[1:], strict=False)}
        if len(handed) == 1 and handed != {None}:
            continue
        same = len(set(reads)) == 1 or fixed >= {*reads}
        if not same or not all(map(_is_unwritten, reads)):
            return False
    return True


def _is_unwritten(node: fx.Node) -> bool:
    """Whether nothing in the graph writes to a tensor."""
    value = example_of(node)
    is_known = isinstance(value, torch.Tensor) and not value.is_inference()
    return is_known and version_of(value) == 0
