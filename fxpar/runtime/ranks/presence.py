"""This module reports where a rank is, and decides how long others wait for it.

In: what the program does (``works``, ``waits``), its current line, its seconds of CPU.
Out: an ``Answer`` in the store of the process group, for ranks that ask: this rank
works (it compiles, or computes), waits for others, is idle, or has ended, and by which
exception. So a rank that waits can distinguish one that is slow from one that will not
come, and from one that waits for it at another place: ``Patience`` says whether its
wait is over, why, and where the missing ranks are. A thread answers, and sends one
small message per beat while nobody asks. Inside ``fxpar.alone`` a rank runs without the
others. Never: a collective; an end of a wait for a rank that works, or a wait without
end for one that does not.

The process that holds the store of the process group may stop, or its machine: calls of
the store then hang in native code, whatever timeout they have, in every thread. So
``watch_store`` closes all connections to a store that does not answer for
``FXPAR_TIMEOUT`` seconds, and what hangs in them raises; where a main thread hangs in a
collective all the same, or at the end of the process, which cannot raise, the process
ends some seconds later.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import math
import multiprocessing.util
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from fxpar import _torch
from fxpar.errors import FxparError, RankMismatchError, is_library
from fxpar.runtime.ranks import worlds
from fxpar.runtime.stage_times import WAIT, stage


@functools.cache
def _machine() -> str:
    """Return the boot id and PID namespace of this process; "" if unknown."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def identity() -> str:
    """Return a text that identifies this process: machine, PID and start time."""
    return f"{_machine()}\n{os.getpid()}\n{_begun(os.getpid())}"


