"""Matmuls with their collectives in Triton's interpreter, beside torch.

A thread plays who copies chunks for a gather: only when the kernel has polled a flag in
vain, and in another order than it wants. For a scatter each chunk is taken away at the
moment its flag rises. What is not there yet is NaN. All rounds of a case are with one
pair of flags; ``BROKEN`` are kernels broken on purpose.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import interpreter_builder

from fxpar.fusion.kernels import matmul_signals
from fxpar.fusion.kernels.matmul_kernel import (
    BIAS,
    Epilogue,
    Gemm,
    Tiles,
    call_of,
    gemm,
    signals_of,
)
from tests.helpers.kernels.compare_kernels import apart, ulps

PROGRAMS = 3
TILES = Tiles(32, 32, 32, 4, 1, band=2)
SMALL = Tiles(16, 16, 16, 4, 1, band=2)
# A bias, and then GELU, as tanh gives it.
GELU = Epilogue(
    BIAS.parameters,
    (
        *BIAS.lines,
        "inner = 0.7978845608028654 * (acc + 0.044715 * acc * acc * acc)",
        "acc = 0.5 * acc * (1.0 + lib.tanh(inner))",
    ),
)
DONE: dict[Epilogue | None, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    None: lambda x, bias: x,
    BIAS: lambda x, bias: x + bias,
    GELU: lambda x, bias: torch.nn.functional.gelu(x + bias, approximate="tanh"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """[m, k] times [k, n], m over all ranks. ``turned``: B lies column by column."""

    m: int
    n: int
    k: int
    ranks: int
    rank: int = 0
    dtype: str = "float32"
    epilogue: Epilogue | None = None
    turned: bool = False
    tiles: Tiles = TILES
    signals: bool = True
    programs: int = PROGRAMS
    rounds: int = 2

    def kernel(self, kind: str) -> Gemm:
        return gemm(
            kind, self.m, self.n, self.k, self.ranks, self.dtype,
            programs=self.programs,
            b_stride=(1, self.k) if self.turned else None,
            epilogue=self.epilogue,
            tiles=self.tiles,
            signals=self.signals,
        )  # fmt: skip


CASES = {
    "even": Case(128, 64, 64, 4, 1, rounds=3),
    "uneven": Case(100, 70, 50, 2, 1, epilogue=BIAS, rounds=3),
    "one rank": Case(66, 33, 20, 1, epilogue=GELU),
    "bf16": Case(128, 40, 40, 4, 2, "bfloat16"),
    "bf16 gelu": Case(96, 40, 64, 2, 0, "bfloat16", GELU, turned=True),
    "turned": Case(32, 24, 40, 2, 0, turned=True, tiles=SMALL),
    "more programs than tiles": Case(20, 20, 20, 2, 1, programs=99),
    "no signals": Case(64, 40, 40, 2, 1, signals=False),
} | {
    f"rank {r} of 4": Case(68, 16, 16, 4, r, tiles=SMALL, programs=1) for r in range(4)
}

_STORE = "        tl.store(at, acc.to(c_ptr.dtype.element_ty))\n"
_WRITTEN = (
    "        if SIGNALS:\n"
    "            signals.written(flags_ptr + chunk, counts_ptr + chunk, HIGH * WIDE)\n"
)
# Of a kernel's text what is put instead; all of the case "even".
BROKEN = {
    "no wait": ("gather", "signals.wait(flags_ptr + chunk)", "pass"),
    "waits once": ("gather", "if chunk != seen:", "if seen == rank and chunk != seen:"),
    "no lower": (
        "gather",
        "signals.lower(flags_ptr, counts_ptr, CHUNKS, PROGRAMS)",
        "pass",
    ),
    "lowers early": (
        "gather",
        "counts_ptr, CHUNKS, PROGRAMS)",
        "counts_ptr, CHUNKS, 1)",
    ),
    "own from others": ("gather", "chunk == rank, own_ptr", "False, own_ptr"),
    "flag before store": ("scatter", _STORE + _WRITTEN, _WRITTEN + _STORE),
    "flag by first tile": ("scatter", "chunk, HIGH * WIDE)", "chunk, 1)"),
    "one count for all": ("scatter", "counts_ptr + chunk", "counts_ptr"),
    "no flag": ("scatter", _WRITTEN, ""),
}


def broken(made: Gemm, old: str, new: str) -> Gemm:
    assert made.text.count(old) == 1, old
    return dataclasses.replace(made, text=made.text.replace(old, new))


def inputs_of(case: Case, turn: int) -> tuple[torch.Tensor, ...]:
    """A, B, a bias, and what torch makes of them in float32."""
    draw = torch.Generator().manual_seed(turn)
    dtype = getattr(torch, case.dtype)
    a = torch.randn(case.m, case.k, generator=draw).to(dtype)
    b = torch.randn(case.k, case.n, generator=draw).to(dtype)
    bias = torch.randn(case.n, generator=draw).to(dtype)
    want = DONE[case.epilogue](a.float() @ b.float(), bias.float())
    return a, b.t().contiguous().t() if case.turned else b, bias, want


def nans(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=like.dtype)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A kernel's rounds beside torch."""

    error: float  # the largest, as ``compare_kernels.apart``
    ulps: float
    left: int  # flags and counts that are not zero again
    orders: list[list[int]]  # of chunks, in each round


