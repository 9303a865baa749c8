"""Computes open (symbolic) sizes by nodes of a graph, or fixes them at their hints.

In: a graph traced with open sizes, which has symbols among its inputs. Out:
``as_nodes`` writes a size that is an expression of them as nodes, after the inputs;
``lift_sizes`` does so for all sizes of a graph, so that none is read from a tensor,
whose shape changes when it becomes local; ``at_hints`` returns the graph at the sizes
with which it was traced, for planning. Never reads a size from a tensor that is not an
input.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.symbols import SYMBOLIC, Inexpressible, expression, is_symbol
from fxpar.sharding.program import OPEN


def symbols_in(graph: fx.Graph) -> dict[Any, fx.Node]:
    """Return the inputs of a graph that are one symbol each, by their expressions."""
    inputs = graph.find_nodes(op="placeholder")
    return {
        expression(node.meta["val"]): node
        for node in inputs
        if is_symbol(node.meta.get("val"))
    }


def is_open(graph: fx.Graph) -> bool:
    """Return whether a graph has symbols among its inputs."""
    return bool(symbols_in(graph))


def as_nodes(graph: fx.Graph, arg: Any) -> Any:
    """Return an argument with its symbolic numbers replaced by nodes that compute them.

    Raises Inexpressible for a size that the graph's inputs do not determine.
    """
    if isinstance(arg, (tuple, list)):
        if not _has_symbols(arg):
            return arg
        return type(arg)(as_nodes(graph, x) for x in arg)
    if isinstance(arg, dict):
        return {key: as_nodes(graph, x) for key, x in arg.items()}
    if not isinstance(arg, SYMBOLIC):
        return arg
    if arg.node.expr.is_number:
        return int(arg)
    if not isinstance(arg, torch.SymInt):
        raise Inexpressible(str(arg))
    return _node_of(graph, arg)


def _has_symbols(arg: Any) -> bool:
    if isinstance(arg, (tuple, list)):
        return any(map(_has_symbols, arg))
    return isinstance(arg, SYMBOLIC)


def _node_of(graph: fx.Graph, size: torch.SymInt) -> fx.Node:
    node_of: dict[Any, fx.Node] = {}
    last = next(iter(graph.nodes))
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" and not is_arithmetic(node):
            break
        last = node
        if isinstance(value, torch.SymInt):
            node_of.setdefault(expression(value), node)
    end = [last]
    inputs = graph.find_nodes(op="placeholder")

    def add(target: Any, *args: Any) -> fx.Node:
        with graph.inserting_after(end[0]):
            node = graph.call_function(target, args)
        values = fx.node.map_arg(args, lambda n: n.meta["val"])
        node.meta["val"] = target(*values)
        end[0] = node
        return node

    for symbol in size.node.expr.free_symbols:
        if symbol in node_of or size.node.expr in node_of:
            continue
        dim_of_input = next(
            (
                (x, d)
                for x in inputs
                if isinstance(x.meta.get("val"), torch.Tensor)
                for d, n in enumerate(x.meta["val"].shape)
                if expression(n) == symbol
            ),
            None,
        )
        if dim_of_input is None:
            raise Inexpressible(f"no input has the size {symbol}")
        node_of[symbol] = add(torch.ops.aten.sym_size.int, *dim_of_input)
    return _torch.symbols.computed(size, node_of, add)


# Operations that compute sizes.
_ARITHMETIC = {
    operator.add,
    operator.mul,
    operator.floordiv,
    operator.mod,
    torch.sym_max,
    torch.sym_min,
}


def is_arithmetic(node: fx.Node) -> bool:
    """Return whether a node computes a size by arithmetic."""
    return node.target in _ARITHMETIC and isinstance(node.meta.get("val"), torch.SymInt)


def lift_sizes(graph: fx.Graph) -> None:
    """Replace nodes that compute sizes, or read them from tensors, by nodes right after
    the inputs."""
    for node in list(graph.nodes):
        if node.op == "placeholder" or not isinstance(
            node.meta.get("val"), torch.SymInt
        ):
            continue
        value = as_nodes(graph, node.meta["val"])
        if value is node:
            continue
        put_in_place(node, value)
    graph.lint()


def put_in_place(node: fx.Node, value: Any) -> None:
    """Replace every use of ``node`` by a node or a number, and erase it."""
    for user in list(node.users):
        user.args, user.kwargs = (
            fx.node.map_arg(arg, lambda n: value if n is node else n)
            for arg in (user.args, user.kwargs)
        )
    node.graph.erase_node(node)


def at_hints(graph: fx.Graph, fake_mode: Any) -> fx.Graph:
    """Return a copy of a graph with every size at the number seen in tracing; its
    nodes' ``meta[OPEN]`` are the nodes they copy. It has no nodes that compute sizes.
    """
    hinted, copies = fx.Graph(graph.owning_module), dict[fx.Node, Any]()
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, SYMBOLIC):
            copies[node] = _torch.symbols.hint_of(value)
            continue
        copy = copies[node] = hinted.node_copy(node, copies.__getitem__)
        copy.meta.pop("tensor_meta", None)
        if "val" in node.meta:
            copy.meta["val"] = _torch.fake.tree_map(
                lambda x: _torch.symbols.hinted(x, fake_mode), value
            )
        copy.meta[OPEN] = node
    return hinted
