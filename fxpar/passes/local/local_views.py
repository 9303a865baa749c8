"""Local forms of ops that change a shape, or spell a split size among their arguments.

A shard may lie in memory as the whole did not. Its strides can forbid a view that those
of the whole allowed, so a change of shape is a reshape, which copies only then. A split
dim of local size 1 is not a dim of size 1, so squeezing names the dims that go. Strides
among the arguments are those of the whole: the rule says which reshape or permutation
they stood for. Group norms and grouped products are told the local count of their
groups, samples or channels.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.graph.builder import Size, value_of
from fxpar.passes.local.local_call import LocalCall, Localizer
from fxpar.sharding.rules import views
from fxpar.sharding.rules.matmul import counted_dim

aten = torch.ops.aten


def _contiguous(call: LocalCall, x: fx.Node) -> fx.Node:
    if x.meta["val"].is_contiguous():
        return x
    return call.build.call(aten.clone.default, x, memory_format=torch.contiguous_format)


def _reshape(call: LocalCall, x: fx.Node, *_: Any, **__: Any) -> fx.Node:
    return call.build.reshape(x, call.local_shape())


def _squeeze(call: LocalCall, x: fx.Node, dims: Any = None) -> fx.Node:
    shape = call.shapes[0]
    listed = range(len(shape)) if dims is None else dims
    listed = [listed] if isinstance(listed, int) else listed
    squeezed = [d % len(shape) for d in listed if shape and shape[d] == 1]
    return call.build.call(aten.squeeze.dims, x, squeezed)


def _reread(call: LocalCall, x: fx.Node, *args: Any) -> fx.Node:
    """Bits read as another type, of another width: neighbours must lie together."""
    return call.same(_contiguous(call, x), *args)


def _copy_strided(call: LocalCall, x: fx.Node, stride: Any) -> fx.Node:
    """A copy with the dims in this order in memory."""
    shape, build = call.local_shape(), call.build
    local, step = list(stride), build.product(())
    for d in sorted(range(len(shape)), key=lambda d: (stride[d], -d)):
        local[d] = step
        step = build.product((step, build.compute(max, shape[d], 1)))
    return call.same(x, local)


def _as_strided(
    call: LocalCall, x: fx.Node, shape: Any, stride: Any, offset: int | None = None
) -> fx.Node:
    args = value_of((call.node.args[0], shape, stride, offset))
    if views.is_reshape(*args):
        return _reshape(call, x)
    form = views.strided(*args)
    if form is None:
        return _by_strides(call, x, shape, stride, offset)
    build, x = call.build, _cuts(call, x, form)[-1]
    size = x.meta["val"].shape
    narrow = [1 if d is None else size[d] for d in form.source]
    x = build.call(aten.permute.default, x, _order(form))
    x = build.call(aten.reshape.default, x, narrow)
    return build.call(aten.expand.default, x, list(call.local_shape()))


def _repeat(call: LocalCall, x: fx.Node, repeats: Sequence[int]) -> fx.Node:
    """Of one row as many copies as this rank has."""
    new = len(repeats) - len(call.shapes[0])
    rows, own = (1,) * new + call.shapes[0], call.local_shape()
    triples = zip(rows, own, repeats, strict=True)
    return call.same(x, [k if n == 1 else m for n, k, m in triples])


def _order(form: views.Strided) -> list[int]:
    """Dims as the result has them, then those that were cut to one place."""
    order = [d for d in form.source if d is not None]
    return order + [d for d in range(len(form.cuts)) if d not in order]


def _cut_dims(call: LocalCall, form: views.Strided) -> list[int]:
    return [d for d, cut in enumerate(form.cuts) if cut != range(call.shapes[0][d])]


def _cuts(call: LocalCall, x: fx.Node, form: views.Strided) -> list[fx.Node]:
    """``x``, and ``x`` with one dim after another cut."""
    out = [x]
    for d in _cut_dims(call, form):
        cut = form.cuts[d]
        ends = cut.start, cut.stop, cut.step
        out.append(call.build.call(aten.slice.Tensor, out[-1], d, *ends))
    return out


def _as_strided_scatter(
    call: LocalCall,
    x: fx.Node,
    source: fx.Node,
    shape: Any,
    stride: Any,
    offset: int | None = None,
) -> fx.Node:
    build, global_args = call.build, list(value_of(call.node.args))
    if views.as_strided_scatter(*global_args) is None:
        first = _from_start(call, offset)
        _refuse_beyond(call, shape, stride, first)
        return call.same(_laid_out(call, x), source, shape, stride, first)
    del global_args[1]
    if views.is_reshape(*global_args):
        return build.call(aten.reshape.default, source, list(call.local_shape()))
    form = views.strided(*global_args)
    assert form is not None
    parts = _cuts(call, x, form)
    order, size = _order(form), parts[-1].meta["val"].shape
    source = build.call(aten.reshape.default, source, [size[d] for d in order])
    inverse = sorted(range(len(order)), key=order.__getitem__)
    source = build.call(aten.permute.default, source, inverse)
    for d, part in zip(_cut_dims(call, form)[::-1], parts[-2::-1], strict=True):
        cut = form.cuts[d]
        ends = cut.start, cut.stop, cut.step
        source = build.call(aten.slice_scatter.default, part, source, d, *ends)
    return source


def _by_strides(
    call: LocalCall, x: fx.Node, shape: Any, stride: Any, offset: int | None
) -> fx.Node:
    """Any other use of strides: on the whole tensor."""
    first = _from_start(call, offset)
    _refuse_beyond(call, shape, stride, first)
    return call.same(_laid_out(call, x), shape, stride, first)


def _refuse_beyond(call: LocalCall, shape: Any, stride: Any, first: int) -> None:
    """Memory that is around a tensor is no part of its value."""
    ends = [(n - 1) * step for n, step in zip(shape, stride, strict=True)]
    if 0 not in shape and not 0 <= first <= first + sum(ends) < math.prod(
        call.shapes[0]
    ):
        raise PlanError(
            f"{call.node.name} reads memory beyond the tensor by strides",
            fix="index or slice the tensor that owns the memory",
        )


def _from_start(call: LocalCall, offset: int | None) -> int:
    """An offset into memory counted from the tensor's own start."""
    first = call.node.args[0].meta["val"].storage_offset()
    return 0 if offset is None else offset - first


