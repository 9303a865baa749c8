"""Rewrites of graphs, from what is traced to what a rank runs.

``pipeline`` runs them in order, and its names are those of this package. It is imported
when one of them is first used: generated kernels need some of the passes, and not the
planner with what that needs besides torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxpar.passes import custom_ops as _custom_ops  # noqa: F401  (registers fxpar's ops)
from fxpar.passes import random as _random  # noqa: F401

if TYPE_CHECKING:
    from fxpar.passes.pipeline import (
        Request,
        Result,
        Scheduled,
        Watch,
        parallelize,
        with_schedule,
    )

__all__ = ["Request", "Result", "Scheduled", "Watch", "parallelize", "with_schedule"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fxpar.passes' has no attribute {name!r}")
    from fxpar.passes import pipeline

    return getattr(pipeline, name)
