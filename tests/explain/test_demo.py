"""The demo's own logic, on scripts without torch: it must fail when it should."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from fxpar.errors import FxparError
from fxpar.explain import demo, script


def test_report_accepts_rounding_and_refuses_more(capsys) -> None:
    assert demo.report({0: 5.0, 1: 4.0}, {0: 5.0 * (1 + 1e-7), 1: 4.0}, "dp=2") == 0
    assert "ok: every loss equals" in capsys.readouterr().out
    assert demo.report({0: 5.0}, {0: 5.0 * (1 + 2e-5)}, "dp=2") == 1
    assert "2.0e-05" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("alone", "together"),
    [({}, {}), ({0: 5.0}, {}), ({0: 5.0}, {0: math.nan}), ({0: math.inf}, {0: 1.0})],
    ids=["nothing printed", "steps missing", "nan", "inf"],
)
def test_report_refuses(alone: dict, together: dict, capsys) -> None:
    assert demo.report(alone, together, "dp=2") == 1
    assert "FAILED" in capsys.readouterr().out


def run(code: str, timeout: float = 30.0) -> list[tuple[str, float]]:
    environment = demo._environment(1)
    return demo._run([sys.executable, "-c", code], environment, timeout)


def test_run_reads_losses() -> None:
    lines = run("print('step 0 loss 5.5'); print('note'); print('step 1 loss 1e-3')")
    assert demo._losses(lines) == {0: 5.5, 1: 1e-3}


def test_times_are_those_between_losses() -> None:
    """The first step, which compiles, is left out; so is what is not known."""
    alone = [(f"step {i} loss 5", at) for i, at in enumerate((9.0, 10.0, 10.25, 10.5))]
    together = [*alone, ("predicted: 40 ms a step on cpu", 11.0)]
    said = demo._times(alone, together, "dp=2")
    assert said.startswith("a step takes 250 ms on one device, 250 ms on dp=2")
    assert said.endswith("; predicted 40 ms and the optimizer's update")
    assert demo._times(alone[:2], [], "dp=2") == "a step takes unknown time"


def test_a_failing_run_shows_the_end_of_its_stderr() -> None:
    code = "import sys; print('x\\n' * 99, file=sys.stderr); raise ValueError('boom')"
    with pytest.raises(demo.ChildFailed, match="exit code 1") as caught:
        run(code)
    assert "ValueError: boom" in str(caught.value)
    assert str(caught.value).count("\n") <= demo.TAIL + 2


def test_a_run_that_hangs_is_ended() -> None:
    with pytest.raises(demo.ChildFailed, match="did not end within 1 s"):
        run("import time; time.sleep(60)", timeout=1.0)


def write_logs(folder: Path, *texts: str) -> None:
    for rank, text in enumerate(texts):
        file = folder / "run" / "attempt_0" / str(rank) / "stderr.log"
        file.parent.mkdir(parents=True)
        file.write_text(text)


@pytest.mark.parametrize(
    "error", ["Traceback\nValueError: boom", "fxpar: boom\n  fix: do"]
)
def test_the_rank_that_raised_is_shown(error: str, tmp_path: Path) -> None:
    write_logs(tmp_path, "warning", error)
    found = demo._tail("torchrun: failed", tmp_path)
    assert found == f"stderr of rank 1 ends with:\n{error}"


def test_warnings_are_shown_once(tmp_path: Path) -> None:
    text = "a.py:3: FxparWarning: parameters differ\n  fix: seed\n  warnings.warn(\n"
    write_logs(tmp_path, text, text + "b.py:1: UserWarning: of torch\n")
    assert demo._warnings(tmp_path) == ["parameters differ\n  fix: seed"]


def test_target_of_plan(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text("def f(): return abs, (1,), {}\ndef g(): return abs\nx = 3\n")
    assert script.load(f"{path}:f") == (abs, (1,), {})
    assert script.load(f"{path}:g") == (abs, (), {})
    for wrong in (f"{path}:x", f"{path}:h", str(path), "nowhere.py:f"):
        with pytest.raises(FxparError, match="file.py:function"):
            script.load(wrong)
