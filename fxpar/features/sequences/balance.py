"""Applies verb ``balance``: queries of causal attention change places, so that all
ranks have equal work.

In: an Edit and an attention with a causal mask by index, its queries split along the
sequence. Out: a balanced attention in its place. Of such queries the first rank's see
few keys, the last rank's all. Each rank keeps the first half of its queries and swaps
the second with its mirror, the rank as far from the other end; results are swapped
back. In a backward, operands that belong to queries are swapped, and their gradients
swapped back. Keys are whole, and never change places. This is the head-tail order of
Llama 3 (arXiv 2407.21783, section 3.3.2), for attention alone.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpar.features.sequences import causal_attention as _ops  # noqa: F401  (registers ops)
from fxpar.features.sequences.merge_attention import items
from fxpar.fusion.node_legality import arrange
from fxpar.fusion.schedule import Line, Schedule
from fxpar.fusion.schedule_edit import Edit, refuse
from fxpar.fusion.verbs.ring import of_rank
from fxpar.graph.builder import Builder
from fxpar.passes.lower import restrided
from fxpar.sharding import rank_ints
from fxpar.sharding.cost.program_kernels import obstacle
from fxpar.sharding.mesh import Mesh

aten = torch.ops.aten
ours = torch.ops.fxpar

# [batch, heads, sequence, features]
_SEQUENCE = 2

_FORWARD = ours.causal_attention.default
_BACKWARD = ours.causal_attention_backward.default


def balances_of(graph: fx.Graph, mesh: Mesh) -> Schedule:
    """Return a line for each attention of a local graph that can be balanced."""
    lines = [
        Line("balance", (node.name,))
        for node in graph.nodes
        if node.target in (_FORWARD, _BACKWARD) and _obstacle(node, mesh) is None
    ]
    return Schedule(tuple(lines))


def balance(edit: Edit, node: fx.Node) -> list[fx.Node]:
    """Apply ``balance(attention)``. Return its output, or the gradient of queries."""
    if node.target not in (_FORWARD, _BACKWARD):
        raise refuse("balance", node, "is not attention with a causal mask by position")
    why = _obstacle(node, edit.mesh)
    if why is not None:
        raise refuse("balance", node, why)
    rewrite = _balanced if node.target is _FORWARD else _balanced_backward
    with edit.before(node) as build:
        results = rewrite(build, node)
    users = list(node.users)
    for user in users:
        user.replace_all_uses_with(results[user.args[1]])
    edit.erase(users)
    arrange(edit.graph)
    return [results[0]]


def _obstacle(node: fx.Node, mesh: Mesh) -> str | None:
    """Return why an attention cannot be balanced; None if it can."""
    queries, keys = _rows(node)
    ahead: Any = _ahead(node)
    if not isinstance(ahead, fx.Node) or ahead.target is not rank_ints.offset:
        return (
            "has queries that begin at the same position on all ranks, or not at "
            "equal steps"
        )
    _, axes, stride, *begin = ahead.args
    count = mesh.count(axes)
    if stride != queries or any(begin):
        return "has queries that are not in order"
    why = obstacle(queries, keys, count)
    if why is not None:
        return why
    if any(user.target is not operator.getitem for user in node.users):
        return "gives a tuple that is read whole"
    return None


def _rows(node: fx.Node) -> tuple[int, int]:
    """Return the numbers of queries and of keys of a call."""
    first = int(node.target is _BACKWARD)
    query, key = (x.meta["val"] for x in node.args[first : first + 2])
    return query.shape[_SEQUENCE], key.shape[_SEQUENCE]


def _ahead(node: fx.Node) -> Any:
    return node.args[-2]


def mirrored(build: Builder, x: fx.Node, axes: Sequence[str]) -> fx.Node:
    """Return ``x`` of the mirror rank: as far from the other end of those along
    axes."""
    last = build.mesh.count(axes) - 1
    return of_rank(build, x, axes, lambda i: last - i)


class _Halves:
    """Splits and joins tensors with one row for each query: the half that a rank keeps,
    and the half that it swaps."""

    def __init__(self, build: Builder, node: fx.Node) -> None:
        self.build, self.rows = build, _rows(node)[0]
        self.axes = tuple(_ahead(node).args[1])

    def places(self) -> tuple[Any, Any, int]:
        """Return the index of the first query in each half that a rank attends: its own
        first half, and the second half of its mirror rank; and of the second half of
        the keys."""
        half, count = self.rows // 2, self.build.mesh.count(self.axes)
        near = self.build.offset(self.axes, 2 * half)
        far = self.build.offset(self.axes, -2 * half, (2 * count - 1) * half)
        return near, far, count * half

    def swapped(self, x: fx.Node) -> fx.Node:
        """Return ``x`` of the mirror rank."""
        return mirrored(self.build, x, self.axes)

    def split(self, x: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return the rows that a rank attends: its own first half, and the mirror's
        second."""
        slice_, half = aten.slice.Tensor, self.rows // 2
        near = self.build.call(slice_, x, _SEQUENCE, 0, half)
        far = self.build.call(slice_, x, _SEQUENCE, half, self.rows)
        return near, self.swapped(far)

    def joined(self, near: fx.Node, far: fx.Node, like: torch.Tensor) -> fx.Node:
        """Return the rows in their first order, laid out as ``like``: inverse of
        ``split``."""
        rows = [near, self.swapped(far)]
        return restrided(self.build, self.build.call(aten.cat.default, rows, 2), like)


def _balanced(build: Builder, node: fx.Node) -> dict[int, fx.Node]:
    """Return output and log-sum-exp, by position."""
    query, key, value, _, scale = node.args
    halves, whole = _Halves(build, node), node.meta["val"]
    near, far = halves.split(query)
    op = ours.balanced_causal_attention.default
    arguments = near, key, value, far, *halves.places(), scale
    outputs = build.call(op, *arguments)
    near_out, near_lse, far_out, far_lse = items(build, outputs)
    return {
        0: halves.joined(near_out, far_out, whole[0]),
        1: halves.joined(near_lse, far_lse, whole[1]),
    }


def _balanced_backward(build: Builder, node: fx.Node) -> dict[int, fx.Node]:
    """Return gradients of queries, keys and values, by position."""
    grad, query, key, value, out, lse, _, scale = node.args
    halves, whole = _Halves(build, node), node.meta["val"]
    sets = [halves.split(x) for x in (grad, query, out, lse)]
    near, far = zip(*sets, strict=True)
    op = ours.balanced_causal_attention_backward.default
    arguments = (*near[:2], key, value, *near[2:], *far, *halves.places(), scale)
    near_dq, far_dq, dk, dv = items(build, build.call(op, *arguments))
    return {0: halves.joined(near_dq, far_dq, whole[0]), 1: dk, 2: dv}
