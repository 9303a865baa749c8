"""Writes to inputs as results while a step is planned, and as writes again after.

In an inference graph AOTAutograd leaves ``copy_(input, new)`` at its end. The planner
sees a new value best as a result that must lie as the input does; so ``lift_writes``
makes it one, and ``put_writes`` puts the copies into the bound graph, where code
generation lets the op that computes a value write it in place. ``keep_copies`` is for
copies of what is written. Nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.passes.bucket_collectives import PHASE
from fxpar.sharding.cost.op import is_view
from fxpar.sharding.rules.op_facts import op_facts_of

_WRITE = torch.ops.aten.copy_.default


def lift_writes(graph: fx.Graph) -> list[int]:
    """Make what is written to inputs results after the graph's own, in place: positions
    of the inputs, in this order. A graph that hands a written input back gives the new
    value."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    position = {node: i for i, node in enumerate(inputs)}
    output = graph.output_node()
    results = list(output.args[0])
    descs = list(output.meta.get("desc") or [None] * len(results))
    written = []
    for node in list(graph.nodes):
        if node.target is not _WRITE or node.args[0] not in position:
            continue
        target, value = node.args
        written.append(position[target])
        results.append(value)
        descs.append(_torch.aot.written_input(target.meta["desc"]))
        node.replace_all_uses_with(value)
        results = [value if x is node else x for x in results]
        graph.erase_node(node)
    output.args = (type(output.args[0])(results),)
    output.meta["desc"] = descs
    return written


def put_writes(graph: fx.Graph, written: list[int]) -> None:
    """The inverse, on a graph with the same inputs."""
    if not written:
        return
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = graph.output_node()
    results = list(output.args[0])
    own_results, values = results[: -len(written)], results[-len(written) :]
    with graph.inserting_before(output):
        for i, value in zip(written, values, strict=True):
            if value is inputs[i]:
                continue
            copy = graph.call_function(_WRITE, (inputs[i], value))
            custom = value.meta.get("custom", {}) | {PHASE: "update"}
            copy.meta = {"val": inputs[i].meta["val"], "custom": custom}
    output.args = (type(output.args[0])(own_results),)
    if "desc" in output.meta:
        output.meta["desc"] = output.meta["desc"][: len(own_results)]
    graph.lint()


def keep_copies(graph: fx.Graph, written: Collection[int] = ()) -> None:
    """Make copies of inputs that the graph writes stay copies, in place. ``written``:
    positions of inputs that are written after it ran.

    Inductor (torch 2.13) takes a copy for the value it copies; in a joint graph the
    backward then reads the input after it was written.
    """
    inputs = graph.find_nodes(op="placeholder")
    late = {inputs[i] for i in written}
    late |= {n.args[0] for n in graph.find_nodes(op="call_function", target=_WRITE)}
    pending = [node for node in inputs if node in late]
    while pending:
        node = pending.pop()
        for user in list(node.users):
            value = user.meta.get("val")
            if is_view(user):
                pending.append(user)
            elif op_facts_of(user.target).copies and _is_like(value, node.meta["val"]):
                with graph.inserting_before(user):
                    copy = graph.call_function(torch.ops.fxpar.kept.default, (node,))
                copy.meta = dict(user.meta) | {"val": node.meta["val"]}
                user.replace_input_with(node, copy)
    graph.lint()


def _is_like(x: Any, y: Any) -> bool:
    return (x.shape, x.dtype) == (y.shape, y.dtype)
