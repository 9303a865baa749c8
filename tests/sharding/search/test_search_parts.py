"""Microbatches without stages: what is searched is a step of all parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from fxpar.errors import PlanError
from fxpar.sharding.candidates import choose
from fxpar.sharding.cost.hardware_table import Hardware, Level, Peak
from fxpar.sharding.decide import cut_in_time
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan_request import Request
from fxpar.sharding.search.batch_parts import PartProgram
from fxpar.sharding.search.run_search import SearchOptions, SearchResult
from tests.helpers.machines import machine
from tests.helpers.programs import program_of
from tests.helpers.wide_layers import FREE, found_for, layers, rows

PARTS = 8

# A link carries as much as memory does, and arithmetic takes next to nothing.
LINKED = replace(
    FREE,
    peaks=tuple((name, Peak(1e9)) for name, _ in FREE.peaks),
    levels=(Level(0, FREE.bandwidth, 0.0, 0.0),),
)


def searched(
    on: Hardware,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parts: int,
    mesh: str,
    x: torch.Tensor,
    model: nn.Module | None = None,
    mode: str = "search",
    hints: Any = None,
) -> Any:
    on.save(path / "machine.json")
    monkeypatch.setenv("FXPAR_HARDWARE", str(path / "machine.json"))
    monkeypatch.setenv("FXPAR_MICROBATCHES", str(parts))
    model = layers(2) if model is None else model
    return fxpar.plan(
        model, x, mesh=mesh, mode=mode, grad=True, schedule="none", hints=hints
    )


def search_of(plan: Any) -> Any:
    return plan.result.decision.search


def test_a_plan_is_chosen_by_what_its_parts_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that are partial over tp are added up whole with every part: as a whole
    batch that takes least, in parts it takes longer than to send activations."""
    x = rows(256).to(torch.bfloat16).requires_grad_()
    model = layers(2).to(torch.bfloat16)
    given = LINKED, tmp_path, monkeypatch
    found = searched(*given, PARTS, "tp=2", x, model)
    searched(*given, 1, "tp=2", x, model).save(tmp_path / "whole.json")
    old = searched(*given, PARTS, "tp=2", x, model, mode=str(tmp_path / "whole.json"))
    assert "in 8 microbatches" in str(old)
    assert found.predicted.seconds < 0.95 * old.predicted.seconds
    # The search says what the simulated step of the graph in parts takes.
    took = found.predicted.seconds
    assert search_of(found).predicted == pytest.approx(took, rel=0.15)


def test_all_parts_take_as_many_times_what_one_takes() -> None:
    program = program_of(layers(), rows().requires_grad_(), mesh="dp=2", grad=True)
    cut = cut_in_time(program)
    assert cut is not None
    dear = replace(machine(), launch=1e-6)
    one = found_for(program, "dp=2", dear, PartProgram(program, cut, PARTS))
    step = found_for(program, "dp=2", dear, PartProgram(program, cut, PARTS, paid=8))
    assert step.predicted == pytest.approx(PARTS * one.predicted, rel=1e-9)


@pytest.mark.parametrize("meshes", [(), (Mesh.parse("dp=2"), Mesh.parse("tp=2"))])
def test_activations_of_a_part_have_to_fit(meshes: tuple[Mesh, ...]) -> None:
    """A step in one program holds activations of one part; where forward and backward
    are two calls, those of all parts wait for one another."""
    program = program_of(layers(2), rows(4096), mesh="dp=2", grad=True)
    mode = SearchOptions(FREE, memory=6e6)
    request = Request(Mesh.parse("dp=2"), program.signature, mode=mode, meshes=meshes)
    request = replace(request, microbatches=PARTS)

    def decided(asked: Request) -> SearchResult:
        decision, _ = choose(program, asked)
        assert decision.search is not None
        return decision.search

    with pytest.raises(PlanError, match="no plan fits"):
        decided(request)
    found = decided(replace(request, step=True))
    assert found.solution.peak < 6e6
    roomy = replace(request, mode=replace(mode, memory=1e9))
    assert found.solution.peak < 0.5 * decided(roomy).solution.peak


def test_parts_with_fewer_rows_than_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight rows on four ranks are two each: in four parts ranks would have to repeat
    what others do."""
    x = rows(8)
    plan = searched(machine(), tmp_path, monkeypatch, 4, "dp=4", x, layers(2))
    note = "2 rows on a rank do not divide into 4 parts, and are cut into 2"
    assert any(note in text for text in plan.notes)
    assert search_of(plan).formulation.parts.count == 2
    got, want = plan.simulate(x), plan.reference(x)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_rows_that_are_not_alike_are_searched_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hint splits what does not divide: the batch is not cut, nor priced so."""
    model = nn.Sequential(nn.Linear(64, 65), nn.ReLU(), nn.Linear(65, 64)).double()
    given, hints = (
        (machine(), tmp_path, monkeypatch, 4, "tp=2"),
        {"0.weight": ("tp", None)},
    )
    x = rows(64)
    plan = searched(*given, x, model, hints=hints)
    assert any("the batch is not cut" in note for note in plan.notes)
    assert search_of(plan).formulation.parts is None
    free = searched(*given, x, model)
    assert any("in 4 microbatches" in note for note in free.notes)
