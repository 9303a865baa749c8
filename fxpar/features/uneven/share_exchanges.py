"""Cuts several slices of one tensor along a split dim from rows exchanged once.

In: the local graph of one rank, communication as steps. Out: the same graph, changed in
place. A stencil reads ``x[2:]``, ``x[1:-1]``, ``x[:-2]``: each is an exchange of rows
by itself, and most of the rows are the same. Instead each rank gets the window of rows
that covers all of them, and slices its own rows out of it. Their gradients are put into
zeros, each by an exchange, and added up: instead each rank adds up its own in such a
window, which is sent back at once. Never: exchanges are shared where separate ones send
less or are predicted to be faster.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder, is_zeros
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.sharding import row_moves
from fxpar.sharding.cost.op import nbytes_of
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.ops.reads import copied_rows
from fxpar.sharding.row_moves import Exchange

aten = torch.ops.aten


def share_exchanges(graph: fx.Graph, state: JointState) -> None:
    """Cut slices of one tensor from rows that are exchanged once, where that pays."""
    build, mesh = state.build, state.decided.mesh
    if mesh.size == 1 or state.open:
        return
    # Slices along one dim may be sliced again along another, so repeat.
    while any(_share(build, key, mesh) for key in _slices(graph, mesh)):
        pass
    for node in list(graph.nodes):
        if _is_sum(node) and not _is_read_by_one_sum(node):
            _share_sum(build, node, mesh)
    graph.eliminate_dead_code()


def _exchange(node: fx.Node) -> Exchange:
    return Exchange.parse(str(node.args[1]))


def _slices(graph: fx.Graph, mesh: Mesh) -> list[list[fx.Node]]:
    """Return groups of steps that send rows of one tensor for slices of equal size."""
    slices: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is not collective_nodes.move_rows:
            continue
        exchange = _exchange(node)
        key = row_moves.sharing_key(exchange)
        is_slice = key is not None and len(exchange.moves.sources) == 1
        if is_slice and row_moves.crossing(exchange, mesh)[0]:
            slices.setdefault((node.args[0], key), []).append(node)
    return [nodes for nodes in slices.values() if len(nodes) > 1]


def _row(x: fx.Node, dim: int) -> float:
    """Return the bytes of a row of a dim."""
    value = x.meta["val"]
    return nbytes_of(value) / max(1, value.shape[dim])


def _share(build: Builder, nodes: Sequence[fx.Node], mesh: Mesh) -> bool:
    """Cut slices from one window of rows if that pays; return whether it did."""
    exchanges = [_exchange(node) for node in nodes]
    window, x = row_moves.window_of(exchanges), nodes[0].args[0]
    assert isinstance(x, fx.Node)
    moves, firsts = exchanges[0].moves, row_moves.firsts_of(exchanges)
    if not row_moves.is_faster(window, set(exchanges), mesh, _row(x, moves.dim)):
        return False
    with build.before(nodes[0]):
        read = collective_nodes.exchange_step(build, x, window)
        count = build.own_size(moves.targets[0], window.axes)
        slices = {}
        for first in sorted(set(firsts)):
            start = first - min(firsts)
            end = build.compute(operator.add, count, start)
            slices[first] = copied_rows(build, read, moves.dim, start, end)
    for node, first in zip(nodes, firsts, strict=True):
        build.replace(node, slices[first])
    return True


def _is_sum(node: fx.Node) -> bool:
    """Return whether a node adds two tensors of one shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    read = [x.meta["val"] for x in node.all_input_nodes]
    if len(read) != 2 or not all(isinstance(x, torch.Tensor) for x in read):
        return False
    return len({(x.shape, x.dtype) for x in (node.meta["val"], *read)}) == 1


def _is_read_by_one_sum(node: fx.Node) -> bool:
    """Return whether a node's only reader is one sum."""
    return len(node.users) == 1 and all(map(_is_sum, node.users))


def _summands(node: fx.Node) -> list[fx.Node]:
    """Return the summands of a sum of sums that nothing else reads."""
    out: list[fx.Node] = []
    for x in filter(_is_read_by_one_sum, node.all_input_nodes):
        out += _summands(x) if _is_sum(x) else [x]
    return out


def _share_sum(build: Builder, root: fx.Node, mesh: Mesh) -> None:
    """Put the rows that summands put into zeros into one window, where it pays."""
    puts: dict[Exchange, list[fx.Node]] = {}
    for node in _summands(root):
        if node.target is not collective_nodes.move_rows or _rows_put(node) is None:
            continue
        exchange = _exchange(node)
        key = row_moves.sharing_key(exchange)
        if key is not None and row_moves.crossing(exchange, mesh)[0]:
            puts.setdefault(key, []).append(node)
    for key, nodes in puts.items():
        exchanges, dim = [_exchange(node) for node in nodes], key.moves.dim
        window = row_moves.window_of(exchanges)
        if not row_moves.is_faster(window, exchanges, mesh, _row(nodes[0], dim)):
            continue
        *others, last = sorted(nodes)
        with build.before(last):
            total = _put_at_once(build, nodes, window)
        for node in others:
            ((add, _),) = node.users.items()
            (rest,) = (x for x in add.all_input_nodes if x is not node)
            build.replace(add, rest)
        build.replace(last, total)


def _rows_put(node: fx.Node) -> fx.Node | None:
    """Return the rows that a step puts into zeros; None for any other step."""
    join: Any = node.args[0]
    if join.target is not aten.cat.default:
        return None
    zeros, *rows = join.args[0]
    is_zero = is_zeros(zeros)
    return rows[0] if is_zero and len(rows) == 1 else None


def _put_at_once(build: Builder, nodes: Sequence[fx.Node], window: Exchange) -> fx.Node:
    """Return the sum of the rows that steps put into zeros, by one exchange of the
    window in which they are added up."""
    firsts = row_moves.firsts_of([_exchange(node) for node in nodes])
    total: fx.Node | None = None
    for node, first in zip(nodes, firsts, strict=True):
        rows = _rows_put(node)
        assert rows is not None
        ends = first - min(firsts), max(firsts) - first
        part = build.pad_dim(rows, window.moves.dim, *ends)
        total = part if total is None else build.call(aten.add.Tensor, total, part)
    assert total is not None
    return collective_nodes.exchange_step(build, total, window)
