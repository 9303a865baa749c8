"""Chooses how a program's collectives run, in or between its kernels: by a table, or by
measurement on all ranks together.

By the table. In: the program, and facts of its group that are equal on all ranks. Out:
a ``Rung``, with the reason why it is not a better one. Limits of sizes are a table.
Never asks a device or a clock, so that all ranks decide the same. Figures are of 8 H100
with NVLink, reported by others: one shot beats two shot up to about 130 KB and NCCL up
to about 400 KB (kraken, pull request 6); NCCL's own symmetric kernels gain 1.7 times at
2 MiB and 1.1 at 32 MiB (Megatron, pull request 5596). None was measured with these
kernels.

By measurement. In: a program, the ways to run it, in the order of preference of the
table, and a function that runs one. Out: one of them, the same on every rank. A kernel
that waits for other ranks must never be timed by a tuner of each rank's own: two that
try different configurations wait for each other for ever. Here all ranks run the same
way at the same time, a way takes as long as its slowest rank, and all compute from the
same figures. A way that fails on one rank is left out on all. Results are kept in files
next to Inductor's caches, by all they depend on: the program (its shapes and dtypes
with it), the ranks, the device, how ranks are connected, and the versions of torch and
Triton. The first rank's file counts, so that ranks with other files, or none, follow
it.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from fxpar import _torch, cache_files
from fxpar.fusion.kernels.region_program import (
    CollectiveStep,
    RegionProgram,
    stages_of,
)
from fxpar.fusion.kernels.symmetric_memory import Meeting, Unshared
from fxpar.units import digest

DTYPES = ("float32", "bfloat16")
RANKS = (1, 2, 4, 8)
ALIGNED = 16  # bytes that a thread reads at a time

# A barrier's round trips one after the other, to the others' signals and to the own,
# for any number of ranks; and seconds of one, half of those that make one shot and two
# shot of 8 ranks equal at 130 KB, where a barrier took as many.
TRIPS, TRIP = 2, 0.85e-6
BARRIER = TRIPS * TRIP
# Bytes of an all-reduce's operand, or of all ranks' parts together, up to which a
# kernel that waits inside is taken; beyond, NCCL's protocols fill the link. A quarter
# of what the figures above allow, until these kernels are measured.
MOST = {
    "all_reduce": 2 << 20,
    "reduce_scatter_tensor": 4 << 20,
    "all_gather_into_tensor": 4 << 20,
}
# The same where a switch sums: 1.6 times NCCL's speed at 8 MiB, 1.2 at 32 MiB (vLLM,
# pull request 42324).
IN_SWITCH = 8 << 20
# An all-reduce in one shot reads ranks - 1 times its bytes: no gain over NCCL beyond.
ONE_SHOT = 400 << 10


@dataclass(frozen=True)
class GroupFacts:
    """Holds the facts of a group of ranks on which the choice of a rung depends."""

    ranks: int  # ranks of the group
    kernels: bool  # whether generated kernels run
    shared: bool  # whether they reach other ranks' memory
    bandwidth: float = 4e11  # the link's, in bytes/s one way
    multicast: bool = False  # whether a switch sums through an address of it


# Rungs that a template runs: the shots of an all-reduce, and whether a switch sums.
FUSED = {"multimem": (2, True), "two_shot": (2, False), "one_shot": (1, False)}


@dataclass(frozen=True)
class Rung:
    """Is one rung of the ladder of implementations that a region can run on."""

    name: str  # of ``FUSED`` (in the kernel), "nccl" (between kernels) or "interpret"
    why: str

    @property
    def is_fused(self) -> bool:
        """Return whether a template runs it."""
        return self.name in FUSED


def choose(
    program: RegionProgram, facts: GroupFacts, *, any_size: bool = False
) -> Rung:
    """Return the rung of a program with collectives. ``any_size``: as if none were too
    large for a kernel."""
    if not facts.kernels:
        return Rung("interpret", "no generated kernel runs on this device")
    if not facts.shared:
        return Rung("nccl", "kernels do not reach other ranks' memory")
    if facts.ranks not in RANKS or facts.ranks != program.ranks:
        return Rung("nccl", f"there are no templates for {facts.ranks} ranks")
    moves = _moves(program)
    for move in moves:
        why = _why_never(program, move)
        if not why and not any_size:
            why = _why_too_large(program, move, facts)
        if why:
            return Rung("nccl", why)
    if [move.kind for move in moves] != ["all_reduce"]:
        return Rung("one_shot", "each rank reads the part it needs once")
    return _shots(nbytes_of(program, moves[0]), facts)


def _moves(program: RegionProgram) -> list[CollectiveStep]:
    return [step for step in stages_of(program) if isinstance(step, CollectiveStep)]


def nbytes_of(program: RegionProgram, move: CollectiveStep) -> int:
    """Return the bytes of the whole value of a collective."""
    return max(program.values[name].nbytes for name in (move.operand, move.result))


def rungs_of(program: RegionProgram, facts: GroupFacts) -> tuple[str, ...]:
    """Return all rungs that a program can have at any size: those that a tuner may
    try."""
    rung = choose(program, facts, any_size=True)
    if not rung.is_fused:
        return (rung.name,)
    kinds = [move.kind for move in _moves(program)]
    if kinds != ["all_reduce"] or facts.ranks <= 2:
        return ("one_shot", "nccl")
    switch = ("multimem",) if facts.multicast else ()
    return ("one_shot", "two_shot", *switch, "nccl")


def _why_too_large(
    program: RegionProgram, move: CollectiveStep, facts: GroupFacts
) -> str:
    """Return why a collective is too large for a kernel; "" if it is not."""
    nbytes, most = nbytes_of(program, move), MOST[move.kind]
    if move.kind == "all_reduce" and facts.multicast and facts.ranks > 2:
        most = IN_SWITCH
    if nbytes > most:
        return f"{move.operand} has {nbytes} bytes, more than NCCL is slower for"
    return ""


def _why_never(program: RegionProgram, move: CollectiveStep) -> str:
    """Return why a collective can run in a kernel at no size; "" if it can at some."""
    value, result = program.values[move.operand], program.values[move.result]
    if value.dtype not in DTYPES:
        return f"{move.operand} is of {value.dtype}, not of {' or '.join(DTYPES)}"
    op = move.line.args[1]
    if "gather" not in move.kind and op != "sum":
        return f"{move.operand} is reduced by {op}, not by sum"
    part = min(value.nbytes, result.nbytes)
    if part % ALIGNED:
        return f"parts of {part} bytes are no multiple of {ALIGNED}"
    return ""


def _shots(nbytes: int, facts: GroupFacts) -> Rung:
    """Return the rung of an all-reduce: reading everything costs (ranks - 1) S / B, two
    shots 2 (ranks - 1) / ranks S / B and one more barrier."""
    if facts.ranks <= 2:
        return Rung("one_shot", "two shots carry no less between two ranks")
    most = min(ONE_SHOT, _equal(facts.ranks, facts.bandwidth))
    if nbytes <= most:
        return Rung(
            "one_shot",
            f"{nbytes} bytes, up to {most} another barrier costs more than it saves",
        )
    why = f"{nbytes} bytes, from {most} on one shot reads too much"
    if facts.multicast:
        return Rung("multimem", f"{why}, and the switch sums up")
    return Rung("two_shot", why)


def _equal(ranks: int, bandwidth: float) -> int:
    """Return the bytes at which one shot and two shot take equally long."""
    return math.floor(BARRIER * bandwidth / ((ranks - 1) * (1 - 2 / ranks)))


# Launches timed together, so that the clock's own time does not count; timed
# repetitions; repetitions before them that are not counted.
LAUNCHES, ROUNDS, WARMUP = 20, 5, 3

FORMAT = "fxpar tuned 1"  # of files of results

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
            run = meeting.agreed(partial(prepare, way), Exception)
            mine = meeting.agreed(partial(clock, run), Exception)
        except Unshared:
            continue
        seconds[i] = max(map(float, meeting.words_of_all(repr(mine))))
    if not seconds:
        raise Unshared("no way to run it could be measured on all ranks")
    best, table = min(seconds, key=seconds.__getitem__), min(seconds)
    if seconds[best] > (1 - LEAST) * seconds[table]:
        best = table
    return ways[best], {str(ways[i]): each for i, each in seconds.items()}


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
    facts = [program.hash, meeting.ranks, sorted(where.items())]
    key = json.dumps([*facts, *_torch.version.versions()])
    record = cache_files.folder() / "tuned" / f"{digest(key)}.json", FORMAT, key
    own = cache_files.read_record(*record, lambda x: asdict(TunedWay(**x["way"])))
    recorded = json.loads(meeting.words_of_all(json.dumps(own))[0])
    if recorded and TunedWay(**recorded) in ways:
        return TunedWay(**recorded)
    way, seconds = fastest(ways, prepare, meeting, clock)
    if meeting.rank == 0:
        cache_files.write_record(*record, {"way": asdict(way), "seconds": seconds})
    return way


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
