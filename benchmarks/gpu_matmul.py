"""Parts of ``one_gpu.py`` that measure matmuls with signals: their speed (B3), what
they hide of a copy (B4), what they lose to kernels that hold multiprocessors (B6).

A kernel that waits for a flag is only launched where what raises the flag is a copy
engine, which needs no multiprocessor. Predictions count tiles in waves.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu_correct import loaded
from gpu_here import (
    BLOCKS,
    GATE,
    Here,
    Side,
    Times,
    apart,
    figures_of,
    fill,
    fork,
    mark,
    matmul_rate,
    measure,
    meet,
    on,
    over,
    pinned,
    rate,
    sets_of,
    streams,
)
from gpu_programs import BF16

from fxpar.fusion.kernels.kernel_worth import SHARE, profitable
from fxpar.fusion.kernels.matmul_kernel import (
    TILES,
    Gemm,
    Tiles,
    call_of,
    gemm,
    signals_of,
)
from fxpar.sharding.cost.hardware_table import Level, Peak, lookup

CHUNKS = 8
LARGE = TILES["bfloat16"][0]
TINY = Tiles(16, 16, 16, 4, 1, band=2)


def kernel(
    here: Here, kind: str, m: int, n: int, k: int, *, signals: bool = True,
    programs: int = 0, chunks: int = CHUNKS, tiles: Tiles | None = None,
) -> Gemm:  # fmt: skip
    """Of bfloat16; ``programs``: by default one to each multiprocessor."""
    return gemm(
        kind, m, n, k, chunks, "bfloat16",
        programs=programs or here.programs,
        tiles=here.pick(tiles, TINY),
        signals=signals,
    )  # fmt: skip


def waves(made: Gemm, m: int, n: int) -> int:
    """Turns of the program that has most."""
    tiles = made.chunks * made.tiles.count(m // made.chunks, n)
    return math.ceil(tiles / made.programs)


# B3.

# m, n, k of square products, and as of a model of 70B width on 8 ranks.
SQUARE = [(4096, 4096, 4096), (8192, 8192, 8192)]
B3 = [("scatter", size) for size in (*SQUARE, (8192, 8192, 3584))]
B3 += [("gather", size) for size in ((4096, 4096, 4096), (8192, 7168, 8192))]


def products(here: Here) -> None:
    peak = matmul_rate(here)
    for kind, size in B3:
        m, n, k = here.pick(size, (64, 48, 32))
        product(here, kind, m, n, k, peak, f"{kind} {'x'.join(map(str, size))}")


def product(
    here: Here, kind: str, m: int, n: int, k: int, peak: float, case: str
) -> None:
    """Beside torch's, and beside the same kernel without signals."""
    count = sets_of(here, 2 * (m * k + k * n + m * n))
    given = [
        (fill(here, (m, k), BF16, s), fill(here, (k, n), BF16, s + 50))
        for s in range(count)
    ]
    c = torch.full((m, n), float("nan"), dtype=BF16, device=here.device)
    sides = {"torch": Side(lambda i: torch.mm(*given[i % count], out=c))}
    made = kernel(here, kind, m, n, k)
    for name, each in (
        ("ours", made),
        ("silent", kernel(here, kind, m, n, k, signals=False)),
    ):
        sides[name] = side_of(here, each, given, c)
    sides["ours"].run(0) if kind == "scatter" else _called(sides["ours"])
    here.sync()
    a, b = given[0]
    far = apart(here, c, a.float() @ b.float())
    times = measure(here, sides)
    turns = waves(made, m, n) * made.programs
    full = made.chunks * made.tiles.count(m // made.chunks, n)
    ours = times["ours"]
    here.value(
        "b3 torch", over(times["torch"], ours), case, predicted=full / turns,
        tflops=rate(2e-12 * m * n * k, ours), peak=peak, far=far, spread=ours.spread,
        times=figures_of(times), tiles=str(made.tiles),
    )  # fmt: skip
    here.value("b3 signals", over(ours, times["silent"]), case, predicted=1.0)


def _called(side: Side) -> None:
    if side.before is not None:
        side.before(0)
    side.run(0)


def side_of(
    here: Here, made: Gemm, given: Sequence[tuple[torch.Tensor, ...]], c: torch.Tensor
) -> Side:
    """A kernel whose chunks are all there: flags that it waits for are up before."""
    flags, counts = signals_of(made, here.device)
    first = [
        (a.chunk(made.chunks)[0], a) if made.kind == "gather" else (a,)
        for a, _ in given
    ]

    def run(i: int) -> None:
        at = i % len(given)
        call_of(made, (*first[at], given[at][1], c), flags, counts, 0)()

    def raise_flags(_: int) -> None:
        flags.fill_(1)

    waits = made.kind == "gather" and made.signals
    return Side(run, raise_flags if waits else None)


# B4.

M, K = 8192, 4096
WIDTHS = (2048, 4096, 8192, 12288, 16384, 24576, 32768, 49152, 65536)


@dataclass(frozen=True)
class Remote:
    """Chunks of A in memory of the host, and where they go."""

    chunks: Sequence[torch.Tensor]
    places: Sequence[torch.Tensor]
    one: torch.Tensor
    copier: Any

    def copy(self, here: Here, flags: torch.Tensor | None) -> None:
        """All but the first, in the order in which they are wanted."""
        with on(here, self.copier):
            for chunk in range(1, CHUNKS):
                self.places[chunk].copy_(self.chunks[chunk], non_blocking=True)
                if flags is not None:
                    flags[chunk : chunk + 1].copy_(self.one, non_blocking=True)


def overlap(here: Here) -> None:
    """A gather of chunks that a copy engine brings from the host, a link as slow as
    others, beside copying first and computing then."""
    peak = matmul_rate(here)
    m, k = here.pick((M, K), (64, 32))
    a = fill(here, (m, k), BF16, 1)
    there, spare = torch.empty_like(a), torch.empty_like(a)
    host = pinned(here, a)
    one = pinned(here, torch.ones(1, dtype=torch.int32))
    (copier,) = streams(here, 1)
    remote = Remote(host.chunk(CHUNKS), there.chunk(CHUNKS), one, copier)
    moved = a.nbytes * (CHUNKS - 1) / CHUNKS

    def copied(_: int) -> None:
        fork(here, [copier])
        remote.copy(here, None)
        meet(here, [copier])

    link = rate(moved, measure(here, {"copy": Side(copied)}, longest=400.0)["copy"])
    want = peak * moved / (link * 2.0 * m * k)
    n = here.pick(min(WIDTHS, key=lambda n: abs(math.log(n / want))), 48)
    made = kernel(here, "gather", m, n, k, tiles=LARGE)
    silent = kernel(here, "gather", m, n, k, tiles=LARGE, signals=False)
    b = fill(here, (k, n), BF16, 2)
    c = torch.full((m, n), float("nan"), dtype=BF16, device=here.device)
    flags, counts = signals_of(made, here.device)
    operands = a.chunk(CHUNKS)[0], there, b, c
    for each in (made, silent):
        loaded(here, each, operands, flags, counts, 0)
    elsewhere = Remote(remote.chunks, spare.chunk(CHUNKS), one, copier)

    def together(_: int) -> None:
        fork(here, [copier])
        if not here.is_gpu:
            remote.copy(here, flags)
        call_of(made, operands, flags, counts, 0)()
        if here.is_gpu:
            remote.copy(here, flags)
        meet(here, [copier])

    there.fill_(float("nan"))
    together(0)
    here.sync()
    far = apart(here, c, torch.mm(a, b))
    alone = Side(lambda i: call_of(silent, operands, flags, counts, 0))()
    sides = {"copy": Side(copied), "matmul": alone, "together": Side(together)}
    times = measure(here, sides, longest=6000.0)
    beside = beside_copies(here, alone, elsewhere)
    said(here, times, beside, (m, n, k), link, far)


def said(
    here: Here,
    times: dict[str, Times],
    beside: float,
    size: tuple[int, int, int],
    link: float,
    far: float,
) -> None:
    """The rows of B4."""
    copy, matmul, together = (times[x].ms for x in ("copy", "matmul", "together"))
    eta = (copy + matmul - together) / min(copy, matmul)
    # The model takes a share of the library's speed; what was measured has it already.
    speed = rate(2.0 * math.prod(size), times["matmul"]) / SHARE
    peaks, levels = (("bfloat16", Peak(speed)),), (Level(0, link, 0.0),)
    hardware = replace(lookup("h100"), peaks=peaks, levels=levels)
    model = profitable("gather", *size, CHUNKS, hardware, programs=here.programs)
    predicted = (copy + matmul - model.overlapped * 1e3) / min(copy, matmul)
    case = f"{'x'.join(map(str, size))} at {link / 1e9:.0f} GB/s"
    here.value(
        "b4 hidden", eta, case, predicted=predicted, far=far, link=link,
        times=figures_of(times), slower=together / (copy + matmul),
    )  # fmt: skip
    here.value("b4 slower", beside, case, predicted=1.0)


def beside_copies(here: Here, alone: Side, remote: Remote) -> float:
    """Time of the matmul while copies run that it does not wait for, over alone."""

    def start(_: int) -> None:
        fork(here, [remote.copier])
        remote.copy(here, None)

    sides = {"alone": alone, "beside": Side(alone.run, start)}
    if here.mode != "gpu":
        return over(*reversed(list(measure(here, sides).values())))
    ratios = []
    for _ in range(BLOCKS):
        found: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(12):
            for name, side in sides.items():
                found[name].append(timed(here, side))
        medians = {name: statistics.median(times) for name, times in found.items()}
        ratios.append(medians["beside"] / medians["alone"])
    return statistics.median(ratios)


def timed(here: Here, side: Side, after: Callable[[], None] | None = None) -> float:
    """Milliseconds of one call by itself, all before it done but ``side.before``."""
    here.sync()
    if side.before is not None:
        side.before(0)
    start, end = mark(here), mark(here)
    if here.is_gpu:
        torch.cuda._sleep(GATE // 4)
    start.record()
    side.run(0)
    end.record()
    if here.is_gpu:
        end.synchronize()
    if after is not None:
        after()
    here.sync()
    return max(start.elapsed_time(end), 1e-6)


# B6.

HELD = (8, 16, 32)


@dataclass(frozen=True)
class Holder:
    """A matmul's kernel that holds multiprocessors: each of its programs computes a
    tile, takes as much shared memory as another matmul's, and waits for a flag."""

    made: Gemm
    operands: tuple[torch.Tensor, ...]
    flags: torch.Tensor
    counts: torch.Tensor
    one: torch.Tensor
    ours: Sequence[Any]

    def hold(self, here: Here) -> None:
        """Start it, and let it get there."""
        if not here.is_gpu:
            return
        with on(here, self.ours[0]):
            call_of(self.made, self.operands, self.flags, self.counts, 0)()
        time.sleep(1e-3)

    def release(self, here: Here) -> None:
        if here.is_gpu:
            with on(here, self.ours[1]):
                self.flags[1:2].copy_(self.one, non_blocking=True)


def holder(here: Here, count: int) -> Holder:
    tiles = here.pick(LARGE, TINY)
    m, n, k = 2 * tiles.rows, count * tiles.columns, 8 * tiles.depth
    made = kernel(here, "gather", m, n, k, programs=count, chunks=2, tiles=LARGE)
    assert made.programs == count
    a, b = fill(here, (m, k), BF16, 3), fill(here, (k, n), BF16, 4)
    c = torch.empty((m, n), dtype=BF16, device=here.device)
    flags, counts = signals_of(made, here.device)
    operands = a.chunk(2)[0], a, b, c
    loaded(here, made, operands, flags, counts, 0)
    if not here.is_gpu:
        flags.fill_(1)  # nobody else would
        call_of(made, operands, flags, counts, 0)()
    one = pinned(here, torch.ones(1, dtype=torch.int32))
    return Holder(made, operands, flags, counts, one, streams(here, 2))


def contention(here: Here) -> None:
    m = n = k = here.pick(8192, 64)
    a, b = fill(here, (m, k), BF16, 1), fill(here, (k, n), BF16, 2)
    c = torch.empty((m, n), dtype=BF16, device=here.device)
    whole = kernel(here, "scatter", m, n, k, tiles=LARGE)
    alone = side_of(here, whole, [(a, b)], c)
    theirs = Side(lambda i: torch.mm(a, b, out=c))
    for count in here.pick(HELD, (1,)):
        held = holder(here, count)
        left = here.programs - count
        fewer = kernel(here, "scatter", m, n, k, tiles=LARGE, programs=left)
        beside = side_of(here, fewer, [(a, b)], c)
        loaded(here, fewer, (a, b, c), *signals_of(fewer, here.device), 0)
        for side in (alone, theirs):
            timed(here, side)
        ours, torchs, spread = contended(here, held, alone, beside, theirs)
        case = f"{count} held"
        predicted = waves(fewer, m, n) / waves(whole, m, n)
        here.value(
            "b6 ours", ours, case, predicted=predicted, spread=spread,
            share=here.programs / left,
        )  # fmt: skip
        here.value("b6 torch", torchs, case, predicted=here.programs / left)


def contended(
    here: Here, held: Holder, alone: Side, beside: Side, theirs: Side
) -> tuple[float, float, float]:
    """Times beside a holder over times alone, of our kernel with as many programs as
    are left and of torch's; and how far blocks of the former are apart."""

    def holding(side: Side) -> Side:
        return Side(side.run, lambda _: held.hold(here))

    def idle(side: Side) -> Side:
        return Side(side.run, lambda _: time.sleep(1e-3 if here.is_gpu else 0.0))

    ours, torchs = [], []
    for _ in range(here.pick(BLOCKS, 1)):
        found: dict[str, list[float]] = {x: [] for x in ("a", "b", "c", "d")}
        for _ in range(15 if here.is_gpu else 1):
            for name, side, after in (
                ("a", idle(alone), None),
                ("b", holding(beside), lambda: held.release(here)),
                ("c", idle(theirs), None),
                ("d", holding(theirs), lambda: held.release(here)),
            ):
                found[name].append(timed(here, side, after))
        a, b, c, d = (statistics.median(times) for times in found.values())
        ours.append(b / a)
        torchs.append(d / c)
    middle = statistics.median(ours)
    return middle, statistics.median(torchs), (max(ours) - min(ours)) / middle
