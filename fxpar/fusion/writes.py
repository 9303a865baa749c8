"""Writes to inputs at the end of a graph, as results while a schedule is applied.

AOTAutograd leaves ``copy_(input, new)`` for a buffer that a model updates, as batch
norms do. Verbs see values alone; so ``lift`` makes ``new`` one more result of the
graph, read whole as others are, and ``put`` makes it a write again, behind all else. A
write whose input is read later stays, for ``kinds.admit`` to refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.passes.arithmetic import is_view

_WRITE = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class Write:
    """``target``: name of the input; ``meta``: of the node that writes to it."""

    target: str
    meta: dict[str, Any]


def lift(graph: fx.Graph) -> tuple[Write, ...]:
    """Take writes off a graph, in place; their values are results, behind its own."""
    output = graph.output_node()
    found: list[Write] = []
    values: list[Any] = []
    for node in graph.find_nodes(op="call_function", target=_WRITE):
        target, value = node.args[:2]
        last = target.op == "placeholder" and not node.users
        if last and isinstance(value, fx.Node) and not _read_behind(target, node):
            found.append(Write(target.name, dict(node.meta)))
            values.append(value)
            graph.erase_node(node)
    if found:
        results = output.args[0]
        several = isinstance(results, (list, tuple))
        output.args = ((*(results if several else (results,)), *values),)
        output.meta = output.meta | {"fxpar_single": not several}
    return tuple(found)


def put(graph: fx.Graph, writes: Sequence[Write]) -> None:
    """The inverse, on a graph of the same inputs."""
    if not writes:
        return
    output = graph.output_node()
    results: Any = output.args[0]
    kept, values = results[: -len(writes)], results[-len(writes) :]
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    with graph.inserting_before(output):
        for write, value in zip(writes, values, strict=True):
            node = graph.call_function(_WRITE, (inputs[write.target], value))
            node.meta = dict(write.meta)
    single = output.meta.pop("fxpar_single")
    output.args = (kept[0] if single else kept,)
    graph.lint()


def _read_behind(value: fx.Node, write: fx.Node) -> bool:
    """Whether something behind a write reads what it writes to, or a view of it."""
    return any(
        user is not write
        and (user.op == "output" or write < user)
        or (is_view(user) and _read_behind(user, write))
        for user in value.users
    )
