"""How collectives of a region run, decided alike on all ranks: what more bytes, ranks
and a slower link do to it, and what falls to NCCL."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fxpar.fusion.kernels import implementations
from fxpar.fusion.kernels.implementations import GroupFacts, Rung, choose
from fxpar.fusion.kernels.region_program import RegionProgram
from tests.helpers.kernels.collective_cases import (
    all_gather,
    all_reduce,
    reduce_scatter,
)
from tests.helpers.kernels.compare_kernels import outlined, traced

c10d = torch.ops._c10d_functional
KIB, MIB = 1 << 10, 1 << 20
ORDER = ("one_shot", "two_shot", "nccl")
SIZES = [16 << i for i in range(24)]


def program(fn: Any, ranks: int, *given: torch.Tensor) -> RegionProgram:
    found, _ = outlined(traced(fn, given))
    return dataclasses.replace(found.program, ranks=ranks)


def reduced(
    ranks: int, nbytes: int, dtype: torch.dtype = torch.bfloat16
) -> RegionProgram:
    return dataclasses.replace(_reduced(nbytes, dtype), ranks=ranks)


@functools.cache
def _reduced(nbytes: int, dtype: torch.dtype) -> RegionProgram:
    x = torch.empty(nbytes // dtype.itemsize, dtype=dtype, device="meta")
    return program(lambda x: all_reduce(x) * 2, 1, x)


def on(found: RegionProgram, **facts: Any) -> Rung:
    given = {"ranks": found.ranks, "kernels": True, "shared": True} | facts
    return choose(found, GroupFacts(**given))


def by_size(ranks: int, **facts: Any) -> list[str]:
    return [on(reduced(ranks, nbytes), **facts).name for nbytes in SIZES]


@pytest.mark.parametrize("ranks", implementations.RANKS)
def test_more_bytes_never_take_fewer_steps(ranks: int) -> None:
    """From one shot to two to NCCL; to NCCL right behind the bound, and not before."""
    names = by_size(ranks)
    assert names == sorted(names, key=ORDER.index)
    most = implementations.MOST["all_reduce"]
    assert names == [
        "nccl" if nbytes > most else name
        for nbytes, name in zip(SIZES, names, strict=True)
    ]
    assert on(reduced(ranks, most)).is_fused
    assert not on(reduced(ranks, most + 16)).is_fused
    assert ("two_shot" in names) == (ranks > 2), "between two it carries no less"


def test_what_makes_one_shot_dear() -> None:
    """It reads all ranks' values: more of them, or a slower link, end it earlier."""
    shots = {ranks: by_size(ranks).count("one_shot") for ranks in implementations.RANKS}
    assert shots[2] >= shots[4] > shots[8] > 0
    links = [by_size(8, bandwidth=b).count("one_shot") for b in (4e11, 1e11, 2.5e10)]
    assert links[0] > links[1] > links[2] > 0
    fast = on(reduced(8, implementations.ONE_SHOT), bandwidth=1e15)
    assert fast.name == "one_shot"
    assert (
        on(reduced(8, implementations.ONE_SHOT + 16), bandwidth=1e15).name == "two_shot"
    )


@pytest.mark.parametrize("ranks", [3, 16])
def test_other_ranks_have_no_template(ranks: int) -> None:
    assert set(by_size(ranks)) == {"nccl"}


def scattered(ranks: int, count: int) -> RegionProgram:
    x = torch.empty(ranks * count, device="meta")
    fn = lambda x: all_gather(reduce_scatter(x, ranks) * 2, ranks)  # noqa: E731
    return program(fn, ranks, x)


def test_what_falls() -> None:
    meta = torch.empty(64, 64, device="meta")
    mean = program(
        lambda x: c10d.wait_tensor(c10d.all_reduce(x, "avg", "g")) * 2, 2, meta
    )
    cases = [
        (on(reduced(8, 4 * KIB), kernels=False), "interpret", "no generated kernel"),
        (on(reduced(8, 4 * KIB), shared=False), "nccl", "do not reach"),
        (on(reduced(8, 4 * KIB), ranks=4), "nccl", "no templates for 4 ranks"),
        (on(reduced(8, 4 * KIB, torch.float16)), "nccl", "is of float16"),
        (on(reduced(8, 4 * KIB, torch.float64)), "nccl", "is of float64"),
        (on(reduced(8, 4 * KIB + 8)), "nccl", "no multiple of 16"),
        (on(mean), "nccl", "reduced by avg"),
        (on(scattered(2, 129)), "nccl", "parts of 516 bytes"),
        (on(scattered(8, MIB)), "nccl", "33554432 bytes"),
    ]
    for found, rung, why in cases:
        assert found.name == rung
        assert why in found.why


def test_the_docs_say_what_is() -> None:
    """The page has the sizes up to which a rung is taken."""
    docs = Path(__file__).parents[3] / "docs"
    page = (docs / "explanation" / "kernel_ladder.md").read_text()
    rows = re.findall(r"^\| (\d) \| (.*) \|$", page, re.MULTILINE)
    assert [int(ranks) for ranks, _ in rows] == [2, 4, 8]
    units = {"KiB": KIB, "MiB": MIB}
    for ranks, row in rows:
        one, two, multimem, *_ = (word.strip() for word in row.split("|"))
        for name, word, switch in (
            ("one_shot", one, False),
            ("one_shot", one, True),
            ("two_shot", two, False),
            ("multimem", multimem, True),
        ):
            number, _, unit = (word or "512 KiB").partition(" ")
            most = int(number) * units[unit]
            found = [
                on(reduced(int(ranks), nbytes), multicast=switch).name == name
                for nbytes in (most, most + KIB)
            ]
            assert found == [bool(word), False], (ranks, name)
    assert f"| `BARRIER` | {implementations.BARRIER * 1e6:.1f} us |" in page
    assert (
        f"`TRIPS` = {implementations.TRIPS} of {implementations.TRIP * 1e6:.2f} us"
        in page
    )
    assert f"| `ONE_SHOT` | {implementations.ONE_SHOT // KIB} KiB |" in page
    assert f"| `IN_SWITCH` | {implementations.IN_SWITCH // MIB} MiB |" in page
    most = dict.fromkeys(f"{n // MIB} MiB" for n in implementations.MOST.values())
    assert f"| `MOST` | {', '.join(most)} |" in page


def test_both_collectives_of_an_update() -> None:
    most = implementations.MOST["reduce_scatter_tensor"]
    count = most // 8 // 4
    assert on(scattered(8, count)).name == "one_shot"
    assert on(scattered(8, count + 4)).name == "nccl"
