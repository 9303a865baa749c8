"""Ranks meet at every call of a compiled graph, before anything of it is launched.

They speak without collectives, by keys in the store of the default process group.
``current`` gives this rank's channel in the life of the process group there is now; it
counts what all ranks do alike: rounds (``agree``), calls of compiled graphs (``meet``).

Each writes a word to the store and reads those of all: so all know what each rank is
about to run, on what sizes, and decide alike. A rank that fails before it can run
writes that instead; for one that does not come, whoever waits for it writes so in its
place, by one atomic message, so that it is told when it does come. Few ranks read the
words of all, those of one machine from memory if all come in a moment (``mailboxes``);
of many, rank 0 does and tells the others, so that the store handles a number of
messages that grows with the ranks and not with their square.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from fxpar import _torch, cache_files
from fxpar.errors import RankMismatchError
from fxpar.runtime.ranks import presence, store_watch
from fxpar.runtime.ranks.mailboxes import Mailboxes
from fxpar.runtime.ranks.patience import Patience, patience_limit
from fxpar.runtime.ranks.presence import Presence

# Of one message; who waits longer than it should is told so by a key (``meet``).
LONGEST = timedelta(days=7)


@dataclass
class Channel:
    """The store as seen by one rank in one life of the default process group."""

    # Through a connection apart from that of ``presence``.
    store: Any
    # Of this process.
    rank: int
    # Ranks of the group.
    size: int
    # That its keys begin with; another life has another.
    prefix: str
    # Says where this rank is, and asks where others are.
    presence: Presence
    # Faster than the store; None: too many ranks.
    boxes: Mailboxes | None = None
    # Of ``agree`` so far, alike on all ranks.
    rounds: int = 0
    # Of compiled graphs so far, alike on all ranks.
    calls: int = 0
    questions: int = 0  # questions of waiting ranks before the last call
    wrote: list[str] = field(default_factory=list)  # this rank's keys of the last call
    what: str = ""  # the last call, in words

    def key(self, number: int, *parts: object) -> str:
        return "/".join(map(str, (self.prefix, number, *parts)))

    def has(self, *keys: str) -> bool:
        return self.store.check(list(keys))

    def read(self, key: str) -> str:
        return self.store.get(key).decode()

    def progress(self) -> tuple[dict[str, int], str]:
        """How many "calls" and "rounds" this rank came to, and the last call."""
        last = f"call {self.calls}, {self.what}" if self.what else ""
        return {"calls": self.calls, "rounds": self.rounds}, last

    def folders(self) -> list[str]:
        """Which folder of files each rank sees."""
        return [self.read(f"{self.prefix}/folder/{r}") for r in range(self.size)]


_CHANNELS: weakref.WeakKeyDictionary[Any, Channel] = weakref.WeakKeyDictionary()


def current() -> Channel | None:
    """None where there is nobody to speak with."""
    group = _torch.distributed.default_group()
    if group is None:
        return None
    channel = _CHANNELS.get(group)
    if channel is None and group.size() > 1 and dist.get_backend() != "fake":
        channel = _CHANNELS[group] = _open(group)
    return channel


def call_number() -> int:
    """Of the last call of a compiled graph, alike on all ranks."""
    channel = current()
    return 0 if channel is None else channel.calls


def _open(group: Any) -> Channel:
    store, rank, size = _torch.distributed.default_store(), group.rank(), group.size()
    me = Presence(weakref.ref(group), store, rank, size, "")
    store_watch.start(me, store)
    try:
        # A store may outlive a process group; its next life starts new keys.
        me.prefix = f"fxpar/{store.add(f'fxpar/life/{rank}', 1)}"
        store.set(f"{me.prefix}/folder/{rank}", cache_files.folder_text())
        me.store = _torch.distributed.same_store(store)
        connection = _torch.distributed.same_store(store)
        if connection is not store:
            connection.set_timeout(LONGEST)
        boxes = None
        if size <= DIRECT:
            boxes = Mailboxes(rank, size, partial(_published, connection, me.prefix))
        channel = Channel(connection, rank, size, me.prefix, me, boxes)
        me.progress = channel.progress
        me.start()
    except dist.DistError as error:
        me.over.set()
        raise me.lost_store(error) from error
    return channel


@contextlib.contextmanager
def answering(channel: Channel) -> Iterator[None]:
    """Raise RankMismatchError where the store does not answer."""
    try:
        yield
    except dist.DistError as error:
        raise channel.presence.lost_store(error) from error


def _published(store: Any, prefix: str, name: str | None) -> str | None:
    """Tell the other ranks the name of the mailboxes, or hear it, if it is there."""
    key = f"{prefix}/boxes"
    if name is not None:
        store.set(key, name)
    elif store.check([key]):
        return str(store.get(key).decode())
    return name


FAILED = "!"  # begins a word that says why a rank does not run
DIRECT = 8  # ranks that each read the words of all

ALONE = (
    "take every call and every backward, with as many batches, on every rank; what one "
    "rank runs by itself goes inside `with fxpar.alone():`, as `with fxpar.alone(): "
    "evaluate(model)`"
)


def meet(word: str, what: str) -> list[str]:
    """What every rank wrote at this call, in order of ranks. ``what``: the call, for
    those who wait.

    Raises RankMismatchError, on all ranks, if one has failed or does not come.
    """
    channel = current()
    if channel is None:
        return [word]
    keys = _next_keys(channel)
    channel.what = what
    try:
        return _words(channel, keys, word, what)
    except dist.DistError as error:
        raise channel.presence.lost_store(error) from error


def fail(message: str) -> None:
    """In place of a call: tell the ranks that come to it that this one failed."""
    channel = current()
    if channel is None:
        return
    key = _next_keys(channel)[channel.rank]
    what = f"rank {channel.rank} failed:\n{message}"
    fix = "this rank only stopped with it: look at that rank's error"
    text = _failure(what, fix)
    with contextlib.suppress(dist.DistError):  # this rank has an error to raise already
        channel.store.set(key, text)
        if channel.rank == 0 and channel.size > DIRECT:
            channel.store.compare_set(_verdict_key(channel), "", json.dumps([text]))


def _next_keys(channel: Channel) -> list[str]:
    channel.calls += 1
    return [channel.key(channel.calls, "call", rank) for rank in range(channel.size)]


def _verdict_key(channel: Channel) -> str:
    """Of what rank 0 read, where it reads for all."""
    return channel.key(channel.calls, "call", "verdict")


def _failure(what: str, fix: str, where: str | None = None) -> str:
    return FAILED + json.dumps([what, fix, where])


def _words(channel: Channel, keys: Sequence[str], word: str, what: str) -> list[str]:
    beside = channel.presence
    words = _near(channel, keys[channel.rank], word)
    if words is None:
        watch = _Watch(channel, keys, what)
        beside.watch = watch.look
        text = f"waits for others in {what}"
        with presence.waits(text, "calls", channel.calls):
            words = _read(channel, keys)
        beside.watch = None
    beside.read += channel.wrote  # every rank came to the call behind it
    channel.wrote = [keys[channel.rank]]
    if channel.rank == 0 and channel.size > DIRECT:
        channel.wrote.append(_verdict_key(channel))
    for text in words:
        if text.startswith(FAILED):
            fact, fix, where = json.loads(text.removeprefix(FAILED))
            raise RankMismatchError(fact, fix=fix, where=where)
    return words


def _near(channel: Channel, key: str, word: str) -> list[str] | None:
    """Write this rank's word; those of all, if they are on this machine and come in a
    moment."""
    questions = channel.presence.questions
    if questions != channel.questions:
        # Some rank waits for long, maybe for this one, and may have given up.
        channel.questions = questions
        channel.store.compare_set(key, "", word)
        return None
    channel.store.set(key, word)
    if channel.boxes is None or channel.size > DIRECT:
        return None
    channel.boxes.write(channel.calls, word)
    return channel.boxes.read(channel.calls)


def _read(channel: Channel, keys: Sequence[str]) -> list[str]:
    """The words of all ranks; of many ranks, as rank 0 read them."""
    store, many = channel.store, channel.size > DIRECT
    if many and channel.rank:
        agreed: list[str] = json.loads(store.get(_verdict_key(channel)).decode())
        return agreed * (channel.size if len(agreed) == 1 else 1)
    words = [raw.decode() for raw in store.multi_get(list(keys))]
    if many:
        agreed = words[:1] if len(set(words)) == 1 else words
        store.compare_set(_verdict_key(channel), "", json.dumps(agreed))
    return words


class _Watch:
    """Looked at beside a rank that waits: gives up for it when patience is over."""

    def __init__(self, channel: Channel, keys: Sequence[str], what: str) -> None:
        self.keys, self.rank, self.what = keys, channel.rank, what
        self.verdict = _verdict_key(channel) if channel.size > DIRECT else None
        self.presence = channel.presence
        self.patience = Patience(self.presence, patience_limit())

    def look(self) -> None:
        """Called at every beat, by another thread than the one that waits."""
        if not self.patience.is_over(self._missing):
            return
        missing = self._missing()
        if not missing:
            return
        text = _failure(self._late(missing), ALONE, presence.user_line())
        store = self.presence.store
        for rank in missing:
            if store.compare_set(self.keys[rank], "", text).decode() != text:
                return  # it came meanwhile, or another rank said so
        store.set(self.keys[self.rank], text)
        if self.verdict is not None and 0 in missing:
            store.compare_set(self.verdict, "", json.dumps([text]))

    def _missing(self) -> list[int]:
        check = self.presence.store.check
        return [rank for rank, key in enumerate(self.keys) if not check([key])]

    def _late(self, missing: Sequence[int]) -> str:
        names = ", ".join(map(str, missing))
        return (
            f"rank{'s' if len(missing) > 1 else ''} {names} did not come to "
            f"{self.what}, where rank {self.rank} waited {self.patience.waited()}"
            f"{self.patience.tell(missing)}"
        )
