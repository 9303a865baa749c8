"""Check what another rank sends about files in the folder of caches, before it is used.

In: keys of torch's caches and paths of libraries, as they came through the store. Out:
the same, if the keys have the form of torch's and the paths are in this rank's folder;
else RankMismatchError. Never: a check of what the files hold; ranks trust one another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxpar import _torch
from fxpar._fast import cpp_kernels
from fxpar.errors import RankMismatchError

# A kind, and digits of base 32.
_KEY = re.compile("[a-z][a-z2-7]{6,63}")


def checked_key(key: Any) -> str:
    """Return a key of torch's caches, used in file names, if it has their form."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise _refusal(f"{key!r}, which is not a key of torch's caches")
    return key


def take_kernels(sent: Mapping[str, Any], *, is_folder_shared: bool) -> None:
    """Take over what another rank knows of compiled kernels (``compiled_here``), its
    libraries only where both have one folder of caches."""
    libraries = dict(sent["libraries"]) if is_folder_shared else {}
    folder = Path(_torch.inductor.cache_dir()).resolve()
    for path, key in libraries.values():
        checked_key(key)
        if not Path(path).resolve().is_relative_to(folder):
            raise _refusal(f"the library {path!r}, which is not below {folder}")
    cpp_kernels.take_compiled({**sent, "libraries": libraries})


def _refusal(what: str) -> RankMismatchError:
    """Return the error for a key or path that this rank must not use."""
    return RankMismatchError(
        f"another rank sent this one {what}",
        fix="give all ranks of one machine the same TORCHINDUCTOR_CACHE_DIR, and the "
        "same versions of torch and fxpar",
    )
