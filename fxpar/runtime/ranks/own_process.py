"""What is known of this process and of others of its machine.

In: threads and processes, as Linux tells of them. Out: seconds of CPU that a program
took, whether a process is there, and what ends this one. Never: a message to others.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch


@functools.cache
def _machine() -> str:
    """The machine, and the processes that this one sees there."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def identity() -> str:
    """A text that stands for this process."""
    return f"{_machine()}\n{os.getpid()}\n{_begun(os.getpid())}"


def _begun(process: int) -> str:
    """When a process of this machine began; "" if it has ended, or nobody knows."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""


def is_gone(process: str) -> bool:
    """Whether a process, by its ``identity``, is known to have ended: it was one of
    this machine."""
    machine, number, begun = process.split("\n")
    return machine == _machine() and _begun(int(number)) != begun


# What ends this process, as far as no exception says so: a status, a thread's error.
_EXITS: list[str] = []


@functools.cache
def note_exits() -> None:
    """Keep the status that ``sys.exit`` gets, and what ends a thread."""
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
    """What ends this process; "" if it came to its end."""
    error = getattr(sys, "last_value", None) or sys.exception()
    if error is not None and not isinstance(error, SystemExit):
        return _error_text(error)
    return _EXITS[-1] if _EXITS else ""


def _error_text(error: Any) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


# How Linux calls threads that torch runs a backward in, on accelerators.
_BACKWARD = "pt_autograd"
# And those that serve the store.
_SERVES = "pt_tcpstore"


def computed() -> float:
    """Seconds of CPU that a program took, called by the thread that answers for it:
    those of its own threads, and of backwards. Not of the answers, nor of threads that
    idle beside a program at no small cost (a gloo group's takes 0.1 % of a core, a
    store's 30 us a question)."""
    threads = _python_threads()
    threads.discard(threading.get_native_id())
    if torch.cuda.is_initialized():
        threads |= _named_threads(_BACKWARD)
    spent = [_seconds_of(thread) for thread in threads]
    if None in spent and not Path(_TASKS).exists():  # not Linux
        return time.process_time() - time.thread_time()
    return sum(seconds or 0.0 for seconds in spent)


def torch_seconds() -> float:
    """Seconds of CPU of threads that are not Python's and do not serve the store: they
    send and receive what collectives do."""
    threads = _named_threads("") - _python_threads() - _named_threads(_SERVES)
    return sum(_seconds_of(thread) or 0.0 for thread in threads)


_TASKS = "/proc/self/task"


def _python_threads() -> set[int]:
    return {x.native_id for x in threading.enumerate() if x.native_id is not None}


def main_seconds() -> float | None:
    """Seconds of CPU of the main thread; None where nobody knows."""
    return _seconds_of(os.getpid())


def _seconds_of(thread: int) -> float | None:
    """Seconds of CPU of a thread; None if it has ended, or nobody tells."""
    try:
        return int(Path(f"{_TASKS}/{thread}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return None


def _named_threads(name: str) -> set[int]:
    """The threads of this process whose names on Linux begin so."""
    threads = set[int]()
    for thread in Path(_TASKS).glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            if (thread / "comm").read_text().startswith(name):
                threads.add(int(thread.name))
    return threads
