"""Lookups and cuts along a split dim whose operand is gathered, as that takes less.

In: a strategy per op. A lookup in a dim that is split gives each rank the rows that it
has, which are summed; of more rows than there are, to gather what is looked up takes
less time. So it does of rows that are cut out (``select``, ``unbind``, short slices),
if those that are cut out of one tensor are most of it. Out: the strategies, and the
spec each value settles in, once reductions are placed, with such ops reading whole dims
where the whole program then reshards for less time. Lookups in what is computed from
parameters alone are left as they lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Op, Program
from fxpar.sharding.propagate.at_rest import derived
from fxpar.sharding.reshard.route import connect, price
from fxpar.sharding.rules.op_facts import op_facts_of
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy, operand_spec, result_spec

# Strategies, and the spec each value settles in.
Settled = tuple[list[Strategy], list[Spec]]


def gather_lookups(
    program: Program,
    strategies: Sequence[Strategy],
    settle: Callable[[Sequence[Strategy]], Settled],
    mesh: Mesh,
) -> Settled:
    """What ``settle`` makes of the strategies, or of those with lookups and cuts that
    gather. Lookups that are alike are decided together, and all cuts of one tensor."""
    settled = settle(strategies)
    alike: dict[tuple[object, ...], list[Op]] = {}
    for op in _lookups(program, strategies, mesh):
        key = (op.target, op.rule, strategies[op.index])
        alike.setdefault(key, []).append(op)
    alike |= _cuts(program, strategies)
    least = _seconds(program, settled, mesh) if alike else 0.0
    chosen = list(strategies)
    for ops in alike.values():
        trial = list(chosen)
        for op in ops:
            trial[op.index] = _whole(op, trial[op.index])
        other = settle(trial)
        seconds = _seconds(program, other, mesh)
        if seconds < least:
            chosen, settled, least = trial, other, seconds
    return settled


def _lookups(program: Program, strategies: Sequence[Strategy], mesh: Mesh) -> list[Op]:
    """Those that take longer to reduce than to gather, each by itself."""
    parameters = derived(program, _parameters(program))
    return [
        op
        for op in program.ops
        if op_facts_of(op.target).gathers
        and op.operands[0] not in parameters
        and strategies[op.index] != _whole(op, strategies[op.index])
        and _takes_longer(program, op, strategies[op.index], mesh)
    ]


def is_cut(op: Op) -> bool:
    """Whether an op cuts rows out of a dim, of which each rank gives those it has."""
    facts = op_facts_of(op.target)
    has_rows = len(op.operands) == 1 and bool(op.rule.contracted)
    return has_rows and (facts.view or facts.moves)


def _cuts(
    program: Program, strategies: Sequence[Strategy]
) -> dict[tuple[object, ...], list[Op]]:
    """By operand, the cuts whose sums send more than it."""
    by_operand: dict[tuple[object, ...], list[Op]] = {}
    for op in program.ops:
        if is_cut(op) and strategies[op.index] != _whole(op, strategies[op.index]):
            by_operand.setdefault(("cuts", op.operands[0]), []).append(op)
    return {
        key: ops
        for key, ops in by_operand.items()
        if 2
        * sum(
            program.values[v].numel for op in ops for v in op.results if program.uses[v]
        )
        >= program.values[ops[0].operands[0]].numel
    }


def _parameters(program: Program) -> set[int]:
    pairs = zip(program.signature.inputs, program.inputs, strict=True)
    return {
        v for declared, v in pairs if v is not None and declared.kind == "parameter"
    }


def _whole(op: Op, strategy: Strategy) -> Strategy:
    """The strategy with the dims whole that are looked up."""
    sums = op.rule.contracted_by[0]
    factors = tuple((f, axes) for f, axes in strategy.factors if f not in sums)
    return Strategy(factors, strategy.passes)


def _takes_longer(program: Program, op: Op, strategy: Strategy, mesh: Mesh) -> bool:
    """Whether its sum sends more than its operand; a sum of less may go in one message
    with others, so that latency alone says nothing."""
    operand, result = (program.values[v].shape for v in (op.operands[0], op.results[0]))
    if math.prod(result) <= math.prod(operand):
        return False
    whole = _whole(op, strategy)

    def seconds(v: int, source: Spec, target: Spec) -> float:
        value = program.values[v]
        return price(source, target, mesh, value.shape, value.dtype.itemsize)

    before, after = (operand_spec(op.rule, s, 0) for s in (strategy, whole))
    made_spec, reduced = (result_spec(op.rule, s, 0) for s in (strategy, whole))
    gather = seconds(op.operands[0], before, after)
    return gather < seconds(op.results[0], made_spec, reduced)


def _seconds(program: Program, settled: Settled, mesh: Mesh) -> float:
    """How long all reshards take."""
    total = 0.0
    for reshard in connect(program, *settled, mesh).reshards:
        value = program.values[reshard.value]
        ends = reshard.source, reshard.target
        total += price(*ends, mesh, value.shape, value.dtype.itemsize)
    return total
