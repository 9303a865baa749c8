"""Versions and names of what fxpar runs on."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """Of the kind of GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@functools.cache
def own_version() -> str:
    """Digest of fxpar's source: what it compiles may change with any of it."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def versions() -> tuple[str, ...]:
    """Of what compiles generated kernels."""
    texts = [str(torch.__version__)]
    with contextlib.suppress(PackageNotFoundError):
        texts.append(version("triton"))
    return tuple(texts)
