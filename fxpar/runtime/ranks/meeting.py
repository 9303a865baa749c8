"""This module exchanges a short text, a word, between all ranks, without a collective.

Ranks meet so at every call of a compiled graph, before any of its collectives is
launched, and where they agree while they compile (``consensus``). The meetings of a
world (``worlds``) have equal numbers on all its ranks.

In: a place in the program and a word. Out: the words of all ranks, in their order; or
one error on all of them, if ranks are at different places, one failed (it wrote its
failure in place of a word), or one is missing (a rank that waits writes a failure in
its place by one atomic message, which it reads if it comes later). Never: a wait
without end.

Words are keys in the store of the default process group. Up to ``DIRECT`` ranks each
read all words, those of one machine from memory if all come within a millisecond
(``mailboxes``); of more ranks, rank 0 reads all and writes them in one key, so that the
number of messages grows with the ranks and not with their square.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from fxpar import _torch, cache_files
from fxpar.errors import RankMismatchError
from fxpar.runtime.ranks import presence, store_watch, worlds
from fxpar.runtime.ranks.mailboxes import Mailboxes
from fxpar.runtime.ranks.patience import Patience, patience_limit
from fxpar.runtime.ranks.presence import FAILED, Presence, failure
from fxpar.runtime.ranks.worlds import World

# Timeout of a message; ``_Watch`` ends a wait earlier, by writing the key that it
# waits for.
LONGEST = timedelta(days=7)


@dataclass
class Channel:
    """Is the store as seen by one rank of a world."""

    store: Any  # through another connection than that of ``presence``
    rank: int
    # By rank of the world, the number in the default process group, by which users and
    # ``presence`` know it.
    ranks: Sequence[int]
    prefix: str  # prefix of its keys; each life of a process group has another
    presence: Presence  # says where this rank is, and asks where others are
    boxes: Mailboxes | None = None  # faster than the store; None: too many ranks
    meetings: int = 0  # meetings so far, the same number on all ranks
    questions: int = 0  # questions of waiting ranks before the last meeting
    wrote: list[str] = field(default_factory=list)  # this rank's keys of the last one

    @property
    def size(self) -> int:
        """Return the number of ranks of the world."""
        return len(self.ranks)

    def key(self, number: int, rank: int) -> str:
        """Return the key of a rank's word at a meeting."""
        return presence.word_key(self.prefix, number, self.ranks[rank])

    def has(self, *keys: str) -> bool:
        return self.store.check(list(keys))

    def read(self, key: str) -> str:
        return self.store.get(key).decode()

    def progress(self) -> tuple[str, int]:
        """Return the name of this channel on all ranks, and its number of meetings."""
        return self.prefix, self.meetings

    def patience(self, seconds: float, ranks: Sequence[int] = ()) -> Patience:
        """Return the limit of one wait for ranks of this world. ``ranks``: only for
        these, by their numbers in the default process group."""
        return Patience(self.presence, seconds, ranks or self.ranks, self.prefix)

    def folders(self) -> list[str]:
        """Return for each rank the text that identifies its folder of files."""
        prefix = self.presence.prefix
        return [self.read(f"{prefix}/folder/{rank}") for rank in self.ranks]


def current() -> Channel | None:
    """Return the channel of the world that this thread is in; None if it has one rank
    or there is no process group."""
    world = worlds.current()
    if world is None:
        return None
    channel: Channel | None = world.channel
    if channel is None and world.size > 1 and dist.get_backend() != "fake":
        channel = world.channel = _open(world)
    return channel


def all_ranks() -> Channel | None:
    """Return the channel of all ranks, whichever world this thread is in."""
    with worlds.inside(None):
        return current()


def meetings() -> int:
    """Return how many meetings this world had, which is equal on all its ranks."""
    channel = current()
    return 0 if channel is None else channel.meetings


def _open(world: World) -> Channel:
    every = all_ranks() if world.name else None
    if every is None:
        return _begin(world)
    channel = Channel(
        every.store,
        world.rank,
        world.ranks,
        f"{every.prefix}/{world.name}",
        every.presence,
    )
    channel.boxes = _boxes(channel)
    channel.presence.progress.append(channel.progress)
    return channel


