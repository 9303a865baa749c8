"""Plans programs that ranks run on their own along some axes: in local mode the batch
axes.

A program is planned with one rank along such an axis: on a mesh where it has size 1,
for inputs that do not name it. Communication over the axis is added to the plan: a
parameter that is split over it at rest is gathered where it is read, and its gradient
becomes the mean over the axis (``mean_over_ranks``), of which each rank keeps its part.
Rows that ranks send to experts (``fxpar::exchange_slots``) cross it too: the op that
multiplies them reads of each weight the part of the rank's own experts, and gives that
part of its gradient.
In: signatures on the whole mesh, plans and Decisions on the planned one. Out: the same
on the other mesh.
Never: lets any other value cross the axis; it may differ between the axis's ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fxpar.errors import PlanError
from fxpar.sharding.decide import Decision
from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh, axis_of
from fxpar.sharding.pipeline_axis import is_pipeline
from fxpar.sharding.plan import Plan
from fxpar.sharding.program import (
    Input,
    Op,
    Output,
    Program,
    Signature,
    user_line,
)
from fxpar.sharding.propagate.conventions import EXPERTS
from fxpar.sharding.rest_over_stages import (
    Splits,
    is_cast,
    reconnected,
    split_op,
    with_splits,
)
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy

End = TypeVar("End", Input, Output)

# By name: passes register these ops.
_EXCHANGE = "fxpar.exchange_slots.default"
_MM, _OUTER = "fxpar.expert_mm.default", "fxpar.expert_outer.default"
_MEAN = "fxpar.mean_over_ranks.default"


@dataclass(frozen=True)
class ManualAxes:
    """Names axes of a mesh along which ranks run programs of their own."""

    # The mesh of all ranks.
    mesh: Mesh
    # Only axes of several ranks.
    axes: Axes

    @property
    def expert_axes(self) -> Axes:
        """Return the axes that are named for experts."""
        return tuple(axis for axis in self.axes if axis_of(axis).lower() in EXPERTS)


def planned_mesh(mesh: Mesh, axes: Collection[str]) -> Mesh:
    """Return the mesh with one rank along these axes, which have no parts there."""
    manual, rows = set(map(axis_of, axes)), dict[str, Any]()
    columns = zip(mesh.axes, mesh.links, mesh.speeds, mesh.shares, strict=True)
    for (name, size), link, speeds, shares in columns:
        if (axis := axis_of(name)) in manual:
            rows[axis] = (axis, 1), link, None, None
        else:
            rows[name] = (name, size), link, speeds, shares
    return Mesh(*zip(*rows.values(), strict=True))


def planned_plan(plan: Plan, axes: Collection[str]) -> Plan:
    """Return the plan with one rank along these axes."""
    return replace(plan.without(axes), mesh=planned_mesh(plan.mesh, axes))


def over_manual_axes(
    decision: Decision,
    manual: ManualAxes,
    signature: Signature,
    update: Collection[int],
) -> Decision:
    """Return a decision that was made for one rank along the manual axes, on the whole
    mesh. ``signature``: how inputs and outputs are stored there; ``update``: the ops of
    an optimizer, of which each rank computes its part."""
    planned, axes = decision.mesh, manual.axes
    sizes = tuple((name, manual.mesh.sizes.get(name, n)) for name, n in planned.axes)
    mesh = replace(planned, axes=sizes)
    values = [replace(x, manual=(*x.manual, *axes)) for x in decision.program.values]
    program = replace(decision.program, values=values)
    signature = _resting(program.signature, signature, axes, mesh)
    split = {
        v: extra
        for end, v in zip(signature.inputs, program.inputs, strict=True)
        if v is not None
        and end.at_rest is not None
        and (extra := _extra(end.at_rest, axes))
    }
    # Hints may name the axes, which split nothing on one rank.
    strategies = [x.without(axes) for x in decision.strategies]
    settled = [x.clear_of(axes) for x in decision.settled]
    products = _products_of_sent(program)
    ops = [_by_expert(op) if op.index in products else op for op in program.ops]
    makers = _makers_of_weights(program, products)
    program = replace(program, ops=ops, kernel_cache={})
    experts = tuple({axis: None for axes in products.values() for axis in axes})
    averaged, gradients = set[int](), set[int]()  # of experts' weights
    means = set[int]()  # and values made of means alone
    for op in program.ops:
        changed = program, op, strategies, settled, split, mesh
        of_experts = not gradients.isdisjoint(op.operands)
        if str(op.target) == _MEAN:
            averaged.add(op.results[0])
            if of_experts:
                _split_by_expert(*changed, experts)
            if extra := _extra(Spec.parse(str(op.node.args[1])), axes):
                split[op.results[0]] = extra
                means.add(op.results[0])
            continue
        if op.index in products and str(op.target) == _OUTER:
            _give_by_expert(op, strategies, settled, split, products[op.index])
            gradients.update(op.results)
            continue
        is_mean = bool(op.operands) and means.issuperset(op.operands)
        if op.index in update or is_cast(op) or is_mean:
            split_op(*changed)
            means.update(op.results if is_mean else ())
        elif op.index in products or op.index in makers or of_experts:
            _split_by_expert(*changed, experts)
        if of_experts:
            _require_split(op, split)
            gradients.update(op.results)
    program = replace(program, signature=signature)
    decision = replace(decision, manual=axes, averaged=frozenset(averaged))
    return reconnected(decision, program, mesh, strategies, settled)


def _split_by_expert(
    program: Program,
    op: Op,
    strategies: list[Strategy],
    settled: list[Spec],
    split: dict[int, Splits],
    mesh: Mesh,
    axes: Axes,
) -> None:
    """Let each rank compute an op for its own experts, which are split along
    ``axes``."""
    own = {
        v: tuple(x for x in split[v] if x[0] in axes) for v in op.operands if v in split
    }
    split_op(program, op, strategies, settled, own, mesh)
    split.update((v, own[v]) for v in op.results if v in own)


def _give_by_expert(
    op: Op,
    strategies: list[Strategy],
    settled: list[Spec],
    split: dict[int, Splits],
    axes: Axes,
) -> None:
    """Let each rank give the gradients of its own experts' weights."""
    factors = (*strategies[op.index].factors, ("e", axes))
    strategies[op.index] = replace(strategies[op.index], factors=factors)
    (result,) = op.results
    split[result] = tuple((axis, 0) for axis in axes)
    settled[result] = with_splits(settled[result], split[result])


