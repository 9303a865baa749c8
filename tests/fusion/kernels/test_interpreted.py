"""Generated kernels do what their programs do, in Triton's interpreter.

Outputs begin as NaN. One process runs all cases, since Triton is either interpreter or
compiler in one process."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fxpar.fusion.kernels.placement import KNOWN
from tests.helpers.kernels import samples

ROOT = Path(__file__).parents[3]
HALF = 0.51  # units of the last place: what rounding costs
F32 = 1e-6  # relative to the largest number of a result
QUICK, ALL = 15, 200


def run(*what: str) -> dict[str, Any]:
    """What tests.helpers.kernels.interpreted finds."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "tests.helpers.kernels.interpreted", file.name]
        env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, *what], capture_output=True, text=True, cwd=ROOT, env=env
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(Path(file.name).read_text())


@functools.cache
def quick() -> dict[str, Any]:
    return run(
        "ops", "pieces", "alone", "streams", "seam", "graphs", "two", f"fuzz:0:{QUICK}"
    )


CALLS = [f"{op} {i}" for op, calls in samples.OPS.items() for i in range(len(calls))]


def test_every_op_has_a_sample() -> None:
    assert set(samples.OPS) == KNOWN


@pytest.mark.parametrize("case", CALLS)
def test_op(case: str) -> None:
    found = quick()["ops"][case]
    assert found["kernel"], found.get("raised", "no kernel was made")
    assert found["error"] <= F32
    assert found["strides"]
    assert found["own"], "a result is memory of another's"


@pytest.mark.parametrize("name", samples.PIECES)
def test_piece(name: str) -> None:
    found = quick()["pieces"][f"{name} float32"]
    assert found["kernel"], found.get("raised", "no kernel was made")
    assert found["error"] <= F32


def test_numbers_on_the_cpu_are_arguments() -> None:
    found = quick()["alone"]["adamw"]
    assert found["kernel"] and found["given"]
    assert found["error"] <= F32


def test_masks_are_equal_to_the_bit() -> None:
    assert quick()["pieces"]["bias_dropout_residual float32"]["same"][1]
    assert all(case["same"] for case in quick()["streams"].values())


@pytest.mark.parametrize("name", samples.IN_BF16)
def test_piece_in_bf16(name: str) -> None:
    """What float32 gives, with the graph's casts, rounded once."""
    found = quick()["pieces"][f"{name} bfloat16"]
    assert found["kernel"], found.get("raised", "no kernel was made")
    assert found["ulps"] <= HALF


@pytest.mark.parametrize("how", ["interpret", "triton"])
def test_fused_graphs_give_the_same(how: str) -> None:
    from tests.helpers.kernels.fused_graphs import GRAPHS

    for name in GRAPHS:
        found = quick()["graphs"][f"{name} {how}"]
        assert found["error"] <= (0.0 if how == "interpret" else F32), name
        assert found["regions"] > 0, name


@pytest.mark.multiprocess
def test_fused_graphs_on_two_ranks() -> None:
    """From a graph to regions to kernels that wait inside for the other rank."""
    from tests.helpers.kernels.fused_graphs import OF_TWO

    for name in OF_TWO:
        by_op, found = (quick()["two"][f"{name} {h}"] for h in ("interpret", "triton"))
        assert by_op["error"] == 0.0 and found["error"] <= F32, name
        assert found["inside"] == found["regions"] > 0, name


def test_templates_read_and_write_elsewhere() -> None:
    found = quick()["seam"]["both"]
    assert found["error"] <= F32 and found["sent"] <= F32


def check_fuzz(cases: dict[str, Any]) -> None:
    for seed, found in cases.items():
        assert "raised" not in found, f"{seed}: {found['raised']}"
        allowed = F32 + 10 * found["plain"]
        assert found["error"] <= allowed, f"{seed}: {found['error']} > {allowed}"
    made = sum(found["kernel"] for found in cases.values())
    assert made >= 0.9 * len(cases)


def test_random_regions() -> None:
    check_fuzz(quick()["fuzz"])


@pytest.mark.slow
def test_more_random_regions() -> None:
    check_fuzz(run(f"fuzz:{QUICK}:{ALL}")["fuzz"])
