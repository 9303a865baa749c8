"""Splits ops along some dims of one tensor: reductions, sorts, softmax.

A reduced dim that is split leaves the result partial with the op's own reduction, where
there is one. Where shards cannot be combined by one of those (variance, sorts, softmax)
the touched dims are whole. Scans and choices of rows are in ``order``.

A mean of a shard divides by the rows of the shard; the mean of such means is the whole
mean only where shards have one size. Else each rank sums, in a dtype that holds the
sum, and divides such that the average over ranks is the global mean. There is no
maximum of no rows: where some rank has none, shards are first filled with a value that
never wins.

In: calls of these ops. Out: their rules and local forms.
Never: communicates; a split reduction gives a partial result instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.sharding import shard_sizes
from fxpar.sharding.factors import Passage, Rule
from fxpar.sharding.op_table import (
    all_at,
    at,
    keeping,
    make,
    rows,
    tensors_of,
    words_of,
)
from fxpar.sharding.ops.local_call import LocalCall

aten = torch.ops.aten

Dim = int | Sequence[int] | None


def _reduced(
    x: torch.Tensor,
    dims: frozenset[int],
    keepdim: bool = False,
    *,
    whole: bool = True,
    results: int = 1,
    passes: tuple[str, ...] = (),
) -> Rule:
    """Return the rule of ``x`` with ``dims`` removed, or ``_`` if kept. Complex numbers
    have no product over ranks, as no backend has one."""
    whole = whole or ("product" in passes and x.dtype.is_complex)
    words = words_of(x, dims if whole else ())
    result = [
        "_" if i in dims else word
        for i, word in enumerate(words)
        if keepdim or i not in dims
    ]
    passages = (Passage((0,), passes),) if passes else ()
    return make([words], [result] * results, passages=passages)


def over(
    default: Dim = None, *, dim: int | None = 1, keep: int | None = 2, **how: Any
) -> Callable[..., Rule]:
    """Return the rule function of reductions; ``how`` as in _reduced. ``dim``,
    ``keep``: positions of the arguments that name dims, and say whether they stay; None
    if there is none, and all dims go."""

    def rule_of_call(x: torch.Tensor, *args: Any, **rest: Any) -> Rule:
        arguments = dict(enumerate(args, 1))
        dims = rest.get("dim", arguments.get(dim, default)) if dim else None
        keepdim = rest.get("keepdim", arguments.get(keep, False)) if keep else False
        return _reduced(x, all_at(dims, x.ndim), keepdim, **how)

    return rule_of_call


# Of all dims, whatever the other arguments.
over_all = partial(over, dim=None, keep=None)


def truth(x: torch.Tensor, dim: Dim = None, keepdim: bool = False) -> Rule:
    """Return the rule of ``any``. A partial operand passes only as bools: a partial
    integer may be zero where the whole one is not. An empty list of dims reduces
    none."""
    dims = frozenset() if dim == [] or dim == () else all_at(dim, x.ndim)
    passes = ("max",) if x.dtype == torch.bool else ()
    return _reduced(x, dims, keepdim, whole=False, passes=passes)


def averaged(
    rule: Callable[..., Rule], x: torch.Tensor, *args: Any, **how: Any
) -> Rule:
    """Return the rule of a mean. With unequal shards the values that ranks average are
    up to the number of ranks times the mean, which may overflow float16."""
    mean = rule(x, *args, **how)
    if (how.get("dtype") or x.dtype) != torch.float16:
        return mean
    return replace(mean, evenly=mean.contracted)


def along(x: torch.Tensor, dim: int = -1, *_: Any, results: int = 1, **__: Any) -> Rule:
    """Return the rule of ops called as ``(x, dim, ...)`` that keep the shape and need
    ``dim`` whole."""
    return keeping(x, {at(dim, x.ndim)}, results)


def layer_norm(x: torch.Tensor, shape: Sequence[int], *rest: Any) -> Rule:
    """Return the rule of a norm over the last dims, of ``shape``, with its
    statistics."""
    first = x.ndim - len(shape)
    words = words_of(x, range(first, x.ndim))
    affine = [words[first:]] * len(tensors_of(rest))
    statistics = [*words[:first], *["_"] * len(shape)]
    return make([words, *affine], [words, statistics, statistics])


def spectrum(x: torch.Tensor, dims: Sequence[int], *_: Any) -> Rule:
    """Return the rule of Fourier transforms; the last dim may change its size."""
    words = words_of(x, all_at(dims, x.ndim))
    last = at(dims[-1], x.ndim)
    return make([words], [["_" if i == last else w for i, w in enumerate(words)]])


def glu(x: torch.Tensor, dim: int = -1) -> Rule:
    """Return the rule: the dim, whose halves are in different shards, is whole."""
    dim = at(dim, x.ndim)
    words = words_of(x, {dim})
    return make([words], [[*words[:dim], "_", *words[dim + 1 :]]])


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    classes: torch.Tensor | None,
    reduction: str,
    *rest: Any,
) -> Rule:
    """Return the rule of a loss of chunks of the batch with its gradients. A mean
    divides by the total weight, which no rank knows alone."""
    batch = "n" if reduction == "sum" else "n!"
    operands = _logits(batch, target, bias, classes)
    gradients = [[batch, "d!"], ["c!", "d!"], ["c!"]]
    results = [
        words if is_asked else ["_"] * len(words) + ["~n"] * (reduction == "sum")
        for words, is_asked in zip(gradients, rest[-3:], strict=True)
    ]
    return make(operands, [[], *results])


def _logits(
    batch: str,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    classes: torch.Tensor | None,
) -> list[list[str]]:
    extras = [["c!"] for t in (bias, classes) if t is not None]
    targets = [batch, "c!"][: target.ndim]
    return [[batch, "d!"], ["c!", "d!"], targets, *extras]


SUM: dict[str, Any] = {"linear": "0"}
MEAN: dict[str, Any] = {"linear": "0", "reduce": "avg"}
ADDED: dict[str, Any] = {"whole": False}
MAX: dict[str, Any] = {"whole": False, "passes": ("max",)}
MIN: dict[str, Any] = {"whole": False, "passes": ("min",)}
PRODUCT: dict[str, Any] = {"whole": False, "passes": ("product",)}

LINEAR_LOSS = "_linear_cross_entropy_batch_chunked"


# Local forms


def _reduced_dims(call: LocalCall) -> list[int]:
    """Return the split dims of the operand that the result lacks."""
    (result, *_), dims = call.rule.contracted_by, call.rule.operands[0]
    split = enumerate(zip(dims, call.operands[0].dims, strict=True))
    return [d for d, (dim, axes) in split if axes and result.intersection(dim)]


def _local_mean(call: LocalCall, x: fx.Node, *dims: Any, **settings: Any) -> fx.Node:
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


_SUM = {aten.mean.default: aten.sum.default, aten.mean.dim: aten.sum.dim_IntList}


def least(dtype: torch.dtype) -> int | float | bool:
    """Return the value that is never larger than another."""
    if dtype.is_floating_point:
        return -math.inf
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def most(dtype: torch.dtype) -> int | float | bool:
    """Return the value that is never smaller than another."""
    if dtype.is_floating_point:
        return math.inf
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def filled(
    call: LocalCall, x: fx.Node, dims: Sequence[int], identity: int | float | bool
) -> fx.Node:
    """Return the operand; if some rank has no rows of these dims, padded with
    ``identity`` on each rank to the rows of the largest shard."""
    spec, shape, build = call.operands[0], call.shapes[0], call.build
    if not any(call.is_empty(spec, shape, d) for d in dims):
        return x
    room = spec.local_shape(build.mesh, shape)
    own = call.operand_shape(0)
    padding = [
        build.missing(room[d], own[d]) if d in dims else 0 for d in range(len(shape))
    ]
    return build.pad(x, padding, identity)


def _local_extreme(
    never: Callable[[torch.dtype], int | float | bool],
    call: LocalCall,
    x: fx.Node,
    *args: Any,
    **settings: Any,
) -> fx.Node:
    """Return the largest or smallest row; ``never`` is the value that is not chosen."""
    x = filled(call, x, _reduced_dims(call), never(x.meta["val"].dtype))
    return call.same(x, *args, **settings)


_LARGEST, _SMALLEST = partial(_local_extreme, least), partial(_local_extreme, most)

ROWS = {
    **rows("sum", over_all(**ADDED), **SUM, facts="by_row of_all"),
    **rows("sum.dim_IntList", over(**ADDED), **SUM, along=1, facts="by_row"),
    **rows(
        "mean",
        partial(averaged, over_all(**ADDED)),
        **MEAN,
        local=_local_mean,
        facts="by_row of_all",
    ),
    **rows(
        "mean.dim",
        partial(averaged, over(**ADDED)),
        **MEAN,
        local=_local_mean,
        along=1,
        facts="by_row",
    ),
    **rows("amax", over(**MAX), reduce="max", local=_LARGEST, along=1, facts="by_row"),
    **rows(
        "amin",
        over(**MIN),
        reduce="min",
        local=_SMALLEST,
        along=1,
        facts="by_row",
    ),
    **rows("max", over_all(**MAX), reduce="max", local=_LARGEST, facts="of_all"),
    **rows("min", over_all(**MIN), reduce="min", local=_SMALLEST, facts="of_all"),
    **rows("any any.dim any.dims", truth, reduce="max"),
    **rows("prod", over_all(**PRODUCT), reduce="product"),
    **rows("prod.dim_int", over(**PRODUCT), reduce="product"),
    **rows("median.dim", over(results=2), facts="orders alone"),
    **rows("nanmedian.dim", over(results=2), facts="orders"),
    **rows("var_mean.correction", over(results=2)),
    **rows("var.correction hash_tensor", over()),
    **rows("logsumexp", over(), along=1),
    **rows("median", over_all(), facts="orders alone"),
    **rows("nanmedian", over_all(), facts="orders"),
    **rows("mode", over(-1, results=2), facts="orders"),
    **rows("linalg__powsum", over(dim=2, keep=3, **ADDED)),
    # Inductor decomposes these; graphs of which a user writes the schedule have them.
    **rows("_softmax", along, rows=1, work="exp", along=1, facts="by_row"),
    **rows("_log_softmax", along, rows=1, work="exp", along=1),
    **rows("native_layer_norm", layer_norm, empty="fill"),
    **rows(
        "sort sort.stable",
        partial(along, results=2),
        places=1,
        facts="orders alone",
    ),
    **rows("_fft_c2c _fft_r2c _fft_c2r", spectrum, linear="0", empty="fill"),
    **rows("glu", glu),
    **rows(f"torch_nn::{LINEAR_LOSS}", linear_cross_entropy),
    **rows(
        f"torch_nn::{LINEAR_LOSS}_no_reduction",
        lambda x, weight, *rest: make(_logits("n", *rest[:3]), [["n"]]),
    ),
    **rows("prims::sum", over(keep=None, **ADDED), **SUM),
    **rows("prims::amax", over(keep=None, **MAX), reduce="max", local=_LARGEST),
    **rows("prims::amin", over(keep=None, **MIN), reduce="min", local=_SMALLEST),
    **rows("prims::prod", over(keep=None, **PRODUCT), reduce="product"),
    **rows("prims::var prims::xor_sum", over(keep=None)),
    **rows(
        "prims::prepare_softmax_online",
        lambda x, dim: _reduced(x, all_at(dim, x.ndim), True, results=2),
    ),
}
