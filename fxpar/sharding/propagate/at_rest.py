"""Chooses the layouts of parameters at rest, between steps, and how a plan uses them.

In: shapes, the mesh, hints; for a plan, a propagated program. Out: specs at rest, and
axes added to the propagated State. ``at_rest`` chooses the spec of one parameter: the
axes that hints or a plan give, then every axis that is left over, on the dim it divides
best (ZeRO-3, FSDP). ``settle_at_rest`` is the planner's side: axes that a parameter has
at rest only (the batch uses them elsewhere) stay on values computed from parameters
alone (casts, weight norms) and on values computed from a gradient alone, so that a cast
comes before its gather and a reduce-scatter is one step. ``exchanged_notes`` notes
parameters whose layout does not suit the program. Never: lets such an axis pass on to
activations.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import combinations, compress
from typing import Any

from fxpar.sharding import shard_sizes
from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Program
from fxpar.sharding.propagate.conventions import batch_axes, expert_axes
from fxpar.sharding.propagate.propagation import Propagation
from fxpar.sharding.reshard.route import Edges
from fxpar.sharding.spec import Spec

# One in this many numbers may be whole on every rank, so that all shards are equal, or
# that a parameter has the layout in which it is used.
FEW = 16


def at_rest(
    shape: Sequence[int],
    mesh: Mesh,
    dims: Sequence[Axes] = (),
    closed: Sequence[bool] = (),
    decided: Collection[str] = (),
    *,
    even: bool = False,
) -> Spec:
    """Return the spec at rest of a parameter of ``shape``.

    ``dims``: axes that are decided; ``closed``: dims that take no more; ``decided``:
    axes that split no other dim. The other axes go together on one open dim, the first
    that they divide, else as many as fit. A matrix with no dim that they divide is cut
    into chunks along the dim of least loss, if it has a row for each rank; else it
    stays whole, as a vector does. An axis for experts first splits dim 0 of stacked
    matrices. ``even``: all shards must be equal, as stages need them.
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
    # Batch axes are gathered at each use: minor, so that the rest is one block.
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
    for fits in (shard_sizes.is_even, _has_chunks)[: 1 + (ndim > 1 and not even)]:
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
    """Return whether axes cut a dim as DTensor's ``Shard`` does, with no empty
    shard."""
    chunks = shard_sizes.is_in_chunks(rows, mesh, axes)
    return chunks and shard_sizes.smallest(rows, mesh, axes) > 0


def is_worth_chunks(arguments: Collection[tuple[Any, ...]]) -> bool:
    """Return whether more than 1/FEW of a model is in matrices with no dim that the
    axes divide. Fewer are left whole: a plan with unequal shards has no schedule,
    microbatches or open sizes. ``arguments``: the arguments of ``at_rest`` for each
    parameter."""
    sizes = [math.prod(shape) for shape, *_ in arguments]
    cut = [at_rest(*args) != at_rest(*args, even=True) for args in arguments]
    return FEW * sum(compress(sizes, cut)) > sum(sizes)


def settle_at_rest(engine: Propagation) -> None:
    """Give parameters, and values made of them alone, the axes they have at rest."""
    program = engine.program
    seeds, parameters = [], program.sharded
    for declared, v in program.tensor_inputs:
        if v in parameters and declared.at_rest is not None:
            seeds.append((v, declared.at_rest, f"{declared.name} at rest"))
    gradients = set()
    for out, v in program.tensor_outputs:
        if out.kind == "gradient" and out.at_rest is not None:
            gradients.add(v)
            seeds.append((v, out.at_rest, f"gradient of {out.name} at rest"))
    if seeds:
        among = {*program.of_sharded, *alone(program, gradients)}
        engine.extend(seeds, among)


def exchanged_notes(program: Program, edges: Edges) -> list[str]:
    """Return a note of the parameters that are sharded at rest along other dims than
    this program uses; none if there are no such parameters."""
    names = {v: declared.name for declared, v in program.tensor_inputs}
    roots = program.of_sharded
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
        f"resharded at each call: {few}{more}, {nbytes} bytes in all, since the first "
        "program that read them, a sample or a hint sharded them along other dims than "
        "are used here"
    ]


def alone(program: Program, results: Collection[int]) -> set[int]:
    """Return ``results`` and the values they are computed from, by ops of one
    operand."""
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
