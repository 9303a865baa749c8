"""Splits a convolution's backward into two calls, and joins them again.

In: a backward by itself and an ``aten.convolution_backward`` node of it, which computes
the gradients of the input, the weight and the bias at once. Out: the same values, those
of weight and bias from a call of their own (``part``), so that they can overlap with a
collective of the input's gradient (``delay``), or from the one call again (``join``).
Never: a value changes; libraries have a kernel for each gradient either way.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

BACKWARD = torch.ops.aten.convolution_backward.default


def part_nearest(node: fx.Node, since: Sequence[fx.Node]) -> fx.Node | None:
    """Split the last convolution's backward among ``since`` whose gradient of the input
    is needed by ``node``; return the new call for the others. None if there is none or
    ``node`` needs another of its gradients."""
    if all(call.target is not BACKWARD for call in since):
        return None
    sources = _sources(node, since)
    for call in reversed(since):
        if call in sources and call.target is BACKWARD:
            if any(user.target is not operator.getitem for user in call.users):
                return None  # a part of a graph may return the whole tuple
            others = [user for user in call.users if user.args[1]]
            return part(call) if others and sources.isdisjoint(others) else None
    return None


def part(call: fx.Node) -> fx.Node:
    """Add a call for the gradients of weight and bias after ``call``, and return it;
    ``call`` then computes the input's gradient only."""
    mask = _mask(call)
    with call.graph.inserting_after(call):
        half = call.graph.call_function(BACKWARD, call.args)
    half.meta = dict(call.meta)
    _ask_for(half, [False, *mask[1:]], call.meta["val"])
    for user in list(call.users):
        if user.args[1]:
            user.replace_input_with(call, half)
    _ask_for(call, [mask[0], False, False], call.meta["val"])
    return half


def join(call: fx.Node, half: fx.Node) -> None:
    """Undo ``part``."""
    mask = [_mask(call)[0], *_mask(half)[1:]]
    values = (call.meta["val"][0], *half.meta["val"][1:])
    half.replace_all_uses_with(call)
    call.graph.erase_node(half)
    _ask_for(call, mask, values)


def computed_of(half: fx.Node, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return ``half`` and the nodes, given in order, that are computed from it only."""
    alone = {half}
    for node in nodes:
        read = node.all_input_nodes
        if read and alone.issuperset(read):
            alone.add(node)
    return alone


def _mask(call: fx.Node) -> list[bool]:
    mask: Any = call.args[-1]
    return list(mask)


def _ask_for(call: fx.Node, mask: Sequence[bool], values: Sequence[Any]) -> None:
    """Make a call compute the gradients in ``mask`` only; ``values``: fake values."""
    call.args = (*call.args[:-1], list(mask))
    call.meta["val"] = tuple(
        value if is_asked else None
        for value, is_asked in zip(values, mask, strict=True)
    )


def _sources(node: fx.Node, since: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes among ``since`` that ``node`` is computed from."""
    near, stack = set(since), [node]
    sources: set[fx.Node] = set()
    while stack:
        for read in stack.pop().all_input_nodes:
            if read in near and read not in sources:
                sources.add(read)
                stack.append(read)
    return sources
