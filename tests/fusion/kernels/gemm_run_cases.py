"""Matmuls with their collectives on several processes, beside float64.

A script, since Triton is either interpreter or compiler in one process:
``python -m tests.fusion.kernels.gemm_run_cases OUT MODE:RANKS[:CASE,CASE...]...``
starts so many processes that share memory, lets them run the cases in three rounds, and
writes to OUT as JSON how far results are apart from those of all ranks' inputs. Outputs
begin as NaN. MODE: "sound"; who is late in each round, another rank each time:
"late_call", "late_copies", "late_matmul", "late_end"; "lost" (the last rank comes once
and never again) and "failing" (its copies fail); or what is broken on purpose:
"early_flags", "wrong_order", "no_wait", "no_meeting", "one_half".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from triton.runtime.interpreter import interpreter_builder

from fxpar.errors import FxparError
from fxpar.fusion import shipped  # noqa: F401  (its ops run by kernels)
from fxpar.fusion.kernels import gemm_run, launch, library, providers, run_fused
from fxpar.fusion.kernels.gemm import BIAS
from fxpar.fusion.kernels.providers import Provider, shared_files
from tests.fusion.kernels.interpreted import apart, poisoned, round_as_devices, ulps

GROUP, PROGRAMS, ROUNDS = "group", 3, 3
LATE = 0.15  # seconds
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
    "gather op": Case("gather", 12, (24, 8), 16, dim=0),
    "gather op 1": Case("gather", 12, (24,), 16, dim=1),
    "scatter": Case("scatter", 40, (48,), 24),
    "scatter mean": Case("scatter", 17, (33,), 20, mean=True, turned=True),
    "scatter bf16": Case("scatter", 32, (40,), 40, BF16),
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
        whole, products = gemm_run.gather_matmul(provider, g.x, g.ws, bound)
        return [whole, *products]
    (w,) = g.ws
    if case.dim is not None:
        made = ours.matmul_scatter(g.x, w, op, case.dim, provider.ranks, GROUP)
    else:
        made = gemm_run.matmul_scatter(provider, g.x, w, mean=case.mean)
    return [made]


# What is broken, and who is late.


class Failing(Exception):
    """A copy that fails on purpose."""


def break_it(mode: str, rank: int, provider: Provider) -> Callable[[int], None]:
    """Break what MODE says; gives what tells the number of the round."""
    ranks, turns = provider.ranks, [0]
    together, take = gemm_run._together, provider.workspace

    def late(where: str) -> None:
        now = (turns[0] + 1) % ranks
        # Of what is broken, the last rank is as late as it needs to show.
        last = mode in BROKEN.get(where, ()) and rank == ranks - 1
        if last or (mode == where and rank == now):
            time.sleep(LATE)

    def changed(
        provider: Any, meet: Any, copies: Any, multiply: Any, flags: Any, waits: bool
    ) -> None:
        def work(up: Any, wait: Any) -> None:
            if mode == "failing" and rank == ranks - 1:
                raise Failing("on purpose")
            if mode == "early_flags":
                for chunk in range(ranks):
                    up(chunk)

            def raised(chunk: int) -> None:
                # The flag of the first that is wanted for the first that is copied.
                up((2 * rank - chunk) % ranks if mode == "wrong_order" else chunk)
                late("late_copies")

            def waited(chunk: int) -> None:
                if mode != "no_wait":
                    wait(chunk)
                late("late_copies")

            late("late_copies")
            copies(raised, waited)

        def compute() -> None:
            late("late_matmul")
            multiply()

        def met() -> None:
            late("late_meeting")
            if mode != "no_meeting":
                meet()

        together(provider, met, work, compute, flags, waits=waits)
        late("late_end")

    def space_of(nbytes: int) -> Any:
        space = take(nbytes)
        late("late_call")
        return provider._halves[0] if mode == "one_half" else space

    swap = interpreter_builder.create_atomic_cas

    def patient_swap(*args: Any) -> Any:
        time.sleep(1e-4)  # who waits leaves the processor to the others
        return swap(*args)

    interpreter_builder.create_atomic_cas = patient_swap
    if mode == "wrong_order":
        gemm_run._ring = gemm_run._back
    gemm_run._together = changed  # type: ignore[assignment]
    provider.workspace = space_of  # type: ignore[method-assign]
    return lambda turn: turns.__setitem__(0, turn)


# Where the last rank is late, so that what is broken shows.
BROKEN = {
    "late_copies": ("early_flags", "wrong_order", "one_half"),
    "late_matmul": ("no_wait",),
    "late_call": ("no_meeting",),
    "late_end": ("one_half",),
}


# One rank.


def run_rank(
    jobs: dict[str, Case], rank: int, ranks: int, mode: str, path: str
) -> None:
    store = torch.distributed.FileStore(f"{path}.store", ranks)
    providers._LEAST = 1 << 10  # so that it has to grow
    provider = shared_files(store, rank, ranks, name=GROUP, programs=PROGRAMS)
    run_fused.install(GROUP, "cpu", provider)
    begin = break_it(mode if mode != "lost" else "sound", rank, provider)
    out: dict[str, Any] = {}
    for turn in range(ROUNDS):
        for name, case in jobs.items():
            begin(turn)
            if mode in ("lost", "failing") and turn > 0:
                out[f"{name}:{turn}"] = fails(case, rank, turn, mode, provider)
                continue
            try:
                got = made_of(case, given_of(case, ranks, rank, turn), provider)
            except Failing:
                got = "Failing"
            out[f"{name}:{turn}"] = got
    assert provider._memory is not None
    provider.barrier()
    pads = 4 * (providers.HEAD + ranks * PROGRAMS)
    out["signals"] = int(provider._memory.own[:pads].count_nonzero())
    torch.save(out, f"{path}.{rank}")


def fails(case: Case, rank: int, turn: int, mode: str, provider: Provider) -> str:
    """What is raised by a call for which the last rank does not come."""
    if mode == "failing":
        return ""
    provider.barrier()
    library.SPINS = tl.constexpr(LOST)
    if rank == provider.ranks - 1:
        return ""
    try:
        made_of(case, given_of(case, provider.ranks, rank, turn), provider)
    except FxparError as error:
        return str(error)
    return "nothing"


def start(jobs: dict[str, Case], ranks: int, mode: str, path: str) -> None:
    """Processes that have imported all there is; none outlives two minutes."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            signal.alarm(120)
            run_rank(jobs, rank, ranks, mode, path)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    ended = [os.waitpid(child, 0)[1] for child in children]
    assert not any(ended), f"ranks ended with {ended}"


