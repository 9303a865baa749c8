"""Turns writes to inputs into results while a graph is planned and scheduled, and back.

In: a graph with ``copy_(input, new)`` where the program writes to an input, as batch
norms do to buffers and optimizers to parameters. Planning, verbs and stages see values
only, so ``lift`` makes ``new`` one more result. Out: ``put`` makes it a write again,
after all else, where code generation can let the op that computes the value write in
place. A graph may return the written input, as a static cache does its length.
``keep_read`` protects values read from an input before it is written; ``drop_kept``
removes its marks from a forward. Never: any other node changes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxpar import _torch
from fxpar._torch.objects import define_op
from fxpar.graph.custom_ops import register_lowerings
from fxpar.sharding.cost.op import is_view
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import PHASE, ancestors, depending_on_tangents

WRITE = torch.ops.aten.copy_.default
# Declared to write to its operands, so that partitioners compute them in the forward.
define_op("fxpar::kept_for_backward(Tensor(a!)[] values) -> ()", lambda *_: None)
_SAVED = CheckpointPolicy.MUST_SAVE
_KEPT_FOR_BACKWARD = torch.ops.fxpar.kept_for_backward.default


@dataclass(frozen=True)
class Write:
    """Is a write to an input, while it is a result."""

    # Position of the input among those of the graph.
    target: int
    # ``meta`` of the node that writes to it.
    meta: dict[str, Any]
    # Positions of the graph's own results that are the written input.
    returned: tuple[int, ...] = ()


def lift(graph: fx.Graph) -> tuple[Write, ...]:
    """Remove writes from a graph, in place; their values become results, after its own.
    A write whose input is read later stays."""
    output = graph.output_node()
    inputs = graph.find_nodes(op="placeholder")
    position = {node: i for i, node in enumerate(inputs)}
    writes: list[Write] = []
    values: list[Any] = []
    results = _results(output)
    for node in graph.find_nodes(op="call_function", target=WRITE):
        target, value = node.args[:2]
        last = target in position and set(node.users) <= {output}
        if last and isinstance(value, fx.Node) and not _is_read_after(target, node):
            returned = tuple(i for i, x in enumerate(results) if x is node)
            writes.append(Write(position[target], dict(node.meta), returned))
            values.append(value)
            node.replace_all_uses_with(value)
            graph.erase_node(node)
    if writes:
        several = isinstance(output.args[0], (list, tuple))
        kind = type(output.args[0]) if several else tuple
        output.args = (kind((*_results(output), *values)),)
        output.meta = output.meta | {"fxpar_single": not several}
        if "desc" in output.meta:
            descs = [inputs[write.target].meta["desc"] for write in writes]
            written = map(_torch.aot.written_input, descs)
            output.meta["desc"] = [*output.meta["desc"], *written]
    return tuple(writes)


def put(graph: fx.Graph, writes: Sequence[Write], phase: str | None = None) -> None:
    """Undo ``lift``, on a graph with the same inputs. ``phase``: the phase of a
    training step that all writes get."""
    output = graph.output_node()
    inputs = graph.find_nodes(op="placeholder")
    results = _results(output)
    own_results, values = results[: -len(writes)], results[-len(writes) :]
    with graph.inserting_before(output):
        for write, value in zip(writes, values, strict=True):
            target = inputs[write.target]
            if value is target:
                continue
            node = graph.call_function(WRITE, (target, value))
            node.meta = write.meta | {"val": target.meta["val"]}
            if phase is not None:
                node.meta["custom"] = value.meta.get("custom", {}) | {PHASE: phase}
            for i in write.returned:
                if own_results[i] is value:
                    own_results[i] = node
    single = output.meta.pop("fxpar_single", False)
    output.args = (own_results[0] if single else type(output.args[0])(own_results),)
    if "desc" in output.meta:
        output.meta["desc"] = output.meta["desc"][: len(own_results)]
    graph.lint()


def keep_read(graph: fx.Graph, written: Collection[int] = ()) -> None:
    """Mark values computed from inputs that the graph writes to as saved, in place, so
    that the write does not change them. ``written``: positions of inputs written after
    the graph ran.

    In a joint graph the backward would read the input after it was written: Inductor
    (torch 2.13) treats a copy as the value it copies, so copies become ops it does not
    know; and the partitioner may recompute values that read the input, so these are
    saved. Those that the backward alone needs would be computed there: the forward gets
    an op that reads them.
    """
    inputs = graph.find_nodes(op="placeholder")
    overwritten = {inputs[i] for i in written}
    overwritten |= {
        n.args[0] for n in graph.find_nodes(op="call_function", target=WRITE)
    }
    pending = [node for node in inputs if node in overwritten]
    if not pending:
        return
    late, saved = depending_on_tangents(graph), list[fx.Node]()
    while pending:
        node = pending.pop()
        for user in list(node.users):
            value = user.meta.get("val")
            if is_view(user):
                pending.append(user)
            if is_view(user) or user in late or user.target in ("output", WRITE):
                continue
            if user.meta.setdefault("recompute", _SAVED) is _SAVED:
                saved.append(user)
            own = node.meta["val"]
            copies = op_facts_of(user.target).copies
            if copies and (value.shape, value.dtype) == (own.shape, own.dtype):
                register_lowerings()
                with graph.inserting_before(user):
                    copy = graph.call_function(torch.ops.fxpar.kept.default, (node,))
                copy.meta = dict(user.meta) | {"val": own}
                user.replace_input_with(node, copy)
    output = graph.output_node()
    writes = graph.find_nodes(op="call_function", target=WRITE)
    forward = ancestors({*writes, *output.all_input_nodes} - late)
    if late and (unclaimed := [node for node in saved if node not in forward]):
        with graph.inserting_before(next(iter(writes), output)):
            graph.call_function(_KEPT_FOR_BACKWARD, (unclaimed,)).meta["val"] = None
    graph.lint()


def drop_kept(graph: fx.Graph) -> None:
    """Remove from a forward, in place, what makes it compute values that the backward
    alone needs: it returns them."""
    for node in graph.find_nodes(op="call_function", target=_KEPT_FOR_BACKWARD):
        graph.erase_node(node)


def _results(output: fx.Node) -> list[Any]:
    """Return the results of a graph, as a list."""
    results: Any = output.args[0]
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _is_read_after(value: fx.Node, write: fx.Node) -> bool:
    """Return whether a node after a write reads what it writes to, or a view of it.
    Returning the input itself is no read: the value is the one written to it."""
    return any(
        (user is not write and user.op != "output" and write < user)
        or (is_view(user) and (_is_result(user) or _is_read_after(user, write)))
        for user in value.users
    )


def _is_result(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)
