"""When matmuls with their collectives are worth it, as it is predicted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fxpar.fusion import fused_matmul
from fxpar.fusion.kernels.kernel_worth import (
    LEAST_ROWS,
    MARGIN,
    Verdict,
    never,
    profitable,
)
from fxpar.fusion.kernels.matmul_kernel import KINDS
from fxpar.fusion.kernels.symmetric_memory import FREE
from tests.helpers.machines import ideal_gpu

pytest.importorskip("triton")

H100 = {"link": 3.7e11, "peak": 7.7e14, "memory": 3e12}
SIZES = tuple(
    itertools.product(KINDS, (2, 4, 8), (2048, 8192, 16384), range(512, 8193, 512))
)


def verdict(
    kind: str, ranks: int, m: int, free: int, other: int = 8192, **more: Any
) -> Verdict:
    """``free``: what of n and k is not moved."""
    n, k = (free, other) if kind == "gather" else (other, free)
    gpu = ideal_gpu(**(H100 | {key: more.pop(key) for key in H100 if key in more}))
    units = {"programs": 116, "units": 116 + FREE}
    return profitable(kind, m, n, k, ranks, gpu, **(units | more))


def test_it_must_win_against_both() -> None:
    found = {size: verdict(*size) for size in SIZES}
    paying = [x for x in found.values() if x.pays]
    assert 0 < len(paying) < len(found) / 4
    for size, x in found.items():
        ahead = min(x.serial, x.chunked) >= MARGIN * x.overlapped
        assert x.pays == ahead, size
        assert f"{x.chunked / x.overlapped:.2f} as chunk by chunk" in x.why


def test_chunks_whose_tiles_fill_the_device_are_left_to_others() -> None:
    """[1024, 2304] is 72 tiles of 132, [1024, 4096] 128 of them."""
    full, part = verdict("gather", 8, 8192, 4096), verdict("gather", 8, 8192, 2304)
    assert part.pays and not full.pays
    assert full.chunked < full.overlapped < full.serial


@pytest.mark.parametrize("more", [{"link": 1e9}, {"link": 1e15}])
def test_nothing_is_hidden_behind_a_link_too_slow_or_too_fast(more: Any) -> None:
    assert not any(verdict(*size, **more).pays for size in SIZES)


def test_few_rows_never_pay() -> None:
    for kind, ranks, link in itertools.product(KINDS, (2, 4, 8), (1e10, 1e11, 1e12)):
        for m in (8, 64, 512, LEAST_ROWS - 8):
            assert not verdict(kind, ranks, m, 2304, link=link).pays
            assert "rows" in never(kind, m, 2304, 8192, ranks, "bfloat16")


def test_further_weights_hide_nothing() -> None:
    """They follow in a kernel of their own, but chunk by chunk they hide copies."""
    one = verdict("gather", 8, 8192, 2304)
    more = verdict("gather", 8, 8192, 2304, further=2304)
    assert one.pays
    work = 2.0 * 8192 * 2304 * 8192 / H100["peak"]
    assert more.overlapped == pytest.approx(one.overlapped + work)
    assert more.serial == pytest.approx(one.serial + work)
    assert more.chunked > one.chunked


def test_sums_are_paid_for_by_a_scatter_alone() -> None:
    for kind in KINDS:
        fast = verdict(kind, 4, 8192, 4096, memory=1e15)
        slow = verdict(kind, 4, 8192, 4096, memory=1e12)
        assert (slow.overlapped > fast.overlapped) == (kind == "scatter")
        assert (slow.chunked > fast.chunked) == (kind == "scatter")
        assert slow.serial == fast.serial


def test_the_rung_of_known_hardware() -> None:
    given = "gather", 8192, 2304, 8192, 8, 0, "bfloat16"
    assert fused_matmul.rung_of(*given, 116, "h100").name == "signals"
    assert (
        fused_matmul.rung_of("gather", 1024, *given[2:], 116, "h100").name == "chunks"
    )
    assert fused_matmul.rung_of(*given, 116, "v100-dgx2").name == "chunks"
