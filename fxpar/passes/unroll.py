"""Scans of a backward, step by step: Inductor (2.13) lowers them to loops that give
wrong gradients, so what it compiles has their steps one after the other.

In: a bound graph. Out: the same graph, changed in place, of equal values on every rank.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import PlanError
from fxpar.passes.builder import Builder
from fxpar.passes.graph_bodies import bodies_of, body_of, new_body
from fxpar.passes.launches import depending_on_tangents
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import user_line

aten = torch.ops.aten

MOST = 20_000  # nodes that steps may add


def unroll_scans(graph: fx.Graph, mesh: Mesh, fake_mode: Any) -> None:
    """Put the steps of scans that are of a backward in their places.

    Raises PlanError if that were too many nodes."""
    build, late = Builder(graph, fake_mode, mesh), depending_on_tangents(graph)
    for node in list(graph.nodes):
        if _torch.aot.higher_order_name(node.target) != "higher_order::scan":
            continue
        if node not in late and not node.meta.get("autograd_backward"):
            continue
        with graph.inserting_before(node), build.at(node):
            results = _steps(build, node)
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
    graph.lint()


def _steps(build: Builder, node: fx.Node) -> list[fx.Node]:
    """The results of a scan."""
    (body,) = bodies_of(node)
    _, init, xs, others = node.args
    count = int(xs[0].meta["val"].shape[0])
    if count * len(body.graph.nodes) > MOST:
        raise PlanError(
            f"the backward of a scan of {count} steps would be {MOST} nodes and more",
            where=user_line(node),
            fix='compile with options={"codegen": "eager"}: Inductor gives wrong '
            "gradients of scans that are not unrolled",
        )
    carried: list[Any] = list(init)
    each: list[list[fx.Node]] = []
    for i in range(count):
        row = [build.call(aten.select.int, x, 0, i) for x in xs]
        made = _inlined(build, body, [*carried, *row, *others], node.name)
        carried = made[: len(init)]
        each.append(made[len(init) :])
    stacked = [
        build.call(
            aten.cat.default, [build.call(aten.unsqueeze.default, y, 0) for y in rows]
        )
        for rows in zip(*each, strict=True)
    ]
    return [*carried, *stacked]


def _inlined(
    build: Builder, body: fx.GraphModule, inputs: list[Any], name: str
) -> list[Any]:
    """The results of a body, its nodes appended; ``name``: of the call."""
    given, done = iter(inputs), dict[fx.Node, Any]()
    for node in body.graph.nodes:
        if node.op == "placeholder":
            done[node] = next(given)
        elif node.op == "output":
            return [done[x] for x in node.args[0]]
        elif (inner := body_of(node)) is not None:
            done[node] = new_body(build, node, inner, name)
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), done.__getitem__)
            done[node] = build.call(node.target, *args, **kwargs)
    raise AssertionError("a body has no output")
