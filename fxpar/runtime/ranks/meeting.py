"""This module exchanges a short text, a word, between all ranks, without a collective.

Ranks meet so at every call of a compiled graph, before any of its collectives is
launched, and where they agree while they compile: ``gather`` gives the texts of all
ranks, ``agree`` compares digests. The meetings of a world (``worlds``) have equal
numbers on all its ranks.

In: a place in the program and a word. Out: the words of all ranks, in their order; or
one error on all of them, if ranks are at different places, one failed (it wrote its
failure in place of a word), or one is missing (a rank that waits writes a failure in
its place by one atomic message, which it reads if it comes later). Never: a wait
without end.

Words are keys in the store of the default process group. Up to ``DIRECT`` ranks each
read all words, those of one machine from memory if all come within a tenth of a second
(``Mailboxes``): two messages through a store take some hundred microseconds, this a
few. Of more ranks, rank 0 reads all and writes them in one key, so that the number of
messages grows with the ranks and not with their square.

Backends report that a connection closed, or that time is over, and not which rank was
missing: ``name_lost_ranks`` finds out by what ranks report of themselves. A rank that
fails because another is lost ends, and is then lost to others itself; so the first rank
that knows which one it was writes that to the store, and those that fail later report
the same.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import mmap
import os
import struct
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from fxpar import _torch, cache_files
from fxpar.errors import FxparError, LostRankError, RankMismatchError
from fxpar.runtime.ranks import presence, worlds
from fxpar.runtime.ranks.presence import (
    FAILED,
    Patience,
    Presence,
    failure,
    patience_limit,
    watch_store,
)
from fxpar.runtime.ranks.worlds import World
from fxpar.units import digest

# Timeout of a message; ``_watch`` ends a wait earlier, by writing the key that it
# waits for.
LONGEST = timedelta(days=7)


def current() -> World | None:
    """Return the world that this thread is in, with the store open to its ranks; None
    if it has one rank or there is no process group."""
    world = worlds.current()
    if world is not None and world.store is None:
        if world.size == 1 or dist.get_backend() == "fake":
            return None
        _open(world)
    return world


def all_ranks() -> World | None:
    """Return ``current`` for the world of all ranks, whichever this thread is in."""
    with worlds.inside(None):
        return current()


def meetings() -> int:
    """Return how many meetings this world had, which is equal on all its ranks."""
    world = current()
    return 0 if world is None else world.meetings


def _open(world: World) -> None:
    every = all_ranks() if world.name else None
    if every is None:
        _begin(world)
    else:
        world.presence, world.prefix = every.presence, f"{every.prefix}/{world.name}"
        _take_store(world, every.store)


def _begin(world: World) -> None:
    """Open the store to all ranks, and begin to answer them."""
    store, rank = _torch.distributed.default_store(), world.rank
    me = Presence(world.life, store, rank, world.size, "")
    watch_store(me, store)
    try:
        # A store may outlive a process group; its next life starts new keys.
        me.prefix = f"fxpar/{store.add(f'fxpar/life/{rank}', 1)}"
        store.set(f"{me.prefix}/folder/{rank}", cache_files.folder_text())
        # Connections of their own, so that threads do not wait for one another.
        me.store, connection = store.clone(), store.clone()
        if connection is not store:
            connection.set_timeout(LONGEST)
        world.presence, world.prefix = me, me.prefix
        _take_store(world, connection)
        me.start()
    except dist.DistError as error:
        world.store = None
        me.over.set()
        raise me.lost_store(error) from error


def _take_store(world: World, store: Any) -> None:
    world.store = store
    if world.size <= DIRECT:
        world.boxes = Mailboxes(world.rank, world.size, store, world.prefix)
    world.presence.met_in.append(world)


@contextlib.contextmanager
def answering(world: World) -> Iterator[None]:
    """Raise RankMismatchError where the store does not answer."""
    try:
        yield
    except dist.DistError as error:
        raise world.presence.lost_store(error) from error


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
    world = current()
    if world is None:
        return [word]
    keys, what = _next_keys(world), what or place
    if place == CALL:
        world.presence.last_call = world.meetings, what
    with answering(world):
        words = _words(world, keys, f"{place}\t{word}", what, seconds)
    places, texts = zip(*(text.split("\t", 1) for text in words), strict=True)
    for rank, other in enumerate(places):
        if other != places[0]:
            names = (f"rank {world.ranks[r]}" for r in (rank, 0))
            fact = f"{next(names)} is at {other}, {next(names)} at {places[0]}"
            where = presence.user_line()
            raise as_reported(RankMismatchError(fact, fix=ALONE, where=where))
    return list(texts)


def fail(message: str) -> None:
    """Report in place of the next meeting that this rank failed, to all that come to
    it."""
    world = current()
    if world is None:
        return
    key = _next_keys(world)[world.rank]
    what = f"rank {world.presence.rank} failed:\n{message}"
    fix = "see the error of that rank: this one only stopped because of it"
    text = failure(what, fix)
    with contextlib.suppress(dist.DistError):  # this rank has an error to raise already
        world.store.set(key, text)
        if world.rank == 0 and world.size > DIRECT:
            world.store.compare_set(_verdict_key(world), "", json.dumps([text]))


def _next_keys(world: World) -> list[str]:
    world.meetings += 1
    return [world.key(world.meetings, rank) for rank in range(world.size)]


def _verdict_key(world: World) -> str:
    """Return the key of the words that rank 0 read, where it reads for all."""
    return worlds.word_key(world.prefix, world.meetings, presence.ALL)


def _words(
    world: World, keys: Sequence[str], word: str, what: str, seconds: float | None
) -> list[str]:
    words = _on_one_machine(world, keys[world.rank], word)
    if words is None:
        give_up = partial(_give_up, world, keys, what)
        key_of = dict(zip(world.ranks, keys, strict=True))
        with (
            presence.waits(f"waits for others at {what}", world.prefix, world.meetings),
            watched(world, key_of, seconds or patience_limit(), give_up),
        ):
            words = _read(world, keys)
    world.presence.read += world.wrote  # every rank came to the meeting after it
    world.wrote = [keys[world.rank]]
    if world.rank == 0 and world.size > DIRECT:
        world.wrote.append(_verdict_key(world))
    for text in words:
        if text.startswith(FAILED):
            raise as_reported(error_of(text))
    return words


def error_of(word: str) -> RankMismatchError:
    """Return the error that a word of ``presence.failure`` describes."""
    fact, fix, where = json.loads(word.removeprefix(FAILED))
    return RankMismatchError(fact, fix=fix, where=where)


def _on_one_machine(world: World, key: str, word: str) -> list[str] | None:
    """Write this rank's word, and return the words of all ranks, if they are on this
    machine and come in a moment; else None."""
    boxes = world.boxes if world.size <= DIRECT else None
    if boxes is not None:
        boxes.prepare(world.meetings)
    questions = world.presence.questions
    if questions != world.questions:
        # Some rank waits for long, maybe for this one, and may have given up.
        world.questions = questions
        world.store.compare_set(key, "", word)
        return None
    world.store.set(key, word)
    if boxes is None:
        return None
    boxes.write(world.meetings, word)
    return boxes.read(world.meetings)


def _read(world: World, keys: Sequence[str]) -> list[str]:
    """Return the words of all ranks; of many ranks, as rank 0 read them."""
    store, many = world.store, world.size > DIRECT
    if many and world.rank:
        agreed: list[str] = json.loads(store.get(_verdict_key(world)).decode())
        if agreed:
            return agreed * (world.size if len(agreed) == 1 else 1)
    words = [raw.decode() for raw in store.multi_get(list(keys))]
    if many and not world.rank:
        agreed = words[:1] if len(set(words)) == 1 else words
        if sum(map(len, agreed)) > LARGEST:
            agreed = []  # each reads them all
        store.compare_set(_verdict_key(world), "", json.dumps(agreed))
    return words


@contextlib.contextmanager
def watched(
    world: World,
    key_of: Mapping[int, str],
    seconds: float,
    give_up: Callable[[list[int], Patience], None],
) -> Iterator[None]:
    """Look, while this thread waits inside for keys of the store, at every beat and in
    another thread, whether patience is over: then ``give_up`` ends the wait, by writing
    a failure for the ranks that are missing. ``key_of``: for each rank that is waited
    for, by its number in the default process group, the key that it writes."""
    me = world.presence
    patience = Patience(me, seconds, world.ranks, world.prefix)

    def missing() -> list[int]:
        return [rank for rank, key in key_of.items() if not me.store.check([key])]

    def look() -> None:
        late = missing() if patience.is_over(missing) else []
        if late:
            give_up(late, patience)

    me.watch = look
    try:
        yield
    finally:
        me.watch = None


def _give_up(
    world: World,
    keys: Sequence[str],
    what: str,
    late: Sequence[int],
    patience: Patience,
) -> None:
    """Write for each late rank, and for this one, that it did not come to a meeting."""
    me = world.presence
    fact = (
        f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))} did not "
        f"reach {what}, where rank {me.rank} waited {patience.waited()}"
        f"{patience.tell(late)}"
    )
    text = failure(fact, ALONE, presence.user_line())
    for rank in late:
        key = keys[world.ranks.index(rank)]
        if me.store.compare_set(key, "", text).decode() != text:
            return  # it came meanwhile, or another rank said so
    me.store.set(keys[world.rank], text)
    if world.size > DIRECT and world.ranks[0] in late:
        me.store.compare_set(_verdict_key(world), "", json.dumps([text]))


# Bytes of a box: number of the call, checksum and length, then the word.
_HEAD = struct.Struct("<QII")
_BOX = 1 << 13

# Seconds to look for the words of other ranks, at first without a pause, then with one
# that doubles: a rank that never pauses takes a core that a late one may need.
_MOMENT, _BUSY = 0.1, 1e-4
_PAUSE, _LONGEST_PAUSE = 1e-4, 1e-3


class Mailboxes:
    """Gives one rank access to the boxes of all ranks. ``store``: has the name of the
    memory, under ``prefix``. ``begin``: the number of calls before. Rank 0 makes the
    memory at the second call after these, the others open it at the third; from the
    fourth on it is used, if all have it by then. Ranks that meet once have none.

    A rank has two boxes, which it fills in turn: it comes to the next call but one when
    all have read the last. A word counts only with the number of its call and its
    checksum. A rank that stops looking takes its word out, so that nobody runs past a
    rank that waits at the store, where it may give up on others.

    The memory has no file in a folder: other ranks open it through the process of rank
    0, and the system frees it once all of them have ended, in whatever way."""

    def __init__(
        self, rank: int, size: int, store: Any, prefix: str, begin: int = 0
    ) -> None:
        self.rank, self.size, self._begin = rank, size, begin
        self._store, self._key = store, f"{prefix}/boxes"
        self._memory: mmap.mmap | None = None
        self._handle: int | None = None  # of the memory, on rank 0 until all have it
        self._all_open = False

    def prepare(self, number: int) -> None:
        """Make the memory, open it, or find out whether all ranks have, at the calls
        for that: all ranks come to the same conclusion."""
        if number == self._begin + 2 and not self.rank:
            self._make()
        elif number == self._begin + 3 and self.rank:
            self._open()
        elif number == self._begin + 4 and self._memory is not None:
            self._all_open = all(self._memory[: self.size])
            self.close()

    def write(self, number: int, word: str) -> None:
        """Write a word for a call, if it fits in a box and all share the memory."""
        data = word.encode()
        if self._memory is None or not self._all_open or len(data) > _BOX - _HEAD.size:
            return
        at = self._box(self.rank, number)
        self._memory[at + _HEAD.size : at + _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._memory, at, number, _sum(number, data), len(data))

    def read(self, number: int) -> list[str] | None:
        """Return the words of all ranks at a call; None if not all come in a moment."""
        if self._memory is None or not self._all_open:
            return None
        words: list[str | None] = [None] * self.size
        begin, pause = time.monotonic(), _PAUSE
        while True:
            for rank, word in enumerate(words):
                if word is None:
                    words[rank] = self._word(rank, number)
            if None not in words:
                return [word for word in words if word is not None]
            took = time.monotonic() - begin
            if took > _MOMENT:
                _HEAD.pack_into(self._memory, self._box(self.rank, number), 0, 0, 0)
                return None
            if took < _BUSY:
                os.sched_yield()
            else:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _box(self, rank: int, number: int) -> int:
        return self.size + (2 * rank + number % 2) * _BOX

    def _word(self, rank: int, number: int) -> str | None:
        assert self._memory is not None
        at = self._box(rank, number)
        of, checksum, length = _HEAD.unpack_from(self._memory, at)
        if of != number or length > _BOX - _HEAD.size:
            return None
        data = self._memory[at + _HEAD.size : at + _HEAD.size + length]
        return data.decode() if _sum(number, data) == checksum else None

    def _make(self) -> None:
        name = f"fxpar-{uuid.uuid4().hex}"
        size = self.size + 2 * self.size * _BOX
        try:
            self._handle = os.memfd_create(name)
            os.posix_fallocate(self._handle, 0, size)  # no room would kill at a write
            self._memory = mmap.mmap(self._handle, size)
        except (AttributeError, OSError):  # AttributeError: this is not Linux
            self.close()
            return
        self._memory[0] = 1
        self._store.set(self._key, f"{name}\n/proc/{os.getpid()}/fd/{self._handle}")

    def _open(self) -> None:
        """Open the memory that rank 0 made, if it is there."""
        if not self._store.check([self._key]):
            return
        name, path = self._store.get(self._key).decode().split("\n")
        # Elsewhere, as in another container, the path is of something else.
        with contextlib.suppress(OSError, ValueError):
            if name in os.readlink(path):
                with open(path, "r+b") as file:
                    self._memory = mmap.mmap(file.fileno(), 0)
                self._memory[self.rank] = 1

    def close(self) -> None:
        """Close the handle by which other ranks open the memory."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()


