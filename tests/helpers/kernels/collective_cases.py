"""Kernels with collectives inside, on several ranks, beside what one process computes.

Ranks are forks of a process in which Triton is an interpreter; they share memory and
run the cases in three rounds. ``oracle`` computes of all ranks' inputs in float64.
Outputs and workspaces begin as NaN, ranks begin at different times. ``mode``: "sound",
"slow" (much later), "lost" (the last rank comes once and never again), "measured" (the
implementation is chosen by measuring), or what is broken on purpose as well:
"no_barrier", "one_half".
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from triton.runtime.interpreter import interpreter_builder

from fxpar.errors import FxparError
from fxpar.fusion.kernels import (
    device_functions,
    region_op,
    run_kernels,
    symmetric_memory,
    templates,
)
from fxpar.fusion.kernels.implementations import RANKS
from fxpar.fusion.kernels.region_program import CollectiveStep, RegionProgram, stages_of
from fxpar.fusion.kernels.symmetric_memory import Provider, Workspace
from tests.helpers.forked import run_forked
from tests.helpers.kernels.compare_kernels import (
    apart,
    outlined,
    traced,
    ulps,
    widened,
)
from tests.helpers.kernels.shared_memory import shared_files

c10d = torch.ops._c10d_functional
GROUP, PROGRAMS, ROUNDS = "group", 4, 3
# Seconds that a rank is late before it gives, or before it reads, by MODE.
LATE = {"sound": 0.0, "slow": 0.05, "no_barrier": 0.3, "one_half": 0.3, "lost": 0.0}
LATE["measured"] = 0.0  # the way is, at the first call
LOST = 300  # questions to a lost rank
ROWS, WIDTH, FLAT, SHARD = 12, 48, 1100, 384


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", GROUP))


def reduce_scatter(x: torch.Tensor, ranks: int) -> torch.Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", ranks, GROUP))


def all_gather(x: torch.Tensor, ranks: int) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, ranks, GROUP))


def dropout(x: Any, seed: Any, rows: int, first: int) -> Any:
    """And the mask, of which this rank has the rows from ``first`` on."""
    whole = [rows, *x.shape[1:]]
    drawn = torch.ops.fxpar.random(list(x.shape), seed, "rand", whole, [first, 0])
    return torch.where(drawn > 0.1, x / 0.9, 0.0), drawn > 0.1


def rms(x: Any, weight: Any) -> Any:
    wide = x.float()
    rate = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (wide * rate).to(x.dtype)


def adamw(p: Any, g: Any, m: Any, v: Any, rate: Any) -> Any:
    m = m.lerp(g, 0.1)
    v = (v * 0.999).addcmul(g, g, value=0.001)
    return p * 0.99 - rate * m / (v.sqrt() + 1e-8), m, v


def reduced_norm(rank: int, ranks: int) -> Callable[..., Any]:
    """CoCoNeT's epilogue, and an RMS norm."""

    def fn(x: Any, bias: Any, rest: Any, weight: Any, seed: Any) -> Any:
        kept, mask = dropout(all_reduce(x) + bias, seed, ROWS, 0)
        return rms(kept + rest, weight), kept + rest, mask

    return fn


def computed_norm(rank: int, ranks: int) -> Callable[..., Any]:
    """Computed before, kept for behind; rows, columns and the sum itself are given."""

    def fn(x: Any, bias: Any, rest: Any, weight: Any, seed: Any) -> Any:
        mine = torch.tanh(x) * weight
        y = all_reduce(mine)
        normed = F.layer_norm(y + rest, [WIDTH], weight, bias)
        return normed, y, mine * y, (y * rest).sum(0), y.amax(-1)

    return fn


def reduced_update(rank: int, ranks: int) -> Callable[..., Any]:
    """Flat, and no multiple of a block."""
    return lambda g, p, m, v, rate: adamw(p, all_reduce(g), m, v, rate)


def scattered_norm(rank: int, ranks: int) -> Callable[..., Any]:
    """Each rank has rows of the mask, which is no result."""

    def fn(x: Any, bias: Any, rest: Any, weight: Any, seed: Any) -> Any:
        y = reduce_scatter(F.silu(x), ranks)
        kept, _ = dropout(y + bias, seed, ranks * ROWS, rank * ROWS)
        return F.layer_norm(kept + rest, [WIDTH], weight, bias), (y * 2).sum(0)

    return fn


