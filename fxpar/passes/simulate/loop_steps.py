"""Fixes a number of steps for loops where it depends on data, and unrolls scans.

For its backward a ``while_loop`` keeps the results of each step, stacked: a tensor of a
size that is unknown before it has run. ``count_steps`` uses STEPS as that number, so
that all shapes are known while a graph is planned and rewritten. Values with that dim
are neither split nor moved, so that no op has the number as an argument, and a graph
that is run op by op works for any number. ``uncount_steps`` restores the unknown number
for Inductor, which writes sizes into its code.

Inductor (2.13) lowers scans of a backward to loops that give wrong gradients, so
``unroll_scans`` appends their steps one after the other.

In: a traced graph, or a bound one to be compiled. Out: the same graph, changed in
place. Never: a value changes when the graph runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.objects import calls_where
from fxpar.errors import PlanError
from fxpar.graph.builder import Builder, copy_of, replace_items, value_of
from fxpar.graph.graph_bodies import bodies_of, body_of, module_of, new_body
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_table import tensors_of
from fxpar.sharding.program import depending_on_tangents, user_line

aten = torch.ops.aten
STEPS = 8

# Ops that read the steps of a loop without having their number as an argument.
_READERS = {
    operator.getitem,
    aten.slice.Tensor,
    aten.cat.default,
    aten.select.int,
}

_LOOP = "higher_order::while_loop"


def count_steps(graph: fx.Graph, fake_mode: Any) -> None:
    """Give the steps of loops a known number, in place; ops on them are to run whole
    (``meta["fxpar_whole"]``). Other data-dependent sizes stay unknown.

    Raises PlanError if an op that might depend on the number of steps reads them."""
    evaluated: set[fx.Node] = set()
    counted: set[fx.Node] = set()
    for node in graph.nodes:
        body = body_of(node)
        if body is not None:
            count_steps(body.graph, fake_mode)
            continue
        name = _torch.aot.higher_order_name(node.target)
        steps = not counted.isdisjoint(node.all_input_nodes)
        if name == _torch.loops.STACKED:
            node.target, node.args = _torch.loops.counted_loop(), (*node.args, STEPS)
            node.meta["fxpar_whole"] = True
        elif steps and name == _LOOP:
            node.meta["fxpar_whole"] = True
            for body in _bodies(node):
                _evaluate(body.graph, _operand_values(node), fake_mode, _any_step)
            continue
        elif steps and node.target in _READERS:
            node.meta["fxpar_whole"] = True
        elif steps and node.op == "call_function":
            raise PlanError(
                f"{node.target} reads all steps of a loop, whose number is not known",
                where=user_line(node),
                fix="give the loop a number of steps (torch's scan), or keep it out of "
                "the compiled function",
            )
        elif steps or evaluated.isdisjoint(node.all_input_nodes):
            _forget_offset(node)
            continue
        elif not _has_open_offset(node):
            continue
        if _has_unknown_size(node):
            counted.add(node)
        evaluated.add(node)
        node.meta["val"] = _value(node, fake_mode)
        node.meta.pop("unbacked_bindings", None)


def uncount_steps(graph: fx.Graph, fake_mode: Any) -> None:
    """Make the number of steps of loops unknown again, in place. ``fake_mode``: one
    that makes symbols for data-dependent sizes and values."""
    evaluated: set[fx.Node] = set()
    name_of = _torch.aot.higher_order_name
    if not calls_where(graph, lambda x: name_of(x) == _torch.loops.COUNTED):
        return
    for node in graph.nodes:
        name = name_of(node.target)
        if name == _torch.loops.COUNTED:
            node.target, node.args = _torch.loops.stacked_loop(), node.args[:-1]
        elif evaluated.isdisjoint(node.all_input_nodes):
            continue
        elif name == _LOOP:
            for place, body in zip(node.args[:2], _bodies(node), strict=True):
                place.meta["val"] = body = module_of(body, copy_of(body.graph))
                uncount_steps(body.graph, fake_mode)
                _evaluate(body.graph, _operand_values(node), fake_mode, _value)
            continue
        node.meta["val"] = _value(node, fake_mode)
        _torch.loops.bind_symbols(node, fake_mode)
        if name == _torch.loops.COUNTED:
            _torch.loops.takes_a_step(node.meta["val"][0])
        if _has_unknown_size(node):
            evaluated.add(node)


def _has_unknown_size(node: fx.Node) -> bool:
    """Return whether a size of a node's result depends on data."""
    return any(map(_torch.fake.is_data_dependent, tensors_of(node.meta.get("val"))))


