"""Where each rank is, told to ranks that wait for it; and ``fxpar.alone``.

A thread beside the program of every rank answers, through the store of the process
group, ranks that ask: whether this one works (it compiles, or computes), waits for
others, is idle, or has ended. So a rank that waits can tell another that is slow from
one that will not come. While nobody asks, a rank sends one small message a beat. Inside
``fxpar.alone`` a rank runs by itself, and meets nobody.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from fxpar import _torch
from fxpar.errors import FxparError
from fxpar.runtime.stage_times import WAIT, stage

log = logging.getLogger("fxpar")

BEAT = 0.5  # seconds between two looks of a rank at who asks
SILENT = 10.0  # seconds after which an answer is no news any more
STARTING = 10  # times as long is waited for a rank that may still load its data
ENDED = 1.0  # seconds to wait for a rank that has ended
ANSWER = 4.0  # seconds in which a rank answers a question, however busy it is
BUSY = 0.02  # share of a CPU that a rank uses at least while it computes
_WAIT = {"seconds": 30.0}

# What the program of this process does, innermost last: (state, text).
_DOING: list[tuple[str, str]] = []


def set_timeout(seconds: float) -> None:
    """How long ranks wait for a rank that does not work: ``FXPAR_TIMEOUT``."""
    _WAIT["seconds"] = seconds


def timeout() -> float:
    """Seconds that ranks wait for a rank that does not work."""
    return _WAIT["seconds"]


@contextlib.contextmanager
def works(text: str) -> Iterator[None]:
    """Inside, this rank works, though it may seem idle: others wait for it."""
    with _doing("works", text):
        yield


@contextlib.contextmanager
def waits(text: str) -> Iterator[None]:
    """Inside, this rank waits for others."""
    with _doing("waits", text), stage(WAIT, nested=True):
        yield


@contextlib.contextmanager
def _doing(state: str, text: str) -> Iterator[None]:
    _DOING.append((state, text))
    try:
        yield
    finally:
        _DOING.pop()


@dataclass
class Presence:
    """This rank among the others in one life of the default process group."""

    # It answers while this is the default one.
    group: weakref.ref[Any]
    # Through a connection of its own, for the thread.
    store: Any
    # Of this process.
    rank: int
    # Ranks of the group.
    size: int
    # That its keys begin with, as those of the Channel.
    prefix: str
    questions: int = 0  # questions so far, of any rank
    # Keys that every rank has read, to be deleted; called at every beat.
    read: list[str] = field(default_factory=list)
    # Called at every beat while this rank waits for others; None: it does not.
    watch: Callable[[], None] | None = None
    # Answers so far.
    _beats: int = 0
    # Seconds that the program computed, and of ``time.monotonic``, at the last beat.
    _cpu: tuple[float, float] = (0.0, 0.0)
    # By rank, the number of its last answer, and when that was first seen.
    _news: dict[int, tuple[int, float]] = field(default_factory=dict)
    # Set to end the thread.
    _stop: threading.Event = field(default_factory=threading.Event)
    # It answers; None before ``start``.
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Answer from now on."""
        self._publish()
        self._thread = threading.Thread(
            target=self._run, name="fxpar-presence", daemon=True
        )
        self._thread.start()
        atexit.register(self._leave)

    def ask(self) -> None:
        """Let every rank say where it is, at its next beat."""
        self.store.add(f"{self.prefix}/asked", 1)

    def others(self) -> dict[int, tuple[str, str]]:
        """(state, text) of every other rank, as it last said: "absent" if it never did,
        "silent" if it did not for long."""
        states = {}
        for rank in range(self.size):
            key = f"{self.prefix}/where/{rank}"
            if rank == self.rank:
                continue
            if not self.store.check([key]):
                states[rank] = ("absent", "has come to nothing of fxpar yet")
                continue
            beat, state, text = json.loads(self.store.get(key).decode())
            now = time.monotonic()
            last, since = self._news.get(rank, (-1, now))
            if beat != last:
                since = now
            self._news[rank] = beat, since
            if state != "ended" and now - since > SILENT:
                state, text = "silent", f"has not answered for {now - since:.0f} s"
            states[rank] = (state, text)
        return states

    def answers(
        self, unless: Callable[[], bool] = lambda: False
    ) -> dict[int, tuple[str, str]]:
        """As ``others``, asked now: "silent" are those who do not answer in time. Not
        waited for any more once ``unless`` says so."""
        states, begin = self.others(), time.monotonic()
        late, before = list(states), dict(self._news)
        self.ask()
        while time.monotonic() - begin < ANSWER:
            time.sleep(BEAT / 5)
            states = self.others()
            late = [
                rank
                for rank, (state, _) in states.items()
                if state != "ended" and self._news.get(rank) == before.get(rank)
            ]
            if not late or unless():
                return states
        text = f"has ended or hangs: no answer for {ANSWER:.0f} s"
        return states | dict.fromkeys(late, ("silent", text))

    def _run(self) -> None:
        while not self._stop.wait(BEAT):
            group = self.group()
            if group is None or group is not _torch.distributed.default_group():
                return
            del group
            try:
                self._beat()
            except dist.DistStoreError:
                pass  # not in time, of a store that has much to do: at the next beat
            except dist.DistError as error:
                # The program meets the same error where it needs the store.
                log.info("rank %d tells no other where it is: %s", self.rank, error)
                return

    def _beat(self) -> None:
        """Answer who asks, and do what waits for a beat."""
        questions = self.store.add(f"{self.prefix}/asked", 0)
        if questions != self.questions:
            self._publish()
            self.questions = questions
        self._cpu = _computed(), time.monotonic()
        if self.watch is not None:
            self.watch()
        while self.read:
            self.store.delete_key(self.read.pop())

    def _publish(self) -> None:
        self._beats += 1
        text = json.dumps([self._beats, *self._where()])
        self.store.set(f"{self.prefix}/where/{self.rank}", text)

    def _where(self) -> tuple[str, str]:
        """What this rank does now."""
        if _DOING:
            return _DOING[-1]
        line, waits, in_graph = _user_line(sys._current_frames())
        if waits:
            return "waits", f"is in {line}"
        cpu, at = self._cpu
        share = (_computed() - cpu) / max(time.monotonic() - at, 1e-3)
        if at and share > BUSY:
            return "works", f"runs {line}"
        state = "in a graph" if in_graph else "idle"
        return state, f"is {state} at {line}"

    def _leave(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * BEAT)
        with contextlib.suppress(Exception):  # the store may have ended before
            if self.group() is not None:
                text = json.dumps([self._beats + 1, "ended", "has ended"])
                self.store.set(f"{self.prefix}/where/{self.rank}", text)