def gathered_norm(rank: int, ranks: int) -> Callable[..., Any]:
    """What is computed for the gather, the gather's result, and what follows."""

    def fn(x: Any, bias: Any, rest: Any, weight: Any, seed: Any) -> Any:
        mine = rest * 2 + bias
        whole = all_gather(mine, ranks)
        return rms(whole + x, weight), whole, mine

    return fn


def gathered(rank: int, ranks: int) -> Callable[..., Any]:
    """Flat, of an input."""
    return lambda g, p, m, v, rate: all_gather(p, ranks) * rate


def scattered_update(rank: int, ranks: int) -> Callable[..., Any]:
    """Slices of an optimizer's step between both collectives."""

    def fn(g: Any, p: Any, m: Any, v: Any, rate: Any) -> Any:
        p, m, v = adamw(p, reduce_scatter(g, ranks), m, v, rate)
        return all_gather(p, ranks), m, v

    return fn


def mixed_update(rank: int, ranks: int) -> Callable[..., Any]:
    """Parameters gathered in another dtype than gradients come in; an epilogue."""

    def fn(g: Any, p: Any, m: Any, v: Any, rate: Any) -> Any:
        p, m, v = adamw(p, reduce_scatter(g.bfloat16(), ranks).float(), m, v, rate)
        return all_gather(p, ranks) * 2 + 1, p, m, v

    return fn


Input = tuple[str, tuple[int, ...], bool]


@dataclass(frozen=True)
class Case:
    """``make(rank, ranks)``: a function of inputs: of each its name, its shape (a
    negative size times the number of ranks), and whether it is one on all ranks."""

    make: Callable[[int, int], Callable[..., Any]]
    inputs: tuple[Input, ...]
    shots: int = 1
    switch: bool = False
    dtype: torch.dtype = torch.float32

    def inputs_of(self, ranks: int, rank: int, turn: int) -> list[torch.Tensor]:
        """Of one rank in one round."""
        out = []
        for i, (name, shape, alike) in enumerate(self.inputs):
            seed = 1000 * turn + 10 * i + (0 if alike else 1 + rank)
            draw = torch.Generator().manual_seed(seed)
            size = [-n * ranks if n < 0 else n for n in shape]
            if name == "seed":
                out.append(torch.tensor(seed - (1 << 40)))
                continue
            x = torch.randn(size, generator=draw)
            positive = name in ("v", "rate")
            out.append((x.abs() + 0.1 if positive else x).to(self.dtype))
        return out


def rows(parts: bool) -> tuple[Input, ...]:
    """Inputs of rows; whether x is of all ranks' and the rest of this rank's."""
    return (
        ("x", (-ROWS if parts else ROWS, WIDTH), False),
        ("bias", (WIDTH,), True),
        ("rest", (ROWS, WIDTH), not parts),
        ("weight", (WIDTH,), True),
        ("seed", (), True),
    )


def flat(count: int, parts: bool) -> tuple[Input, ...]:
    """Inputs of an optimizer; whether gradients are of all ranks' parts."""
    gradients: Input = ("g", (-count if parts else count,), False)
    rest = [(name, (count,), not parts) for name in ("p", "m", "v")]
    return (gradients, *rest, ("rate", (), True))


BF16 = torch.bfloat16
_FLAT, _PARTS = flat(FLAT, False), flat(SHARD, True)
CASES: dict[str, Case] = {
    "reduced_norm": Case(reduced_norm, rows(False)),
    "reduced_norm 2": Case(reduced_norm, rows(False), 2),
    "reduced_norm bf16": Case(reduced_norm, rows(False), dtype=BF16),
    "reduced_norm 2 bf16": Case(reduced_norm, rows(False), 2, dtype=BF16),
    "computed_norm": Case(computed_norm, rows(False)),
    "computed_norm 2": Case(computed_norm, rows(False), 2),
    "reduced_update": Case(reduced_update, _FLAT),
    "reduced_update 2": Case(reduced_update, _FLAT, 2),
    "reduced_norm in the switch": Case(reduced_norm, rows(False), 2, True),
    "computed_norm in the switch": Case(computed_norm, rows(False), 2, True),
    "reduced_update in the switch": Case(reduced_update, _FLAT, 2, True),
    "reduced_norm in the switch bf16": Case(reduced_norm, rows(False), 2, True, BF16),
    "scattered_norm": Case(scattered_norm, rows(True)),
    "scattered_norm bf16": Case(scattered_norm, rows(True), dtype=BF16),
    "gathered_norm": Case(gathered_norm, rows(True)),
    "gathered_norm bf16": Case(gathered_norm, rows(True), dtype=BF16),
    "gathered": Case(gathered, _PARTS),
    "scattered_update": Case(scattered_update, _PARTS),
    "mixed_update": Case(mixed_update, _PARTS),
}


