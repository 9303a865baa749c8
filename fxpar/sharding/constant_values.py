"""Values made of constants alone (positions that count up, masks of them): every rank
computes the part it reads, or the whole, and none is ever gathered."""

from __future__ import annotations

from collections.abc import MutableSequence

from fxpar.sharding.factors import (
    Strategy,
    fits,
    operand_spec,
    project,
    result_spec,
)
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Op, Program
from fxpar.sharding.spec import Spec


def made_of_constants(program: Program) -> set[int]:
    """Values that no input has a part in. Random ones are left out: to draw the whole
    is no small thing."""
    found = {v.index for v in program.values} - set(program.producers)
    found -= {v for v in program.inputs if v is not None}
    for op in program.ops:
        known = getattr(op.target, "namespace", "") in ("aten", "prims")
        if known and op.known and found.issuperset(op.operands):
            found.update(op.results)
    return found


def make_as_read(
    program: Program,
    strategies: MutableSequence[Strategy],
    settled: MutableSequence[Spec],
    mesh: Mesh,
) -> None:
    """Make such values as they are read: split alike where all readers do, else whole,
    of which any part is a slice. Changes both lists."""
    ours = made_of_constants(program)
    outputs = set(program.outputs)
    for op in reversed(program.ops):
        if len(op.results) != 1 or not ours.issuperset(op.results):
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
        made = _making(op, need, mesh)
        if made is None:
            need, made = whole, Strategy(op.rule.pinned)
        strategies[op.index], settled[v] = made, need


def _making(op: Op, spec: Spec, mesh: Mesh) -> Strategy | None:
    """The strategy by which an op makes its result so, if there is one."""
    rule = op.rule
    axes_of = project(rule.results[0], spec, rule.size, mesh, even=rule.even_factors)
    made = Strategy((*rule.pinned, *axes_of.items()))
    if result_spec(rule, made, 0) != spec or rule.whole.intersection(axes_of):
        return None
    return made if fits(rule, axes_of, mesh) else None
