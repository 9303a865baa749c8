"""What a mesh axis does when no hint names it.

An axis named as in ``BATCH`` splits dim 0 of the inputs, also where hints lay
parameters out along it (ZeRO). Any other axis splits weights as an expert would:
walking the forward program, the first contraction with a parameter that the axis does
not touch yet has its output dim split ("column"); propagation then finds the matching
input dim of the next one ("row") by itself. A residual stream, which many layers read
and norms reduce over, is left whole. In a mesh without a batch axis by name the first
axis is one, unless it is named as in ``MODEL``.
"""

from __future__ import annotations

from collections.abc import Iterable

from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Op, Program
from fxpar.sharding.propagate.propagation import FIRST, Propagation, Seed
from fxpar.sharding.shard_sizes import idle, is_even, may_split

BATCH = ("dp", "ddp", "data", "batch", "fsdp", "hsdp", "zero", "replica")
EXPERTS = ("ep", "expert", "experts")
MODEL = ("tp", "mp", "model", "tensor", "heads", "sp", "cp", "seq")


def batch_axes(mesh: Mesh) -> Axes:
    """Axes that split the batch unless a hint uses them otherwise."""
    named = tuple(axis for axis in mesh.names if axis.lower() in (*BATCH, *EXPERTS))
    if named or mesh.names[0].lower() in MODEL:
        return named
    return mesh.names[:1]


def expert_axes(mesh: Mesh) -> Axes:
    """Axes that split experts; the batch as well, like ``batch_axes``."""
    named = [axis for axis in mesh.names if axis.lower() in EXPERTS]
    return tuple(axis for axis in named if mesh.sizes[axis] > 1)


def batch_inputs(program: Program) -> list[int]:
    """Values of the inputs that hold the batch: dim 0 as large as the first one's."""
    inputs = [
        program.values[v]
        for declared, v in zip(program.signature.inputs, program.inputs, strict=True)
        if v is not None and declared.kind == "input" and declared.use is None
    ]
    first = next((v for v in inputs if len(v.shape) >= 2), None)
    first = first or next((v for v in inputs if v.shape), None)
    if first is None or first.shape[0] == 1:
        return []
    return [v.index for v in inputs if v.shape and v.shape[0] == first.shape[0]]


def batch_seeds(
    program: Program, mesh: Mesh, axes: Iterable[str], notes: list[str]
) -> list[Seed]:
    """Seeds that split the batch over ``axes``, as far as it has a sample for each
    rank."""
    seeds = []
    for v in batch_inputs(program):
        value = program.values[v]
        fit: list[str] = []
        for axis in axes:
            if not may_split(value.shape[0], mesh, (*fit, axis)):
                notes.append(
                    f"batch dim of {value.name} ({value.shape[0]}) is not split over "
                    f"{'+'.join([*fit, axis])}: {axis} is left off and its ranks "
                    f"repeat the same work"
                )
                continue
            fit.append(axis)
        if fit:
            open_dims = len(value.shape)
            dims: tuple[Axes, ...] = (tuple(fit), *[()] * (open_dims - 1))
            seeds.append(
                Seed(
                    v,
                    dims,
                    (False,) * open_dims,
                    f"batch dim of {value.name}",
                    batch=True,
                )
            )
    return seeds


def expert_seeds(program: Program, mesh: Mesh) -> list[Seed]:
    """Seeds that split the weights of experts over the axes named for them."""
    axes = expert_axes(mesh)
    seeds = {}
    for op in program.ops:
        if axes and str(op.target) == "fxpar.expert_mm.default":
            groups, v = op.node.args[-1], op.operands[1]
            if groups == mesh.count(axes):
                seeds[v] = Seed(
                    v,
                    (axes, (), ()),
                    (False,) * 3,
                    f"convention: experts of {program.values[v].name}",
                    priority=FIRST,
                    experts=True,
                )
    return list(seeds.values())


def seed_weights(engine: Propagation, axis: str) -> None:
    """Split weights over ``axis``, column by column, propagating after each."""
    program = engine.program
    roots = _parameter_roots(program)
    for op in program.ops:
        seed = _column_seed(engine, op, roots, axis)
        if seed is not None:
            engine.seed([seed])


