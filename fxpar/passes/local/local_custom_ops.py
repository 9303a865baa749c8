"""Local forms of fxpar's own ops.

A contraction (``fxpar::dot``) is views around one mm or bmm. Factors of its equation
fall into four classes: in both operands and the result (batch), in the left one (m), in
the right one (n), in both operands only (k). Runs of one class are merged by views
where they stand together, so that no data moves that the program before normalizing
did not move. Rows of a shift are cut, sent on along a split dim, and joined.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder, Size, value_of
from fxpar.passes.local import halos
from fxpar.passes.local.local_call import LocalCall, Localizer
from fxpar.passes.regions import region_ops as _region_ops  # noqa: F401  (registers ops)
from fxpar.sharding import rank_ints, shard_sizes

aten = torch.ops.aten


def emit_dot(
    build: Builder,
    lhs: fx.Node,
    rhs: fx.Node,
    equation: str,
    shapes: Sequence[Sequence[Size]] | None = None,
) -> fx.Node:
    """Append the views and the product; returns the result in the equation's order.
    ``shapes``: of the operands, where their fake values do not say it."""
    operands, _, result = equation.partition("->")
    left, right = (part.split() for part in operands.split(","))
    out = result.split()
    of_left, of_right = shapes or (lhs.meta["val"].shape, rhs.meta["val"].shape)
    size: dict[str, Size] = dict(zip(left, of_left, strict=True))
    size.update(zip(right, of_right, strict=True))
    batch = [f for f in left if f in right and f in out]
    k = [f for f in left if f in right and f not in out]
    m = [f for f in left if f not in right]
    n = [f for f in right if f not in left]
    a = _merge(build, lhs, left, [batch, m, k] if batch else [m, k], size)
    b = _merge(build, rhs, right, [batch, k, n] if batch else [k, n], size)
    target = aten.bmm.default if batch else aten.mm.default
    product = build.call(target, a, b)
    product_factors = [*batch, *m, *n]
    return reorder(build, product, product_factors, out, size)


def reorder(
    build: Builder,
    node: fx.Node,
    factors: Sequence[str],
    target_factors: Sequence[str],
    size: Mapping[str, Size],
) -> fx.Node:
    """View a product as its factors and permute them to ``target_factors``."""
    shape = [size[f] for f in factors]
    if list(node.meta["val"].shape) != value_of(shape):
        node = build.reshape(node, shape)
    if list(factors) != list(target_factors):
        node = build.call(
            aten.permute.default, node, [factors.index(f) for f in target_factors]
        )
    return node


def _merge(
    build: Builder,
    node: fx.Node,
    words: list[str],
    groups: list[list[str]],
    size: Mapping[str, Size],
) -> fx.Node:
    """``node`` with dims ``words`` as one dim per group, groups in the given order."""
    place = {f: i for i, group in enumerate(groups) for f in group}
    runs = [list(run) for _, run in itertools.groupby(words, key=lambda f: place[f])]
    filled = [group for group in groups if group]
    if sorted(runs) != sorted(filled):
        order = [words.index(f) for group in groups for f in group]
        if order != list(range(len(order))):
            node = build.call(aten.permute.default, node, order)
        runs = filled
    shape = [build.product(size[f] for f in run) for run in runs]
    if list(node.meta["val"].shape) != value_of(shape):
        node = build.reshape(node, shape)
    order = [runs.index(group) for group in filled]
    if order != list(range(len(order))):
        node = build.call(aten.permute.default, node, order)
    if len(filled) < len(groups):
        full = [build.product(size[f] for f in group) for group in groups]
        node = build.reshape(node, full)
    return node


def _shift(
    call: LocalCall, x: fx.Node, dim: int, by: int, fill: float | None = None
) -> fx.Node:
    axes, size = call.operands[0].dims[dim], x.meta["val"].shape[dim]
    shifted = halos.rows(call, x, axes, dim, by, by + size, fill)
    if shifted is x:
        return call.build.call(
            aten.clone.default, x, memory_format=torch.contiguous_format
        )
    return shifted


def _sum_turns(call: LocalCall, x: fx.Node, dim: int, turns: int) -> fx.Node:
    """Rows of a shard stand where they lie in as many turns as it may reach into."""
    build, axes = call.build, call.operands[0].dims[dim]
    shape, (all_rows, n) = (
        list(call.operand_shape(0)),
        (s[dim] for s in (call.shapes[0], call.result_shape())),
    )
    if build.mesh.count(axes) > 1:
        most = x.meta["val"].shape[dim]
        even = shard_sizes.is_even(all_rows, build.mesh, axes) and most % n == 0
        turns = most // n if even else min(turns, -(-most // n) + 1)
        if not even:
            start = build.own_start(all_rows, axes)
            before = build.compute(operator.mod, start, n)
            behind = build.compute(operator.add, before, shape[dim])
            behind = build.compute(operator.sub, turns * n, behind)
            amounts = [0, 0] * (len(shape) - 1 - dim)
            x = build.pad_ends(x, [*amounts, before, behind])
    shape[dim : dim + 1] = [turns, n]
    parts = build.call(aten.reshape.default, x, shape)
    return build.call(aten.sum.dim_IntList, parts, [dim])


def _interleave(call: LocalCall, parts: Sequence[fx.Node], dim: int) -> fx.Node:
    """Of rows that all ranks have: those of the parts beside one another, then in one
    dim, without the rows that the last parts have not."""
    build, shape = call.build, list(call.local_shape())
    rows, missing = [], 0
    for i, x in enumerate(parts):
        if call.operand_shape(i)[dim] != call.operand_shape(0)[dim]:
            missing += 1
            behind = len(shape) - 1 - dim
            x = build.pad_ends(x, [0, 0] * behind + [0, 1])
        rows.append(build.call(aten.unsqueeze.default, x, dim + 1))
    stacked = build.call(aten.cat.default, rows, dim + 1)
    shape[dim] += missing
    whole = build.call(aten.reshape.default, stacked, shape)
    if not missing:
        return whole
    cut = build.call(aten.slice.Tensor, whole, dim, 0, shape[dim] - missing)
    return _contiguous(call, cut)


def _dot(call: LocalCall, lhs: fx.Node, rhs: fx.Node, equation: str) -> fx.Node:
    shapes = call.operand_shape(0), call.operand_shape(1)
    return emit_dot(call.build, lhs, rhs, equation, shapes)


def _identity(call: LocalCall, x: fx.Node, _: Any) -> fx.Node:
    return x


def _random(call: LocalCall, *args: Any) -> fx.Node:
    """The shard counts by global index: same seed, same numbers as one device."""
    *head, size, starts = args
    axes = call.results[0].dims
    local = list(call.local_shape())
    offsets = [
        _slice_start(call, start, a, n) if a else start
        for start, a, n in zip(starts, axes, call.result_shape(), strict=True)
    ]
    if head and isinstance(head[0], (list, tuple)):  # fxpar::random: size comes first
        head = [local, *head[1:]]
    else:  # fxpar::randint: low, high, size, seed
        head = [*head[:2], local, *head[3:]]
    return call.build.call(call.node.target, *head, size, offsets)


def _slice_start(call: LocalCall, start: Any, axes: Sequence[str], rows: int) -> Any:
    """Where the slices over ``axes`` begin, of a dim of ``rows`` that begins at
    ``start``: a number, or the offset of a dim that other axes split already."""
    build = call.build
    if not isinstance(start, fx.Node):
        return build.own_start(rows, axes, start)
    if start.target is not rank_ints.offset or rows % build.mesh.count(axes):
        raise PlanError(f"{call.node.name} is cut into shards that are not alike")
    _, before, stride, base = value_of(start.args)
    if stride != rows:
        raise PlanError(f"{call.node.name} is cut across shards of {stride}")
    return build.offset((*before, *axes), rows // build.mesh.count(axes), base)


def _contiguous(call: LocalCall, x: fx.Node, *_: Any) -> fx.Node:
    """An edge of a manual region: what a rank holds, laid out as it is read."""
    if x.meta["val"].is_contiguous():
        return x
    return call.build.call(aten.clone.default, x, memory_format=torch.contiguous_format)


def _collective(
    call: LocalCall,
    x: fx.Node,
    kind: str,
    dims: Sequence[int],
    op: str,
    _: str,
    axes: str,
) -> fx.Node:
    step_args = (tuple(dims),) if kind == "permute" else dims
    args = (*step_args, op) if op else step_args
    node = collective_nodes.NODES[kind]
    return collective_nodes.step(call.build, node, x, *args, tuple(axes.split("+")))


def _axis_index(call: LocalCall, axis: str, _: str) -> fx.Node:
    place = call.build.offset((axis,), 1)
    return call.build.call(aten.full.default, [], place, dtype=torch.int64)


LOCAL: dict[Any, Localizer] = {
    "fxpar::dot": _dot,
    "fxpar::constrain": _identity,
    "fxpar::with_gradient_of": _identity,
    "fxpar::mean_over_ranks": _identity,
    "fxpar::random": _random,
    "fxpar::randint": _random,
    "fxpar::shift": _shift,
    "fxpar::sum_turns": _sum_turns,
    "fxpar::interleave": _interleave,
    "fxpar::enter_region": _contiguous,
    "fxpar::leave_region": _contiguous,
    "fxpar::collective": _collective,
    "fxpar::axis_index": _axis_index,
}
