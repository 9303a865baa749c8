"""Where a chain of ops is cut into stages: dynamic programming on seconds. No graphs.

A pipeline of ``m`` microbatches takes the sum of its stages' seconds and ``m - 1``
times the slowest (Alpa, arXiv 2201.12023, equation 2); what is sent runs beside, and is
what is slowest where it takes longer. The slowest stage is made as fast as can be
first; then, for some slower ones, the cuts across which least is sent are tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

# So many places of a chain may be cut at.
MOST = 192
# How much slower than need be the slowest stage may be, to cross where less is sent.
_SLACK = (1.0, 1.02, 1.05, 1.1, 1.25, 1.5)


def cut_chain(
    seconds: Sequence[float],
    crossing: Sequence[float],
    stages: int,
    microbatches: int,
    pins: Mapping[int, int] | None = None,
) -> tuple[int, ...]:
    """Where each stage but the first begins: ``stages - 1`` growing positions; none,
    if there is no way to cut.

    ``seconds``: of each op, of one microbatch; ``crossing``: that sending takes if a
    stage begins at an op, infinite where none may. At ``stages - 1`` one may. ``pins``:
    op -> the stage that it is of.
    """
    assert 1 <= stages <= len(seconds), "a stage has an op"
    places = np.array(_candidates(crossing, stages, bool(pins)))
    shut = [_shut(places, stage, pins or {}) for stage in range(1, stages)]
    before = np.concatenate(([0.0], np.cumsum(seconds)))
    sent = np.array([0.0, *(crossing[p] for p in places[1:-1].tolist()), 0.0])
    # Of a stage from place i to place j.
    work = before[places][None, :] - before[places][:, None]
    work[np.tril_indices(len(places))] = np.inf
    least = _slowest(work, shut)
    if not math.isfinite(least):
        return ()
    best, chosen = np.inf, list[int]()
    for slack in _SLACK:
        fit = work <= least * slack * (1 + 1e-9)
        ends = _cheapest(np.where(fit, sent[None, :], np.inf), shut)
        slowest = max(work[i, j] for i, j in itertools.pairwise(ends))
        crossed = [sent[i] for i in ends]
        total = sum(crossed) + (microbatches - 1) * max(slowest, *crossed) + slowest
        if total < best:
            best, chosen = total, ends
    return tuple(int(places[i]) for i in chosen[1:-1])


def _shut(places: np.ndarray, stage: int, pins: Mapping[int, int]) -> np.ndarray:
    """What it takes more to let a stage begin at each place: nothing, or for ever."""
    first = 1 + max((i for i, at in pins.items() if at < stage), default=-1)
    last = min((i for i, at in pins.items() if at >= stage), default=places[-1])
    return np.where((places >= first) & (places <= last), 0.0, np.inf)


def _candidates(crossing: Sequence[float], stages: int, every: bool) -> list[int]:
    """Both ends, and the places between where least is sent, or ``every`` one."""
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


def _slowest(work: np.ndarray, shut: Sequence[np.ndarray]) -> float:
    """The least that the slowest stage can take."""
    reach = work[0]
    for closed in shut:
        reach = np.maximum((reach + closed)[:, None], work).min(axis=0)
    return float(reach[-1])


def _cheapest(costs: np.ndarray, shut: Sequence[np.ndarray]) -> list[int]:
    """Places where stages begin and end, the sum of whose costs is least."""
    reach, came = costs[0], []
    for closed in shut:
        sums = (reach + closed)[:, None] + costs
        came.append(sums.argmin(axis=0))
        reach = sums.min(axis=0)
    ends = [len(reach) - 1]
    for source in reversed(came):
        ends.append(int(source[ends[-1]]))
    return [0, *reversed(ends)]
