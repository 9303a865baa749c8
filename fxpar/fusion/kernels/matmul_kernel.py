"""Writes a matmul with its collective: a kernel that computes chunk by chunk while
others move chunks.

In: sizes, the kind, an epilogue. Out: a ``Gemm``: the readable source of one Triton
function, which ``launch`` runs, and ``matmul_run`` with its copies. Shapes are numbers
in the text. A chunk is the rows of one rank; flags (``matmul_signals``) connect the
kernel with the stream that copies:

    gather    waits for the flag of a chunk of A before it reads it, own chunk first
    scatter   raises the flag of a chunk of the product once it is stored, own last

Never copies a chunk nor starts a collective, and knows no rank: a rank's number is an
argument. Programs stay for all tiles (persistent); one that waits keeps its place, so
the stream that raises flags must have a place in addition. Chunks from the own on: Flux
(arXiv 2406.06858); counted tiles and flags: FlashOverlap (arXiv 2504.19519) and
kraken's gemm_reduce_scatter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpar.fusion.kernels.reductions import CannotEmit
from fxpar.fusion.kernels.region_program import dtype_of
from fxpar.fusion.kernels.run_kernels import module_of

KINDS = ("gather", "scatter")
DTYPES = ("float32", "bfloat16")

# Bytes that a thread reads at a time.
ALIGNED = 16


@dataclass(frozen=True)
class Tiles:
    """Holds the sizes of what a program computes at a time."""

    rows: int  # rows of a tile of the product
    columns: int  # columns of a tile of the product
    depth: int  # depth of the contraction at a step
    warps: int  # warps of a program
    stages: int  # steps with loads in flight, ``num_stages`` of Triton
    band: int = 8  # rows of tiles that go together

    def count(self, rows: int, columns: int) -> int:
        """Return the number of tiles that cover so many rows and columns."""
        return -(-rows // self.rows) * -(-columns // self.columns)


# By dtype, from large to small; all fit the shared memory of an H100 and its registers.
# A tuner would try them in this order, too.
TILES = {
    "bfloat16": (
        Tiles(128, 256, 64, 8, 3),
        Tiles(128, 128, 64, 4, 4),
        Tiles(64, 128, 64, 4, 4),
        Tiles(64, 64, 64, 4, 4),
    ),
    "float32": (
        Tiles(128, 64, 16, 8, 3),
        Tiles(64, 64, 16, 4, 3),
        Tiles(32, 32, 32, 4, 3),
    ),
}


def tiles_of(
    m: int, n: int, k: int, ranks: int, dtype: str, programs: int = 132
) -> Tiles:
    """Return the largest tiles of which there is one for each of ``programs`` at least,
    and that chunks of m / ranks rows, columns and depth fill; else the smallest."""
    for tiles in TILES[dtype]:
        full = tiles.rows <= m // ranks and tiles.columns <= n and tiles.depth <= k
        if full and ranks * tiles.count(m // ranks, n) >= programs:
            return tiles
    return TILES[dtype][-1]


@dataclass(frozen=True)
class Epilogue:
    """Is applied to a tile before it is stored."""

    parameters: tuple[str, ...] = ()  # names of pointers, in order
    # They change ``acc``, float32 [rows, columns], and may use ``rows`` and ``cols`` of
    # the whole product, the mask ``live``, and ``lib``.
    lines: tuple[str, ...] = ()


BIAS = Epilogue(
    ("bias_ptr",),
    (
        "bias = tl.load(bias_ptr + cols, mask=cols < COLUMNS, other=0.0)",
        "acc += bias.to(tl.float32)[None, :]",
    ),
)


@dataclass(frozen=True)
class Gemm:
    """Holds the source of one matmul kernel, and how it is launched."""

    name: str  # name of the function that ``text`` defines
    # Its source. Parameters, in order: for "gather" this rank's chunk of A; then A of
    # all chunks; B; the product; the epilogue's; flags; counts; the rank.
    text: str
    kind: str  # "gather" (of A, before) or "scatter" (of the product, after)
    chunks: int  # one for each rank
    tiles: Tiles
    programs: int  # size of the grid
    # Whether it has flags at all; without, it is the same kernel that waits for nothing
    # and signals nothing.
    signals: bool


# {} are numbers and lines of one kernel.
_TEXT = '''\
"""{about}."""

import triton
import triton.language as tl

from fxpar.fusion.kernels import matmul_signals as signals
from fxpar.fusion.kernels import device_functions as lib  # of epilogues


@triton.jit(do_not_specialize=["rank"])
def {name}(
    {parameters}, flags_ptr, counts_ptr, rank,
    PROGRAMS: tl.constexpr, INTERPRETED: tl.constexpr,
):
    CHUNKS: tl.constexpr = {chunks}
    CHUNK: tl.constexpr = {chunk}  # rows of one
    COLUMNS: tl.constexpr = {columns}
    DEPTH: tl.constexpr = {depth}
    A_ROW: tl.constexpr = {a_row}  # strides
    B_ROW: tl.constexpr = {b_row}
    B_COLUMN: tl.constexpr = {b_column}
    HIGH: tl.constexpr = {high}  # tiles of a chunk
    WIDE: tl.constexpr = {wide}
    BM: tl.constexpr = {tile_rows}
    BN: tl.constexpr = {tile_columns}
    BK: tl.constexpr = {step}
    SIGNALS: tl.constexpr = {signals}
    {before}
    for turn in range(tl.program_id(0), CHUNKS * HIGH * WIDE, PROGRAMS):
        chunk, row, col = signals.tile_of(
            turn, rank, CHUNKS, HIGH, WIDE, {band}, {backward}
        )
        row, col = row * BM, col * BN
        {source}
        a = tl.multiple_of(a + tl.cast(row, tl.int64) * A_ROW, {a_aligned})
        b = tl.multiple_of(b_ptr + tl.cast(col, tl.int64) * B_COLUMN, {b_aligned})
        acc = signals.product(
            a, b, CHUNK - row, COLUMNS - col, DEPTH, A_ROW, B_ROW, B_COLUMN,
            BM, BN, BK, {even}, "{precision}", INTERPRETED,
        )
        rows = tl.cast(chunk, tl.int64) * CHUNK + row + tl.arange(0, BM)
        cols = col + tl.arange(0, BN)
        live = (row + tl.arange(0, BM) < CHUNK)[:, None] & (cols < COLUMNS)[None, :]
        {epilogue}
        at = c_ptr + rows[:, None] * COLUMNS + cols[None, :]
        tl.store(at, acc.to(c_ptr.dtype.element_ty){mask})
        {written}
    {after}
'''

_GATHER = {
    "before": ("seen = rank  # the last chunk that was waited for; the own is here",),
    "source": (
        "if SIGNALS:",
        "    if chunk != seen:",
        "        signals.wait(flags_ptr + chunk)",
        "        seen = chunk",
        "there = a_ptr + tl.cast(chunk, tl.int64) * (CHUNK * A_ROW)",
        "a = tl.where(chunk == rank, own_ptr, there)",
    ),
    "written": (),
    "after": (
        "if SIGNALS:",
        "    signals.lower(flags_ptr, counts_ptr, CHUNKS, PROGRAMS)",
    ),
}
_SCATTER = {
    "before": (),
    "source": ("a = a_ptr + tl.cast(chunk, tl.int64) * (CHUNK * A_ROW)",),
    "written": (
        "if SIGNALS:",
        "    signals.written(flags_ptr + chunk, counts_ptr + chunk, HIGH * WIDE)",
    ),
    "after": (),
}
_LINES = {"gather": _GATHER, "scatter": _SCATTER}


def gemm(
    kind: str,
    m: int,
    n: int,
    k: int,
    ranks: int,
    dtype: str,
    *,
    programs: int,
    b_stride: tuple[int, int] | None = None,
    epilogue: Epilogue | None = None,
    tiles: Tiles | None = None,
    precision: str = "ieee",
    signals: bool = True,
) -> Gemm:
    """Return the kernel of [m, k] times [k, n] on one rank, m over all chunks.

    ``b_stride``: of B in elements, row by row if None. ``programs``: the largest grid
    that runs at a time, next to those of a collective if kernels move the chunks.
    ``precision``: of products of float32, "ieee" or "tf32". Raises CannotEmit.
    """
    check(kind, m, n, k, ranks, dtype)
    tiles = tiles or tiles_of(m, n, k, ranks, dtype, programs)
    fields = {
        **_sizes(m // ranks, n, k, tiles, b_stride or (n, 1), dtype),
        **_lines(kind, epilogue or Epilogue()),
        "chunks": ranks,
        "precision": precision,
        "signals": signals,
        "about": f"{kind}: {dtype}[{m}, {k}] times [{k}, {n}] in {ranks} chunks",
    }
    digest = hashlib.sha256(repr((fields, tiles)).encode()).hexdigest()[:16]
    name = f"gemm_{kind}_{digest}"
    lines = _TEXT.format(name=name, **fields).splitlines()
    text = "\n".join([line for line in lines if line.strip() or not line])
    grid = min(ranks * tiles.count(m // ranks, n), programs)
    return Gemm(name, f"{text}\n", kind, ranks, tiles, grid, signals)


def _sizes(
    chunk: int, n: int, k: int, tiles: Tiles, b_stride: tuple[int, int], dtype: str
) -> dict[str, Any]:
    """Return the numbers of the text that follow from sizes."""
    whole = chunk % tiles.rows == 0 and n % tiles.columns == 0
    return {
        "chunk": chunk,
        "columns": n,
        "depth": k,
        "a_row": k,
        "b_row": b_stride[0],
        "b_column": b_stride[1],
        "high": -(-chunk // tiles.rows),
        "wide": -(-n // tiles.columns),
        "tile_rows": tiles.rows,
        "tile_columns": tiles.columns,
        "step": tiles.depth,
        "band": tiles.band,
        "even": whole and k % tiles.depth == 0,
        "mask": "" if whole else ", mask=live",
        "a_aligned": _aligned(k, dtype),
        "b_aligned": _aligned(tiles.columns * b_stride[1], dtype),
    }


def _lines(kind: str, epilogue: Epilogue) -> dict[str, Any]:
    """Return the parts of the text that follow from the kind and the epilogue."""
    first = ("own_ptr", "a_ptr") if kind == "gather" else ("a_ptr",)
    lines = _LINES[kind] | {"epilogue": epilogue.lines}
    return {
        "parameters": ", ".join((*first, "b_ptr", "c_ptr", *epilogue.parameters)),
        "backward": kind == "scatter",
        **{
            key: _indented(part, 4 if key in ("before", "after") else 8)
            for key, part in lines.items()
        },
    }


def check(kind: str, m: int, n: int, k: int, ranks: int, dtype: str) -> None:
    """Raise CannotEmit where there is no kernel."""
    assert kind in KINDS, kind
    if dtype not in DTYPES:
        raise CannotEmit("a matmul", f"is of {dtype}, not of {' or '.join(DTYPES)}")
    if min(m, n, k) < 1:
        raise CannotEmit("a matmul", f"of [{m}, {k}] and [{k}, {n}] is empty")
    if m % ranks:
        raise CannotEmit("a matmul", f"of {m} rows has no {ranks} equal chunks")


def _indented(lines: Sequence[str], by: int) -> str:
    return f"\n{' ' * by}".join(lines)


def _aligned(elements: int, dtype: str) -> int:
    """Return the bytes, at most ALIGNED, that every tile's first address is a multiple
    of."""
    return math.gcd(elements * dtype_of(dtype).itemsize, ALIGNED)


def signals_of(kernel: Gemm, device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """Return flags and counts, int32 [chunks] each, zero. One pair serves a kernel at a
    time, for any number of launches one after the other."""
    pair = [torch.zeros(kernel.chunks, dtype=torch.int32, device=device) for _ in "fc"]
    return tuple(pair)


@dataclass(frozen=True)
class KernelLaunch:
    """Is a kernel's launch: the function, the number of programs, arguments and
    constants."""

    function: Any  # compiled by Triton
    programs: int  # size of the grid
    args: tuple[Any, ...]
    constants: Mapping[str, Any]  # of the compiled text

    def __call__(self) -> None:
        """Launch it on the current stream."""
        self.function[(self.programs,)](*self.args, **self.constants)


def call_of(
    kernel: Gemm,
    operands: Sequence[torch.Tensor],
    flags: torch.Tensor,
    counts: torch.Tensor,
    rank: int,
) -> KernelLaunch:
    """Return a kernel's launch. ``operands``: tensors of the pointers, in the order
    that ``Gemm`` says, as they were described to ``gemm``, at addresses that are
    multiples of 16; the product is among them."""
    assert not any(x.data_ptr() % ALIGNED for x in operands), "not aligned"
    function = getattr(module_of(kernel.name, kernel.text), kernel.name)
    constants = {
        "PROGRAMS": kernel.programs,
        "INTERPRETED": flags.device.type == "cpu",
        "num_warps": kernel.tiles.warps,
        "num_stages": kernel.tiles.stages,
    }
    return KernelLaunch(
        function, kernel.programs, (*operands, flags, counts, rank), constants
    )
