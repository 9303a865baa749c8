"""This module prints an error that ends the program once, with the message last.

In: the exception that no code caught, as ``sys.excepthook`` gets it. Out: on stderr the
user's frames and the message; one line on a rank that ends for the reason that rank 0
prints. Never: a change of an exception that a program can still catch; a wait without
end.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from fxpar.errors import FxparError, is_library

# How long a rank waits for the error of rank 0, which may be its own as well.
SECONDS = 3.0


def install() -> None:
    """Replace ``sys.excepthook``; the former hook prints all other errors."""
    plain = sys.excepthook

    def print_error(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        is_ours, rank = isinstance(error, FxparError), os.environ.get("RANK")
        text = f"{kind.__name__}: {error}"
        is_of_ranks = rank is not None and int(os.environ.get("WORLD_SIZE") or 1) > 1
        if is_ours and is_of_ranks and rank != "0" and _is_of_rank_0(text):
            line = f"rank {rank} ends with the error that rank 0 prints"
            print(f"{line} ({kind.__name__})", file=sys.stderr)
            return
        if is_ours and os.environ.get("FXPAR_DEBUG", "0") == "0":
            context = _users_context(error)
            error.__cause__, error.__context__ = None, context
            error.__suppress_context__ = context is None
            trace = users_frames(trace)
            error.with_traceback(trace)
        plain(kind, error, trace)
        if is_ours and is_of_ranks:
            _record(text)
        has_text = isinstance(error, Exception) and bool(str(error))
        if rank == "0" and is_of_ranks and has_text:
            # Without the line, which another rank may have reached from elsewhere.
            _give(f"{kind.__name__}: {getattr(error, 'what', error)}")

    sys.excepthook = print_error


def _users_context(error: BaseException) -> BaseException | None:
    """Return what the user's code was handling when an error was raised, None if it was
    nothing: exceptions that a library caught have its frame first."""
    context = error.__cause__ or error.__context__
    while context is not None:
        trace = context.__traceback__
        if trace is not None and not is_library(trace.tb_frame.f_code.co_filename):
            break
        context = context.__cause__ or context.__context__
    return context


def users_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of libraries; all of it if no other is
    there."""
    links = []
    link = trace
    while link is not None:
        if not is_library(link.tb_frame.f_code.co_filename):
            links.append(link)
        link = link.tb_next
    result: TracebackType | None = None
    for link in reversed(links):
        result = TracebackType(result, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return result or trace


def _key() -> str:
    """Return where the error of rank 0 is in the store, which outlives restarts."""
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"fxpar/error of rank 0 at start {start}"


def _give(text: str) -> None:
    """Give the error of this rank, which is rank 0, to the others."""
    _at_store(lambda store, _: store.set(_key(), text) or "")


def _is_of_rank_0(text: str) -> bool:
    """Return whether rank 0 ends with this error, or with one that it quotes; False if
    that is not known in time."""

    def ask(store: Any, over: threading.Event) -> str:
        while not store.check([_key()]):
            if over.wait(0.02):
                return ""
        return str(store.get(_key()).decode())

    first = _at_store(ask)
    return bool(first) and first in text


def _at_store(use: Callable[[Any, threading.Event], str]) -> str:
    """Return the result of a use of the store, in a thread, since it may hang; "" if
    there is none in time, or this process is to end before. The use ends once an event
    is set: a thread that comes back from the store while Python ends would abort."""
    answer, over = queue.SimpleQueue[str](), threading.Event()

    def run() -> None:
        with contextlib.suppress(Exception):  # the store is gone
            store = _store()
            answer.put("" if store is None else use(store, over))

    # A hook for errors of threads may call this one; only the main thread has signals.
    has_signals = threading.current_thread() is threading.main_thread()
    if has_signals:
        ends = signal.signal(signal.SIGTERM, lambda *_: answer.put(""))
    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
        return answer.get(timeout=SECONDS)
    except queue.Empty:
        return ""
    finally:
        over.set()
        thread.join(1.0)
        if has_signals:
            signal.signal(signal.SIGTERM, ends)


def _store() -> Any:
    """Return the store that ranks share: torchrun's, through a connection of its own;
    else that of the process group; None without either."""
    if "torch.distributed" not in sys.modules:
        return None
    from torch.distributed.rendezvous import rendezvous

    from fxpar import _torch

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(rendezvous("env://"))[0]
    if _torch.distributed.default_group() is None:
        return None
    return _torch.distributed.default_store().clone()


def _record(text: str) -> None:
    """Give torchrun the message, with which it ends what it prints of a failure."""
    path, now = os.environ.get("TORCHELASTIC_ERROR_FILE"), str(int(time.time()))
    if path and not os.path.exists(path):
        message = {"message": text, "extraInfo": {"timestamp": now}}
        Path(path).write_text(json.dumps({"message": message}))
