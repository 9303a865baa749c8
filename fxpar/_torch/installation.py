"""Installed files: what the keys of torch's caches say of them, read once for many.

In: the packages of torch and Triton. Out: ``files``, a digest of names, sizes and times
of change, which costs 20 ms; ``keys``, what torch's caches take of the content, which
it reads as a whole in half a second of each process. Never writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch

# Kinds of files whose content the keys are made of, and folders that have none.
_READ = (".py", ".so", ".pyd", ".cpp", ".ld")
_SKIPPED = {"__pycache__", "include", "lib", "share", "bin"}


def files() -> str:
    """A digest that is another wherever ``keys`` may be."""
    from torch._inductor.runtime import triton_compat

    digest = hashlib.sha256(torch.__version__.encode())
    packages = [torch]
    if triton_compat.HAS_TRITON:
        packages.append(triton_compat.triton)
    for package in packages:
        for path in package.__path__:
            for file in _files(path):
                stat = file.stat()
                line = f"{file.path}|{stat.st_size}|{stat.st_mtime_ns}\n"
                digest.update(line.encode())
    return digest.hexdigest()


def keys_are_known() -> bool:
    """Whether this process has them already."""
    from torch._inductor import codecache

    return bool(codecache.CacheBase.get_system.cache_info().currsize)


def keys() -> dict[str, str]:
    """What torch's caches know torch and Triton by, of the content of their files."""
    from torch._inductor import codecache
    from torch._inductor.runtime import triton_compat

    codecache.CacheBase.get_system()
    has_triton = triton_compat.HAS_TRITON
    return {
        "torch": codecache.torch_key().hex(),
        "triton": triton_compat.triton_key() if has_triton else "",
    }


def take(remembered: Mapping[str, str]) -> None:
    """Let torch's caches know torch and Triton by ``keys`` of the same ``files``."""
    from torch._inductor import codecache
    from torch._inductor.runtime import triton_compat

    set_key: Any = codecache.torch_key
    with contextlib.suppress(RuntimeError, AssertionError):  # it is known already
        set_key.set(bytes.fromhex(remembered["torch"]))
    with mock.patch.object(triton_compat, "triton_key", lambda: remembered["triton"]):
        codecache.CacheBase.get_system()


def _files(folder: str) -> Iterator[os.DirEntry[str]]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir():
            if entry.name not in _SKIPPED:
                yield from _files(entry.path)
        elif entry.name.endswith(_READ):
            yield entry
