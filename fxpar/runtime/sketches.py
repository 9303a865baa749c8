"""Gradients that ranks should have alike, compared without a collective of their own.

In local mode a gradient that comes out of no graph is each rank's own, and nobody knows
which ranks take the optimizer's step that uses it. So each notes two numbers of it,
which go with the word of its next call (``meet``): there all ranks compare what more
than one of them has noted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import torch

from fxpar.errors import GradientError
from fxpar.runtime.inputs import listed

# Relative difference of gradients that are equal but for rounding.
ALLOWED = 1e-3

FIX = (
    "compile the module that holds them with backend='fxpar' as well, best together "
    "with the rest; or wrap it in DistributedDataParallel; what one rank trains by "
    "itself goes inside `with fxpar.alone():`"
)

# What this rank noted since its last call: by name, norm and projection.
_NOTED: dict[str, tuple[float, float]] = {}


def note(gradients: Mapping[str, torch.Tensor]) -> None:
    """Let the next call compare gradients. ``gradients``: by names that mean the same
    on all ranks."""
    for name, gradient in gradients.items():
        flat = gradient.detach().to_dense().flatten().to(torch.float64)
        waves = torch.arange(flat.numel(), device=flat.device, dtype=flat.dtype).sin()
        _NOTED[name] = flat.norm().item(), flat.dot(waves).item()


def word() -> str:
    """What this rank noted, once."""
    if not _NOTED:
        return ""
    text = json.dumps(_NOTED)
    _NOTED.clear()
    return text


def compare(words: Sequence[str]) -> None:
    """Raise GradientError, on all ranks, if gradients that several noted differ."""
    noted = [json.loads(text) if text else {} for text in words]
    names = dict.fromkeys(name for each in noted for name in each)
    wrong = [name for name in names if _differ([x[name] for x in noted if name in x])]
    if wrong:
        raise GradientError(
            f"gradients of {listed(wrong)} differed between ranks at an optimizer's "
            "step: with FXPAR_INPUTS=local each rank has those of its own part of the "
            "batch, of code that is not compiled",
            fix=FIX,
        )


def _differ(sketches: Sequence[tuple[float, float]]) -> bool:
    """Whether gradients with these norms and projections are not equal."""
    largest = max(norm for norm, _ in sketches)
    if not math.isfinite(largest):
        return False  # a scaler skips such a step
    return any(
        max(values) - min(values) > ALLOWED * largest
        for values in zip(*sketches, strict=True)
    )
