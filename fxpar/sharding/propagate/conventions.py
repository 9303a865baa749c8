"""Seeds the splits of a mesh axis by conventions, when no hint names it.

In: a Program and a Mesh; for weights, the engine of a propagation. Out: seeds, and
notes of dims that are not split. An axis named as in ``BATCH`` splits dim 0 of the
inputs, also where hints split parameters along it (ZeRO); one named as in ``SEQUENCE``
splits dim 1 of inputs that are sequences, if there are any. Any other axis splits
weights as an expert would: walking the forward program, the first contraction with a
parameter that the axis does not touch yet has its output dim split ("column");
propagation then finds the matching input dim of the next one ("row") by itself. In a
mesh without a batch axis by name the first axis is one, unless it is named as in
``MODEL``. Never: splits the features of a residual stream, which many layers read
and norms reduce over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh, axis_of
from fxpar.sharding.pipeline_axis import is_pipeline
from fxpar.sharding.program import Op, Program, Value
from fxpar.sharding.propagate.propagation import FIRST, Propagation, Seed
from fxpar.sharding.shard_sizes import can_split, idle, is_even

BATCH = ("dp", "ddp", "data", "batch", "fsdp", "hsdp", "zero", "replica")
EXPERTS = ("ep", "expert", "experts")
SEQUENCE = ("cp", "sp", "seq")
EXPERT_MM = "fxpar.expert_mm.default"
TIME = "microbatch"  # the axis of a batch's parts, which are computed in turn
MODEL = ("tp", "mp", "model", "tensor", "heads", *SEQUENCE)


def is_batch_name(axis: str) -> bool:
    """Return whether an axis has a name by which it splits the batch."""
    return axis_of(axis).lower() in (*BATCH, *EXPERTS)


def batch_axes(mesh: Mesh) -> Axes:
    """Return the axes that split the batch unless a hint uses them otherwise."""
    batch = tuple(filter(is_batch_name, mesh.names))
    first = next((axis_of(x) for x in mesh.names if not is_pipeline(x)), "")
    if batch or not first or first.lower() in MODEL:
        return batch
    return mesh.parts([first])


def expert_axes(mesh: Mesh) -> Axes:
    """Return the axes that split experts; they split the batch as well, like
    ``batch_axes``."""
    return _named(mesh, EXPERTS)


def sequence_axes(mesh: Mesh) -> Axes:
    """Return the axes that split sequences unless a hint uses them otherwise."""
    return _named(mesh, SEQUENCE)


def _named(mesh: Mesh, names: Collection[str]) -> Axes:
    """Return the axes of several ranks that have one of the names."""
    axes = (axis for axis, size in mesh.axes if size > 1)
    return tuple(axis for axis in axes if axis_of(axis).lower() in names)


def plain_inputs(program: Program, *, fed: bool = False) -> list[Value]:
    """Return inputs without a stated use; with ``fed`` also those with one, such as
    inputs of which each rank feeds a part."""
    return [
        program.values[v]
        for declared, v in program.tensor_inputs
        if declared.kind == "input" and (fed or declared.use is None)
    ]


def sequence_inputs(program: Program) -> list[int]:
    """Return values of the inputs whose dim 1 is the sequence: tokens, embeddings, and
    inputs as long as the first of them. A tensor [batch, features] is none."""
    inputs = [v for v in plain_inputs(program) if len(v.shape) >= 2]

    def is_sequence(value: Value) -> bool:
        counts = not (value.dtype.is_floating_point or value.dtype.is_complex)
        return value.shape[1] > 1 and (len(value.shape) == 3 or counts)

    first = next(filter(is_sequence, inputs), None)
    if first is None:
        return []
    samples, rows = first.shape[:2]
    return [
        v.index for v in inputs if v.shape[1] == rows and v.shape[0] in (1, samples)
    ]


def sequence_seeds(
    program: Program, mesh: Mesh, axes: Axes, notes: list[str]
) -> list[Seed]:
    """Return seeds that split sequences over ``axes``; add a note where rows are too
    few."""
    seeds = []
    for v in sequence_inputs(program):
        value = program.values[v]
        if not can_split(value.shape[1], mesh, axes, even=program.even):
            notes.append(
                f"sequence dim of {value.name} ({value.shape[1]}) is not split over "
                f"{'+'.join(axes)}, whose ranks repeat the same work"
            )
            continue
        seeds.append(_splitting(value, 1, axes, f"sequence dim of {value.name}"))
    return seeds


def batch_inputs(program: Program, *, fed: bool = False) -> list[int]:
    """Return values of the inputs that hold the batch: dim 0 as large as the first
    one's. ``fed``: as for ``plain_inputs``."""
    inputs = plain_inputs(program, fed=fed)
    first = next((v for v in inputs if len(v.shape) >= 2), None)
    first = first or next((v for v in inputs if v.shape), None)
    if first is None or first.shape[0] == 1:
        return []
    return [v.index for v in inputs if v.shape and v.shape[0] == first.shape[0]]


