"""Progress of planning and compiling: who says it, when, and where."""

from __future__ import annotations

import io
import time

import pytest
import torch

import fxpar
from fxpar import pipeline
from fxpar.config import Options
from fxpar.explain import status_line

STEPS = ("trace", "plan", "check", "lower", "order", "check", "end")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_line, "DELAY", 0.02)
    monkeypatch.setattr(status_line, "_FIRST_LINE", 0.02)
    monkeypatch.setattr(status_line, "_BEAT", 0.01)


def said(
    monkeypatch: pytest.MonkeyPatch,
    stream: io.StringIO,
    patience: float = 0.0,
    **how: bool,
) -> str:
    """What two steps of some hundredths of a second print. ``patience``: seconds that
    each may wait for its name, where the machine is busy."""
    monkeypatch.setattr("sys.stderr", stream)
    with status_line.status_of("graph0", STEPS, **({"on": True} | how)):
        for step in ("plan", "lower"):
            status_line.begin(step)
            time.sleep(0.1)
            end = time.monotonic() + patience
            while step not in stream.getvalue() and time.monotonic() < end:
                time.sleep(0.01)
    return stream.getvalue()


@pytest.mark.usefixtures("quick")
def test_a_terminal_has_one_line_that_renews_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = said(monkeypatch, Terminal(), 5.0)
    assert "fxpar graph0: plan, step 2 of 7, 00:0" in text
    assert "fxpar graph0: lower, step 4 of 7, 00:0" in text
    assert "\n" not in text and "\r" in text


@pytest.mark.usefixtures("quick")
def test_a_log_has_lines_that_end_with_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = said(monkeypatch, io.StringIO(), 5.0).splitlines()
    assert lines[0].startswith("fxpar graph0: ")
    assert lines[-1].startswith("fxpar graph0: lower, step 4 of 7")


def test_a_log_has_plain_lines_ever_further_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, stream = [0.0], io.StringIO()
    monkeypatch.setattr(status_line.time, "monotonic", lambda: clock[0])
    progress = status_line._Status("graph0", STEPS, stream)

    def wait(seconds: float) -> bool:
        """Go on by some seconds of work that plans, lowers after 12, ends after 50."""
        clock[0] += seconds
        progress.begin("plan" if clock[0] < 12 else "lower")
        return clock[0] >= 50

    monkeypatch.setattr(progress.over, "wait", wait)
    progress._in_log()
    assert stream.getvalue().splitlines() == [
        "fxpar graph0: plan, step 2 of 7, 5 s",
        "fxpar graph0: plan, step 2 of 7, 10 s",
        "fxpar graph0: lower, step 4 of 7, 20 s",
        "fxpar graph0: lower, step 4 of 7, 40 s",
    ]


@pytest.mark.usefixtures("quick")
def test_a_step_that_is_renamed_stays_the_same_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rename = status_line.rename
    monkeypatch.setattr(status_line, "begin", lambda step: rename(f"another {step}"))
    text = said(monkeypatch, Terminal(), 5.0)
    assert "another plan, step 0 of 7" in text and "another lower, step 0 of 7" in text


def test_what_is_quick_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch, Terminal()) == said(monkeypatch, io.StringIO()) == ""


@pytest.mark.usefixtures("quick")
def test_other_processes_print_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch, io.StringIO(), on=False) == ""


@pytest.mark.usefixtures("quick")
def test_it_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with pytest.raises(ValueError), status_line.status_of("graph0", STEPS, on=True):
        raise ValueError
    assert not status_line._CURRENT


def test_a_program_that_is_planned_again_goes_back() -> None:
    progress = status_line._Status("graph0", STEPS, io.StringIO())
    progress.over.set()
    places = []
    for step in ("trace", "plan", "check", "trace", "lower", "check", "other"):
        progress.begin(step)
        places.append(progress.now[1])
    assert places == [1, 2, 3, 1, 4, 6, 6]


def test_debug_0_is_silent_if_it_is_written_out() -> None:
    assert Options.read({}, {}).progress
    assert Options.read({}, {"FXPAR_DEBUG": "1"}).progress
    assert not Options.read({}, {"FXPAR_DEBUG": "0"}).progress
    assert not Options.read({}, {"FXPAR_PROGRESS": "0"}).progress


def test_steps_of_a_plan_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr(status_line, "begin", lambda step, _="": steps.append(step))
    fxpar.plan(lambda x: x * 2, torch.ones(4), mesh="dp=2")
    names = [step.name for step in pipeline.JOINT]
    assert steps == [name for name in names if name in steps]
    assert {"plan", "lower"} <= set(steps) and set(steps) <= set(pipeline.STEP_NAMES)


class _Log:
    """What a script puts in the place of stderr."""

    def write(self, text: str) -> None:
        pass


@pytest.mark.parametrize("stream", [None, _Log()])
def test_a_process_without_a_terminal(
    stream: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon has no stderr, a logger is no terminal."""
    monkeypatch.setattr("sys.stderr", stream)
    with status_line.status_of("graph0", STEPS, on=True):
        status_line.begin("plan")
