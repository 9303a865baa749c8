"""``benchmarks/gpu_peers.py`` without a GPU: two sides of its try-out, and what it says
of cells that fail or that no time is left for."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_parts import Outcome  # noqa: E402
from gpu_peers import MESHES, cells_of, markdown, rows_of  # noqa: E402

from tests.helpers.try_outs import try_out  # noqa: E402

run = partial(try_out, "gpu_peers.py")


def test_cells() -> None:
    """Meshes whose sides are asked for, then each side, the default first."""
    assert [*cells_of(["ddp", "fxpar"])] == ["dp", "warm-fxpar", "warm-ddp"]
    every = [name for names in MESHES.values() for name in names]
    assert len(cells_of(every)) == len(MESHES) + len(every)


def test_the_table_says_what_is_not_in_it() -> None:
    step = {"q1": 0.1, "median": 0.2, "q3": 0.3}
    rows = (
        {"side": "fxpar", "cold": 12.0, "peak": 3 << 20, "plan_peak": 2 << 20},
        {"side": "fxpar", "step": step, "over": {"ddp": step}},
        {"side": "ddp", "failed": "RuntimeError: on purpose"},
    )
    done = {
        "dp": Outcome("failed", 3.0, rows, "--- rank 1\nValueError: why"),
        "tp": Outcome("late", 9.0),
        "warm-fxpar": Outcome("skipped", 0.0),
    }
    text = markdown(rows_of(done), done)
    row = "| dp | fxpar | 12.0 | - | 200.0 [100.0, 300.0] | ddp 0.20 [0.10, 0.30] | "
    assert f"{row}3.0 | 2.0 |" in text
    assert "- dp: failed, 3 s; ValueError: why" in text
    assert "- tp: late, 9 s" in text
    assert "- warm-fxpar: skipped, no time was left" in text
    assert "- ddp failed: RuntimeError: on purpose" in text


@pytest.mark.multiprocess
def test_what_no_time_is_left_for_is_skipped(tmp_path: Path) -> None:
    words = ("--sides", "ddp", "--limit", "10")
    code, printed, data = run(tmp_path / "out.json", *words, timeout=100.0)
    assert {cell["status"] for cell in data["cells"].values()} == {"skipped"}
    assert "dp: skipped, no time was left" in printed
    assert code == 0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_try_out(tmp_path: Path) -> None:
    """A peer and the default: each column has its figure."""
    words = ("--sides", "ddp", "fxpar")
    code, printed, data = run(tmp_path / "out.json", *words, timeout=900.0)
    assert code == 0, printed
    assert {cell["status"] for cell in data["cells"].values()} == {"done"}
    ddp, fxpar = data["sides"]["ddp"], data["sides"]["fxpar"]
    assert fxpar.keys() - ddp.keys() == set()
    for side in (ddp, fxpar):
        assert min(side["cold"], side["warm"], side["peak"]) > 0
    assert fxpar["plan_peak"] > 0 and ddp["plan_peak"] is None
    assert fxpar["over"]["ddp"]["n"] >= 5
    assert (tmp_path / "out.md").read_text().strip() in printed
