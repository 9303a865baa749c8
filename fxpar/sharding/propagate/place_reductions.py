"""Chooses where partial values are reduced: an exact minimum cut.

In: a strategy per op, whose contracted factors make results partial. Out: the same
strategies, some of them now letting a partial operand pass through, and the spec each
value settles in. A value may stay partial as long as every op on the way has a Passage
for it; each value is then either kept partial (its producer ran on partial operands, or
made it so) or reduced, and reducing one costs its bytes once, however many ops read it.
Choosing the cheapest set of reductions is a minimum cut between producers of partial
values and the ops that need them whole:

    source -> v          v is made partial by a contraction
    v -> v' (its price)  some reader needs v reduced
    v' -> result of w    w reads v; w on the whole side forces the reduction
    result of w -> v     w can pass v on only if v is partial

Among cuts of equal price the earliest is taken. One cut per axis and reduction. Never:
changes the graph, or lets a partial value into an op that has no passage for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fxpar.sharding.factors import Rule
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Op, Program
from fxpar.sharding.propagate.at_rest import alone
from fxpar.sharding.propagate.propagation import State
from fxpar.sharding.reshard.route import price_of
from fxpar.sharding.solver.min_cut import minimum_cut
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import (
    Strategy,
    fits,
    operand_spec,
    result_spec,
    without_axes,
)

# A value, ("read", value) after its reduction, "source" or "sink".
_Node = int | str | tuple[str, int]
# (from, to, price of cutting it; ``inf``: it is never cut).
_Edge = tuple[_Node, _Node, float]


def place_reductions(
    program: Program, state: State, strategies: Sequence[Strategy], mesh: Mesh
) -> tuple[list[Strategy], list[Spec]]:
    """Return the strategies with passages, and the spec each value settles in."""
    passing_strategies = list(strategies)
    partials: dict[int, list[tuple[str, str]]] = {}
    for axis in mesh.names:
        for reduction, passages, partial_values in _cuts(
            program, state, passing_strategies, mesh, axis
        ):
            for index, passage in passages.items():
                passing_strategies[index] = _with_pass(
                    passing_strategies[index], axis, reduction, passage
                )
            for v in partial_values:
                partials.setdefault(v, []).append((axis, reduction))
    settled = []
    for value in program.values:
        v = value.index
        partial = partials.get(v)
        if partial:
            op_index, i = program.producers[v]
            raw_spec = result_spec(
                program.ops[op_index].rule, passing_strategies[op_index], i
            )
            keep = {axis for axis, _ in partial}
            reduced = [p for p in raw_spec.partial if p[0] not in keep]
            spec = Spec.of(raw_spec.dims, partial)
            if reduced:
                spec = _reduced_into(spec, state.spec(v), {a for a, _ in reduced})
            settled.append(spec)
        else:
            settled.append(state.spec(v))
    return passing_strategies, settled


def _reduced_into(spec: Spec, target: Spec, axes: set[str]) -> Spec:
    """Return ``spec`` with the freed ``axes`` put where ``target`` has them as next
    axis."""
    dims = []
    for have, want in zip(spec.dims, target.dims, strict=True):
        extra = want[len(have) :] if want[: len(have)] == have else ()
        next_axes: list[str] = []
        for axis in extra:
            if axis not in axes:
                break
            next_axes.append(axis)
        dims.append((*have, *next_axes))
    return Spec.of(dims, spec.partial)


def _with_pass(strategy: Strategy, axis: str, reduction: str, passage: int) -> Strategy:
    """Return ``strategy`` with ``axis`` passing through as partial instead of
    splitting."""
    passes = (*strategy.passes, (axis, reduction, passage))
    return Strategy(without_axes(strategy.factors, (axis,)), passes)


@dataclass
class _Region:
    """Holds values that could be partial over one axis, and the passages of ops."""

    sources: set[int] = field(default_factory=set)  # values that ops make partial
    member: set[int] = field(default_factory=set)  # values that could be partial
    via: dict[int, int] = field(default_factory=dict)  # op index -> passage index
    # Constants that are partial sums for free.
    zeros: set[int] = field(default_factory=set)


def _cuts(
    program: Program,
    state: State,
    strategies: Sequence[Strategy],
    mesh: Mesh,
    axis: str,
) -> Iterator[tuple[str, dict[int, int], set[int]]]:
    """Yield (reduction, passage of each op that passes a partial on, values kept
    partial) by a cut per reduction, each with the strategies as the one before left
    them."""
    reductions = dict.fromkeys(
        op
        for i, strategy in enumerate(strategies)
        for r in range(len(program.ops[i].results))
        for a, op in result_spec(program.ops[i].rule, strategy, r).partial
        if a == axis and strategy.factors
    )
    for reduction in reductions:
        region = _grow(program, strategies, mesh, axis, reduction)
        if region.via:
            prices = {v: _price(program, state, v, mesh, axis) for v in region.member}
            yield reduction, *_cut(program, axis, region, prices)


def _grow(
    program: Program,
    strategies: Sequence[Strategy],
    mesh: Mesh,
    axis: str,
    reduction: str,
) -> _Region:
    """Follow partial values downstream through every op that has a passage."""
    region = _Region()
    for op, strategy in zip(program.ops, strategies, strict=True):
        if reduction == "sum" and op.is_zero:
            region.zeros.update(op.results)
            continue
        raw_specs = [result_spec(op.rule, strategy, r) for r in range(len(op.results))]
        if any(axis in spec.partial_axes for spec in raw_specs):
            for v, spec in zip(op.results, raw_specs, strict=True):
                if (axis, reduction) in spec.partial:
                    region.sources.add(v)
                    region.member.add(v)
            continue
        if not any(v in region.member for v in op.operands):
            continue
        passage = _passable(op, strategy, region, mesh, axis, reduction)
        if passage is not None:
            region.via[op.index] = passage
            region.member.update(op.results)
    return region


def _passable(
    op: Op,
    strategy: Strategy,
    region: _Region,
    mesh: Mesh,
    axis: str,
    reduction: str,
) -> int | None:
    """Return the index of a passage all of whose operands could be partial, else None.

    Operands outside it must not be split by the axis: they would have to be gathered.
    """
    passages = enumerate(() if axis in op.rule.pin else op.rule.passages)
    for p, passage in passages:
        group = [op.operands[i] for i in passage.operands]
        others = (i for i in range(len(op.operands)) if i not in passage.operands)
        if (
            reduction in passage.reductions
            and all(v in region.member or v in region.zeros for v in group)
            and not region.member.isdisjoint(group)
            and not any(axis in operand_spec(op.rule, strategy, i).axes for i in others)
            and _is_possible(op.rule, _with_pass(strategy, axis, reduction, p), mesh)
        ):
            return p
    return None


def _is_possible(rule: Rule, strategy: Strategy, mesh: Mesh) -> bool:
    """Return whether all tensors can be laid out by the strategy: without the passing
    axis a minor factor may no longer be contiguous, and reductions of two kinds do not
    commute."""
    results = range(len(rule.results))
    kinds = frozenset[str]().union(
        *(result_spec(rule, strategy, i).kinds for i in results)
    )
    return len(kinds) == 1 and fits(rule, strategy.axes_of, mesh)


def _cut(
    program: Program, axis: str, region: _Region, prices: Mapping[int, float]
) -> tuple[dict[int, int], set[int]]:
    """Return the passages and the values kept partial by the minimum cut."""
    least = minimum_cut(_edges(program, axis, region, prices), "source", "sink")
    assert least is not None, "each value has a price"
    partial = region.member & least.early
    passages = {
        index: passage
        for index, passage in region.via.items()
        if not partial.isdisjoint(program.ops[index].results)
    }
    # A partial value all of whose readers take it partial is never reduced.
    return passages, {v for v in partial if ("read", v) in least.early}


def _edges(
    program: Program, axis: str, region: _Region, prices: Mapping[int, float]
) -> list[_Edge]:
    """Return the edges of the graph that is cut."""
    edges: list[_Edge] = [("source", v, math.inf) for v in sorted(region.sources)]
    # Without those whose layout between steps is partial over the axis.
    outputs = {
        v
        for out, v in program.tensor_outputs
        if out.at_rest is None or (axis, "sum") not in out.at_rest.partial
    }
    early = alone(program, program.reduce_here) - program.reduce_here
    never = 2 * sum(prices.values()) or 1.0
    for v in sorted(region.member):
        edges.append((v, ("read", v), never if v in early else prices[v]))
        readers = program.uses[v]
        ends = v in outputs or v in program.reduce_here
        if ends or not (readers or v in program.returned):
            edges.append((("read", v), "sink", math.inf))
        for index, position in readers:
            op = program.ops[index]
            passage = region.via.get(index)
            if passage is None or position not in op.rule.passages[passage].operands:
                edges.append((("read", v), "sink", math.inf))
                continue
            edges += [(("read", v), result, math.inf) for result in op.results]
    for index, passage in region.via.items():
        op = program.ops[index]
        for result in op.results:
            for i in op.rule.passages[passage].operands:
                if op.operands[i] in region.member:
                    edges.append((result, op.operands[i], math.inf))
            edges += [(result, x, math.inf) for x in op.results if x != result]
    return edges


def _price(program: Program, state: State, v: int, mesh: Mesh, axis: str) -> float:
    """Return the seconds to reduce value ``v`` over ``axis`` into the spec it was
    given."""
    target = state.spec(v)
    source = Spec.of(target.without({axis}).dims, [(axis, "sum")])
    return price_of(program.values[v], source, target, mesh)
