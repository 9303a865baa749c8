"""Cuts a chain of ops into stages by dynamic programming on seconds and bytes.

A pipeline of ``m`` microbatches takes the sum of its stages' seconds and ``m - 1``
times the slowest (Alpa, arXiv 2201.12023, equation 2); sending overlaps with compute,
and counts as the slowest where it takes longer. A stage that holds few microbatches may
wait for one of them to come back, messages included. The slowest stage is first made as
fast as possible; then, for some slower limits, the cuts across which least is sent are
tried. A stage that needs more memory than its place has is not allowed.
In: seconds, messages and memory by op. Out: the positions at which stages begin.
Never: looks at graphs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# The most positions at which a cut is tried.
MOST = 192
# Factors by which the slowest stage may be slower than necessary, to send less.
_SLACK = (1.0, 1.02, 1.05, 1.1, 1.25, 1.5)


# Bytes, and the ops of the chain that need them in memory.
Held = tuple[float, tuple[int, ...]]


@dataclass(frozen=True)
class StageMemory:
    """Holds the memory that ops of a chain need on a rank, by which stages are
    judged."""

    # By stage, the bytes that its place has for it.
    room: tuple[float, ...]
    # By stage, the microbatches whose activations it holds at a time.
    in_flight: tuple[float, ...]
    # Held throughout a step.
    throughout: Sequence[Held]
    # Held for one microbatch, until its backward.
    saved: Sequence[Held]
    # By op, the bytes that live only while it runs, or while its backward does.
    passing: Sequence[float]
    # Bytes that every place holds in addition; ``room`` does not include them.
    every: float = 0.0

    def bytes_of(self, ends: np.ndarray) -> list[np.ndarray]:
        """Return for each stage an array [i, j] of the bytes that it holds if it is
        made of the ops from ``ends[i]`` to ``ends[j]``."""
        throughout, saved = (_held(x, ends) for x in (self.throughout, self.saved))
        peak = np.zeros((len(ends), len(ends)))
        for i, begin in enumerate(ends[:-1].tolist()):
            runs = np.maximum.accumulate(self.passing[begin : ends[-1]])
            peak[i, i + 1 :] = runs[ends[i + 1 :] - begin - 1]
        return [throughout + flying * saved + peak for flying in self.in_flight]


def of_places(
    memory: StageMemory, cuts: Sequence[int], places: Sequence[int]
) -> tuple[float, ...]:
    """Return the bytes that each place holds. ``places``: of each stage; ``cuts``: as
    ``cut_chain`` returns them."""
    nbytes = memory.bytes_of(np.array([0, *cuts, len(memory.passing)]))
    sums = [memory.every] * (max(places) + 1)
    for stage, place in enumerate(places):
        sums[place] += float(nbytes[stage][stage, stage + 1])
    return tuple(sums)


def _held(items: Sequence[Held], ends: np.ndarray) -> np.ndarray:
    """Return an array [i, j] of the bytes of the items that a stage from ``ends[i]`` to
    ``ends[j]`` needs: each item once, where one of its ops is in the stage."""
    changes = np.zeros((len(ends) + 1, len(ends) + 1))
    for nbytes, ops in items:
        at = np.searchsorted(ends, sorted(set(ops)), side="right")
        for begin, end in itertools.pairwise([0, *at.tolist()]):
            changes[begin, end] += nbytes
            changes[end, end] -= nbytes
    return changes.cumsum(0).cumsum(1)[:-1, :-1]


def cut_chain(
    seconds: Sequence[float],
    crossing: Sequence[float],
    stages: int,
    microbatches: int,
    pins: Mapping[int, int] | None = None,
    memory: StageMemory | None = None,
    speeds: Sequence[float] = (),
) -> tuple[int, ...]:
    """Return where each stage but the first begins, as ``stages - 1`` growing
    positions; an empty tuple if no cut is possible.

    ``seconds``: of each op, of one microbatch; ``crossing``: seconds of sending if a
    stage begins at an op, infinite where none may; at least ``stages - 1`` are finite.
    ``pins``: op -> its stage. ``memory``: memory of the ops and room of the stages
    (Alpa, section 5.2). ``speeds``: of each stage, relative; empty: all equal.
    """
    assert 1 <= stages <= len(seconds), "a stage has an op"
    places = np.array(_candidates(crossing, stages, bool(pins)))
    begins = [_may_begin(places, stage, pins or {}) for stage in range(stages)]
    before = np.concatenate(([0.0], np.cumsum(seconds)))
    sent = np.array([0.0, *(crossing[p] for p in places[1:-1].tolist()), 0.0])
    # [i, j]: seconds of a stage from place i to place j.
    work = before[places][None, :] - before[places][:, None]
    work[np.tril_indices(len(places))] = np.inf
    pace = speeds or (1.0,) * stages
    works = [
        np.where(begin[:, None], work / speed, np.inf)
        for begin, speed in zip(begins, pace, strict=True)
    ]
    if memory is not None:
        pairs = zip(works, memory.bytes_of(places), memory.room, strict=True)
        works = [np.where(nbytes <= room, x, np.inf) for x, nbytes, room in pairs]
    least = _slowest(works)
    if not math.isfinite(least):
        return ()
    best, best_ends = np.inf, list[int]()
    for slack in _SLACK:
        bound = least * slack * (1 + 1e-9)
        ends = _cheapest([np.where(x <= bound, sent, np.inf) for x in works])
        stage_seconds = [
            float(x[i, j])
            for x, (i, j) in zip(works, itertools.pairwise(ends), strict=True)
        ]
        slowest, crossed = max(stage_seconds), [float(sent[i]) for i in ends]
        cycle = max(slowest, *crossed, *_rounds(stage_seconds, max(crossed), memory))
        total = sum(crossed) + (microbatches - 1) * cycle + slowest
        if total < best:
            best, best_ends = total, ends
    return tuple(int(places[i]) for i in best_ends[1:-1])


def _rounds(
    stage_seconds: Sequence[float], sending: float, memory: StageMemory | None
) -> Iterator[float]:
    """Yield for each stage the seconds from one microbatch to the next if it waits for
    the microbatches that it holds: one goes to the last stage and comes back before
    another is taken."""
    if memory is None:
        return
    for stage, flying in enumerate(memory.in_flight):
        there_and_back = sum(stage_seconds[stage:]) + sending * (
            len(stage_seconds) - 1 - stage
        )
        yield there_and_back / max(flying, 1.0)


def _may_begin(places: np.ndarray, stage: int, pins: Mapping[int, int]) -> np.ndarray:
    """Return whether a stage may begin at each place."""
    if stage == 0:
        return places == 0
    first = 1 + max((i for i, at in pins.items() if at < stage), default=-1)
    last = min((i for i, at in pins.items() if at >= stage), default=places[-1])
    return (places >= first) & (places <= last)


def _candidates(crossing: Sequence[float], stages: int, every: bool) -> list[int]:
    """Return both ends, and the places between at which least is sent, or ``every``
    place."""
    inner = [i for i in range(1, len(crossing)) if math.isfinite(crossing[i])]
    order = sorted(inner, key=lambda i: crossing[i])
    most = len(order) if every else max(MOST, 2 * stages)
    if len(order) > most:
        least = [i for i in order if crossing[i] <= crossing[order[stages]]]
        if len(least) > most:
            order = [least[k * len(least) // most] for k in range(most)]
        else:
            rest = order[len(least) :]
            room = most - len(least)
            step = max(1, len(rest) // max(room, 1))
            order = least + sorted(rest)[::step][:room]
    return [0, *sorted(order), len(crossing)]


def _slowest(works: Sequence[np.ndarray]) -> float:
    """Return the least seconds that the slowest stage can take."""
    reach = works[0][0]
    for work in works[1:]:
        reach = np.maximum(reach[:, None], work).min(axis=0)
    return float(reach[-1])


def _cheapest(costs: Sequence[np.ndarray]) -> list[int]:
    """Return the places where stages begin and end that have the least sum of costs."""
    reach, came = costs[0][0], []
    for cost in costs[1:]:
        sums = reach[:, None] + cost
        came.append(sums.argmin(axis=0))
        reach = sums.min(axis=0)
    ends = [len(reach) - 1]
    for source in reversed(came):
        ends.append(int(source[ends[-1]]))
    return [0, *reversed(ends)]
