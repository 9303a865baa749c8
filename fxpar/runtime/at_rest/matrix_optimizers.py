"""Optimizers whose update is of a whole matrix, on parameters that lie in parts.

Muon (``torch.optim``) makes a gradient orthogonal by products in bfloat16. Of a split
matrix these are sums of rounded summands, several collectives a product. Here the
gradient is gathered, every rank makes it orthogonal by itself, and takes its part: two
reshards, and the numbers of one device. In a traced step it is one op, since a pass
that parts a product from what is added to it would round twice. It holds for Muon in
the whole process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from fxpar import _torch

_ITERATE = _torch.dtensor.newton_schulz()  # as torch has it


@torch.library.custom_op("fxpar::orthogonal", mutates_args=())
def orthogonal(
    x: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float
) -> torch.Tensor:
    """Muon's iteration on a whole matrix, in which no pass looks."""
    return _ITERATE(x, tuple(coefficients), steps, eps).contiguous()


@orthogonal.register_fake
def _(
    x: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float
) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.bfloat16)


@functools.cache
def orthogonalize_whole() -> None:
    """Let Muon see whole gradients, eagerly and in a traced step."""
    _torch.dtensor.replace_newton_schulz(functools.partial(_whole, _ITERATE))


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
    if _torch.fake.fake_mode_of([gradient]) is not None:
        return torch.ops.fxpar.orthogonal(gradient, *settings)
    return iterate(gradient, *settings)