def _forget_offset(node: fx.Node) -> None:
    """Give an input offset 0 if its storage offset depends on data: a tangent has the
    layout of its result, which may be a step of a loop."""
    if (
        node.op == "placeholder"
        and _has_open_offset(node)
        and not _has_unknown_size(node)
    ):
        value = node.meta["val"]
        node.meta["val"] = value.new_empty_strided(value.shape, value.stride())


def _has_open_offset(node: fx.Node) -> bool:
    """Return whether the storage offset of a node's result depends on data."""
    return any(map(_torch.fake.has_open_offset, tensors_of(node.meta.get("val"))))


def _bodies(loop: fx.Node) -> list[fx.GraphModule]:
    """Return the test and the body of a loop."""
    return [place.meta["val"] for place in loop.args[:2]]


def _operand_values(loop: fx.Node) -> list[Any]:
    """Return the fake values of the inputs of a loop's bodies."""
    return value_of([*loop.args[2], *loop.args[3]])


def _value(node: fx.Node, fake_mode: Any) -> Any:
    """Return the fake value of a call, computed from those of its operands."""
    with fake_mode:
        return node.target(*value_of(node.args), **value_of(node.kwargs))


def _any_step(node: fx.Node, fake_mode: Any) -> Any:
    """Return ``_value``, but 0 for a number read from a tensor (the step's index)."""
    if node.target is aten._local_scalar_dense.default:
        return 0
    return _value(node, fake_mode)


def _evaluate(
    graph: fx.Graph,
    inputs: Sequence[Any],
    fake_mode: Any,
    value: Callable[[fx.Node, Any], Any],
) -> None:
    """Set the values of a body's nodes, computed from ``inputs``, in place."""
    values = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = next(values)
        elif node.op == "call_function":
            node.meta["val"] = value(node, fake_mode)
            _torch.loops.bind_symbols(node, fake_mode)


MOST = 20_000  # nodes that unrolled steps may add


def unroll_scans(graph: fx.Graph, mesh: Mesh, fake_mode: Any) -> None:
    """Replace scans of a backward by their steps, in place.

    Raises PlanError if these would be too many nodes."""
    scan = "higher_order::scan"
    scans = calls_where(graph, lambda x: _torch.aot.higher_order_name(x) == scan)
    if not scans:
        return
    build, backward = Builder(graph, fake_mode, mesh), depending_on_tangents(graph)
    for node in scans:
        if node not in backward and not node.meta.get("autograd_backward"):
            continue
        with graph.inserting_before(node), build.at(node):
            results = _steps(build, node)
        replace_items(node, results)
    graph.lint()


def _steps(build: Builder, node: fx.Node) -> list[fx.Node]:
    """Return the results of a scan, its steps appended."""
    (body,) = bodies_of(node)
    _, init, xs, captured = node.args
    count = int(xs[0].meta["val"].shape[0])
    if count * len(body.graph.nodes) > MOST:
        raise PlanError(
            f"the backward of a scan of {count} steps would be {MOST} nodes and more",
            where=user_line(node),
            fix='compile with options={"codegen": "eager"}: Inductor gives wrong '
            "gradients of scans that are not unrolled",
        )
    carried: list[Any] = list(init)
    rows_of_steps: list[list[fx.Node]] = []
    for i in range(count):
        row = [build.call(aten.select.int, x, 0, i) for x in xs]
        results = _inlined(build, body, [*carried, *row, *captured], node.name)
        carried = results[: len(init)]
        rows_of_steps.append(results[len(init) :])
    stacked = [
        build.call(
            aten.cat.default, [build.call(aten.unsqueeze.default, y, 0) for y in rows]
        )
        for rows in zip(*rows_of_steps, strict=True)
    ]
    return [*carried, *stacked]


def _inlined(
    build: Builder, body: fx.GraphModule, inputs: list[Any], name: str
) -> list[Any]:
    """Return the results of a body, its nodes appended; ``name``: that of the call."""
    values, copies = iter(inputs), dict[fx.Node, Any]()
    for node in body.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(values)
        elif node.op == "output":
            return [copies[x] for x in node.args[0]]
        elif (inner := body_of(node)) is not None:
            copies[node] = new_body(build, node, inner, name)
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = build.call(node.target, *args, **kwargs)
    raise AssertionError("a body has no output")
