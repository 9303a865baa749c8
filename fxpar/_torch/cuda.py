"""What torch.cuda has for its own tests alone."""

from __future__ import annotations

import torch

CYCLES = 2e9  # of a GPU in a second, about


def keep_busy(seconds: float) -> None:
    """Let the current stream wait about so long, while the host launches more."""
    torch.cuda._sleep(int(seconds * CYCLES))
