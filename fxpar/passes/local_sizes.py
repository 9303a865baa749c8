"""Local forms of ops that spell a split size, or count along a split dim, among their
arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpar.passes.local_call import LocalCall, Localizer
from fxpar.sharding.rules.matmul import counted_dim

aten = torch.ops.aten


def _convolution(call: LocalCall, *args: Any) -> fx.Node:
    *rest, transposed, output_padding, groups = args
    if groups > 1:
        channels = (call.local_shape() if transposed else call.operand_shape(0))[1]
        groups = channels // call.operand_shape(1)[1]
    return call.same(*rest, transposed, output_padding, groups)


def _convolution_backward(
    call: LocalCall,
    grad: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias_sizes: Any,
    *args: Any,
) -> fx.Node:
    *rest, transposed, output_padding, groups, mask = args
    out = call.operand_shape(0)[1]
    if groups > 1:
        channels = out if transposed else call.operand_shape(1)[1]
        groups = channels // call.operand_shape(2)[1]
    if bias_sizes is not None:
        bias_sizes = [out]
    return call.same(
        grad, x, weight, bias_sizes, *rest, transposed, output_padding, groups, mask
    )


def _group_sizes(
    call: LocalCall, i: int, channels: int, groups: int
) -> tuple[int, int, int]:
    """(N, C, groups) that this rank holds of an input that is operand ``i``."""
    n, c, *_ = call.operand_shape(i)
    return n, c, groups * c // channels


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
    n, c, group = _group_sizes(call, 0, c, group)
    return call.same(x, weight, bias, n, c, hw, group, eps)


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
    n, c, group = _group_sizes(call, 1, c, group)
    return call.same(grad, x, mean, rstd, weight, n, c, hw, group, mask)


def _counted(call: LocalCall, offs: fx.Node, operand: int, dim: int) -> fx.Node:
    """A running count along a dim of an operand, of this rank's part of the dim."""
    axes, n = call.operands[operand].dims[dim], call.operand_shape(operand)[dim]
    if not axes:
        return offs
    first = call.build.offset(axes, n)
    counted = call.build.call(aten.sub.Tensor, offs, first)
    return call.build.call(aten.clamp.default, counted, 0, n)


def _grouped_mm(
    call: LocalCall, x: fx.Node, y: fx.Node, offs: Any = None, *rest: Any, **named: Any
) -> fx.Node:
    if offs is not None:
        at = counted_dim(x.meta["val"], y.meta["val"])
        offs = _counted(call, offs, *at)
    return call.same(x, y, offs, *rest, **named)


def _grouped_mm_fallback(
    call: LocalCall, x: fx.Node, weight: fx.Node, offs: fx.Node, *grad: fx.Node
) -> fx.Node:
    return call.same(x, weight, _counted(call, offs, 0, 0), *grad)


LOCAL: dict[Any, Localizer] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten._grouped_mm.default: _grouped_mm,
    "transformers::grouped_mm_fallback": _grouped_mm_fallback,
    "transformers::grouped_mm_fallback_backward": _grouped_mm_fallback,
}
