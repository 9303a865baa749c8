"""Defines functions that generated kernels call and that Triton's language lacks.

In: values of a block. Out: values of the same block, in float32. Functions that need no
special instruction of a GPU run in Triton's interpreter too. Never allocates memory.

``switch_sum``: sums made by the switch between GPUs, where memory has a multicast
address. In: 16 bytes at a time of all ranks' buffers. Out: their sums, in all ranks'
buffers. One load through the multicast address reads and adds the values of all ranks,
one store writes to all: of S bytes on W ranks S / W + S cross a GPU's link instead of
the 2 (W - 1) / W S of two shots. It needs an instruction that Triton does not have
(``multimem``, PTX ISA 8.1), nor its interpreter; there the same bytes are read and
written rank by rank. The order in which the switch adds is unknown: one rank makes each
sum and all get that, so that ranks hold the same bits.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from fxpar.fusion.kernels import symmetric_memory

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# Outputs 0 to 3, the address 4, whether this lane counts 5.
_LOAD = """
{{
    .reg .pred live;
    setp.ne.u32 live, $5, 0;
    mov.u32 $0, 0;
    mov.u32 $1, 0;
    mov.u32 $2, 0;
    mov.u32 $3, 0;
    @live ld_reduce.relaxed.sys.global.add{} {{$0, $1, $2, $3}}, [$4];
}}
"""

_LOAD_F32 = tl.constexpr(_LOAD.format(".v4.f32"))
_LOAD_BF16 = tl.constexpr(_LOAD.format(".acc::f32.v4.bf16x2"))

# An output nobody reads, the address 1, the stored values 2 to 5, whether this lane
# counts 6.
_STORE = tl.constexpr("""
{
    .reg .pred live;
    setp.ne.u32 live, $6, 0;
    @live st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5};
    mov.u32 $0, 0;
}
""")


@triton.jit
def switch_sum(
    buffers,
    summands,
    summed,
    first,
    RANKS: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOTAL: tl.constexpr,
    dtype: tl.constexpr,
):
    """Sum UNITS times 16 bytes from the unit ``first`` on, of TOTAL units.

    ``buffers``: pointer to the addresses of all ranks' buffers, and after them the
    multicast one. ``summands``, ``summed``: offsets in each, in bytes, of the summands
    and of the sums. BLOCK: a power of two, at least UNITS.
    """
    if _INTERPRETED:
        PER: tl.constexpr = 128 // dtype.primitive_bitwidth
        at = tl.arange(0, BLOCK * PER)
        live = (at < UNITS * PER) & (first * PER + at < TOTAL * PER)
        at += first * PER
        total = tl.zeros((BLOCK * PER,), tl.float32)
        for rank in tl.static_range(RANKS):
            pointers = peer(buffers, rank, summands, dtype) + at
            total += tl.load(pointers, mask=live, other=0).to(tl.float32)
        for rank in tl.static_range(RANKS):
            pointers = peer(buffers, rank, summed, dtype) + at
            tl.store(pointers, total.to(dtype), mask=live)
    else:
        lane = tl.arange(0, BLOCK)
        live = ((lane < UNITS) & (first + lane < TOTAL)).to(tl.int32)
        at = tl.load(buffers + RANKS) + tl.cast(first + lane, tl.int64) * 16
        LOAD: tl.constexpr = _LOAD_F32 if dtype == tl.float32 else _LOAD_BF16
        a, b, c, d = tl.inline_asm_elementwise(
            LOAD,
            "=r,=r,=r,=r,l,r",
            [at + summands, live],
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=False,
            pack=1,
        )
        tl.inline_asm_elementwise(
            _STORE,
            "=r,l,r,r,r,r,r",
            [at + summed, a, b, c, d, live],
            dtype=tl.uint32,
            is_pure=False,
            pack=1,
        )


HEAD = tl.constexpr(symmetric_memory.HEAD)

# Polls until a rank counts as lost: of some microsecond each on a GPU, so some ten
# minutes (not measured), as long as NCCL waits; in the interpreter a minute or so.


SPINS = tl.constexpr(1 << 20 if _INTERPRETED.value else 1 << 29)
SCALE = tl.constexpr(4.6566127342e-10)  # the largest that keeps 2**31 - 1 below 1


@triton.jit
def tanh(x):
    """Return tanh by the sigmoid; near zero, where that cancels, by its series."""
    s = x * x
    series = 0.13333333333333333 + s * (-0.05396825396825397 + s * 0.021869488536155203)
    series = x * (1.0 + s * (-0.3333333333333333 + s * series))
    return tl.where(s < 0.0625, series, 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0)


@triton.jit
def sigmoid(x):
    """Return ``1 / (1 + exp(-x))``."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def sign(x):
    """Return 1, -1 or 0; for NaN 0, as torch does."""
    return tl.where(x > 0, 1, tl.where(x < 0, -1, 0)).to(x.dtype)