def batch_seeds(
    program: Program, mesh: Mesh, axes: Iterable[str], notes: list[str]
) -> list[Seed]:
    """Return seeds that split the batch over ``axes``, as far as it has a sample for
    each rank; axes that split experts are minor, so that tokens which are gathered
    along them stay split over the others."""
    seeds, experts = [], expert_axes(mesh)
    axes = sorted(axes, key=lambda axis: axis in experts)
    for v in batch_inputs(program):
        value = program.values[v]
        fit: list[str] = []
        for axis in axes:
            split = (*fit, axis)
            if not can_split(value.shape[0], mesh, split, even=program.even):
                notes.append(
                    f"batch dim of {value.name} ({value.shape[0]}) is not split over "
                    f"{'+'.join([*fit, axis])}: {axis} is left off and its ranks "
                    f"repeat the same work"
                )
                continue
            fit.append(axis)
        if fit:
            origin = f"batch dim of {value.name}"
            seeds.append(_splitting(value, 0, tuple(fit), origin, batch=True))
    return seeds


def _splitting(value: Value, d: int, axes: Axes, origin: str, **how: Any) -> Seed:
    """Return the seed that splits one dim of a value and leaves all open."""
    dims = tuple(axes if i == d else () for i in range(len(value.shape)))
    return Seed(value.index, dims, (False,) * len(dims), origin, **how)


def expert_seeds(program: Program, mesh: Mesh) -> list[Seed]:
    """Return seeds that split the weights of experts over the axes named for them."""
    axes = expert_axes(mesh)
    seeds = {}
    for op in program.ops:
        if axes and str(op.target) == EXPERT_MM:
            groups, v = op.node.args[3], op.operands[1]
            if groups == mesh.count(axes):
                value = program.values[v]
                origin = f"convention: experts of {value.name}"
                how = {"priority": FIRST, "experts": True}
                seeds[v] = _splitting(value, 0, axes, origin, **how)
    return list(seeds.values())


def seed_weights(engine: Propagation, axis: str) -> None:
    """Split weights over ``axis``, column by column, propagating after each. Heads that
    it does not divide are split over the first of its parts, on a mesh that has
    some."""
    program, mesh = engine.program, engine.mesh
    roots, parts = parameter_roots(program), engine.mesh.parts([axis])
    # Heads wait for other weights that share them and take the whole axis.
    waiting: list[tuple[Op, int]] = []
    for op in program.ops:
        heads = _heads(program, op, roots) if len(parts) > 1 else None
        if heads is not None and not is_even(heads, mesh, parts):
            waiting.append((op, heads))
        elif _column_seed(engine, op, roots, parts, parts) is not None:
            if heads is None:
                _seed_heads(engine, waiting, roots, parts)
            seed = _column_seed(engine, op, roots, parts, parts)
            if seed is not None:
                engine.seed([seed])
    _seed_heads(engine, waiting, roots, parts)


