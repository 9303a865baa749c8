"""Makes the local form of ops that move rows of a split dim (``Rule.moves``).

Operands are joined, ranks exchange rows in one step, and the received rows are split
into the results; several dims are done one after the other. Rows of a dim that no axis
splits are moved in the same way. In: a local call. Out: its results, each contiguous.
Never: rows of a symbolic size are moved (``Inexpressible``).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpar._torch.symbols import Inexpressible
from fxpar.graph import collective_nodes
from fxpar.sharding import shard_sizes
from fxpar.sharding.factors import RowMoves
from fxpar.sharding.ops.local_call import LocalCall
from fxpar.sharding.row_moves import Exchange, turn_of
from fxpar.sharding.shift_messages import by_permutes, exchange_of

aten = torch.ops.aten


def crosses(call: LocalCall) -> bool:
    """Return whether an op moves rows between ranks by exchanges, not by permutes
    (``halos``)."""
    exchanges = (_exchange(call, moves) for moves in call.rule.moves)
    target, mesh = call.node.target, call.build.mesh
    return any(x.axes and not by_permutes(target, x, mesh) for x in exchanges)


def local_moves(call: LocalCall, operands: Sequence[fx.Node]) -> Any:
    """Return the results of a call, a tuple if there are several."""
    values = list(operands)
    for moves in call.rule.moves:
        if not all(isinstance(s[moves.dim], int) for s in call.shapes):
            raise Inexpressible("rows are moved along a dim whose size is dynamic")
        values = _moved(call, values, _exchange(call, moves))
    several = not isinstance(call.node.meta["val"], torch.Tensor)
    return tuple(values) if several else values[0]


def _exchange(call: LocalCall, moves: RowMoves) -> Exchange:
    return exchange_of(moves, call.operands, call.results, call.build.mesh)


def _moved(
    call: LocalCall, operands: Sequence[fx.Node], exchange: Exchange
) -> list[fx.Node]:
    build, moves, dim = call.build, exchange.moves, exchange.moves.dim
    x = operands[0]
    if len(operands) > 1:
        x = build.call(aten.cat.default, list(operands), dim)
    moved = collective_nodes.exchange_step(build, x, exchange)
    if moves.turns > 1:
        return [_repeated(call, moved, exchange)]
    if len(moves.targets) == 1:
        return [moved]
    out, start = [], 0
    for n, split in zip(moves.targets, exchange.split_targets, strict=True):
        rows = build.own_size(n, exchange.axes) if split else n
        end = build.compute(operator.add, start, rows)
        part = build.call(aten.slice.Tensor, moved, dim, start, end)
        contiguous = torch.contiguous_format
        out.append(build.call(aten.clone.default, part, memory_format=contiguous))
        start = end
    return out


def _repeated(call: LocalCall, x: fx.Node, exchange: Exchange) -> fx.Node:
    """Return this rank's rows of a result that repeats, from its first turn ``x``."""
    build, dim, (n,) = call.build, exchange.moves.dim, exchange.moves.targets
    (split,) = exchange.split_targets
    axes = exchange.axes if split else ()
    turns = -(-shard_sizes.largest(n, build.mesh, axes) // turn_of(exchange.moves))
    if turns == 1:
        return x
    repeats = [turns if d == dim else 1 for d in range(x.meta["val"].dim())]
    x = build.call(aten.repeat.default, x, repeats)
    rows = build.own_size(n, axes)
    x = build.call(aten.slice.Tensor, x, dim, 0, rows)
    return build.call(aten.clone.default, x, memory_format=torch.contiguous_format)
