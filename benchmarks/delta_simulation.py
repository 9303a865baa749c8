"""Simulates tasks again after a change, as far as it reaches.

``DeltaSimulation`` is the ``Simulation`` of ``simulate_step`` whose ``change`` takes
new durations, and other axes, and computes again only what they change: the delta
simulation of FlexFlow (Jia, Zaharia and Aiken, SysML 2019), with exactly the result of
a full one. A collective may also be ``of`` another, which it first waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from fxpar.passes.simulate.simulate_step import Task
from fxpar.sharding.mesh import axis_of


class DeltaSimulation:
    """Says when each of some tasks runs; ``change`` gives some of them other durations.

    ``starts``, ``ends``: seconds, by index of the task; for a collective of no duration
    when its result is there. ``axes``: all that collectives may run along, in the order
    of ``bits``; by default the axes of the tasks. ``compiled``: whether to run the loop
    by numba, which takes a second to load and is then some 50 times as fast.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        axes: Sequence[str] | None = None,
        compiled: bool = True,
    ) -> None:
        n = len(tasks)
        if axes is None:
            axes = [axis for task in tasks for axis in task.axes]
        self.axes = tuple(dict.fromkeys(map(axis_of, axes)))
        of = [-1 if t.of is None else t.of for t in tasks]
        kinds = [1 if t.axes else 2 if t.of is not None else 0 for t in tasks]
        width = len(self.axes)
        arrays: list[Any] = [
            kinds,
            of,
            _readers(of),
            [self.bits(t.axes) for t in tasks],
        ]
        times: list[Any] = [
            [t.seconds for t in tasks],
            [0.0] * n,
            [-1.0] * n,
            [-1.0] * n,
            [-1.0] * (n * width),
        ]
        self._advance: Callable[..., int] = _advance
        if compiled:
            self._advance = _compiled()
            arrays = [np.array(x, dtype=np.int64) for x in arrays]
            times = [np.array(x, dtype=np.float64) for x in times]
        self._kinds, self._of, self._reader, self._along = arrays
        self.durations, self.starts, self.ends, self._clock, self._free = times
        if n:
            self._run(0, n - 1)

    def bits(self, axes: Sequence[str]) -> int:
        """Return axes as a number, for ``change``."""
        return sum(1 << self.axes.index(a) for a in {axis_of(axis) for axis in axes})

    def _run(self, first: int, last: int) -> int:
        return self._advance(
            first,
            last,
            len(self.axes),
            self._kinds,
            self._of,
            self._reader,
            self._along,
            self.durations,
            self.starts,
            self.ends,
            self._clock,
            self._free,
        )

    @property
    def seconds(self) -> float:
        """Return when all is done."""
        n = len(self._clock) * len(self.axes)
        return float(max([self.clock(-1), *self._free[n - len(self.axes) : n]]))

    def clock(self, i: int) -> float:
        """Return when the compute stream has passed task i, or all tasks: -1."""
        return float(self._clock[i]) if len(self._clock) else 0.0

    def change(
        self, durations: Mapping[int, float], along: Mapping[int, int] | None = None
    ) -> float:
        """Give tasks, by index, other durations, and collectives other axes (``bits``);
        return ``seconds``. Raises IndexError, and ValueError on a wait, which has no
        duration of its own."""
        if not durations:
            return self.seconds
        for i in durations:
            if i < 0 or self._kinds[i] == 2:
                raise ValueError(f"task {i} has no duration of its own")
        for i, seconds in durations.items():
            self.durations[i] = seconds
        for i, bits in (along or {}).items():
            assert i in durations and self._kinds[i] == 1, "axes of a collective only"
            self._along[i] = bits
        self._run(min(durations), max(durations))
        return self.seconds


def _readers(of: Sequence[int]) -> list[int]:
    """Return for each task the last that waits for it."""
    out = [-1] * len(of)
    for i, j in enumerate(of):
        if j >= 0:
            out[j] = i
    return out


def _advance(
    first,
    last,
    width,
    kinds,
    of,
    reader,
    along,
    durations,
    starts,
    ends,
    clock,
    free,
):
    """Run tasks from ``first`` on; stop, at the earliest at ``last``, where all is as
    it was, and return that index. ``clock[i]``: the compute stream's time after task i;
    ``free[i * width + a]``: when the links of axis a are free then."""
    now = clock[first - 1] if first > 0 else 0.0
    for i in range(first, len(kinds)):
        row = i * width
        start = now
        if kinds[i] == 0:
            now = now + durations[i]
            end = now
        elif kinds[i] == 2:
            now = max(now, ends[of[i]])
            end = now
        elif durations[i] > 0.0:
            if of[i] >= 0:
                now = max(now, ends[of[i]])
            start = now
            for a in range(width):
                if along[i] >> a & 1 and i > 0:
                    start = max(start, free[row - width + a])
            end = start + durations[i]
        else:
            if of[i] >= 0:
                start = max(start, ends[of[i]])
            end = start
        if end != ends[i]:
            last = max(last, reader[i])
        same = now == clock[i]
        for a in range(width):
            until = free[row - width + a] if i > 0 else 0.0
            if kinds[i] == 1 and durations[i] > 0.0 and along[i] >> a & 1:
                until = end
            if until != free[row + a]:
                free[row + a] = until
                same = False
        starts[i] = start
        ends[i] = end
        clock[i] = now
        if same and i >= last:
            return i
    return len(kinds) - 1


@cache
def _compiled() -> Callable[..., int]:
    """Return ``_advance`` by numba, kept on disk; itself where numba is not
    installed."""
    try:
        from numba import njit
    except ImportError:
        return _advance
    return njit(cache=True)(_advance)
