"""Matmuls with their collectives: interpreted, with somebody who copies chunks; and
compiled for sm_90a where there is no GPU; and when they are worth it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fxpar.fusion.kernels.kernel_worth import Verdict, profitable
from fxpar.fusion.kernels.matmul_kernel import (
    BIAS,
    KINDS,
    TILES,
    Gemm,
    gemm,
    tiles_of,
)
from fxpar.fusion.kernels.reductions import CannotEmit
from fxpar.fusion.kernels.run_kernels import module_of
from tests.helpers.kernels import gemm_cases as cases
from tests.helpers.kernels.ahead import TYPES, _usage
from tests.helpers.machines import ideal_gpu

triton = pytest.importorskip("triton")

F32 = 1e-5  # relative to the largest number of a result
INF = float("inf")
H100 = {"link": 4e11, "peak": 7.9e14, "memory": 3e12}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", cases.CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_product(kind: str, name: str) -> None:
    """In every round, of all ranks' chunks, and signals are as they were."""
    case = cases.CASES[name]
    rounds = cases.run(case, case.kernel(kind))
    if "bf16" in name:
        assert rounds.ulps <= 1.0
    else:
        assert rounds.error <= F32
    assert rounds.left == 0 and len(rounds.orders) == case.rounds
    if kind == "scatter" and not case.signals:
        assert rounds.orders == [[]] * 2
    elif kind == "scatter" and name.startswith("rank"):
        want = [(case.rank - 1 - i) % 4 for i in range(4)]
        assert rounds.orders == [want] * 2, "each flag rises once, and the own last"


# Kernels broken on purpose, by how it shows; the second one of a kind is slow.
NUMBERS = ("no wait", "flag before store")
MORE_NUMBERS = (
    "waits once",
    "own from others",
    "flag by first tile",
    "one count for all",
    "no flag",
)


def broken(name: str) -> cases.Comparison:
    kind, old, new = cases.BROKEN[name]
    case = cases.CASES["even"]
    return cases.run(case, cases.broken(case.kernel(kind), old, new))


def test_every_broken_kernel_is_tried() -> None:
    tried = {*NUMBERS, *MORE_NUMBERS, "no lower", "lowers early"}
    assert tried == set(cases.BROKEN)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "name",
    [*NUMBERS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_NUMBERS)],
)
def test_a_chunk_that_is_not_there_is_seen(name: str) -> None:
    assert broken(name).error == INF


@pytest.mark.interpreted
def test_flags_that_stay_are_seen() -> None:
    assert broken("no lower").left > 0


@pytest.mark.interpreted
def test_flags_that_fall_early_are_seen() -> None:
    with pytest.raises(Exception, match="nobody raises"):  # as the interpreter says it
        broken("lowers early")


ORDERS = [
    (kind, rank, *sizes)
    for kind in KINDS
    for sizes in ((1, 1, 1, 8), (2, 5, 3, 2), (4, 3, 2, 8))
    for rank in range(sizes[0])
]