# How Linux calls threads that torch runs a backward in, on accelerators.
_BACKWARD = "pt_autograd"


def _computed() -> float:
    """Seconds of CPU that a program took, called by the thread that answers for it:
    those of its own threads, and of backwards. Not of the answers, nor of threads that
    idle beside a program at no small cost (a gloo group's takes 0.1 % of a core, a
    store's 30 us a question)."""
    threads = {x.native_id for x in threading.enumerate() if x.native_id is not None}
    threads.discard(threading.get_native_id())
    if torch.cuda.is_initialized():
        threads |= _backward_threads()
    spent = [_seconds_of(thread) for thread in threads]
    if None in spent and not Path(_TASKS).exists():  # not Linux
        return time.process_time() - time.thread_time()
    return sum(seconds or 0.0 for seconds in spent)


_TASKS = "/proc/self/task"


def _seconds_of(thread: int) -> float | None:
    """Seconds of CPU of a thread; None if it has ended, or nobody tells."""
    try:
        return int(Path(f"{_TASKS}/{thread}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return None


def _backward_threads() -> set[int]:
    """The threads in which torch runs backwards on accelerators."""
    threads = set[int]()
    for thread in Path(_TASKS).glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            if (thread / "comm").read_text().startswith(_BACKWARD):
                threads.add(int(thread.name))
    return threads


class Patience:
    """Of one wait for other ranks: it lasts while any of them works, and then as long
    as ranks wait for one that does not."""

    def __init__(self, presence: Presence, seconds: float) -> None:
        self.presence, self.seconds = presence, seconds
        self.begin = self.worked = time.monotonic()
        self.last_question = self.begin
        self.seen: dict[int, tuple[str, str]] = {}
        self.has_ended = False  # a rank that is waited for

    def is_over(self, missing: Callable[[], Sequence[int]]) -> bool:
        """Whether to wait no longer. ``missing``: the ranks that have not come."""
        now = time.monotonic()
        if now - self.last_question >= BEAT:
            self.presence.ask()
            self.last_question = now
            self.seen = self.presence.others()
            states = [state for state, _ in self.seen.values()]
            if "works" in states:
                self.worked = now
            elif "ended" in states and now - self.begin > ENDED:
                self.has_ended = any(self.seen[r][0] == "ended" for r in missing())
                return self.has_ended
        absent = any(self.seen.get(r, ("",))[0] == "absent" for r in missing())
        return now - self.worked > self.seconds * (STARTING if absent else 1)

    def waited(self) -> str:
        """How long it lasted so far, and what bounds it."""
        bound = "" if self.has_ended else " (FXPAR_TIMEOUT)"
        return f"{time.monotonic() - self.begin:.0f} s{bound}"

    def tell(self, missing: Sequence[int]) -> str:
        """Where the missing ranks are, a line for each."""
        return "".join(
            f"\n  rank {rank} {self.seen[rank][1]}"
            for rank in missing
            if rank in self.seen
        )


_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[2])
_PYTHON = str(Path(contextlib.__file__).parent)


def user_line() -> str:
    """The line of the user's code that the main thread is at."""
    return _user_line(sys._current_frames())[0]


def _user_line(frames: dict[int, FrameType]) -> tuple[str, bool, bool]:
    """As ``user_line``, whether it waits there for other ranks, and whether it runs a
    compiled graph."""
    ident = threading.main_thread().ident
    frame = frames.get(ident) if ident is not None else None
    distributed, in_graph, last = False, False, "no code"
    generated = ("<eval_with_key>", _torch.inductor.cache_dir())
    while frame is not None:
        file = frame.f_code.co_filename
        last = f"{file}:{frame.f_lineno}"
        if file.startswith(f"{_TORCH}/distributed/"):
            distributed = True
        elif file.startswith(generated):
            in_graph = True
        elif not file.startswith((f"{_TORCH}/", f"{_OWN}/", _PYTHON, "<frozen")):
            break
        frame = frame.f_back
    return last, distributed, in_graph


_DEPTH = [0]


def is_alone() -> bool:
    """Whether this rank runs by itself, inside ``fxpar.alone``."""
    return _DEPTH[0] > 0


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, this rank runs by itself: ``with fxpar.alone(): evaluate(model)``.

    Compiled functions and models run as they would without ``torch.compile``, so that
    nothing waits for other ranks, and those who wait for this one meanwhile know that
    it works. Gradients made inside are this rank's own. Raises ShardError where the
    parameters of a model lie in parts (``fxpar.shard``), PlanError in
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
