"""Check what another rank sends about files in the folder of caches, before it is used.

In: keys of torch's caches, as they came through the store. Out: the same, if they have
the form of torch's; else RankMismatchError. Never: a check of what the files hold;
ranks trust one another.
"""

from __future__ import annotations

import re
from typing import Any

from fxpar.errors import RankMismatchError

# A kind, and digits of base 32.
_KEY = re.compile("[a-z][a-z2-7]{6,63}")


def checked_key(key: Any) -> str:
    """Return a key of torch's caches, used in file names, if it has their form."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise _refusal(f"{key!r}, which is not a key of torch's caches")
    return key


def _refusal(what: str) -> RankMismatchError:
    """Return the error for a key that this rank must not use."""
    return RankMismatchError(
        f"another rank sent this one {what}",
        fix="give all ranks of one machine the same TORCHINDUCTOR_CACHE_DIR, and the "
        "same versions of torch and fxpar",
    )
