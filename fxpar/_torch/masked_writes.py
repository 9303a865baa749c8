"""Writes one value to all places of a mask without asking where they are.

``x[mask] = v`` is ``index_put_``, whose backward takes ``nonzero`` of a boolean mask: a
shape that depends on values, which no graph of fixed shapes has. In: ``index_put`` and
``index_put_`` that are traced, before they are differentiated. Out: ``torch.where`` in
their place, if the places of one mask all get the same. Never: another value or
gradient; a change to a call that adds, or that has a value for each place.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._C import DispatchKey

_OPS = torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default


@contextlib.contextmanager
def masks_as_choices() -> Iterator[None]:
    """Trace such writes inside as ``torch.where``."""
    with contextlib.ExitStack() as stack:
        for op in _OPS:
            kernels = {DispatchKey.Autograd: functools.partial(_written, op)}
            stack.callback(op._dispatch_cache.clear)
            stack.enter_context(mock.patch.dict(op.py_kernels, kernels))
            op._dispatch_cache.clear()
        yield


def _written(
    op: Any,
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    value: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:
    """Return what ``op`` does."""
    choice = None if accumulate else _choice(x, indices, value)
    if choice is None:
        return op._op_dk(DispatchKey.Autograd, x, indices, value, accumulate)
    return x.copy_(choice) if op._schema.is_mutable else choice


def _choice(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], value: torch.Tensor
) -> torch.Tensor | None:
    """Return ``x`` with ``value`` at ``indices``; None if these are not one mask, or
    the value may differ from place to place."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    masks = [(dim, mask) for dim, mask in enumerate(indices) if mask is not None]
    if len(masks) != 1 or masks[0][1].dtype != torch.bool or value.dtype != x.dtype:
        return None
    dim, mask = masks[0]
    devices = {mask.device, value.device if value.dim() else x.device}
    if devices != {x.device}:  # which ``torch.where`` refuses
        return None
    later = x.dim() - dim - mask.dim()
    # Dims of the value: those before the mask, one for its places, those after it.
    before = max(value.dim() - later - 1, 0)
    if later < 0 or before > dim:
        return None
    sizes = [
        *zip(mask.shape, x.shape[dim : dim + mask.dim()], strict=True),
        *((n, 1) for n in value.shape[before : max(before, value.dim() - later)]),
    ]
    if not all(statically_known_true(n == other) for n, other in sizes):
        return None
    if value.dim() > later:
        shape = *value.shape[:before], *(1,) * mask.dim(), *value.shape[before + 1 :]
        value = value.reshape(shape)
    mask = mask.reshape(*mask.shape, *(1,) * later)
    return torch.where(mask, value.expand_as(x) if value.dim() else value, x)
