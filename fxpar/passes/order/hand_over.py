"""Gives each result of a forward or a backward memory of its own, and hands gradients
of parameters over as soon as they are computed.

In: a forward or a backward by itself, and which of its results are gradients of
parameters. Out: the same graph with copies of results that would share memory, and with
calls of ``fxpar::hand_over``, each after the last of a few gradients, which give them
to ``runtime.ranks.mean_gradients``. Never: the values change; gradients that are not
taken there go through autograd as usual. The memory of one that is taken is free from
then on if nothing else reads it: a backward returns all gradients at its end, and would
hold them beside those that are reduced.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpar._torch.objects import define_op
from fxpar._torch.symbols import hint_numel
from fxpar.graph import custom_ops

aten = torch.ops.aten

_KEPT = torch.ops.fxpar.kept.default

# Bytes that are handed over at once: at first few, so that the reduction begins early;
# then so many that a call pays, but few enough to be in a cache when they are copied.
FIRST, CHUNK = 1 << 18, 1 << 21

# Declared to write to its operands, so that compilers do not move it.
# For each gradient, ``inputs`` has the position of its parameter among the arguments,
# ``holders`` how many tensors of the graph share its memory; 0: others may read it.
define_op(
    "fxpar::hand_over(Tensor(a!)[] gradients, int[] inputs, int[] holders) -> ()",
    lambda *_: None,
)


def memories(results: Sequence[Any]) -> dict[int, Hashable]:
    """Return a key of the memory that each result shows, of those that are tensors, by
    position."""
    return {
        i: _memory_of(result)
        for i, result in enumerate(results)
        if isinstance(result, fx.Node)
        and isinstance(result.meta.get("val"), torch.Tensor)
    }


def separate_results(
    graph: fx.Graph, own: Mapping[int, Hashable] | None = None
) -> None:
    """Copy each result that shows the memory of an earlier one, in place. ``own``: keys
    of results, by position, of which those with one key may share memory; others are
    left as they are. None: no two results may.

    The partitioner computes equal values once. Users write to results in place, and
    autograd takes each gradient for a ``.grad``: both tensors would then change."""
    output = graph.output_node()
    results, first = list(output.args[0]), dict[Hashable, Hashable]()
    for i, memory in memories(results).items():
        if own is not None and i not in own:
            continue
        result, key = results[i], i if own is None else own[i]
        if first.setdefault(memory, key) != key:
            custom_ops.register_lowerings()
            with graph.inserting_before(output):
                results[i] = graph.call_function(_KEPT, (result,))
            results[i].meta = dict(result.meta)
    output.args = (type(output.args[0])(results),)


def _memory_of(node: fx.Node) -> Hashable:
    """Return a key of the memory that a value shows."""
    if not _is_view(node):
        return node
    base = node.all_input_nodes[0]
    values = [x.meta.get("val") for x in (base, node)]
    are_tensors = all(isinstance(x, torch.Tensor) for x in values)
    if are_tensors and len({*map(hint_numel, values)}) == 1:
        return _memory_of(base)
    return node.target, _memory_of(base), str(node.args[1:])


def hand_over(graph: fx.Graph, inputs: Mapping[int, int]) -> None:
    """Add calls that hand gradients over, in place. ``inputs``: position of a result of
    ``graph`` -> position of the program's argument that it is the gradient of."""
    results = graph.output_node().args[0]
    input_of: dict[fx.Node, int | None] = {}
    for i, result in enumerate(results):
        if isinstance(result, fx.Node) and _is_computed_here(result):
            input_of[result] = inputs.get(i)
    gradients = [node for node in graph.nodes if input_of.get(node) is not None]
    holders = {gradient: _holders(gradient) for gradient in gradients}
    chunk: list[fx.Node] = []
    size, limit = 0, FIRST
    for gradient in gradients:
        chunk.append(gradient)
        size += gradient.meta["val"].nbytes
        if size < limit and gradient is not gradients[-1]:
            continue
        with graph.inserting_after(gradient):
            positions = [input_of[gradient] for gradient in chunk]
            args = list(chunk), positions, [holders[gradient] for gradient in chunk]
            call = graph.call_function(torch.ops.fxpar.hand_over.default, args)
            call.meta["val"] = None
        chunk, size, limit = [], 0, CHUNK


def _holders(gradient: fx.Node) -> int:
    """Return how many values share the memory of a gradient, itself and those that it
    is a view of; 0 if something else than the graph's results reads one of them, or a
    value that compilers may put in its place, as they do with the operand of a copy."""
    count, node, reader = 1, gradient, gradient.graph.output_node()
    while node.op == "call_function" and set(node.users) <= {reader}:
        if node.target in _WRITES:
            return 0
        if _is_view(node):
            count += 1
        elif not _may_be_operand(node):
            return count
        node, reader = node.all_input_nodes[0], node
    return 0


# Of two operands, of which a compiler may return the second.
_WRITES = {aten.copy.default, aten.slice_scatter.default}


def _may_be_operand(node: fx.Node) -> bool:
    """Return whether an op may be left out and its one operand read instead."""
    if len(node.all_input_nodes) != 1:
        return False
    value, operand = node.meta["val"], node.all_input_nodes[0].meta.get("val")
    if not isinstance(operand, torch.Tensor):
        return True
    return value.numel() == operand.numel() and value.dtype == operand.dtype


def _is_computed_here(node: fx.Node) -> bool:
    """Return whether a value is neither an input of the graph nor a view of one, which
    an op that is declared to write would write to."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node.op == "call_function"


def _is_view(node: fx.Node) -> bool:
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    return getattr(node.target, "is_view", node.target is operator.getitem)