def compared(jobs: dict[str, Case], ranks: int, path: str) -> dict[str, Any]:
    """How far results are apart, at most over rounds and ranks."""
    got = [torch.load(f"{path}.{rank}") for rank in range(ranks)]
    out: dict[str, Any] = {"signals": [x["signals"] for x in got]}
    for name, case in jobs.items():
        found: dict[str, Any] = {"error": 0.0, "ulps": 0.0, "said": []}
        for turn in range(ROUNDS):
            want = want_of(case, ranks, turn)
            for rank in range(ranks):
                made = got[rank][f"{name}:{turn}"]
                if isinstance(made, str):
                    found["said"].append(made)
                    continue
                for mine, his in zip(made, want[rank], strict=True):
                    found["error"] = max(found["error"], apart(mine, his))
                    found["ulps"] = max(found["ulps"], ulps(mine, his))
        out[name] = found
    return out


def main(path: str, *what: str) -> None:
    launch.empty = poisoned
    round_as_devices()
    torch.set_num_threads(1)
    launch.folder()  # imports what processes need
    out = {}
    for run in what:
        mode, ranks, *names = run.split(":")
        jobs = {name: CASES[name] for name in (names[0].split(",") if names else CASES)}
        with tempfile.TemporaryDirectory() as folder:
            start(jobs, int(ranks), mode, f"{folder}/rank")
            out[run] = compared(jobs, int(ranks), f"{folder}/rank")
    Path(path).write_text(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
