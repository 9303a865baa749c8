"""The local form of ``fxpar::dot``: views around one mm or bmm.

Factors of the equation fall into four classes: in both operands and the result (batch),
in the left one (m), in the right one (n), in both operands only (k). Runs of one class
are merged by views where they stand together, so that no data moves that the program
before normalizing did not move.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpar.passes.builder import Builder

aten = torch.ops.aten


def local_dot(call: Any, lhs: fx.Node, rhs: fx.Node, equation: str) -> fx.Node:
    """Emit ``equation`` on local operands."""
    return emit_dot(call.build, lhs, rhs, equation)


def emit_dot(build: Builder, lhs: fx.Node, rhs: fx.Node, equation: str) -> fx.Node:
    """Append the views and the product; returns the result in the equation's order."""
    operands, _, result = equation.partition("->")
    left, right = (part.split() for part in operands.split(","))
    out = result.split()
    size = dict(zip(left, lhs.meta["val"].shape, strict=True))
    size.update(zip(right, rhs.meta["val"].shape, strict=True))
    batch = [f for f in left if f in right and f in out]
    k = [f for f in left if f in right and f not in out]
    m = [f for f in left if f not in right]
    n = [f for f in right if f not in left]
    a = _merge(build, lhs, left, [batch, m, k] if batch else [m, k], size)
    b = _merge(build, rhs, right, [batch, k, n] if batch else [k, n], size)
    target = aten.bmm.default if batch else aten.mm.default
    product = build.call(target, a, b)
    have = [*batch, *m, *n]
    return reorder(build, product, have, out, size)


def reorder(
    build: Builder,
    node: fx.Node,
    have: Sequence[str],
    want: Sequence[str],
    size: dict[str, int],
) -> fx.Node:
    """View a product as its factors ``have`` and permute them to ``want``."""
    shape = [size[f] for f in have]
    if list(node.meta["val"].shape) != shape:
        node = build.call(aten.reshape.default, node, shape)
    if list(have) != list(want):
        node = build.call(aten.permute.default, node, [have.index(f) for f in want])
    return node


def _merge(
    build: Builder,
    node: fx.Node,
    words: list[str],
    groups: list[list[str]],
    size: dict[str, int],
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
    shape = [math.prod(size[f] for f in run) for run in runs]
    if list(node.meta["val"].shape) != shape:
        node = build.call(aten.reshape.default, node, shape)
    order = [runs.index(group) for group in filled]
    if order != list(range(len(order))):
        node = build.call(aten.permute.default, node, order)
    if len(filled) < len(groups):
        full = [math.prod(size[f] for f in group) for group in groups]
        node = build.call(aten.reshape.default, node, full)
    return node
