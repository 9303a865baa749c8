"""Meshes that a search may choose from, and the choice."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fxpar
from fxpar.errors import HintError, MeshError, PlanError
from fxpar.sharding import candidates as candidates_module
from fxpar.sharding.cost.hardware_table import Hardware, Level, lookup
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan_request import (
    Auto,
    Request,
    candidates,
    distinct,
    in_nodes,
    read_auto,
)
from fxpar.sharding.search import run_search
from fxpar.sharding.search.run_search import SearchOptions, search
from fxpar.sharding.solver import (
    Problem,
    Solution,
    neighborhood_search,
    solve,
    work_clock,
)
from tests.helpers.machines import machine
from tests.helpers.programs import batch, mlp, program_of
from tests.helpers.solver_problems import layered


def texts(meshes: Any) -> list[str]:
    return [str(mesh) for mesh in meshes]


@pytest.mark.parametrize(
    ("text", "auto"),
    [
        ("auto", Auto()),
        ("auto:8", Auto(8)),
        ("auto:4x8", Auto(32, 8)),
        ("dp=2", None),
        ("auto=2,tp=2", None),
        (None, None),
        (Mesh.parse("dp=2"), None),
    ],
)
def test_what_auto_asks_for(text: Any, auto: Auto | None) -> None:
    assert read_auto(text) == auto


@pytest.mark.parametrize("text", ["auto:", "auto:0", "auto:2x", "auto:2x2x2", "autos"])
def test_malformed_auto_is_named(text: str) -> None:
    with pytest.raises(MeshError, match=f"(?s){text}.*auto:4x8"):
        read_auto(text)


def test_ranks_of_one_network_split_in_every_way() -> None:
    assert texts(candidates(8, lookup("cpu"))) == [
        "dp=8",
        "dp=2,tp=4",
        "dp=4,tp=2",
        "dp=2,cp=2,tp=2",
    ]
    assert texts(candidates(6, lookup("cpu"))) == ["dp=6", "dp=2,tp=3", "dp=3,tp=2"]
    assert texts(candidates(7, lookup("cpu"))) == ["dp=7"]
    assert texts(candidates(1, lookup("cpu"))) == ["dp=1"]
    assert len(candidates(64, lookup("cpu"))) == 1 + 5 + 10


def test_no_axis_lies_partly_in_a_node() -> None:
    assert texts(candidates(64, lookup("h100"))) == [
        "dp=64",
        "dp=8,tp=8",
        "dp=2,cp=4,tp=8",
        "dp=4,cp=2,tp=8",
        "dp=8,cp=2,tp=4",
        "dp=8,cp=4,tp=2",
    ]
    inside = candidates(8, lookup("h100"))  # one node
    assert inside == candidates(8, lookup("cpu"))


def test_nodes_may_be_smaller_than_the_hardware_has_them() -> None:
    small = in_nodes(lookup("h100"), 2)
    assert [level.devices for level in small.levels] == [2, 0]
    assert texts(candidates(8, small))[1:] == ["dp=4,tp=2", "dp=2,cp=2,tp=2"]
    pairs = in_nodes(lookup("k80"), 2)  # pairs, in nodes of 4
    assert [level.devices for level in pairs.levels] == [2, 2, 0]
    assert in_nodes(lookup("cpu"), 2) == lookup("cpu")
    assert in_nodes(lookup("h100"), None) == lookup("h100")
    mesh = small.on(Mesh.parse("dp=4,tp=2"))
    assert mesh.link("dp").bandwidth < mesh.link("tp").bandwidth


def test_orders_of_axes_with_one_link_are_alike() -> None:
    alike = distinct(candidates(8, lookup("cpu")), lookup("cpu"))
    assert texts(alike) == ["dp=8", "dp=2,tp=4", "dp=2,cp=2,tp=2"]
    pairs = candidates(8, in_nodes(lookup("h100"), 2))
    assert distinct(pairs, in_nodes(lookup("h100"), 2)) == pairs


# -- the choice, with searches that are made up --------------------------------------


@dataclass(frozen=True)
class Made:
    """Of a Found what the choice reads."""

    mesh: Mesh
    predicted: float
    bound: float
    rivals: float = float("inf")

    @property
    def is_proved(self) -> bool:
        return self.predicted - self.bound < 1e-9

    def with_bound(self, bound: float) -> Made:
        return replace(self, bound=bound)


@dataclass(frozen=True)
class Decided:
    search: Made
    notes: tuple[str, ...] = ("search: ...",)
    rivals: tuple[Decided, ...] = ()

    @property
    def mesh(self) -> Mesh:
        return self.search.mesh


@dataclass
class Searches:
    """Searches whose results are given: by mesh of a glance, then of a longer one."""

    results: dict[str, Any]
    # Of work that each is.
    seconds: float = 0.0
    asked: list[tuple[str, float, bool]] = field(default_factory=list)
    enough: list[float] = field(default_factory=list)

    def __call__(self, program: Any, request: Request, before: Any) -> Any:
        mesh, asked = request.mesh, request.mode
        assert isinstance(asked, SearchOptions)
        self.asked.append((str(mesh), asked.seconds, before is not None))
        self.enough.append(asked.enough)
        work_clock.did(self.seconds)
        found = self.results[str(mesh)]
        if isinstance(found, Exception):
            raise found
        if isinstance(found, list):
            found = found[before is not None]
        return Decided(Made(mesh, *found))

    def choose(self, seconds: float = 8.0) -> Any:
        meshes = tuple(Mesh.parse(text) for text in self.results)
        program = program_of(mlp(), batch(), mesh=str(meshes[0]))
        hints = {"0.0.weight": ("dp", None)}  # so that each of the meshes is tried
        asked = SearchOptions(machine(), seconds, ranked=False)
        request = Request(meshes[0], program.signature, hints, asked, meshes=meshes)
        with mock.patch.object(candidates_module, "decide_on", self):
            decision, _ = candidates_module.choose(program, request)
        return decision


def test_the_fastest_is_searched_longer_and_the_others_noted() -> None:
    searches = Searches({"dp=4": (3.0, 2.0), "dp=2,tp=2": [(2.0, 1.0), (1.5, 1.0)]})
    chosen = searches.choose()
    assert str(chosen.search.mesh) == "dp=2,tp=2" and chosen.search.predicted == 1.5
    assert chosen.search.rivals == 2.0
    assert searches.asked == [
        ("dp=4", 2.0, False),
        ("dp=2,tp=2", 2.0, False),
        ("dp=2,tp=2", pytest.approx(8.0, abs=1.0), True),
    ]
    assert chosen.notes == (
        "search: ...",
        "mesh dp=2,tp=2 chosen of 2; a step is estimated on dp=4 +100%",
    )


def test_all_searches_end_within_the_seconds() -> None:
    results = {"a=4": (4.0, 1.0), "b=4": (3.0, 1.0), "c=4": (2.0, 1.0)}
    searches = Searches(results, seconds=2.5)
    chosen = searches.choose(seconds=8.0)
    assert str(chosen.search.mesh) == "b=4" and "c=4 not tried" in chosen.notes[-1]
    # Of 8 two glances took 5, a third would have ended at 7.5.
    assert searches.asked[-1] == ("b=4", 3.0, True)
    late = Searches({"a=4": (4.0, 1.0), "b=4": (3.0, 1.0)}, seconds=9.0)
    assert str(late.choose(seconds=8.0).search.mesh) == "a=4"
    assert len(late.asked) == 1


def test_a_glance_ends_where_a_mesh_cannot_win() -> None:
    inf = float("inf")
    searches = Searches({"a=4": (2.0, 1.0), "b=4": (3.0, 3.0), "c=4": (1.0, 0.5)})
    searches.choose()
    assert searches.enough == [inf, 2.0, 2.0, 1.0]


def test_a_solver_ends_where_a_bound_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layered(4, 6, 6, limit=0.3, noise=0.5)
    with monkeypatch.context() as patch:
        patch.setattr(neighborhood_search, "improve", None)  # is not called
        solution = solve(problem, enough=30.0)
    assert solution.gap > 1e-4 and solution.bound >= 30.0

    given = []

    def watched(*args: Any, enough: float, **how: Any) -> Any:
        given.append(enough)
        return solve(*args, enough=enough, **how)

    monkeypatch.setattr(run_search, "solve", watched)
    program = program_of(mlp(), batch(), mesh="dp=4")
    launching = replace(machine(), launch=1e-3)
    asked = SearchOptions(launching, enough=5.0)
    launches = search(program, Mesh.parse("dp=4"), asked, {}).formulation.launches
    assert launches > 0 and given[0] == 5.0 - launches


@pytest.mark.parametrize("few", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_problem_that_does_not_fit_is_solved_again_within_the_seconds(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[tuple[bool, float]]()
    problem = layered(5, 3, 4, limit=0.25, noise=0.2)
    solution = solve(problem)

    def taking_all(problem: Problem, seconds: float, **how: Any) -> Solution:
        work_clock.did(seconds)
        given.append((problem.limit is None, seconds))
        return replace(solution, peak=float("inf"))

    monkeypatch.setattr(run_search, "solve", taking_all)
    monkeypatch.setattr(run_search, "_is_over_limit", lambda *_: False)
    monkeypatch.setattr(run_search, "_FEW", few)
    run_search._solved(problem, SearchOptions(machine(), 8.0), 0.0)
    assert [is_free for is_free, _ in given] == [True, False]
    seconds = [seconds for _, seconds in given]
    assert sum(seconds) == pytest.approx(8.0) and seconds[1] >= 2.0


def test_a_longer_search_that_finds_less_is_not_taken() -> None:
    chosen = Searches({"dp=4": [(3.0, 2.0), (4.0, 1.0)], "tp=4": (5.0, 5.0)}).choose()
    assert chosen.search.predicted == 3.0


def test_a_proved_plan_is_searched_once() -> None:
    searches = Searches({"dp=4": (3.0, 3.0), "tp=4": (4.0, 1.0)})
    assert searches.choose().search.rivals == 1.0
    assert len(searches.asked) == 2


def test_fewer_axes_win_where_plans_are_alike() -> None:
    searches = Searches({"dp=4": (1.0, 1.0), "dp=2,tp=2": (0.9999, 0.9999)})
    assert str(searches.choose().search.mesh) == "dp=4"
    searches.results["dp=2,tp=2"] = (0.99, 0.99)
    assert str(searches.choose().search.mesh) == "dp=2,tp=2"


def test_meshes_without_a_plan_are_left_out() -> None:
    searches = Searches({"dp=4": HintError("no axis tp"), "dp=2,tp=2": (1.0, 1.0)})
    chosen = searches.choose()
    assert str(chosen.search.mesh) == "dp=2,tp=2"
    assert "dp=4 no axis tp" in chosen.notes[-1]


def test_where_no_mesh_has_a_plan_the_error_is_raised() -> None:
    with pytest.raises(HintError, match="of tp=4"):
        Searches({"dp=4": HintError("of dp=4"), "tp=4": HintError("of tp=4")}).choose()
    late = Searches({"dp=4": PlanError("a"), "dp=2,tp=2": PlanError("too large")})
    with pytest.raises(PlanError, match="too large"):
        late.choose()
    assert late.asked[-1] == ("dp=2,tp=2", 8.0, False)


def test_what_time_does_not_reach_is_noted_and_could_be_better() -> None:
    searches = Searches({"dp=4": (3.0, 3.0), "tp=4": (1.0, 1.0)}, seconds=1.0)
    chosen = searches.choose(seconds=1e-9)
    assert str(chosen.search.mesh) == "dp=4" and chosen.search.rivals == 0.0
    assert "tp=4 not tried" in chosen.notes[-1]


# -- fxpar.plan ----------------------------------------------------------------------


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """Nodes of any size: ``machine()`` has pairs."""
    machine().save(tmp_path / "slow.json")
    monkeypatch.setenv("FXPAR_HARDWARE", str(tmp_path / "slow.json"))
    return machine()


def test_no_named_mesh_is_faster_than_the_chosen_one(pairs: Hardware) -> None:
    model, x = mlp(), batch()
    plan = fxpar.plan(model, x, mesh="auto:2x2", mode="search", grad=True)
    named = [
        fxpar.plan(model, x, mesh=mesh, mode="search", grad=True)
        for mesh in ("dp=4", "dp=2,tp=2")
    ]
    seconds = {str(p.mesh): p.predicted.seconds for p in named}
    assert plan.predicted.seconds <= min(seconds.values()) * (1 + 1e-9)
    assert plan.mesh.size == 4 and f"mesh {plan.mesh} chosen of 2" in str(plan)
    torch.testing.assert_close(plan.simulate(x), plan.reference(x))


def found_of(plan: Any) -> Any:
    return plan.result.decision.search


def test_a_hint_names_the_axes_that_there_must_be(pairs: Hardware) -> None:
    hints = {"0.0.weight": ("tp", None)}
    how = {"mesh": "auto:2x2", "mode": "search", "hints": hints}
    plan = fxpar.plan(mlp(), batch(), **how)
    assert str(plan.mesh) == "dp=2,tp=2"
    assert str(plan.spec("0.0.weight")) == "[tp, _]"
    with pytest.raises(HintError, match="no axis 'ep'"):
        fxpar.plan(
            mlp(), batch(), mesh="auto:4", mode="search", hints={"0.0.weight": ("ep",)}
        )


def test_nodes_decide_the_links(pairs: Hardware) -> None:
    wide = replace(pairs, levels=(Level(4, 1e10, 1e-8, 1e-7), pairs.levels[1]))
    assert in_nodes(pairs, 4) == wide
    how = {"mode": "search", "hints": {"0.0.weight": ("tp", None)}}
    links = [
        fxpar.plan(mlp(), batch(), mesh=mesh, **how).mesh.link("dp").bandwidth
        for mesh in ("auto:2x2", "auto:1x4")
    ]
    assert links == [1e9, 1e10]


def test_auto_asks_for_what_it_lacks(pairs: Hardware) -> None:
    with pytest.raises(MeshError, match=r"no process group\n.*auto:8"):
        fxpar.plan(mlp(), batch(), mesh="auto", mode="search")
    with pytest.raises(MeshError, match="FXPAR_PLAN is propagate\n.*search"):
        fxpar.plan(mlp(), batch(), mesh="auto:4", mode="propagate")


def test_a_saved_plan_brings_its_mesh(pairs: Hardware, tmp_path: Path) -> None:
    how = {"hints": {"0.0.weight": ("tp", None)}}
    plan = fxpar.plan(mlp(), batch(), mesh="auto:2x2", mode="search", **how)
    plan.save(tmp_path / "plan.json")
    path = str(tmp_path / "plan.json")
    again = fxpar.plan(mlp(), batch(), mesh="auto:4", mode=path)
    assert again.mesh == plan.mesh and again.hash == plan.hash
    with pytest.raises(PlanError, match="this run has dp=8"):
        fxpar.plan(mlp(), batch(), mesh="auto:8", mode=path)
