"""Calls functions of torch.cuda that torch has for its own tests.

In: seconds. Out: a wait on the current stream; texts of versions. Never: a wait of the
host.
"""

from __future__ import annotations

from typing import Any

import torch

CYCLES = 2e9  # of a GPU in a second, about


def keep_busy(seconds: float) -> None:
    """Let the current stream wait about so long, while the host launches more."""
    torch.cuda._sleep(int(seconds * CYCLES))


def versions() -> str:
    """Return the versions of the driver and of NCCL, on which the speed of links
    depends."""
    native: Any = torch._C
    driver = native._cuda_getDriverVersion()  # of a torch with CUDA
    return f"driver {driver}, NCCL {torch.cuda.nccl.version()}"
