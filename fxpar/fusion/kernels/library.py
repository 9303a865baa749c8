"""What generated kernels call: functions of Triton's language that it lacks.

Nothing here needs a GPU's own library or assembler, so all of it also runs in Triton's
interpreter. In: values of a block. Out: values of the same block, in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCALE = tl.constexpr(4.6566127342e-10)  # the largest that keeps 2**31 - 1 below 1


@triton.jit
def tanh(x):
    """By the sigmoid; near zero, where that cancels, by its series."""
    s = x * x
    series = 0.13333333333333333 + s * (-0.05396825396825397 + s * 0.021869488536155203)
    series = x * (1.0 + s * (-0.3333333333333333 + s * series))
    return tl.where(s < 0.0625, series, 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0)


@triton.jit
def sigmoid(x):
    """``1 / (1 + exp(-x))``."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _uniform(word):
    """31 bits of a Philox word as a number in [0, 1)."""
    x = word.to(tl.int32, bitcast=True)
    return tl.where(x < 0, -x - 1, x) * SCALE


@triton.jit
def rand_cpp(seed, index):
    """Numbers of Inductor's C++: half the seed, and a counter for each element."""
    at = tl.cast(index, tl.uint32)
    zero = at * 0
    word, _, _, _ = tl.philox(seed & 0xFFFFFFFF, at, zero, zero, zero)
    return (word & 0x7FFFFFFF).to(tl.float32) * SCALE


@triton.jit
def rand_triton_1(seed, index):
    """Numbers of Inductor's Triton up to torch 2.12: a counter for each element."""
    at = tl.cast(index, tl.uint32)
    zero = at * 0
    word, _, _, _ = tl.philox(seed, at, zero, zero, zero)
    return _uniform(word)


@triton.jit
def rand_triton_4(seed, index):
    """Numbers of Inductor's Triton from torch 2.13: four neighbours share a counter."""
    at = tl.cast(index, tl.uint32)
    lane = at & 3
    zero = at * 0
    a, b, c, d = tl.philox(seed, at >> 2, zero, zero, zero)
    low = tl.where(lane == 0, a, b)
    high = tl.where(lane == 2, c, d)
    return _uniform(tl.where(lane < 2, low, high))


@triton.jit
def peer(buffers, rank, offset, dtype: tl.constexpr):
    """Where ``offset`` bytes into the buffer of a rank are, as a pointer to ``dtype``.
    ``buffers``: pointer to the addresses of all ranks' buffers; offsets are multiples
    of 16 bytes."""
    place = tl.load(buffers + rank) + offset
    return tl.multiple_of(place.to(tl.pointer_type(dtype)), 16)


@triton.jit
def barrier(signals, rank, RANKS: tl.constexpr):
    """Wait for the program of the same number on every rank: what each wrote before is
    then seen by all.

    ``signals``: pointer to the addresses of all ranks' pads, which are zero at first:
    of each program one int32 for each rank that signals. A signal is raised from 0 to 1
    by its sender and lowered by its receiver, so the pads are zero again in the end.
    Grids must be equal on all ranks, and all their programs run at a time. It is the
    handshake of torch's symmetric memory (CUDASymmetricMemory), without assembler.
    """
    tl.debug_barrier()  # what all threads wrote comes before what one releases
    first = tl.program_id(0) * RANKS
    for other in tl.static_range(RANKS):
        pad = tl.load(signals + other).to(tl.pointer_type(tl.int32))
        while tl.atomic_cas(pad + first + rank, 0, 1, sem="release", scope="sys") != 0:
            pass
    own = tl.load(signals + rank).to(tl.pointer_type(tl.int32)) + first
    for other in tl.static_range(RANKS):
        while tl.atomic_cas(own + other, 1, 0, sem="acquire", scope="sys") != 1:
            pass
    tl.debug_barrier()
