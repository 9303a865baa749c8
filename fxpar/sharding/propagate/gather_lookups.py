"""Gathers operands of ops along a split dim where this saves time: lookups, cuts, and
products that sum over few rows.

In: a strategy per op. A lookup in a split dim takes on each rank the rows it has, and
sums the results; if more rows are looked up than there are, gathering the table takes
less time. The same holds of cuts (``select``, ``unbind``, short slices) that together
take most of one tensor, and of products far larger than their operands. Out: the
strategies, and the spec each value settles in, once reductions are placed, with such
ops reading whole dims where the whole program then takes less time. Never: changes
lookups in values computed from parameters alone, nor products along axes that split the
batch, microbatches or experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxpar.sharding.cost import program_kernels
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import Op, Program
from fxpar.sharding.propagate.at_rest import derived
from fxpar.sharding.propagate.conventions import TIME
from fxpar.sharding.propagate.propagation import State
from fxpar.sharding.reshard.route import connect, price, reshard_seconds
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy, operand_spec, result_spec

# Strategies, and the spec each value settles in.
Settled = tuple[list[Strategy], list[Spec]]


def gather_lookups(
    program: Program,
    strategies: Sequence[Strategy],
    settle: Callable[[Sequence[Strategy]], Settled],
    state: State,
    mesh: Mesh,
    hardware: Hardware,
) -> Settled:
    """Return ``settle`` of the strategies, with lookups, cuts and products changed to
    read whole dims where that takes less time. Equal ops, and all cuts of one tensor,
    are decided together. ``hardware``: prices the compute that ranks then repeat."""
    settled = settle(strategies)
    groups: dict[tuple[object, ...], list[Op]] = {}
    products = _products(program, strategies, state, mesh, hardware)
    of_products = [program.ops[i] for i in products]
    for op in (*_lookups(program, strategies, mesh), *of_products):
        key = (op.target, op.rule, strategies[op.index])
        groups.setdefault(key, []).append(op)
    groups |= _cuts(program, strategies)
    least = _seconds(program, settled, mesh) if groups else 0.0
    chosen = list(strategies)
    for ops in groups.values():
        trial = list(chosen)
        for op in ops:
            trial[op.index] = _whole(op, trial[op.index])
        other = settle(trial)
        seconds = _seconds(program, other, mesh)
        seconds += sum(products.get(op.index, 0.0) for op in ops)
        if seconds < least:
            chosen, settled = trial, other
            least = _seconds(program, other, mesh)
    return settled


def _lookups(program: Program, strategies: Sequence[Strategy], mesh: Mesh) -> list[Op]:
    """Return the lookups that, each taken alone, take longer to reduce than to
    gather."""
    parameters = derived(program, _parameters(program))
    return [
        op
        for op in program.ops
        if op_facts_of(op.target).gathers
        and op.operands[0] not in parameters
        and _has_more_elements(program, op, op.operands[:1])
        and strategies[op.index] != _whole(op, strategies[op.index])
        and _is_slower(program, op, strategies[op.index], mesh)
    ]


def _products(
    program: Program,
    strategies: Sequence[Strategy],
    state: State,
    mesh: Mesh,
    hardware: Hardware,
) -> dict[int, float]:
    """Return the products whose sum, each taken alone, takes longer to reduce than
    their operands to gather: op index to the additional seconds of compute on each
    rank."""
    products = {}
    for op in program.ops:
        strategy = strategies[op.index]
        is_product = (len(op.operands), len(op.results)) == (2, 1)
        if not is_product or op_facts_of(op.target).gathers:
            continue
        whole = _whole(op, strategy)
        if whole == strategy or not _has_more_elements(program, op, op.operands):
            continue
        contracted = {*strategy.factors} - {*whole.factors}
        axes = [axis for _, split in contracted for axis in split]
        origins = [state.origins[v].get(axis) for v in op.operands for axis in axes]
        is_of_batch = any(x is not None and (x.batch or x.experts) for x in origins)
        if is_of_batch or TIME in axes:
            continue
        work = program_kernels.work_alone(op, program.values)
        after, before = (
            program_kernels.seconds(op, work, each, mesh, hardware)
            for each in (whole, strategy)
        )
        if _is_slower(program, op, strategy, mesh, after - before):
            products[op.index] = after - before
    return products


def _has_more_elements(program: Program, op: Op, than: Sequence[int]) -> bool:
    """Return whether the result of an op has more elements than the values ``than``; a
    smaller sum may share a message with others, so that its latency says nothing."""
    values = program.values
    return values[op.results[0]].numel > sum(values[v].numel for v in than)


def is_cut(op: Op) -> bool:
    """Return whether an op cuts rows out of a dim; each rank then gives the rows it
    has."""
    facts = op_facts_of(op.target)
    has_rows = len(op.operands) == 1 and bool(op.rule.contracted)
    return has_rows and (facts.view or facts.moves)


def _cuts(
    program: Program, strategies: Sequence[Strategy]
) -> dict[tuple[object, ...], list[Op]]:
    """Return, by operand, the cuts whose sums send at least as much as gathering it
    does."""
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
    """Return the strategy without the axes of the factors that are summed over."""
    sums = op.rule.contracted_by[0]
    factors = tuple((f, axes) for f, axes in strategy.factors if f not in sums)
    return Strategy(factors, strategy.passes)


def _is_slower(
    program: Program, op: Op, strategy: Strategy, mesh: Mesh, more: float = 0.0
) -> bool:
    """Return whether reducing the result of ``op`` takes longer than gathering its
    operands and computing ``more`` seconds."""
    whole = _whole(op, strategy)

    def seconds(v: int, source: Spec, target: Spec) -> float:
        value = program.values[v]
        return price(source, target, mesh, value.shape, value.dtype.itemsize)

    gather = sum(
        seconds(v, *(operand_spec(op.rule, s, i) for s in (strategy, whole)))
        for i, v in enumerate(op.operands)
    )
    raw_spec, reduced = (result_spec(op.rule, s, 0) for s in (strategy, whole))
    return gather + more < seconds(op.results[0], raw_spec, reduced)


def _seconds(program: Program, settled: Settled, mesh: Mesh) -> float:
    """Return the seconds of all reshards."""
    return reshard_seconds(program, connect(program, *settled, mesh), mesh)
