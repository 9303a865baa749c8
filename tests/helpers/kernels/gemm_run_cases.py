"""Matmuls with their collectives on several ranks, beside float64.

Ranks are forks of a process in which Triton is an interpreter; they share memory and
run the cases in three rounds. Outputs begin as NaN. ``mode``: "sound"; who is late in
each round, another rank each time: "late_call", "late_copies", "late_matmul",
"late_end"; "lost" (the last rank comes once and never again) and "failing" (its copies
fail); or what is broken on purpose: "early_flags", "wrong_order", "no_wait",
"no_meeting", "one_half".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from triton.runtime.interpreter import interpreter_builder

from fxpar.errors import FxparError
from fxpar.fusion import fused_matmul as _fused_matmul  # noqa: F401  (its ops run)
from fxpar.fusion.kernels import (
    device_functions,
    matmul_run,
    run_fused,
    symmetric_memory,
)
from fxpar.fusion.kernels.matmul_kernel import BIAS
from fxpar.fusion.kernels.symmetric_memory import Provider
from tests.helpers.forked import run_forked
from tests.helpers.kernels.compare_kernels import apart, ulps
from tests.helpers.kernels.shared_memory import shared_files

GROUP, PROGRAMS, ROUNDS = "group", 3, 3
LATE, HELD = 0.1, 5.0  # seconds
LOST = 300  # questions to a lost rank

ours = torch.ops.fxpar


@dataclass(frozen=True)
class Case:
    """``rows`` of a rank's part; ``columns`` of each weight. ``dim``: through the op,
    of which that dim is gathered or scattered, rows being 2 in another one."""

    kind: str
    rows: int
    columns: tuple[int, ...]
    depth: int
    dtype: torch.dtype = torch.float32
    bias: bool = False
    mean: bool = False
    turned: bool = False
    dim: int | None = None


BF16 = torch.bfloat16
CASES = {
    "gather": Case("gather", 40, (48,), 24),
    "gather three": Case("gather", 17, (16, 33, 8), 20, turned=True),
    "gather biases": Case("gather", 32, (16, 32), 40, bias=True),
    "gather bf16": Case("gather", 32, (40, 16), 40, BF16),
    "gather small": Case("gather", 20, (24,), 16),
    "gather op": Case("gather", 12, (24, 8), 16, dim=0),
    "gather op 1": Case("gather", 12, (24,), 16, dim=1),
    "scatter": Case("scatter", 40, (48,), 24),
    "scatter mean": Case("scatter", 17, (33,), 20, mean=True, turned=True),
    "scatter bf16": Case("scatter", 32, (40,), 40, BF16),
    "scatter small": Case("scatter", 20, (24,), 16),
    "scatter op": Case("scatter", 12, (24,), 16, dim=0),
    "scatter op 1": Case("scatter", 12, (24,), 16, mean=True, dim=1),
}


@dataclass(frozen=True)
class Given:
    """Of one rank in one round: rows of A, weights, a bias for each."""

    x: torch.Tensor
    ws: list[torch.Tensor]
    biases: list[torch.Tensor]


def given_of(case: Case, ranks: int, rank: int, turn: int) -> Given:
    """Weights are a gather's own, as columns of one matrix; a scatter's are rows of
    one. Those in bf16 are small integers: rounding begins with the products."""
    draw = torch.Generator().manual_seed(100 * turn + rank)

    def make(*shape: int) -> torch.Tensor:
        if case.dtype is BF16:
            return torch.randint(-9, 10, shape, generator=draw).to(BF16)
        return torch.randn(shape, generator=draw)

    rows = case.rows * (ranks if case.kind == "scatter" else 1)
    x = make(rows, case.depth)
    if case.dim is not None:
        x = x.view(-1, 2, case.depth)
        x = x.transpose(0, case.dim).contiguous()
    ws = [make(case.depth, n) for n in case.columns]
    if case.turned:
        ws = [w.t().contiguous().t() for w in ws]
    return Given(x, ws, [make(n) for n in case.columns])


def want_of(case: Case, ranks: int, turn: int) -> list[list[torch.Tensor]]:
    """Of all ranks; in float64, rounded where a collective carries bf16."""
    every = [given_of(case, ranks, r, turn) for r in range(ranks)]
    dim = case.dim or 0
    if case.kind == "gather":
        whole = torch.cat([g.x for g in every], dim).double()
        out = []
        for g in every:
            pairs = zip(g.ws, g.biases, strict=True)
            made = [whole @ w.double() + b.double() * case.bias for w, b in pairs]
            out.append([whole, *made])
        return out
    parts = [g.x.double() @ g.ws[0].double() for g in every]
    total = sum(part.to(case.dtype).double() for part in parts)
    total = total / ranks if case.mean else total
    return [[part] for part in total.chunk(ranks, dim)]  # type: ignore[attr-defined]


def made_of(case: Case, g: Given, provider: Provider) -> list[torch.Tensor]:
    op = "avg" if case.mean else "sum"
    if case.kind == "gather":
        if case.dim is not None:
            return ours.gather_matmul(g.x, g.ws, case.dim, provider.ranks, GROUP)
        bound = (BIAS, [[b] for b in g.biases]) if case.bias else None
        whole, products = matmul_run.gather_matmul(provider, g.x, g.ws, bound)
        return [whole, *products]
    (w,) = g.ws
    if case.dim is not None:
        made = ours.matmul_scatter(g.x, w, op, case.dim, provider.ranks, GROUP)
    else:
        made = matmul_run.matmul_scatter(provider, g.x, w, mean=case.mean)
    return [made]


# What is broken, and who is late.


class Failing(Exception):
    """A copy that fails on purpose."""


class Breaking:
    """Breaks what MODE says, on the last rank, and holds it where that shows; or lets
    another rank be late in each round. ``calls``: int32 [3, ranks] that all ranks see,
    how many were begun, have sent their copies, have ended."""

    def __init__(self, mode: str, provider: Provider, calls: torch.Tensor) -> None:
        self.mode, self.provider, self.turn = mode, provider, 0
        self.rank, self.ranks = provider.rank, provider.ranks
        self.last = self.rank == self.ranks - 1
        self.begun, self.sent, self.ended = calls
        self.polls = 0
        self.together, self.take = matmul_run._overlap_copies, provider.workspace
        swap = interpreter_builder.create_atomic_cas

        def patient_swap(*args: Any) -> Any:
            time.sleep(1e-4)  # who waits leaves the processor to the others
            self.polls += 1
            return swap(*args)

        interpreter_builder.create_atomic_cas = patient_swap
        if mode == "wrong_order":
            matmul_run._ring = matmul_run._back
        matmul_run._overlap_copies = self.run  # type: ignore[assignment]
        provider.workspace = self.space  # type: ignore[method-assign]

    def late(self, where: str) -> None:
        if self.mode == where and self.rank == (self.turn + 1) % self.ranks:
            time.sleep(LATE)

    def hold(self, mode: str, until: Callable[[], Any]) -> None:
        """Until something happened, or never does."""
        end = time.monotonic() + HELD
        while self.mode == mode and self.last and not until():
            if time.monotonic() > end:
                break
            time.sleep(1e-3)

    def ahead(self, of: torch.Tensor) -> bool:
        """Whether the first rank is, which in the last round it never is."""
        return self.turn == ROUNDS - 1 or bool(of[0] > of[self.rank])

    def space(self, nbytes: int) -> Any:
        space = self.take(nbytes)
        self.late("late_call")
        self.hold("no_meeting", lambda: self.ended[0] > self.ended[self.rank])
        return self.provider._halves[0] if self.mode == "one_half" else space

    def run(
        self,
        provider: Any,
        meet: Any,
        copies: Any,
        multiply: Any,
        flags: Any,
        waits: bool,
    ) -> None:
        copied, computed = threading.Event(), threading.Event()
        self.begun[self.rank] += 1

        def compute() -> None:
            self.late("late_matmul")
            self.hold("no_wait", copied.is_set)
            multiply()
            computed.set()

        def work(up: Any, wait: Any) -> None:
            if self.mode == "failing" and self.last:
                raise Failing("on purpose")
            if self.mode == "early_flags":
                for chunk in range(self.ranks):
                    up(chunk)
            self.hold("early_flags", computed.is_set)
            if waits:
                self.hold("one_half", lambda: self.ahead(self.begun))
            copies(partial(self.up, up), partial(self.wait, wait))
            copied.set()
            self.sent[self.rank] += 1

        def met() -> None:
            if self.mode != "no_meeting":
                meet()

        self.together(provider, met, work, compute, flags, waits=waits)
        if not waits:
            self.hold("one_half", lambda: self.ahead(self.sent))
        self.late("late_end")
        self.ended[self.rank] += 1

    def up(self, up: Callable[[int], None], chunk: int) -> None:
        if self.mode != "wrong_order":
            up(chunk)
        else:  # the flag of the first that is wanted for the first that is copied
            up((2 * self.rank - chunk) % self.ranks)
            seen = self.polls + 2  # the next flag is asked for in vain
            self.hold("wrong_order", lambda: self.polls > seen)
        self.late("late_copies")

    def wait(self, wait: Callable[[int], None], chunk: int) -> None:
        if self.mode != "no_wait":
            wait(chunk)
        self.late("late_copies")


# One rank.


@dataclass(frozen=True)
class RankRun:
    """What one rank has at the end."""

    results: dict[tuple[str, int], list[torch.Tensor]]  # by case and round
    said: list[str]  # errors of calls, and "nothing" of those that had none
    signals: int  # that are not lowered


def run_cases(names: Iterable[str], ranks: int, mode: str = "sound") -> list[RankRun]:
    """Run cases in rounds, each rank in a fork."""
    return run_forked(_run_rank, ranks, list(names), mode)


def _run_rank(
    folder: Path, rank: int, ranks: int, names: list[str], mode: str
) -> RankRun:
    store = torch.distributed.FileStore(str(folder / "store"), ranks)
    symmetric_memory._LEAST = 1 << 10  # so that it has to grow
    provider = shared_files(store, rank, ranks, name=GROUP, programs=PROGRAMS)
    run_fused.install(GROUP, "cpu", provider)
    calls = torch.from_file(str(folder / "calls"), True, 3 * ranks, dtype=torch.int32)
    breaking = Breaking(mode, provider, calls.view(3, ranks))
    results, said = {}, []
    for turn in range(1 if mode == "failing" else ROUNDS):
        for name in names:
            case, breaking.turn = CASES[name], turn
            if mode == "lost" and turn > 0:
                said += lost(case, rank, turn, provider)
                continue
            try:
                given = given_of(case, ranks, rank, turn)
                results[name, turn] = made_of(case, given, provider)
            except Failing:
                said.append("Failing")
    assert provider._memory is not None
    provider.barrier()
    pads = 4 * (symmetric_memory.HEAD + ranks * PROGRAMS)
    signals = int(provider._memory.own[:pads].count_nonzero())
    return RankRun(results, said, signals)


def lost(case: Case, rank: int, turn: int, provider: Provider) -> list[str]:
    """What is raised by a call for which the last rank does not come."""
    provider.barrier()
    device_functions.SPINS = tl.constexpr(LOST)
    if rank == provider.ranks - 1:
        return []
    try:
        made_of(case, given_of(case, provider.ranks, rank, turn), provider)
    except FxparError as error:
        return [str(error)]
    return ["nothing"]


@dataclass(frozen=True)
class CaseComparison:
    """A case on all ranks and in all rounds beside float64."""

    error: float  # the largest, as ``compare_kernels.apart``
    ulps: float


def compared(name: str, runs: list[RankRun]) -> CaseComparison:
    """How far the results of a case are apart, at most over rounds and ranks."""
    errors, places = [0.0], [0.0]
    for turn in range(ROUNDS):
        want = want_of(CASES[name], len(runs), turn)
        for run, his in zip(runs, want, strict=True):
            if (name, turn) in run.results:
                errors += map(apart, run.results[name, turn], his)
                places += map(ulps, run.results[name, turn], his)
    return CaseComparison(max(errors), max(places))
