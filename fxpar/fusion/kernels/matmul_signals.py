"""Defines functions that the text of a matmul with its collective calls: the order of
tiles, their product, and flags between the kernel and the stream that moves chunks.

In: pointers to operands, flags and counts. Out: products, and flags raised or lowered.
A flag is an int32 of one chunk, zero at first: the stream that fills a chunk raises it
to 1, the one that waits for it lowers it to 0. So a captured graph can be replayed, as
long as a sender begins its next round when the receiver of the last one is done. Counts
are int32, zero at first and zero again at the end of a kernel. Nothing here needs a
GPU's own library or assembler, so all of it also runs in Triton's interpreter. Never
copies between ranks: remote stores would stall the tensor cores' pipeline (Flux, arXiv
2406.06858, design notes on Hopper).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fxpar.fusion.kernels import device_functions as lib


@triton.jit
def tile_of(
    turn,
    rank,
    CHUNKS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    BAND: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Return the chunk of a tile, and its row and column among the chunk's HIGH by WIDE
    tiles.

    Chunks come from this rank's own upwards, or BACKWARD, so that the own is the last:
    at any time ranks then work on chunks of different ranks. Tiles of a chunk come in
    bands of BAND rows, column by column, so that their operands stay in the cache.
    """
    place = turn // (HIGH * WIDE)
    if BACKWARD:
        place = CHUNKS - 1 - place
    inside = turn % (HIGH * WIDE)
    first = inside // (BAND * WIDE) * BAND
    rows = tl.minimum(HIGH - first, BAND)
    inside = inside % (BAND * WIDE)
    return (rank + place) % CHUNKS, first + inside % rows, inside // rows


@triton.jit
def product(
    a,
    b,
    high,
    wide,
    DEPTH: tl.constexpr,
    A_ROW: tl.constexpr,
    B_ROW: tl.constexpr,
    B_COLUMN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return the product of a tile in float32, [ROWS, COLUMNS]; ``a``, ``b``: pointers
    to its first row and column, of which ``high`` and ``wide`` are left. A's columns
    are adjacent in memory, A_ROW is its stride; B has both strides. EVEN: nothing needs
    a mask."""
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    k = tl.arange(0, STEP)
    a_at = a + (i * A_ROW + k[None, :])
    b_at = b + (k[:, None] * B_ROW + j * B_COLUMN)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, DEPTH, STEP):
        if EVEN:
            x, y = tl.load(a_at), tl.load(b_at)
        else:
            depth_left = DEPTH - start
            x = tl.load(a_at, mask=(i < high) & (k[None, :] < depth_left), other=0.0)
            y = tl.load(b_at, mask=(k[:, None] < depth_left) & (j < wide), other=0.0)
        if INTERPRETED:  # it takes bfloat16 for integers
            x, y = x.to(tl.float32), y.to(tl.float32)
        total = tl.dot(x, y, total, input_precision=PRECISION)
        a_at += STEP
        b_at += STEP * B_ROW
    return total


@triton.jit
def wait(flag):
    """Wait until a chunk is there: all threads then see what was written before its
    flag was raised."""
    while tl.atomic_cas(flag, 1, 1, sem="acquire", scope="sys") != 1:
        pass
    tl.debug_barrier()


@triton.jit
def lower(flags, count, CHUNKS: tl.constexpr, PROGRAMS: tl.constexpr):
    """Lower all flags, in the program that is the last to have waited for them."""
    tl.debug_barrier()
    if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
        for chunk in tl.static_range(CHUNKS):
            tl.atomic_xchg(flags + chunk, 0, sem="relaxed", scope="sys")
        tl.atomic_xchg(count, 0, sem="relaxed", scope="gpu")


@triton.jit
def written(flag, count, TILES: tl.constexpr):
    """Count a tile that was stored; the last one of its chunk raises the flag. Each
    count releases a program's stores and acquires those counted before, so that the
    flag releases them all."""
    tl.debug_barrier()
    if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == TILES - 1:
        tl.atomic_xchg(count, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(flag, 1, sem="release", scope="sys")


# Kernels of one program, for the second stream; and the sum of the chunks of a scatter.


@triton.jit(do_not_specialize=["rank"])
def meet(signals_ptr, rank, RANKS: tl.constexpr, REGION: tl.constexpr):
    """Meet all ranks (``device_functions.barrier``) by the first program's signals."""
    questions = lib.patience(signals_ptr, rank)
    lib.barrier(signals_ptr, rank, RANKS, REGION, questions)


@triton.jit(do_not_specialize=["chunk"])
def raise_flag(flags_ptr, chunk):
    """Raise the flag of a chunk: a kernel that sees it sees the earlier writes of this
    stream."""
    tl.debug_barrier()
    tl.atomic_xchg(flags_ptr + chunk, 1, sem="release", scope="sys")


@triton.jit(do_not_specialize=["chunk"])
def await_flag(flags_ptr, chunk):
    """Wait until a chunk is there, and lower its flag: then the stream goes on."""
    wait(flags_ptr + chunk)
    tl.atomic_xchg(flags_ptr + chunk, 0, sem="relaxed", scope="sys")


@triton.jit(do_not_specialize=["rank"])
def add_up(
    slots_ptr,
    own_ptr,
    out_ptr,
    rank,
    COUNT: tl.constexpr,
    RANKS: tl.constexpr,
    DIVISOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum ``COUNT`` elements of all ranks over ``DIVISOR``, in the order of ranks and
    in float32; this rank's are at ``own_ptr``, not in its slot."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < COUNT
    total = tl.zeros((BLOCK,), tl.float32)
    for other in tl.static_range(RANKS):
        slot = slots_ptr + tl.cast(other, tl.int64) * COUNT
        part = tl.where(other == rank, own_ptr, slot)
        total += tl.load(part + at, mask=live, other=0.0).to(tl.float32)
    total = total / DIVISOR
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=live)
