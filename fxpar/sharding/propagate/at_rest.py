"""Parameters at rest: where each lies between steps, and what a plan makes of that.

``at_rest`` chooses the spec of one parameter: what hints or a plan say, then every axis
that is left over, on the dim it divides best (ZeRO-3, FSDP). ``settle_at_rest`` is the
planner's side: axes that a parameter has at rest only (the batch uses them elsewhere)
stay on whatever is computed from parameters alone (casts, weight norms) and on what is
computed from a gradient alone, so that a cast comes before its gather and a
reduce-scatter is one step. No axis spreads from there to activations.
``lie_as_read``: an input that may lie anywhere lies as it is read.
``gather_before_views``: what is only seen in another shape, or repeated, is gathered as
it is stored.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import combinations, compress
from typing import Any

from fxpar.sharding import shard_sizes
from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Op, Program, is_view
from fxpar.sharding.propagate.conventions import batch_axes, expert_axes
from fxpar.sharding.propagate.propagation import Propagation
from fxpar.sharding.propagate.propagation_state import State
from fxpar.sharding.reshard.route import Edges
from fxpar.sharding.rules.op_facts import op_facts_of
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import (
    Strategy,
    expressible,
    operand_spec,
    project,
    result_spec,
)

# Of so many numbers one may lie whole on every rank, so that all shards are alike, or
# that it lies as it is used.
FEW = 16


def at_rest(
    shape: Sequence[int],
    mesh: Mesh,
    dims: Sequence[Axes] = (),
    closed: Sequence[bool] = (),
    decided: Collection[str] = (),
    *,
    alike: bool = False,
) -> Spec:
    """The spec in which a parameter of ``shape`` rests.

    ``dims``: axes that are decided; ``closed``: dims that take no more; ``decided``:
    axes that go nowhere else. The other axes go together on one open dim, the first
    that they divide, else as many as fit. Of a matrix that none divides they cut a dim
    into chunks, that of least loss, if it has a row for each rank; else it lies whole,
    as a vector does.
    An axis for experts first splits dim 0 of stacked matrices. ``alike``: all shards
    are to be, as stages need them.
    """
    ndim = len(shape)
    dim_axes = [tuple(axes) for axes in dims] + [()] * (ndim - len(dims))
    shut = [*closed, *[False] * (ndim - len(closed))]
    used_axes = {*decided, *(axis for axes in dim_axes for axis in axes)}
    batch, experts = batch_axes(mesh), expert_axes(mesh)
    open_ = ndim == 3 and not (
        shut[0] or dim_axes[0] or used_axes.intersection(experts)
    )
    if open_ and shard_sizes.is_even(shape[0], mesh, experts):
        dim_axes[0] = experts
        used_axes.update(experts)
    # Batch axes are gathered at each use: minor, so that what is left is one block.
    free_axes = [
        axis
        for axis in sorted(mesh.names, key=lambda axis: axis in batch)
        if axis not in used_axes and mesh.sizes[axis] > 1
    ]
    choices = [
        axes for n in range(len(free_axes)) for axes in combinations(free_axes, n + 1)
    ]
    # The more shards the better, else batch axes: those are gathered anyway.
    choices.sort(key=lambda axes: (mesh.count(axes), axes[-1] in batch), reverse=True)
    for fits in (shard_sizes.is_even, _has_chunks)[: 1 + (ndim > 1 and not alike)]:
        for axes in choices:
            axes = axes if fits is shard_sizes.is_even else mesh.ordered(axes)
            splits = {d: (*dim_axes[d], *axes) for d in range(ndim) if not shut[d]}
            fit = [d for d, split in splits.items() if fits(shape[d], mesh, split)]
            if fit:
                d = min(fit, key=lambda d: shard_sizes.idle(shape[d], mesh, splits[d]))
                dim_axes[d] = splits[d]
                return Spec.of(dim_axes)
    return Spec.of(dim_axes)


def _has_chunks(rows: int, mesh: Mesh, axes: Axes) -> bool:
    """Whether axes cut a dim as DTensor's ``Shard`` does, no shard being empty."""
    chunks = shard_sizes.are_chunks(rows, mesh, axes)
    return chunks and shard_sizes.smallest(rows, mesh, axes) > 0