def _parameter_roots(program: Program) -> dict[int, int]:
    """Values that are a parameter up to casts and views -> the parameter's value."""
    roots = {
        v: v
        for declared, v in zip(program.signature.inputs, program.inputs, strict=True)
        if v is not None and declared.kind == "parameter"
    }
    for op in program.ops:
        if len(op.operands) == 1 and op.operands[0] in roots and op.rule.passages:
            for v in op.results:
                if program.values[v].numel == program.values[op.operands[0]].numel:
                    roots[v] = roots[op.operands[0]]
    return roots


def _column_seed(
    engine: Propagation, op: Op, roots: dict[int, int], axis: str
) -> Seed | None:
    state, rule, program = engine.state, op.rule, engine.program
    if not rule.contracted or len(op.results) != 1 or axis in rule.pin:
        return None
    floating = [v for v in op.operands if program.values[v].dtype.is_floating_point]
    weights = [i for i, v in enumerate(op.operands) if v in roots]
    if len(floating) < 2 or not weights:
        return None
    if any(axis in state.origins[v] for v in op.tensors):
        return None
    i = weights[-1]
    v = op.operands[i]
    if axis in state.origins[roots[v]]:
        return None

    def is_split_evenly(factor: str) -> bool:
        return is_even(rule.size[factor], engine.mesh, (axis,))

    columns = [
        (d, dim[0])
        for d, dim in enumerate(rule.operands[i])
        if dim
        and dim[0] in rule.free
        and dim[0] not in rule.contracted
        and _pays(rule.size[dim[0]], dim, engine.mesh, axis)
        and not state.dims[v][d]
    ]
    # Of a fused projection the heads, rather than its three parts.
    for d, factor in sorted(columns, key=lambda column: not is_split_evenly(column[1])):
        if _is_residual(program, op, factor, roots):
            continue
        dims: list[Axes] = [()] * len(program.values[v].shape)
        dims[d] = (axis,)
        name = program.values[roots[v]].name
        return Seed(
            v, tuple(dims), (False,) * len(dims), f"convention: columns of {name}"
        )
    return None


# A weight is split into shards that are not alike if ranks are idle for less than this
# part of the time: not the three of queries, keys and values over two.
_IDLE = 0.2


def _pays(rows: int, dim: tuple[str, ...], mesh: Mesh, axis: str) -> bool:
    """Whether an axis splits a weight along a factor of ``rows`` of a dim."""
    if is_even(rows, mesh, (axis,)):
        return True
    small = idle(rows, mesh, (axis,)) < _IDLE
    return len(dim) == 1 and small and may_split(rows, mesh, (axis,))


# How many values a dim is followed through before it counts as widely read.
_FAR = 200


def _is_residual(program: Program, op: Op, factor: str, roots: dict[int, int]) -> bool:
    """Whether the dim that ``factor`` makes of an op's result feeds several products
    with parameters and is also reduced over by something else, as by a norm."""
    rows = reductions = 0
    tangents = {program.inputs[i] for i, _ in program.signature.tangents}
    start = [
        (v, d)
        for dims, v in zip(op.rule.results, op.results, strict=True)
        for d, dim in enumerate(dims)
        if dim[:1] == (factor,)
    ]
    seen, queue = set(start), list(start)
    while queue and len(seen) < _FAR:
        v, d = queue.pop(0)
        for index, position in program.uses[v]:
            reader = program.ops[index]
            if tangents & set(reader.operands):
                continue
            rule = reader.rule
            major = rule.operands[position][d][:1]
            if not major:
                continue
            if major[0] in rule.contracted or major[0] in rule.whole:
                with_weight = any(u in roots for u in reader.operands)
                rows += with_weight
                reductions += not with_weight
                continue
            for dims, u in zip(rule.results, reader.results, strict=True):
                for e, dim in enumerate(dims):
                    if dim[:1] == major and (u, e) not in seen:
                        seen.add((u, e))
                        queue.append((u, e))
    return len(seen) >= _FAR or (rows > 1 and reductions > 0)
