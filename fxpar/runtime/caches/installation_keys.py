"""Keys of torch's caches, remembered beside them.

In: an installation of torch. Out: what torch's caches know it by, as an earlier process
read it: one with the same files, which their sizes and times of change say. The first
process reads their content, as torch does. Never changes what the keys are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxpar import _torch, cache_files

FORMAT = "fxpar installation 1"


def load() -> None:
    """Let torch know the keys of its caches: half a second's work, done once for all
    processes that see the folder of caches."""
    if _torch.inductor.caches_disabled() or _torch.installation.keys_are_known():
        return
    files = _torch.installation.files()
    path = cache_files.folder() / f"{files}.installation.json"
    keys = cache_files.read_record(path, FORMAT, files, _decoded)
    if keys is None:
        cache_files.write_record(path, FORMAT, files, _torch.installation.keys())
    else:
        _torch.installation.take(keys)


def _decoded(record: Mapping[str, Any]) -> dict[str, str]:
    keys = {"torch": record["torch"], "triton": str(record["triton"])}
    bytes.fromhex(keys["torch"])  # as torch takes it
    return keys