def _laid_out(call: LocalCall, x: fx.Node) -> fx.Node:
    """A whole tensor, laid out as it was."""
    global_x, build = call.node.args[0].meta["val"], call.build
    order = sorted(range(global_x.dim()), key=lambda d: -global_x.stride(d))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    x = build.call(aten.permute.default, x, order)
    x = build.call(aten.permute.default, _contiguous(call, x), inverse)
    if x.meta["val"].stride() != global_x.stride():
        raise PlanError(
            f"{call.node.name} reads a tensor by strides that skip over memory",
            fix="index or slice the tensor instead of torch.as_strided",
        )
    return x


def _group_sizes(
    call: LocalCall, i: int, channels: int, points: int, groups: int
) -> tuple[Size, Size, int, Size]:
    """(N, C, points, groups) that this rank holds of an input that is operand ``i``."""
    n, c, *_ = call.operand_shape(i)
    return n, c, points, call.build.compute(operator.floordiv, c, channels // groups)


def _group_norm(
    call: LocalCall,
    x: fx.Node,
    weight: Any,
    bias: Any,
    n: int,
    c: int,
    hw: int,
    group: int,
    eps: float,
) -> fx.Node:
    return call.same(x, weight, bias, *_group_sizes(call, 0, c, hw, group), eps)


def _group_norm_backward(
    call: LocalCall,
    grad: fx.Node,
    x: fx.Node,
    mean: fx.Node,
    rstd: fx.Node,
    weight: Any,
    n: int,
    c: int,
    hw: int,
    group: int,
    mask: Any,
) -> fx.Node:
    sizes = _group_sizes(call, 1, c, hw, group)
    return call.same(grad, x, mean, rstd, weight, *sizes, mask)


def _counted(call: LocalCall, offs: fx.Node, operand: int, dim: int) -> fx.Node:
    """A running count along a dim of an operand, of this rank's part of the dim."""
    axes, n = call.operands[operand].dims[dim], call.operand_shape(operand)[dim]
    if not axes:
        return offs
    first = call.build.own_start(call.shapes[operand][dim], axes)
    count = call.build.call(aten.sub.Tensor, offs, first)
    return call.build.call(aten.clamp.default, count, 0, n)


def _grouped_mm(
    call: LocalCall,
    x: fx.Node,
    y: fx.Node,
    offs: Any = None,
    *args: Any,
    **options: Any,
) -> fx.Node:
    if offs is not None:
        at = counted_dim(x.meta["val"], y.meta["val"])
        offs = _counted(call, offs, *at)
    return call.same(x, y, offs, *args, **options)


def _grouped_mm_fallback(
    call: LocalCall, x: fx.Node, weight: fx.Node, offs: fx.Node, *grad: fx.Node
) -> fx.Node:
    return call.same(x, weight, _counted(call, offs, 0, 0), *grad)


LOCAL: dict[Any, Localizer] = {
    aten.view.default: _reshape,
    aten.view_copy.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten._reshape_copy.default: _reshape,
    aten._reshape_alias.default: _reshape,
    aten._reshape_alias_copy.default: _reshape,
    "prims::reshape": _reshape,
    "prims::collapse": _reshape,
    "prims::collapse_view": _reshape,
    "prims::split_dim": _reshape,
    aten.repeat.default: _repeat,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.squeeze_copy.default: _squeeze,
    aten.squeeze_copy.dim: _squeeze,
    aten.squeeze_copy.dims: _squeeze,
    "prims::squeeze": _squeeze,
    aten.view.dtype: _reread,
    aten.view_copy.dtype: _reread,
    "prims::view_of_dtype": _reread,
    aten.view_as_complex.default: _reread,
    aten.view_as_complex_copy.default: _reread,
    "prims::copy_strided": _copy_strided,
    aten.as_strided.default: _as_strided,
    aten.as_strided_copy.default: _as_strided,
    "prims::as_strided": _as_strided,
    aten.as_strided_scatter.default: _as_strided_scatter,
    "prims::as_strided_scatter": _as_strided_scatter,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten._grouped_mm.default: _grouped_mm,
    "transformers::grouped_mm_fallback": _grouped_mm_fallback,
    "transformers::grouped_mm_fallback_backward": _grouped_mm_fallback,
}
