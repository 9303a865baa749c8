"""Decomposes ops of a bound graph for which Inductor has no kernel.

In: the graph one rank runs. Out: the same graph, changed in place, computing the same
values. AOTAutograd traces a program with Inductor's decompositions; ops that passes add
later were never traced, and Inductor refuses an op that it decomposes. It also refuses
flex_attention on CPU that returns weights (``written_out_flex``). Never: an op that
Inductor takes is touched, or a graph that is run op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar import _torch
from fxpar._torch.nodes_by_target import calls_where
from fxpar.graph.builder import Builder
from fxpar.graph.graph_bodies import body_of
from fxpar.passes.attention import written_out_flex


def decompose(graph: fx.Graph, fake_mode: Any) -> None:
    """Decompose the ops of a graph that Inductor has no kernel for, in place."""
    build = Builder(graph, fake_mode)
    table = _torch.inductor.decompositions()
    decomposed = calls_where(graph, _torch.inductor.is_decomposed)
    written_out = calls_where(graph, written_out_flex.may_be_written_out)
    written_out = [n for n in written_out if written_out_flex.is_written_out(n)]
    for node in decomposed:
        _decompose_node(build, node, node.target, table)
    for node in written_out:
        _decompose_node(build, node, written_out_flex.attend, table)
    if decomposed or written_out:
        graph.lint()


def _decompose_node(
    build: Builder,
    node: fx.Node,
    function: Callable[..., Any],
    table: Mapping[Any, Any],
) -> None:
    """Replace a node by the decomposed trace of a function that computes the same."""
    bodies = {n: n.meta["val"] for n in node.all_input_nodes if body_of(n) is not None}
    operands = [n for n in node.all_input_nodes if n not in bodies]

    def call(*values: Any) -> Any:
        value_of = bodies | dict(zip(operands, values, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of.__getitem__)
        return function(*args, **kwargs)

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
    """Replace each use of a node, or of its items if it has several results, by the
    copy of the result, and erase it."""
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(copies[result])
    else:
        for item in list(node.users):
            item.replace_all_uses_with(copies[result[item.args[1]]])
            item.graph.erase_node(item)
    node.graph.erase_node(node)