def _begun(process: int) -> str:
    """Return a process's start time in clock ticks; "" if it ended or is unknown."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""


def is_gone(process: str) -> bool:
    """Return whether the process with this ``identity`` is known to have ended, which
    only a process of the same machine can be."""
    machine, number, begun = process.split("\n")
    return machine == _machine() and _begun(int(number)) != begun


# Reasons why this process ends without an exception: a status, a thread's error.
_EXITS: list[str] = []


@functools.cache
def note_exits() -> None:
    """Record the status passed to ``sys.exit``, and the errors that end threads."""
    plain_exit, plain_hook = sys.exit, threading.excepthook

    def exit_noted(status: Any = None, /) -> Any:
        if status not in (None, 0):
            error = sys.exception()  # in its ``except`` block
            _EXITS.append(_error_text(error) if error else f"sys.exit({status!r})")
        plain_exit(status)

    def hook_noted(args: Any) -> None:
        if not isinstance(args.exc_value, SystemExit):
            name = args.thread.name if args.thread else "a thread"
            _EXITS.append(f"{_error_text(args.exc_value)} (in {name})")
        plain_hook(args)

    sys.exit, threading.excepthook = exit_noted, hook_noted


def ended_by() -> str:
    """Return the error or status that ends this process; "" if it ends normally."""
    error = getattr(sys, "last_value", None) or sys.exception()
    if error is not None and not isinstance(error, SystemExit):
        return _error_text(error)
    return _EXITS[-1] if _EXITS else ""


def _error_text(error: Any) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


def computed() -> float:
    """Return the seconds of CPU that a program took: those of its Python threads,
    except the calling one, which answers for it, and of backwards. Threads that
    idle next to a program at no small cost do not count (a gloo group's
    takes 0.1 % of a core, a store's 30 us a question)."""
    threads = _python_threads()
    threads.discard(threading.get_native_id())
    if torch.cuda.is_initialized():  # there torch runs a backward in threads of its own
        threads |= _named_threads("pt_autograd")
    spent = [_seconds_of(thread) for thread in threads]
    if None in spent and not Path(_TASKS).exists():  # not Linux
        return time.process_time() - time.thread_time()
    return sum(seconds or 0.0 for seconds in spent)


def torch_seconds() -> float:
    """Return the seconds of CPU of threads that are neither Python's nor serve the
    store: they send and receive for collectives."""
    threads = _named_threads("") - _python_threads() - _named_threads("pt_tcpstore")
    return sum(_seconds_of(thread) or 0.0 for thread in threads)


_TASKS = "/proc/self/task"


def _python_threads() -> set[int]:
    return {x.native_id for x in threading.enumerate() if x.native_id is not None}


def main_seconds() -> float | None:
    """Return the seconds of CPU of the main thread; None where unknown."""
    return _seconds_of(os.getpid())


def _seconds_of(thread: int) -> float | None:
    """Return the seconds of CPU of a thread; None if it has ended, or is unknown."""
    try:
        return int(Path(f"{_TASKS}/{thread}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return None


def _named_threads(name: str) -> set[int]:
    """Return the threads of this process whose names on Linux begin with ``name``."""
    threads = set[int]()
    for thread in Path(_TASKS).glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            if (thread / "comm").read_text().startswith(name):
                threads.add(int(thread.name))
    return threads


log = logging.getLogger("fxpar")

BEAT = 0.5  # seconds after which a rank looks again whether others ask
SILENT = 10.0  # seconds after which a rank that has not answered is silent
GONE = "has ended without an error: its process is gone"
ANSWER = 4.0  # seconds in which a rank answers a question, however busy it is
BUSY = 0.02  # share of a CPU that a rank uses at least while it computes

STORE_FIX = (
    "the process that holds it, mostly rank 0 or torchrun, has ended or hangs: see its "
    "output"
)

# Prefix of a word that says why a rank does not come to a meeting.
FAILED = "!"
# In place of a rank in the key of all words, where rank 0 reads for all.
ALL = "all"

# The activities of the program of this process, innermost last.
_DOING: list[Answer] = []


@dataclass(frozen=True)
class Answer:
    """Is the state of a rank, as it reports it or as others find it."""

    # "works", "waits", "collective" (hangs in one), "in a graph", "idle", "ended",
    # "absent" (said nothing yet) or "silent" (has not answered for long).
    state: str
    text: str  # the activity in words
    waits_for: str = ""  # prefix of the world of the ranks it waits for, if it does
    number: int = 0  # number of the meeting it waits at
    last_call: str = ""  # the last call that it came to, in words


def failure(what: str, fix: str, where: str | None = None) -> str:
    """Return the word of a rank that does not come to a meeting."""
    return FAILED + json.dumps([what, fix, where])


def waiting() -> str:
    """Return what this rank waits for, in words; "" if it does not wait."""
    return "".join(x.text for x in _DOING[-1:] if x.state == "waits")


@contextlib.contextmanager
def works(text: str) -> Iterator[None]:
    """Report inside that this rank works, though it may seem idle."""
    with _doing(Answer("works", text)):
        yield


@contextlib.contextmanager
def waits(text: str, waits_for: str = "", number: int = 0) -> Iterator[None]:
    """Report inside that this rank waits for others. ``waits_for``: the prefix of their
    world; ``number``: that of the meeting."""
    with _doing(Answer("waits", text, waits_for, number)), stage(WAIT, nested=True):
        yield


@contextlib.contextmanager
def _doing(answer: Answer) -> Iterator[None]:
    _DOING.append(answer)
    try:
        yield
    finally:
        _DOING.pop()


@dataclass
class Presence:
    """Reports this rank to others while one default process group lives."""

    group: weakref.ref[Any]  # the default process group; another one ends the answers
    store: Any  # through a connection of its own, for the thread
    rank: int
    size: int  # ranks of the group
    prefix: str  # prefix of its keys
    questions: int = 0  # questions so far, of any rank
    # Keys that every rank has read, to be deleted at the next beat.
    read: list[str] = field(default_factory=list)
    # Called at every beat while this rank waits for others; None: it does not.
    watch: Callable[[], None] | None = None
    met_in: list[worlds.World] = field(default_factory=list)  # where it meets others
    # The number of the last call that it came to in any world, and the call in words.
    last_call: tuple[int, str] | None = None
    beats: int = 0  # grows while the store answers the thread
    # Set when the store is not needed any more.
    over: threading.Event = field(default_factory=threading.Event)
    store_facts: list[str] = field(default_factory=list)  # why the store is silent
    _answer_number: int = 0  # number of the last answer of this rank
    # At the last beat: seconds of CPU of the program, of its main thread and of threads
    # of torch, and the time (``time.monotonic``).
    _cpu: tuple[float, float | None, float | None, float] = (0.0, None, None, 0.0)
    # By rank, the number of its last answer, and when that was first seen.
    _news: dict[int, tuple[int, float]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)  # ends the thread
    _thread: threading.Thread | None = None  # answers; None before ``start``
    _process: int = field(default_factory=os.getpid)  # a fork of it does not answer

    def start(self) -> None:
        """Start the thread that answers."""
        note_exits()
        self.store.set(f"{self.prefix}/process/{self.rank}", identity())
        self._publish(self._where())
        self._thread = threading.Thread(
            target=self._run, name="fxpar-presence", daemon=True
        )
        self._thread.start()
        atexit.register(self._leave)
        # Processes that multiprocessing starts call these and not those of atexit.
        multiprocessing.util.Finalize(None, self._leave, exitpriority=100)

    def lost_store(self, error: BaseException) -> RankMismatchError:
        """Return the error to raise where the store does not answer."""
        facts = self.store_facts or [
            f"the store of the process group does not answer: {error}"
        ]
        if not facts[0].startswith("the store"):
            facts = ["the store of the process group does not answer", *facts]
        what = "\n  ".join(facts)
        mismatch = RankMismatchError(what, where=user_line(), fix=STORE_FIX)
        mismatch.is_reported = True  # every rank raises it
        return mismatch

    def refuse(self, rank: int, answer: Answer, why: str, fix: str) -> None:
        """Fail the meeting at which a rank waits for this one. ``answer``: of that
        rank."""
        what = f"rank {rank} {answer.text}, rank {self.rank} {waiting()}: {why}"
        for name in (f"{self.rank}", ALL):
            key = worlds.word_key(answer.waits_for, answer.number, name)
            self.store.compare_set(key, "", failure(what, fix))
        self.questions = -1  # this rank does not overwrite it when it comes

    def ask(self) -> None:
        """Ask every rank to report where it is, at its next beat."""
        self.store.add(f"{self.prefix}/asked", 1)

    def others(self, ranks: Iterable[int] | None = None) -> dict[int, Answer]:
        """Return the last answers of other ranks; None: of all of them."""
        states = {}
        for rank in range(self.size) if ranks is None else ranks:
            key = f"{self.prefix}/where/{rank}"
            if rank == self.rank:
                continue
            if not self.store.check([key]):
                text = "has not run anything of fxpar yet"
                states[rank] = Answer("absent", text)
                continue
            beat, fields = json.loads(self.store.get(key).decode())
            answer, now = Answer(**fields), time.monotonic()
            last, since = self._news.get(rank, (-1, now))
            if beat != last:
                since = now
            self._news[rank] = beat, since
            if answer.state != "ended" and now - since > 2 * BEAT:
                process = self.store.get(f"{self.prefix}/process/{rank}").decode()
                if is_gone(process):
                    answer = replace(answer, state="ended", text=GONE)
                elif now - since > SILENT:
                    text = f"has not answered for {now - since:.0f} s"
                    answer = replace(answer, state="silent", text=text)
            states[rank] = answer
            self.beats += 1
        return states

    def answers(self, unless: Callable[[], bool] = lambda: False) -> dict[int, Answer]:
        """Ask all other ranks now, and return their answers: "silent" for a rank that
        does not answer within ``ANSWER`` seconds. ``unless``: ends the wait early."""
        states, begin = self.others(), time.monotonic()
        late, before = list(states), dict(self._news)
        self.ask()
        while time.monotonic() - begin < ANSWER:
            time.sleep(BEAT / 5)
            states = self.others()
            late = [
                rank
                for rank, answer in states.items()
                if answer.state != "ended" and self._news.get(rank) == before.get(rank)
            ]
            if not late or unless():
                return states
        text = f"has ended or hangs: no answer for {ANSWER:.0f} s"
        return states | dict.fromkeys(late, Answer("silent", text))

    def _run(self) -> None:
        try:
            while not self._stop.wait(BEAT) and self._do_beat():
                self.beats += 1
        except BaseException:
            self.over.set()
            raise

    def _do_beat(self) -> bool:
        """Do one beat, and return whether there is another."""
        group = self.group()
        if group is None or group is not _torch.distributed.default_group():
            with contextlib.suppress(RuntimeError):  # the store may have ended
                self._publish(Answer("ended", "has left the process group"))
            self.met_in.clear()  # these have ended
            self.over.set()
            return False
        del group
        try:
            self._beat()
        except dist.DistStoreError:
            pass  # not in time, of a store that has much to do: at the next beat
        except dist.DistError as error:
            log.info("rank %d cannot report where it is: %s", self.rank, error)
            # The program meets the same error where it needs the store.
            _torch.distributed.cut_store(self.store)
            self.over.set()
            return False
        return True

    def _beat(self) -> None:
        """Answer ranks that ask, look at a wait of this rank, and delete read keys."""
        questions, torch_took = self.store.add(f"{self.prefix}/asked", 0), None
        if questions != self.questions:
            self._publish(self._where())
            self.questions = questions
            torch_took = torch_seconds()
            if not self.store_facts and self.store.check([f"{self.prefix}/left"]):
                self.store_facts.append(self.store.get(f"{self.prefix}/left").decode())
        main = main_seconds()
        self._cpu = computed(), main, torch_took, time.monotonic()
        if self.watch is not None:
            self.watch()
        while self.read:
            self.store.delete_key(self.read.pop())

    def _publish(self, answer: Answer) -> None:
        self._answer_number += 1
        last = "call {}, {}".format(*self.last_call) if self.last_call else ""
        answer = replace(answer, last_call=last)
        text = json.dumps([self._answer_number, asdict(answer)])
        self.store.set(f"{self.prefix}/where/{self.rank}", text)

    def _where(self) -> Answer:
        """Return the answer of this rank now."""
        for doing in _DOING[-1:]:
            return doing
        line, waits, in_graph = _user_line()
        before, main, torch_took, at = self._cpu
        took = max(time.monotonic() - at, 1e-3)
        place = f"in a graph at {line}" if in_graph else f"in {line}"
        if torch_took is not None and is_in_collective():
            moved = main_seconds() != main
            share = (torch_seconds() - torch_took) / took
            if not moved and share < BUSY / 2:
                return Answer("collective", f"is {place}, in a collective")
        if waits:
            return Answer("waits", f"is {place}")
        share = (computed() - before) / took
        if at and share > BUSY:
            return Answer("works", f"runs {line}")
        if in_graph:
            return Answer("in a graph", f"is {place}")
        return Answer("idle", f"is idle at {line}")

    def _leave(self) -> None:
        """Report as the process ends that it has ended, and by which exception."""
        if self._stop.is_set() or os.getpid() != self._process:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * BEAT)
        reason = ended_by()
        text = f"ended: {reason}" if reason else "has ended"
        with contextlib.suppress(Exception):  # the store may have ended before
            if self.group() is not None or reason:
                self._publish(Answer("ended", text))
            if self.group() is not None and reason:
                # The store may end with this process: others hear of it before.
                left = f"rank {self.rank} {text}"
                self.store.compare_set(f"{self.prefix}/left", "", left)
                self.answers()
        self.over.set()


_TORCH = str(Path(torch.__file__).parent)


def user_line() -> str:
    """Return the line of the user's code that the main thread is at."""
    return _user_line()[0]


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _user_line() -> tuple[str, bool, bool]:
    """Return the ``user_line``, whether the main thread waits there for other ranks,
    and whether it runs a compiled graph."""
    frame, distributed, in_graph, last = _main_frame(), False, False, "no code"
    generated = ("<eval_with_key>", _torch.inductor.cache_dir())
    while frame is not None:
        file = frame.f_code.co_filename
        last = f"{file}:{frame.f_lineno}"
        if file.startswith(f"{_TORCH}/distributed/"):
            distributed = True
        elif file.startswith(generated):
            in_graph = True
        elif not is_library(file):
            break
        frame = frame.f_back
    return last, distributed, in_graph


def is_in_collective() -> bool:
    """Return whether the main thread is inside a collective or a message of torch."""
    if (frame := _main_frame()) is None:
        return False
    file = frame.f_code.co_filename
    if file == f"{_TORCH}/_ops.py":
        return "c10d" in str(frame.f_locals.get("self"))
    return file in (f"{_TORCH}/distributed/distributed_c10d.py", _MESSAGES)


_MESSAGES = str(_torch.distributed.__file__)
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
        self, presence: Presence, seconds: float, ranks: Sequence[int], prefix: str
    ) -> None:
        """``ranks``: those of the world that waits, by their numbers in the default
        process group; ``prefix``: of that world."""
        self.presence, self.seconds = presence, seconds
        self.ranks, self.prefix = ranks, prefix
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
        return waits and other.waits_for != self.prefix

    def _end_of(self, late: Sequence[int]) -> str:
        """Return why the late ranks will not come; "" if they may."""
        # How many meetings this rank came to, by the prefixes of its worlds.
        mine = {world.prefix: world.meetings for world in self.presence.met_in}
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
    _say(f"rank {me.rank}: {fact}; this rank is at {user_line()}")
    _torch.distributed.cut_store(store)
    _end_where_it_hangs(me)


def _end_where_it_hangs(me: Presence) -> None:
    """End the process once its main thread hangs for others that it cannot reach."""
    hangs, before, looked = 0.0, None, time.monotonic()
    while hangs < GRACE:
        time.sleep(BEAT)
        now, spent = time.monotonic(), main_seconds()
        hangs, looked = hangs + min(now - looked, 2 * BEAT), now
        ended = not threading.main_thread().is_alive()
        waits = ended or waiting() or is_in_collective()
        if not waits or spent != before:
            hangs = 0.0
        before = spent
    where = waiting() or f"hangs at {user_line()}"
    try:
        _say(
            f"RankMismatchError: rank {me.rank} ends: it {where}, and "
            f"{me.store_facts[0]}\n  fix: {STORE_FIX}"
        )
        sys.stdout.flush()
    finally:
        os._exit(1)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        print(f"fxpar: {text}", file=sys.stderr, flush=True)


_DEPTH = [0]


def is_alone() -> bool:
    """Return whether this rank runs alone, inside ``fxpar.alone``."""
    return _DEPTH[0] > 0


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Run what is inside on this rank alone: ``with fxpar.alone(): evaluate(model)``.

    Compiled functions and models run as they would without ``torch.compile``, so that
    nothing waits for other ranks, and ranks that wait for this one meanwhile know that
    it works. Gradients computed inside are this rank's own. Raises ShardError if the
    parameters of a model are sharded (``fxpar.shard``), PlanError in
    ``fxpar.train_step``: these take all ranks.
    """
    if torch.compiler.is_compiling():
        raise FxparError(
            "fxpar.alone() inside a compiled function",
            fix="put it around the call of the compiled function",
        )
    _DEPTH[0] += 1
    try:
        with torch.compiler.set_stance("force_eager"), works("is alone"):
            yield
    finally:
        _DEPTH[0] -= 1
