"""traced -> normalized: gives products by expert with a fused weight a dim of parts.

A gate and an up-projection share one weight ``[experts, k, 2 * n]``: its columns are
two blocks (Mixtral), or alternate (GPT-OSS). Split over an axis, a rank would have
columns of one part without those of the other that they are multiplied with. In: a
graph with ``fxpar::expert_mm`` (``normalize_experts``). Out: the same graph, in which
these products see ``[2, n]`` or ``[n, 2]`` for ``2 * n``, and so do the products of the
backward, whose gradients were joined. Never: changes how a weight or its gradient
enters or leaves.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar._torch.objects import argument
from fxpar.features.experts import expert_ops as _expert_ops  # noqa: F401  (registers ops)
from fxpar.graph.builder import Builder, is_zeros, shape_of
from fxpar.sharding.op_facts import op_facts_of

aten = torch.ops.aten
MM = torch.ops.fxpar.expert_mm.default
OUTER = torch.ops.fxpar.expert_outer.default


@dataclass(frozen=True)
class _Parts:
    """Holds columns as two dims, one of which counts parts."""

    # Sizes of the two dims.
    columns: tuple[int, int]
    # Which dim of [rows, *columns] counts parts.
    dim: int
    # The value of each part; None: nothing reads it.
    values: Sequence[fx.Node | None]


def split_fused_experts(graph: fx.Graph, build: Builder) -> None:
    """Rewrite a graph in place."""
    for node in list(graph.nodes):
        if node.target is MM:
            _split_result(node, build)
    for node in list(graph.nodes):
        parts = _parts_of(node)
        products = (user for user in node.users if user.target in (MM, OUTER))
        if parts is not None and any(products):
            _split_operand(node, parts, build)
    graph.eliminate_dead_code()


# Forward


def _split_result(product: fx.Node, build: Builder) -> None:
    """Give a product whose columns are split into parts a dim of parts."""
    if len(shape_of(product)) != 2:
        return
    rows = _biased(product)
    parts = _blocks(rows) or _turns(rows)
    if parts is None:
        return
    with build.before(rows):
        wide = _with_columns(product, parts.columns, build)
        if rows is not product:
            bias = rows.args[1]
            split = _with_columns if bias.target is MM else _split_last
            bias = split(bias, parts.columns, build)
            wide = build.call(rows.target, wide, bias)
    for i, part in enumerate(parts.values):
        if part is not None:
            with build.before(part):
                build.replace(part, build.call(aten.select.int, wide, parts.dim, i))


def _biased(product: fx.Node) -> fx.Node:
    """Return a product with its bias added, if only that sum reads it; else the
    product."""
    users = list(product.users)
    if len(users) != 1 or users[0].target is not aten.add.Tensor or users[0].kwargs:
        return product
    x, bias = users[0].args
    is_equal = isinstance(bias, fx.Node) and shape_of(bias) == shape_of(product)
    return users[0] if x is product and bias is not product and is_equal else product


def _with_columns(product: fx.Node, columns: Sequence[int], build: Builder) -> fx.Node:
    x, weight, *others = product.args
    return build.call(MM, x, _split_last(weight, columns, build), *others)


def _split_last(x: Any, columns: Sequence[int], build: Builder) -> fx.Node:
    """Return ``x`` with its last dim, of all columns, as several."""
    return build.call(aten.reshape.default, x, [*shape_of(x)[:-1], *columns])


def _blocks(rows: fx.Node) -> _Parts | None:
    """Return the parts of a value [rows, columns] that is split into blocks of
    columns."""
    users, n = list(rows.users), shape_of(rows)[1]
    if len(users) != 1 or not op_facts_of(users[0].target).splits:
        return None
    split = users[0]
    pieces = split.meta["val"]
    count, dim = len(pieces), argument(split, "dim")
    is_even = count > 1 and {x.shape[1] for x in pieces} == {n // count}
    if dim not in (1, -1) or not is_even:
        return None
    values: list[fx.Node | None] = [None] * count
    for user in split.users:
        if user.target is not operator.getitem:
            return None
        values[user.args[1]] = user
    return _Parts((count, n // count), 1, values)


def _turns(rows: fx.Node) -> _Parts | None:
    """Return the parts of a value [rows, columns] whose n readers each take every n-th
    column."""
    users, n = list(rows.users), shape_of(rows)[1]
    count = len(users)
    values: list[fx.Node | None] = [None] * count
    for user in users:
        if user.target is not aten.slice.Tensor or len(user.args) < 5:
            return None
        _, dim, start, end, step = user.args
        start, end = start or 0, n if end is None else end
        turns = dim in (1, -1) and end >= n and step == count and n % step == 0
        if not turns or not 0 <= start < step or values[start] is not None:
            return None
        values[start] = user
    return _Parts((n // count, count), 2, values) if count > 1 else None


# Backward


def _parts_of(node: fx.Node) -> _Parts | None:
    """Return the parts that a value [rows, columns] is joined from; None for others."""
    if node.target is aten.cat.default and len(shape_of(node)) == 2:
        pieces, dim = node.args[0], argument(node, "dim")
        widths = {shape_of(x)[1] for x in pieces}
        if dim in (1, -1) and len(widths) == 1 and len(pieces) > 1:
            return _Parts((len(pieces), widths.pop()), 1, pieces)
    if node.target is aten.add.Tensor and not node.kwargs:
        turns = dict(turn for turn in map(_turn, node.args) if turn is not None)
        if turns.keys() == {0, 1}:
            return _Parts((shape_of(node)[1] // 2, 2), 2, [turns[0], turns[1]])
    return None


def _turn(x: Any) -> tuple[int, fx.Node] | None:
    """Return (the first column, values) of a value that is zero except in every second
    column."""
    if not isinstance(x, fx.Node) or x.target is not aten.slice_scatter.default:
        return None
    if len(x.args) < 6 or len(shape_of(x)) != 2:
        return None
    zeros, values, dim, start, end, step = x.args
    n = shape_of(x)[1]
    start, end = start or 0, n if end is None else end
    fits = dim in (1, -1) and end >= n and step == 2 and n % 2 == 0
    return (start, values) if is_zeros(zeros) and fits and start in (0, 1) else None


def _split_operand(node: fx.Node, parts: _Parts, build: Builder) -> None:
    """Let products read gradients that were joined with the parts as a dim."""
    with build.before(node):
        pieces = [
            build.call(aten.unsqueeze.default, x, parts.dim) for x in parts.values
        ]
        stack = build.call(aten.cat.default, pieces, parts.dim)
    for user in list(node.users):
        if user.target not in (MM, OUTER):
            continue
        with build.before(user):
            args = [stack if x is node else x for x in user.args]
            if user.target is MM:
                experts, _, n = shape_of(args[1])
                shape = [experts, *parts.columns, n]
                args[1] = build.call(aten.reshape.default, args[1], shape)
            product = build.call(user.target, *args)
            if user.target is OUTER:
                product = build.call(aten.reshape.default, product, shape_of(user))
        build.replace(user, product)
    if node.users:
        with build.before(node):
            merged = build.call(aten.reshape.default, stack, shape_of(node))
        node.replace_all_uses_with(merged)