def run(case: Case, made: Gemm) -> Comparison:
    """Run a kernel's rounds, all with one pair of flags and counts."""
    flags, counts = signals_of(made, "cpu")
    errors, places, orders, left = [], [], [], 0
    for turn in range(case.rounds):
        a, b, bias, want = inputs_of(case, turn)
        rest = [bias] if case.epilogue else []
        play = gathered if made.kind == "gather" else scattered
        got, order = play(case, made, a, b, rest, flags, counts)
        errors.append(apart(got, want))
        places.append(ulps(got, want))
        left += int(flags.count_nonzero() + counts.count_nonzero())
        orders.append(order)
    return Comparison(max(errors), max(places), left, orders)


class Copier(threading.Thread):
    """Copies a chunk and raises its flag whenever the kernel polls a flag in vain, the
    rest when the kernel is ``done``: what a kernel does not wait for is not there."""

    def __init__(self, order: list[int], copy: Callable[[int], None]) -> None:
        super().__init__(daemon=True)
        self.order, self.copy = order, copy
        self.vain, self.done = threading.Semaphore(0), False

    def run(self) -> None:
        for chunk in self.order:
            while not self.done and not self.vain.acquire(timeout=0.01):
                pass
            self.copy(chunk)

    def __enter__(self) -> None:
        swap = self.swap = interpreter_builder.create_atomic_cas

        def patient(*args: Any) -> Any:
            last_try = not self.is_alive()
            old = swap(*args)
            if not old.data.all():
                if last_try:
                    raise TimeoutError("a flag that nobody raises")
                self.vain.release()
                time.sleep(1e-3)
            return old

        interpreter_builder.create_atomic_cas = patient
        self.start()

    def __exit__(self, *_: object) -> None:
        interpreter_builder.create_atomic_cas = self.swap
        self.done = True
        self.join()


def gathered(
    case: Case, made: Gemm, a: Any, b: Any, rest: Any, flags: Any, counts: Any
) -> tuple[torch.Tensor, list[int]]:
    """All but the own chunk come late, and the first two that are wanted in turn."""
    chunks = a.chunk(case.ranks)
    there, c = nans(a, case.m, case.k), nans(a, case.m, case.n)
    order = [(case.rank + i) % case.ranks for i in range(1, case.ranks)]
    order[:2] = order[1::-1]

    def copy(chunk: int) -> None:
        there.chunk(case.ranks)[chunk].copy_(chunks[chunk])
        if case.signals:
            flags[chunk] = 1

    if not case.signals:
        for chunk in order:
            copy(chunk)
    with Copier(order if case.signals else [], copy):
        operands = chunks[case.rank], there, b, c, *rest
        call_of(made, operands, flags, counts, case.rank)()
    return c, order


def scattered(
    case: Case, made: Gemm, a: Any, b: Any, rest: Any, flags: Any, counts: Any
) -> tuple[torch.Tensor, list[int]]:
    """Chunks as they are when their flags rise, and in which order these do."""
    c, taken = nans(a, case.m, case.n), nans(a, case.m, case.n)
    order: list[int] = []
    exchange = interpreter_builder.create_atomic_rmw

    def take(*args: Any) -> Any:
        old = exchange(*args)
        for chunk in flags.nonzero().flatten().tolist():
            if chunk not in order:
                taken.chunk(case.ranks)[chunk].copy_(c.chunk(case.ranks)[chunk])
            order.append(chunk)
            flags[chunk] = 0
        return old

    interpreter_builder.create_atomic_rmw = take
    try:
        call_of(made, (a, b, c, *rest), flags, counts, case.rank)()
    finally:
        interpreter_builder.create_atomic_rmw = exchange
    return taken if case.signals else c, order


@triton.jit
def list_tiles(
    out_ptr, rank, CHUNKS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    BAND: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """The tile of each turn, one program for each."""
    turn = tl.program_id(0)
    chunk, row, col = matmul_signals.tile_of(
        turn, rank, CHUNKS, HIGH, WIDE, BAND, BACKWARD
    )
    tl.store(out_ptr + turn * 3, chunk)
    tl.store(out_ptr + turn * 3 + 1, row)
    tl.store(out_ptr + turn * 3 + 2, col)


def tiles(kind: str, rank: int, *sizes: int) -> list[list[int]]:
    """In order: chunk, row, column."""
    chunks, high, wide, _ = sizes
    out = torch.full((chunks * high * wide, 3), -1, dtype=torch.int32)
    list_tiles[(len(out),)](out, rank, *sizes, BACKWARD=kind == "scatter")
    return out.tolist()
