"""Decomposes ops so that dims stay separate which torch's own decompositions join.

In: the arguments of an ATen op. Out: its results by ops of which a plan may split every
dim. torch treats all points of an image as one dim, and all windows with their rows as
one: a split of any dim but the first would be strided pieces of it. torch leaves the
gradient of a weight by its norm as an op, and its decomposition of one loss gives wrong
numbers. Never: other numbers than the op gives, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten

Maybe = torch.Tensor | None

_NONE, _MEAN = 0, 1  # as torch numbers reductions


def _group_norm(
    x: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    n: int,
    channels: int,
    points: int,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (normalized, mean, one over the deviation) of channels
    ``[n, channels, *space]`` in groups; the latter two are ``[n, groups]``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    sizes = [n, groups, channels // groups]
    grouped = wide.reshape(*sizes, *x.shape[2:])
    over = list(range(2, grouped.dim()))
    variance, mean = torch.var_mean(grouped, dim=over, correction=0)
    rstd = torch.rsqrt(variance + eps)
    scale = rstd.unsqueeze(-1).expand(sizes)
    if weight is not None:
        scale = scale * weight.reshape(1, *sizes[1:])
    shift = -mean.unsqueeze(-1) * scale
    if bias is not None:
        shift = shift + bias.reshape(1, *sizes[1:])
    each = [n, channels, *[1] * (x.dim() - 2)]
    result = wide * scale.reshape(each) + shift.reshape(each)
    return result.to(x.dtype), mean.to(x.dtype), rstd.to(x.dtype)


def _group_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: Maybe,
    n: int,
    channels: int,
    points: int,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Maybe, Maybe, Maybe]:
    """Return gradients of the input, weight and bias; None for those not in
    ``mask``."""
    dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
    grad, x, mean, rstd = (t.to(wide) for t in (grad, x, mean, rstd))
    sizes, space = [n, groups, channels // groups], list(range(2, x.dim()))
    product, total = grad * x, grad
    if space:
        product, total = (t.sum(dim=space) for t in (product, total))
    product, total = product.reshape(sizes), total.reshape(sizes)
    mean, rstd = mean.unsqueeze(-1), rstd.unsqueeze(-1)
    results: list[Maybe] = [None, None, None]
    if mask[0]:
        scale = torch.ones_like(product)
        if weight is not None:
            scale = scale * weight.to(wide).reshape(1, *sizes[1:])
        products = (product * scale).sum(-1, keepdim=True)
        totals = (total * scale).sum(-1, keepdim=True)
        rows = points * sizes[2]
        of_x = (totals * mean - products) * rstd * rstd * rstd / rows
        constant = -of_x * mean - totals * rstd / rows
        each = [n, channels, *[1] * len(space)]
        of_grad, of_x, constant = (
            t.expand(sizes).reshape(each) for t in (scale * rstd, of_x, constant)
        )
        results[0] = (grad * of_grad + x * of_x + constant).to(dtype)
    if mask[1]:
        of_weight = ((product - total * mean) * rstd).sum(0).reshape(channels)
        results[1] = of_weight.to(dtype if weight is None else weight.dtype)
    if mask[2]:
        of_bias = total.sum(0).reshape(channels)
        results[2] = of_bias.to(dtype if weight is None else weight.dtype)
    return results[0], results[1], results[2]


def _unfold_backward(
    grad: torch.Tensor, shape: Sequence[int], dim: int, size: int, step: int
) -> Any:
    """Return rows of windows, added where they were read, by window and by row of
    it."""
    if not shape:
        return grad.squeeze(0)
    dim %= len(shape)
    count = (shape[dim] - size) // step + 1
    if list(grad.shape) != [*shape[:dim], count, *shape[dim + 1 :], size]:
        return NotImplemented  # broadcast: as an op
    starts = torch.arange(count, device=grad.device).unsqueeze(1) * step
    places = starts + torch.arange(size, device=grad.device)
    rows = grad.movedim(-1, dim + 1)
    zeros = grad.new_zeros(shape)
    return aten.index_put.default(zeros, [*[None] * dim, places], rows, True)


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norm: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients of ``v`` and ``g`` of a weight ``v * (g / norm)``."""
    over = [d for d in range(v.dim()) if d != dim % v.dim()]
    wide = torch.promote_types(norm.dtype, torch.float32)
    grad, wide_v, wide_g, norm = (t.to(wide) for t in (grad, v, g, norm))
    of_g = (grad * wide_v).sum(over, keepdim=True) / norm
    of_v = wide_g / norm * (grad - wide_v * (of_g / norm))
    return of_v.to(v.dtype), of_g.to(g.dtype)


def _multilabel_margin_loss(
    x: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the loss, which classes are targets). A row of targets ends at the first
    that is negative: torch's (before 2.14) takes those after it for class 0."""
    rows, targets = torch.atleast_2d(x), torch.atleast_2d(target)
    classes = rows.shape[1]
    places = torch.arange(classes, device=x.device)
    ends = torch.where(targets < 0, places, classes).amin(-1, keepdim=True)
    is_named = places < ends
    named = torch.where(is_named, targets, 0)
    of_class = is_named.unsqueeze(-1) & (named.unsqueeze(-1) == places)
    is_target = of_class.any(1)
    scores = rows.gather(-1, named)
    margins = (1 - scores.unsqueeze(-1) + rows.unsqueeze(1)).clamp_min(0) / classes
    is_pair = is_named.unsqueeze(-1) & ~is_target.unsqueeze(1)
    losses = torch.where(is_pair, margins, 0).sum((1, 2))
    if reduction != _NONE:
        losses = losses.mean() if reduction == _MEAN else losses.sum()
    elif x.dim() < 2:
        losses = losses.squeeze(0)
    return losses, is_target.to(x.dtype).reshape(target.shape)


def _zeros(shape: Sequence[int], **how: Any) -> torch.Tensor:
    """Return zeros in memory: fake views of zeros without memory, which forward
    derivatives are made of, are no fakes."""
    return aten.zeros.default(shape, **how)


TABLE: dict[Any, Callable[..., Any]] = {
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.unfold_backward.default: _unfold_backward,
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
    aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    aten._efficientzerotensor.default: _zeros,
}


def correct() -> None:
    """Let autograd, too, use ours for an op that torch decomposes before any table."""
    import torch._decomp.decompositions  # noqa: F401  (registers torch's)

    op = aten.multilabel_margin_loss_forward.default
    op.py_kernels[torch._C.DispatchKey.Autograd] = _multilabel_margin_loss
    op._dispatch_cache.clear()


correct()