def _sum(number: int, data: bytes) -> int:
    return zlib.crc32(data, number & 0xFFFFFFFF)


E = TypeVar("E", bound=FxparError)

DIFF_LINES = 60

SAME = "run the same code, versions and options on every rank, on the same shapes"

# The key of a rank that asks all ranks to begin again.
VOID = ""


def agree(
    tag: str,
    text: str,
    *,
    key: str | None = None,
    what: str = "the program",
    fix: str | None = None,
    error: type[FxparError] = RankMismatchError,
) -> bool:
    """Return once all ranks gave the same tag and text; False on all ranks if the key
    of one is VOID.

    ``key``: is compared in place of the text, if not its digest. Where keys differ, the
    error shows how the text of the first rank that differs differs from rank 0's.

    Raises ``error`` on every rank if they differ, RankMismatchError if a rank does not
    come or has failed.
    """
    keys = gather(tag, digest(text, 64) if key is None else key)
    if VOID in keys:
        return False
    differ = [rank for rank, other in enumerate(keys) if other != keys[0]]
    if not differ:
        return True
    world = current()
    is_shown = world is not None and world.rank in (0, differ[0])
    texts = gather(tag, text if is_shown else "")
    first, other = worlds.global_rank(0), worlds.global_rank(differ[0])
    diff = _difference(texts[0], texts[differ[0]], f"rank {first}", f"rank {other}")
    fact = f"ranks disagree about {what}: {named(differ)} from rank {first}"
    raise as_reported(error(f"{fact}\n{diff}", fix=fix or SAME))


