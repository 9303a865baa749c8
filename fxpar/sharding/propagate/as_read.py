"""Lays values out as they are read: those made of constants alone, and inputs fed.

Values made of constants are positions that count up, masks of them: a rank computes the
part that it reads, or the whole. An input whose layout the plan chooses is fed in the
one in which its reader reads it.
In: a Program, strategies and settled specs. Out: both lists, changed for such values.
Never: leaves such a value to be gathered.
"""

from __future__ import annotations

from collections.abc import Collection, MutableSequence, Sequence

from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Op, Program
from fxpar.sharding.propagate.propagation import State
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy, fits, operand_spec, project, result_spec


def fed_as_read(program: Program, state: State) -> set[int]:
    """Return inputs whose layout the plan chooses, that have one reader and no
    gradient, and whose axes, if any, came from there: no seed contradicts the spec that
    reader needs."""
    signature = program.signature
    of = {out.of for out in signature.outputs}
    pairs = enumerate(zip(signature.inputs, program.inputs, strict=True))
    return {
        v
        for k, (declared, v) in pairs
        if v is not None
        and declared.kind == "input"
        and declared.at_rest is None
        and declared.use is None
        and k not in of
        and len(program.uses[v]) == 1
        and v not in program.returned
        and not any(state.closed[v])
        and v not in state.whole
        and all(origin.op is not None for origin in state.origins[v].values())
    }


def lie_as_read(
    program: Program,
    inputs: Collection[int],
    strategies: Sequence[Strategy],
    settled: list[Spec],
) -> None:
    """Settle each input in the spec in which its one reader reads it. Changes
    ``settled``."""
    for v in inputs:
        ((reader, i),) = program.uses[v]
        need = operand_spec(program.ops[reader].rule, strategies[reader], i)
        settled[v] = need.without_partial()


def make_as_read(
    program: Program,
    strategies: MutableSequence[Strategy],
    settled: MutableSequence[Spec],
    mesh: Mesh,
) -> None:
    """Give each constant value the spec in which it is read: split where all readers
    agree, else whole, of which any part is a slice. Changes both lists."""
    constants = program.constants
    outputs = set(program.outputs)
    for op in reversed(program.ops):
        if len(op.results) != 1 or not constants.issuperset(op.results):
            continue
        (v,) = op.results
        reads = {
            operand_spec(program.ops[reader].rule, strategies[reader], i)
            for reader, i in program.uses[v]
        }
        reads = {spec.without_partial() for spec in reads}
        if v in outputs:
            reads.add(settled[v])
        whole = Spec.whole(len(program.values[v].shape))
        need = reads.pop() if len(reads) == 1 else whole
        strategy = _strategy_for(op, need, mesh)
        if strategy is None:
            need, strategy = whole, Strategy(op.rule.pinned)
        strategies[op.index], settled[v] = strategy, need


def _strategy_for(op: Op, spec: Spec, mesh: Mesh) -> Strategy | None:
    """Return the strategy by which an op makes its result in a spec; None if there is
    none."""
    rule = op.rule
    axes_of = project(rule.results[0], spec, rule.size, mesh, even=rule.even_factors)
    strategy = Strategy((*rule.pinned, *axes_of.items()))
    if result_spec(rule, strategy, 0) != spec or rule.whole.intersection(axes_of):
        return None
    return strategy if fits(rule, axes_of, mesh) else None
