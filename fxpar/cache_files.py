"""Keep files beside Inductor's caches, for other ranks and later runs.

In: a path below ``folder()`` and a text. Out: the file, written in one step, so that
who reads it sees all of it or nothing. Files are never deleted here.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from pathlib import Path

from fxpar import _torch


def folder() -> Path:
    """The folder of fxpar's files (in TORCHINDUCTOR_CACHE_DIR)."""
    return Path(_torch.inductor.cache_dir()) / "fxpar"


def folder_mark() -> str:
    """A word of the folder: equal on processes that see the same one. One that cannot
    be written is seen by one process alone."""
    own = uuid.uuid4().hex
    with contextlib.suppress(OSError):
        path = folder() / "mark"
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{own}.new")
        draft.write_text(own)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # in one step, and never over one that is there
        draft.unlink()
        return path.read_text()
    return own


def write_file(path: Path, text: str) -> None:
    """Write a file in one step, unless it is there with this text. Raises OSError."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if path.read_text() == text:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".new")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
