"""Models that DistributedDataParallel wraps, which needs none where fxpar compiles.

Gradients that leave a compiled graph are reduced already, and equal on every rank. The
wrapper's hooks average them, which changes no number, and costs an all-reduce. What it
does to gradients of code that is not compiled stays as it is.
"""

from __future__ import annotations

import warnings
from weakref import WeakSet

from torch import nn

from fxpar import _torch
from fxpar.errors import FxparWarning, compose
from fxpar.runtime.groups import Ranks

_SAID: WeakSet[nn.Module] = WeakSet()


def warn_around(ranks: Ranks) -> None:
    """Warn, once and on rank 0, of a wrapper around what is being compiled."""
    wrapper = _torch.dynamo.surrounding_ddp()
    if wrapper is None or ranks.mesh.size == 1 or ranks.rank != 0 or wrapper in _SAID:
        return
    _SAID.add(wrapper)
    size = sum(p.nbytes for p in wrapper.parameters() if p.requires_grad)
    warnings.warn(
        compose(
            "the model is inside DistributedDataParallel, which averages gradients "
            "that fxpar has reduced: this changes no number, and costs an all-reduce "
            f"of {size} bytes each step",
            fix="leave the wrapper out; where a library wraps the model, see "
            "docs/migrating.md",
        ),
        FxparWarning,
        stacklevel=2,
    )
