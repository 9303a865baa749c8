"""Prices ops that exchange rows in one message (``shared_rows``).

In: ops of a problem that is built. Out: for each group of them a node that says in
which spec they share one exchange, and pays for it, or that they do not. Ops in that
spec pay nothing for their rows, others for their own. Never: lets gradients share an
exchange unless the ops that add them up have that spec too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fxpar.sharding import row_moves, shared_rows, shift_messages
from fxpar.sharding.factors import RowMoves
from fxpar.sharding.program import Op, Program
from fxpar.sharding.row_moves import Exchange
from fxpar.sharding.search.problem_builder import ProblemBuilder

aten = torch.ops.aten

# In place of a spec's number: each op exchanges rows by itself.
_UNGROUPED = -1


@dataclass(frozen=True)
class ExchangeGroup:
    """Is a group of ops that may exchange rows at once."""

    ops: tuple[int, ...]  # indices of the ops
    value: int  # the value that slices read, or that gradients are added up to
    sums: tuple[int, ...] = ()  # ops in between that add up gradients


def groups_of(program: Program) -> Iterator[ExchangeGroup]:
    """Yield slices of one tensor, and gradients that are added up, of as many rows
    each."""
    slices: dict[tuple[int, RowMoves], list[int]] = defaultdict(list)
    for op in program.ops:
        moves = _only_moves(op)
        if moves is not None and shared_rows.sliced_at(moves) is not None:
            slices[op.operands[0], shared_rows.slice_at(moves, 0)].append(op.index)
    for (value, _), ops in slices.items():
        if len(ops) > 1:
            yield ExchangeGroup(tuple(ops), value)
    inner = {op.index for op in program.ops if _is_sum(op) and _sum_of(program, op)}
    for op in program.ops:
        if _is_sum(op) and op.index not in inner:
            yield from _gradients(program, op)


def _only_moves(op: Op) -> RowMoves | None:
    return op.rule.moves[0] if len(op.rule.moves) == 1 else None


def _is_sum(op: Op) -> bool:
    """Return whether an op adds two tensors of one shape."""
    if op.target is not aten.add.Tensor or op.node.kwargs:
        return False
    return len(op.operands) == 2 and len(set(op.rule.tensors)) == 1


def _sum_of(program: Program, op: Op) -> Op | None:
    """Return the sum that is the only reader of an op's result, None if there is
    none."""
    (v,) = op.results
    if len(program.uses[v]) != 1 or v in program.returned:
        return None
    reader = program.ops[program.uses[v][0][0]]
    return reader if _is_sum(reader) else None


def _gradients(program: Program, root: Op) -> Iterator[ExchangeGroup]:
    """Yield groups of ops that put rows into zeros and whose results one tree of sums
    adds up."""
    puts: dict[RowMoves, list[int]] = defaultdict(list)
    sums, todo = [root.index], [root]
    while todo:
        for v in todo.pop().operands:
            if v not in program.producers:
                continue
            op = program.ops[program.producers[v][0]]
            if len(op.results) != 1 or _sum_of(program, op) is None:
                continue
            if _is_sum(op):
                sums.append(op.index)
                todo.append(op)
            elif _is_put_into_zeros(op):
                puts[shared_rows.put_from(op.rule.moves[0], 0)].append(op.index)
    for ops in puts.values():
        if len(ops) > 1:
            yield ExchangeGroup(tuple(ops), root.results[0], tuple(sums))


def _is_put_into_zeros(op: Op) -> bool:
    moves = _only_moves(op)
    if moves is None or shared_rows.put_at(moves) is None:
        return False
    zeros = op.node.args[0]
    is_full = getattr(zeros, "target", None) is aten.full.default
    return bool(is_full and zeros.args[1] == 0)


def price_together(build: ProblemBuilder, nodes: Sequence[int]) -> None:
    """Let groups of ops pay for rows they exchange at once. ``nodes``: the node of each
    op."""
    for group in groups_of(build.program):
        paid = [_paid(build, index, nodes[index]) for index in group.ops]
        shared = _shared(build, group, paid)
        if shared:
            _add(build, group, paid, shared, nodes)


@dataclass(frozen=True)
class _Paid:
    """Holds the price of rows that an op exchanges by itself, by strategy."""

    seconds: np.ndarray  # (K,) seconds
    specs: np.ndarray  # (K,) number of the spec of what it slices or puts rows into
    # (exchange, bytes of a row) where one is needed that may be shared, else None.
    exchanges: tuple[tuple[Exchange, float] | None, ...]


def _paid(build: ProblemBuilder, index: int, node: int) -> _Paid:
    op, options = build.program.ops[index], build.nodes[node]
    seconds = np.zeros(len(options.specs))
    exchanges: list[tuple[Exchange, float] | None] = [None] * len(seconds)
    for k, strategy in enumerate(options.strategies):
        for pair in shift_messages.exchanges(op, strategy, build.mesh):
            seconds[k] = row_moves.seconds(pair[0], build.mesh, pair[1])
            if seconds[k] and shared_rows.sharing_key(pair[0]) is not None:
                exchanges[k] = pair
    share = build.op_share(index)
    return _Paid(seconds * share, options.specs[:, 0], tuple(exchanges))


def _shared(
    build: ProblemBuilder, group: ExchangeGroup, paid: Sequence[_Paid]
) -> dict[int, float]:
    """Return spec -> seconds of one exchange for all, where that takes less."""
    pairs_of: dict[int, list[tuple[Exchange, float]]] = defaultdict(list)
    for op in paid:
        for spec, pair in zip(op.specs.tolist(), op.exchanges, strict=True):
            if pair is not None:
                pairs_of[spec].append(pair)
    shared = {}
    for spec, pairs in pairs_of.items():
        exchanges, row = [exchange for exchange, _ in pairs], pairs[0][1]
        if (
            len(pairs) > len(group.ops)
            or len(set(map(shared_rows.sharing_key, exchanges))) > 1
        ):
            continue  # strategies that differ elsewhere
        window = shared_rows.window_of(exchanges)
        if len(pairs) > 1 and shared_rows.is_faster(window, exchanges, build.mesh, row):
            seconds = row_moves.seconds(window, build.mesh, row)
            shared[spec] = seconds * build.op_share(group.ops[0])
    return shared


def _add(
    build: ProblemBuilder,
    group: ExchangeGroup,
    paid: Sequence[_Paid],
    shared: Mapping[int, float],
    nodes: Sequence[int],
) -> None:
    specs = np.array([_UNGROUPED, *shared])
    costs = np.array([0.0, *shared.values()])
    together = build.node("exchange", group.value, specs[:, None], costs)

    def edge(a: int, b: int, table: np.ndarray) -> None:
        key = ("exchange", table.shape, table.tobytes())
        build.connect(a, b, key, lambda: table)

    for index, op in zip(group.ops, paid, strict=True):
        node, may = nodes[index], np.isin(op.specs, specs)
        build.costs[node] = np.maximum(build.costs[node] - op.seconds * may, 0.0)
        pays = (specs[:, None] != op.specs[None, :]) & may
        edge(together, node, np.where(pays, op.seconds, 0.0))
    for index in group.sums:
        own = build.nodes[nodes[index]].specs
        same = (own[None, :, :] == specs[:, None, None]).all(axis=2)
        may = same | (specs == _UNGROUPED)[:, None]
        edge(together, nodes[index], np.where(may, 0.0, np.inf))
