"""local: slices of one tensor along a split dim are cut from rows exchanged once.

In: the local graph of one rank, communication as steps. Out: the same graph, changed in
place. A stencil reads ``x[2:]``, ``x[1:-1]``, ``x[:-2]``: each is an exchange of rows
by itself, and most of these are the same. Instead each rank gets the window of rows
that all of them reach, and cuts its own rows out of it. What it never does: share
where exchanges by themselves send less or are predicted to be faster.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.passes import collective_nodes
from fxpar.passes.builder import Builder
from fxpar.sharding import row_moves
from fxpar.sharding.cost.op import nbytes_of
from fxpar.sharding.factors import Reach, RowMoves, RowPiece
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.row_moves import Exchange

aten = torch.ops.aten


def share_exchanges(graph: fx.Graph, build: Builder, mesh: Mesh) -> None:
    """Rewrite a local graph in place; ``mesh``: with its links."""
    # What is cut of slices along one dim may be slices along another.
    while any(_share(build, alike, mesh) for alike in _slices(graph, mesh)):
        pass


def _slices(graph: fx.Graph, mesh: Mesh) -> list[list[fx.Node]]:
    """Steps that send rows of one tensor for slices of as many rows."""
    alike: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is not collective_nodes.move_rows:
            continue
        exchange = Exchange.parse(node.args[1])
        first = _first(exchange)
        if first is not None and row_moves.crossing(exchange, mesh)[0]:
            key = node.args[0], replace(exchange, moves=_from(exchange.moves, 0))
            alike.setdefault(key, []).append(node)
    return [nodes for nodes in alike.values() if len(nodes) > 1]


def _first(exchange: Exchange) -> int | None:
    """The first row of a slice, of which no row is left out; None of other moves."""
    moves = exchange.moves
    is_split = exchange.split_sources == exchange.split_targets == (True,)
    if not is_split or len(moves.pieces) != 1 or moves.reach or moves.turns > 1:
        return None
    (piece,) = moves.pieces
    return piece.first if moves == _from(moves, piece.first) else None


def _from(moves: RowMoves, first: int) -> RowMoves:
    """The slice of as many rows that begins at ``first``."""
    return replace(moves, pieces=(RowPiece(0, 0, moves.targets[0], first),))


def _share(build: Builder, nodes: Sequence[fx.Node], mesh: Mesh) -> bool:
    """Whether slices are now cut from one window of rows."""
    exchanges = [Exchange.parse(str(node.args[1])) for node in nodes]
    firsts = [exchange.moves.pieces[0].first for exchange in exchanges]
    low, moves, axes = min(firsts), exchanges[0].moves, exchanges[0].axes
    rows = RowPiece(0, 0, moves.sources[0])
    reach = Reach(1, first=low, span=max(firsts) - low + 1)
    window = Exchange(
        replace(moves, pieces=(rows,), reach=reach), axes, (True,), (True,)
    )
    x: Any = nodes[0].args[0]
    row = nbytes_of(x.meta["val"]) / max(1, x.meta["val"].shape[moves.dim])
    if not _pays(window, set(exchanges), mesh, row):
        return False
    with build.before(nodes[0]):
        read = collective_nodes.exchange_step(build, x, window)
        count = build.own_size(moves.targets[0], axes)
        slices = {
            first: _cut(build, read, moves.dim, first - low, count)
            for first in sorted(set(firsts))
        }
    for node, first in zip(nodes, firsts, strict=True):
        build.replace(node, slices[first])
    return True


def _pays(
    window: Exchange, exchanges: Collection[Exchange], mesh: Mesh, row: float
) -> bool:
    """Whether a window takes less than exchanges by themselves, of rows of so many
    bytes, and sends no more."""
    seconds = sum(row_moves.seconds(exchange, mesh, row) for exchange in exchanges)
    rows = sum(row_moves.crossing(exchange, mesh)[0] for exchange in exchanges)
    sends_more = row_moves.crossing(window, mesh)[0] > rows
    return not sends_more and row_moves.seconds(window, mesh, row) < seconds


def _cut(build: Builder, x: fx.Node, dim: int, start: int, rows: Any) -> fx.Node:
    end = build.compute(operator.add, rows, start)
    part = build.call(aten.slice.Tensor, x, dim, start, end)
    contiguous = torch.contiguous_format
    return build.call(aten.clone.default, part, memory_format=contiguous)
