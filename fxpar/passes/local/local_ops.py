"""Appends one op in its local form to a graph, with the bodies it runs.

In: a call in global shapes, its rule and strategy, and the local nodes of its operands.
Out: the call in local shapes, appended. A body with split values is made local too, op
by op. Never: an op inside a body communicates (``sharding.body_rules``).

Most ops compute their shard from the shards of their operands unchanged. For the others
the row (``sharding.ops``) has a local form: an index into a split dim must be shifted
by the rank's offset and masked where it points elsewhere, a size among the arguments
must become the local one, a random op must count by global index. Ops that move rows of
a split dim (``Rule.moves``) exchange them (``sharding.ops.reads``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import PlanError
from fxpar.graph import region_ops as _region_ops  # noqa: F401  (registers ops)
from fxpar.graph import size_nodes
from fxpar.graph.builder import Builder, Size, value_of
from fxpar.graph.graph_bodies import body_of, module_of, new_body
from fxpar.passes.lower import restrided
from fxpar.sharding.body_rules import FORMS, Inside
from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.op_table import look_up, tensors_of
from fxpar.sharding.ops import LOCAL, reads, row_of
from fxpar.sharding.ops.local_call import LocalCall, aten
from fxpar.sharding.program import Op, Program
from fxpar.sharding.read_program import inside_of
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy, operand_spec, result_spec


def local_form(call: LocalCall, args: Any, kwargs: Any) -> Any:
    """Append one op on local arguments: its local form, or the op itself, with the
    shape argument, if its row marks one, made local. An operand of which a rank holds
    no rows is padded to a row of zeros for an op that cannot run without rows; the row
    is cut off the results."""
    n = len(call.operands)
    read = {(window.position, window.dim) for window in call.rule.windows}
    empty = [
        [d for d in call.empty_dims(spec, shape) if (i, d) not in read]
        for i, (spec, shape) in enumerate(
            zip(call.operands + call.results, call.shapes, strict=True)
        )
    ]
    if call.rule.empty != "fill" or not any(empty):
        return _local_form(call, args, kwargs)
    filled_call = replace(call, least=1)
    reads = _operands(args, kwargs)
    filled = {}
    for i, (x, dims) in enumerate(zip(reads, empty[:n], strict=True)):
        pairs = zip(filled_call.operand_shape(i), call.operand_shape(i), strict=True)
        missing = [call.build.missing(*pair) for pair in pairs]
        padding = [m if d in dims else 0 for d, m in enumerate(missing)]
        filled[x] = call.build.pad(x, padding) if dims else x
    args, kwargs = fx.node.map_arg((args, kwargs), lambda x: filled.get(x, x))
    result = _local_form(filled_call, args, kwargs)
    cuts = [
        [(d, call.local_shape(i)[d]) for d in dims] for i, dims in enumerate(empty[n:])
    ]
    value = value_of(result)
    if isinstance(value, torch.Tensor):
        return cut(call.build, result, cuts[0])
    if not isinstance(result, tuple):
        item = partial(call.build.call, operator.getitem, result)
        result = tuple(item(k) for k in range(len(value)))
    ends = iter(cuts)
    return tuple(
        cut(call.build, x, next(ends)) if isinstance(y, torch.Tensor) else x
        for x, y in zip(result, value, strict=True)
    )


def cut(build: Builder, x: fx.Node, cuts: Sequence[tuple[int, Size]]) -> fx.Node:
    """Return ``x`` without the rows that this rank does not hold."""
    for d, size in cuts:
        x = build.call(aten.slice.Tensor, x, d, 0, size)
    return x


def _operands(args: Any, kwargs: Any) -> list[fx.Node]:
    """Return the tensors that a call reads, in order."""
    out: list[fx.Node] = []

    def add(node: fx.Node) -> fx.Node:
        if isinstance(node.meta.get("val"), torch.Tensor):
            out.append(node)
        return node

    fx.node.map_arg((args, kwargs), add)
    return out


def _local_form(call: LocalCall, args: Any, kwargs: Any) -> fx.Node:
    target = call.node.target
    local = look_up(LOCAL, target)
    if call.rule.moves and reads.is_exchange(call):
        return reads.moved(call, _operands(args, kwargs))
    if local is not None:
        return local(call, *args, **kwargs)
    row = row_of(target)
    if row is not None and row.shape is not None and row.shape < len(args):
        shape = list(call.local_shape())
        args = (*args[: row.shape], shape, *args[row.shape + 1 :])
    return call.build.call(target, *args, **kwargs)


Local = Callable[[fx.Node], Any]


def local_like(value: torch.Tensor, spec: Spec, mesh: Mesh, mode: Any) -> Any:
    """Return a fake tensor of the largest shard, with the dim order of ``value``."""
    if spec.is_whole:
        return value
    return resized(value, spec.local_shape(mesh, value.shape), mode)


def resized(value: torch.Tensor, shape: Sequence[int], mode: Any) -> Any:
    """Return a fake tensor of another shape, with the dim order of ``value``."""
    if tuple(value.shape) == tuple(shape):
        return value
    strides = _torch.symbols.hint_shape(value.stride())
    order = sorted(range(value.dim()), key=lambda d: (-strides[d], d))
    stride = [0] * value.dim()
    step = 1
    for d in reversed(order):
        stride[d] = step
        step *= torch.sym_max(shape[d], 1)
    with mode:
        local = torch.empty_strided(
            shape, stride, dtype=value.dtype, device=value.device
        )
    return local.requires_grad_(value.requires_grad) if value.requires_grad else local


def local_op(
    build: Builder,
    node: fx.Node,
    op: Op,
    program: Program,
    strategy: Strategy,
    local: Local,
) -> fx.Node | tuple[fx.Node | None, ...]:
    """Append an op under a strategy; return its node, or a tuple of nodes if several
    give its results. ``local``: node that it reads -> its local node.

    Raises PlanError if a shard comes out with another shape than its spec says.
    """
    operands = tuple(
        operand_spec(op.rule, strategy, i) for i in range(len(op.operands))
    )
    results = tuple(result_spec(op.rule, strategy, i) for i in range(len(op.results)))
    args, kwargs = fx.node.map_arg(
        (node.args, node.kwargs), lambda n: _symbolic_size(n) or local(n)
    )
    all_whole = all(s.is_whole for s in operands + results)
    is_kept = all_whole and not op_facts_of(op.target).replaced
    if is_kept and _has_global_layouts(node, local):
        return _copied(build, node, args, kwargs)
    shapes = _shapes(op, program)
    call = LocalCall(build, node, op.rule, operands, results, shapes)
    if _torch.aot.higher_order_name(node.target) in FORMS:
        args = _local_bodies(call, args, strategy.axes_of)
    result = local_form(call, args, kwargs)
    _check(result, op, program, results, build.mesh)
    return result


def _has_global_layouts(node: fx.Node, local: Local) -> bool:
    """Return whether a node's operands have the same memory layout as in the global
    graph."""
    pairs = ((n.meta["val"], local(n).meta["val"]) for n in node.all_input_nodes)
    return all(
        a is b or not isinstance(a, torch.Tensor) or _layout(a) == _layout(b)
        for a, b in pairs
    )


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    """Return the strides and the offset of a tensor."""
    return x.stride(), x.storage_offset()


def _symbolic_size(node: fx.Node) -> Any:
    """Return the symbolic size that a node computes, which local forms take as a
    number; None for other nodes."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.SymInt) else None


