"""Sums that the switch between GPUs makes, where memory has a multicast address.

In: 16 bytes at a time of all ranks' buffers. Out: their sums, in all ranks' buffers.
One load through the multicast address reads and adds what all ranks have there, one
store writes to all: of S bytes on W ranks S / W + S cross a GPU's link instead of the
2 (W - 1) / W S of two shots. It needs an instruction that Triton has no word for
(``multimem``, PTX ISA 8.1), which no interpreter has; there the same bytes are read
and written rank by rank. What the switch adds up in which order it does not say: one
rank makes each sum and all get that, so that ranks hold the same bits.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

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
    @live multimem.ld_reduce.relaxed.sys.global.add{} {{$0, $1, $2, $3}}, [$4];
}}
"""
_LOAD_F32 = tl.constexpr(_LOAD.format(".v4.f32"))
_LOAD_BF16 = tl.constexpr(_LOAD.format(".acc::f32.v4.bf16x2"))

# An output nobody reads, the address 1, what is stored 2 to 5, whether it is 6.
_STORE = tl.constexpr("""
{
    .reg .pred live;
    setp.ne.u32 live, $6, 0;
    @live multimem.st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5};
    mov.u32 $0, 0;
}
""")


@triton.jit
def peer(buffers, rank, offset, dtype: tl.constexpr):
    place = tl.load(buffers + rank) + offset
    return tl.multiple_of(place.to(tl.pointer_type(dtype)), 16)


@triton.jit
def switch_sum(
    buffers,
    given,
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
    multicast one. ``given``, ``summed``: where in each the summands are and the sums
    go, in bytes. BLOCK: a power of two, at least UNITS.
    """
    if _INTERPRETED:
        PER: tl.constexpr = 128 // dtype.primitive_bitwidth
        at = tl.arange(0, BLOCK * PER)
        live = (at < UNITS * PER) & (first * PER + at < TOTAL * PER)
        at += first * PER
        total = tl.zeros((BLOCK * PER,), tl.float32)
        for rank in tl.static_range(RANKS):
            there = peer(buffers, rank, given, dtype) + at
            total += tl.load(there, mask=live, other=0).to(tl.float32)
        for rank in tl.static_range(RANKS):
            there = peer(buffers, rank, summed, dtype) + at
            tl.store(there, total.to(dtype), mask=live)
    else:
        lane = tl.arange(0, BLOCK)
        live = ((lane < UNITS) & (first + lane < TOTAL)).to(tl.int32)
        at = tl.load(buffers + RANKS) + tl.cast(first + lane, tl.int64) * 16
        LOAD: tl.constexpr = _LOAD_F32 if dtype == tl.float32 else _LOAD_BF16
        a, b, c, d = tl.inline_asm_elementwise(
            LOAD,
            "=r,=r,=r,=r,l,r",
            [at + given, live],
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
