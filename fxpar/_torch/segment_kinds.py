"""Decides whether segments of a graph that repeat may be traced once, by what they do.

A kind is looked at once, as its first segment runs before anything is traced. It may
give new tensors; where autograd records nothing and ops are made functional, also write
to its operands, and give views that could as well be tensors of their own. Where it
does more (changes a mode, gives other views), all its segments are traced. In: segments
and their operands. Out: kinds, and conditions of a segment. Never: traces a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar._torch import traced_values as values_of
from fxpar._torch.objects import memory_of


@dataclass
class SegmentKind:
    """Holds segments of a graph that are equal, node for node."""

    # The nodes of each, in order.
    segments: list[list[fx.Node]]
    # The tensors that each reads from outside: a node, and the position in the segment
    # of the node that reads it, or None for all others.
    operands: list[list[tuple[fx.Node, int | None]]]
    # The numbers that each reads from outside, in this order.
    numbers: list[list[fx.Node]]
    # Positions of nodes whose values are read outside, in one segment at least.
    results: list[int]
    # Which of the results keep their elements until they are last read, and are no
    # results of the graph: for these it makes no difference that they share memory.
    lasting: list[bool]
    # Whether the first segment ran before anything is traced.
    is_checked: bool = False
    # Whether every segment has to be traced, found out then.
    refused: bool = False
    # Operands it writes to, found out then.
    written: tuple[int, ...] = ()


# Finds what repeats in a graph that is about to be traced.
FindKinds = Callable[[fx.GraphModule], list[SegmentKind]]


def modes() -> tuple[Any, ...]:
    """Return what the meaning of ops depends on in addition to their operands; first
    whether autograd records."""
    autocast = (
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


@dataclass(frozen=True)
class Conditions:
    """Holds what the nodes traced for a segment depend on in addition to those of the
    graph."""

    # As ``modes`` when it runs.
    modes: tuple[Any, ...]
    # The numbers that it reads.
    numbers: tuple[int, ...]
    # For each operand the first one that has the same memory.
    sharing: tuple[int, ...]


def conditions_of(values: Sequence[Any], numbers: Sequence[Any]) -> Conditions | None:
    """Return the conditions of a segment with these operands; None if it has to be
    traced."""
    parts = list(map(values_of.part_of, values))
    if not all(map(values_of.is_value, parts)):
        return None
    tracer = values_of.tracer()
    if tracer and None in [values_of.node_of(x, tracer) for x in parts]:
        return None
    fakes = [values_of.fake_of(x) for x in parts]
    if not all(map(values_of.is_plain, fakes)):
        return None
    if not all(type(x) is int for x in numbers):
        return None
    memories = list(map(memory_of, fakes))
    sharing = tuple(memories.index(memory) for memory in memories)
    return Conditions(modes(), tuple(numbers), sharing)


def look_at(
    kind: SegmentKind,
    values: Sequence[Any],
    run: Callable[[], Sequence[Any]],
    conditions: Conditions,
) -> Sequence[Any]:
    """Run the first segment before anything is traced, and note what it does; return
    its results."""
    parts = list(map(values_of.part_of, values))

    def state() -> Any:
        return values_of.tokens(), modes(), list(map(values_of.form_of, parts))

    before, counts = state(), list(map(values_of.writes_to, parts))
    outs = run()
    writes = zip(counts, map(values_of.writes_to, parts), strict=True)
    kind.written = tuple(i for i, (n, now) in enumerate(writes) if n != now)
    kind.is_checked = True
    kind.refused = (
        state() != before
        or not _has_own_results(outs, parts, kind.lasting)
        or not can_be_copied(kind, values, conditions)
    )
    return outs


def can_be_copied(
    kind: SegmentKind, values: Sequence[Any], conditions: Conditions
) -> bool:
    """Return whether each operand that a segment writes to has memory that no other
    operand has, and neither autograd nor a view sees it."""
    if not kind.written:
        return True
    if torch.is_inference_mode_enabled() or any(x.requires_grad for x in values):
        return False
    for i in kind.written:
        x = values[i]
        if not values_of.is_functional(x) or x._is_view():
            return False
        if conditions.sharing.count(conditions.sharing[i]) > 1:
            return False
    return True


def _has_own_results(
    outs: Sequence[Any], values: Sequence[Any], lasting: Sequence[bool]
) -> bool:
    """Return whether results are tensors of their own, or could be."""
    if not all(map(values_of.is_value, outs)):
        return False
    if any(x.requires_grad for x in (*outs, *values)):
        lasting = [False] * len(outs)
    separate = [x for x, may in zip(outs, lasting, strict=True) if not may]
    own = [memory_of(values_of.fake_of(x)) for x in separate]
    others = {memory_of(values_of.fake_of(x)) for x in values}
    is_view = any(x._is_view() for x in separate)
    return not is_view and len(set(own)) == len(own) and not others.intersection(own)
