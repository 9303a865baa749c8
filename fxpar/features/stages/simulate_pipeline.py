"""Predicts one step of a program in stages: the times of each place's actions.

In: the graph of all stages (``lay_out_stages``), lowered. Out: a ``Timeline`` whose
streams are the places along the pipeline axis, an event for each action. Each place
runs its launches one after the other, each as long as ``simulate_step`` predicts, and
waits for messages; messages overlap with compute, run one after the other at each end,
and slow compute down at both ends as collectives do (``Hardware.beside``). A message is
copied before it is sent. Since all places follow the order of one graph, one pass over
it gives all times. If ranks share cores, a place that waits leaves its own to the
others (``Hardware.speed_of``): further passes take the busy places from the one before.
Never runs and never changes the graph.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar.features.stages.assign_stages import BACKWARD, home_of
from fxpar.features.stages.program_at_place import program_at
from fxpar.graph.builder import PART, PLACE
from fxpar.graph.pipeline_ops import EVERY
from fxpar.passes.simulate.launches import launches_of
from fxpar.passes.simulate.simulate_step import (
    PLACE_STREAM,
    Event,
    Timeline,
    Traffic,
    launch_seconds,
    residency,
)
from fxpar.sharding.cost import collectives
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.op import bytes_of
from fxpar.sharding.mesh import Link, Mesh

ours = torch.ops.fxpar

# The most passes if ranks share cores; a relative change of the step below _SAME ends
# them.
_PASSES, _SAME = 12, 1e-3

# (second of the step, factor of a place's speed from then on).
_Speeds = Sequence[tuple[float, float]]


def simulate_pipeline(
    graph: fx.Graph, mesh: Mesh, axis: str, hardware: Hardware, *, fused: bool = True
) -> Timeline:
    """Return the timeline of one step. ``mesh``: with the hardware's links; ``axis``:
    that of stages; ``fused``: as for ``simulate_step.simulate``.

    Raises PlanError as ``launches_of`` does.
    """
    places = range(mesh.axis_size(axis))
    programs = [launches_of(program_at(graph, at), fused=fused) for at in places]
    machines = [hardware.at_speed(speed) for speed in mesh.speeds_of(axis)]
    seconds_of = [
        launch_seconds(launches, mesh, machine, fused=fused)
        for launches, machine in zip(programs, machines, strict=True)
    ]
    link, ranks = collectives.between_two(mesh.link(axis)), mesh.size // len(places)
    clocks = _Clocks(seconds_of, link, machines).over(graph)
    if hardware.speed_of(ranks) > 1.0:  # while the other places wait
        for _ in range(_PASSES):
            speeds = _speeds(clocks.runs, ranks, hardware)
            before, clocks = clocks, _Clocks(seconds_of, link, machines, speeds)
            clocks.over(graph)
            if math.isclose(max(before.now), max(clocks.now), rel_tol=_SAME):
                break
    busy, seconds = max(clocks.busy), max(clocks.now)
    calls, sent = clocks.calls, clocks.sent
    return Timeline(
        tuple(sorted(clocks.events(), key=lambda event: event.start)),
        seconds,
        busy,
        clocks.sending,
        seconds - busy,
        (Traffic("send", (axis,), calls, sent, sent // len(places)),) if calls else (),
        (),
        max(residency(x, in_place=fused).peak[0] for x in programs),
        (),
    )


@dataclass
class _Clocks:
    """Holds the time at each place while nodes are simulated in order."""

    # Seconds of each place's launches, by name of their last node.
    launch_seconds: Sequence[dict[str, float]]
    # Between any two places.
    link: Link
    # By place.
    machines: Sequence[Hardware]
    # By place; empty: the speed of the hardware's figures.
    speeds: Sequence[_Speeds] = ()
    # Message -> the second at which it arrives.
    arrivals: dict[fx.Node, float] = field(default_factory=dict)
    # Bytes of all messages.
    sent: int = 0
    # Number of messages.
    calls: int = 0
    # Sum of the messages' seconds.
    sending: float = 0.0

    def __post_init__(self) -> None:
        self.now = [0.0] * len(self.launch_seconds)
        self.busy = [0.0] * len(self.launch_seconds)
        # By place, when its link can send, and receive, the next message.
        self.free_out, self.free_in = list(self.now), list(self.now)
        # By place, the (start, end) of messages that run at it.
        self.messages: list[list[tuple[float, float]]] = [[] for _ in self.now]
        # By place, its actions in order.
        self.runs: list[list[_ActionRun]] = [[] for _ in self.now]
        self.speeds = self.speeds or [()] * len(self.now)

    def over(self, graph: fx.Graph) -> _Clocks:
        """Run all nodes, and return these clocks."""
        for node in graph.nodes:
            self.step(node)
        return self

    def step(self, node: fx.Node) -> None:
        """Simulate the next node at its places. The step ends when all results have
        arrived."""
        if node.op == "output":
            arrived = [self.arrivals.get(read, 0.0) for read in node.all_input_nodes]
            self.now = [max([now, *arrived]) for now in self.now]
        if node.op != "call_function":
            return
        if node.target is ours.transfer.default:
            source, target = node.args[1:3]
            self._send(node, source, [target])
        elif node.target in (ours.spread.default, ours.scatter.default):
            source = node.args[1]
            self._send(node, source, [x for x in self._places() if x != source])
        else:
            place = node.meta.get(PLACE, EVERY)
            for at in self._places() if place == EVERY else (place,):
                self._compute(node, at)

    def _places(self) -> range:
        return range(len(self.now))

    def _send(self, node: fx.Node, source: Any, targets: Sequence[Any]) -> None:
        """Simulate a message. It leaves once its source has the value, and the links at
        both ends are free. A scatter sends each target a part, others the same value.
        """
        size, link = bytes_of(node), self.link
        leaving = size * (len(targets) if node.target is ours.scatter.default else 1)
        copying = self.machines[source].fused(2 * leaving, {})
        self.now[source] += copying
        self.busy[source] += copying
        free = [self.free_out[source], *(self.free_in[target] for target in targets)]
        start = max(self.now[source], *free)
        self.free_out[source] = start + leaving / link.bandwidth
        for target in targets:
            self.free_in[target] = start + size / link.bandwidth
        self.arrivals[node] = start + collectives.message(link, leaving)
        self.sent, self.calls = self.sent + leaving, self.calls + 1
        self.sending += self.arrivals[node] - start
        for place in (source, *targets):
            self._disturb(place, start, self.arrivals[node])

    def _disturb(self, place: int, start: float, end: float) -> None:
        """Slow down compute at a place while a message runs there: at once for the part
        before the place's clock, later for the rest."""
        slowdown, now = self.machines[place].beside, self.now[place]
        if start < now:
            self.now[place] = now = _ended(start, now - start, [(start, end)], slowdown)
        if now < end:
            self.messages[place].append((max(start, now), end))

    def _compute(self, node: fx.Node, place: int) -> None:
        arrived = [self.arrivals.get(read, 0.0) for read in node.all_input_nodes]
        start = max(self.now[place], *arrived) if arrived else self.now[place]
        seconds = self.launch_seconds[place].get(node.name, 0.0)
        # A place's clock never goes back.
        left = [message for message in self.messages[place] if message[1] > start]
        self.messages[place] = left
        slowdown, speeds = self.machines[place].beside, self.speeds[place]
        self.now[place] = _ended(start, seconds, left, slowdown, speeds)
        alone = _ended(start, seconds, (), 0.0, speeds) - start if speeds else seconds
        self.busy[place] += alone
        if seconds:
            name, runs = _action_of(node), self.runs[place]
            if not runs or runs[-1].name != name:
                runs.append(_ActionRun(name, start))
            runs[-1].end, runs[-1].launches = self.now[place], runs[-1].launches + 1

    def events(self) -> list[Event]:
        """Return an event for each run of launches of one action."""
        return [
            Event(
                x.name[0],
                x.name[1],
                f"{PLACE_STREAM} {place}",
                x.start,
                x.end - x.start,
                nodes=x.launches,
            )
            for place, runs in enumerate(self.runs)
            for x in runs
        ]


