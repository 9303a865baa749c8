"""Copies traced nodes, with fake values on memory of their own.

In: nodes as they were traced, and the nodes in place of their operands. Out: copies in
a graph. Never: writes to the nodes that it copies.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar._torch.objects import memory_of, tensors_of
from fxpar._torch.traced_values import fake_like, fake_on, is_plain


@dataclass(frozen=True)
class TracedNode:
    """Is a node as it was traced."""

    node: fx.Node  # the node that others read; it may have been erased since
    op: str  # as in the node
    target: Any  # as in the node
    args: Any  # as in the node: it names nodes as traced
    kwargs: Any  # as ``args``, by name
    meta: dict[str, Any]  # as in the node, without ``from_node``

    @staticmethod
    def of(node: fx.Node) -> TracedNode:
        meta = dict(node.meta)
        meta.pop("from_node", None)
        return TracedNode(node, node.op, node.target, node.args, node.kwargs, meta)

    def copy(self, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        """Add a copy of the node, which reads what ``copies`` has in place of its
        operands; then enter it in ``copies``. It shares its value with the node."""

        def mapped(node: fx.Node) -> fx.Node:
            return copies.get(node, node)

        args, kwargs = fx.node.map_arg((self.args, self.kwargs), mapped)
        name = None
        if isinstance(self.target, torch._ops.OpOverload):
            name = graph._target_to_str(self.target.overloadpacket.__name__)
        copy = graph.create_node(self.op, self.target, args, kwargs, name)
        copies[self.node] = copy
        copy.meta = dict(self.meta)
        return copy


def last_node(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


def traced_since(last: fx.Node, graph: fx.Graph) -> list[TracedNode]:
    """Return the nodes after ``last``, in order."""
    traced = []
    for node in reversed(graph.nodes):
        if node is last:
            break
        traced.append(TracedNode.of(node))
    return traced[::-1]


@contextlib.contextmanager
def taken_out(graph: fx.Graph) -> Iterator[None]:
    """Remove the nodes that are added inside from the graph at the end, and free their
    names."""
    last, names = last_node(graph), graph._graph_namespace
    before = names._used_names.copy(), names._base_count.copy()
    yield
    for traced in reversed(traced_since(last, graph)):
        graph.erase_node(traced.node)
        names._obj_to_name.pop(traced.node, None)
    names._used_names, names._base_count = before


class Memories:
    """Makes fake tensors like others; copies share memory where the originals do."""

    def __init__(self, stand_ins: Mapping[fx.Node, fx.Node]) -> None:
        """Start with memory that exists. ``stand_ins``: node with a value -> the node
        whose memory is in its place."""
        self._storages: dict[int, Any] = {}
        for node, other in stand_ins.items():
            pairs = zip(tensors_of(node), tensors_of(other), strict=False)
            for x, y in pairs:
                self._storages.setdefault(memory_of(x), y.untyped_storage())
        self._nodes = list(stand_ins)  # their memory lives, and keeps its number

    def like(self, value: Any) -> Any:
        """Return a value like a node's, on the memory in its place."""
        if isinstance(value, torch.Tensor):
            number = memory_of(value)
            if number not in self._storages:
                fake, own = fake_like(value)
                self._storages[number] = own
                return fake
            return fake_on(self._storages[number], value)
        if isinstance(value, (list, tuple)):
            return type(value)(self.like(x) for x in value)
        return value


def can_be_copied(nodes: Sequence[TracedNode]) -> bool:
    """Return whether values are plain tensors, of fixed sizes, and no graphs are
    called."""
    for traced in nodes:
        value = traced.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else [value]
        if not all(map(is_plain, values)):
            return False
        if isinstance(traced.target, torch._ops.HigherOrderOperator):
            return False
    return True


def new_region() -> int:
    """Return a number for a checkpointed region."""
    from torch._higher_order_ops import wrap

    return next(wrap.uid)


# Metadata of a node that comes from the user's code.
_USERS = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")


def users_texts(nodes: Sequence[fx.Node]) -> list[dict[str, str]]:
    """Return the texts of the user's metadata at each node, by name, and at the nodes
    of bodies."""
    return [
        {name: repr(node.meta[name]) for name in _USERS if name in node.meta}
        for node in _with_bodies(nodes)
    ]


def users_metadata(
    texts: Sequence[dict[str, str]], nodes: Sequence[fx.Node]
) -> dict[str, dict[str, Any]] | None:
    """Return name of metadata -> its text at a node -> its value at the one of
    ``nodes`` in the same place; None if equal texts have different values there.
    ``texts``: of the former, by ``users_texts``."""
    renamed: dict[str, dict[str, Any]] = {name: {} for name in _USERS}
    for of_node, node in zip(texts, _with_bodies(nodes), strict=True):
        for name, text in of_node.items():
            value = node.meta.get(name)
            other = renamed[name].setdefault(text, value)
            if other is not value and repr(other) != repr(value):
                return None
    return renamed


def _with_bodies(nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Yield nodes, and after one that holds a body the nodes of that."""
    for node in nodes:
        yield node
        body = attribute(node) if node.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            yield from _with_bodies(list(body.graph.nodes))


def attribute(node: fx.Node) -> Any:
    """Return the value of a ``get_attr``."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)
