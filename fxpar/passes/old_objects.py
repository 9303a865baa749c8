"""Garbage while a program is planned and compiled: looked for among new objects alone.

Planning and compiling make many objects that live for a while, so that Python looks
through all there are again and again: each time through a million that torch, the model
and its libraries are made of, a sixth of the time of a first step.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass

# Inside, so many times as many new objects are made before any are looked through.
RARER = 100

# And so many times that is done before those that outlived it are looked through again:
# few of them are garbage before the end.
OLDER = 1000

# Python itself freezes no more objects than these (3.12 some 400, which never die); who
# does it as a user has torch among them.
OF_PYTHON = 5_000


@dataclass
class _Contexts:
    """Those that are open, of all threads."""

    # How many.
    count: int = 0
    # When Python looks for garbage outside them, as ``gc.get_threshold``.
    thresholds: tuple[int, int, int] = (0, 0, 0)


_OPEN, _LOCK = _Contexts(), threading.Lock()


@contextlib.contextmanager
def old_objects_kept() -> Iterator[None]:
    """Collect no object that was there before, and others more rarely; when the last
    such context ends, all is as it was. Does nothing where the user froze objects."""
    with _LOCK:
        is_ours = _OPEN.count > 0 or gc.get_freeze_count() <= OF_PYTHON
        if is_ours:
            gc.freeze()
            if not _OPEN.count:
                young, *_ = _OPEN.thresholds = gc.get_threshold()
                gc.set_threshold(RARER * young, OLDER, OLDER)
            _OPEN.count += 1
    try:
        yield
    finally:
        with _LOCK:
            _OPEN.count -= is_ours
            if is_ours and not _OPEN.count:
                gc.set_threshold(*_OPEN.thresholds)
                gc.unfreeze()