def _ended(
    start: float,
    seconds: float,
    messages: Sequence[tuple[float, float]],
    slowdown: float,
    speeds: _Speeds = (),
) -> float:
    """Return the end of ``seconds`` of compute that begin at ``start``, if it loses a
    share ``slowdown`` of the time of messages (start, end)."""
    now, left = start, seconds
    while left:
        at = bisect_right(speeds, now, key=lambda x: x[0])
        speed = speeds[at - 1][1] if at else 1.0
        if any(begin <= now < end for begin, end in messages):
            speed *= 1.0 - slowdown
        edges = [x for message in messages for x in message if x > now]
        until = min([*edges, *(x for x, _ in speeds[at : at + 1])], default=math.inf)
        if left <= (until - now) * speed:
            return now + left / speed
        now, left = until, left - (until - now) * speed
    return now


def _speeds(
    runs: Sequence[Sequence[_ActionRun]], ranks: int, hardware: Hardware
) -> list[_Speeds]:
    """Return the speeds of each place, given when the others computed. ``ranks``: the
    number of ranks of each place."""
    counts = [min(n * ranks, hardware.ranks) for n in range(1, len(runs) + 1)]
    speed_of = list(map(hardware.speed_of, counts))
    speeds = list[_Speeds]()
    for place in range(len(runs)):
        edges = sorted(
            edge
            for other, actions in enumerate(runs)
            for x in actions
            for edge in ((x.start, 1), (x.end, -1))
            if other != place
        )
        at_work = itertools.accumulate((change for _, change in edges), initial=0)
        times = [0.0, *(time for time, _ in edges)]
        speeds.append([(t, speed_of[n]) for t, n in zip(times, at_work, strict=True)])
    return speeds


@dataclass
class _ActionRun:
    """Is a run of launches of one action."""

    # The action's (name, kind).
    name: tuple[str, str]
    # When its first launch begins, in seconds of the step.
    start: float
    # When its last launch ends, in seconds of the step.
    end: float = 0.0
    # Number of launches.
    launches: int = 0


def _action_of(node: fx.Node) -> tuple[str, str]:
    """Return (name, kind) of the action that a node belongs to."""
    home, part = home_of(node), node.meta.get(PART)
    if home is None or home.stage < 0:
        return "update", "fused"
    letter = "B" if home.phase == BACKWARD else "F"
    number = "" if part is None else str(part)
    return f"{home.stage}{letter}{number}", home.phase
