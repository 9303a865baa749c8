"""This module reads the state of this process and of others of its machine.

In: threads and processes, as Linux reports them. Out: seconds of CPU that a program
took, whether a process still runs, and what ends this one. Never: a message to others.
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


# Name on Linux of the threads that torch runs a backward in, on accelerators.
_BACKWARD = "pt_autograd"
# And those that serve the store.
_SERVES = "pt_tcpstore"


def computed() -> float:
    """Return the seconds of CPU that a program took: those of its Python threads,
    except the calling one, which answers for it, and of backwards. Threads that
    idle next to a program at no small cost do not count (a gloo group's
    takes 0.1 % of a core, a store's 30 us a question)."""
    threads = _python_threads()
    threads.discard(threading.get_native_id())
    if torch.cuda.is_initialized():
        threads |= _named_threads(_BACKWARD)
    spent = [_seconds_of(thread) for thread in threads]
    if None in spent and not Path(_TASKS).exists():  # not Linux
        return time.process_time() - time.thread_time()
    return sum(seconds or 0.0 for seconds in spent)


def torch_seconds() -> float:
    """Return the seconds of CPU of threads that are neither Python's nor serve the
    store: they send and receive for collectives."""
    threads = _named_threads("") - _python_threads() - _named_threads(_SERVES)
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