@dataclass(frozen=True)
class Job:
    """``order``: which inputs a program takes; ``numbers``: of each rank."""

    case: Case
    program: RegionProgram
    order: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...]


def job(case: Case, ranks: int) -> Job:
    """A case as a program, which is one on all ranks."""
    found = []
    for rank in range(ranks):
        given = case.inputs_of(ranks, rank, 0)
        found.append(outlined(traced(case.make(rank, ranks), given)))
    programs = {outline.program for outline, _ in found}
    assert len(programs) == 1, "ranks have different programs"
    program = dataclasses.replace(programs.pop(), ranks=ranks)
    numbers = tuple(outline.numbers for outline, _ in found)
    return Job(case, program, tuple(found[0][1]), numbers)


# What one process makes of all ranks' inputs.


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To bf16, in float32."""
    return x.bfloat16().float()


def moved(move: CollectiveStep, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A collective's results on all ranks."""
    if move.kind == "all_gather_into_tensor":
        return [torch.cat(list(given))] * len(given)
    total = functools.reduce(torch.add, given)
    if move.kind == "all_reduce":
        return [total] * len(given)
    return list(total.chunk(len(given)))


def oracle(found: Job, turn: int) -> list[list[torch.Tensor]]:
    """Results of all ranks, in float64; of bf16 in float32, rounded where a collective
    carries it."""
    case, program, ranks = found.case, found.program, found.program.ranks
    wide, dtype = "float64", torch.float64
    if case.dtype is BF16:
        wide, dtype = "float32", torch.float32
    steps = stages_of(widened(program, wide))
    values: list[dict[str, torch.Tensor]] = []
    for rank in range(ranks):
        all_given = case.inputs_of(ranks, rank, turn)
        given = [all_given[i] for i in found.order]
        given = [x.to(dtype) if x.is_floating_point() else x for x in given]
        names = [t.name for t in program.inputs]
        values.append(dict(zip(names, given, strict=True)))
    for step in steps:
        if isinstance(step, CollectiveStep):
            narrow = program.values[step.operand].dtype == "bfloat16"
            sent = [v[step.operand] for v in values]
            sent = [rounded(x).to(dtype) for x in sent] if narrow else sent
            got = moved(step, sent)
            # Two shots round sums, as a gather does what it is given.
            got = [rounded(x) for x in got] if narrow and case.shots == 2 else got
            for rank, x in enumerate(got):
                values[rank][step.result] = x
            continue
        for rank, v in enumerate(values):
            part = step
            args = [v[t.name] for t in part.inputs]
            made = run_kernels.interpret(part, args, found.numbers[rank])
            v |= dict(zip((t.name for t in part.outputs), made, strict=True))
    return [[v[t.name] for t in program.outputs] for v in values]


# One rank.


def kernels(
    found: Job, given: Sequence[torch.Tensor], rank: int, rung: str = ""
) -> list[torch.Tensor]:
    """The program's results by its kernel."""
    program, numbers = found.program, found.numbers[rank]
    if found.case.shots == 1 and program.ranks in RANKS:
        made = region_op.fused(program, given, numbers, GROUP, rung=rung)
        assert made is not None, "no kernel was made"
        return made
    how = {"shots": found.case.shots, "switch": found.case.switch}
    template = templates.template_of(program, **how, programs=PROGRAMS)
    provider = region_op.provider_of(GROUP, torch.device("cpu"))
    values = dict(zip((t.name for t in program.inputs), given, strict=True))
    made = region_op.launched(template, values, numbers, provider)
    return [made[t.name] for t in program.outputs]


