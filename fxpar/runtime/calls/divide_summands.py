"""Summands of a result, divided apart through the linear ops of a Dynamo graph.

In: a Dynamo graph, and how values in it grow with the batch. Out: the same graph with
copies of the linear ops that lead to a result, on summands divided by the number of
parts as often as they grow. What else reads the summands reads what it read before.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar._torch.dynamo import example_of
from fxpar.sharding.growth_powers import FIXED, Growth


def may_grow(x: Any) -> bool:
    """Whether a result is a tensor that the graph computes."""
    if not isinstance(x, fx.Node) or x.op == "placeholder":
        return False
    value = example_of(x)
    return isinstance(value, torch.Tensor) and value.dtype != torch.bool


# Ops of a Dynamo graph that are linear: in all tensors at once, or in one of two.
# Those that write give way to their likes that do not.


def _each(names: str, *functions: Any) -> dict[Any, Any]:
    """Methods by name, and functions, as they are."""
    return {target: target for target in (*names.split(), *functions)}


_TOGETHER: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    "add_": "add",
    "sub_": "sub",
    **_each("add sub neg sum mean view reshape squeeze unsqueeze flatten expand"),
    **_each("to float double half bfloat16 clone contiguous type_as detach"),
    **_each("", operator.add, operator.sub, operator.neg, torch.neg, torch.clone),
    **_each("", torch.add, torch.sub, torch.subtract, torch.stack, torch.cat),
    **_each("", torch.sum, torch.mean, torch.squeeze, torch.unsqueeze),
    **_each("", torch.reshape, torch.flatten),
}

_ONE_OF_TWO: dict[Any, Any] = {
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    "mul_": "mul",
    "div_": "div",
    **_each("mul div", operator.mul, operator.truediv),
    **_each("", torch.mul, torch.div, torch.multiply, torch.divide),
}

_PRODUCTS = frozenset(
    {operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_"}
)

# Their results may show what is written to their operand later.
_VIEWS = frozenset(
    _each("view reshape squeeze unsqueeze flatten expand to float double half bfloat16")
    | _each("contiguous type_as detach")
    | _each("", torch.squeeze, torch.unsqueeze, torch.reshape, torch.flatten)
)


def _is_linear(node: fx.Node) -> bool:
    return node.target in _TOGETHER or node.target in _ONE_OF_TWO


def linear_ways(results: Sequence[Any]) -> list[fx.Node]:
    """Tensors that results are reached from by linear ops alone."""
    seen: dict[fx.Node, None] = {}
    pending = [x for x in results if may_grow(x)]
    while pending:
        node = pending.pop()
        if node in seen or not isinstance(example_of(node), torch.Tensor):
            continue
        seen[node] = None
        if _is_linear(node):
            pending += node.all_input_nodes
    return list(seen)


def divided(
    graph: fx.Graph,
    result: fx.Node,
    grown: Growth,
    growths: dict[fx.Node, Growth],
    parts: int,
) -> fx.Node | None:
    """A result, what grows in it divided; None if that cannot be."""
    if grown.power is not None and not grown.mixed:
        return _times(graph, result, parts**-grown.power, graph.output_node())
    return _DividedCopies(graph, growths, parts).value(result)


def _times(graph: fx.Graph, x: fx.Node, factor: float, before: fx.Node) -> fx.Node:
    with graph.inserting_before(before):
        product = graph.call_function(operator.mul, (x, factor))
    product.meta = {k: v for k, v in x.meta.items() if k in _KEPT}
    return product


_KEPT = ("example_value", "stack_trace", "nn_module_stack", "custom")


@dataclass
class _DividedCopies:
    """Copies of the linear ops that lead to a result, on summands divided apart."""

    # Copies are put before their originals.
    graph: fx.Graph
    # Of the graph's nodes; what has none is fixed.
    growths: dict[fx.Node, Growth]
    # So many the global batch has, one on each rank.
    parts: int

    def value(self, node: fx.Node) -> fx.Node | None:
        """What takes the place of a node; None if nothing can."""
        if _shows_writes(node):
            return None  # how it grows was asked before them
        grown = self.growths.get(node, FIXED)
        if grown.is_fixed:
            return node
        if grown.power is None:
            return None
        if not grown.mixed:
            factor = self.parts**-grown.power
            return _times(self.graph, node, factor, node.next)
        terms = [x for x in node.all_input_nodes if x in self.growths]
        if node.target in _ONE_OF_TWO:
            first = node.args[0] if node.target not in _PRODUCTS else None
            terms = [x for x in terms if not self.growths[x].is_fixed]
            if len(terms) != 1 or first not in (None, terms[0]):
                return None
            same_power = self.growths[terms[0]].power == grown.power
        elif node.target in _TOGETHER:
            same_power = max(self.growths[x].power or 0.0 for x in terms) == grown.power
        else:
            return None
        return self._copy(node, terms) if same_power else None

    def _copy(self, node: fx.Node, terms: Sequence[fx.Node]) -> fx.Node | None:
        divided_terms = {x: self.value(x) for x in terms}
        if any(x is None for x in divided_terms.values()):
            return None
        target = _TOGETHER.get(node.target) or _ONE_OF_TWO[node.target]
        swap = fx.node.map_arg(
            (node.args, dict(node.kwargs)), lambda x: divided_terms.get(x) or x
        )
        with self.graph.inserting_before(node):
            copy = self.graph.create_node(node.op, target, *swap)
        copy.meta = {k: v for k, v in node.meta.items() if k in _KEPT}
        return copy


# Writes


def _writes(node: fx.Node) -> bool:
    """Whether a node changes its first argument, and returns it."""
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    return node.target in (operator.iadd, operator.isub, operator.imul) or (
        node.target is operator.itruediv
    )


def name_written(graph: fx.Graph) -> None:
    """Let what reads a tensor after a write to it read what the write returns, which is
    the same tensor."""
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        if not _writes(node) or not isinstance(first, fx.Node):
            continue
        if isinstance(example_of(first), torch.Tensor):
            later = set(_after(node))
            first.replace_all_uses_with(node, lambda user, later=later: user in later)


def _after(node: fx.Node) -> Iterator[fx.Node]:
    node = node.next
    while node.op != "root":
        yield node
        node = node.next


def _shows_writes(node: fx.Node) -> bool:
    """Whether the value of a node may have changed since it was made, other than by
    what took its name."""
    operands = node.all_input_nodes
    written = any(
        x.target is operator.setitem or x.kwargs.get("out") or x.kwargs.get("inplace")
        for x in node.users
    )
    viewed = node.target in _VIEWS and any(
        _writes(user) and user.args[0] in (x, node)
        for x in operands
        for user in x.users
    )
    return written or viewed
