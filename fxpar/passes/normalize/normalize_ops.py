"""Rewrites patterns of ops that hide sharding from the factor rules.

In: a functional ATen graph with global fake values. Out: the same graph, changed in
place, computing the same values. A pass is one concern; ``fxpar.pipeline`` has their
order. Never: ``expand_moments`` changes other nodes than those that planning asks for.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.objects import argument
from fxpar._torch.symbols import expressions
from fxpar.graph.builder import Builder, is_zeros, replace_items, shape_of
from fxpar.passes.normalize.random import BY_INDEX
from fxpar.sharding.decide import Decision
from fxpar.sharding.factors import sides
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import Op, Program

aten = torch.ops.aten

MOMENTS = (aten.var_mean.correction, aten.var.correction)


def clone_constants(graph: fx.Graph, rewriter: Builder) -> None:
    """Give each use of a constant its own, so that it never couples the specs of
    unrelated users."""
    for node in list(graph.nodes):
        filled = op_facts_of(node.target).constant == "filled"
        if filled and not node.all_input_nodes and len(node.users) > 1:
            for user in list(node.users)[1:]:
                with rewriter.before(user):
                    twin = rewriter.call(node.target, *node.args, **node.kwargs)
                twin.meta |= node.meta | {"val": twin.meta["val"]}
                user.replace_input_with(node, twin)


def split_fused_projections(graph: fx.Graph, rewriter: Builder) -> None:
    """Replace ``split(x @ w + b)`` into equal parts by a projection to a dim of parts.

    A fused QKV weight holds three matrices next to each other; split over an axis, the
    parts would straddle ranks. With a dim of parts, each part is split in the same way.
    """
    for node in list(graph.nodes):
        if not op_facts_of(node.target).splits:
            continue
        x = node.args[0]
        shape = shape_of(x)
        dim = argument(node, "dim") % len(shape)
        parts = [s[dim] for s in (v.shape for v in node.meta["val"])]
        if dim != len(shape) - 1 or len(set(expressions(parts))) != 1 or len(parts) < 2:
            continue
        widened = _widen(x, len(parts), int(parts[0]), rewriter)
        if widened is None:
            continue
        for user in list(node.users):
            if user.target is operator.getitem:
                with rewriter.before(user):
                    piece = rewriter.call(
                        aten.select.int, widened, len(shape) - 1, user.args[1]
                    )
                rewriter.replace(user, piece)
    graph.eliminate_dead_code()


def _widen(x: fx.Node, parts: int, width: int, rewriter: Builder) -> fx.Node | None:
    """Return ``x`` with its last dim as [parts, width], pulled through a bias to the
    dot; None if ``x`` is no such projection."""
    if x.target is torch.ops.fxpar.dot.default:
        return _widen_dot(x, parts, width, rewriter)
    if x.target is aten.add.Tensor and isinstance(x.args[1], fx.Node) and not x.kwargs:
        product, bias = x.args
        if product.target is not torch.ops.fxpar.dot.default or shape_of(bias) != (
            parts * width,
        ):
            return None
        widened = _widen_dot(product, parts, width, rewriter)
        if widened is None:
            return None
        with rewriter.before(x):
            wide = rewriter.call(aten.view.default, bias, [parts, width])
            return rewriter.call(aten.add.Tensor, widened, wide)
    return None


def _widen_dot(
    dot: fx.Node, parts: int, width: int, rewriter: Builder
) -> fx.Node | None:
    lhs, rhs, equation = dot.args
    left, right, out = sides(equation)
    last = out[-1]
    if last not in right or last in left:
        return None
    position = right.index(last)
    shape = list(shape_of(rhs))
    shape[position : position + 1] = [parts, width]
    right[position : position + 1] = ["part", last]
    widened_equation = (
        f"{' '.join(left)}, {' '.join(right)} -> {' '.join([*out[:-1], 'part', last])}"
    )
    with rewriter.before(dot):
        wide = rewriter.call(aten.view.default, rhs, shape)
        return rewriter.call(torch.ops.fxpar.dot.default, lhs, wide, widened_equation)


def random_by_index(graph: fx.Graph, rewriter: Builder) -> None:
    """Replace random ops by functions of a seed and the global index, as Inductor makes
    them on one device, so that a shard of a mask is the same on any mesh."""
    ours, prim = torch.ops.fxpar, _torch.inductor.inductor_prim
    by_index = {prim(name): (name, *each) for name, each in BY_INDEX.items()}
    for node in list(graph.nodes):
        if node.target is prim("seeds"):
            op, args = ours.seeds.default, node.args
        elif node.target in by_index:
            name, count, at = by_index[node.target]
            size = list(node.args[at])
            args = (*node.args[:count], size, [0] * len(size))
            op = getattr(ours, name).default
        else:
            continue
        with rewriter.before(node):
            random = rewriter.call(op, *args)
        rewriter.replace(node, random)


def _is_moment(op: Op) -> bool:
    """Return whether an op is a variance of real numbers, maybe with their mean."""
    node: Any = op.node
    return op.target in MOMENTS and not node.args[0].meta["val"].is_complex()


def moments_of(program: Program) -> list[fx.Node]:
    """Return the nodes that ``expand_moments`` could expand."""
    return [op.node for op in program.ops if _is_moment(op)]


def split_moments(decision: Decision) -> list[fx.Node]:
    """Return the moments whose operand is split over a dim that they reduce."""
    moments = []
    for op in decision.program.ops:
        if _is_moment(op):
            spec = decision.settled[op.operands[0]]
            whole = op.rule.whole
            dims = zip(op.rule.operands[0], spec.dims, strict=True)
            if any(axes and any(f in whole for f in dim) for dim, axes in dims):
                moments.append(op.node)
    return moments


def expand_moments(nodes: Iterable[fx.Node], rewriter: Builder) -> None:
    """Replace ``var``/``var_mean`` over dims that a plan splits by two sums.

    The one-pass (Welford) form needs its dims whole; mean and centered squares are
    plain sums, partial over any axis, and as stable. Narrow floats are summed in wider
    ones, as the one-pass form does.
    """
    for node in nodes:
        with rewriter.before(node):
            variance, mean = _two_pass(node, rewriter)
        if node.target is aten.var.correction:
            rewriter.replace(node, variance)
        else:
            replace_items(node, (variance, mean))


def _two_pass(node: fx.Node, rewriter: Builder) -> tuple[fx.Node, fx.Node]:
    x, call = node.args[0], rewriter.call
    shape, dtype = shape_of(x), x.meta["val"].dtype
    x = rewriter.cast(x, torch.promote_types(dtype, torch.float32))
    dims = argument(node, "dim") or range(len(shape))
    dims = [d % len(shape) for d in dims]
    correction, keep = argument(node, "correction"), argument(node, "keepdim")
    correction = 1 if correction is None else correction
    count = math.prod(shape[d] for d in dims)
    total = call(aten.sum.dim_IntList, x, dims, True)
    mean = call(aten.div.Tensor, total, count)
    centered = call(aten.sub.Tensor, x, mean)
    squares = call(aten.mul.Tensor, centered, centered)
    second = call(aten.sum.dim_IntList, squares, dims, True)
    variance = call(aten.div.Tensor, second, max(count - correction, 0))
    variance, mean = (rewriter.cast(t, dtype) for t in (variance, mean))
    if keep:
        return variance, mean
    reduced_shape = [n for d, n in enumerate(shape) if d not in dims]
    return tuple(call(aten.view.default, t, reduced_shape) for t in (variance, mean))


def stack_by_dim(graph: fx.Graph, rewriter: Builder) -> None:
    """Replace a join of tensors along a dim, viewed as their stack, by a join along a
    new dim, so that the original dim may be split."""
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        join = node.args[0]
        if join.target is not aten.cat.default or len(join.users) > 1:
            continue
        parts, dim = join.args[0], argument(join, "dim")
        shape = shape_of(parts[0])
        dim %= max(len(shape), 1)
        stacked = (*shape[:dim], len(parts), *shape[dim:])
        if not shape or shape_of(node) != stacked:
            continue
        if any(shape_of(part) != shape for part in parts):
            continue
        with rewriter.before(node):
            rows = [rewriter.call(aten.unsqueeze.default, x, dim) for x in parts]
            stacked_rows = rewriter.call(aten.cat.default, rows, dim)
        rewriter.replace_as_it_is(node, stacked_rows)


def sum_one_hot(graph: fx.Graph, rewriter: Builder) -> None:
    """Replace ``sum(scatter(zeros, dim, index, value) * weight, dim)``, with one index
    a row, by ``weight * value``.

    The backward of a cross entropy has this sum. Over classes that a plan splits it
    would be a collective; on one device it reads as much as the logits. A weight that
    is not finite gives inf, not NaN; the gradient computed from it is NaN either way.
    """
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        x, (dim, *further_dims) = node.args[0], node.args[1] or (0, 1)
        rank = len(shape_of(x))
        if x.target is not aten.mul.Tensor or further_dims or node.kwargs or not rank:
            continue
        rows = tuple(1 if d == dim % rank else n for d, n in enumerate(shape_of(x)))
        for hot, weight in (x.args, x.args[::-1]):
            value = _one_hot(hot, dim % rank, rows)
            if value is None or not _is_like(weight, rows, hot, node):
                continue
            with rewriter.before(node):
                product = rewriter.call(aten.mul.Tensor, weight, value)
                if shape_of(node) != rows:
                    product = rewriter.call(aten.squeeze.dim, product, dim)
                product = rewriter.with_strides_of(node, product)
            rewriter.replace(node, product)
            break


def _one_hot(node: Any, dim: int, rows: tuple[int, ...]) -> float | None:
    """Return the value that each row along ``dim`` has in one place, with zeros
    elsewhere; None if the node is no such one-hot tensor. ``rows``: its shape with
    ``dim`` of size 1."""
    if not isinstance(node, fx.Node) or node.target is not aten.scatter.value:
        return None
    zeros, at, index, value = node.args
    if not is_zeros(zeros):
        return None
    if not isinstance(value, int | float):  # known when it runs
        return None
    whole = rows[:dim] + shape_of(node)[dim : dim + 1] + rows[dim + 1 :]
    fits = at % len(rows) == dim and shape_of(node) == whole and shape_of(index) == rows
    stored = torch.tensor(value, dtype=node.meta["val"].dtype).item()
    return value if fits and stored == value else None


def _is_like(weight: Any, shape: tuple[int, ...], *others: fx.Node) -> bool:
    """Return whether ``weight`` is a tensor of this shape, and all nodes have one
    floating dtype."""
    if not isinstance(weight, fx.Node) or shape_of(weight) != shape:
        return False
    dtypes = {n.meta["val"].dtype for n in (weight, *others)}
    return len(dtypes) == 1 and dtypes.pop().is_floating_point
