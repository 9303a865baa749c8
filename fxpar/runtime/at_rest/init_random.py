"""Random values of parameters at rest, on CPU: each rank its part of one device's.

DTensor keeps random ops on shards apart by the offsets of CUDA's generator. The CPU's
has none, so that after one seed the parts on all ranks would be copies of each other.
Here every rank draws all numbers, as one device does, a chunk at a time, and keeps its
own: the values do not depend on the mesh, and generators stay in step. It holds for
every DTensor on CPU in the process. It is as slow as one device, and needs little
memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fxpar import _torch

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
    part, *rest = args
    if tuple(part.shape) == tuple(shape):
        return op(*args, **kwargs)
    out = part if _torch.objects.schema_of(op).name.endswith("_") else None
    for low, high in _chunks(shape, math.inf if op in UNDIVIDED else CHUNK):
        made = op(part.new_empty((high - low, *shape[1:])), *rest, **kwargs)
        if out is None:
            out = made.new_empty(part.shape)
        first = max(low, start[0])
        last = max(first, min(high, start[0] + part.shape[0]))
        for d in range(1, part.dim()):
            made = made.narrow(d, start[d], part.shape[d])
        made = made[first - low : last - low]
        out[first - start[0] : last - start[0]].copy_(made)
    return out


def _chunks(shape: Sequence[int], size: float) -> Iterator[tuple[int, int]]:
    """Ranges of dim 0 of about ``size`` elements, where the numbers drawn are those of
    one call: multiples of LANES, and at least LANES in the last."""
    rows, row = shape[0], max(1, math.prod(shape[1:]))
    align = LANES // math.gcd(LANES, row)
    step = rows if size >= rows * row else max(1, int(size) // row // align) * align
    bounds = [*range(0, rows, max(1, step))]
    if len(bounds) > 1 and (rows - bounds[-1]) * row < LANES:
        bounds.pop()
    yield from zip(bounds, [*bounds[1:], rows], strict=True)
