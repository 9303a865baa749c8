"""bound: ops of the graph that Inductor has no kernel for, as the ops it makes of them.

In: the graph one rank runs. Out: the same graph, changed in place, computing the same
values. AOTAutograd traces a program with Inductor's decompositions; what passes add
after it was never traced, and Inductor refuses an op that it decomposes. What it never
does: touch an op that Inductor takes, or a graph that is run op by op.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar import _torch
from fxpar.passes.builder import Builder


def decompose(graph: fx.Graph, fake_mode: Any) -> None:
    """Rewrite a graph in place."""
    build = Builder(graph, fake_mode)
    table = _torch.inductor.decompositions()
    for node in list(graph.nodes):
        if node.op == "call_function" and _torch.inductor.is_decomposed(node.target):
            _decompose_node(build, node, table)
    graph.lint()


def _decompose_node(build: Builder, node: fx.Node, table: Mapping[Any, Any]) -> None:
    operands = node.all_input_nodes

    def call(*values: Any) -> Any:
        value_of = dict(zip(operands, values, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of.__getitem__)
        return node.target(*args, **kwargs)

    with build.fake_mode, torch.no_grad():
        values = [operand.meta["val"] for operand in operands]
        parts = make_fx(call, decomposition_table=dict(table))(*values).graph
    if parts.find_nodes(op="get_attr"):
        return  # a constant that the graph would have to hold
    copies = dict(zip(parts.find_nodes(op="placeholder"), operands, strict=True))
    with build.before(node):
        for part in parts.nodes:
            if part.op == "call_function":
                copies[part] = build.graph.node_copy(part, copies.__getitem__)
                copies[part].meta = {"val": part.meta["val"]}
                build.stamp(copies[part])
    result: Any = parts.output_node().args[0]
    _replace_uses(node, result, copies)


def _replace_uses(
    node: fx.Node, result: Any, copies: Mapping[fx.Node, fx.Node]
) -> None:
    """Let what was made take every use of a node; of several results, of its items."""
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(copies[result])
    else:
        for item in list(node.users):
            item.replace_all_uses_with(copies[result[item.args[1]]])
            item.graph.erase_node(item)
    node.graph.erase_node(node)