def is_worth_chunks(arguments: Collection[tuple[Any, ...]]) -> bool:
    """Whether enough of a model lies in matrices that nothing divides: a plan with
    shards that are not alike has no schedule, microbatches or open sizes.
    ``arguments``: what ``at_rest`` takes of each parameter."""
    sizes = [math.prod(shape) for shape, *_ in arguments]
    cut = [at_rest(*args) != at_rest(*args, alike=True) for args in arguments]
    return FEW * sum(compress(sizes, cut)) > sum(sizes)


def settle_at_rest(engine: Propagation) -> None:
    """Give parameters the axes they rest on, and what is made of them alone."""
    program, signature = engine.program, engine.program.signature
    rests, parameters = [], resting(program)
    for declared, v in zip(signature.inputs, program.inputs, strict=True):
        if v in parameters and declared.rest is not None:
            rests.append((v, declared.rest, f"{declared.name} at rest"))
    gradients = set()
    for out, v in zip(signature.outputs, program.outputs, strict=True):
        if v is not None and out.kind == "gradient" and out.rest is not None:
            gradients.add(v)
            rests.append((v, out.rest, f"gradient of {out.name} at rest"))
    if rests:
        among = derived(program, parameters) | alone(program, gradients)
        engine.extend(rests, among)


def gather_before_views(
    program: Program, strategies: list[Strategy], settled: list[Spec], mesh: Mesh
) -> None:
    """Gather a parameter and view what was gathered, where a view of it is only read
    gathered: so it is sent once, whatever it is seen as. What is repeated (key heads,
    for the query heads that share one) is gathered before, too. Changes both lists."""
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
        made_spec = result_spec(op.rule, strategies[op.index], 0)
        axes_of = project(op.rule.results[0], need, op.rule.size, mesh)
        gathered = Strategy((*op.rule.pinned, *axes_of.items()))
        if (
            set(need.sharded_axes) < set(made_spec.sharded_axes)
            and result_spec(op.rule, gathered, 0) == need
            and expressible(op.rule.operands[0], axes_of, op.rule.size, mesh)
        ):
            strategies[op.index], settled[result] = gathered, need
    share_before_views(program, strategies, settled, mesh)


def share_before_views(
    program: Program, strategies: list[Strategy], settled: list[Spec], mesh: Mesh
) -> None:
    """Reshard a value and view what came of it, where several readers want it so, some
    of them through views of it that they alone read: so it is sent once. Changes both
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


# A view, its strategy, and the specs in which it reads and makes its value.
_View = tuple[Op, Strategy, Spec, Spec]


def _views_read(
    program: Program, strategies: Sequence[Strategy], op: Op, mesh: Mesh
) -> list[_View]:
    """``op`` and the views after it, each of which alone reads the one before, as they
    would make what the last one's readers want; none if these can read it as it is."""
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
        if result_spec(rule, strategy, 0) != need or not expressible(
            rule.operands[0], axes_of, rule.size, mesh
        ):
            return []
        views.insert(0, (view, strategy, source, need))
        need = source
    return views


def _is_rearranged(program: Program, op: Op) -> bool:
    """Whether a view has each element of its one operand once, and is no result."""
    (v,), values = op.results, program.values
    same = len(op.operands) == 1 and values[v].numel == values[op.operands[0]].numel
    return same and v not in program.returned


def _repeating(program: Program) -> set[int]:
    """Ops that repeat a value, and those that copy or view what was repeated."""
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


