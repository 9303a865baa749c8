"""Holds schedules of a pipeline: when each rank computes which microbatch of which
stage.

In: a name, the numbers of places and microbatches. Out: rows of ``Action``, torch's own
(``torch.distributed.pipelining``), and when each runs, given seconds of each action.
All messages of a program follow one order, the order in which actions begin.
Never: runs anything.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxpar._torch.pipelining import gpipe, one_f_one_b, rank_tables
from fxpar.errors import PlanError
from fxpar.sharding.pipeline_axis import homes

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"

# Complete work of a stage on a microbatch, as sorted kinds.
_WHOLE = ([BACKWARD, FORWARD], [FORWARD, INPUTS, WEIGHTS])


class Action(NamedTuple):
    """Is a stage's work on one microbatch."""

    stage: int
    # "F": forward; "B": backward, or its two halves "I": the part that earlier stages
    # wait for, and "W": the rest.
    kind: str
    part: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.part}"


class TimedAction(NamedTuple):
    """Says when an action runs."""

    action: Action
    place: int
    # In seconds.
    start: float
    end: float


@dataclass(frozen=True)
class PipelineSchedule:
    """Describes one of torch's schedules."""

    # (places, microbatches, stages a place) -> actions of each place.
    rows: Callable[[int, int, int], list[list[tuple[int, str, int]]]]
    # Stages of each place.
    rounds: int
    # How stages are assigned to places, as in ``pipeline_axis.homes``.
    style: str = "loop"
    # The schedule of the same stages that has an order for any number of microbatches;
    # empty: this one has.
    of_any_number: str = ""
    # Places wait for the first part on its way through all others, and for the last on
    # its way back: for any cut into stages, (p - 1) / p of the time of a part.
    fills: bool = False


SCHEDULES: Mapping[str, PipelineSchedule] = {
    "gpipe": PipelineSchedule(gpipe, 1, fills=True),
    "1f1b": PipelineSchedule(one_f_one_b, 1, fills=True),
    "looped_bfs": PipelineSchedule(rank_tables("LoopedBFS"), 2),
    "interleaved": PipelineSchedule(
        rank_tables("Interleaved1F1B"), 2, of_any_number="looped_bfs"
    ),
    "zero_bubble": PipelineSchedule(rank_tables("InterleavedZeroBubble"), 1),
    "interleaved_zero_bubble": PipelineSchedule(
        rank_tables("InterleavedZeroBubble"), 2, of_any_number="looped_bfs"
    ),
    "zbv": PipelineSchedule(rank_tables("ZBVZeroBubble"), 2, "v"),
    "dualpipev": PipelineSchedule(
        rank_tables("DualPipeV"), 2, "v", of_any_number="zbv"
    ),
}

# The schedules of "auto" where forward and backward are one program, and where they are
# two.
AUTO, AUTO_SEPARATE = "1f1b", "gpipe"


def stage_places(name: str, places: int) -> tuple[int, ...]:
    """Return the place of each stage of a schedule."""
    schedule = SCHEDULES[name]
    return homes(places * schedule.rounds, places, schedule.style)


def order_for(name: str, places: int, parts: int) -> str:
    """Return the schedule, or if it has no order for this number of microbatches, the
    schedule of the same stages that has one."""
    other = SCHEDULES[name].of_any_number
    stages, rows = places * SCHEDULES[name].rounds, _rows(name, places, parts)
    is_complete = not other or _is_complete(rows, range(stages), range(parts), True)
    return name if is_complete else other


def rows_of(
    name: str, places: int, parts: int, *, trains: bool = True
) -> list[list[Action]]:
    """Return the actions of each place, in order; without a backward, forwards alone.

    Raises PlanError if the schedule has no order for this number of microbatches.
    """
    rows = _rows(name, places, parts)
    if not trains:
        rows = [[action for action in row if action.kind == FORWARD] for row in rows]
    stages = range(places * SCHEDULES[name].rounds)
    if not _is_complete(rows, stages, range(parts), trains):
        raise PlanError(
            f"pipeline={name!r} has no order for {parts} microbatches on {len(stages)} "
            "stages",
            fix=f"set microbatches to a multiple of {len(stages)}",
        )
    return rows


