"""A searched plan is predicted to be no slower than what an expert would begin with."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest

import fxpar
from fxpar import choose_plan
from fxpar.choose_plan import _timeline_unscheduled as timeline
from fxpar.sharding.search import rank_candidates
from tests.helpers.programs import batch, mlp
from tests.helpers.random_programs import Case

QUICK = (0, 3, 7, 11)
SEEDS = [
    pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in range(60)
]
# Where it is slower by so little, and why.
OPEN = {
    (
        4,
        "cpu",
    ): "0.16 %: a search writes var_mean as two sums though its dims are whole",
    (51, "h100"): "0.6 ns: a slice before a sort is a copy, and is priced as a view",
}
# Of one axis those that split the batch over all ranks, and the features.
NAMED = {
    "dp=4": ("dp=4", "tp=4"),
    "dp=2,tp=2": ("dp=2,tp=2",),
    "auto:4": ("dp=4", "tp=4", "dp=2,tp=2"),
}


def seconds(make: Any, mode: str) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(mode).predicted.seconds


@pytest.mark.parametrize("hardware", ["cpu", "h100"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs(
    seed: int,
    hardware: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if reason := OPEN.get((seed, hardware)):
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    monkeypatch.setenv("FXPAR_HARDWARE", hardware)
    monkeypatch.setenv("FXPAR_SCHEDULE", "auto")
    case = Case(seed)

    def planned(mode: str) -> Any:
        case.mode = mode
        return case.plan()

    assert seconds(planned, "search") <= seconds(planned, "propagate") * (1 + 1e-9)


@pytest.mark.parametrize("hardware", ["cpu", "h100"])
@pytest.mark.parametrize("mesh", NAMED)
@pytest.mark.parametrize("whole", [False, True])
def test_models(
    mesh: str, hardware: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of parameters that rest as the plan wants, and whole on every rank."""
    monkeypatch.setenv("FXPAR_HARDWARE", hardware)
    monkeypatch.setenv("FXPAR_SCHEDULE", "auto")
    model, x = mlp(2), batch()
    if whole:
        hints = {name: (None,) * p.dim() for name, p in model.named_parameters()}
    else:
        hints = None

    def planned(on: str) -> Any:
        return lambda mode: fxpar.plan(
            model, x, mesh=on, mode=mode, grad=True, hints=hints
        )

    known = min(seconds(planned(on), "propagate") for on in NAMED[mesh])
    assert seconds(planned(mesh), "search") <= known * (1 + 1e-9)


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "auto:4"])
def test_large_programs(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few plans of them are lowered, conventions that come near among these."""
    monkeypatch.setenv("FXPAR_HARDWARE", "cpu")
    monkeypatch.setattr(rank_candidates, "_SIMULATED", 0)

    def planned(on: str) -> Any:
        return lambda mode: fxpar.plan(mlp(2), batch(), mesh=on, mode=mode, grad=True)

    known = min(seconds(planned(on), "propagate") for on in NAMED[mesh])
    with mock.patch.object(
        choose_plan, "_timeline_unscheduled", side_effect=timeline
    ) as lowered:
        assert seconds(planned(mesh), "search") <= known * (1 + 1e-9)
    assert lowered.call_count <= (3 if mesh == "auto:4" else 4)
