"""Simulates schedules of one local graph and keeps the best so far.

In: a local graph with steps, a mesh, the hardware; schedules, one after the other. Out:
``Attempts``, which remembers the simulated schedules, the one taken, and the others
with the reason. Never makes a schedule, and never changes the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from fxpar.errors import ScheduleError
from fxpar.fusion.apply_schedule import Unexpected, apply
from fxpar.fusion.overlap_candidates import Machine, OverlapCandidate, Window
from fxpar.fusion.schedule import Line, Schedule
from fxpar.passes.order.forward_backward import Orders, regather, split_phases
from fxpar.passes.simulate.launches import PhasesAsRun, launches_as_run
from fxpar.passes.simulate.simulate_step import Timeline, simulate
from fxpar.sharding.cost.fused_kernels import Launches
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.mesh import Mesh
from fxpar.units import difference, short_bytes, short_seconds

# A schedule that saves no more than this share of a step is not worth taking.
LEAST = 1e-3

# A schedule is a near miss if a step takes less than this many times as long with it.
_CLOSE = 1.25

# The share by which buckets and gathers in flight may raise a step's peak memory, and
# the share of a device's memory that they may always take: 1 MiB of 16 GiB.
_ROOM, LITTLE = 0.1, 2**-14


@dataclass(frozen=True)
class SimulatedRun:
    """Holds a local graph that was simulated."""

    lowered: fx.Graph  # collectives as they run, before it was ordered
    phases: PhasesAsRun  # in the order in which it runs
    launches: Launches  # the launches of the phases


class Attempts:
    """Holds the schedule so far and the timeline of a step with it, and tries others.

    ``simulated``: the timeline with each schedule that may be tried on the mesh;
    ``left``: others that may, by the seconds of a step with fewer layers;
    ``near_misses``: notes on near misses. ``keep_gathered``: the backward gathers no
    parameters again; ``gathers``: whether parameters are gathered at all.
    """

    def __init__(
        self,
        graph: fx.Graph,
        mesh: Mesh,
        hardware: Hardware,
        *,
        keep_gathered: bool = False,
    ) -> None:
        self.first, self.mesh, self.hardware = graph, mesh, hardware
        self.keep_gathered = keep_gathered
        self.gathers = any(x.meta.get("fxpar_parameter") for x in graph.nodes)
        self.machine = Machine(mesh, hardware)
        self.near_misses: list[str] = []
        self.left: list[Schedule] = []
        self.simulated: dict[Schedule, Timeline] = {}
        self.formed: dict[Any, tuple[Window, OverlapCandidate]] = {}
        self._last: tuple[tuple[Line, ...], Orders] | None = None
        self._last_steps: tuple[tuple[Line, ...], fx.Graph] | None = None
        self._last_run: tuple[Schedule, SimulatedRun] | None = None
        self.schedule = Schedule()
        self.now = self.simulated[self.schedule] = self.timeline(self.schedule)
        self.run = self._run_of(self.schedule)

    def others(self) -> tuple[Schedule, ...]:
        """Return all simulated schedules but the one taken and those that need much
        more memory than it, the fastest first; then ``left``."""
        return tuple(dict.fromkeys([*self.by_seconds(), *self.left]))

    def most_bytes(self) -> int:
        """Return the peak that another schedule may have."""
        peak = self.now.peak_bytes
        return peak + max(int(_ROOM * peak), self.little())

    def little(self) -> int:
        """Return the bytes that another schedule may always take."""
        return int(LITTLE * self.hardware.memory)

    def by_seconds(self) -> tuple[Schedule, ...]:
        """Return the simulated schedules but the one taken and those that need much
        more memory, the fastest first."""
        most = self.most_bytes()
        schedules = sorted(self.simulated, key=lambda s: self.simulated[s].seconds)
        fits = (s for s in schedules if self.simulated[s].peak_bytes <= most)
        return tuple(s for s in fits if s != self.schedule)

    def graph(self, schedule: Schedule) -> fx.Graph:
        """Return the graph after some lines, communication as steps; not to be changed.
        The last one asked for is remembered."""
        if self._last_steps is None or self._last_steps[0] != schedule.lines:
            steps = apply(schedule, self.first, self.mesh, lowered=False)
            self._last_steps = schedule.lines, steps
        return self._last_steps[1]

    def timeline(self, schedule: Schedule) -> Timeline:
        """Return the simulated timeline of a step. Raises ScheduleError."""
        if schedule in self.simulated:
            return self.simulated[schedule]
        orders = self._lowered(schedule)
        phases, graph = orders.as_run(schedule.settings), orders.parts.graph
        launches = launches_as_run(phases)
        self._last_run = schedule, SimulatedRun(graph, phases, launches)
        return simulate(graph, self.mesh, self.hardware, launches=launches)

    def _run_of(self, schedule: Schedule) -> SimulatedRun | None:
        """Return the simulation of a schedule, if it was the last one."""
        if self._last_run is None or self._last_run[0] != schedule:
            return None
        return self._last_run[1]

    def orders(self) -> Orders:
        """Return the orders that settings give the lines so far."""
        return self._lowered(self.schedule)

    def _lowered(self, schedule: Schedule) -> Orders:
        """Return the graph after the lines of a schedule, with collectives as they run,
        for settings to order. The last one asked for is remembered."""
        if self._last is None or self._last[0] != schedule.lines:
            lowered = apply(schedule, self.first, self.mesh, lowered=True)
            if not self.keep_gathered:
                regather(lowered)
            self._last = schedule.lines, Orders(split_phases(lowered))
        return self._last[1]

    def attempt(self, schedule: Schedule, what: str) -> Timeline | None:
        """Take a schedule if a step is better with it than with the one so far; else
        note why not. Return its timeline; None if it is refused."""
        try:
            then = self.timeline(schedule)
        except Unexpected:
            raise
        except ScheduleError as error:
            self.near_misses.append(f"{what}: {error.what}")
            return None
        self.simulated[schedule] = then
        if not self.take(schedule, then) and then.seconds < _CLOSE * self.now.seconds:
            self.near_misses.append(
                f"{what}: a step would take "
                f"{difference(then.seconds, self.now.seconds, short_seconds)}, a rank "
                f"hold {difference(then.peak_bytes, self.now.peak_bytes, short_bytes)}"
            )
        return then

    def take(self, schedule: Schedule, then: Timeline) -> bool:
        """Take a schedule if a step is better with it. Return whether it was taken."""
        if not is_better(then, self.now):
            return False
        self.simulated[schedule] = then
        self.keep(schedule)
        return True

    def keep(self, schedule: Schedule) -> None:
        """Make a simulated schedule the current one."""
        self.schedule, self.now = schedule, self.simulated[schedule]
        self.run = self._run_of(schedule)


def is_better(then: Timeline, now: Timeline, least: float = LEAST) -> bool:
    """Return whether ``then`` saves more than the share ``least`` of the seconds of
    ``now``, or is not slower and saves memory, or calls of collectives."""
    saved = 1 - then.seconds / now.seconds if now.seconds else 0.0
    costs = [(x.peak_bytes, sum(t.calls for t in x.traffic)) for x in (then, now)]
    return saved > least or (saved >= -LEAST and costs[0] < costs[1])