def _begin(world: World) -> Channel:
    """Open the channel of all ranks, and begin to answer other ranks."""
    store, rank = _torch.distributed.default_store(), world.rank
    me = Presence(world.life, store, rank, world.size, "")
    store_watch.start(me, store)
    try:
        # A store may outlive a process group; its next life starts new keys.
        me.prefix = f"fxpar/{store.add(f'fxpar/life/{rank}', 1)}"
        store.set(f"{me.prefix}/folder/{rank}", cache_files.folder_text())
        # Connections of their own, so that threads do not wait for one another.
        me.store, connection = store.clone(), store.clone()
        if connection is not store:
            connection.set_timeout(LONGEST)
        channel = Channel(connection, rank, world.ranks, me.prefix, me)
        channel.boxes = _boxes(channel)
        me.progress.append(channel.progress)
        me.start()
    except dist.DistError as error:
        me.over.set()
        raise me.lost_store(error) from error
    return channel


def _boxes(channel: Channel) -> Mailboxes | None:
    if channel.size > DIRECT:
        return None
    published = partial(_published, channel.store, channel.prefix)
    return Mailboxes(channel.rank, channel.size, published)


@contextlib.contextmanager
def answering(channel: Channel) -> Iterator[None]:
    """Raise RankMismatchError where the store does not answer."""
    try:
        yield
    except dist.DistError as error:
        raise channel.presence.lost_store(error) from error


def _published(store: Any, prefix: str, name: str | None) -> str | None:
    """Write the name of the mailboxes to the store, or given None read it, if it is
    there."""
    key = f"{prefix}/boxes"
    if name is not None:
        store.set(key, name)
    elif store.check([key]):
        return str(store.get(key).decode())
    return name


DIRECT = 8  # ranks that each read the words of all
LARGEST = 1 << 20  # of what rank 0 read: the store takes 8 MB, JSON may write more

ALONE = (
    "take every call and every backward, with as many batches of the same "
    "shapes, on every rank (TORCH_LOGS=recompiles says why one alone compiles); "
    "code that one rank runs alone goes inside `with fxpar.alone():`, as `with "
    "fxpar.alone(): evaluate(model)`"
)

# The kind of a meeting at a call of a compiled graph.
CALL = "a call"


def meet(
    place: str, word: str, what: str = "", seconds: float | None = None
) -> list[str]:
    """Return the words of all ranks at this place, in order of ranks. ``what``: the
    place in words for messages, if not ``place``; ``seconds``: how long to wait for a
    rank that is idle.

    Raises RankMismatchError, on all ranks, if one has failed, is at another place, or
    is missing.
    """
    channel = current()
    if channel is None:
        return [word]
    keys, what = _next_keys(channel), what or place
    if place == CALL:
        channel.presence.last_call = channel.meetings, what
    with answering(channel):
        words = _words(channel, keys, f"{place}\t{word}", what, seconds)
    places, texts = zip(*(text.split("\t", 1) for text in words), strict=True)
    for rank, other in enumerate(places):
        if other != places[0]:
            names = (f"rank {channel.ranks[r]}" for r in (rank, 0))
            raise _mismatch(
                f"{next(names)} is at {other}, {next(names)} at {places[0]}",
                ALONE,
                presence.user_line(),
            )
    return list(texts)


def fail(message: str) -> None:
    """Report in place of the next meeting that this rank failed, to all that come to
    it."""
    channel = current()
    if channel is None:
        return
    key = _next_keys(channel)[channel.rank]
    what = f"rank {channel.presence.rank} failed:\n{message}"
    fix = "see the error of that rank: this one only stopped because of it"
    text = failure(what, fix)
    with contextlib.suppress(dist.DistError):  # this rank has an error to raise already
        channel.store.set(key, text)
        if channel.rank == 0 and channel.size > DIRECT:
            channel.store.compare_set(_verdict_key(channel), "", json.dumps([text]))


def _next_keys(channel: Channel) -> list[str]:
    channel.meetings += 1
    return [channel.key(channel.meetings, rank) for rank in range(channel.size)]


def _verdict_key(channel: Channel) -> str:
    """Return the key of the words that rank 0 read, where it reads for all."""
    return presence.word_key(channel.prefix, channel.meetings, presence.ALL)


