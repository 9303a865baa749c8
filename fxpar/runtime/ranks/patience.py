"""This module decides how long ranks wait for others, and when waiting is no use.

In: what ranks report of themselves (``presence``), and who is missing. Out:
whether a wait is over, why, and where the missing ranks are. Never: an end of
a wait for a rank that works, or a wait without end for one that does not.

The process that holds the store of the process group may stop, or its machine: calls of
the store then hang in native code, whatever timeout they have, in every thread. So
``watch_store`` closes all connections to a store that does not answer for
``FXPAR_TIMEOUT`` seconds, and what hangs in them raises; where a main thread hangs in a
collective all the same, or at the end of the process, which cannot raise, the process
ends some seconds later.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fxpar import _torch
from fxpar.runtime.ranks import presence, worlds
from fxpar.runtime.ranks.presence import BEAT, Answer, Presence, waiting

_MUTUAL = "ranks wait for one another at different places"
_MUTUAL_FIX = "take the same calls and backwards in the same order on every rank"
ENDED = 1.0  # seconds to wait for a rank that has ended
_LIMITS = {"timeout": 30.0, "late_timeout": 600.0}
# Worlds in a call of which this rank is, to which all their ranks have come.
_IN_CALL: list[worlds.World | None] = []


def set_timeouts(timeout: float, late_timeout: float) -> None:
    """Set how long ranks wait: ``FXPAR_TIMEOUT`` and ``FXPAR_LATE_TIMEOUT``."""
    _LIMITS["timeout"] = timeout
    _LIMITS["late_timeout"] = max(timeout, late_timeout)


def timeout() -> float:
    """Return the seconds to wait for an answer of the store, and inside a call
    for a rank that is idle."""
    return _LIMITS["timeout"]


def patience_limit() -> float:
    """Return the seconds to wait for a rank that is idle: ``timeout`` inside a call
    that all ranks of this world have come to, else the longer ``late_timeout``."""
    is_in_call = worlds.current() in _IN_CALL
    return _LIMITS["timeout" if is_in_call else "late_timeout"]


@contextlib.contextmanager
def in_call() -> Iterator[None]:
    """Note that inside, all ranks of this world have come to the same call."""
    _IN_CALL.append(worlds.current())
    try:
        yield
    finally:
        _IN_CALL.pop()


class Patience:
    """Limits one wait for other ranks: it lasts while any of them works, and
    ``seconds`` after that. It ends at once if a rank that is waited for has ended, or
    waits for this rank at another place. Seconds in which this process was stopped do
    not count. A rank that waits for ranks of another world counts as one that works
    while any rank works, and is waited for up to ``late_timeout``.
    """

    def __init__(
        self, presence: Presence, seconds: float, ranks: Sequence[int], channel: str
    ) -> None:
        """``ranks``: those of the world that waits, by their numbers in the default
        process group; ``channel``: the name of its channel."""
        self.presence, self.seconds = presence, seconds
        self.ranks, self.channel = ranks, channel
        self.held_up = False  # a rank that is waited for, by other ranks than these
        self.looked = time.monotonic()
        self.spent = 0.0  # seconds so far
        self.idle = 0.0  # seconds since a rank last worked
        self.unasked = 0.0  # seconds since the last question to others
        self.hang = 0.0  # seconds since all that are waited for hang in collectives
        self.seen: dict[int, Answer] = {}
        self.why = ""  # it ended before its time
        self.is_said = False  # stderr has the ranks that are waited for

    def is_over(self, missing: Callable[[], Sequence[int]]) -> bool:
        """Return whether to stop waiting. ``missing``: the ranks that have not come."""
        now = time.monotonic()
        step, self.looked = min(now - self.looked, 2 * BEAT), now
        self.spent, self.idle = self.spent + step, self.idle + step
        self.unasked += step
        if self.unasked >= BEAT:
            self.presence.ask()
            before = self.seen
            self.seen = self.presence.others(None if self.held_up else self.ranks)
            late = [rank for rank in missing() if rank in self.seen]
            is_any_at_work = any(x.state == "works" for x in self.seen.values())
            if is_any_at_work:
                self.idle = 0.0
            self.held_up = any(self._is_held_up(self.seen[rank]) for rank in late)
            hang = late and not (self.held_up and is_any_at_work)
            hang = hang and all(
                self.seen[rank].state == "collective"
                and self.seen[rank] == before.get(rank)
                for rank in late
            )
            self.hang = self.hang + self.unasked if hang else 0.0
            self.unasked = 0.0
            self.why = self._end_of(late)
            self._say_once(late)
        limit = self.seconds
        if self.held_up:
            limit = max(limit, _LIMITS["late_timeout"])
        return bool(self.why) or self.idle > limit

    def _is_held_up(self, other: Answer) -> bool:
        """Return whether a rank waits in another world than that of this wait."""
        if len(self.ranks) == self.presence.size:
            return False
        waits = other.state in ("waits", "collective")
        return waits and other.waits_for != self.channel

    def _end_of(self, late: Sequence[int]) -> str:
        """Return why the late ranks will not come; "" if they may."""
        mine = self.presence.counts()
        for rank in late:
            other = self.seen[rank]
            if other.state == "ended" and self.spent > ENDED:
                return "it has ended"
            # It waits at a meeting of others, which this rank has not counted.
            if other.number > mine.get(other.waits_for, math.inf):
                # It may look when this rank has left its own wait.
                self.presence.refuse(rank, other, _MUTUAL, _MUTUAL_FIX)
                return _MUTUAL
        if self.hang > timeout():
            return _MUTUAL
        return ""

    def _say_once(self, late: Sequence[int]) -> None:
        """Say on one of the ranks that wait long, once, who is waited for."""
        if self.is_said or self.spent < timeout() or self.seconds <= timeout():
            return
        self.is_said = True
        present = set(self.ranks) - set(late)
        if late and self.presence.rank == min(present):
            where = self.tell(late).replace("\n ", ";")
            text = f"rank {self.presence.rank} {waiting()}, {self.spent:.0f} s"
            print(f"fxpar: {text} so far{where}", file=sys.stderr, flush=True)

    def waited(self) -> str:
        """Return how long this wait lasted so far, and what bounds it, as a text."""
        option = "FXPAR_TIMEOUT" if self.seconds <= timeout() else "FXPAR_LATE_TIMEOUT"
        return f"{self.spent:.0f} s ({self.why or option})"

    def tell(self, missing: Sequence[int]) -> str:
        """Return where the missing ranks are, a line for each."""
        lines = []
        for rank in missing:
            if (other := self.seen.get(rank)) is not None:
                last = other.last_call and f" (its last call: {other.last_call})"
                lines.append(f"\n  rank {rank} {other.text}{last}")
        return "".join(lines)


# Least seconds of silence allowed, since a busy machine's store may be slow.
LEAST = 5.0
# Seconds in which the main thread may end after it was made to raise.
GRACE = 5.0


def watch_store(me: Presence, store: Any) -> None:
    """Watch in a thread whether ``store`` answers, until it is not needed any more."""
    threading.Thread(
        target=_watch, args=(me, store), name="fxpar-store-watch", daemon=True
    ).start()


def _watch(me: Presence, store: Any) -> None:
    beats, silent, looked = -1, 0.0, time.monotonic()
    while silent < max(timeout(), LEAST):
        if me.over.wait(BEAT):
            return
        now = time.monotonic()
        silent, looked = silent + min(now - looked, 2 * BEAT), now
        if me.beats != beats:
            beats, silent = me.beats, 0.0
    fact = f"the store of the process group has not answered for {silent:.0f} s"
    me.store_facts.insert(0, f"{fact} (FXPAR_TIMEOUT)")
    _say(f"rank {me.rank}: {fact}; this rank is at {presence.user_line()}")
    _torch.distributed.cut_store(store)
    _end_where_it_hangs(me)


def _end_where_it_hangs(me: Presence) -> None:
    """End the process once its main thread hangs for others that it cannot reach."""
    hangs, before, looked = 0.0, None, time.monotonic()
    while hangs < GRACE:
        time.sleep(BEAT)
        now, spent = time.monotonic(), presence.main_seconds()
        hangs, looked = hangs + min(now - looked, 2 * BEAT), now
        ended = not threading.main_thread().is_alive()
        waits = ended or presence.waiting() or presence.is_in_collective()
        if not waits or spent != before:
            hangs = 0.0
        before = spent
    where = presence.waiting() or f"hangs at {presence.user_line()}"
    try:
        _say(
            f"RankMismatchError: rank {me.rank} ends: it {where}, and "
            f"{me.store_facts[0]}\n  fix: {presence.STORE_FIX}"
        )
        sys.stdout.flush()
    finally:
        os._exit(1)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        print(f"fxpar: {text}", file=sys.stderr, flush=True)
