"""The clock of a search: seconds of work, the same on every run of the same problem.

In: what phases say they did. Out: how many seconds of a usual core that is, by which
limits are kept. So a busy machine takes longer for the same plan, and does not return
another. Wall-clock time is looked at for one thing: far behind the limit a search is
stopped all the same, and ``is_stopped`` says so. Each thread has a clock of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Wall-clock time within which a search must end: so many times its seconds, and more.
FAR, GRACE = 5.0, 60.0


class _Clock(threading.local):
    """The clock of one thread."""

    # Seconds of work so far in the search under way; outside of one, of all.
    done: float = 0.0
    # The wall-clock time at which the search under way is stopped; None without one.
    wall: float | None = None
    # Whether it was.
    stopped: bool = False


_clock = _Clock()


def now() -> float:
    """Seconds of work so far; within a search from its begin, so that nothing before
    it, by rounding, ends it elsewhere."""
    return _clock.done


def did(seconds: float) -> None:
    """Work of so many seconds is done."""
    _clock.done += seconds


def left(deadline: float) -> float:
    """Seconds of work until the deadline; less than none in a search that is
    stopped."""
    seconds_left = deadline - _clock.done
    return min(seconds_left, -1.0) if is_stopped() else seconds_left


def is_stopped() -> bool:
    """Whether wall-clock time has ended the search under way."""
    if wall_left() <= 0:
        _clock.stopped = True
    return _clock.stopped


def stop() -> None:
    """End the search under way: something in it did not end in time."""
    _clock.stopped = True


def wall_left() -> float:
    """Wall-clock seconds until the search under way is stopped."""
    return FAR + GRACE if _clock.wall is None else _clock.wall - time.perf_counter()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """A search of so many seconds of work. One that is part of another is stopped with
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
