"""Versions and names of what fxpar runs on."""

from __future__ import annotations

import contextlib
from importlib.metadata import PackageNotFoundError, version

import torch


def device_name(device: torch.device) -> str:
    """Of the kind of GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def own_version() -> str:
    """Of fxpar; "" of a checkout that is not installed."""
    with contextlib.suppress(PackageNotFoundError):
        return version("fxpar")
    return ""


def versions() -> tuple[str, ...]:
    """Of what compiles generated kernels."""
    found = [str(torch.__version__)]
    with contextlib.suppress(PackageNotFoundError):
        found.append(version("triton"))
    return tuple(found)
