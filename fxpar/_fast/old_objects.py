"""Limits garbage collection to new objects while a program is planned and compiled.

Planning and compiling make many objects that live for a while, so that Python looks
through all objects again and again: each time through a million of torch, the model and
its libraries, a sixth of the time of a first step. In: Python's collector. Out: a
context. Never: changes the collector where the user froze objects.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from fxpar._fast.switch import shortcut

# The first threshold is multiplied by this inside: collections are rarer.
RARER = 100

# The other two thresholds inside: objects that outlived a collection are looked through
# again after so many: few of them are garbage before the end.
OLDER = 1000

# Python itself freezes no more objects than these (3.12 some 400, which never die); a
# user who freezes has torch among them.
OF_PYTHON = 5_000


@shortcut
@contextlib.contextmanager
def old_objects_kept() -> Iterator[None]:
    """Collect no object that was there before, and others more rarely; when the last
    such context ends, restore all. Does nothing where the user froze objects."""
    if gc.get_freeze_count() > OF_PYTHON:
        yield
        return
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(RARER * thresholds[0], OLDER, OLDER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
