"""Show a status line while a graph is planned and compiled, where that takes seconds.

In: the names of all steps in order, then of each as it begins. Out, on stderr: on a
terminal one line that renews itself, in a log plain lines, at 5, 10, 20, 40 seconds and
so on; what is done sooner than ``DELAY`` prints nothing. Never: on another process than
rank 0, nor a change to the graph.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

from tqdm import tqdm

DELAY = 3.0  # seconds until a terminal shows something
_FIRST_LINE = 5.0  # seconds until a log shows something; from line to line it doubles
_BEAT = 0.5  # seconds from one renewal to the next
_LINE = "{desc}: {postfix[0]}, step {n_fmt} of {total_fmt}, {elapsed}"


class _Status:
    """Is one graph's progress. ``now``: the step that runs, and its number from 1."""

    def __init__(self, name: str, steps: Sequence[str], stream: TextIO) -> None:
        self.name, self.steps, self.stream = name, steps, stream
        self.now = ("tracing", 0)
        self.begun = time.monotonic()
        self.over = threading.Event()
        renews = getattr(stream, "isatty", lambda: False)()
        follow = self._on_terminal if renews else self._in_log
        self.thread = threading.Thread(target=follow, daemon=True)

    def begin(self, step: str, stage: str = "") -> None:
        """Go on to the next step of a name; back to its first, where a program is
        planned another time. A name that no step has is shown at the step that ran.
        ``stage``: the work that the step is a part of, shown before it."""
        names, (_, count) = self.steps, self.now
        if step in names:
            begin = count if step in names[count:] else 0
            count = names.index(step, begin) + 1
        self.now = (f"{stage} ({step})" if stage not in ("", step) else step, count)

    def _on_terminal(self) -> None:
        """Show one line that renews itself."""
        if self.over.wait(DELAY):
            return
        with tqdm(
            desc=f"fxpar {self.name}",
            total=len(self.steps),
            bar_format=_LINE,
            postfix=[""],
            file=self.stream,
            leave=False,
            dynamic_ncols=True,
        ) as line:
            line.start_t -= DELAY
            while True:
                line.postfix[0], line.n = self.now
                line.refresh()
                if self.over.wait(_BEAT):
                    return

    def _in_log(self) -> None:
        """Print plain lines, each after twice the time of the one before."""
        due = _FIRST_LINE
        while not self.over.wait(max(0.0, self.begun + due - time.monotonic())):
            step, count = self.now
            of = f"step {count} of {len(self.steps)}"
            text = f"fxpar {self.name}: {step}, {of}, {due:.0f} s"
            print(text, file=self.stream, flush=True)
            due *= 2


_CURRENT: list[_Status] = []


@contextlib.contextmanager
def status_of(name: str, steps: Sequence[str], *, on: bool) -> Iterator[None]:
    """Show the progress of what runs inside. ``steps``: the names of all there may be;
    ``on``: whether this process shows it. Inside another the outer one is shown."""
    if not on or _CURRENT or sys.stderr is None:
        yield
        return
    progress = _Status(name, steps, sys.stderr)
    _CURRENT.append(progress)
    progress.thread.start()
    try:
        yield
    finally:
        _CURRENT.remove(progress)
        progress.over.set()
        progress.thread.join()


def begin(step: str, stage: str = "") -> None:
    """Note that a step of a stage begins."""
    for progress in _CURRENT:
        progress.begin(step, stage)


def rename(step: str) -> None:
    """Show another text for the step that runs."""
    for progress in _CURRENT:
        progress.now = (step, progress.now[1])
