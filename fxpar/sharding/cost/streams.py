"""Simulates when tasks run: one compute stream, and a stream for each set of axes.

In: tasks in the order they are launched. Out: start and end of each, in seconds. Never:
looks at a graph or hardware.

The model is what PyTorch does, with both NCCL and gloo. Kernels run one after the
other. Each set of axes that communicates has a process group, and so a stream: a
collective starts once all tasks launched before it have run, not only its operand,
since its stream waits for the compute stream where it is called. It also waits for
those called before it along any of its axes: sets that share an axis share its links,
on which two at a time would each have a part, to end no sooner together. Axes that are
not shared have links of their own, as the devices of FlexFlow do. A wait holds the
compute stream until its collective is done. A collective of no duration is as if it
were not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpar.sharding.mesh import axis_of


@dataclass(frozen=True)
class Task:
    """Is a kernel, a collective or a wait, in the order of launches."""

    # The name under which it is shown.
    name: str
    # Its duration.
    seconds: float = 0.0
    # The axes that a collective runs along; a kernel and a wait have none.
    axes: tuple[str, ...] = ()
    # The collective that a wait is for; a collective of any duration first waits for
    # it.
    of: int | None = None


class Simulation:
    """Says when each of some tasks runs.

    ``starts``, ``ends``: seconds, by index of the task; for a collective of no duration
    when its result is there.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.starts, self.ends, self._clock = list[float](), list[float](), [0.0]
        now, free = 0.0, dict[str, float]()
        for task in tasks:
            waited = 0.0 if task.of is None else self.ends[task.of]
            start = now
            if not task.axes:
                now = end = max(now + task.seconds, waited)
            elif not task.seconds:
                start = end = max(now, waited)
            else:
                now = max(now, waited)
                axes = list(map(axis_of, task.axes))
                start = max([now, *(free.get(axis, 0.0) for axis in axes)])
                end = start + task.seconds
                free.update(dict.fromkeys(axes, end))
            self.starts.append(start)
            self.ends.append(end)
            self._clock.append(now)
        # When all is done.
        self.seconds = max([now, *free.values()])

    def clock(self, i: int) -> float:
        """Return when the compute stream has passed task i, or all tasks: -1."""
        return self._clock[i + 1 if i >= 0 else i]
