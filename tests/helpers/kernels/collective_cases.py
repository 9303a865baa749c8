"""Kernels with collectives inside, on several processes, beside an oracle.

A script, since Triton is either interpreter or compiler in one process:
``python -m tests.helpers.kernels.collective_cases OUT MODE:RANKS[:CASE,CASE...]...``
starts so many processes that share memory, lets them run the cases in three rounds, and
writes to OUT as JSON how far results are apart from those that one process computes of
all ranks' inputs in float64. Outputs and workspaces begin as NaN, ranks begin at
different times. MODE: "sound", "slow" (much later), "lost" (the last rank comes once
and never again), or what is broken on purpose as well: "no_barrier", "one_half".
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from tests.helpers.kernels.interpreted import (
    apart,
    outlined,
    poisoned,
    round_as_devices,
    traced,
    ulps,
    widened,
)
from triton.runtime.interpreter import interpreter_builder

from fxpar.errors import FxparError
from fxpar.fusion.kernels import (
    device_functions,
    interpret,
    run_fused,
    run_kernels,
    symmetric_memory,
    templates,
)
from fxpar.fusion.kernels.implementations import RANKS
from fxpar.fusion.kernels.region_program import Program
from fxpar.fusion.kernels.split_at_collectives import Move, stages_of
from fxpar.fusion.kernels.symmetric_memory import Provider, Workspace, shared_files

c10d = torch.ops._c10d_functional
GROUP, PROGRAMS, ROUNDS = "group", 4, 3
SECONDS = 300  # of a process
RUNG = ""  # the ladder's
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
    """Each rank has rows of the mask."""

    def fn(x: Any, bias: Any, rest: Any, weight: Any, seed: Any) -> Any:
        y = reduce_scatter(F.silu(x), ranks)
        kept, mask = dropout(y + bias, seed, ranks * ROWS, rank * ROWS)
        return F.layer_norm(kept + rest, [WIDTH], weight, bias), mask, (y * 2).sum(0)

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


def inputs_of(case: Case, ranks: int, rank: int, turn: int) -> list[torch.Tensor]:
    """Of one rank in one round."""
    out = []
    for i, (name, shape, alike) in enumerate(case.inputs):
        seed = 1000 * turn + 10 * i + (0 if alike else 1 + rank)
        draw = torch.Generator().manual_seed(seed)
        size = [-n * ranks if n < 0 else n for n in shape]
        if name == "seed":
            out.append(torch.tensor(seed - (1 << 40)))
            continue
        x = torch.randn(size, generator=draw)
        positive = name in ("v", "rate")
        out.append((x.abs() + 0.1 if positive else x).to(case.dtype))
    return out


@dataclass(frozen=True)
class Job:
    """``order``: which inputs a program takes; ``numbers``: of each rank."""

    case: Case
    program: Program
    order: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...]


def job(case: Case, ranks: int) -> Job:
    """A case as a program, which is one on all ranks."""
    found = []
    for rank in range(ranks):
        given = inputs_of(case, ranks, rank, 0)
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


def moved(move: Move, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
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
        all_given = inputs_of(case, ranks, rank, turn)
        given = [all_given[i] for i in found.order]
        given = [x.to(dtype) if x.is_floating_point() else x for x in given]
        names = [t.name for t in program.inputs]
        values.append(dict(zip(names, given, strict=True)))
    for step in steps:
        if isinstance(step, Move):
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
            part = step.program
            args = [v[t.name] for t in part.inputs]
            made = interpret.run(part, args, found.numbers[rank])
            v |= dict(zip((t.name for t in part.outputs), made, strict=True))
    return [[v[t.name] for t in program.outputs] for v in values]


# One rank.


def kernels(found: Job, given: Sequence[torch.Tensor], rank: int) -> Any:
    """The program's results by its kernel."""
    program, numbers = found.program, found.numbers[rank]
    if found.case.shots == 1 and program.ranks in RANKS:
        made = run_fused.fused(program, given, numbers, GROUP, rung=RUNG)
        assert made is not None, "no kernel was made"
        return made
    how = {"shots": found.case.shots, "switch": found.case.switch}
    template = templates.template_of(program, **how, programs=PROGRAMS)
    provider = run_fused.provider_of(GROUP, torch.device("cpu"))
    values = dict(zip((t.name for t in program.inputs), given, strict=True))
    made = run_fused.launched(template, values, numbers, provider)
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


