"""Collectives of dtypes that gloo or NCCL do not send, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxpar
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.usefixtures("propagated")

DTYPES = [
    torch.bool,
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]
# Of these torch has a sum, or a largest.
SUMMED = [torch.int16, torch.complex64, torch.complex128]


def sample(dtype: torch.dtype) -> torch.Tensor:
    """Two rows of equal halves would hide a wrong part: all values differ in a row."""
    x = torch.tensor([[0, 1, 2, 3], [250, 40, 6, 255]])
    if dtype.is_complex:
        return x.to(dtype) * (1 + 2j) + 3j
    if dtype is torch.int16:
        return (x * 127).to(dtype)
    return x.to(dtype)


def gathered(x: torch.Tensor) -> torch.Tensor:
    return fxpar.constrain(fxpar.constrain(x, "dp", None), None, None)


def exchanged(x: torch.Tensor) -> torch.Tensor:
    y = fxpar.constrain(x, "dp", None)
    y = y.conj() if x.dtype.is_complex else y
    return fxpar.constrain(fxpar.constrain(y, None, "dp"), None, None)


def summed(x: torch.Tensor) -> torch.Tensor:
    """Wraps around as on one device."""
    x = fxpar.constrain(x, "dp", None)
    return fxpar.constrain((x * 100).sum(0, dtype=x.dtype), None)


def scattered(x: torch.Tensor) -> torch.Tensor:
    x = fxpar.constrain(x, "dp", None)
    part = fxpar.constrain((x * 100).sum(0, dtype=x.dtype), "dp")
    return fxpar.constrain(part, None)


def multiplied(x: torch.Tensor) -> torch.Tensor:
    x = fxpar.constrain(x, "dp", None)
    return fxpar.constrain((x - 2).prod(0, dtype=x.dtype), None)


def rolled(x: torch.Tensor) -> torch.Tensor:
    return fxpar.constrain(torch.roll(fxpar.constrain(x, "dp", None), 1, 0), None, None)


MOVED = (gathered, exchanged, rolled)
CASES = [(fn, dtype) for dtype in DTYPES for fn in MOVED] + [
    (fn, dtype) for dtype in SUMMED for fn in (summed, scattered, multiplied)
]


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def extremes(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out: list[torch.Tensor] = []
    for x in inputs:
        x = fxpar.constrain(x, "dp", None)
        out += x.amax(0), x.amin(0), x.amax(), x.amin(), x.abs().amax(0)
    return tuple(fxpar.constrain(y, *[None] * y.dim()) for y in out)


def wrong_extremes(codegen: str) -> list[str]:
    """Dtypes whose largest or smallest number is not, bit for bit, what one device
    gives: NaN if there is one, whichever rank has it, and whatever its sign."""
    nan, inf = float("nan"), float("inf")
    x = torch.tensor(
        [
            [nan, 1.5, nan, inf, 0.25, -3.0, -inf, -0.75],
            [1.0, -nan, -nan, nan, -2.0, -1.5, -inf, inf],
        ]
    )
    wrong = []
    for dtype in FLOATS:
        rows = [each.to(dtype) for each in (x, x.flip(0), x[:, 3:])]
        torch._dynamo.reset()
        options = {"mesh": "dp=2", "codegen": codegen}
        fn = torch.compile(extremes, backend="fxpar", options=options)
        for got, want in zip(fn(*rows), extremes(*rows), strict=True):
            same = torch.equal(got.nan_to_num(99), want.nan_to_num(99))
            if got.dtype != want.dtype or not same:
                wrong.append(f"{dtype}: {got.tolist()}, not {want.tolist()}")
    return wrong


def outcomes(codegen: str) -> list[str]:
    """Cases that are not, bit for bit, what one device gives."""
    wrong = []
    for dtype in DTYPES:
        fns = [fn for fn, of in CASES if of is dtype and _runs(fn, dtype)]

        def every(x: torch.Tensor, fns: Any = fns) -> list[torch.Tensor]:
            return [fn(x) for fn in fns]

        torch._dynamo.reset()
        x = sample(dtype)
        options = {"mesh": "dp=2", "codegen": codegen}
        results = torch.compile(every, backend="fxpar", options=options)(x)
        for fn, got, want in zip(fns, results, every(x), strict=True):
            if got.dtype != want.dtype or not _same(got, want):
                wrong.append(f"{fn.__name__} {dtype}: {got.tolist()}")
    return wrong


def _runs(fn: Callable[..., torch.Tensor], dtype: torch.dtype) -> bool:
    try:
        fn(sample(dtype))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, also where comparing them is not implemented."""
    if a.dtype.is_complex:
        return torch.equal(a, b)
    return torch.equal(a.to(torch.float64), b.to(torch.float64))


@pytest.mark.parametrize(
    "codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_every_dtype_is_sent(codegen: str) -> None:
    assert sum(_runs(*case) for case in CASES) >= 28
    assert shared_pool(2).run(outcomes, codegen, timeout=600.0) == [[], []]


@pytest.mark.parametrize(
    "codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_extremes_keep_nan(codegen: str) -> None:
    assert shared_pool(2).run(wrong_extremes, codegen, timeout=600.0) == [[], []]