def _seed_heads(
    engine: Propagation,
    waiting: list[tuple[Op, int]],
    roots: dict[int, int],
    parts: Axes,
) -> None:
    """Split the waiting weights, whose columns make too few heads for the whole axis,
    over the most leading parts that divide the heads. Empties ``waiting``."""
    while waiting:
        op, heads = waiting.pop(0)
        fit = [n for n in range(len(parts)) if is_even(heads, engine.mesh, parts[:n])]
        seed = _column_seed(engine, op, roots, parts, parts[: fit[-1]])
        if seed is not None and fit[-1]:
            engine.seed([seed])


def _heads(program: Program, op: Op, roots: dict[int, int]) -> int | None:
    """Return how many heads the columns of a weight make, None if they make none."""
    heads_of_factors = (heads_of(program, op, factor, roots) for factor in op.rule.free)
    return next((heads for heads in heads_of_factors if heads is not None), None)


def parameter_roots(program: Program) -> dict[int, int]:
    """Return values that are a parameter up to casts and views -> the parameter's
    value."""
    roots = {
        v: v for declared, v in program.tensor_inputs if declared.kind == "parameter"
    }
    for op in program.ops:
        if len(op.operands) == 1 and op.operands[0] in roots and op.rule.passages:
            for v in op.results:
                if program.values[v].numel == program.values[op.operands[0]].numel:
                    roots[v] = roots[op.operands[0]]
    return roots


def _column_seed(
    engine: Propagation, op: Op, roots: dict[int, int], parts: Axes, axes: Axes
) -> Seed | None:
    """Return a seed over ``axes`` of the weight of an op, if no one of the ``parts`` of
    the axis (``axes`` are some of them) touches the op or the weight yet."""
    state, rule, program = engine.state, op.rule, engine.program
    if (
        not rule.contracted
        or len(op.results) != 1
        or not rule.pin.keys().isdisjoint(parts)
    ):
        return None
    floating = [v for v in op.operands if program.values[v].dtype.is_floating_point]
    weights = [i for i, v in enumerate(op.operands) if v in roots]
    if len(floating) < 2 or not weights:
        return None
    if any(axis in state.origins[v] for v in op.tensors for axis in parts):
        return None
    i = weights[-1]
    v = op.operands[i]
    if not state.origins[roots[v]].keys().isdisjoint(parts):
        return None

    def has_whole_heads(factor: str) -> bool:
        heads = heads_of(program, op, factor, roots)
        return axes == parts if heads is None else is_even(heads, engine.mesh, axes)

    columns = [
        (d, dim[0])
        for d, dim in enumerate(rule.operands[i])
        if dim
        and dim[0] in rule.free
        and dim[0] not in rule.contracted
        and _is_worthwhile(rule.size[dim[0]], dim, engine.mesh, axes, even=program.even)
        and not state.dims[v][d]
        and (len(parts) == 1 or has_whole_heads(dim[0]))
    ]

    def order(column: tuple[int, str]) -> tuple[bool, bool]:
        """Return a sort key: of a fused projection the heads, or the columns of gates,
        come before the dim that is cut into its parts."""
        # By an op of one operand, which cuts the dim or sums over it.
        is_cut = len(columns) > 1 and any(
            len(reader.operands) == 1 and _is_end_of(reader, major)
            for reader, major, _ in _readers(program, op, column[1], set())
        )
        return is_cut, not is_even(rule.size[column[1]], engine.mesh, axes)

    for d, factor in sorted(columns, key=order):
        # Norms of heads, too, reduce over what several products read.
        heads = heads_of(program, op, factor, roots)
        if heads is None and _is_residual(program, op, factor, roots):
            continue
        origin = f"convention: columns of {program.values[roots[v]].name}"
        return _splitting(program.values[v], d, axes, origin)
    return None


