"""Optimizers whose update is of a whole matrix, on parameters that lie in parts.

Muon (``torch.optim``) makes a gradient orthogonal by products in bfloat16. Of a split
matrix these are sums of rounded summands, several collectives a product. Here the
gradient is gathered, every rank makes it orthogonal by itself, and takes its part: two
reshards, and the numbers of one device. It holds for Muon in the whole process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from fxpar import _compat


@functools.cache
def orthogonalize_whole() -> None:
    """Let Muon see whole gradients, eagerly and in a traced step."""
    _compat.wrap_newton_schulz(_whole)


def _whole(iterate: Callable[..., Any], gradient: Any, *settings: Any) -> Any:
    """``iterate(gradient, *settings)``, of the whole gradient on every rank."""
    if isinstance(gradient, DTensor):
        mesh = gradient.device_mesh
        everywhere = [Replicate()] * mesh.ndim
        lies = [Replicate() if p.is_partial() else p for p in gradient.placements]
        whole = gradient.redistribute(placements=everywhere).to_local()
        update = iterate(whole, *settings).contiguous()
        made = DTensor.from_local(update, mesh, everywhere, run_check=False)
        return made.redistribute(placements=lies)
    if _compat.fake_mode_of([gradient]) is not None:
        update = iterate(_closed(gradient), *settings)
        return _closed(update)
    return iterate(gradient, *settings)


def _closed(x: torch.Tensor) -> torch.Tensor:
    """A traced matrix that the plan must leave whole."""
    return torch.ops.fxpar.constrain(x, ",".join("_" * x.dim()))
