"""When tasks run: one compute stream, and a stream for each set of axes.

In: tasks in the order they are launched. Out: start and end of each, in seconds.
``Simulation.change`` takes new durations and computes again only what they change: the
delta simulation of FlexFlow (Jia, Zaharia and Aiken, SysML 2019), with the very result
of a full one. Knows no graph and no hardware.

The model is what PyTorch does, with NCCL and gloo alike. Kernels run one after the
other. Each set of axes that communicates has a process group, and so a stream: a
collective starts once all that was launched before it has run, not merely its operand,
since its stream waits for the compute stream where it is called. It also waits for
those called before it along any of its axes: sets that share an axis share its links,
on which two at a time would each have a part, to end no sooner together. Axes that are
not shared have links of their own, as the devices of FlexFlow do. A wait holds the
compute stream until its collective is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Task:
    """What takes time, in the order it is launched. Without ``axes`` and ``of`` a
    kernel; with ``axes`` a collective along them; ``of`` is the index of the collective
    that a wait waits for."""

    name: str
    seconds: float = 0.0
    axes: tuple[str, ...] = ()
    of: int | None = None


class Simulation:
    """When each of some tasks runs; ``change`` gives some of them other durations.

    ``starts``, ``ends``: seconds, by index of the task. ``compiled``: whether to run
    the loop by numba, which takes a second to load and is then some 50 times as fast.
    """

    def __init__(self, tasks: Sequence[Task], *, compiled: bool = True) -> None:
        n = len(tasks)
        before, rows, readers = _links(tasks)
        of = [-1 if t.of is None else t.of for t in tasks]
        kinds = [1 if t.axes else 2 if t.of is not None else 0 for t in tasks]
        arrays: list[Any] = [kinds, of, rows, before, readers]
        times: list[Any] = [
            [t.seconds for t in tasks],
            [0.0] * n,
            [-1.0] * n,
            [-1.0] * n,
        ]
        self._advance: Callable[..., int] = _advance
        if compiled:
            self._advance = _compiled()
            arrays = [np.array(x, dtype=np.int64) for x in arrays]
            times = [np.array(x, dtype=np.float64) for x in times]
        self._fixed = arrays
        self.durations, self.starts, self.ends, self._clock = times
        awaited = set(of)
        self._open = [i for i in range(n) if kinds[i] == 1 and i not in awaited]
        if n:
            self._run(0, n - 1)

    def _run(self, first: int, last: int) -> int:
        return self._advance(
            first,
            last,
            *self._fixed,
            self.durations,
            self.starts,
            self.ends,
            self._clock,
        )

    @property
    def seconds(self) -> float:
        """When all is done."""
        return float(max([self.clock(-1), *(self.ends[i] for i in self._open)]))

    def clock(self, i: int) -> float:
        """When the compute stream has come past task i, or past all: -1."""
        return float(self._clock[i]) if len(self._clock) else 0.0

    def change(self, durations: Mapping[int, float]) -> float:
        """Give tasks, by index, other durations; returns ``seconds``. A collective of
        none is as if it were not there. Raises IndexError, and ValueError on a wait,
        which takes what it takes."""
        if not durations:
            return self.seconds
        kinds = self._fixed[0]
        for i in durations:
            if i < 0 or kinds[i] == 2:
                raise ValueError(f"task {i} has no duration of its own")
        for i, taken in durations.items():
            self.durations[i] = taken
        self._run(min(durations), max(durations))
        return self.seconds


def _links(tasks: Sequence[Task]) -> tuple[list[int], list[int], list[int]]:
    """What collectives wait for: ``before[rows[i]:rows[i + 1]]`` are those that have
    the links of task i before it. ``readers[i]``: the last task that waits for i."""
    before: list[int] = []
    rows, readers = [0], [-1] * len(tasks)
    last: dict[str, int] = {}
    for i, task in enumerate(tasks):
        axes = {axis.partition(":")[0] for axis in task.axes}
        earlier = {last[axis] for axis in axes if axis in last}
        last.update(dict.fromkeys(axes, i))
        if task.of is not None:
            readers[task.of] = i
        for j in earlier:
            readers[j] = i
        before += sorted(earlier)
        rows.append(len(before))
    return before, rows, readers


def _advance(
    first, last, kinds, of, rows, before, readers, durations, starts, ends, clock
):
    """Run tasks from ``first`` on; stop, at the earliest at ``last``, where all is as
    it was. ``clock[i]``: the compute stream's time after task i. Returns where."""
    now = clock[first - 1] if first > 0 else 0.0
    for i in range(first, len(kinds)):
        start = now
        if kinds[i] == 0:
            now = now + durations[i]
            end = now
        elif kinds[i] == 1:
            for k in range(rows[i], rows[i + 1]):
                start = max(start, ends[before[k]])
            end = start + durations[i]
            if end != ends[i]:
                last = max(last, readers[i])
        else:
            now = max(now, ends[of[i]])
            end = now
        starts[i] = start
        ends[i] = end
        same = now == clock[i]
        clock[i] = now
        if same and i >= last:
            return i
    return len(kinds) - 1


@cache
def _compiled() -> Callable[..., int]:
    """``_advance`` by numba, kept on disk; itself where numba is not installed."""
    try:
        from numba import njit
    except ImportError:
        return _advance
    return njit(cache=True)(_advance)
