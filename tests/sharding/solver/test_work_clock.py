"""Limits of the solver are work: a slow machine gives the same answer, later."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest

from fxpar.sharding.candidates import choose
from fxpar.sharding.decide import decide_on
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan_request import Request
from fxpar.sharding.search.run_search import STOPPED, SearchOptions
from fxpar.sharding.solver import Solution, solve, work_clock
from tests.helpers.machines import machine
from tests.helpers.programs import batch, mlp, program_of
from tests.helpers.solver_problems import layered


def solved(seconds: float = 0.25) -> Solution:
    """Of a problem whose search uses its seconds."""
    return solve(layered(6, 5, 6, limit=0.3, noise=0.5), seconds)


def test_a_slow_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = solved()
    assert not before.stopped and before.gap > 0  # it has used its seconds
    ticks = itertools.count(0.0, 0.02)  # each look at the clock takes so long
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    after = solved()
    assert next(ticks) > 0.5  # where seconds were those of the clock, it was cut
    assert replace(after, seconds=before.seconds) == before


def test_work_before_a_search_changes_nothing() -> None:
    """Not by rounding either: what was done before is no part of its clock."""
    seen = []
    for history in (0.0, 1e6 / 3):
        work_clock.did(history)
        with work_clock.within(1.0):
            end = work_clock.now() + 0.3
            work_clock.did(0.1)
            with work_clock.within(0.1):  # a part of it
                work_clock.did(0.1)
            seen.append((work_clock.now(), work_clock.left(end)))
    assert seen[0] == seen[1] and seen[0][0] == 0.2
    total = work_clock.now()
    with work_clock.within(1.0):
        work_clock.did(8.0)
    assert work_clock.now() == pytest.approx(total + 8.0, abs=1e-3)


@pytest.mark.slow
def test_more_seconds_are_more_work() -> None:
    begun = work_clock.now()
    solved(0.2)
    short, begun = work_clock.now() - begun, work_clock.now()
    solved(1.0)
    assert short < 0.4 and 0.5 < work_clock.now() - begun < 2.0


def test_wall_clock_time_ends_a_search_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = itertools.count(0.0, 1.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    assert solved().stopped
    monkeypatch.undo()
    assert not solved().stopped  # the next one has a clock of its own


def test_a_plan_says_that_its_search_was_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh.parse("dp=2,tp=2")
    program = program_of(mlp(), batch(), mesh=str(mesh))
    request = Request(mesh, program.signature, {}, SearchOptions(machine()))
    assert STOPPED not in decide_on(program, request).notes
    monkeypatch.setattr(work_clock, "GRACE", -1e9)
    assert STOPPED in decide_on(program, request).notes
    assert STOPPED in choose(program, replace(request, meshes=(mesh,)))[0].notes
