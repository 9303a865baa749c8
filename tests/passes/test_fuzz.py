"""Random programs on random meshes: what the ranks compute together is what one device
computes. A failure prints the program; ``Case(seed)`` makes it again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fxpar.errors import HintError
from fxpar.passes import lower
from tests.helpers import device
from tests.helpers.check_random import run
from tests.helpers.random_cuts import CutsCase
from tests.helpers.random_programs import Case, PartsCase

QUICK, ALL = 10, 2010


@pytest.mark.parametrize("seed", range(QUICK))
def test_random_program(seed: int) -> None:
    run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(QUICK, ALL, 100))
def test_many_random_programs(start: int) -> None:
    for seed in range(start, start + 100):
        run(seed)


def on_parts(seeds: range) -> int:
    """How many of the cases ran whose specs and hints name parts of an axis. Others
    name them beside shards that are not alike."""
    refused = 0
    for seed in seeds:
        try:
            run(seed, PartsCase)
        except HintError as error:
            assert "has no parts here" in str(error)
            refused += 1
    return len(seeds) - refused


def test_random_programs_on_parts_of_an_axis() -> None:
    assert on_parts(range(4)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("start", range(4, 404, 50))
def test_many_random_programs_on_parts_of_an_axis(start: int) -> None:
    assert on_parts(range(start, start + 50)) > 25


@pytest.mark.parametrize("seed", range(4))
def test_random_program_of_cuts(seed: int) -> None:
    run(seed, CutsCase)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(4, 304, 50))
def test_many_random_programs_of_cuts(start: int) -> None:
    for seed in range(start, start + 50):
        run(seed, CutsCase)


@pytest.mark.parametrize("seed", range(0, QUICK, 10))
def test_a_saved_plan_gives_the_same_program(seed: int, tmp_path: Path) -> None:
    with device.by_default():
        check_a_saved_plan(Case(seed), tmp_path)


def check_a_saved_plan(case: Case, tmp_path: Path) -> None:
    plan = case.plan()
    plan.save(tmp_path / "plan.json")
    case.mode = str(tmp_path / "plan.json")
    again = case.plan()
    assert again.hash == plan.hash, plan.diff(again)
    assert str(again.result.local) == str(plan.result.local)


def test_a_missing_reduction_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduces(seed: int) -> bool:
        with device.by_default():
            return any(c.kind == "all_reduce" for c in Case(seed).plan().collectives)

    seed = next(seed for seed in range(QUICK) if reduces(seed))
    skipped = replace(lower.LOWERINGS["all_reduce"], lower=lambda build, x, *_: x)
    monkeypatch.setitem(lower.LOWERINGS, "all_reduce", skipped)
    with pytest.raises(AssertionError):
        run(seed)