def _mismatch(fact: str, fix: str, where: str | None) -> RankMismatchError:
    """Return an error that every rank raises."""
    error = RankMismatchError(fact, fix=fix, where=where)
    error.is_reported = True
    return error


def _words(
    channel: Channel, keys: Sequence[str], word: str, what: str, seconds: float | None
) -> list[str]:
    heartbeat = channel.presence
    words = _on_one_machine(channel, keys[channel.rank], word)
    if words is None:
        heartbeat.watch = _Watch(channel, keys, what, seconds or patience_limit()).look
        with presence.waits(f"waits for others at {what}", *channel.progress()):
            words = _read(channel, keys)
        heartbeat.watch = None
    heartbeat.read += channel.wrote  # every rank came to the meeting after it
    channel.wrote = [keys[channel.rank]]
    if channel.rank == 0 and channel.size > DIRECT:
        channel.wrote.append(_verdict_key(channel))
    for text in words:
        if text.startswith(FAILED):
            fact, fix, where = json.loads(text.removeprefix(FAILED))
            raise _mismatch(fact, fix, where)
    return words


def _on_one_machine(channel: Channel, key: str, word: str) -> list[str] | None:
    """Write this rank's word, and return the words of all ranks, if they are on this
    machine and come in a moment; else None."""
    questions = channel.presence.questions
    if questions != channel.questions:
        # Some rank waits for long, maybe for this one, and may have given up.
        channel.questions = questions
        channel.store.compare_set(key, "", word)
        return None
    channel.store.set(key, word)
    if channel.boxes is None or channel.size > DIRECT:
        return None
    channel.boxes.write(channel.meetings, word)
    return channel.boxes.read(channel.meetings)


def _read(channel: Channel, keys: Sequence[str]) -> list[str]:
    """Return the words of all ranks; of many ranks, as rank 0 read them."""
    store, many = channel.store, channel.size > DIRECT
    if many and channel.rank:
        agreed: list[str] = json.loads(store.get(_verdict_key(channel)).decode())
        if agreed:
            return agreed * (channel.size if len(agreed) == 1 else 1)
    words = [raw.decode() for raw in store.multi_get(list(keys))]
    if many and not channel.rank:
        agreed = words[:1] if len(set(words)) == 1 else words
        if sum(map(len, agreed)) > LARGEST:
            agreed = []  # each reads them all
        store.compare_set(_verdict_key(channel), "", json.dumps(agreed))
    return words


class _Watch:
    """Watches one wait from another thread, and ends it when patience is over."""

    def __init__(
        self, channel: Channel, keys: Sequence[str], what: str, seconds: float
    ) -> None:
        self.key, self.what = keys[channel.rank], what
        # The keys of all ranks, by numbers in the default process group.
        self.keys = dict(zip(channel.ranks, keys, strict=True))
        self.verdict = _verdict_key(channel) if channel.size > DIRECT else None
        self.leader = channel.ranks[0]
        self.presence = channel.presence
        self.patience = channel.patience(seconds)

    def look(self) -> None:
        """Write a failure for ranks that are missing, and for this one, if the wait is
        over. Called at every beat, by another thread than the one that waits."""
        if not self.patience.is_over(self._missing):
            return
        missing = self._missing()
        if not missing:
            return
        text = failure(self._late(missing), ALONE, presence.user_line())
        store = self.presence.store
        for rank in missing:
            if store.compare_set(self.keys[rank], "", text).decode() != text:
                return  # it came meanwhile, or another rank said so
        store.set(self.key, text)
        if self.verdict is not None and self.leader in missing:
            store.compare_set(self.verdict, "", json.dumps([text]))

    def _missing(self) -> list[int]:
        check = self.presence.store.check
        return [rank for rank, key in self.keys.items() if not check([key])]

    def _late(self, missing: Sequence[int]) -> str:
        names = ", ".join(map(str, missing))
        return (
            f"rank{'s' if len(missing) > 1 else ''} {names} did not reach "
            f"{self.what}, where rank {self.presence.rank} waited "
            f"{self.patience.waited()}{self.patience.tell(missing)}"
        )
