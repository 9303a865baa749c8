"""The device that tests compute on: the CPU, or what TEST_DEVICE says.

With TEST_DEVICE=cuda all ranks of a test share the first GPU of the machine, and
meet by NCCL, which takes them for ranks of as many machines. What they compute counts,
never how long it takes.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.helpers.shared_gpu import NCCL, OVERLAPPING

VARIABLE = "TEST_DEVICE"
NAME = os.environ.get(VARIABLE, "cpu")
BACKEND = "cpu:gloo,cuda:nccl" if NAME == "cuda" else "gloo"


def put(x: Any) -> Any:
    """Tensors, modules and trees of them, on the device of the tests."""
    if NAME == "cpu":
        return x
    if isinstance(x, torch.nn.Module):
        return x.to(NAME)
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(NAME), x)


def by_default() -> contextlib.AbstractContextManager[Any]:
    """Inside, tensors are made on the device of the tests."""
    return contextlib.nullcontext() if NAME == "cpu" else torch.device(NAME)


def compute_exactly() -> None:
    """No float32 product is rounded to fewer bits, also where that is the default."""
    if NAME == "cpu":  # torch's own test helpers forbid to set what has no part there
        return
    torch.backends.cudnn.allow_tf32 = False


def be_a_rank(rank: int) -> None:
    """Take this process's place on a device that its ranks share."""
    if NAME == "cpu":
        return
    from fxpar.runtime.ranks import groups

    settings = {**NCCL, **OVERLAPPING}
    os.environ.update({k: text.format(rank=rank) for k, text in settings.items()})
    torch.cuda.set_device(0)
    compute_exactly()
    # Ranks on one device are a mistake elsewhere.
    groups.check_sharing = lambda hosts, devices: None  # type: ignore[assignment]
