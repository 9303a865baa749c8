"""Random programs cut at random places into stages compute what one device does, in
every schedule: what is right may not depend on where a program is cut."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import fxpar
from fxpar.errors import FxparWarning, PlanError
from fxpar.features.stages import assign_stages
from fxpar.sharding.pipeline_schedule import SCHEDULES
from tests.helpers.check_random import close
from tests.helpers.random_programs import Case

# What a random program may be refused for.
REFUSED = ("too few for", "are unequal", "no order for", "no input holds a batch")


def check(seed: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the case could be cut; it then computes what one device does."""
    rng = random.Random(seed)

    def cut_anywhere(
        seconds: Sequence[float], crossing: Any, stages: int, *_: Any, **how: Any
    ) -> tuple[int, ...]:
        return tuple(sorted(rng.sample(range(1, len(seconds)), stages - 1)))

    monkeypatch.setattr(assign_stages, "cut_chain", cut_anywhere)
    case = Case(seed)
    places = rng.choice((2, 2, 3, 4))
    monkeypatch.setenv("FXPAR_PIPELINE", rng.choice([*SCHEDULES]))
    monkeypatch.setenv("FXPAR_MICROBATCHES", rng.choice("124"))
    mesh = rng.choice((f"pp={places},{case.mesh}", f"{case.mesh},pp={places}"))
    args = case.tensors()
    try:
        plan = fxpar.plan(
            case.program(), *args, mesh=mesh, mode="propagate", grad=rng.random() < 0.8
        )
    except PlanError as error:
        if not any(text in str(error) for text in REFUSED):
            raise
        return False
    torch.manual_seed(0)
    got = plan.outcome(*args)
    torch.manual_seed(0)
    want = plan.reference_outcome(*args)
    close(got.result, want.result)
    close(got.gradients, want.gradients)
    close(got.mutations, want.mutations)
    return True


def run(seeds: range, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many of the cases were cut."""
    done = 0
    for seed in seeds:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FxparWarning)
                done += check(seed, monkeypatch)
        except Exception as error:
            error.add_note(f"seed {seed}\n{Case(seed)}")
            raise
    return done


def test_some_random_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(range(8), monkeypatch)


def test_rows_of_one_part_are_moved_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient is a row of the batch, which all parts then have alike."""
    assert check(366, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 400, 20))
def test_random_programs(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(range(first, first + 20), monkeypatch)