def _products_of_sent(program: Program) -> dict[int, Axes]:
    """Return products of rows that were sent to their experts -> the axes they were
    sent along."""
    out = dict[int, Axes]()
    for op in program.ops:
        if str(op.target) in (_MM, _OUTER) and op.operands[2] in program.producers:
            sender = program.ops[program.producers[op.operands[2]][0]]
            if str(sender.target) == _EXCHANGE:
                out[op.index] = tuple(str(sender.node.args[1]).split("+"))
    return out


def _require_split(op: Op, split: Mapping[int, Splits]) -> None:
    """Raise PlanError for an op that reads gradients of several experts."""
    if not split.keys() >= {*op.results}:
        raise PlanError(
            f"{op.name} ({op.target}) reads gradients of experts on several ranks",
            where=user_line(op.node),
            fix="set expert_exchange (FXPAR_EXPERT_EXCHANGE) to gather",
        )


def _by_expert(product: Op) -> Op:
    """Return a product with a rule by which each rank computes the part of its own
    experts, for all rows that it has."""
    rule = product.rule
    equal_over = rule.equal_over | ({(0, "e")} if str(product.target) == _MM else set())
    rule = replace(rule, whole=rule.whole - {"e"}, equal_over=equal_over)
    return replace(product, rule=rule)


def _makers_of_weights(program: Program, products: Mapping[int, Axes]) -> set[int]:
    """Return the ops that make, from parameters, the weights that products read."""
    out = set[int]()
    for index in products:
        op = program.ops[index]
        v = None if str(op.target) == _OUTER else op.operands[1]
        while v in program.producers:
            op = program.ops[program.producers[v][0]]
            out.add(op.index)
            v = op.operands[0] if len(op.operands) == 1 else None
    return out


def _extra(spec: Spec, axes: Collection[str]) -> Splits:
    """Return (axis, dim) for each of these axes that splits a dim of a spec."""
    dims = enumerate(spec.dims)
    return tuple((axis, d) for d, split in dims for axis in split if axis in axes)


def _resting(planned: Signature, whole: Signature, axes: Axes, mesh: Mesh) -> Signature:
    """Return the signature with the specs that inputs and outputs have on the whole
    mesh. A gradient that waits to be reduced is a rank's own, in its planned shape."""

    def back(end: End, on_whole: End) -> End:
        at_rest = on_whole.at_rest
        if at_rest is None:
            return end
        partial = [(axis, op) for axis, op in at_rest.partial if axis not in axes]
        at_rest = Spec.of(at_rest.dims, partial).without(
            set(filter(is_pipeline, at_rest.axes))
        )
        return replace(end, at_rest=at_rest.refined(mesh))

    return replace(
        planned,
        inputs=tuple(map(back, planned.inputs, whole.inputs)),
        outputs=tuple(map(back, planned.outputs, whole.outputs)),
    )
