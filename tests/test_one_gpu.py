"""``benchmarks/one_gpu.py`` without a GPU: all of it in its try-out, and what it does
with parts that fail or never end."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_parts import Outcome, lacking  # noqa: E402
from gpu_table import Target, rows_of, verdict_of  # noqa: E402
from one_gpu import AHEAD, PARTS, TARGETS  # noqa: E402

from tests.helpers.try_outs import try_out  # noqa: E402

run = partial(try_out, "one_gpu.py")


def verdicts(table: list[dict[str, Any]]) -> dict[str, list[str]]:
    """By part."""
    out: dict[str, list[str]] = {}
    for row in table:
        out.setdefault(row["part"], []).append(row["verdict"])
    return out


@pytest.mark.slow
@pytest.mark.multiprocess
def test_what_hangs_is_ended_and_the_rest_runs(tmp_path: Path) -> None:
    """Parts that never end, lose a rank, find a mistake."""
    begun = time.monotonic()
    words = ("--only", "hangs", "lost", "wrong", "fine")
    code, printed, data = run(tmp_path / "out.json", *words, timeout=300.0)
    parts = data["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {
        "hangs": "late",
        "lost": "failed",
        "wrong": "done",
        "fine": "done",
    }
    # What had been told stays; rank 0 of "lost" would have waited for ever.
    assert parts["hangs"]["rows"][0]["ok"]
    assert parts["lost"]["seconds"] < PARTS["lost"].limit
    assert "lost on purpose" in parts["lost"]["tail"]
    found = verdicts(data["table"])
    assert found["hangs"] == ["ok", "FAILED"]
    assert found["lost"] == found["wrong"] == ["FAILED"]
    assert found["fine"] == ["ok"]
    assert code == 1
    assert "lost on purpose" in printed and "3 checks failed" in printed
    assert time.monotonic() - begun < 200.0
    assert not left_over(parts)


def left_over(parts: dict[str, Any]) -> list[int]:
    """Processes of parts that are still there."""
    numbers = [row["process"] for part in parts.values() for row in part["rows"]]
    assert len(numbers) == len(parts)
    return list(filter(alive, numbers))


def alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.multiprocess
def test_what_no_time_is_left_for_is_skipped(tmp_path: Path) -> None:
    words = ("--only", "fine", "long", "--limit", "100")
    code, printed, data = run(tmp_path / "out.json", *words, timeout=120.0)
    assert data["parts"]["long"]["status"] == "skipped"
    assert verdicts(data["table"]) == {"fine": ["ok"], "long": ["skipped"]}
    assert "no time was left" in printed
    assert code == 0


@pytest.mark.multiprocess
def test_a_part_that_lacks_a_package_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And fails nothing; others run."""
    (tmp_path / "numpy.py").write_text(
        "raise ModuleNotFoundError('No module named numpy', name='numpy')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    words = ("--only", "epilogues", "fine")
    code, printed, data = run(tmp_path / "out.json", *words, timeout=300.0)
    parts = data["parts"]
    assert parts["epilogues"]["status"] == "lacks"
    assert parts["fine"]["status"] == "done"
    assert verdicts(data["table"]) == {"epilogues": ["skipped"], "fine": ["ok"]}
    assert "needs numpy, which is not installed" in printed
    assert code == 0


def test_what_a_part_lacks() -> None:
    """A package of others, however deep; what is missing of ours is a mistake."""
    foreign = ModuleNotFoundError("", name="scipy.sparse")
    wrapped = RuntimeError()
    wrapped.__cause__ = foreign
    assert lacking(foreign) == lacking(wrapped) == "scipy"
    assert lacking(ModuleNotFoundError("", name="fxpar.nothing")) == ""
    assert lacking(ModuleNotFoundError("", name="gpu_here")) == ""
    assert lacking(ValueError()) == ""


def case(measured: float, predicted: float | None = None) -> dict[str, Any]:
    return {"measured": measured, "predicted": predicted, "case": "", "value": "b1"}


def test_verdicts() -> None:
    """All cases must meet a target."""
    least, most = Target("", ">=", 0.9), Target("", "<=", 1.05)
    assert verdict_of(least, [case(0.9), case(2.0)]) == "ok"
    assert verdict_of(least, [case(0.89), case(2.0)]) == "miss"
    assert verdict_of(most, [case(0.1), case(1.05)]) == "ok"
    assert verdict_of(most, [case(0.1), case(1.06)]) == "miss"
    assert verdict_of(Target(""), [case(1e9)]) == ""
    close = Target("", near=0.05)
    assert verdict_of(close, [case(1.04, 1.0), case(2.0, 2.0)]) == "ok"
    assert verdict_of(close, [case(1.04, 1.0), case(2.0, 2.2)]) == "miss"
    assert verdict_of(least, [case(float("nan"))]) == "miss"


def test_of_a_try_out_no_figure_is_judged() -> None:
    outcomes = {"b1": Outcome("done", 1.0, (case(0.1),))}
    targets = {"b1": Target("", ">=", 0.9)}
    for judged, word in ((True, "miss"), (False, "tried")):
        (row,) = rows_of(outcomes, targets, judged=judged)
        assert row["verdict"] == word


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_whole_try_out(tmp_path: Path) -> None:
    """Every part runs, no check fails, every figure has its row, and every kernel of a
    real run compiles."""
    code, printed, data = run(tmp_path / "out.json", timeout=1800.0)
    tails = {k: p["tail"] for k, p in data["parts"].items() if p["status"] != "done"}
    assert not tails
    assert set(data["parts"]) == {n for n, part in PARTS.items() if "try" in part.modes}
    words = {row["verdict"] for row in data["table"]}
    assert words == {"ok", "tried"}, printed
    assert {row["id"] for row in data["table"]} >= TARGETS.keys()
    kernels = {
        row["check"].removeprefix("sm_90a: "): row["kernels"]
        for row in data["parts"]["ahead"]["rows"]
    }
    assert kernels.keys() >= AHEAD.keys()
    assert sum(map(len, kernels.values())) > 90
    assert all(kernels.values())
    assert code == 0
    assert len(printed.splitlines()) < 70