# A weight is split into unequal shards if ranks are idle for less than this part of the
# time: the three parts of queries, keys and values are not split over two ranks.
_IDLE = 0.2


def _is_worthwhile(
    rows: int, dim: tuple[str, ...], mesh: Mesh, axes: Axes, *, even: bool
) -> bool:
    """Return whether axes split a weight along a factor of ``rows`` rows: evenly, or
    with little idle time if the factor is a whole dim."""
    if is_even(rows, mesh, axes):
        return True
    small = idle(rows, mesh, axes) < _IDLE
    return len(dim) == 1 and small and can_split(rows, mesh, axes, even=even)


def heads_of(
    program: Program, op: Op, factor: str, roots: Mapping[int, int]
) -> int | None:
    """Return how many heads of attention a factor of a weight makes of an op's result:
    the major part of that dim is then shared by two activations whose product is taken.
    None if the columns make no heads."""
    rule = op.rule
    columns = [
        name
        for dims, v in zip(rule.operands, op.operands, strict=True)
        for dim in dims
        for name in dim
        if v in roots and len(rule.where[name]) == 2 and name not in rule.contracted
    ]
    if factor not in columns:
        return None
    for reader, shared, heads in _readers(program, op, factor, set()):
        have = sum(
            len(dims) > 2 and any(shared in dim for dim in dims)
            for dims in reader.rule.operands
        )
        product = reader.rule.contracted and shared not in reader.rule.contracted
        of_weights = any(v in roots for v in reader.operands)
        more = heads < rule.size[factor] or factor != columns[-1]
        if product and have > 1 and more and not of_weights:
            return heads
    return None


def _is_residual(
    program: Program, op: Op, factor: str, roots: Mapping[int, int]
) -> bool:
    """Return whether the dim that ``factor`` makes of an op's result feeds several
    products with parameters and is also reduced over by something else, as by a
    norm."""
    rows = reductions = 0
    seen: set[tuple[int, int]] = set()
    for reader, major, _ in _readers(program, op, factor, seen):
        if _is_end_of(reader, major):
            with_weight = any(u in roots for u in reader.operands)
            rows += with_weight
            reductions += not with_weight
    return len(seen) >= _FAR or (rows > 1 and reductions > 0)


def _is_end_of(reader: Op, factor: str) -> bool:
    """Return whether an op sums over a factor, or needs it whole."""
    return factor in reader.rule.contracted or factor in reader.rule.whole


# How many values a dim is followed through before it counts as widely read.
_FAR = 200


def _readers(
    program: Program, op: Op, factor: str, seen: set[tuple[int, int]]
) -> Iterator[tuple[Op, str, int]]:
    """Yield the ops of the forward that read the dim ``factor`` makes of an op's
    result, wherever it is the major part of a dim, each with the factor it has there
    and how many rows views left it. ``seen``: filled with (value, dim)."""
    tangents = {program.inputs[i] for i, _ in program.signature.tangents}
    queue = [
        (v, d, op.rule.size[factor])
        for dims, v in zip(op.rule.results, op.results, strict=True)
        for d, dim in enumerate(dims)
        if dim[:1] == (factor,)
    ]
    seen.update((v, d) for v, d, _ in queue)
    while queue and len(seen) < _FAR:
        v, d, rows = queue.pop(0)
        rows = min(rows, program.values[v].shape[d])
        for index, position in program.uses[v]:
            reader = program.ops[index]
            major = reader.rule.operands[position][d][:1]
            if not major or tangents & set(reader.operands):
                continue
            yield reader, major[0], rows
            if _is_end_of(reader, major[0]):
                continue
            for dims, u in zip(reader.rule.results, reader.results, strict=True):
                for e, dim in enumerate(dims):
                    if dim[:1] == major and (u, e) not in seen:
                        seen.add((u, e))
                        queue.append((u, e, rows))