def break_it(mode: str, rank: int, provider: Provider) -> None:
    """Poison workspaces, and let ranks be late: before they give, and, the last one,
    before it reads. Then break what MODE says."""
    take, wait = provider.workspace, device_functions.barrier
    late = LATE[mode]

    def poisoned_space(nbytes: int) -> Workspace:
        space = take(nbytes)
        if mode == "one_half":
            space = provider._halves[0]
        space.own.fill_(255)
        if mode == "no_barrier":
            provider.barrier()
        time.sleep(late if rank == 0 else 0.0)
        return space

    def slow_barrier(*args: Any) -> Any:
        left = args[-1] if mode == "no_barrier" else wait(*args)
        last = interpreter_builder.grid_idx[0] == interpreter_builder.grid_dim[0] - 1
        if last and rank == provider.ranks - 1:
            time.sleep(late)
        return left

    swap = interpreter_builder.create_atomic_cas
    pause = 0.01 if mode == "slow" and rank == provider.ranks - 1 else 1e-4

    def patient_swap(*args: Any) -> Any:
        time.sleep(pause)  # who waits leaves the processor to the others
        return swap(*args)

    interpreter_builder.create_atomic_cas = patient_swap
    provider.workspace = poisoned_space  # type: ignore[method-assign]
    device_functions.barrier = slow_barrier


@dataclass(frozen=True)
class RankRun:
    """What one rank has at the end."""

    results: dict[tuple[str, int], list[torch.Tensor]]  # by case and round
    signals: int  # that are not lowered
    ways: list[tuple[str, str]]  # the implementation of each program, if measured
    raised: list[str]  # by calls for which the last rank does not come


def run_cases(
    jobs: dict[str, Job], ranks: int, mode: str = "sound", seconds: int = 300
) -> list[RankRun]:
    """Run all cases in rounds, each rank in a fork."""
    return run_forked(_run_rank, ranks, jobs, mode, seconds=seconds)


def _run_rank(
    folder: Path, rank: int, ranks: int, jobs: dict[str, Job], mode: str
) -> RankRun:
    store = torch.distributed.FileStore(str(folder / "store"), ranks)
    symmetric_memory._LEAST = 1 << 10  # so that it has to grow
    provider = shared_files(store, rank, ranks, name=GROUP, programs=PROGRAMS)
    region_op.provider_of = lambda *_: provider  # there is no such group
    break_it(mode, rank, provider)
    rung = mode if mode == "measured" else ""
    results = {}
    raised: list[str] = []
    for turn in range(1 if mode == "lost" else ROUNDS):
        for name, found in jobs.items():
            given = found.case.inputs_of(ranks, rank, turn)
            made = kernels(found, [given[i] for i in found.order], rank, rung)
            results[name, turn] = made
    if mode == "lost":
        raised = lost(next(iter(jobs.values())), rank, provider)
    ways: dict[str, str] = {}
    if rung:
        ways = {p.title: str(way) for (p, _), way in region_op._WAYS[provider].items()}
    provider.barrier()
    assert provider._memory is not None
    pads = 4 * (symmetric_memory.HEAD + ranks * PROGRAMS)
    signals = int(provider._memory.own[:pads].count_nonzero())
    return RankRun(results, signals, sorted(ways.items()), raised)


def lost(found: Job, rank: int, provider: Provider) -> list[str]:
    """What is raised by two calls for which the last rank does not come."""
    provider.barrier()
    device_functions.SPINS = tl.constexpr(LOST)
    out = []
    for turn in (1, 2):
        if rank < provider.ranks - 1:
            given = found.case.inputs_of(provider.ranks, rank, turn)
            try:
                kernels(found, [given[i] for i in found.order], rank)
            except FxparError as error:
                out.append(str(error))
    return out


@dataclass(frozen=True)
class CaseComparison:
    """A case on all ranks and in all rounds beside the oracle."""

    error: float  # the largest, as ``compare_kernels.apart``
    ulps: float
    alike: int  # results that are one on all ranks
    same: bool  # whether these are so to the bit


def compared(jobs: dict[str, Job], runs: list[RankRun]) -> dict[str, CaseComparison]:
    """How far results are apart from the oracle's."""
    out = {}
    for name, found in jobs.items():
        errors, places, alike, same = [], [], 0, True
        for turn in range(ROUNDS):
            made, want = [run.results[name, turn] for run in runs], oracle(found, turn)
            for mine, his in zip(made, want, strict=True):
                errors += map(apart, mine, his)
                places += map(ulps, mine, his)
            for i in range(len(want[0])):
                if all(torch.equal(x[i], want[0][i]) for x in want):
                    alike += 1
                    same &= all(torch.equal(x[i], made[0][i]) for x in made)
        out[name] = CaseComparison(max(errors), max(places), alike, same)
    return out
