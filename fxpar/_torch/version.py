"""Names the versions of what fxpar runs on.

In: the installed packages and devices. Out: texts for keys of caches. Never: imports a
package for its version.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


@functools.cache
def own_version() -> str:
    """Return a digest of fxpar's source: what it compiles may change with any of it."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def versions() -> tuple[str, ...]:
    """Return the versions of torch and Triton, which compile generated kernels."""
    texts = [str(torch.__version__)]
    with contextlib.suppress(PackageNotFoundError):
        texts.append(version("triton"))
    return tuple(texts)


def driver_versions() -> str:
    """Return the versions of CUDA's driver and of NCCL, on which the speed of links
    depends."""
    native: Any = torch._C
    driver = native._cuda_getDriverVersion()  # of a torch with CUDA
    return f"driver {driver}, NCCL {torch.cuda.nccl.version()}"