def _rows(name: str, places: int, parts: int) -> list[list[Action]]:
    schedule = SCHEDULES[name]
    rows = schedule.rows(places, parts, schedule.rounds)
    return [[Action(*action) for action in row] for row in rows]


def _is_complete(
    rows: Sequence[Sequence[Action]], stages: range, parts: range, trains: bool
) -> bool:
    """Return whether each stage does all of each microbatch, and nothing twice."""
    kinds: dict[tuple[int, int], list[str]] = defaultdict(list)
    for action in itertools.chain(*rows):
        kinds[action.stage, action.part].append(action.kind)
    wholes = _WHOLE if trains else ([FORWARD],)
    each = itertools.product(stages, parts)
    return len(kinds) == len(stages) * len(parts) and all(
        sorted(kinds[key]) in wholes for key in each
    )


def timed(
    rows: Sequence[Sequence[Action]],
    forward: Sequence[float],
    backward: Sequence[float],
    sending: float = 0.0,
) -> list[TimedAction]:
    """Return when each action runs, in the order they begin. ``forward``, ``backward``:
    seconds of each stage; ``sending``: seconds from one place to another.

    Raises PlanError if actions wait for one another in a cycle.
    """
    last = max(each.stage for row in rows for each in row)
    scheduled = {each for row in rows for each in row}
    ends: dict[Action, tuple[float, int]] = {}
    clock, ahead = [0.0] * len(rows), [0] * len(rows)
    slots: list[TimedAction] = []
    while len(slots) < len(scheduled):
        finished = len(slots)
        for place, row in enumerate(rows):
            while ahead[place] < len(row):
                action = row[ahead[place]]
                predecessors = [x for x in _needs(action, last) if x in scheduled]
                if any(x not in ends for x in predecessors):
                    break
                arrivals = (
                    end + (sending if at != place else 0.0)
                    for end, at in map(ends.__getitem__, predecessors)
                )
                start = max([clock[place], *arrivals])
                of_stage = forward if action.kind == FORWARD else backward
                share = 0.5 if action.kind in (INPUTS, WEIGHTS) else 1.0
                clock[place] = start + of_stage[action.stage] * share
                ends[action] = clock[place], place
                slots.append(TimedAction(action, place, start, clock[place]))
                ahead[place] += 1
        if len(slots) == finished:
            waits = [
                str(row[i]) for row, i in zip(rows, ahead, strict=True) if i < len(row)
            ]
            raise PlanError(f"actions of a pipeline wait for each other: {waits}")
    return sorted(slots, key=lambda slot: slot.start)


def _needs(action: Action, last: int) -> list[Action]:
    """Return the actions that an action waits for, some of which a schedule may not
    have."""
    stage, kind, part = action
    if kind == FORWARD:
        return [Action(stage - 1, FORWARD, part)] if stage else []
    if kind == WEIGHTS:
        return [Action(stage, INPUTS, part)]
    out = [Action(stage, FORWARD, part)]
    if stage < last:
        out += [Action(stage + 1, each, part) for each in (BACKWARD, INPUTS)]
    return out


def bubble(slots: Sequence[TimedAction], places: int) -> float:
    """Return the share of the time in which places wait, on average."""
    end = max(slot.end for slot in slots)
    busy = sum(slot.end - slot.start for slot in slots)
    return 1.0 - busy / (end * places) if end else 0.0


def picture(slots: Sequence[TimedAction], places: int, tick: float) -> str:
    """Return a line for each place with a column for each tick: the microbatch of a
    forward as a digit, of a backward as a letter."""
    end = max(slot.end for slot in slots)
    lines = [["."] * round(end / tick) for _ in range(places)]
    for slot in slots:
        mark = str(slot.action.part % 10)
        if slot.action.kind != FORWARD:
            mark = chr(ord("a") + slot.action.part % 26)
        for column in range(round(slot.start / tick), round(slot.end / tick)):
            lines[slot.place][column] = mark
    return "\n".join(f"{i}: {' '.join(line)}" for i, line in enumerate(lines))
