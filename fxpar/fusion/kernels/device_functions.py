"""What generated kernels call: functions of Triton's language that it lacks.

In: values of a block. Out: values of the same block, in float32. What needs no
instruction of a GPU's own runs in Triton's interpreter too.

``switch_sum``: sums that the switch between GPUs makes, where memory has a multicast
address. In: 16 bytes at a time of all ranks' buffers. Out: their sums, in all ranks'
buffers. One load through the multicast address reads and adds what all ranks have
there, one store writes to all: of S bytes on W ranks S / W + S cross a GPU's link
instead of the 2 (W - 1) / W S of two shots. It needs an instruction that Triton has no
word for (``multimem``, PTX ISA 8.1), which no interpreter has; there the same bytes are
read and written rank by rank. What the switch adds up in which order it does not say:
one rank makes each sum and all get that, so that ranks hold the same bits.
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

# An output nobody reads, the address 1, what is stored 2 to 5, whether it is 6.
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
    """Sums of UNITS times 16 bytes from the unit ``first`` on, of TOTAL there are.

    ``buffers``: pointer to the addresses of all ranks' buffers, and behind them the
    multicast one. ``summands``, ``summed``: where in each the summands are and the sums
    go, in bytes. BLOCK: a power of two, at least UNITS.
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

# Questions until a rank counts as lost: of some microsecond each on a GPU, so some ten
# minutes (not measured), as long as NCCL waits; in the interpreter a minute or so.


SPINS = tl.constexpr(1 << 20 if _INTERPRETED.value else 1 << 29)
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
def sign(x):
    """1, -1 or 0; of NaN 0, as torch has it."""
    return tl.where(x > 0, 1, tl.where(x < 0, -1, 0)).to(x.dtype)


@triton.jit
def _ordered(bits):
    """Bits of a float32 as an integer in the order of the numbers, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def amax(x):
    """The largest number of a block; NaN if there is one, as torch has it: as an
    integer that comes behind infinity."""
    bits = tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))
    return _ordered(tl.max(_ordered(bits), 0)).to(tl.float32, bitcast=True)


@triton.jit
def amin(x):
    """The smallest number of a block; NaN, here before minus infinity, if there is
    one."""
    bits = tl.where(x != x, -0x400000, x.to(tl.int32, bitcast=True))
    return _ordered(tl.min(_ordered(bits), 0)).to(tl.float32, bitcast=True)


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
def patience(signals, rank):
    """How often a kernel may ask in vain, over all its barriers: not at all if an
    earlier one gave up."""
    pad = tl.load(signals + rank).to(tl.pointer_type(tl.int32))
    return tl.where(tl.load(pad) == 0, SPINS, 0)


@triton.jit
def _swap(
    places, live, old: tl.constexpr, new: tl.constexpr, order: tl.constexpr, questions
):
    """At each of the places that are ``live``, put ``new`` where ``old`` is, once it
    is; all are asked at once. Give up after ``questions``, at least one. Where
    ``old`` never was, and the questions that are left."""
    tries = tl.maximum(questions, 1)
    waits = live
    value = live * 0 + new
    while (tl.max(waits, 0) != 0) & (tries > 0):
        # What was found is not changed again: none of the places is ever -1.
        expected = tl.where(waits != 0, old, -1)
        previous = tl.atomic_cas(places, expected, value, sem=order, scope="sys")
        waits = tl.where(previous != old, waits, 0)
        tries -= 1
    return waits, tl.minimum(questions, tries)


@triton.jit
def barrier(signals, rank, RANKS: tl.constexpr, REGION: tl.constexpr, questions):
    """Wait for the program of the same number on every rank: what each wrote before is
    then seen by all. Gives up after ``questions`` (``patience``), says so for the
    host, and returns how many are left: then what follows computes with anything.

    ``signals``: pointer to the addresses of all ranks' pads, which are zero at first: a
    head (``symmetric_memory.HEAD``), and of each program one int32 for each rank that
    signals. A signal is raised from 0 to 1 by its sender and lowered by its receiver,
    so the pads are zero again in the end. Each rank is a thread's, so that of any
    number of ranks it takes one round trip to the others' memory and one to the own
    (``implementations.TRIPS``). Grids must be equal on all ranks, and all their
    programs run at a time. It is the handshake of torch's symmetric memory
    (CUDASymmetricMemory), without assembler.
    """
    tl.debug_barrier()  # what all threads wrote comes before what one releases
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
