"""Measuring on a machine that others use: a lock, priority, and what others took.

``Quiet(lock, hold)`` is made in each rank once its process groups have threads; inside
``with quiet.alone():`` one measures. ``lock``: a file that other jobs lock shared
(flock) while they compute and nobody measures. It is taken alone for the seconds of a
measurement or, where they do not let go for ``PATIENCE`` seconds, shared; that nobody
else measures then, a second file beside it sees to. ``hold``: keep the
cores (Linux, with the right to): other jobs get about a hundredth of them. All threads
of a rank have one priority, as ever: threads of gloo that went before those that
compute would ask again and again whether they can send.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE = 5.0
# The most that Linux gives a process before others, and what it has by itself.
_FIRST, _USUAL = -20, 0


class Quiet:
    """``lock``: None in all ranks but one."""

    def __init__(self, lock: str | None, hold: bool) -> None:
        self.file = open(lock, "a") if lock else None  # noqa: SIM115
        self.turn = open(f"{lock}.turn", "a") if lock else None  # noqa: SIM115
        self.hold = hold
        self._share()

    def _share(self) -> None:
        if self.file is not None:
            fcntl.flock(self.file, fcntl.LOCK_SH)

    def _take(self) -> None:
        end = time.monotonic() + PATIENCE
        while self.file is not None and time.monotonic() < end:
            try:
                return fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
        self._share()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        self._take()
        if self.turn is not None:
            fcntl.flock(self.turn, fcntl.LOCK_EX)
        if self.hold:
            _prefer(_FIRST)
        try:
            yield
        finally:
            if self.hold:
                _prefer(_USUAL)
            if self.turn is not None:
                fcntl.flock(self.turn, fcntl.LOCK_UN)
            self._share()


def _prefer(nice: int) -> None:
    """The priority of all threads of this process, and of its session among others."""
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, thread, nice)
    session = Path("/proc/self/autogroup")
    if session.exists():
        session.write_text(str(nice))


def busy_seconds() -> float | None:
    """CPU seconds that all processes have taken; None where the system does not say."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    idle = int(fields[3]) + int(fields[4])
    total = sum(int(field) for field in fields[:8])
    return (total - idle) / os.sysconf("SC_CLK_TCK")