def _shapes(op: Op, program: Program) -> tuple[tuple[int, ...], ...]:
    """Return the global shapes of an op's tensors, open sizes as symbols."""
    return tuple(program.values[v].sizes for v in op.tensors)


def _copied(build: Builder, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    """Copy an op on whole values, fake value included."""
    args = size_nodes.as_nodes(build.graph, args)
    kwargs = size_nodes.as_nodes(build.graph, kwargs)
    copy = build.graph.create_node(node.op, node.target, args, kwargs)
    copy.meta.update({k: v for k, v in node.meta.items() if k != "tensor_meta"})
    copy.meta["fxpar_origin"] = node.name
    return copy


def _check(
    result: Any, op: Op, program: Program, results: tuple[Spec, ...], mesh: Mesh
) -> None:
    got = [tuple(t.shape) for t in tensors_of(value_of(result))]
    shapes = _shapes(op, program)[len(op.operands) :]
    want = [
        spec.local_shape(mesh, shape)
        for spec, shape in zip(results, shapes, strict=True)
    ]
    if got != want:
        raise PlanError(
            f"{op.name} ({op.target}) under rule '{op.rule}' gives local shapes "
            f"{got}, its specs say {want}",
            fix="its row needs a `shape` mark or a local form "
            "(docs/howto/add_an_op.md)",
        )


def _local_bodies(call: LocalCall, args: Any, axes: Mapping[str, Axes]) -> Any:
    """Return the arguments with local bodies in place of the global ones; the bodies
    are appended."""
    bodies = inside_of(call.node)
    assert bodies is not None
    count = iter(range(len(bodies.programs)))

    def local(node: fx.Node) -> fx.Node:
        if body_of(node) is None:
            return node
        body = _local_body(call.build, bodies, next(count), axes)
        return new_body(call.build, node, body, call.node.name)

    return fx.node.map_arg(args, local)


def _local_body(
    build: Builder, bodies: Inside, b: int, axes: Mapping[str, Axes]
) -> fx.GraphModule:
    """Return a body in local shapes. ``axes``: factor of the call that runs it -> the
    axes that split it."""
    program, body = bodies.programs[b], bodies.ties.bodies[b]
    inner = Builder(fx.Graph(), build.fake_mode, build.mesh)
    op_of = {op.node: op for op in program.ops}
    copies: dict[fx.Node, Any] = {}
    for node in body.graph.nodes:
        op = op_of.get(node)
        if op is not None:
            strategy = bodies.strategy(b, op, axes)
            with inner.at(node):
                copies[node] = local_op(
                    inner, node, op, program, strategy, copies.__getitem__
                )
            continue
        if node.op == "output":
            results = fx.node.map_arg(node.args, partial(_result, inner, copies))
            inner.graph.output(*results).meta = dict(node.meta)
            continue
        copy = copies[node] = copied_node(inner.graph, node, copies)
        if node.op == "placeholder" and (node, 0) in program.value_of:
            spec = Spec.of(bodies.axes_of(program.value_of[node, 0], b, axes))
            copy.meta["val"] = local_like(
                node.meta["val"], spec, build.mesh, build.fake_mode
            )
    inner.graph.eliminate_dead_code()
    inner.graph.lint()
    return module_of(body, inner.graph)


def _result(build: Builder, copies: Mapping[fx.Node, Any], node: fx.Node) -> fx.Node:
    """Return the local result of a body in the memory layout of the global one: the
    calls that run bodies refuse slices of tensors."""
    copy, value = copies[node], node.meta.get("val")
    with build.at(node):
        is_tensor = isinstance(value, torch.Tensor)
        return restrided(build, copy, value) if is_tensor else copy


def copied_node(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, Any]) -> Any:
    """Return the copy of a node that is no op: of an item of an op, the node that gives
    it."""
    item = node.target is operator.getitem
    results: Any = copies[node.args[0]] if item else None
    if isinstance(results, tuple):
        return results[node.args[1]]
    copy = graph.node_copy(node, copies.__getitem__)
    copy.meta.pop("tensor_meta", None)
    if item:
        copy.meta["val"] = results.meta["val"][node.args[1]]
    return copy
