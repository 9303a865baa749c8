"""A searched plan that is saved, or told to other ranks, is lowered as it was found:
with the links it was searched with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fxpar
from fxpar.explain.dump import graph_text
from fxpar.sharding.mesh import Link, Mesh
from fxpar.sharding.plan import Plan
from tests.helpers.machines import machine

# Moves whose cheapest path depends on the links.
MOVES = [
    ("a=2,b=2", [("a", "b")], [("b", "a")]),
    ("a=2,b=2", [(("a", "b"), None)], [(None, ("b", "a"))]),
    ("a=2,b=2,c=2", [(("a", "b"), None)], [(("b", "a"), None)]),
]


@pytest.fixture(autouse=True)
def _pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = replace(machine(), launch=0.0, bandwidth=1e15)  # copies, that is
    free.save(tmp_path / "slow.json")
    monkeypatch.setenv("FXPAR_HARDWARE", str(tmp_path / "slow.json"))


def moved(mesh: str, given: list[Any], made: list[Any], mode: str) -> Any:
    x = torch.empty(32, 32)
    how = {"mesh": mesh, "in_specs": given, "out_specs": made, "mode": mode}
    return fxpar.plan(torch.relu, x, **how)


@pytest.mark.parametrize(("mesh", "given", "made"), MOVES)
def test_a_saved_plan_is_lowered_as_it_was_found(
    mesh: str, given: list[Any], made: list[Any], tmp_path: Path
) -> None:
    found = moved(mesh, given, made, "search")
    assert len(set(found.mesh.links)) > 1
    found.save(tmp_path / "plan.json")
    again = moved(mesh, given, made, str(tmp_path / "plan.json"))
    assert again.hash == found.hash and again.mesh == found.mesh
    assert again.reasons == found.reasons and again.collectives == found.collectives
    local = graph_text(found.result.local)
    assert graph_text(again.result.local) == local

    old = json.loads((tmp_path / "plan.json").read_text())
    del old["links"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert Plan.load(tmp_path / "old.json").hash == found.hash
    other = moved(mesh, given, made, str(tmp_path / "old.json"))
    assert graph_text(other.result.local) != local  # or these moves prove nothing


def test_links_of_any_kind_come_back(tmp_path: Path) -> None:
    own = (("all_gather", Link(3e10, 1e-6, 1e-5)),)
    inner = Link(1e11, 1e-7, 2e-6, kinds=own, copy_launch=2e-6, copy_byte=1e-12)
    outer = Link(1e9, 1e-6, 1e-5, tree=True, inside=2, inner=inner)
    mesh = Mesh((("a", 4), ("b", 2)), (outer, inner))
    plan = fxpar.plan(torch.relu, torch.empty(8, 8), mesh=mesh, mode="propagate")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.mesh == mesh and loaded.mesh.links == (outer, inner)
    assert loaded.hash == plan.hash and not loaded.diff(plan)
    assert "links" not in json.dumps(loaded.to_dict())
