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
