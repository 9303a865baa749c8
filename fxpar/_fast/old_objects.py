"""Garbage while a program is planned and compiled: looked for among new objects alone.

Planning and compiling make many objects that live for a while, so that Python looks
through all there are again and again: each time through a million that torch, the model
and its libraries are made of, a sixth of the time of a first step.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from fxpar._fast.switch import shortcut

# Inside, so many times as many new objects are made before any are looked through.
RARER = 100

# And so many times that is done before those that outlived it are looked through again:
# few of them are garbage before the end.
OLDER = 1000

# Python itself freezes no more objects than these (3.12 some 400, which never die); who
# does it as a user has torch among them.
OF_PYTHON = 5_000


@shortcut
@contextlib.contextmanager
def old_objects_kept() -> Iterator[None]:
    """Collect no object that was there before, and others more rarely; when the last
    such context ends, all is as it was. Does nothing where the user froze objects."""
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
