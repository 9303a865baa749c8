"""Make ops on DTensors of parameters at rest compute what one device computes.

In: DTensors on any mesh; those that are written, on a mesh of fxpar. Out: patches of
the whole process (``serve_parts``). Never: other numbers than one device's.

Writes in place that DTensor (torch 2.13) runs on a copy of the local tensor, as it
gathers a row of a tensor that is split by rows, so that a write is lost; or that it
cannot run at all, such as ``index_fill_``: every rank gathers the global value, runs
the op on it, and copies its own part back. A view that shares no memory with any local
tensor is computed each time it is read. ``_torch.dtensor.serve_aliases`` finds these
ops by what DTensor would do, not by a list of them.

Norms, ``item`` and extremes: DTensor leaves a norm of a split tensor partial.
``item()`` of one is then this rank's summand, and what changes it in place fails, as
Adafactor does. Here both see the whole value. A maximum over ranks may lose a NaN that
one of them has; here it does not, nor does a norm of infinite order.

Random values on CPU: DTensor makes random ops on shards differ by the offsets of CUDA's
generator. The CPU's has none, so that after one seed the parts on all ranks would be
copies of each other. Here every rank draws all numbers, as one device does, a chunk at
a time, and keeps its own: the values do not depend on the mesh, and generators stay in
step. It is as slow as one device, and needs little memory.

Whole matrices: Muon (``torch.optim``) makes a gradient orthogonal by products in
bfloat16. Of a split matrix these are sums of rounded summands, several collectives a
product. Here the gradient is gathered, every rank makes it orthogonal by itself, and
takes its part: two reshards, and the numbers of one device. In a traced step it is one
op, since a pass that separates a product from what is added to it would round twice.

Losses that a penalty on weights is added to, or scales: the loss is an ordinary tensor,
and its gradient is one too.

Data that are set (``p.data = ema``): each rank takes its part. DTensor keeps its old
data.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from fxpar import _torch
from fxpar.errors import ShardError
from fxpar.features.at_rest.crossings import layout_of, part_of, with_part
from fxpar.runtime.ranks.groups import HOME, has_device_mesh
from fxpar.runtime.ranks.presence import is_alone, user_line


@functools.cache
def serve_parts() -> None:
    """Make ops on DTensors see whole values, and writes to them reach all parts."""
    _torch.dtensor.reduce_before_item()
    _torch.dtensor.keep_nan_in_extremes()
    _torch.dtensor.reduce_norms(norm)
    _torch.dtensor.find_overflows_of_all()
    _torch.dtensor.combine_with_plain_numbers()
    _torch.dtensor.serve_aliases(_on_global_values, has_device_mesh)
    _torch.dtensor.on_set_data(_part_to_hold, has_device_mesh)
    orthogonalize_whole()


def summed(x: Any) -> Any:
    """Return the DTensor, reduced so that it is partial over no axis."""
    if not any(p.is_partial() for p in x.placements):
        return x
    placements = [Replicate() if p.is_partial() else p for p in x.placements]
    return x.redistribute(placements=placements)


@torch.no_grad()
def gathered(x: Any) -> torch.Tensor:
    """Return the global value of a DTensor, in memory of its own."""
    if is_alone():
        raise ShardError(
            f"each rank holds a part of a tensor {list(x.shape)}, which no rank can "
            "read or write alone",
            where=user_line(),
            fix="do it on all ranks, outside of fxpar.alone()",
        )
    x = summed(x)
    mesh, spec = layout_of(x)
    where = str(spec), "", str(mesh), "", -1
    whole: torch.Tensor = torch.ops.fxpar.to_global(x.to_local(), list(x.shape), *where)
    return whole


def part_held(x: Any, whole: torch.Tensor) -> torch.Tensor:
    """Return a view of the part of a global value that this rank holds of a DTensor."""
    mesh, spec = layout_of(x)
    return part_of(whole, spec, mesh, dist.get_rank())


def _on_global_values(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op that writes to DTensors, or makes views of one, on global values.

    Raises ShardError if the op changes the shape of a parameter, or writes to one
    through two operands, one of which is ``x.detach()`` or ``x.data``."""
    if not _torch.objects.is_mutable(op):
        return _views(op, *args, **kwargs)
    wholes: dict[int, torch.Tensor] = {}  # by the id of the DTensor
    operands: dict[int, Any] = {}  # by the id of the value that is used for it

    def whole(x: Any) -> Any:
        if not isinstance(x, DTensor):
            operands[id(x)] = x
            return x
        base, replay = _torch.dtensor.base_of(x)
        if id(base) not in wholes:
            wholes[id(base)] = gathered(base)
        value = replay(wholes[id(base)])
        operands[id(value)] = x
        return value

    plain = _torch.fake.tree_map(whole, (tuple(args), dict(kwargs)))
    results = op(*plain[0], **plain[1])
    written = {id(base): base for base in _written(op, args, kwargs)}.values()
    memories = {_torch.objects.memory_of(x.to_local()) for x in written}
    for x in written:
        value = wholes[id(x)]
        if value.shape == x.shape and len(memories) == len(written):
            x.to_local().copy_(part_held(x, value))
        elif torch.Tag.inplace_view in op.tags and not hasattr(x, HOME):
            _torch.dtensor.change_form(x, op, args, kwargs, value)
        else:
            raise ShardError(
                f"{op} changes the shape of a sharded tensor, or writes to it "
                "through two operands, one of which is x.detach() or x.data",
                where=user_line(),
                fix="change whole = x.full_tensor(), and copy it back: x.copy_(whole)",
            )

    def as_operand(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in operands:
            return operands[id(value)]
        mesh = next(x.device_mesh for x in operands.values() if isinstance(x, DTensor))
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim)

    return _torch.fake.tree_map(as_operand, results)


