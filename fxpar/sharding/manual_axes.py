"""Axes along which ranks run programs of their own: in local mode those of the batch.

A program is planned with one rank along such an axis: on a mesh where it has size 1,
for inputs that do not name it. What crosses the axis is added to the plan: a parameter
that rests split over it is gathered where it is read, and its gradient becomes the mean
over the axis (``mean_over_ranks``), of which each rank keeps its part. In: signatures
on the whole mesh, plans and Decisions on the planned one. Out: those of the other mesh.
Every other value may differ between the ranks of an axis, and never crosses it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from fxpar.sharding.axis_parts import axis_of
from fxpar.sharding.decide import Decision
from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.pipeline_axis import is_pipeline
from fxpar.sharding.plan import Plan
from fxpar.sharding.program import Input, Op, Output, Program, Signature
from fxpar.sharding.reshard.route import connect
from fxpar.sharding.rest_over_stages import Splits, split_op
from fxpar.sharding.rules.op_facts import op_facts_of
from fxpar.sharding.spec import Spec

End = TypeVar("End", Input, Output)


@dataclass(frozen=True)
class ManualAxes:
    """Axes of a mesh along which ranks run programs of their own."""

    # Of all ranks.
    mesh: Mesh
    # Those of several ranks.
    axes: Axes


def planned_mesh(mesh: Mesh, axes: Collection[str]) -> Mesh:
    """The mesh with one rank along these axes, which have no parts there."""
    manual, rows = set(map(axis_of, axes)), dict[str, Any]()
    columns = zip(mesh.axes, mesh.links, mesh.speeds, mesh.shares, strict=True)
    for (name, size), link, speeds, shares in columns:
        if (axis := axis_of(name)) in manual:
            rows[axis] = (axis, 1), link, None, None
        else:
            rows[name] = (name, size), link, speeds, shares
    return Mesh(*zip(*rows.values(), strict=True))


def planned_signature(signature: Signature, axes: Collection[str]) -> Signature:
    """The signature with no input or output that rests over these axes."""

    def bare(end: End) -> End:
        rest = end.rest
        return end if rest is None else replace(end, rest=_bare(rest, axes))

    inputs, outputs = map(bare, signature.inputs), map(bare, signature.outputs)
    return replace(signature, inputs=tuple(inputs), outputs=tuple(outputs))


def planned_plan(plan: Plan, axes: Collection[str]) -> Plan:
    """The plan with one rank along these axes."""
    return replace(plan.without(axes), mesh=planned_mesh(plan.mesh, axes))


def over_manual_axes(
    decision: Decision,
    manual: ManualAxes,
    signature: Signature,
    update: Collection[int],
) -> Decision:
    """What was decided for the ranks of one place, on the mesh of all places.
    ``signature``: how inputs and outputs rest there; ``update``: the ops of an
    optimizer, of which each rank computes its part."""
    planned, axes = decision.mesh, manual.axes
    sizes = tuple((name, manual.mesh.sizes.get(name, n)) for name, n in planned.axes)
    mesh = replace(planned, axes=sizes)
    program = _varying(decision.program, axes)
    signature = _resting(program.signature, signature, axes, mesh)
    split = {
        v: extra
        for end, v in zip(signature.inputs, program.inputs, strict=True)
        if v is not None and end.rest is not None and (extra := _extra(end.rest, axes))
    }
    strategies, settled = list(decision.strategies), list(decision.settled)
    averaged = set[int]()
    means = set[int]()  # and what is made of them alone
    for op in program.ops:
        if op.target is torch.ops.fxpar.mean_over_ranks.default:
            averaged.add(op.results[0])
            if extra := _extra(Spec.parse(str(op.node.args[1])), axes):
                split[op.results[0]] = extra
                means.add(op.results[0])
            continue
        is_mean = bool(op.operands) and means.issuperset(op.operands)
        if op.index in update or _casts(op) or is_mean:
            split_op(program, op, strategies, settled, split, mesh)
            means.update(op.results if is_mean else ())
    program = replace(program, signature=signature)
    edges = connect(program, strategies, settled, mesh, manual=axes, averaged=averaged)
    return replace(
        decision,
        program=program,
        mesh=mesh,
        strategies=tuple(strategies),
        settled=tuple(settled),
        edges=edges,
        manual=axes,
        averaged=frozenset(averaged),
    )


def _bare(spec: Spec, axes: Collection[str]) -> Spec:
    reductions = [(axis, op) for axis, op in spec.partial if axis not in axes]
    return Spec.of(spec.without(axes).dims, reductions)


def _extra(spec: Spec, axes: Collection[str]) -> Splits:
    """What splits the dims of a spec along these axes."""
    dims = enumerate(spec.dims)
    return tuple((axis, d) for d, split in dims for axis in split if axis in axes)


def _varying(program: Program, axes: Axes) -> Program:
    """The program, of which no value is known to be the same along these axes."""
    values = [replace(x, manual=(*x.manual, *axes)) for x in program.values]
    return replace(program, values=values)


def _resting(planned: Signature, whole: Signature, axes: Axes, mesh: Mesh) -> Signature:
    """The signature with the specs that inputs and outputs rest in on the whole mesh. A
    gradient that waits to be reduced is a rank's own, of the shape that it has."""

    def back(end: End, on_whole: End) -> End:
        rest = on_whole.rest
        if rest is None:
            return end
        partial = [(axis, op) for axis, op in rest.partial if axis not in axes]
        rest = Spec.of(rest.dims, partial).without(set(filter(is_pipeline, rest.axes)))
        return replace(end, rest=rest.refined(mesh))

    return replace(
        planned,
        inputs=tuple(map(back, planned.inputs, whole.inputs)),
        outputs=tuple(map(back, planned.outputs, whole.outputs)),
    )


def _casts(op: Op) -> bool:
    return len(op.operands) == 1 and op_facts_of(op.target).casts
