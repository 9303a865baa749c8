"""Verb ``bucket``: collectives of one kind that do not wait for each other become one.

``bucket([rs, rs_1]) -> rs``: their operands are joined in one flat tensor, which one
collective moves, and its result is cut up again. Reductions join with equal op and
dtype, gathers with equal dtype; all along the same axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.fusion.kept_order import arrange
from fxpar.fusion.schedule_edit import Edit, refuse
from fxpar.fusion.verbs.fuse_nodes import path_outside
from fxpar.passes import collective_nodes
from fxpar.passes.builder import Builder
from fxpar.passes.lower import contiguous

aten = torch.ops.aten

Nodes = tuple[fx.Node, ...]


def bucket(edit: Edit, nodes: tuple[fx.Node, ...]) -> list[fx.Node]:
    """Gives the one collective."""
    nodes = tuple(sorted(set(nodes)))
    (first, *others), together = nodes, set(nodes)
    if first.target not in _JOIN:
        raise refuse("bucket", first, "is no all-reduce, reduce-scatter or all-gather")
    kind = _kind(first)
    for node in others:
        if _kind(node) != kind:
            raise refuse("bucket", node, f"is not of the kind of {first.name}")
        if not together.isdisjoint(node.all_input_nodes):
            raise refuse("bucket", node, "is computed from another of them")
    between = path_outside([first, *others])
    if between is not None:
        raise refuse("bucket", between, "waits for one of them, another for it")
    last = max(nodes)
    with edit.before(last) as build:
        whole, cut = _JOIN[first.target](build, nodes)
        pieces = [cut(node) for node in nodes]
    for node, piece in zip(nodes, pieces, strict=True):
        edit.swap(node, piece)
    arrange(edit.graph)
    return [whole]


def _kind(node: fx.Node) -> tuple[Any, ...]:
    """What must be equal: op of a reduction, axes, dtype and device."""
    value = node.meta["val"]
    op = [a for a in node.args[1:-1] if isinstance(a, str)]
    return node.target, *op, node.args[-1], value.dtype, value.device


def _reduced(build: Builder, nodes: Nodes) -> Any:
    """All-reduces: flat, one behind the other."""
    flat = [build.call(aten.reshape.default, n.args[0], [-1]) for n in nodes]
    joined = build.call(aten.cat.default, flat)
    whole = collective_nodes.step(
        build, collective_nodes.all_reduce, joined, *nodes[0].args[1:]
    )
    starts = _starts(nodes, nodes)
    return whole, _cutting(build, whole, 0, starts)


def _scattered(build: Builder, nodes: Nodes) -> Any:
    """Reduce-scatters: one row per rank, in it the parts that the rank shall have."""
    count = build.mesh.count(collective_nodes.axes_of(nodes[0]))
    flat = []
    for node in nodes:
        x: Any = node.args[0]
        dim, shape = _dim(node), list(x.meta["val"].shape)
        cut_up = [*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]]
        rows = build.call(aten.reshape.default, x, cut_up)
        rows = build.call(aten.movedim.int, rows, dim, 0)
        flat.append(build.call(aten.reshape.default, rows, [count, -1]))
    joined = build.call(aten.cat.default, flat, 1)
    args: Any = (0, *nodes[0].args[2:])
    whole = collective_nodes.step(build, collective_nodes.reduce_scatter, joined, *args)
    starts = _starts(nodes, nodes)
    return whole, _cutting(build, whole, 1, starts)


def _collected(build: Builder, nodes: Nodes) -> Any:
    """All-gathers: one row per rank, in it what the rank had."""
    count = build.mesh.count(collective_nodes.axes_of(nodes[0]))
    flat = [build.call(aten.reshape.default, n.args[0], [1, -1]) for n in nodes]
    joined = build.call(aten.cat.default, flat, 1)
    whole = collective_nodes.step(
        build,
        collective_nodes.all_gather,
        joined,
        0,
        collective_nodes.axes_of(nodes[0]),
    )
    starts = _starts(nodes, [n.all_input_nodes[0] for n in nodes])

    def cut(node: fx.Node) -> fx.Node:
        x: Any = node.args[0]
        dim, shape = _dim(node), list(x.meta["val"].shape)
        piece = _piece(build, whole, 1, starts[node], math.prod(shape))
        piece = build.call(aten.reshape.default, piece, [count, *shape])
        piece = build.call(aten.movedim.int, piece, 0, dim)
        shape = list(node.meta["val"].shape)
        return contiguous(build, build.call(aten.reshape.default, piece, shape))

    return whole, cut


def _cutting(
    build: Builder, whole: fx.Node, dim: int, starts: dict[fx.Node, int]
) -> Callable[[fx.Node], fx.Node]:
    """Takes a node's result out of the flat one of all, which lies along ``dim``."""

    def cut(node: fx.Node) -> fx.Node:
        shape = list(node.meta["val"].shape)
        piece = _piece(build, whole, dim, starts[node], math.prod(shape))
        return build.call(aten.reshape.default, piece, shape)

    return cut


def _dim(node: fx.Node) -> int:
    dim: Any = node.args[1]
    return dim


def _starts(nodes: Nodes, sized: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Where the part of each begins, one flat behind the other; parts are as large as
    the values of ``sized``."""
    out, start = {}, 0
    for node, like in zip(nodes, sized, strict=True):
        out[node] = start
        start += like.meta["val"].numel()
    return out


def _piece(build: Builder, x: fx.Node, dim: int, start: int, size: int) -> fx.Node:
    return build.call(aten.slice.Tensor, x, dim, start, start + size)


_JOIN: dict[Any, Any] = {
    collective_nodes.all_reduce: _reduced,
    collective_nodes.reduce_scatter: _scattered,
    collective_nodes.all_gather: _collected,
}
