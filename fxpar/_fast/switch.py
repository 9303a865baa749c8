"""Decides whether torch is patched to take less time, and makes all such patches.

In: the variable ``FXPAR_FAST`` and torch's version. Out: contexts in which patches
hold, for all threads, or which do nothing. Never: changes what torch gives.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

log = logging.getLogger("fxpar")

# Versions of torch on which the patches were proved to change no result.
PROVED = ("2.13", "2.15")

# Names of shortcuts that are left out; a benchmark measures them one by one.
LEFT_OUT: set[str] = set()

_LOCK = threading.RLock()


@functools.cache
def is_on() -> bool:
    """Return whether this process takes shortcuts: the user did not set
    ``FXPAR_FAST=0``, and they were proved on this torch, else one line is logged."""
    if os.environ.get("FXPAR_FAST", "").lower() in ("0", "false", "no", "off"):
        return False
    version = torch.__version__
    is_proved = ".".join(version.split(".")[:2]) in PROVED
    if not is_proved:
        log.info("torch %s: compiled without the shortcuts of %s", version, PROVED)
    return is_proved


def is_taken(name: str) -> bool:
    """Return whether the shortcut of this name is taken."""
    return is_on() and name not in LEFT_OUT


def shortcut(
    patches: Callable[[], AbstractContextManager[Any]],
) -> Callable[[], contextlib._GeneratorContextManager[None]]:
    """Return a context in which ``patches()`` hold: they are made when the first one
    opens and undone when the last one closes, in whatever threads these are."""
    opened = 0  # contexts that are open, of all threads
    stack = contextlib.ExitStack()

    @contextlib.contextmanager
    @functools.wraps(patches)
    def context() -> Iterator[None]:
        nonlocal opened
        if not is_taken(patches.__name__):
            yield
            return
        with _LOCK:
            if not opened:
                stack.enter_context(patches())
            opened += 1
        try:
            yield
        finally:
            with _LOCK:
                opened -= 1
                if not opened:
                    stack.close()

    return context
