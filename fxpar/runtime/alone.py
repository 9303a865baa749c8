"""``fxpar.alone``: this rank by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fxpar.errors import FxparError
from fxpar.runtime import presence

_DEPTH = [0]


def is_alone() -> bool:
    """Whether this rank runs by itself, inside ``fxpar.alone``."""
    return _DEPTH[0] > 0


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, this rank runs by itself: ``with fxpar.alone(): evaluate(model)``.

    Compiled functions and models run as they would without ``torch.compile``, so that
    nothing waits for other ranks, and those who wait for this one meanwhile know that
    it works. Gradients made inside are this rank's own. Raises ShardError where the
    parameters of a model lie in parts (``fxpar.shard``), PlanError in
    ``fxpar.train_step``: these take all ranks.
    """
    if torch.compiler.is_compiling():
        raise FxparError(
            "fxpar.alone() inside a compiled function",
            fix="put it around the call of the compiled function",
        )
    _DEPTH[0] += 1
    try:
        with torch.compiler.set_stance("force_eager"), presence.works("is alone"):
            yield
    finally:
        _DEPTH[0] -= 1