def gather(tag: str, text: str, seconds: float | None = None) -> list[str]:
    """Return the text of every rank, in order of ranks; they should be short.

    Raises RankMismatchError if a rank does not come, has failed, or gave another tag.
    """
    return meet(repr(tag), text, seconds=seconds)


def gather_data(tag: str, data: Any) -> list[Any]:
    """Return the data of every rank, in order of ranks, which go through JSON."""
    return [json.loads(text) for text in gather(tag, json.dumps(data))]


def first_other(values: Iterable[Any]) -> int | None:
    """Return the first rank whose value differs from rank 0's; None if all are
    equal."""
    first, *rest = values
    return next((rank for rank, x in enumerate(rest, 1) if x != first), None)


def is_leader() -> bool:
    """Return whether this is the rank that decides for all."""
    world = current()
    return world is None or world.rank == 0


def abort(error: BaseException) -> None:
    """Report a failure of this rank, unless every rank knows of it, to ranks that wait
    for it, now or at their next meeting: they raise RankMismatchError with it."""
    if not is_known_to_all(error):
        fail(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def reporting(but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """End the other ranks' wait for this one if it fails inside, unless by ``but``."""
    try:
        yield
    except but:
        raise
    except Exception as error:
        abort(error)
        raise


def as_reported(error: E) -> E:
    """Return the error, marked as one that every rank raises."""
    error.is_reported = True
    return error


def is_known_to_all(error: BaseException | None) -> bool:
    """Return whether every rank knows of an error, or of its cause."""
    while error is not None:
        if getattr(error, "is_reported", False):
            return True
        error = error.__cause__ or error.__context__
    return False


def _difference(text: str, other: str, name: str, other_name: str) -> str:
    """Return a unified diff of the texts of two ranks."""
    before, after = text.splitlines(), other.splitlines()
    lines = list(
        difflib.unified_diff(before, after, name, other_name, lineterm="", n=1)
    )
    if len(lines) > DIFF_LINES:
        lines[DIFF_LINES:] = [f"... {len(lines) - DIFF_LINES} more lines"]
    return "\n".join(lines) or "(their texts are equal, only their digests differ)"


def named(ranks: Sequence[int]) -> str:
    """Return ranks of the current world in words, as users number them."""
    return listed([worlds.global_rank(rank) for rank in ranks])


def listed(ranks: Sequence[int]) -> str:
    """Return the given rank numbers in words, at most eight of them."""
    numbers = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"


# Parts of messages of gloo and NCCL: of ranks that have ended, of any not reached.
_CLOSED = ("closed by peer", "pair closure", "reset")
_SAID = ("gloo", "NCCL", "Timed out waiting", *_CLOSED)
# States of ranks that may have come to the collective.
_IN_STEP = ("waits", "collective", "in a graph", "works")
_SHOWN = 8  # ranks
_LOST_FIX = (
    "see what they printed, first of all the first that failed; if they compute "
    "for longer than a collective may take, give init_process_group a longer "
    "timeout"
)


# The first report of a lost rank: by which rank, which is lost and where, and a fix.
LostRankReport = tuple[int, str, str]


def name_lost_ranks(error: RuntimeError) -> None:
    """Raise RankMismatchError that names the missing ranks if ``error`` comes from a
    collective or a message that other ranks did not reach."""
    text = str(error)
    is_of_others = isinstance(error, dist.DistError) or any(x in text for x in _SAID)
    is_foreign = not isinstance(error, FxparError) and is_of_others
    if not (is_foreign or isinstance(error, LostRankError)):
        return
    world = all_ranks()
    if world is None:
        return
    reason = str(error).split(". ")[0].partition("\n")[0]
    what = f"a collective of this step did not complete ({reason})"
    what = error.what if isinstance(error, FxparError) else what
    try:
        report = _reported(world) or _learned(world, error, what)
    except dist.DistError as lost:
        why = world.presence.lost_store(lost)
        raise RankMismatchError(f"{what}, and {why.what}", fix=why.fix) from error
    if report is None or report[:2] == (world.rank, what):
        return
    rank, fact, fix = report
    if rank != world.rank:
        fact = f"{what}; rank {rank} failed before:\n{fact}"
    raise RankMismatchError(fact, fix=fix) from error


def _learned(world: World, error: RuntimeError, what: str) -> LostRankReport | None:
    """Find out which ranks are lost, report it to the others and return it; None if
    nobody knows."""
    is_closed = any(x in str(error) for x in _CLOSED)
    if isinstance(error, LostRankError) and error.rank is not None and is_closed:
        return _reported(world, what, error.fix or _LOST_FIX)
    with presence.waits("asks where others are"):
        states = world.presence.answers(unless=lambda: _reported(world) is not None)
    report = _reported(world)
    if report is not None:
        return report
    here = worlds.current()
    neighbors = set() if here is None else states.keys() & set(here.ranks)
    absent = {r for r, other in states.items() if other.state not in _IN_STEP}
    late = {r for r, other in states.items() if other.state == "works"}
    named = (ranks & neighbors or ranks for ranks in (absent, late) if ranks)
    lines = [f"\n  rank {r} {states[r].text}" for r in sorted(next(named, ()))]
    if not lines:
        return None
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    what += f":{''.join(lines[:_SHOWN])}{more}"
    return _reported(world, what, _LOST_FIX)


def _reported(world: World, *own: str) -> LostRankReport | None:
    """Return the first report of a lost rank, which is ``own`` if there is none yet;
    None without either."""
    key, store = f"{world.prefix}/lost", world.presence.store
    if own:
        text = store.compare_set(key, "", json.dumps([world.rank, *own]))
    else:
        text = store.get(key) if store.check([key]) else None
    return text and tuple(json.loads(text))
