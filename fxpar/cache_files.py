"""Keeps files next to Inductor's caches, for other ranks and later runs, and writes
those that a user asks for.

In: a path (below ``folder()``, if the file is kept for later) and a text. Out: the
file, written in one step, so that a reader sees all of it or nothing, also where
several ranks write it. Never: a file deleted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fxpar import _torch
from fxpar.errors import OptionError
from fxpar.units import digest

log = logging.getLogger("fxpar")

T = TypeVar("T")

_MARK = re.compile("[0-9a-f]{32}")


def folder() -> Path:
    """Return the folder of fxpar's files (in TORCHINDUCTOR_CACHE_DIR)."""
    return Path(_torch.inductor.cache_dir()) / "fxpar"


def folder_text() -> str:
    """Return a text that is equal on processes that see the same folder at the same
    path."""
    return f"{folder_mark()} {folder().resolve()}"


def folder_mark() -> str:
    """Return a word that is equal on processes that see the same folder. Where it
    cannot be written, or was damaged until now, each process has a word of its own."""
    mark = uuid.uuid4().hex
    with contextlib.suppress(OSError):
        path = folder() / "mark"
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{mark}.new")
        draft.write_text(mark)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # in one step, and never over one that is there
        draft.unlink()
        text = path.read_bytes().decode(errors="replace")
        if _MARK.fullmatch(text):
            return text
        _put(path, mark)
    return mark


def read_record(
    path: Path, form: str, key: str, decode: Callable[[dict[str, Any]], T]
) -> T | None:
    """Return the data that ``write_record`` wrote there in this form under this key, as
    ``decode`` returns it. None if there is no file, or, with a line in the log, if it
    is damaged, of another form or key, or cannot be decoded."""
    try:
        data = json.loads(path.read_bytes())
        digest_found = data.pop("digest")
        is_intact = digest_found == digest(json.dumps(data, sort_keys=True), 64)
        if is_intact and (data["format"], data["key"]) == (form, key):
            return decode(data)
    except FileNotFoundError:
        return None
    except Exception:  # damaged bytes may lead to any
        log.debug("%s", path, exc_info=True)
    log.info("%s is damaged or of another version of fxpar: it is made again", path)
    return None


def write_record(path: Path, form: str, key: str, data: dict[str, Any]) -> None:
    """Keep data that ``json`` can write, in one step. If the disk refuses, nothing is
    kept."""
    text = json.dumps({**data, "format": form, "key": key}, sort_keys=True)
    with contextlib.suppress(OSError):
        write_file(path, f'{text[:-1]}, "digest": "{digest(text, 64)}"}}')


def write_file(path: Path, text: str) -> None:
    """Write a file in one step, unless it is there with this text. Raises OSError."""
    with contextlib.suppress(OSError):
        if path.read_bytes() == text.encode():
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    _put(path, text)


def _put(path: Path, text: str) -> None:
    """Write a file in one step, with the permissions that new files have."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.new")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_asked(path: str | Path, text: str) -> None:
    """Write a file that a user asks for, in one step where it is a file of its own (a
    pipe or a terminal takes it as it comes). Raises OptionError."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        _put(path.resolve(), text)  # where a link points
    except OSError as error:
        raise OptionError(
            f"{str(path)!r} cannot be written: {error.strerror or error}",
            fix="name a file in a folder that exists and is writable",
        ) from error
