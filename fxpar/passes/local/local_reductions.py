"""Local forms of reductions over a split dim whose shards are not alike.

A mean of a shard divides by the rows of the shard; the mean of such means is the whole
one only where shards are alike. So each rank sums, and divides by what makes the
average over ranks the global mean; a sum may be more than a narrow dtype holds, and is
of a wider one. The largest of no rows does not exist: where some rank has none, shards
are first filled with what never wins.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fxpar.passes.local.local_call import LocalCall, Localizer
from fxpar.sharding import shard_sizes

aten = torch.ops.aten


def _reduced_dims(call: LocalCall) -> list[int]:
    """The split dims of the operand that the result lacks."""
    (result, *_), dims = call.rule.contracted_by, call.rule.operands[0]
    split = enumerate(zip(dims, call.operands[0].dims, strict=True))
    return [d for d, (dim, axes) in split if axes and result.intersection(dim)]


def _mean(call: LocalCall, x: fx.Node, *dims: Any, **settings: Any) -> fx.Node:
    shape, split, mesh = call.shapes[0], call.operands[0].dims, call.build.mesh
    reduced = _reduced_dims(call)
    if all(shard_sizes.is_even(shape[d], mesh, split[d]) for d in reduced):
        return call.same(x, *dims, **settings)
    ranks = math.prod(mesh.count(split[d]) for d in reduced)
    rows = math.prod(shape) // math.prod(call.result_shape())
    target, dtype = _SUM[call.node.target], call.node.meta["val"].dtype
    wide = torch.promote_types(dtype, torch.float32)
    total = call.build.call(target, x, *dims, **settings | {"dtype": wide})
    mean = call.build.call(aten.mul.Tensor, total, ranks / rows)
    return call.build.cast(mean, dtype)


_SUM = {
    aten.mean.default: aten.sum.default,
    aten.mean.dim: aten.sum.dim_IntList,
}


def least(dtype: torch.dtype) -> int | float | bool:
    """What is never larger than another."""
    if dtype.is_floating_point:
        return -math.inf
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def most(dtype: torch.dtype) -> int | float | bool:
    """What is never smaller than another."""
    if dtype.is_floating_point:
        return math.inf
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _filled(call: LocalCall, x: fx.Node, identity: int | float | bool) -> fx.Node:
    """The operand with as many rows on each rank as the largest shard has, if some rank
    has none."""
    spec, shape, build = call.operands[0], call.shapes[0], call.build
    dims = _reduced_dims(call)
    if not any(call.is_empty(spec, shape, d) for d in dims):
        return x
    room = spec.local_shape(build.mesh, shape)
    own = call.operand_shape(0)
    padding = [
        build.missing(room[d], own[d]) if d in dims else 0 for d in range(len(shape))
    ]
    return build.pad(x, padding, identity)


def _largest(call: LocalCall, x: fx.Node, *args: Any, **settings: Any) -> fx.Node:
    return call.same(_filled(call, x, least(x.meta["val"].dtype)), *args, **settings)


def _smallest(call: LocalCall, x: fx.Node, *args: Any, **settings: Any) -> fx.Node:
    return call.same(_filled(call, x, most(x.meta["val"].dtype)), *args, **settings)


def _norm(call: LocalCall, x: fx.Node, order: Any = 2, *args: Any, **settings: Any):
    """Of absolute values the largest is at least 0, the smallest at most infinite."""
    identity = math.inf if order == -math.inf else 0.0
    return call.same(_filled(call, x, identity), order, *args, **settings)


LOCAL: dict[Any, Localizer] = {
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.amax.default: _largest,
    aten.max.default: _largest,
    "prims::amax": _largest,
    aten.amin.default: _smallest,
    aten.min.default: _smallest,
    "prims::amin": _smallest,
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten.norm.ScalarOpt_dim_dtype: _norm,
    aten.norm.ScalarOpt_dtype: _norm,
}
