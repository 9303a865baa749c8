"""Defines random ops whose numbers do not depend on the mesh.

Inductor draws element i of a tensor as a function of a seed and of i. The ops here draw
a slice of that tensor: same seed, index in the *global* tensor. So a shard of a dropout
mask is the slice of the one-device mask, bit for bit.

In: a seed, the global size, and the size and offset of the slice. Out: its numbers.
``fxpar::random`` and ``fxpar::randint`` run eagerly (Philox 4x32 in int64 arithmetic)
and, after ``register_lowering``, are compiled by Inductor. ``fxpar::seeds`` draws seeds
as compiled code does; the other ops never read a generator.

``rand`` and ``randint`` on CPU equal Inductor's to the last bit; ``randn`` up to one
unit in the last place in half a percent of the numbers, where libm's ``logf`` is not
correctly rounded. On CUDA Inductor itself has two streams: one-dimensional kernels of
torch 2.13 take four neighbours from one Philox counter, others one. The code here takes
four in every kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxpar import _torch

# Ops that draw by index, by the names of Inductor's: the number of its arguments, which
# ours take too, before the global size and the offset; and which of them is the size.
BY_INDEX = {"random": (3, 0), "randint": (4, 2)}

_WORD = 0xFFFFFFFF
_SCALE = 4.6566127342e-10  # the largest float32 that keeps 2**31 - 1 below 1


@torch.library.custom_op(
    "fxpar::seeds", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def seeds(count: int, device: torch.device) -> torch.Tensor:
    """Draw ``count`` seeds from the default generator, as code compiled by Inductor
    does; ``prims.inductor_seeds`` run eagerly draws from another range."""
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, [count], device=device)


@seeds.register_fake
def _(count, device):
    return torch.empty([count], dtype=torch.int64, device=device)


@torch.library.custom_op("fxpar::moved_seeds", mutates_args=())
def moved_seeds(seeds: torch.Tensor, step: int) -> torch.Tensor:
    """Return ``seeds + step``. An op of its own, since Inductor reads seeds from memory
    only."""
    return seeds + step


@moved_seeds.register_fake
def _(seeds: torch.Tensor, step: int) -> torch.Tensor:
    return torch.empty_like(seeds)


@torch.library.custom_op("fxpar::random", mutates_args=())
def random(
    size: Sequence[int],
    seed: torch.Tensor,
    mode: str,
    global_size: Sequence[int],
    offset: Sequence[int],
) -> torch.Tensor:
    """Return the slice of ``size`` at ``offset`` of Inductor's
    ``inductor_random(global_size, seed, mode)``.

    ``mode``: "rand" or "randn". ``seed``: one int64. The result is float32, on the
    seed's device.
    """
    linear = _linear(size, global_size, offset, seed.device)
    return _stream(seed.device.type).draw(_Eager, mode, linear, seed)


@random.register_fake
def _(size, seed, mode, global_size, offset):
    return torch.empty(size, dtype=torch.float32, device=seed.device)


@torch.library.custom_op("fxpar::randint", mutates_args=())
def randint(
    low: int,
    high: int,
    size: Sequence[int],
    seed: torch.Tensor,
    global_size: Sequence[int],
    offset: Sequence[int],
) -> torch.Tensor:
    """Return the slice of ``size`` at ``offset`` of Inductor's
    ``inductor_randint(low, high, global_size, seed)``."""
    linear = _linear(size, global_size, offset, seed.device)
    key = _stream(seed.device.type).key(seed)
    first, second, *_ = _philox(linear & _WORD, *key)
    return _modulo(first | (second << 32), high - low) + low


@randint.register_fake
def _(low, high, size, seed, global_size, offset):
    return torch.empty(size, dtype=torch.int64, device=seed.device)


def _strides(size: Sequence[Any]) -> list[Any]:
    """Return the strides of a contiguous tensor."""
    strides = [1] * len(size)
    for i in range(len(size) - 2, -1, -1):
        strides[i] = strides[i + 1] * size[i + 1]
    return strides


def _linear(
    size: Sequence[int],
    global_size: Sequence[int],
    offset: Sequence[int],
    device: torch.device,
) -> torch.Tensor:
    """Return the index of each element of the slice in the flat global tensor."""
    out = torch.zeros(list(size), dtype=torch.int64, device=device)
    for dim, stride in enumerate(_strides(global_size)):
        steps = torch.arange(size[dim], device=device) + offset[dim]
        out += (steps * stride).view([-1] + [1] * (len(size) - dim - 1))
    return out


class _Eager:
    """Is the arithmetic on tensors, for code shared with the lowering."""

    where = staticmethod(torch.where)
    log, sqrt = staticmethod(torch.log), staticmethod(torch.sqrt)
    cos, sin = staticmethod(torch.cos), staticmethod(torch.sin)

    @staticmethod
    def real(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float32)


def _philox(counter: Any, key0: Any, key1: Any) -> tuple[Any, Any, Any, Any]:
    """Return four random words; words are int64 between 0 and 2**32 - 1.

    The product of two words fits 64 bits, so that wrapped int64 products hold the right
    bits, and the sign bits that a shift brings in are masked away.
    """
    c0, c1, c2, c3 = counter, counter & 0, counter & 0, counter & 0
    for _ in range(10):
        p0, p2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = (p2 >> 32 & _WORD) ^ c1 ^ key0, (p0 >> 32 & _WORD) ^ c3 ^ key1
        c1, c3 = p2 & _WORD, p0 & _WORD
        key0, key1 = key0 + 0x9E3779B9 & _WORD, key1 + 0xBB67AE85 & _WORD
    return c0, c1, c2, c3


def _modulo(x: torch.Tensor, n: int) -> torch.Tensor:
    """Return ``x % n``, the bits of ``x`` read as unsigned."""
    half = x >> 1 & 0x7FFFFFFFFFFFFFFF
    remainder = x - half // n * 2 * n
    return torch.where((remainder < 0) | (remainder >= n), remainder - n, remainder)


def _pick(xp: Any, lane: Any, values: Sequence[Any]) -> Any:
    """Return ``values[lane]``, with as many values as lanes."""
    out = values[0]
    for i, value in enumerate(values[1:], 1):
        out = xp.where(lane == i, value, out)
    return out


class _Stream:
    """Turns Philox words into numbers as generated C++ does."""

    lanes = 1  # neighbours that share a counter

    def key(self, seed: Any) -> tuple[Any, Any]:
        """Return the key of a seed, of which 32 bits are used."""
        low = seed & _WORD
        return low, low & 0

    def draw(self, xp: Any, mode: str, linear: Any, seed: Any) -> Any:
        """Return the numbers for flat indices; these wrap at 32 bits, as in kernels."""
        counter = (linear & _WORD) >> int(math.log2(self.lanes))
        words = _philox(counter, *self.key(seed))
        return getattr(self, mode)(xp, words, linear & (self.lanes - 1))

    def uniform(self, xp: Any, word: Any) -> Any:
        return xp.real(word & 0x7FFFFFFF) * _SCALE

    def rand(self, xp: Any, words: Sequence[Any], lane: Any) -> Any:
        """Return uniform numbers."""
        return self.uniform(xp, _pick(xp, lane, words[: self.lanes]))

    def randn(self, xp: Any, words: Sequence[Any], lane: Any) -> Any:
        """Return normal numbers: the logarithm is float32, rounded from float64 here;
        the rest is float64."""
        u, v = (1 - self.uniform(xp, x) for x in words[:2])
        log = xp.real(xp.log(u.double())).double()
        return xp.real(xp.sqrt(-2.0 * log) * xp.cos(2.0 * math.pi * v.double()))


class _Triton(_Stream):
    """Turns Philox words into numbers as generated Triton does."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes

    def key(self, seed: Any) -> tuple[Any, Any]:
        return seed & _WORD, seed >> 32 & _WORD

    def uniform(self, xp: Any, word: Any) -> Any:
        return xp.real(xp.where(word >= 1 << 31, word ^ _WORD, word)) * _SCALE

    def randn(self, xp: Any, words: Sequence[Any], lane: Any) -> Any:
        uniform = [self.uniform(xp, word) for word in words]
        u = _pick(xp, lane >> 1, [uniform[0], uniform[2]][: max(self.lanes // 2, 1)])
        v = _pick(xp, lane >> 1, [uniform[1], uniform[3]][: max(self.lanes // 2, 1)])
        radius = xp.sqrt(xp.log(xp.where(u < 1e-7, u * 0 + 1e-7, u)) * -2.0)
        turn = v * (2 * math.pi)
        waves = [xp.cos(turn), xp.sin(turn)][: min(self.lanes, 2)]
        return radius * _pick(xp, lane & 1, waves)


@functools.cache
def _stream(device: str) -> _Stream:
    is_cpu = device == "cpu"
    return _Stream() if is_cpu else _Triton(_torch.inductor.triton_random_lanes())


def _operator(name: str, dtype: torch.dtype | None = None) -> Callable[..., Any]:
    """Return a method that applies an op of Inductor. ``dtype``: of the result, if not
    that of the operands."""

    def apply(self: _InductorValue, other: Any) -> _InductorValue:
        ops, own = self.ops, self.dtype
        is_value = isinstance(other, _InductorValue)
        value = other.value if is_value else ops.constant(other, own)
        return _InductorValue(ops, getattr(ops, name)(self.value, value), dtype or own)

    return apply


class _InductorValue:
    """Is an Inductor value with the operators of a tensor that the shared code uses."""

    def __init__(self, ops: Any, value: Any, dtype: torch.dtype = torch.int64) -> None:
        self.ops, self.value, self.dtype = ops, value, dtype

    __add__, __mul__ = _operator("add"), _operator("mul")
    __and__, __xor__ = _operator("bitwise_and"), _operator("bitwise_xor")
    __rshift__ = _operator("bitwise_right_shift")
    __lt__, __ge__ = _operator("lt", torch.bool), _operator("ge", torch.bool)
    __eq__ = _operator("eq", torch.bool)
    __hash__ = None  # type: ignore[assignment]


class _Lowered:
    """Is the arithmetic on Inductor's values, as ``_Eager`` is on tensors."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops

    def __getattr__(self, name: str) -> Callable[[_InductorValue], _InductorValue]:
        fn = getattr(self.ops, name)
        return lambda x: _InductorValue(self.ops, fn(x.value), x.dtype)

    def where(
        self, condition: _InductorValue, x: _InductorValue, y: _InductorValue
    ) -> _InductorValue:
        value = self.ops.where(condition.value, x.value, y.value)
        return _InductorValue(self.ops, value, x.dtype)

    def real(self, x: _InductorValue) -> _InductorValue:
        value = self.ops.to_dtype(x.value, torch.float32)
        return _InductorValue(self.ops, value, torch.float32)


@functools.cache
def register_lowering() -> None:
    """Register Inductor lowerings of both ops; needed before it compiles either."""
    register, pointwise, ops = _torch.inductor_lowerings.inductor_lowering()

    def lower(size, seed, global_size, offset, dtype, draw):
        """Return a realized buffer: a reader that drew again could index otherwise."""
        strides, load = _strides(global_size), seed.make_loader()

        def inner(index):
            steps = zip(index, offset, strides, strict=True)
            return draw(load([]), sum((i + o) * s for i, o, s in steps))

        buffer = pointwise.create(
            device=seed.get_device(), dtype=dtype, inner_fn=inner, ranges=[*size]
        )
        buffer.realize()
        return buffer

    @register(torch.ops.fxpar.random.default, type_promotion_kind=None)
    def lower_random(size, seed, mode, global_size, offset):
        stream = _stream(seed.get_device().type)

        def draw(seed, linear):
            if stream.lanes == 1:
                return getattr(ops, mode)(seed, ops.index_expr(linear, torch.int32))
            # Inductor's own op assumes that neighbours in a kernel are neighbours in
            # the global tensor, which is wrong for a slice.
            at = _InductorValue(ops, ops.index_expr(linear, torch.int64))
            return stream.draw(_Lowered(ops), mode, at, _InductorValue(ops, seed)).value

        return lower(size, seed, global_size, offset, torch.float32, draw)

    @register(torch.ops.fxpar.randint.default, type_promotion_kind=None)
    def lower_randint(low, high, size, seed, global_size, offset):
        def draw(seed, linear):
            at = ops.index_expr(linear, torch.int32)
            bounds = [
                _torch.inductor_lowerings.inductor_integer(ops, n, torch.int64)
                for n in (low, high)
            ]
            return ops.randint64(seed, at, *bounds)

        return lower(size, seed, global_size, offset, torch.int64, draw)
