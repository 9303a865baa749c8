"""Seconds by stage: those inside a stage count once, and torch's own are told apart."""

from __future__ import annotations

import logging
import time

import pytest
import torch

import fxpar  # noqa: F401  (the backend)
from fxpar import _torch
from fxpar.runtime import stage_times
from fxpar.runtime.stage_times import stage
from tests.helpers.spawn import shared_pool


def rows(text: str) -> dict[str, float]:
    return {line[:-8].strip(): float(line[-8:]) for line in text.splitlines()}


class Clock:
    """A clock that a test moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def _fresh() -> None:
    stage_times.table()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stage_times, "time", clock)
    return clock


def test_seconds_inside_a_stage_count_once(clock: Clock) -> None:
    with stage(stage_times.TRACE) as whole:
        clock.sleep(0.25)
        with stage(stage_times.SEARCH) as inner:
            clock.sleep(0.5)
    assert (whole.seconds, inner.seconds) == (0.75, 0.5)
    shown = rows(stage_times.table())
    names = ("search", "AOTAutograd", "together")
    assert [shown[name] for name in names] == [0.5, 0.25, 0.75]
    assert "search" not in rows(stage_times.table())  # begins anew


def test_waiting_counts_only_while_something_is_compiled(clock: Clock) -> None:
    with stage(stage_times.WAIT, nested=True):
        clock.sleep(0.5)
    assert "wait for other ranks" not in rows(stage_times.table())
    with stage(stage_times.CHECKS), stage(stage_times.WAIT, nested=True):
        clock.sleep(0.5)
    assert rows(stage_times.table())["wait for other ranks"] == 0.5


def test_what_torch_times_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    spent: dict[str, float] = {}
    monkeypatch.setattr(_torch.dynamo, "seconds_by_phase", lambda: dict(spent))
    stage_times.table()  # nothing of what this process has compiled
    spent |= {"entire_frame_compile": 5.0, "backend_compile": 2.0}
    with pytest.raises(ValueError), stage(stage_times.INDUCTOR):
        clock.sleep(0.05)
        raise ValueError  # what fails took its time, too
    spent |= {"async_compile.wait": 0.03, "PyCodeCache.load_by_key_path": 0.04}
    shown = rows(stage_times.table())
    assert shown["Dynamo"] == 3.0 and shown["C++ or Triton compiler"] == 0.03
    assert shown["load compiled code"] == 0.01  # besides the compiler's
    assert shown["Inductor"] == 0.01
    assert rows(stage_times.table())["Dynamo"] == 0.0


def said(debug: int) -> list[str]:
    """What the log has of a compiled program."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("fxpar").addHandler(handler)
    try:
        torch.compiler.reset()
        options = {"codegen": "eager", "debug": debug, "schedule": "none"}
        program = torch.compile(torch.sin, backend="fxpar", options=options)
        program(torch.ones(4 + debug))
    finally:
        logging.getLogger("fxpar").removeHandler(handler)
    return [record.getMessage() for record in records]


def test_what_torch_loads_and_waits_for_is_timed() -> None:
    from torch._dynamo.utils import dynamo_timed

    stage_times.table()
    with stage(stage_times.INDUCTOR), dynamo_timed("PyCodeCache.load_by_key_path"):
        with dynamo_timed("async_compile.wait"):
            time.sleep(0.03)
        time.sleep(0.02)
    shown = rows(stage_times.table())
    assert shown["C++ or Triton compiler"] >= 0.03
    assert shown["load compiled code"] >= 0.02


@pytest.mark.multiprocess
def test_rank_0_prints_where_the_seconds_went() -> None:
    first, second = shared_pool(2).run(said, 1)
    (text,) = [each for each in first if "seconds until the forward" in each]
    assert {"Dynamo", "AOTAutograd", "plan", "together"} <= {*rows_of(text)}
    assert not any("seconds until" in each for each in second)
    for each in shared_pool(2).run(said, 0):
        assert not any("seconds until" in line for line in each)


def rows_of(text: str) -> dict[str, float]:
    return rows(text.split("\n", 1)[1])
