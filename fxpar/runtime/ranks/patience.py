"""How long ranks wait for others, and when there is nothing left to wait for."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from fxpar.runtime.ranks.presence import (
    BEAT,
    Answer,
    Presence,
    waited_for,
    waiting,
)

_MUTUAL = "ranks wait for one another at different places"
ENDED = 1.0  # seconds to wait for a rank that has ended
_LIMITS = {"timeout": 30.0, "late_timeout": 600.0}
_IN_CALL = [0]  # depth of calls that all ranks have come to


def set_timeouts(timeout: float, late_timeout: float) -> None:
    """Set how long ranks wait: ``FXPAR_TIMEOUT`` and ``FXPAR_LATE_TIMEOUT``."""
    _LIMITS["timeout"] = timeout
    _LIMITS["late_timeout"] = max(timeout, late_timeout)


def timeout() -> float:
    """Seconds to wait for an answer of the store, and inside a call for a rank that
    does not work."""
    return _LIMITS["timeout"]


def patience_limit() -> float:
    """Seconds to wait for a rank that does not work: ``timeout`` inside a call that all
    ranks have come to, else the longer ``late_timeout``."""
    return _LIMITS["timeout" if _IN_CALL[0] else "late_timeout"]


@contextlib.contextmanager
def in_call() -> Iterator[None]:
    """Inside, all ranks have come to the same call."""
    _IN_CALL[0] += 1
    try:
        yield
    finally:
        _IN_CALL[0] -= 1


class Patience:
    """How long one wait for other ranks lasts: while any of them works, and ``seconds``
    after that. It ends at once if a rank that is waited for has ended, or waits for
    this rank at another place. Seconds in which this process was stopped do not count.
    """

    def __init__(self, presence: Presence, seconds: float) -> None:
        self.presence, self.seconds = presence, seconds
        self.looked = time.monotonic()
        self.spent = 0.0  # seconds so far
        self.idle = 0.0  # seconds since a rank last worked
        self.unasked = 0.0  # seconds since the last question to others
        self.hang = 0.0  # seconds since all that are waited for hang in collectives
        self.seen: dict[int, Answer] = {}
        self.why = ""  # it ended before its time
        self.is_said = False  # on stderr, who is waited for

    def is_over(self, missing: Callable[[], Sequence[int]]) -> bool:
        """Whether to wait no longer. ``missing``: the ranks that have not come."""
        now = time.monotonic()
        step, self.looked = min(now - self.looked, 2 * BEAT), now
        self.spent, self.idle = self.spent + step, self.idle + step
        self.unasked += step
        if self.unasked >= BEAT:
            self.presence.ask()
            before, self.seen = self.seen, self.presence.others()
            late = [rank for rank in missing() if rank in self.seen]
            if any(x.state == "works" for x in self.seen.values()):
                self.idle = 0.0
            hang = late and all(
                self.seen[rank].state == "collective"
                and self.seen[rank] == before.get(rank)
                for rank in late
            )
            self.hang = self.hang + self.unasked if hang else 0.0
            self.unasked = 0.0
            self.why = self._end_of(late)
            self._say_once(late)
        return bool(self.why) or self.idle > self.seconds

    def _end_of(self, late: Sequence[int]) -> str:
        """Why those who are late will not come, "" if they may."""
        mine, _ = self.presence.progress()
        for rank in late:
            other = self.seen[rank]
            if other.state == "ended" and self.spent > ENDED:
                return "it has ended"
            if other.waits_for and other.number > mine.get(other.waits_for, 0):
                self.presence.given_up = other.waits_for, other.number
                return _MUTUAL
            if other.misses and (other.misses, other.missed) == waited_for():
                return _MUTUAL
        if self.hang > timeout():
            return _MUTUAL
        return ""

    def _say_once(self, late: Sequence[int]) -> None:
        """Say on one of the ranks that wait long, once, who is waited for."""
        if self.is_said or self.spent < timeout() or self.seconds <= timeout():
            return
        self.is_said = True
        present = set(range(self.presence.size)) - set(late)
        if late and self.presence.rank == min(present):
            where = self.tell(late).replace("\n ", ";")
            text = f"rank {self.presence.rank} {waiting()}, {self.spent:.0f} s"
            print(f"fxpar: {text} so far{where}", file=sys.stderr, flush=True)

    def waited(self) -> str:
        """How long it lasted so far, and what bounds it."""
        option = "FXPAR_TIMEOUT" if self.seconds <= timeout() else "FXPAR_LATE_TIMEOUT"
        return f"{self.spent:.0f} s ({self.why or option})"

    def tell(self, missing: Sequence[int]) -> str:
        """Where the missing ranks are, a line for each."""
        lines = []
        for rank in missing:
            if (other := self.seen.get(rank)) is not None:
                last = other.last_call and f" (its last call: {other.last_call})"
                lines.append(f"\n  rank {rank} {other.text}{last}")
        return "".join(lines)