def _written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the DTensors that an op writes to, or to views of which it writes."""
    values = []
    for i, argument in enumerate(_torch.objects.schema_of(op).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values.append(args[i] if i < len(args) else kwargs.get(argument.name))
    leaves = _torch.fake.tree_flatten(values)[0]
    return [_torch.dtensor.base_of(x)[0] for x in leaves if isinstance(x, DTensor)]


def _views(op: Any, x: Any, *settings: Any, **more: Any) -> Any:
    """Return the views that an op makes of a DTensor, or of a view of one. Raises
    ShardError for ``as_strided`` of a view, which has no memory of its own."""
    is_strided = op is torch.ops.aten.as_strided.default
    if is_strided and not (x.is_contiguous() and _torch.objects.base_of(x) is x):
        raise ShardError(
            "as_strided of a view of a sharded tensor, which has no memory of its own",
            where=user_line(),
            fix="index the tensor instead, or take the view of x.full_tensor()",
        )
    base, before = _torch.dtensor.base_of(x)

    form = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    forms = op(form, *settings, **more)

    def view(form: torch.Tensor, pick: Callable[[Any], Any]) -> Any:
        def of(whole: torch.Tensor) -> Any:
            return pick(op(before(whole), *settings, **more))

        return _torch.dtensor.copied_view(base, of, gathered, form)

    if isinstance(forms, torch.Tensor):
        return view(forms, lambda result: result)
    return [view(form, operator.itemgetter(i)) for i, form in enumerate(forms)]


def _part_to_hold(x: Any, y: Any) -> torch.Tensor:
    """Return this rank's part of ``y``, a DTensor or the global value on every rank, to
    replace the local tensor of ``x``. Raises ShardError unless ``y`` has the same shape
    and dtype."""
    if (y.shape, y.dtype) != (x.shape, x.dtype):
        old_form, new_form = (f"{t.dtype} {list(t.shape)}" for t in (x, y))
        raise ShardError(
            f"the data of a sharded tensor, {old_form}, is set to a tensor of "
            f"another form, {new_form}",
            where=user_line(),
            fix="set it to a tensor of the same shape and dtype, or change the model "
            "before fxpar.shard",
        )
    y = y.detach()
    if isinstance(y, DTensor):
        if (y.device_mesh, y.placements) == (x.device_mesh, x.placements):
            return y.to_local()
        y = gathered(y)
    return part_held(x, y).clone(memory_format=torch.contiguous_format)


def norm(
    x: Any,
    order: float,
    dims: Sequence[int] | int | None,
    keepdim: bool,
    dtype: torch.dtype | None,
) -> Any:
    """Return ``torch.linalg.vector_norm`` of a DTensor, partial over no axis."""
    x = x if dtype is None else x.to(dtype)
    if x.dtype in (torch.float16, torch.bfloat16):  # squares would be 0, or infinite
        return norm(x.float(), order, dims, keepdim, None).to(x.dtype)
    x = x.abs() if order != 2 or x.is_complex() else x
    over: Any = list(range(x.ndim)) if dims is None or dims == [] else dims
    if order == 0:
        return summed((x != 0).to(x.dtype).sum(over, keepdim))
    if math.isinf(order):
        x = _never_empty(x, over, 0.0 if order > 0 else math.inf)
        return summed(x.amax(over, keepdim) if order > 0 else x.amin(over, keepdim))
    if order == 2:
        return summed((x * x).sum(over, keepdim)).sqrt()
    return summed((x**order).sum(over, keepdim)) ** (1 / order)


def _never_empty(x: Any, over: Any, value: float) -> Any:
    """Return the DTensor with one row of ``value`` on ranks that have none along a dim
    it is reduced over."""
    part = x.to_local()
    over = {d % x.ndim for d in ([over] if isinstance(over, int) else over)}
    shape = [n or int(d in over) for d, n in enumerate(part.shape)]
    if 0 in x.shape or shape == [*part.shape]:
        return x
    return with_part(x, part.new_full(shape, value))


CHUNK = 1 << 22  # numbers drawn at a time
LANES = 16  # normal_ makes its numbers in groups of so many, the last one overlapping

# These draw a seed at each call and not a number for each element: one chunk.
UNDIVIDED = frozenset({torch.ops.aten.bernoulli_.float})


@functools.cache
def draw_as_one_device() -> None:
    """Let random ops on CPU DTensors give what they would on one device."""
    _torch.dtensor.on_random_op(draw)


def draw(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    shape: Sequence[int],
    start: Sequence[int],
) -> Any:
    """Run a random op on ``args[0]``, the part that begins at ``start`` of a tensor of
    the global ``shape``."""
    part, *settings = args
    if tuple(part.shape) == tuple(shape):
        return op(*args, **kwargs)
    result = part if _torch.objects.schema_of(op).name.endswith("_") else None
    for low, high in _chunks(shape, math.inf if op in UNDIVIDED else CHUNK):
        chunk = op(part.new_empty((high - low, *shape[1:])), *settings, **kwargs)
        if result is None:
            result = chunk.new_empty(part.shape)
        first = max(low, start[0])
        last = max(first, min(high, start[0] + part.shape[0]))
        for d in range(1, part.dim()):
            chunk = chunk.narrow(d, start[d], part.shape[d])
        chunk = chunk[first - low : last - low]
        result[first - start[0] : last - start[0]].copy_(chunk)
    return result


def _chunks(shape: Sequence[int], size: float) -> Iterator[tuple[int, int]]:
    """Yield ranges of dim 0 of about ``size`` elements such that the numbers drawn
    equal those of one call: multiples of LANES, and at least LANES in the last."""
    rows, row = shape[0], max(1, math.prod(shape[1:]))
    align = LANES // math.gcd(LANES, row)
    step = rows if size >= rows * row else max(1, int(size) // row // align) * align
    bounds = [*range(0, rows, max(1, step))] or [0]
    if len(bounds) > 1 and (rows - bounds[-1]) * row < LANES:
        bounds.pop()
    yield from zip(bounds, [*bounds[1:], rows], strict=True)


_ITERATE = _torch.dtensor.newton_schulz()  # as torch has it


@torch.library.custom_op("fxpar::orthogonal", mutates_args=())
def orthogonal(
    x: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float
) -> torch.Tensor:
    """Run Muon's iteration on a whole matrix, as an op that no pass looks into."""
    return _ITERATE(x, tuple(coefficients), steps, eps).contiguous()


@orthogonal.register_fake
def _(
    x: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float
) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.bfloat16)


@functools.cache
def orthogonalize_whole() -> None:
    """Let Muon see whole gradients, eagerly and in a traced step."""
    _torch.dtensor.newton_schulz(functools.partial(_of_whole_gradient, _ITERATE))


def _of_whole_gradient(
    iterate: Callable[..., Any], gradient: Any, *settings: Any
) -> Any:
    """Return ``iterate(gradient, *settings)``, of the whole gradient on every rank."""
    if isinstance(gradient, DTensor):
        mesh = gradient.device_mesh
        everywhere = [Replicate()] * mesh.ndim
        target = [Replicate() if p.is_partial() else p for p in gradient.placements]
        whole = gradient.redistribute(placements=everywhere).to_local()
        update = iterate(whole, *settings).contiguous()
        update_everywhere = DTensor.from_local(
            update, mesh, everywhere, run_check=False
        )
        return update_everywhere.redistribute(placements=target)
    if _torch.fake.fake_mode_of([gradient]) is not None:
        return torch.ops.fxpar.orthogonal(gradient, *settings)
    return iterate(gradient, *settings)
