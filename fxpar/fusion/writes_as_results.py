"""Writes to inputs at the end of a graph, as results while a schedule is applied.

AOTAutograd leaves ``copy_(input, new)`` for a buffer that a model updates, as batch
norms do. Verbs see values alone; so ``lift`` makes ``new`` one more result of the
graph, read whole as others are, and ``put`` makes it a write again, behind all else. A
graph may hand back what it wrote to, as a static cache does its length. A write whose
input is read later stays, for ``kinds.admit`` to refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.sharding.cost.op import is_view

_WRITE = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class Write:
    """A write to an input, while it is a result."""

    # Name of the input.
    target: str
    # Of the node that writes to it.
    meta: dict[str, Any]
    # Which of the graph's own results are the input, once written.
    returned: tuple[int, ...] = ()


def lift(graph: fx.Graph) -> tuple[Write, ...]:
    """Take writes off a graph, in place; their values are results, behind its own."""
    output = graph.output_node()
    writes: list[Write] = []
    values: list[Any] = []
    results = _results(output)
    for node in graph.find_nodes(op="call_function", target=_WRITE):
        target, value = node.args[:2]
        last = target.op == "placeholder" and set(node.users) <= {output}
        if last and isinstance(value, fx.Node) and not _read_behind(target, node):
            returned = tuple(i for i, x in enumerate(results) if x is node)
            writes.append(Write(target.name, dict(node.meta), returned))
            values.append(value)
            node.replace_all_uses_with(value)
            graph.erase_node(node)
    if writes:
        several = isinstance(output.args[0], (list, tuple))
        output.args = ((*_results(output), *values),)
        output.meta = output.meta | {"fxpar_single": not several}
    return tuple(writes)


def put(graph: fx.Graph, writes: Sequence[Write]) -> None:
    """The inverse, on a graph of the same inputs."""
    if not writes:
        return
    output = graph.output_node()
    results: Any = output.args[0]
    own_results, values = list(results[: -len(writes)]), results[-len(writes) :]
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    with graph.inserting_before(output):
        for write, value in zip(writes, values, strict=True):
            node = graph.call_function(_WRITE, (inputs[write.target], value))
            node.meta = dict(write.meta)
            for i in write.returned:
                own_results[i] = node
    single = output.meta.pop("fxpar_single")
    output.args = (own_results[0] if single else tuple(own_results),)
    graph.lint()


def _results(output: fx.Node) -> list[Any]:
    """What a graph returns, as a list."""
    results: Any = output.args[0]
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _read_behind(value: fx.Node, write: fx.Node) -> bool:
    """Whether something behind a write reads what it writes to, or a view of it. That
    the input itself is handed back is no reading: it is what was written to it."""
    return any(
        (user is not write and user.op != "output" and write < user)
        or (is_view(user) and (_is_result(user) or _read_behind(user, write)))
        for user in value.users
    )


def _is_result(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)