@pytest.mark.interpreted
@pytest.mark.parametrize(("kind", "rank", "chunks", "high", "wide", "band"), ORDERS)
def test_tiles_come_chunk_by_chunk_and_each_once(
    kind: str, rank: int, chunks: int, high: int, wide: int, band: int
) -> None:
    got = cases.tiles(kind, rank, chunks, high, wide, band)
    each = high * wide
    want = [(rank + i) % chunks for i in range(chunks)]
    if kind == "scatter":
        want.reverse()
        assert want[-1] == rank
    assert [got[i * each][0] for i in range(chunks)] == want
    inside = [(r, c) for _, r, c in got[:each]]
    # A band of rows at a time, in it column by column.
    assert inside == sorted(
        ((r, c) for r in range(high) for c in range(wide)),
        key=lambda at: (at[0] // band, at[1], at[0]),
    )
    assert got == [[chunk, r, c] for chunk in want for r, c in inside]


# Compiled ahead.

SIZES = {"m": 8192, "n": 4096, "k": 4096, "ranks": 8}


def compiled(made: Gemm, dtype: str) -> tuple[str, str, int]:
    """PTX, what cuobjdump says of resources, and bytes shared."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(module_of(made.name, made.text), made.name)
    names = [name for name in function.arg_names if name.endswith("_ptr")]
    signs = dict.fromkeys(names, f"*{TYPES[dtype]}")
    signs |= dict.fromkeys(("flags_ptr", "counts_ptr"), "*i32")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(names))}
    constants = {"PROGRAMS": made.programs, "INTERPRETED": False}
    signs |= {"rank": "i32"} | dict.fromkeys(constants, "constexpr")
    out: Any = triton.compile(
        ASTSource(function, signs, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": made.tiles.warps, "num_stages": made.tiles.stages},
    )
    return out.asm["ptx"], _usage(out.asm["cubin"]), out.metadata.shared


SIGNALS = {
    "gather": {"acquire.sys.cas", "gpu.acq_rel.add"},
    "scatter": {"gpu.acq_rel.add", "sys.release.exch"},
}
# From what all threads of a program wrote to the count of one of them, and from the one
# that saw a flag to what all read then: there all must meet.
BETWEEN = {
    "gather": re.compile(r"acquire\.sys\.cas.*?cp\.async", re.DOTALL),
    "scatter": re.compile(
        r"st\.global\.v4\.b32(?:(?!st\.global).)*?acq_rel\.add", re.DOTALL
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "turned": {"b_stride": (1, 4096), "epilogue": BIAS},
    "uneven": {"n": 4000, "k": 4088, "epilogue": BIAS},
    "no signals": {"signals": False},
}


def check(kind: str, dtype: str, tiles: Any, options: dict[str, Any]) -> None:
    given = SIZES | options
    made = gemm(kind, dtype=dtype, programs=132, tiles=tiles, **given)
    ptx, usage, shared = compiled(made, dtype)
    assert ".target sm_90a" in ptx
    assert "STACK:0" in usage
    assert shared <= 227 << 10
    # Memory goes to the tensor cores by 16 bytes, past registers.
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", ptx)
    assert ("wgmma.mma_async" in ptx) == (dtype == "bfloat16")
    atoms = {".".join(x.split(".")[2:5]) for x in re.findall(r"atom\S+", ptx)}
    if made.signals:
        assert atoms >= SIGNALS[kind]
        between = BETWEEN[kind].search(ptx)
        assert between and "bar.sync" in between[0]
    else:
        assert not atoms


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_largest_tiles_compile(kind: str, options: str) -> None:
    check(kind, "bfloat16", TILES["bfloat16"][0], OPTIONS[options])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TILES)
def test_all_tiles_compile(kind: str, dtype: str) -> None:
    for tiles in TILES[dtype]:
        check(kind, dtype, tiles, {})


# Sizes, and what pays.


def test_tiles_are_as_large_as_fills_all_programs() -> None:
    large, *_, least = TILES["bfloat16"]
    assert tiles_of(8192, 4096, 4096, 8, "bfloat16") == large
    assert tiles_of(8192, 512, 4096, 8, "bfloat16") == TILES["bfloat16"][1]
    assert tiles_of(256, 256, 4096, 8, "bfloat16") == least
    assert tiles_of(8192, 8192, 4096, 128, "bfloat16").rows == 64
    assert large.count(129, 257) == 4


def test_grid_is_no_larger_than_tiles_or_programs() -> None:
    few = gemm("gather", 128, 64, 64, 2, "bfloat16", programs=132)
    assert few.programs == 2
    many = gemm("gather", **SIZES, dtype="bfloat16", programs=100)
    assert many.programs == 100


def test_text_is_one_for_all_ranks_and_another_for_others() -> None:
    one = gemm("scatter", **SIZES, dtype="bfloat16", programs=132)
    assert one == gemm("scatter", **SIZES, dtype="bfloat16", programs=132)
    others = [
        gemm("gather", **SIZES, dtype="bfloat16", programs=132),
        gemm("scatter", **SIZES, dtype="bfloat16", programs=132, signals=False),
        gemm("scatter", **SIZES, dtype="bfloat16", programs=132, epilogue=BIAS),
        gemm("scatter", **SIZES, dtype="float32", programs=132),
    ]
    assert len({x.name for x in (one, *others)}) == 5


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((10, 8, 8, 4, "float32"), "no 4 equal chunks"),
        ((8, 8, 0, 4, "float32"), "is empty"),
        ((8, 8, 8, 4, "float16"), "not of float32 or bfloat16"),
    ],
)
def test_no_kernel(sizes: Any, why: str) -> None:
    with pytest.raises(CannotEmit, match=why):
        gemm("gather", *sizes, programs=4)


def verdict(kind: str, m: int, n: int, k: int, ranks: int = 8, **more: Any) -> Verdict:
    return profitable(kind, m, n, k, ranks, ideal_gpu(**(H100 | more)))


def test_pays_where_moving_and_computing_take_alike() -> None:
    """And tiles of a chunk do not fill the device."""
    both = verdict("gather", 8192, 2304, 8192)
    assert both.pays
    assert 1.2 < both.serial / both.overlapped < 2
    # The other way round: the columns that are gathered are those that are summed.
    back = verdict("scatter", 8192, 8192, 2304)
    assert back.serial == both.serial
    assert both.why.startswith("1.") and "from 1729" in both.why
    moved, work = 7 / 8 * 8192 * 8192 * 2, 2.0 * 8192 * 2304 * 8192
    assert both.serial == pytest.approx(moved / H100["link"] + work / H100["peak"])


def test_does_not_pay() -> None:
    assert "one rank" in verdict("gather", 16384, 2048, 8192, 1).why
    assert "rows" in verdict("gather", 1024, 2048, 8192).why
    assert "equal chunks" in verdict("gather", 4097, 2048, 8192).why
    alone = verdict("gather", 16384, 16 * 2048, 8192)  # little to hide, a slower kernel
    wire = verdict("gather", 16384, 128, 8192)  # nothing to hide it behind
    for found in (alone, wire):
        assert not found.pays
        assert found.serial < 1.05 * found.overlapped


@pytest.mark.parametrize("kind", KINDS)
def test_overlap_is_no_better_than_it_can_be(kind: str) -> None:
    for ranks in (2, 4, 8):
        for size in (2048, 4096, 8192):
            for free in (256, 1024, 2048, 8192):
                n, k = (free, size) if kind == "gather" else (size, free)
                found = verdict(kind, size, n, k, ranks)
                matmul = 2.0 * size * n * k / H100["peak"]
                moving = found.serial - matmul
                assert found.overlapped >= max(matmul, moving)
                faster = verdict(kind, size, n, k, ranks, link=4e12)
                assert faster.overlapped <= found.overlapped
