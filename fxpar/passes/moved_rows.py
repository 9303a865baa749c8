"""Exchanges rows between ranks: slices them out, sends them, and places them.

In: an ``Exchange``, and the ranks' shards of all operands, joined: tensors, or nodes of
a graph. ``call`` runs an op on tensors, or appends it to a graph, so that the emulation
of all ranks (``exchanged``) and one rank's graph (``bound_exchange``) share the code.
Out: the ranks' shards of all results, joined. Never decides which rows move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.graph.builder import Builder
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.row_moves import Exchange, Run, crossing, own_rows, runs

aten = torch.ops.aten

Call = Callable[..., Any]

# (rows for all members along dim 0, number received from each, number sent to each) ->
# the received rows.
Send = Callable[[fx.Node, list[int], list[int]], fx.Node]


def run_op(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op; the ``call`` for tensors."""
    return op(*args, **kwargs)


def exchanged(
    call: Call, members: Sequence[Any], exchange: Exchange, mesh: Mesh
) -> list[Any]:
    """Return each member's rows after the exchange, given the rows of all of them."""
    dim, table = exchange.moves.dim, runs(exchange, mesh)
    out = []
    for j, rank in enumerate(mesh.group(0, exchange.axes)):
        blocks = [
            (run, _taken(call, x, dim, run))
            for x, gives in zip(members, table, strict=True)
            for run in gives[j]
        ]
        rows = own_rows(exchange, mesh, rank)
        out.append(_put(call, members[j], exchange, rows, blocks))
    return out


def is_local(exchange: Exchange, mesh: Mesh) -> bool:
    """Return whether no row changes ranks and all ranks do the same."""
    if crossing(exchange, mesh)[0]:
        return False
    table, group = runs(exchange, mesh), mesh.group(0, exchange.axes)
    own = {gives[i] for i, gives in enumerate(table)}
    return len(own) == 1 == len({own_rows(exchange, mesh, rank) for rank in group})


def bound_exchange(
    build: Builder, x: fx.Node, exchange: Exchange, mesh: Mesh, rank: int, send: Send
) -> fx.Node:
    """Return one rank's rows after the exchange. A rank that sends nothing sends an
    empty slice of ``x``, and an empty receipt is still joined into the result: else
    dead code removal would drop the collective on this rank and others would wait."""
    call, dim, table = build.call, exchange.moves.dim, runs(exchange, mesh)
    me = mesh.group(rank, exchange.axes).index(rank)
    others = [i for i in range(len(table)) if i != me]
    blocks, nothing = [(run, _taken(call, x, dim, run)) for run in table[me][me]], []
    if crossing(exchange, mesh)[0]:
        sent = [_taken(call, x, dim, run) for j in others for run in table[me][j]]
        rows = _joined(call, sent or [_slice(call, x, dim, 0, 0)], dim)
        gets, gives = (
            [
                sum(run.count for run in there) if i != me else 0
                for i, there in enumerate(ends)
            ]
            for ends in ([row[me] for row in table], table[me])
        )
        arrived = send(_to_front(call, rows, dim), gets, gives)
        arrived, start = _to_front(call, arrived, dim, back=True), 0
        for run in (run for i in others for run in table[i][me]):
            block = _slice(call, arrived, dim, start, start + run.count)
            blocks.append((run, block))
            start += run.count
        nothing = [arrived] * (start == 0)
    return _put(call, x, exchange, own_rows(exchange, mesh, rank), blocks, nothing)


def _value(x: Any) -> torch.Tensor:
    return x.meta["val"] if isinstance(x, fx.Node) else x


def _slice(call: Call, x: Any, dim: int, start: int, end: int, step: int = 1) -> Any:
    if (start, end, step) == (0, _value(x).shape[dim], 1):
        return x
    return call(aten.slice.Tensor, x, dim, start, end, step)


def _taken(call: Call, x: Any, dim: int, run: Run) -> Any:
    """Return the rows of a run."""
    last = run.first + run.step * (run.count - 1)
    low, high = sorted((run.first, last))
    x = _slice(call, x, dim, low, high + 1, abs(run.step) if run.count > 1 else 1)
    backwards = run.step < 0 and run.count > 1
    return call(aten.flip.default, x, [dim]) if backwards else x


def _joined(call: Call, parts: Sequence[Any], dim: int) -> Any:
    return parts[0] if len(parts) == 1 else call(aten.cat.default, list(parts), dim)


def _to_front(call: Call, x: Any, dim: int, *, back: bool = False) -> Any:
    """Return ``x`` with ``dim`` moved to the front, contiguous; or moved ``back``."""
    if dim == 0:
        return x if back else _contiguous(call, x)
    others = [d for d in range(_value(x).dim()) if d != dim]
    order = [dim, *others]
    if back:
        return call(
            aten.permute.default, x, [order.index(d) for d in range(len(order))]
        )
    return _contiguous(call, call(aten.permute.default, x, order))


def _contiguous(call: Call, x: Any) -> Any:
    if _value(x).is_contiguous():
        return x
    return call(aten.clone.default, x, memory_format=torch.contiguous_format)


def _padded(call: Call, x: Any, exchange: Exchange, before: int, after: int) -> Any:
    """Return ``x`` with ``before`` and ``after`` rows of the constant around it. The
    sizes of its other dims may differ from rank to rank."""
    if not before and not after:
        return x
    dims_after = _value(x).dim() - 1 - exchange.moves.dim
    amounts = [0, 0] * dims_after + [before, after]
    return call(aten.constant_pad_nd.default, x, amounts, exchange.moves.fill)


def _put(
    call: Call,
    x: Any,
    exchange: Exchange,
    rows: int,
    blocks: Sequence[tuple[Run, Any]],
    nothing: Sequence[Any] = (),
) -> Any:
    """Return ``rows`` rows with the blocks in their places and the constant elsewhere.
    ``x`` has the sizes of the other dims; ``nothing`` are values without rows."""
    dim = exchange.moves.dim
    if blocks and exchange.moves.adds:
        return _added(call, exchange, rows, blocks, nothing)
    if not blocks or any(run.stride > 1 < run.count for run, _ in blocks):
        out = _padded(call, _slice(call, x, dim, 0, 0), exchange, 0, rows)
        for run, block in blocks:
            end = run.at + run.stride * (run.count - 1) + 1
            places = dim, run.at, end, run.stride
            out = call(aten.slice_scatter.default, out, block, *places)
        return _contiguous(call, _joined(call, [out, *nothing], dim))
    parts, end = [], 0
    ordered = sorted(blocks, key=lambda placed: placed[0].at)
    for i, (run, block) in enumerate(ordered, 1):
        after = rows - run.at - run.count if i == len(ordered) else 0
        parts.append(_padded(call, block, exchange, run.at - end, after))
        end = run.at + run.count
    parts += nothing
    if len(parts) > 1:
        return _contiguous(call, _joined(call, parts, dim))
    return call(aten.clone.default, parts[0], memory_format=torch.contiguous_format)


def _added(
    call: Call,
    exchange: Exchange,
    rows: int,
    blocks: Sequence[tuple[Run, Any]],
    nothing: Sequence[Any],
) -> Any:
    """Return ``rows`` rows, with the blocks that overlap in a place added up there."""
    total = None
    for run, block in blocks:
        after = rows - run.at - run.count
        part = _padded(call, block, exchange, run.at, after)
        total = part if total is None else call(aten.add.Tensor, total, part)
    return _contiguous(call, _joined(call, [total, *nothing], exchange.moves.dim))
