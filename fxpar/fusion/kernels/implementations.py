"""Chooses how a program's collectives run: in its kernel or between kernels.

In: the program, and facts of its group that are equal on all ranks. Out: a ``Rung``,
with the reason why it is not a better one. Limits of sizes are a table. Never asks a
device or a clock, so that all ranks decide the same.

Figures are of 8 H100 with NVLink, reported by others: one shot beats two shot up to
about 130 KB and NCCL up to about 400 KB (kraken, pull request 6); NCCL's own symmetric
kernels gain 1.7 times at 2 MiB and 1.1 at 32 MiB (Megatron, pull request 5596). None
was measured with these kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxpar.fusion.kernels.region_program import RegionProgram, dtype_of
from fxpar.fusion.kernels.split_at_collectives import CollectiveStep, stages_of

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


def choose(program: RegionProgram, facts: GroupFacts) -> Rung:
    """Return the rung of a program with collectives."""
    if not facts.kernels:
        return Rung("interpret", "no generated kernel runs on this device")
    if not facts.shared:
        return Rung("nccl", "kernels do not reach other ranks' memory")
    if facts.ranks not in RANKS or facts.ranks != program.ranks:
        return Rung("nccl", f"there are no templates for {facts.ranks} ranks")
    moves = [step for step in stages_of(program) if isinstance(step, CollectiveStep)]
    for move in moves:
        why = _why_not(program, move, facts)
        if why:
            return Rung("nccl", why)
    if [move.kind for move in moves] != ["all_reduce"]:
        return Rung("one_shot", "each rank reads the part it needs once")
    return _shots(nbytes_of(program, moves[0]), facts)


def nbytes_of(program: RegionProgram, move: CollectiveStep) -> int:
    """Return the bytes of the whole value of a collective."""
    values = program.values[move.operand], program.values[move.result]
    return max(v.count * dtype_of(v.dtype).itemsize for v in values)


def rungs_of(program: RegionProgram, facts: GroupFacts) -> tuple[str, ...]:
    """Return all rungs that a program can have at any size: those that a tuner may
    try."""
    if not facts.kernels:
        return ("interpret",)
    moves = [step for step in stages_of(program) if isinstance(step, CollectiveStep)]
    has_template = (
        facts.shared and facts.ranks in RANKS and facts.ranks == program.ranks
    )
    if not has_template or any(_why_never(program, move) for move in moves):
        return ("nccl",)
    if [move.kind for move in moves] != ["all_reduce"] or facts.ranks <= 2:
        return ("one_shot", "nccl")
    switch = ("multimem",) if facts.multicast else ()
    return ("one_shot", "two_shot", *switch, "nccl")


def _why_not(program: RegionProgram, move: CollectiveStep, facts: GroupFacts) -> str:
    """Return why a collective does not run in a kernel; "" if it does."""
    why = _why_never(program, move)
    if why:
        return why
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
    part = min(value.count, result.count) * dtype_of(value.dtype).itemsize
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
