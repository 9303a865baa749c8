"""Splits parameters along the axis of stages between steps.

A program is planned on the mesh of one stage. A parameter that is split along the axis
of stages too is put together where it is read, and its gradient is split along it, by
reshards of that axis alone; ``stages.lay_out_stages`` turns these into messages
to and from the places that need them. In the update of a training step each place
computes its part.
In: signatures, and Decisions on the mesh of one stage. Out: signatures without the axis
of stages, and Decisions on the whole mesh.
Never: lets a stage compute on such a split.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from fxpar.sharding import shard_sizes
from fxpar.sharding.decide import Decision
from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.pipeline_axis import Pipeline, with_stages
from fxpar.sharding.program import Input, Op, Output, Program, Signature
from fxpar.sharding.reshard.route import connect
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import (
    Strategy,
    fits,
    operand_spec,
    project,
    result_spec,
    specs,
)

# (axis, dim) pairs: axes that split dims in addition to a spec, as minor axes.
Splits = tuple[tuple[str, int], ...]


def split_over_stages(spec: Spec, shape: Sequence[int], mesh: Mesh, axis: str) -> Spec:
    """Return how a parameter with layout ``spec`` on the mesh of a stage is stored on
    the whole mesh: the axis of stages splits a dim that no axis splits, if it divides
    one, else a dim as its minor axis; where it divides none the spec is unchanged."""
    order = sorted(range(len(shape)), key=lambda d: bool(spec.dims[d]))
    for d in order:
        split = (*spec.dims[d], axis)
        if shape[d] and shard_sizes.is_even(shape[d], mesh, split):
            return with_splits(spec, ((axis, d),))
    return spec


def of_one_stage(signature: Signature, axis: str) -> Signature:
    """Return the signature on the mesh of a stage: ``stage_dim`` is the dim that the
    axis splits."""

    def bare(end: Any, spec: Spec) -> Any:
        if axis not in spec.axes:
            return end
        (dim,) = (d for d, axes in enumerate(spec.dims) if axis in axes)
        return replace(end, at_rest=spec.without({axis}), stage_dim=dim)

    return signature.with_layouts(bare)


def over_stages(
    decision: Decision, pipeline: Pipeline, update: Collection[int]
) -> Decision:
    """Return the decision for one stage as a decision on the whole mesh. ``update``:
    ops that belong to no stage, of which each place computes its part."""
    mesh, axis = with_stages(decision.mesh, pipeline), pipeline.axis
    program = decision.program
    signature = program.signature
    ends: Sequence[Input | Output] = (*signature.inputs, *signature.outputs)
    if all(end.stage_dim is None for end in ends):
        return replace(decision, mesh=mesh)
    split: dict[int, Splits] = {
        v: ((axis, end.stage_dim),)
        for end, v in zip(signature.inputs, program.inputs, strict=True)
        if v is not None and end.stage_dim is not None
    }
    strategies, settled = list(decision.strategies), list(decision.settled)
    for op in program.ops:
        if op.index in update or is_cast(op):
            split_op(program, op, strategies, settled, split, mesh)

    def stored(end: Any, spec: Spec) -> Any:
        splits = () if end.stage_dim is None else ((axis, end.stage_dim),)
        return replace(end, at_rest=with_splits(spec, splits))

    program = replace(program, signature=signature.with_layouts(stored))
    return reconnected(decision, program, mesh, strategies, settled, (axis,))


def reconnected(
    decision: Decision,
    program: Program,
    mesh: Mesh,
    strategies: Sequence[Strategy],
    settled: Sequence[Spec],
    unequal_axes: Axes = (),
) -> Decision:
    """Return the decision on a mesh of more axes, with new strategies and specs.
    ``unequal_axes``: as for ``connect``."""
    edges = connect(
        program,
        strategies,
        settled,
        mesh,
        unequal_axes=unequal_axes,
        manual=decision.manual,
        averaged=decision.averaged,
    )
    return replace(
        decision,
        program=program,
        mesh=mesh,
        strategies=tuple(strategies),
        settled=tuple(settled),
        edges=edges,
    )


def with_splits(spec: Spec, splits: Iterable[tuple[str, int]]) -> Spec:
    """Return the spec with more axes, as the minor ones of their dims."""
    splits = list(splits)
    dims = [
        (*axes, *(axis for axis, at in splits if at == d))
        for d, axes in enumerate(spec.dims)
    ]
    return Spec.of(dims, spec.partial)


def split_op(
    program: Program,
    op: Op,
    strategies: list[Strategy],
    settled: list[Spec],
    split: dict[int, Splits],
    mesh: Mesh,
) -> None:
    """Let each rank compute its part of an op, split like its largest operand. Changes
    the lists, and adds to ``split``: value -> its additional splits."""
    strategy, values = strategies[op.index], program.values
    operands = [(i, v) for i, v in enumerate(op.operands) if v in split]
    for i, v in sorted(operands, key=lambda x: -values[x[1]].numel):
        spec = with_splits(operand_spec(op.rule, strategy, i), split[v])
        axes_of = project(
            op.rule.operands[i], spec, op.rule.size, mesh, even=op.rule.evenly
        )
        added = {
            axis: next((f for f, axes in axes_of.items() if axis in axes), None)
            for axis, _ in split[v]
        }
        if not all(f in op.rule.free for f in added.values()):
            continue
        extended = dict(strategy.axes_of)
        for axis, factor in added.items():
            assert factor is not None
            extended[factor] = (*extended.get(factor, ()), axis)
        candidate = Strategy(tuple(extended.items()), strategy.passes)
        exchanged = not set(added.values()).isdisjoint(op.rule.exchanged)
        if exchanged or not fits(op.rule, candidate.axes_of, mesh):
            continue
        pairs = zip(specs(op.rule, candidate), op.tensors, strict=True)
        if not all(spec.is_even(mesh, values[v].shape) for spec, v in pairs):
            continue
        strategies[op.index] = candidate
        for k, result in enumerate(op.results):
            dims = enumerate(result_spec(op.rule, candidate, k).dims)
            splits = tuple((a, d) for d, axes in dims for a in axes if a in added)
            if splits:
                split[result] = splits
                settled[result] = with_splits(settled[result], splits)
        return


def is_cast(op: Op) -> bool:
    """Return whether an op gives its one operand in another dtype."""
    return len(op.operands) == 1 and op_facts_of(op.target).casts
