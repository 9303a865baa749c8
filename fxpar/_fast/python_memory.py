"""Lets Python spend less on its own memory while a program is traced, planned and
compiled.

``old_objects_kept``: planning and compiling make many objects that live for a while, so
that Python looks through all objects again and again: each time through a million of
torch, the model and its libraries, almost half of the time of a first step of 32
layers. ``collect_young`` looks through the new ones where a thread waits anyway.
``in_one_block``: CPython (from 3.11 on) keeps the frames of running functions in blocks
of 16 KB. A call that does not fit in the last one asks the system for another, which
goes back when the call returns: 7 us instead of 0.03. Whether a loop that calls
something is just at that edge is chance, and decides over seconds of a first step: a
search took 2.9 or 4.6 s. In: Python's collector, and functions. Out: contexts, and the
same functions. Never: changes the collector where the user froze objects.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import types
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from fxpar._fast.switch import is_on, shortcut

_P = ParamSpec("_P")
_R = TypeVar("_R")

# The first threshold is multiplied by this inside: collections are rarer.
RARER = 100

# The other two thresholds inside: objects that outlived a collection are looked through
# again after so many: few of them are garbage before the end.
OLDER = 1000

# Python itself freezes no more objects than these (3.12 some 400, which never die); a
# user who freezes has torch among them.
OF_PYTHON = 5_000

# Words that a frame claims to need. Its block has twice as many; the rest is for a
# thousand nested calls. Memory is taken only as it is written to.
WORDS = 1 << 17


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


def collect_young() -> None:
    """Collect what became garbage inside ``old_objects_kept``, which Python would do at
    the begin of the first run."""
    if is_on() and gc.get_freeze_count() > OF_PYTHON:
        gc.collect()


def in_one_block(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function with a block of frames for itself and all that it calls."""

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return fn(*args, **kwargs)

    code = call.__code__.replace(co_stacksize=WORDS) if is_on() else call.__code__
    roomy = types.FunctionType(code, globals(), fn.__name__, None, call.__closure__)
    return functools.wraps(fn)(roomy)