def may_lie_as_read(program: Program, state: State) -> set[int]:
    """Inputs that lie where the plan has them, have one reader and no gradient, and
    whose axes, if any, came from there: no seed is against what that reader needs."""
    signature = program.signature
    of = {out.of for out in signature.outputs}
    pairs = enumerate(zip(signature.inputs, program.inputs, strict=True))
    return {
        v
        for k, (declared, v) in pairs
        if v is not None
        and declared.kind == "input"
        and declared.rest is None
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
    """Let inputs lie as their one reader has them. Changes ``settled``."""
    for v in inputs:
        ((reader, i),) = program.uses[v]
        need = operand_spec(program.ops[reader].rule, strategies[reader], i)
        settled[v] = need.without_partial()


def resting(program: Program) -> set[int]:
    """Values of the parameters of which each rank holds a part."""
    pairs = zip(program.signature.inputs, program.inputs, strict=True)
    return {
        v
        for declared, v in pairs
        if v is not None and declared.kind == "parameter" and declared.is_sharded
    }


def derived(program: Program, roots: set[int]) -> set[int]:
    """``roots`` and the values computed from them alone."""
    values = set(roots)
    for op in program.ops:
        if op.operands and all(v in values for v in op.operands):
            values.update(op.results)
    return values


def exchanged_notes(program: Program, edges: Edges) -> list[str]:
    """That parameters rest split along other dims than they are used here, as another
    program laid them out, or a hint."""
    names = {
        v: declared.name
        for declared, v in zip(program.signature.inputs, program.inputs, strict=True)
        if v in resting(program)
    }
    roots = {v: frozenset({v}) for v in names}
    for op in program.ops:
        if op.operands and all(v in roots for v in op.operands):
            of = frozenset[int]().union(*(roots[v] for v in op.operands))
            roots.update(dict.fromkeys(op.results, of))
    exchanged: dict[tuple[int, Spec], None] = {}
    for x in edges.reshards:
        before, after = (
            {axis: d for d, axes in enumerate(spec.dims) for axis in axes}
            for spec in (x.source, x.target)
        )
        moves = any(after.get(axis, d) != d for axis, d in before.items())
        if moves and x.output is None and x.value in roots:
            exchanged[x.value, x.target] = None
    if not exchanged:
        return []
    parameters = sorted({names[r] for v, _ in exchanged for r in roots[v]})
    nbytes = sum(program.values[v].nbytes for v, _ in exchanged)
    count, few = len(parameters), ", ".join(parameters[:3])
    more = f" and {count - 3} more" if count > 3 else ""
    return [
        f"exchanged at each call: {few}{more} rest split along other dims than they "
        f"are used here, {nbytes} bytes of them in all; the first program that read "
        "them, a sample or a hint laid them out"
    ]


def gathered_again(program: Program) -> set[int]:
    """Values made of parameters at rest, or of those that the plan may split, that
    forward and backward gather each for itself: all but those of parameters which the
    forward's last reader and the backward's first both read. Between the two nothing
    else is gathered: they would be dropped to be gathered at once (FSDP2 keeps those
    of its root for this reason)."""
    pairs = zip(program.signature.inputs, program.inputs, strict=True)
    free = {v for x, v in pairs if x.kind == "parameter" and x.rest is None}
    rests = resting(program) | {v for v in free if v is not None}
    if not rests:
        return set()
    parameter_values, backward = derived(program, rests), program.backward
    roots: dict[int, frozenset[int]] = {v: frozenset({v}) for v in rests}
    last: frozenset[int] = frozenset()
    first: frozenset[int] | None = None
    for op in program.ops:
        of = frozenset[int]().union(*(roots.get(v, frozenset()) for v in op.operands))
        if of and parameter_values.issuperset(op.results) and op.results:
            roots.update(dict.fromkeys(op.results, of))
        elif of and op.index not in backward:
            last = of
        elif of and first is None:
            first = of
    still_there = last & (first or frozenset())
    return {
        v for v in parameter_values if still_there.isdisjoint(roots.get(v, frozenset()))
    }


def alone(program: Program, results: Collection[int]) -> set[int]:
    """``results`` and the values from which they are computed, one operand an op."""
    values, stack = set(results), list(results)
    while stack:
        producer = program.producers.get(stack.pop())
        op = program.ops[producer[0]] if producer else None
        if op is not None and len(op.operands) == 1:
            for v in op.operands:
                if v not in values:
                    values.add(v)
                    stack.append(v)
    return values
