"""This module reports a store that does not answer, and ends a rank that hangs then.

The process that holds the store of the process group may stop, or its machine: calls of
the store then hang in native code, whatever timeout they have, in every thread. In: how
often the thread of ``presence`` has heard of the store. Out: after ``FXPAR_TIMEOUT``
seconds of silence all connections to it are closed, so that what hangs in them raises;
where a main thread hangs in a collective all the same, or at the end of the process,
which cannot raise, the process ends some seconds later. Never: a call of the store, or
an end for seconds in which this process itself was stopped.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import Any

from fxpar import _torch
from fxpar.runtime.ranks import own_process, patience, presence
from fxpar.runtime.ranks.presence import BEAT, Presence

# Least seconds of silence allowed, since a busy machine's store may be slow.
LEAST = 5.0
# Seconds in which the main thread may end after it was made to raise.
GRACE = 5.0


def start(me: Presence, store: Any) -> None:
    """Watch in a thread whether ``store`` answers, until it is not needed any more."""
    threading.Thread(
        target=_watch, args=(me, store), name="fxpar-store-watch", daemon=True
    ).start()


def _watch(me: Presence, store: Any) -> None:
    beats, silent, looked = -1, 0.0, time.monotonic()
    while silent < max(patience.timeout(), LEAST):
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
        now, spent = time.monotonic(), own_process.main_seconds()
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