@triton.jit
def _ordered(bits):
    """Return the bits of a float32 as an integer in the order of the numbers, or
    back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def amax(x):
    """Return the largest number of a block; NaN if there is one, as in torch: as an
    integer it comes after infinity."""
    bits = tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))
    return _ordered(tl.max(_ordered(bits), 0)).to(tl.float32, bitcast=True)


@triton.jit
def amin(x):
    """Return the smallest number of a block; NaN if there is one: here it comes before
    minus infinity."""
    bits = tl.where(x != x, -0x400000, x.to(tl.int32, bitcast=True))
    return _ordered(tl.min(_ordered(bits), 0)).to(tl.float32, bitcast=True)


@triton.jit
def _uniform(word):
    """Return 31 bits of a Philox word as a number in [0, 1)."""
    x = word.to(tl.int32, bitcast=True)
    return tl.where(x < 0, -x - 1, x) * SCALE


@triton.jit
def rand_cpp(seed, index):
    """Return the numbers of Inductor's C++: half the seed, and a counter for each
    element."""
    at = tl.cast(index, tl.uint32)
    zero = at * 0
    word, _, _, _ = tl.philox(seed & 0xFFFFFFFF, at, zero, zero, zero)
    return (word & 0x7FFFFFFF).to(tl.float32) * SCALE


@triton.jit
def rand_triton_1(seed, index):
    """Return the numbers of Inductor's Triton up to torch 2.12: a counter for each
    element."""
    at = tl.cast(index, tl.uint32)
    zero = at * 0
    word, _, _, _ = tl.philox(seed, at, zero, zero, zero)
    return _uniform(word)


@triton.jit
def rand_triton_4(seed, index):
    """Return the numbers of Inductor's Triton from torch 2.13: four neighbours share a
    counter."""
    at = tl.cast(index, tl.uint32)
    lane = at & 3
    zero = at * 0
    a, b, c, d = tl.philox(seed, at >> 2, zero, zero, zero)
    low = tl.where(lane == 0, a, b)
    high = tl.where(lane == 2, c, d)
    return _uniform(tl.where(lane < 2, low, high))


@triton.jit
def peer(buffers, rank, offset, dtype: tl.constexpr):
    """Return a pointer to ``dtype``, ``offset`` bytes into the buffer of a rank.
    ``buffers``: pointer to the addresses of all ranks' buffers; offsets are multiples
    of 16 bytes."""
    place = tl.load(buffers + rank) + offset
    return tl.multiple_of(place.to(tl.pointer_type(dtype)), 16)


@triton.jit
def patience(signals, rank):
    """Return how often a kernel may poll in vain, over all its barriers: 0 if an
    earlier one gave up."""
    pad = tl.load(signals + rank).to(tl.pointer_type(tl.int32))
    return tl.where(tl.load(pad) == 0, SPINS, 0)


@triton.jit
def _swap(
    places, live, old: tl.constexpr, new: tl.constexpr, order: tl.constexpr, questions
):
    """At each of the places that are ``live``, replace ``old`` by ``new`` once it is
    there; all are polled at once. Give up after ``questions`` polls, at least one.
    Return the lanes where ``old`` never was, and the polls that are left."""
    tries = tl.maximum(questions, 1)
    waits = live
    value = live * 0 + new
    while (tl.max(waits, 0) != 0) & (tries > 0):
        # A place that was swapped is not changed again: none of the places is ever -1.
        expected = tl.where(waits != 0, old, -1)
        previous = tl.atomic_cas(places, expected, value, sem=order, scope="sys")
        waits = tl.where(previous != old, waits, 0)
        tries -= 1
    return waits, tl.minimum(questions, tries)


@triton.jit
def barrier(signals, rank, RANKS: tl.constexpr, REGION: tl.constexpr, questions):
    """Wait for the program of the same number on every rank: all then see what each
    wrote before. Give up after ``questions`` polls (``patience``), report that to the
    host, and return how many are left; after giving up, later results are undefined.

    ``signals``: pointer to the addresses of all ranks' pads, which are zero at first: a
    head (``symmetric_memory.HEAD``), and for each program one int32 for each rank that
    signals. A signal is raised from 0 to 1 by its sender and lowered by its receiver,
    so the pads are zero again in the end. Each rank has its own thread, so that any
    number of ranks take one round trip to the others' memory and one to the own
    (``implementations.TRIPS``). Grids must be equal on all ranks, and all their
    programs run at a time. It is the handshake of torch's symmetric memory
    (CUDASymmetricMemory), without assembler.
    """
    tl.debug_barrier()  # writes of all threads come before the release by one
    first = HEAD + tl.program_id(0) * RANKS
    lane = tl.arange(0, triton.next_power_of_2(RANKS))
    live = (lane < RANKS).to(tl.int32)
    other = tl.minimum(lane, RANKS - 1)
    pad = tl.load(signals + rank).to(tl.pointer_type(tl.int32))
    pads = tl.load(signals + other).to(tl.pointer_type(tl.int32))
    before = questions
    deaf, questions = _swap(pads + (first + rank), live, 0, 1, "release", questions)
    mute, questions = _swap(pad + first + other, live, 1, 0, "acquire", questions)
    missed = tl.max(tl.maximum(deaf, mute) * (RANKS - lane), 0)
    if (missed != 0) & (before > 0):
        tl.store(pad, RANKS + 1 - missed)  # the first of them, plus one
        tl.store(pad + 1, REGION)
    tl.debug_barrier()
    return questions