def run_rank(jobs: dict[str, Job], rank: int, ranks: int, mode: str, path: str) -> None:
    """All cases, in rounds."""
    store = torch.distributed.FileStore(f"{path}.store", ranks)
    symmetric_memory._LEAST = 1 << 10  # so that it has to grow
    provider = shared_files(store, rank, ranks, name=GROUP, programs=PROGRAMS)
    run_fused.install(GROUP, "cpu", provider)
    break_it(mode, rank, provider)
    global RUNG
    RUNG = mode if mode == "measured" else ""
    out: dict[str, Any] = {}
    for turn in range(ROUNDS):
        for name, found in jobs.items():
            given = inputs_of(found.case, ranks, rank, turn)
            made = kernels(found, [given[i] for i in found.order], rank)
            out[f"{name}:{turn}"] = made
        if mode == "lost":
            out["raised"] = lost(next(iter(jobs.values())), rank, provider)
            break
    if RUNG:
        ways = {p.title: str(way) for p, way in run_fused._WAYS[provider].items()}
        out["ways"] = sorted(ways.items())
    provider.barrier()
    assert provider._memory is not None
    pads = 4 * (symmetric_memory.HEAD + ranks * PROGRAMS)
    out["signals"] = int(provider._memory.own[:pads].count_nonzero())
    torch.save(out, f"{path}.{rank}")


def lost(found: Job, rank: int, provider: Provider) -> list[str]:
    """What is raised by two calls for which the last rank does not come."""
    provider.barrier()
    device_functions.SPINS = tl.constexpr(LOST)
    out = []
    for turn in (1, 2):
        if rank < provider.ranks - 1:
            given = inputs_of(found.case, provider.ranks, rank, turn)
            try:
                kernels(found, [given[i] for i in found.order], rank)
            except FxparError as error:
                out.append(str(error))
    return out


def start(jobs: dict[str, Job], ranks: int, mode: str, path: str) -> None:
    """Processes that have imported all there is; none outlives its seconds."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            signal.alarm(SECONDS)
            run_rank(jobs, rank, ranks, mode, path)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    ended = [os.waitpid(child, 0)[1] for child in children]
    assert not any(ended), f"ranks ended with {ended}"


def compared(jobs: dict[str, Job], ranks: int, path: str) -> dict[str, Any]:
    """How far results are apart, at most over rounds and ranks; and whether those that
    are one on all ranks are so to the bit."""
    got = [torch.load(f"{path}.{rank}") for rank in range(ranks)]
    out: dict[str, Any] = {"signals": [x["signals"] for x in got]}
    ways = [x["ways"] for x in got if "ways" in x]
    assert all(found and found == ways[0] for found in ways), ways
    for name, found in jobs.items():
        errors, places, one, same = [], [], 0, True
        for turn in range(ROUNDS):
            made, want = [x[f"{name}:{turn}"] for x in got], oracle(found, turn)
            for mine, his in zip(made, want, strict=True):
                errors += map(apart, mine, his)
                places += map(ulps, mine, his)
            for i in range(len(want[0])):
                if all(torch.equal(x[i], want[0][i]) for x in want):
                    one += 1
                    same &= all(torch.equal(x[i], made[0][i]) for x in made)
        out[name] = {"error": max(errors), "ulps": max(places), "same": same}
        out[name]["one"] = one
    return out


def main(path: str, *what: str) -> None:
    run_kernels.empty = poisoned
    round_as_devices()
    torch.set_num_threads(1)
    out = {}
    for run in what:
        mode, ranks, *names = run.split(":")
        chosen = names[0].split(",") if names else CASES
        jobs = {name: job(CASES[name], int(ranks)) for name in chosen}
        with tempfile.TemporaryDirectory() as folder:
            start(jobs, int(ranks), mode, f"{folder}/rank")
            if mode == "lost":
                files = [torch.load(f"{folder}/rank.{r}") for r in range(int(ranks))]
                out[run] = [found["raised"] for found in files]
                continue
            out[run] = compared(jobs, int(ranks), f"{folder}/rank")
    Path(path).write_text(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
