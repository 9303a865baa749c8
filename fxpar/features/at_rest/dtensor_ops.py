"""Make ops on DTensors of parameters at rest compute what one device computes.

In: DTensors on any mesh; those whose data are set, on a mesh of fxpar. Out: patches of
the whole process, each by a function below. Never: other numbers than one device's.

Norms, ``item`` and extremes: DTensor (2.13) leaves a norm of a split tensor partial.
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

Data that are set (``p.data = ema``): each rank takes its part. DTensor (2.13) keeps its
old data.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from fxpar import _torch
from fxpar.errors import ShardError
from fxpar.features.at_rest.global_values import gathered, part_held, summed
from fxpar.runtime.ranks.groups import has_device_mesh
from fxpar.runtime.ranks.presence import user_line


@functools.cache
def complete_partials() -> None:
    """Reduce partial values before ``item()`` and after norms; keep NaN in extremes."""
    _torch.dtensor.reduce_before_item()
    _torch.dtensor.keep_nan_in_extremes()
    _torch.dtensor.reduce_norms(norm)


@functools.cache
def combine_with_losses() -> None:
    """Let ``loss + weight.square().sum()``, and products, have gradients."""
    _torch.dtensor.combine_with_plain_numbers()


@functools.cache
def set_parts() -> None:
    """Let ``.data = `` change what a DTensor holds."""
    _torch.dtensor.on_set_data(_part_to_hold, has_device_mesh)


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
    layout = {"run_check": False, "shape": x.shape, "stride": x.stride()}
    padded = part.new_full(shape, value)
    return DTensor.from_local(padded, x.device_mesh, x.placements, **layout)


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
    _torch.dtensor.replace_newton_schulz(
        functools.partial(_of_whole_gradient, _ITERATE)
    )


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
