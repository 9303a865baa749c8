"""Moves reshards before an op, so that less is sent, or the same only once.

In: a strategy per op, and the spec each value settles in. Out: both, changed.
``gather_lookups``: a lookup in a split dim takes on each rank the rows it has, and sums
the results; if more rows are looked up than there are, gathering the table takes less
time. The same holds of cuts (``select``, ``unbind``, short slices) that together take
most of one tensor, and of products far larger than their operands.
``gather_before_views``: a parameter that is only viewed or repeated is gathered before.
``share_before_views``: a value that several readers want in one spec, some of them
through views, is resharded once. ``gather_before_growth``: a result that is only read
gathered, and is larger than its operands (rows that are looked up, a wider dtype, a
broadcast), is computed on each rank from gathered operands. Never: changes the graph,
or the function an op computes; lookups in values computed from parameters alone, and
products along axes that split the batch, microbatches or experts, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.program_kernels import seconds, work_alone
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import Op, Program, is_view
from fxpar.sharding.propagate.assign_strategies import specs_read
from fxpar.sharding.propagate.conventions import TIME
from fxpar.sharding.propagate.propagation import State
from fxpar.sharding.reshard.route import connect, price_of, reshard_seconds
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import (
    Strategy,
    is_expressible,
    operand_spec,
    project,
    result_spec,
)

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
    sums = _sums(program, strategies, state, mesh, hardware)
    for op in map(program.ops.__getitem__, sums):
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
        took = _seconds(program, other, mesh)
        took += sum(sums.get(op.index, 0.0) for op in ops)
        if took < least:
            chosen, settled = trial, other
            least = _seconds(program, other, mesh)
    return settled


def _sums(
    program: Program,
    strategies: Sequence[Strategy],
    state: State,
    mesh: Mesh,
    hardware: Hardware,
) -> dict[int, float]:
    """Return the lookups, then the products, whose sum, each taken alone, takes longer
    to reduce than what they read to gather: op index to the additional seconds of
    compute on each rank."""
    lookups, products = dict[int, float](), dict[int, float]()
    inputs, values = program.tensor_inputs, program.values
    parameters = program.derived({v for x, v in inputs if x.kind == "parameter"})
    for op in program.ops:
        strategy, is_lookup = strategies[op.index], op_facts_of(op.target).gathers
        is_product = (len(op.operands), len(op.results)) == (2, 1)
        if op.operands[0] in parameters if is_lookup else not is_product:
            continue
        whole, read = _whole(op, strategy), op.operands[: 1 if is_lookup else 2]
        # A smaller sum may share a message with others: its latency says nothing.
        is_larger = values[op.results[0]].numel > sum(values[v].numel for v in read)
        if whole == strategy or not is_larger:
            continue
        more = 0.0
        if not is_lookup:
            summed = {*strategy.factors} - {*whole.factors}
            axes = [axis for _, split in summed for axis in split]
            origins = [state.origins[v].get(axis) for v in op.operands for axis in axes]
            is_of_batch = any(x is not None and (x.batch or x.experts) for x in origins)
            if is_of_batch or TIME in axes:
                continue
            more = _more_compute(program, op, strategy, whole, mesh, hardware)
        gather = 0.0
        for i, v in enumerate(op.operands):
            before, after = (operand_spec(op.rule, s, i) for s in (strategy, whole))
            gather += price_of(values[v], before, after, mesh)
        raw_spec, reduced = (result_spec(op.rule, s, 0) for s in (strategy, whole))
        if gather + more < price_of(values[op.results[0]], raw_spec, reduced, mesh):
            (lookups if is_lookup else products)[op.index] = more
    return lookups | products


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
    by_operand: dict[tuple[str, int], list[Op]] = {}
    for op in program.ops:
        if is_cut(op) and strategies[op.index] != _whole(op, strategies[op.index]):
            by_operand.setdefault(("cuts", op.operands[0]), []).append(op)
    groups, values = dict[tuple[object, ...], list[Op]](), program.values
    for key, ops in by_operand.items():
        read = (v for op in ops for v in op.results if program.uses[v])
        if 2 * sum(values[v].numel for v in read) >= values[key[1]].numel:
            groups[key] = ops
    return groups


def _whole(op: Op, strategy: Strategy) -> Strategy:
    """Return the strategy without the axes of the factors that are summed over."""
    sums = op.rule.contracted_by[0]
    factors = tuple((f, axes) for f, axes in strategy.factors if f not in sums)
    return Strategy(factors, strategy.passes)


def _seconds(program: Program, settled: Settled, mesh: Mesh) -> float:
    """Return the seconds of all reshards."""
    return reshard_seconds(program, connect(program, *settled, mesh), mesh)


def _more_compute(
    program: Program,
    op: Op,
    before: Strategy,
    after: Strategy,
    mesh: Mesh,
    hardware: Hardware,
) -> float:
    """Return the seconds that an op takes longer on each rank by another strategy."""
    work = work_alone(op, program.values)
    now, then = (seconds(op, work, s, mesh, hardware) for s in (before, after))
    return then - now


def gather_before_views(
    program: Program, strategies: list[Strategy], settled: list[Spec], mesh: Mesh
) -> None:
    """Gather a parameter before its view if the view is only read gathered, so that it
    is sent once for all its views. A value that is repeated (key heads, for the query
    heads that share one) is gathered before, too. Changes both lists."""
    ours, repeating = program.of_sharded, _repeating(program)
    for op in reversed(program.ops):
        view = is_view(op) and op.operands[0] in ours
        if not view and op.index not in repeating:
            continue
        (result,) = op.results
        need = _read_in(program, strategies, result)
        if need is None or result in program.returned:
            continue
        raw_spec = result_spec(op.rule, strategies[op.index], 0)
        gathered = _giving(op, need, mesh)
        if gathered and {*need.sharded_axes} < {*raw_spec.sharded_axes}:
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
    for op in reversed(program.ops):
        strategy, rule = strategies[op.index], op.rule
        if len(op.results) != 1 or strategy.passes or not op.operands:
            continue
        (v,) = op.results
        read = sum(values[u].nbytes for u in op.operands if u in program.producers)
        if read >= values[v].nbytes:
            continue
        raw_spec = result_spec(rule, strategy, 0)
        views, need = _wanted(program, strategies, v, mesh)
        if need is None or not {*need.axes} < {*raw_spec.axes} or raw_spec.partial:
            continue
        other = _giving(op, need, mesh)
        if other is None:
            continue
        gather = 0.0
        for i, u in enumerate(op.operands):
            before, after = (
                price_of(values[u], settled[u], operand_spec(rule, s, i), mesh)
                for s in (strategy, other)
            )
            gather += after - before
        more = _more_compute(program, op, strategy, other, mesh, hardware)
        if gather + more < price_of(values[v], raw_spec, need, mesh):
            strategies[op.index], settled[v] = other, need
            for view, view_strategy, _, spec in views:
                strategies[view.index], settled[view.results[0]] = view_strategy, spec


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
    return [], _read_in(program, strategies, v)


def _read_in(program: Program, strategies: Sequence[Strategy], v: int) -> Spec | None:
    """Return the one spec in which ops read a value; None if there are several, or no
    reader."""
    reads = specs_read(program, strategies, v)
    return reads.pop() if len(reads) == 1 else None


def _giving(op: Op, need: Spec, mesh: Mesh) -> Strategy | None:
    """Return the strategy by which an op of one result gives it in a spec; None if
    there is none, or an operand cannot be laid out so."""
    rule = op.rule
    axes_of = project(rule.results[0], need, rule.size, mesh)
    strategy = Strategy((*rule.pinned, *axes_of.items()))
    can_be_read = all(
        is_expressible(dims, axes_of, rule.size, mesh) for dims in rule.operands
    )
    return strategy if can_be_read and result_spec(rule, strategy, 0) == need else None


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
    last = chain[-1]
    need = _read_in(program, strategies, last.results[0])
    if need is None or need == result_spec(last.rule, strategies[last.index], 0):
        return []
    views: list[_View] = []
    for view in reversed(chain):
        strategy = _giving(view, need, mesh)
        if strategy is None:
            return []
        source = operand_spec(view.rule, strategy, 0)
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
