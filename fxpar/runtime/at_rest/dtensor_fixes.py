"""Partial DTensors that ordinary code meets: reduced before it reads them.

DTensor (2.13) leaves a norm of a split tensor partial. ``item()`` of one is then this
rank's summand, and what changes it in place fails, as Adafactor does. Here both see
the whole value. It holds for every DTensor in the process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from fxpar import _torch


@functools.cache
def complete_partials() -> None:
    """Reduce partial values before ``item()`` and after a norm."""
    _torch.dtensor.reduce_before_item()
    _torch.dtensor.reduce_norms(norm)


def norm(
    x: Any,
    order: float,
    dims: Sequence[int] | int | None,
    keepdim: bool,
    dtype: torch.dtype | None,
) -> Any:
    """``torch.linalg.vector_norm`` of a DTensor, partial over no axis."""
    x = x if dtype is None else x.to(dtype)
    x = x.abs() if order != 2 or x.is_complex() else x
    over: Any = list(range(x.ndim)) if dims is None or dims == [] else dims
    if order == 0:
        return _whole((x != 0).to(x.dtype).sum(over, keepdim))
    if math.isinf(order):
        return _whole(x.amax(over, keepdim) if order > 0 else x.amin(over, keepdim))
    if order == 2:
        return _whole((x * x).sum(over, keepdim)).sqrt()
    return _whole((x**order).sum(over, keepdim)) ** (1 / order)


def _whole(x: Any) -> Any:
    placements = [Replicate() if p.is_partial() else p for p in x.placements]
    return x.redistribute(placements=placements)
