"""Set the device of new tensors while fxpar's own code runs.

In: what the user set, by ``torch.set_default_device`` or ``with torch.device(...)``.
Out: a context in which tensors made without a device are on the CPU, as code that
plans, rewrites and compares numbers needs them. Never: a change to where the user's own
code makes tensors.
"""

from __future__ import annotations

import contextlib

import torch


def on_cpu_by_default() -> contextlib.AbstractContextManager[object]:
    """Return a context in which tensors are made on the CPU unless a device is named.
    It costs nothing where that is so anyway: a default device slows every call of
    torch."""
    if torch.get_default_device().type == "cpu":
        return contextlib.nullcontext()
    return torch.device("cpu")
