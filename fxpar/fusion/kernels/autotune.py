"""Measures the fastest way to run a region, on all ranks together.

In: a program, the ways to run it, in the order of preference of the table, and a
function that runs one. Out: one of them, the same on every rank. A kernel that waits
for other ranks must never be timed by a tuner of each rank's own: two that try
different configurations wait for each other for ever. Here all ranks run the same way
at the same time, a way takes as long as its slowest rank, and all compute from the same
figures. A way that fails on one rank is left out on all.

Results are kept in files next to Inductor's caches, by all they depend on: the program
(its shapes and dtypes with it), the ranks, the device, how ranks are connected, and the
versions of torch and Triton. The first rank's file counts, so that ranks with other
files, or none, follow it. Without a GPU nothing is measured: the first way is the
table's (``implementations``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fxpar import _torch, cache_files
from fxpar.fusion.kernels.implementations import GroupFacts, choose, rungs_of
from fxpar.fusion.kernels.region_program import RegionProgram
from fxpar.fusion.kernels.symmetric_memory import Meeting, Unshared

# Launches timed together, so that the clock's own time does not count; timed
# repetitions; repetitions before them that are not counted.
LAUNCHES, ROUNDS, WARMUP = 20, 5, 3

# The table's way is kept unless another is faster by this share.
LEAST = 0.03


@dataclass(frozen=True)
class TunedWay:
    """Is a measured way to run a region: the rung, and the size of its kernel."""

    rung: str  # name of the rung of the ladder
    programs: int  # the largest grid
    warps: int = 0  # warps of a program, 0 for as many as the kernel asks for


# Runs a way once, each time it is called.
Run = Callable[[], Any]
# Returns the seconds that a run takes on this rank.
Clock = Callable[[Run], float]


def ways_of(
    program: RegionProgram, facts: GroupFacts, programs: int
) -> tuple[TunedWay, ...]:
    """Return the ways to try, the table's choice first: each rung that the program can
    have, with all programs that run at a time, with half as many, and with 16 warps."""
    first = choose(program, facts).name
    names = dict.fromkeys([first, *rungs_of(program, facts)])
    ways: dict[TunedWay, None] = {}
    for name in names:
        if name == "nccl":
            ways[TunedWay(name, programs)] = None
            continue
        for grid, warps in ((programs, 0), (max(1, programs // 2), 0), (programs, 16)):
            ways[TunedWay(name, grid, warps)] = None
    return tuple(ways)


def fastest(
    ways: Sequence[TunedWay],
    prepare: Callable[[TunedWay], Run],
    meeting: Meeting,
    clock: Clock,
) -> tuple[TunedWay, dict[str, float]]:
    """Return the way whose slowest rank is the fastest, and the seconds of each that
    all ranks could run. ``prepare``: compiles one. Raises Unshared on all ranks if
    there is none."""
    seconds: dict[int, float] = {}
    for i, way in enumerate(ways):
        try:
            run = meeting.agreed(partial(_with_runtime_errors, prepare, way))
            mine = meeting.agreed(partial(_with_runtime_errors, clock, run))
        except Unshared:
            continue
        seconds[i] = max(map(float, meeting.words_of_all(repr(mine))))
    if not seconds:
        raise Unshared("no way to run it could be measured on all ranks")
    best, table = min(seconds, key=seconds.__getitem__), min(seconds)
    if seconds[best] > (1 - LEAST) * seconds[table]:
        best = table
    return ways[best], {str(ways[i]): each for i, each in seconds.items()}


def _with_runtime_errors(fn: Callable[[Any], Any], x: Any) -> Any:
    """Return ``fn(x)``; raise any error as a RuntimeError, which is reported to the
    others."""
    try:
        return fn(x)
    except Exception as error:
        raise RuntimeError(str(error)) from error


def tuned(
    program: RegionProgram,
    ways: Sequence[TunedWay],
    prepare: Callable[[TunedWay], Run],
    meeting: Meeting,
    *,
    where: Mapping[str, Any],
    clock: Clock,
) -> TunedWay:
    """Return the result of ``fastest``, kept: found once for a program and ``where``
    (the device, links).

    Raises Unshared on all ranks.
    """
    path = _path(program, meeting.ranks, where)
    recorded = _read(meeting.words_of_all(_text_of(path))[0])
    if recorded is not None and recorded in ways:
        return recorded
    way, seconds = fastest(ways, prepare, meeting, clock)
    if meeting.rank == 0:
        text = json.dumps({"way": asdict(way), "seconds": seconds}, indent=1)
        with contextlib.suppress(OSError):
            cache_files.write_file(path, text)
    return way


def _path(program: RegionProgram, ranks: int, where: Mapping[str, Any]) -> Path:
    facts = [program.hash, ranks, sorted(where.items()), *_torch.version.versions()]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache_files.folder() / "tuned" / f"{digest}.json"


def _text_of(path: Path) -> str:
    """Return a file's text, "" if there is none."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _read(text: str) -> TunedWay | None:
    try:
        return TunedWay(**json.loads(text)["way"])
    except Exception:  # damaged bytes may lead to any
        return None


def by_clock(run: Run) -> float:
    """Return the seconds of a run that the host waits for, as on CPU; the median of
    some."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def by_events(run: Run) -> float:
    """Return the seconds of a launch on the current stream of a GPU, the median of
    some."""
    for _ in range(WARMUP):
        run()
    seconds = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(LAUNCHES):
            run()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / LAUNCHES)
    return statistics.median(seconds)
