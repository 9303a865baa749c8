"""Gradients and learning rates that ranks should have alike, compared without a
collective of their own.

In local mode a gradient that comes out of no graph is each rank's own, and nobody knows
which ranks take the optimizer's step that uses it. So each notes two numbers of it,
which go with the word of its next call (``meet``): there all ranks compare what more
than one of them has noted. So do the rates at which they train shared parameters, which
a scheduler may have set by a rank's own loss.
"""

from __future__ import annotations

import json
import math
import weakref
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from fxpar import _torch
from fxpar.errors import GradientError
from fxpar.runtime.ranks.check_inputs import listed

# Relative difference of gradients that are equal but for rounding.
ALLOWED = 1e-3

FIX = (
    "compile the module that holds them with backend='fxpar' as well, best together "
    "with the rest; or wrap it in DistributedDataParallel; what one rank trains by "
    "itself goes inside `with fxpar.alone():`"
)
_RATE = "learning rate of group "
RATE_FIX = (
    "give the scheduler what all ranks have alike: the loss as the compiled function "
    "returns it, or its mean by torch.distributed.all_reduce"
)
_STEP = "a step of the optimizer"
_STEP_FIX = (
    "decide by what all ranks have alike whether to take it: a loss that "
    "torch.distributed.all_reduce averaged"
)


@dataclass(frozen=True)
class _StepSketches:
    """Gradients of one step of an optimizer, as two numbers each."""

    # Among which ranks it was taken; None before there is a process group.
    group: weakref.ref[Any] | None
    # Whose step it was.
    optimizer: weakref.ref[Optimizer]
    # What it holds, as text.
    parameters: str
    # By name of the parameter: norm, and sum weighted by a wave; rates by group.
    sketches: dict[str, tuple[float, float]]
    # Whether it trains what ranks share, so that all of them take the step.
    is_shared: bool

    def is_among(self, group: Any) -> bool:
        """Whether the ranks of a process group took the step; None for no group."""
        if self.group is None:
            return group is None
        return group is not None and self.group() is group


_steps: list[_StepSketches] = []  # since this rank's last call


def note(
    optimizer: Optimizer, gradients: Mapping[str, torch.Tensor], *, is_shared: bool
) -> None:
    """Let the next call compare gradients, and that of a ``is_shared`` optimizer all
    ranks took the step, with its learning rates. ``gradients``: by names."""
    sketches = {name: sketch(gradient) for name, gradient in gradients.items()}
    if is_shared:
        for i, settings in enumerate(optimizer.param_groups):
            if isinstance(rate := settings.get("lr"), (int, float)):
                sketches[f"{_RATE}{i}"] = (abs(rate), rate)
    if sketches or is_shared:
        group = _torch.distributed.default_group()
        ranks = None if group is None else weakref.ref(group)
        held, whose = _parameters_of(optimizer), weakref.ref(optimizer)
        _steps.append(_StepSketches(ranks, whose, held, sketches, is_shared))


def sketch(x: torch.Tensor) -> tuple[float, float]:
    """The norm of a tensor and its sum weighted by a wave, which tell it from others
    but for rounding."""
    flat = x.detach().to_dense().flatten().to(torch.float64)
    waves = torch.arange(flat.numel(), device=flat.device, dtype=flat.dtype).sin()
    return flat.norm().item(), flat.dot(waves).item()


def forget() -> None:
    """Note nothing of the steps so far: they belong to programs that are gone."""
    _steps.clear()


def word() -> str:
    """What this rank noted, once; of optimizers that are gone only their steps. Ranks
    of another process group know nothing of what was noted before it."""
    if not _steps:
        return ""
    sketches: dict[str, tuple[float, float]] = {}
    steps: Counter[str] = Counter()
    group = _torch.distributed.default_group()
    for step in (each for each in _steps if each.is_among(group)):
        which = f"{_SEPARATOR}{step.parameters} {steps[step.parameters]}"
        steps[step.parameters] += 1
        if step.is_shared:
            sketches[_STEP + which] = (1.0, 1.0)
        if step.optimizer() is not None:
            sketches |= {name + which: x for name, x in step.sketches.items()}
    _steps.clear()
    return json.dumps(sketches) if sketches else ""


# Behind a name: which of several optimizers, by what they hold. Ranks may have made
# others besides.
_SEPARATOR = "|"


# By optimizer how many parameters it has, and what it holds.
_HELD: weakref.WeakKeyDictionary[Optimizer, tuple[int, str]] = (
    weakref.WeakKeyDictionary()
)


def parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """All parameters, in the order of the groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _parameters_of(optimizer: Optimizer) -> str:
    """What an optimizer holds, as text; groups may have been added."""
    every = parameters(optimizer)
    count, held = _HELD.get(optimizer, (0, ""))
    if count != len(every):
        text = " ".join(f"{p.dtype}{list(p.shape)}" for p in every)
        held = f"{type(optimizer).__name__} {zlib.crc32(text.encode()):x}"
        _HELD[optimizer] = len(every), held
    return held


def compare(words: Sequence[str]) -> None:
    """Raise GradientError, on all ranks, if gradients or learning rates that several
    noted differ, or if not all took a step of what they share."""
    sketches_of_ranks = [json.loads(text) if text else {} for text in words]
    names = dict.fromkeys(name for each in sketches_of_ranks for name in each)
    wrong = [
        name
        for name in names
        if _differ([x[name] for x in sketches_of_ranks if name in x])
    ]
    for name in names:
        took = [rank for rank, x in enumerate(sketches_of_ranks) if name in x]
        if name.startswith(_STEP) and len(took) < len(words):
            raise GradientError(
                f"{_STEP} was taken by rank {took[0]} and not by all, so that their "
                "parameters are no longer alike",
                fix=_STEP_FIX,
            )
    rates = [name for name in wrong if name.startswith(_RATE)]
    if rates:
        raise GradientError(
            f"{_listed(rates)} of an optimizer differed between ranks at its step, so "
            "that their parameters are no longer alike",
            fix=RATE_FIX,
        )
    if wrong:
        raise GradientError(
            f"gradients of {_listed(wrong)} differed between ranks at an optimizer's "
            "step: with FXPAR_INPUTS=local each rank has those of its own part of the "
            "batch, of code that is not compiled",
            fix=FIX,
        )


def _listed(keys: Sequence[str]) -> str:
    return listed(dict.fromkeys(key.split(_SEPARATOR)[0] for key in keys))


def _differ(sketches: Sequence[tuple[float, float]]) -> bool:
    """Whether gradients with these norms and projections are not equal."""
    largest = max(norm for norm, _ in sketches)
    if not math.isfinite(largest):
        return False  # a scaler skips such a step
    return any(
        max(values) - min(values) > ALLOWED * largest
        for values in zip(*sketches, strict=True)
    )
