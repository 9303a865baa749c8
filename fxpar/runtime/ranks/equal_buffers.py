"""Buffers become those of rank 0, as they do before each forward of DDP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxpar.errors import RankMismatchError
from fxpar.runtime.ranks import check_inputs, consensus, worlds
from fxpar.runtime.ranks.mean_gradients import meet_at


def take(name: str, buffers: Sequence[torch.Tensor]) -> None:
    """Fill buffers with those of rank 0. Every rank calls this. ``name``: of what uses
    them. Raises RankMismatchError if a rank does not come, or has other buffers."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for x in buffers:
        groups.setdefault((x.dtype, x.device), []).append(x)
    sizes = {
        f"{len(group)} of {dtype}": sum(x.numel() for x in group)
        for (dtype, _), group in groups.items()
    }
    words = meet_at(f"a call of {name}, which has buffers", str(sizes))
    other = next((r for r, word in enumerate(words) if word != words[0]), None)
    if other is not None:
        raise consensus.as_told(
            RankMismatchError(
                f"{name} has other buffers on rank {other} than on rank 0",
                fix="build the same model on every rank",
            )
        )
    with torch.no_grad(), worlds.inside(None):
        for group in groups.values():
            flat = torch.cat([x.detach().reshape(-1) for x in group])
            check_inputs.broadcast(flat)
            parts = flat.split([x.numel() for x in group])
            for x, part in zip(group, parts, strict=True):
                with torch.inference_mode(x.is_inference()):
                    x.copy_(part.view(x.shape))
