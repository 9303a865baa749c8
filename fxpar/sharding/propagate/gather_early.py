"""Moves reshards before an op, so that less is sent, or the same only once.

In: a strategy per op, and the spec each value settles in. Out: both lists, changed.
``gather_before_views``: a parameter that is only viewed or repeated is gathered before.
``share_before_views``: a value that several readers want in one spec, some of them
through views, is resharded once. ``gather_before_growth``: a result that is only read
gathered, and is larger than its operands (rows that are looked up, a wider dtype, a
broadcast), is computed on each rank from gathered operands. Never: changes the graph,
or the function an op computes.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.sharding.cost import program_kernels
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import Op, Program, is_view
from fxpar.sharding.propagate.at_rest import derived, resting
from fxpar.sharding.reshard.route import price
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import (
    Strategy,
    is_expressible,
    operand_spec,
    project,
    result_spec,
)


def gather_before_views(
    program: Program, strategies: list[Strategy], settled: list[Spec], mesh: Mesh
) -> None:
    """Gather a parameter before its view if the view is only read gathered, so that it
    is sent once for all its views. A value that is repeated (key heads, for the query
    heads that share one) is gathered before, too. Changes both lists."""
    ours, repeating = derived(program, resting(program)), _repeating(program)
    outputs = set(program.outputs)
    for op in reversed(program.ops):
        view = bool(op.operands) and op.operands[0] in ours and is_view(op)
        if not view and op.index not in repeating:
            continue
        (result,) = op.results
        reads = {
            operand_spec(program.ops[reader].rule, strategies[reader], i)
            for reader, i in program.uses[result]
        }
        if len(reads) != 1 or result in outputs:
            continue
        (need,) = reads
        raw_spec = result_spec(op.rule, strategies[op.index], 0)
        axes_of = project(op.rule.results[0], need, op.rule.size, mesh)
        gathered = Strategy((*op.rule.pinned, *axes_of.items()))
        if (
            set(need.sharded_axes) < set(raw_spec.sharded_axes)
            and result_spec(op.rule, gathered, 0) == need
            and is_expressible(op.rule.operands[0], axes_of, op.rule.size, mesh)
        ):
            strategies[op.index], settled[result] = gathered, need


def share_before_views(
    program: Program, strategies: list[Strategy], settled: list[Spec], mesh: Mesh
) -> None:
    """Reshard a value before its views if several readers want it in one spec, some of
    them through views that they alone read, so that it is sent once. Changes both
    lists."""
    readers_of: dict[tuple[int, Spec], dict[int, list[_View]]] = {}
    for v, uses in enumerate(program.uses):
        if len(uses) < 2:
            continue
        for reader, i in uses:
            op = program.ops[reader]
            spec = operand_spec(op.rule, strategies[reader], i)
            readers_of.setdefault((v, spec), {})[reader] = []
            views = _views_read(program, strategies, op, mesh)
            if views:
                readers_of.setdefault((v, views[0][2]), {})[reader] = views
    for readers in readers_of.values():
        for views in readers.values() if len(readers) > 1 else ():
            for op, strategy, _, need in views:
                strategies[op.index], settled[op.results[0]] = strategy, need


def gather_before_growth(
    program: Program,
    strategies: list[Strategy],
    settled: list[Spec],
    mesh: Mesh,
    hardware: Hardware,
) -> None:
    """Gather the operands of an op instead of its result, if all readers want the
    result gathered and it takes less time. Changes both lists."""
    values = program.values

    def seconds(v: int, source: Spec, target: Spec) -> float:
        itemsize = values[v].dtype.itemsize
        return price(source, target, mesh, values[v].shape, itemsize)

    for op in reversed(program.ops):
        strategy, rule = strategies[op.index], op.rule
        if len(op.results) != 1 or strategy.passes or not _is_larger(program, op):
            continue
        (v,) = op.results
        raw_spec = result_spec(rule, strategy, 0)
        views, need = _wanted(program, strategies, v, mesh)
        if need is None or not {*need.axes} < {*raw_spec.axes} or raw_spec.partial:
            continue
        axes_of = project(rule.results[0], need, rule.size, mesh)
        other = Strategy((*rule.pinned, *axes_of.items()))
        if result_spec(rule, other, 0) != need or not all(
            is_expressible(dims, axes_of, rule.size, mesh) for dims in rule.operands
        ):
            continue
        gather = 0.0
        for i, u in enumerate(op.operands):
            before, after = (operand_spec(rule, s, i) for s in (strategy, other))
            if before != after:
                gather += seconds(u, settled[u], after) - seconds(u, settled[u], before)
        work = program_kernels.work_alone(op, values)
        now, then = (
            program_kernels.seconds(op, work, s, mesh, hardware)
            for s in (strategy, other)
        )
        if gather + then - now < seconds(v, raw_spec, need):
            strategies[op.index], settled[v] = other, need
            for view, view_strategy, _, spec in views:
                strategies[view.index], settled[view.results[0]] = view_strategy, spec


def _is_larger(program: Program, op: Op) -> bool:
    """Return whether the result of an op has more bytes than its computed operands."""
    values = program.values
    read = sum(values[v].nbytes for v in op.operands if v in program.producers)
    return bool(op.operands) and read < values[op.results[0]].nbytes


def _wanted(
    program: Program, strategies: Sequence[Strategy], v: int, mesh: Mesh
) -> tuple[list[_View], Spec | None]:
    """Return the views between a value and its readers, and the one spec in which all
    readers want it, None if they want several. Views are followed if only one op reads
    the value."""
    uses = program.uses[v]
    if v in program.returned or not uses:
        return [], None
    if len(uses) == 1:
        views = _views_read(program, strategies, program.ops[uses[0][0]], mesh)
        if views:
            return views, views[0][2]
    reads = {
        operand_spec(program.ops[reader].rule, strategies[reader], i)
        for reader, i in uses
    }
    return [], reads.pop() if len(reads) == 1 else None


# (view, its strategy, the spec of its operand, the spec of its result).
_View = tuple[Op, Strategy, Spec, Spec]


def _views_read(
    program: Program, strategies: Sequence[Strategy], op: Op, mesh: Mesh
) -> list[_View]:
    """Return ``op`` and the views after it, each the only reader of the one before,
    with strategies that make the spec in which the last one is read; nothing if it has
    that spec, or the views cannot make it."""
    chain: list[Op] = []
    while is_view(op) and _is_rearranged(program, op):
        chain.append(op)
        readers = program.uses[op.results[0]]
        if len(readers) != 1:
            break
        op = program.ops[readers[0][0]]
    if not chain:
        return []
    (last,) = chain[-1].results
    reads = {
        operand_spec(program.ops[reader].rule, strategies[reader], i)
        for reader, i in program.uses[last]
    }
    if len(reads) != 1 or reads == {
        result_spec(chain[-1].rule, strategies[chain[-1].index], 0)
    }:
        return []
    (need,) = reads
    views: list[_View] = []
    for view in reversed(chain):
        rule = view.rule
        axes_of = project(rule.results[0], need, rule.size, mesh)
        strategy = Strategy((*rule.pinned, *axes_of.items()))
        source = operand_spec(rule, strategy, 0)
        if result_spec(rule, strategy, 0) != need or not is_expressible(
            rule.operands[0], axes_of, rule.size, mesh
        ):
            return []
        views.insert(0, (view, strategy, source, need))
        need = source
    return views


def _is_rearranged(program: Program, op: Op) -> bool:
    """Return whether a view has each element of its one operand once, and the program
    does not return it."""
    (v,), values = op.results, program.values
    same = len(op.operands) == 1 and values[v].numel == values[op.operands[0]].numel
    return same and v not in program.returned


def _repeating(program: Program) -> set[int]:
    """Return the ops that repeat a value, and those that copy or view the result."""
    values, repeated, ops = program.values, set[int](), set[int]()
    for op in program.ops:
        if len(op.operands) != 1 or len(op.results) != 1:
            continue
        (operand,), (result,) = op.operands, op.results
        facts = op_facts_of(op.target)
        grows = facts.view and 1 < values[operand].numel < values[result].numel
        if grows or (operand in repeated and (is_view(op) or facts.copies)):
            repeated.add(result)
            ops.add(op.index)
    return ops
