"""How collectives of a region run, decided alike on all ranks: a table of sizes, and of
what falls to NCCL."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fxpar.fusion.kernels.ladder import Facts, Rung, choose
from fxpar.fusion.kernels.program import Program
from tests.fusion.kernels.collective_cases import all_gather, all_reduce, reduce_scatter
from tests.fusion.kernels.interpreted import outlined, traced

c10d = torch.ops._c10d_functional
KIB, MIB = 1 << 10, 1 << 20


def program(fn: Any, ranks: int, *given: torch.Tensor) -> Program:
    found, _ = outlined(traced(fn, given))
    return dataclasses.replace(found.program, ranks=ranks)


def reduced(ranks: int, nbytes: int, dtype: torch.dtype = torch.bfloat16) -> Program:
    x = torch.empty(nbytes // dtype.itemsize, dtype=dtype, device="meta")
    return program(lambda x: all_reduce(x) * 2, ranks, x)


def on(found: Program, **facts: Any) -> Rung:
    given = {"ranks": found.ranks, "kernels": True, "shared": True} | facts
    return choose(found, Facts(**given))


@pytest.mark.parametrize(
    ("ranks", "nbytes", "rung"),
    [
        (8, 10 * KIB, "one_shot"),
        (8, 120 * KIB, "one_shot"),
        (8, 160 * KIB, "two_shot"),
        (8, 8 * MIB, "two_shot"),
        (8, 8 * MIB + 16, "nccl"),
        (4, 384 * KIB, "one_shot"),
        (4, 512 * KIB, "two_shot"),
        (2, 8 * MIB, "one_shot"),
        (2, 64 * MIB, "nccl"),
        (1, 64 * KIB, "one_shot"),
        (3, 64 * KIB, "nccl"),
        (16, 64 * KIB, "nccl"),
    ],
)
def test_sizes(ranks: int, nbytes: int, rung: str) -> None:
    found = on(reduced(ranks, nbytes))
    assert found.name == rung, found.why
    assert found.is_fused == (rung != "nccl")


def test_a_slower_link_takes_two_shots_earlier() -> None:
    found = reduced(8, 64 * KIB)
    assert on(found).name == "one_shot"
    assert on(found, bandwidth=1e11).name == "two_shot"


def scattered(ranks: int, count: int) -> Program:
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


def test_both_collectives_of_an_update() -> None:
    assert on(scattered(8, 64 * KIB)).name == "one_shot"
