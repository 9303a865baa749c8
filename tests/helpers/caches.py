"""Folders of caches in which no program is known, for tests of what a start finds."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir

BASE_32 = "abcdefghijklmnopqrstuvwxyz234567"  # of the folders that hold code


def without_programs(folder: Path) -> str:
    """A folder gets the compiled code that this process's caches have, and shares what
    is compiled anew: a C++ compiler takes a second for a kernel, in each such folder.
    The locks are shared as well, so that no process reads what another writes."""
    home = Path(cache_dir())
    folder.mkdir(exist_ok=True)
    for name in ["locks", *map("".join, product(BASE_32, repeat=2))]:
        (home / name).mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(home / name)
    return str(folder)
