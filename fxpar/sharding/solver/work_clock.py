"""Keeps the clock of a search: seconds of work, the same on every run of the same
problem.

In: the work that phases report. Out: how many seconds of a usual core that is, by which
limits are kept. So a busy machine takes longer for the same plan, and does not return
another. Wall-clock time is used for one thing: far above the limit a search is stopped
all the same, and ``is_stopped`` reports it. Each thread has a clock of its own. Never:
measures work by wall-clock time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# A search must end within FAR times its seconds plus GRACE, in wall-clock time.
FAR, GRACE = 5.0, 60.0


class _Clock(threading.local):
    """Is the clock of one thread."""

    done: float = 0.0  # seconds of work in the search under way; else of all work
    # The wall-clock time at which the search under way is stopped; None without one.
    wall: float | None = None
    stopped: bool = False  # whether wall-clock time stopped it


_clock = _Clock()


def now() -> float:
    """Return the seconds of work so far; within a search from its begin, so that
    earlier work does not, by rounding, end it elsewhere."""
    return _clock.done


def did(seconds: float) -> None:
    """Add seconds of work that was done."""
    _clock.done += seconds


def left(deadline: float) -> float:
    """Return the seconds of work until the deadline; negative in a search that is
    stopped."""
    seconds_left = deadline - _clock.done
    return min(seconds_left, -1.0) if is_stopped() else seconds_left


def is_stopped() -> bool:
    """Return whether wall-clock time has ended the search under way."""
    if wall_left() <= 0:
        _clock.stopped = True
    return _clock.stopped


def wall_left() -> float:
    """Return the wall-clock seconds until the search under way is stopped."""
    return FAR + GRACE if _clock.wall is None else _clock.wall - time.perf_counter()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Run a search of ``seconds`` of work. One that is part of another is stopped with
    it."""
    if _clock.wall is not None:
        yield
        return
    _clock.wall = time.perf_counter() + FAR * seconds + GRACE
    _clock.stopped = False
    before, _clock.done = _clock.done, 0.0
    try:
        yield
    finally:
        _clock.wall, _clock.stopped = None, False
        _clock.done += before
